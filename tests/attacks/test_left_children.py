"""Children that outlive their engine, without its mark, under the real policy: they are found, or named.

A child keeps its engine's group and session, because both calls that change them are refused on Linux. On a Mac, and
for engines that are not confined, descendants are noted while the engine lives.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from metal_supervisor import launch
from metal_supervisor.confinement.policy import policy
from metal_supervisor.controller import leftovers
from metal_supervisor.controller.applier import Applier
from metal_supervisor.host import processes
from metal_supervisor.settings.loader import Settings
from metal_supervisor.sidecar import memory_sampler
from metal_supervisor.spec.terminal_text import printable
from metal_supervisor.state.directory import StateDir
from tests.attacks.test_confinement import HOSTILE, World
from tests.support.system import eventually

CHILD = HOSTILE.with_name("hostile_child.py")
PROGRAM = "default.own"
LEAD = """
import os, sys
engine = os.fork()
if not engine:
    os.setpgrp()
    os.execv(sys.argv[2], sys.argv[2:])
with open(sys.argv[1], "w") as file:
    file.write(str(engine))
os.waitpid(engine, 0)
"""
"""A supervisord with one program: it leads a session, and the program a group in it. A container's shell leads none."""
WAYS = ("wiped", "double_fork", "clone_parent", "a_thread_alone", "execve")


class Left:
    """An engine that has ended, and the child that it left."""

    def __init__(self, world: World, way: str, confined: bool) -> None:
        state = Path(world.facts["state"])
        self.state = state
        self.spec, self.world, self.scratch = f"{state}/specs/{PROGRAM}.json", world, Path(world.facts["scratch"])
        access = world.access()
        access = replace(access, libraries=(*access.libraries, str(CHILD)))
        argv = [sys.executable, "-I", str(CHILD), way, str(world.port), str(self.scratch)]
        spec = Path(self.spec)
        spec.write_text(
            json.dumps(
                {
                    "format": 1,
                    "program": PROGRAM,
                    "argv": argv,
                    "env": {},
                    "cwd": str(self.scratch),
                    "host": "127.0.0.1",
                    "port": world.port,
                    "supervisor_log": str(state / "supervisord.log"),
                    "confinement": confined and policy(access, sys.platform, str(world.base / "home")),
                }
            )
        )
        python = sys.executable
        pid_file = world.base / "engine.pid"
        lead = [python, "-c", LEAD, str(pid_file), python, "-I", "-S", launch.__file__, str(spec)]
        subprocess.run(lead, check=True, timeout=60, start_new_session=True)
        self.engine = int(pid_file.read_text())
        self.note = launch.read_note(f"{state}/runs/{PROGRAM}.json")
        self.pid = int((self.scratch / "pid").read_text())
        self.started = launch.start_time(self.pid)

    def answers(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.world.port)) == 0

    def sweep(self) -> list[int]:
        return launch.sweep_group(self.engine, self.spec, launch.session_of(self.note, str(self.state)))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    if sys.platform != "linux":
        pytest.skip("Seatbelt refuses fork; the noted tree is tried in tests/boundary/test_memory_held.py")
    found = World(tmp_path)
    yield found
    found.close()
    with contextlib.suppress(OSError, ValueError):
        pid = int((Path(found.facts["scratch"]) / "pid").read_text())
        launch.kill_engine(pid, launch.start_time(pid))


@pytest.mark.parametrize("way", WAYS)
def test_no_child_outlives_its_confined_engine(world: World, way: str) -> None:
    left = Left(world, way, confined=True)
    assert left.started and left.answers(), "it has outlived its engine"
    assert left.sweep() == [left.pid]
    eventually(lambda: not left.answers() and not launch.start_time(left.pid))


def test_nor_does_a_child_that_becomes_another_process_all_the_time(world: World) -> None:
    left = Left(world, "always_another", confined=True)
    assert left.answers() and left.sweep()
    eventually(lambda: not left.answers())


def test_a_process_of_the_same_group_that_is_not_confined_is_not_ended(world: World) -> None:
    left = Left(world, "wiped", confined=False)
    assert left.sweep() == [] and launch.start_time(left.pid)


def test_at_the_end_of_a_run_what_a_confined_engine_left_is_ended(world: World) -> None:
    left, said = Left(world, "wiped", confined=True), list[str]()
    assert leftovers.end_left_by_engines(StateDir(Path(world.facts["state"])), said.append) == []
    assert said == [f"{PROGRAM}: ended what pid {left.engine} had left behind: {left.pid}"]


def test_who_keeps_the_port_of_an_ended_engine_is_named(world: World, caplog: pytest.LogCaptureFixture) -> None:
    left, state = Left(world, "wiped", confined=False), StateDir(Path(world.facts["state"]))
    (held,) = leftovers.end_left_by_engines(state, lambda _: None)
    name = printable(psutil.Process(left.pid).name())
    assert held == f"port {world.port} is still held by {name} (pid {left.pid}); end it by its pid"
    snapshot: Any = SimpleNamespace(table={}, notes=state.run_notes())
    supervisord: Any = None
    Applier(state, supervisord, Settings()).sweep(snapshot)
    (line,) = caplog.records
    assert (line.message, vars(line)["why"]) == ("an ended engine's port is held", held)
    assert launch.start_time(left.pid) == left.started, "nothing proves that it is ours"


@pytest.mark.skipif(sys.platform != "linux", reason="a Mac's process cannot change its name")
def test_the_name_of_who_keeps_a_port_is_cleaned() -> None:
    code = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'\\x1b[31m\\xe2\\x80\\xaered'); print(); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert processes.described(psutil.Process(process.pid)) == f"?[31m?red (pid {process.pid})"
        process.kill()


ENGINE = """
import os, sys
middle = "import os, subprocess, sys; os.setsid(); subprocess.run([sys.executable, '-c', sys.argv[1]], env={})"
last = "import os, time; os.setsid(); print(os.getpid(), os.getppid(), flush=True); time.sleep(600)"
os.spawnve(os.P_WAIT, sys.executable, [sys.executable, "-c", middle, last], {})
os.read(0, 1)
"""


def test_a_descendant_that_was_noted_is_ended_though_it_left_the_group(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    sampler = memory_sampler.MemorySampler(lambda: None, runs)
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as engine:
        assert engine.stdout is not None
        last, middle = map(int, engine.stdout.readline().split())
        note = Path(launch.family_path(str(runs), engine.pid))
        try:
            sampler.measure_only({memory_sampler.SampledEngine(engine.pid, launch.start_time(engine.pid), 0)})
            sampler.turn()
            launch.kill_engine(middle, launch.start_time(middle))
            eventually(lambda: not launch.start_time(middle))
            eventually(lambda: (sampler.turn(), len(json.loads(note.read_text())) == 1)[1])  # once another turn is due
            assert launch.sweep_group(engine.pid, f"{tmp_path}/specs/{PROGRAM}.json") == [], "its engine lives"
            engine.kill()
            engine.wait(30)
            noted = json.loads(note.read_text())
            assert [each for each, _ in noted] == [last]
            note.write_text(json.dumps([[last, "of another process"], [os.getpid(), ""], [1, launch.start_time(1)]]))
            assert launch.sweep_group(engine.pid, f"{tmp_path}/specs/{PROGRAM}.json") == []
            note.write_text(json.dumps(noted))
            assert launch.sweep_group(engine.pid, f"{tmp_path}/specs/{PROGRAM}.json") == [last]
            eventually(lambda: not launch.start_time(last))
            assert not note.exists()
            note.touch()
            leftovers.forget_families(StateDir(tmp_path))
            assert not note.exists(), "of an engine that is gone"
        finally:
            launch.kill_engine(last, launch.start_time(last))
