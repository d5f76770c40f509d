"""The power of the chip, on the whole system: what cannot be measured is said, what is measured is at /metrics."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor.host import power_program
from metal_supervisor.state.home import POWER_FILE
from tests.support.power import pids, printing
from tests.support.system import System, eventually, running

GAUGES = {f"llmkube_metal_agent_apple_power_{name}_watts" for name in ("combined", "gpu", "cpu", "ane")}


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    with running(tmp_path, "--apple-power-enabled", "true") as up:
        yield up


def told(system: System) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(system.fetch("/status")[1])["power"]
    return found


def gauges(system: System) -> dict[str, float]:
    lines = [line.split() for line in system.fetch("/metrics")[1].splitlines() if "apple_power" in line]
    return {name: float(value) for name, value, *more in lines if name != "#" and not more}


@pytest.mark.skipif(sys.platform == "darwin", reason="on a Mac something may measure")
def test_what_cannot_be_measured_is_said_and_what_is_measured_comes_and_goes(system: System, tmp_path: Path) -> None:
    eventually(lambda: "RUNNING" in system.supervisorctl("status", "power"), what="the program to come up")
    eventually(lambda: "make install-powermetrics-sudo" in told(system)["problem"], what="the problem at /status")
    assert gauges(system) == {}
    system.supervisorctl("stop", "power")
    assert not (system.state / POWER_FILE).exists(), "it takes its file with it"

    # The same program, with what measures replaced: it is the supervised one that is stopped.
    stopped = threading.Event()
    program = power_program.PowerProgram(system.state, printing(tmp_path))
    thread = threading.Thread(target=program.run, args=(stopped.is_set,))
    thread.start()
    try:
        found = eventually(lambda: gauges(system), what="the gauges")
        assert set(found) == GAUGES
        assert found["llmkube_metal_agent_apple_power_combined_watts"] == pytest.approx(0.122)
        assert (told(system)["source"], told(system)["problem"]) == ("powermetrics", "")
    finally:
        stopped.set()
        program.wake()
        thread.join(20)
    assert not thread.is_alive() and len(pids(tmp_path)) == 1
    eventually(lambda: not gauges(system), what="the gauges to be gone with it")
    assert told(system)["problem"]
    system.supervisorctl("start", "power")
    eventually(lambda: "make install-powermetrics-sudo" in told(system)["problem"], what="the program to be back")
