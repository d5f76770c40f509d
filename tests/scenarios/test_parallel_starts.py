"""Many services in one `kubectl apply`: so many load at a time, and the first ones serve while the last ones wait."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.engines import beside_a_bystander, gone, stand_in, tell, untouched
from tests.support.system import System, eventually, kill

AT_A_TIME = 2
NAMES = "a", "b", "c", "d", "e"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with beside_a_bystander(tmp_path_factory.mktemp("turns"), "--parallel-starts", str(AT_A_TIME)) as up:
        yield up


def up(system: System) -> set[str]:
    """The services with a process."""
    return {name for name in NAMES if system.pid(name)}


def why(system: System, name: str) -> str:
    """What `explain` says the controller does with it."""
    command = [sys.executable, "-m", "metal_supervisor", "explain", f"default/{name}", "--state-dir", str(system.state)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_two_load_at_a_time_and_each_that_serves_gives_its_place_to_the_next(system: System) -> None:
    slow = [stand_in(name, never_ready=1) for name in NAMES]
    slow[-1]["spec"]["priority"] = "high"
    with untouched(system):
        system.apply(*slow)
        eventually(lambda: len(up(system)) == AT_A_TIME, 20, "two processes")
        first = up(system)
        waits = min(set(NAMES) - first)
        eventually(lambda: "its turn to start: 2 engines load at a time" in why(system, waits), 20, "explain")
        condition = eventually(lambda: system.condition("MetalReady", waits), 20, "the condition")
        assert condition["reason"] == "Loading" and "about to start" in condition["message"]

        before = system.own_pid("controller")
        kill(before)
        eventually(lambda: system.own_pid("controller") not in (0, before), 20, "another controller")
        seen = [up(system)]
        while len(seen[-1]) < len(NAMES):
            one = min(name for name in seen[-1] if not system.slice_ready(name))
            tell(system, one, never_ready=0)
            system.ready(one)
            seen.append(eventually(lambda: (now := up(system)) > seen[-1] and now, 20, "the next one"))
            assert len(seen[-1]) == len(seen[-2]) + 1, "one place, one start"
        assert [len(each) for each in seen] == [2, 3, 4, 5]
        assert "e" in seen[1], "its priority is higher: it is among the first, or the next"
        for name in NAMES:
            tell(system, name, never_ready=0)
            system.ready(name)
        gone(system, *NAMES)
