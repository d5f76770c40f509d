"""A Mac whose process sees no Metal device: nothing starts there, what runs goes on, until there is one."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system import ROOT, System, eventually, running, service

REASON = "MetalUnavailable"


@contextlib.contextmanager
def controlled(system: System, says: Path) -> Iterator[None]:
    """The system's controller is one of a Mac whose Metal is what the file says."""
    system.supervisorctl("stop", "controller")
    with (system.state / "log" / "mac.log").open("ab") as log:
        command = [sys.executable, "-m", "tests.mac_controller", str(system.files.path), str(says)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        yield
        assert process.poll() is None, (system.state / "log" / "mac.log").read_text()[-3000:]
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running(tmp_path_factory.mktemp("no-metal")) as up:
        up.apply(up.tiny_model(), service("kept"))
        up.ready("kept")
        yield up


def test_nothing_starts_without_metal_what_runs_is_kept_and_it_begins_when_metal_is_there(
    system: System, tmp_path: Path
) -> None:
    engine, says = system.ready("kept"), tmp_path / "says"
    says.write_text("no")
    with controlled(system, says):
        stream = system.stream("kept", tokens=400)
        system.apply(service("late"))
        told = eventually(lambda: REASON in system.told("late") and system.told("late"), what="the refusal")
        assert "metal-supervisor doctor" in told and system.status("late")["phase"] == "Failed"
        assert "default.late" not in system.rpc.table()
        eventually(lambda: system.condition("Degraded", "kept").get("reason") == REASON, what="a word on what runs")
        assert system.pid("kept") == engine and system.slice_ready("kept")
        assert stream.completed(), stream.error

        says.write_text("yes")
        system.ready("late")
        eventually(lambda: not system.condition("Degraded", "kept"), what="the warning to go")
        assert system.pid("kept") == engine


def test_not_knowing_refuses_nothing(system: System, tmp_path: Path) -> None:
    (tmp_path / "says").write_text("nobody knows")
    with controlled(system, tmp_path / "says"):
        system.apply(service("unknown"))
        system.ready("unknown")


def test_an_engine_that_was_stopped_without_metal_is_refused_too(system: System, tmp_path: Path) -> None:
    says = tmp_path / "says"
    says.write_text("no")
    with controlled(system, says):
        eventually(lambda: system.condition("Degraded", "kept").get("reason") == REASON, what="it to be known")
        system.supervisorctl("stop", "default.kept")
        eventually(lambda: REASON in system.told("kept"), what="the refusal of what does not run any more")
        kept = system.rpc.table().get("default.kept")
        assert kept is None or not kept.pid
        says.write_text("yes")
        system.ready("kept")
