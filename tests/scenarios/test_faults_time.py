"""A clock that is set back, one that jumps, and a pid that was given to somebody else.

libfaketime stands between the system under test and its wall clock; the clock that only goes forward is the real
one, as it is on a Mac that sleeps.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from metal_supervisor import launch
from metal_supervisor.controller import on_demand
from metal_supervisor.gateway import access
from tests.support.faults import Figure, fault
from tests.support.gateway import with_gateway
from tests.support.system import Stream, System, eventually, kill, running, service, slowed
from tests.support.tight import room_for

HOUR_S = 3600


def library() -> Path:
    """libfaketime, as its wheel brings it."""
    found = importlib.util.find_spec("libfaketime")
    if found is None or not found.submodule_search_locations:
        pytest.skip("libfaketime is missing: its wheel is for Linux on x86-64; elsewhere, pip install libfaketime")
    places = sorted(Path(found.submodule_search_locations[0]).rglob("libfaketime.so.1"))
    assert places, "the wheel of libfaketime has no library"
    return places[0]


class Clock:
    """The wall clock of a system under test."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.set(0)

    def set(self, seconds: int) -> None:
        """Sets it so many seconds ahead of the real one; in one step, as it is read at any moment."""
        temporary = self._path.with_suffix(".new")
        temporary.write_text(f"{seconds:+d}\n")
        temporary.replace(self._path)


@contextlib.contextmanager
def with_clock(base: Path) -> Iterator[Clock]:
    """A clock for what is started meanwhile."""
    faked = {
        "LD_PRELOAD": str(library()), "FAKETIME_TIMESTAMP_FILE": str(base / "offset"), "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1", "NO_FAKE_STAT": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in faked.items():
            patch.setenv(name, value)
        yield Clock(base / "offset")


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[System, Clock]]:
    base = tmp_path_factory.mktemp("clock")
    with contextlib.ExitStack() as stack:
        with with_clock(base) as clock:
            up = stack.enter_context(running(base))
        up.apply(up.tiny_model(), service("tiny", contextSize=32768))
        up.ready()
        yield up, clock


def told_time(system: System) -> float:
    """The wall clock as the system sees it."""
    return float(json.loads(system.fetch("/status")[1])["at"])


@pytest.mark.parametrize(
    "jump_s",
    [
        pytest.param(
            -HOUR_S, id="back",
            marks=fault(
                "M108", "the clock is set back an hour under a streaming chat",
                happens="nothing is restarted; what crashes afterwards is restarted at once", sees="/healthz stays 200",
                bound="0 engine restarts, 0 bytes lost",
            ),
        ),
        pytest.param(
            8 * HOUR_S, id="ahead",
            marks=fault(
                "M107", "the clock jumps eight hours ahead, as after a sleep",
                happens="nothing is restarted; what crashes afterwards is restarted at once", sees="/healthz stays 200",
                bound="0 engine restarts, 0 bytes lost",
            ),
        ),
    ],
)
def test_a_clock_that_is_set_restarts_nothing_and_hides_nothing(
    timed: tuple[System, Clock], jump_s: int, figure: Figure
) -> None:
    system, clock = timed
    engine = system.ready()
    stream = system.stream()
    clock.set(jump_s)
    try:
        with contextlib.suppress(ConnectionResetError):  # of what comes in the very jump, waitress thinks it has idled
            system.health()
        assert system.health()[0] == 200
        name = "later" if jump_s > 0 else "earlier"
        with figure.timed("apply to Ready"):
            system.apply(service(name))
            newcomer = system.ready(name)
        assert abs(told_time(system) - time.time() - jump_s) < 600, "the system must really live in another hour"
        assert system.health()[0] == 200
        with figure.timed("crash to Ready"):
            kill(newcomer)
            eventually(lambda: system.pid(name) not in (0, newcomer), 30, "a new engine")
            system.ready(name)
        with figure.timed("delete to gone"):
            system.delete(name)
            eventually(lambda: f"default.{name}" not in system.rpc.table(), 30, "it to be gone")
        assert stream.completed(), stream.error
        figure.add("engine restarts", 0 if system.pid() == engine else 1, "")
        assert system.pid() == engine
    finally:
        clock.set(0)


@fault(
    "W22", "the clock is set eight hours ahead and then back while models on demand are used through the gateway",
    happens="an engine that answers is not unloaded; limits per minute hold; an idle model makes room at once",
    sees="nothing", bound="the stream is whole; every request answered",
)
def test_the_gateway_does_not_care_what_time_it_is(tmp_path: Path) -> None:
    keys = tmp_path / "gateway.keys"
    token = access.new_key()
    keys.write_text(access.line_of(access.AccessKey("laptop", access.digest_of(token), per_minute=4)))
    own = {"Authorization": f"Bearer {token}"}
    with contextlib.ExitStack() as stack:
        with with_clock(tmp_path) as clock:
            flags = "--gateway-keys", str(keys), "--memory-fraction", room_for(1.5, tmp_path)
            gateway = stack.enter_context(with_gateway(tmp_path, *flags))
        system = gateway.system
        demanded = [service(name, contextSize=32768) for name in ("one", "two")]
        for each in demanded:
            each["metadata"]["annotations"] = {"metal-supervisor.io/on-demand": "true"}
        system.apply(system.tiny_model(), *demanded)
        for name in ("one", "two"):
            eventually(lambda name=name: system.condition("MetalReady", name).get("reason") == "Unloaded", 30, name)
        stream = Stream(system.port("one"), 600).flowing().last()
        engine = system.pid("one")
        with slowed(engine):
            clock.set(8 * HOUR_S)
            assert gateway.chat("one", own)[0] == 200
            assert stream.completed(), stream.error
        assert system.pid("one") == engine
        clock.set(-HOUR_S)
        began = time.monotonic()
        assert gateway.chat("two", own)[0] == 200
        assert time.monotonic() - began < on_demand.MIN_AWAKE_S / 2, "it was taken for one that is in use"
        assert [gateway.chat("two", own)[0] for _ in range(3)] == [200, 200, 429]


@fault(
    "M106", "after a reboot, a note's pid belongs to another program",
    happens="the stranger is neither adopted nor ended; the engine is started", sees="nothing",
    bound="the stranger lives",
)
def test_a_pid_that_is_somebody_elses_by_now_is_left_alone(tmp_path: Path, figure: Figure) -> None:
    with running(tmp_path) as system:
        system.apply(system.tiny_model(), service())
        system.ready()
        assert system.stop() == 0
        stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        try:
            path = system.files.note_path("default.tiny")
            note = json.loads(path.read_text())
            path.write_text(json.dumps({**note, "pid": stranger.pid, "launcher_pid": stranger.pid}))
            with figure.timed("boot to Ready"):
                system.start()
                engine = system.ready()
            assert engine != stranger.pid
            assert stranger.poll() is None and launch.start_time(stranger.pid)
        finally:
            os.kill(stranger.pid, signal.SIGKILL)
            stranger.wait()
