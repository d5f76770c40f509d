"""This Mac is kept awake while a model is wanted on it, and not a moment longer than supervisord lives."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from metal_supervisor.spec.processes import State
from tests.support.downloads import MIB, at, downloading, from_web, padded
from tests.support.engines import gone
from tests.support.hub import Hub
from tests.support.own_command import typed
from tests.support.system import ISVC, System, eventually, kill, running, service

STAND_IN = """#!{python}
import json, os, select, sys
with open({log!r}, "a") as file:
    file.write(json.dumps([os.getpid(), sys.argv[1:]]) + "\\n")
watched = select.poll()
watched.register(os.pidfd_open(int(sys.argv[sys.argv.index("-w") + 1])), select.POLLIN)
watched.poll()
"""
"""A caffeinate as far as its end goes: it ends with the process that it is told."""

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="the stand-in watches a process as Linux has it")


def install(base: Path) -> Path:
    script = base / "caffeinate"
    script.write_text(STAND_IN.format(python=sys.executable, log=str(base / "caffeinate.log")))
    script.chmod(0o755)
    return script


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    base = tmp_path_factory.mktemp("caffeinate")
    with running(base, "--caffeinate", str(install(base))) as up:
        up.apply(up.tiny_model())
        yield up


@pytest.fixture
def system(installed: System) -> Iterator[System]:
    """One on which no model is wanted."""
    eventually(lambda: awake(installed) == 0, what="it to be let sleep")
    (installed.base / "caffeinate.log").unlink(missing_ok=True)
    yield installed
    gone(installed, *[each["metadata"]["name"] for each in installed.get(ISVC)["items"]])


def upgrade(system: System) -> None:
    code, _, err = typed("upgrade", "--state-dir", str(system.state))
    assert code == 0, err


def awake(system: System) -> int:
    """Pid of what keeps it awake, 0 if nothing does."""
    row = system.rpc.table()["caffeinate"]
    return row.pid if row.state in (State.STARTING, State.RUNNING) else 0


def runs(system: System) -> list[tuple[int, list[str]]]:
    """(pid, arguments) of each start in this test."""
    path = system.base / "caffeinate.log"
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def test_it_is_awake_while_a_model_is_wanted_and_not_without_one(system: System) -> None:
    assert awake(system) == 0 and runs(system) == []
    system.apply(service("one"))
    system.ready("one")
    pid = eventually(lambda: awake(system), what="it to be kept awake")
    eventually(lambda: runs(system) == [(pid, ["-i", "-s", "-w", str(system.supervisord_pid())])], what="its words")

    # A hand that lets it sleep holds until the controller starts anew.
    system.supervisorctl("stop", "caffeinate")
    system.apply(service("two"))
    system.ready("two")
    assert awake(system) == 0
    system.supervisorctl("restart", "controller")
    pid = eventually(lambda: awake(system), what="it to be kept awake again")

    system.delete("two")
    eventually(lambda: "default.two" not in system.rpc.table(), what="one of two to be gone")
    assert awake(system) == pid, "the other one is wanted"
    system.delete("one")
    eventually(lambda: awake(system) == 0, what="it to be let sleep")


def test_it_is_awake_while_its_first_model_comes_and_from_then_on(system: System) -> None:
    large = padded(system.base / "large.gguf", system.base / "tiny.gguf", 16 * MIB)
    with Hub({"d/r": {"m.gguf": large}}) as hub:
        hub.bytes_per_s = MIB
        system.apply(*from_web("slow", at(hub)))
        downloading(system, "slow")
        pid = eventually(lambda: awake(system), what="it to be kept awake")
        hub.bytes_per_s = 0.0
        system.ready("slow", 60)
    assert awake(system) == pid and len(runs(system)) == 1, "at no moment might it have slept"


def test_it_may_sleep_once_supervisord_was_killed(system: System) -> None:
    system.apply(service("one"))
    engine = system.ready("one")
    pid = eventually(lambda: awake(system), what="it to be kept awake")
    eventually(lambda: runs(system), what="it to watch")
    kill(system.supervisord_pid())
    eventually(lambda: not psutil.pid_exists(pid), what="it to end")
    assert psutil.pid_exists(engine), "the model goes on"
    system.stop()
    system.start()
    system.ready("one")
    eventually(lambda: awake(system), what="it to be kept awake by the next")


def test_an_upgrade_leaves_it_alone_and_brings_it_where_there_was_none(tmp_path: Path) -> None:
    with running(tmp_path, "--caffeinate", str(tmp_path / "caffeinate")) as system:
        system.apply(system.tiny_model(), service("one"))
        engine = system.ready("one")
        assert "caffeinate" not in system.rpc.table()
        install(tmp_path)
        upgrade(system)
        pid = eventually(lambda: awake(system), what="it to be kept awake")
        controller = system.own_pid("controller")
        upgrade(system)
        eventually(lambda: system.own_pid("controller") not in (0, controller), what="another controller")
        assert awake(system) == pid and len(runs(system)) == 1
        assert system.ready("one") == engine
