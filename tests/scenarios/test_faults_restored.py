"""The API's data goes back to an older copy, or to nothing, while engines run."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faults import Figure, fault
from tests.support.system import ISVC, System, eventually, running, service

OLDER = "older"
"""Directory below the test's own that keeps the copy of the API's file."""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running(tmp_path_factory.mktemp("restored")) as up:
        up.apply(up.tiny_model(), service("kept"), service("resurrected"))
        up.ready("kept"), up.ready("resurrected")
        yield up


def files(system: System) -> list[Path]:
    """The API's data file, with its log."""
    return list(system.state.glob("apiserver.db*"))


def copy(system: System) -> Path:
    """Copies the API's file as docs/operations.md shows it."""
    older = system.base / OLDER
    older.mkdir(exist_ok=True)
    system.supervisorctl("stop", "apiserver")
    for file in files(system):
        shutil.copy2(file, older)
    start(system)
    return older


def start(system: System) -> None:
    system.supervisorctl("start", "apiserver")
    eventually(lambda: system.get("/version"), what="the API to answer")


def put_back(system: System, older: Path) -> None:
    """Puts the copy back the same way."""
    system.supervisorctl("stop", "apiserver")
    for file in files(system):
        file.unlink()
    for file in older.iterdir():
        shutil.copy2(file, system.state)
    start(system)


def warning(system: System, name: str) -> str:
    """Reason of the warning in a service's record."""
    record = json.loads((system.state / "records" / f"default.{name}.json").read_text("utf-8"))
    return str((record.get("warning") or [""])[0])


@fault(
    "K151",
    "the embedded API's file is replaced by an older copy",
    happens="engines of services that the copy lacks keep running for ten minutes; the copy is followed at once",
    sees="MissingAfterRestore in `explain`; applying the manifest again keeps the engine",
    bound="no stream is cut; a new service runs within 10 s",
)
def test_the_api_goes_back_under_streams(system: System, figure: Figure) -> None:
    older = copy(system)
    system.apply(service("newer"))
    pids = {name: system.ready(name) for name in ("kept", "newer")}
    first_uid = system.get(f"{ISVC}/newer")["metadata"]["uid"]
    system.delete("resurrected")
    eventually(lambda: system.pid("resurrected") == 0, what="the end of its engine")
    streams = [system.stream(name).last() for name in pids]
    began = time.monotonic()
    put_back(system, older)
    system.apply(service("fresh"))
    system.ready("fresh")
    figure.add("a new service runs", time.monotonic() - began)
    system.ready("resurrected")
    eventually(lambda: warning(system, "newer") == "MissingAfterRestore", what="the warning")
    assert system.maybe(f"{ISVC}/newer") is None

    system.apply(service("newer"))
    system.ready("newer")
    eventually(lambda: warning(system, "newer") == "", what="the end of the warning")
    assert system.get(f"{ISVC}/newer")["metadata"]["uid"] != first_uid
    assert {name: system.pid(name) for name in pids} == pids
    assert all(each.completed() for each in streams), [each.error for each in streams]
    figure.add("streams cut", 0, "")
    assert system.health()[0] == 200

    system.delete("newer")
    eventually(lambda: system.pid("newer") == 0, what="the end of its engine: deletions count at once")


@fault(
    "K152",
    "the embedded API's file is emptied",
    happens="the API refuses to serve it, and engines keep running; with the copy put back it serves again",
    sees="apiserver.log names the records, and how to begin without services",
    bound="no engine ends",
)
def test_an_emptied_file_stops_no_engine(system: System, figure: Figure) -> None:
    older = copy(system)
    pid = system.ready("kept")
    stream = system.stream("kept").last()
    system.supervisorctl("stop", "apiserver")
    for file in files(system):
        file.unlink()
    system.supervisorctl("start", "apiserver")
    log = system.state / "log" / "apiserver.log"
    eventually(lambda: "has no objects" in log.read_text("utf-8"), what="the refusal")
    assert "delete that directory to begin without services" in log.read_text("utf-8")
    assert stream.completed(), stream.error
    assert system.pid("kept") == pid
    began = time.monotonic()
    put_back(system, older)
    figure.add("served again", time.monotonic() - began)
    system.ready("kept")
    assert system.pid("kept") == pid
