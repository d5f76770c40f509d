"""What other users of this machine can see of a running system: nothing, whatever umask it was started with."""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.engines import either, gone, stand_in
from tests.support.faults import Figure, fault
from tests.support.system import System, eventually, running, service

WRITTEN = "Written-In-The-Spec-4711"
KEPT = "Kept-In-A-Secret-0815"
SECRETS = "/api/v1/namespaces/default/secrets"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    base = tmp_path_factory.mktemp("private")
    before = os.umask(0)
    try:
        with running(base, "--allow-env", "OWN_KEY,OTHER_KEY", engine=either(base)) as up:
            os.umask(before)
            up.apply(up.tiny_model(), service())
            up.ready()
            yield up
    finally:
        os.umask(before)


def open_to_others(top: Path) -> list[str]:
    """What of a directory its group or others may do anything with; links, which say nothing, aside."""
    found = []
    for path in (top, *top.rglob("*")):
        try:
            status = path.lstat()
        except FileNotFoundError:  # a temporary file that was renamed meanwhile
            continue
        if not stat.S_ISLNK(status.st_mode) and status.st_mode & 0o077:
            found.append(f"{path.relative_to(top)} {stat.filemode(status.st_mode)}")
    return found


@fault(
    "G127",
    "the system is started with a umask of 0, serves, and loses an engine",
    happens="state directory, sockets, logs and records are its user's alone",
    sees="nothing",
    bound="0 files, directories or sockets that group or others may use",
)
def test_nothing_is_open_to_other_users(system: System, figure: Figure) -> None:
    system.apply(stand_in("brief", exit_after_s=0.2))
    eventually(lambda: system.condition("MetalReady", "brief").get("reason") == "CrashLoopBackOff", 60, "a crash")
    paths = list(system.state.rglob("*"))
    assert any(path.is_socket() for path in paths) and any(path.is_file() for path in paths)
    found = open_to_others(system.state)
    assert found == []
    figure.add("open to others", len(found), "")
    figure.add("looked at", len(list(system.state.rglob("*"))), "")
    gone(system, "brief")


def keeping(system: System, word: str) -> list[str]:
    """The files in which a word stands, but those of the embedded API, where the Secret itself is kept."""
    marks = word.encode(), base64.b64encode(word.encode())
    found = []
    for path in system.state.rglob("*"):
        top = path.relative_to(system.state).parts[0]
        if path.is_file() and not path.is_symlink() and not top.startswith("apiserver"):
            try:
                content = path.read_bytes()
            except FileNotFoundError:  # a temporary file that was renamed meanwhile
                continue
            found += [str(path.relative_to(system.state))] if any(mark in content for mark in marks) else []
    return found


@fault(
    "G129",
    "an engine needs values that nobody else may see: one in spec.env, one in a Secret",
    happens="they go through two files of the user alone and the engine's environment, and go with the service",
    sees="nothing",
    bound="2 files, 0600 (spec, note of the start); 0 inis, argvs, logs, pages, answers; 0 files once it is deleted",
)
def test_values_for_an_engine_stand_in_its_spec_and_its_note_and_in_no_ini(system: System, figure: Figure) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"key": KEPT}}
    system.kube.request("POST", SECRETS, None, secret)
    env = [
        {"name": "OWN_KEY", "value": WRITTEN},
        {"name": "OTHER_KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "key"}}},
    ]
    system.apply(service("keyed", env=env))
    engine = psutil.Process(system.ready("keyed"))
    assert (engine.environ()["OWN_KEY"], engine.environ()["OTHER_KEY"]) == (WRITTEN, KEPT)
    for word in (WRITTEN, KEPT):
        found = keeping(system, word)
        assert sorted(found) == ["runs/default.keyed.json", "specs/default.keyed.json"]
        assert {stat.S_IMODE((system.state / path).stat().st_mode) for path in found} == {0o600}
        assert not any(word in system.fetch(page)[1] for page in ("/", "/status", "/metrics"))
        assert not any(word in " ".join(command) for command in system.commands().values())
        assert word not in system.said() and word not in system.supervisorctl("models")
        figure.add("files", len(found), "")
    gone(system, "keyed")
    for word in (WRITTEN, KEPT):
        eventually(lambda word=word: not keeping(system, word), 30, "the file to go with the service")
    figure.add("files once deleted", 0, "")
