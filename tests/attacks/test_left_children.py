"""Children that outlive their engine, without its mark, under the real policy: they are found, or named.

A child keeps its engine's group and session, because both calls that change them are refused on Linux. On a Mac, and
for engines that are not confined, descendants are noted while the engine lives.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from metal_supervisor import launch
from metal_supervisor.confinement.policy import policy
from metal_supervisor.host import processes
from tests.attacks.test_confinement import HOSTILE, World
from tests.support.system import eventually

CHILD = HOSTILE.with_name("hostile_child.py")
PROGRAM = "default.own"
LEAD = "import os, sys; os.setpgrp(); os.execv(sys.argv[1], sys.argv[1:])"
"""As supervisord starts a program: as the leader of a group in its own session."""
WAYS = ("wiped", "double_fork", "clone_parent", "a_thread_alone", "execve")


class Left:
    """An engine that has ended, and the child that it left."""

    def __init__(self, world: World, way: str, confined: bool) -> None:
        state = Path(world.facts["state"])
        self.specs, self.world, self.scratch = f"{state}/specs/{PROGRAM}", world, Path(world.facts["scratch"])
        access = world.access()
        access = replace(access, libraries=(*access.libraries, str(CHILD)))
        argv = [sys.executable, "-I", str(CHILD), way, str(world.port), str(self.scratch)]
        spec = Path(f"{self.specs}.0123456789ab.json")
        spec.write_text(json.dumps({
            "format": 1, "program": PROGRAM, "argv": argv, "env": {}, "cwd": str(self.scratch), "host": "127.0.0.1",
            "port": world.port, "supervisor_log": str(state / "supervisord.log"),
            "confinement": confined and policy(access, sys.platform, str(world.base / "home")),
        }))  # fmt: skip
        python = sys.executable
        engine = subprocess.Popen([python, "-c", LEAD, python, "-I", "-S", launch.__file__, str(spec)])
        engine.wait(60)
        self.engine = engine.pid
        self.note = launch.read_note(f"{state}/runs/{PROGRAM}.json")
        self.pid = int((self.scratch / "pid").read_text())
        self.started = launch.start_time(self.pid)

    def answers(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.world.port)) == 0

    def sweep(self) -> list[int]:
        return launch.sweep_group(self.engine, self.specs, launch.session_of(self.note))


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


def test_who_keeps_the_port_of_an_ended_engine_is_named(world: World) -> None:
    left = Left(world, "wiped", confined=False)
    assert f"(pid {left.pid})" in processes.port_holder(world.port)
