"""A clock that is set back, and one that jumps.

libfaketime stands between the system under test and its wall clock; the clock that only goes forward is the real
one, as it is on a Mac that sleeps.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from metal_supervisor.controller import on_demand
from metal_supervisor.gateway import access
from tests.support.engines import gone
from tests.support.faults import Figure, fault
from tests.support.gateway import Gateway, with_gateway
from tests.support.system import Stream, System, eventually, kill, service, slowed
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
        "LD_PRELOAD": str(library()),
        "FAKETIME_TIMESTAMP_FILE": str(base / "offset"),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in faked.items():
            patch.setenv(name, value)
        yield Clock(base / "offset")


@dataclass
class Timed:
    """A system with a gateway that lives by a clock of its own."""

    system: System
    gateway: Gateway
    clock: Clock
    headers: dict[str, str]
    """With a key for four requests a minute."""


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Timed]:
    base = tmp_path_factory.mktemp("clock")
    keys, token = base / "gateway.keys", access.new_key()
    keys.write_text(access.line_of(access.AccessKey("laptop", access.digest_of(token), per_minute=4)))
    flags = "--gateway-keys", str(keys), "--memory-fraction", room_for(2.5, base)
    with contextlib.ExitStack() as stack:
        with with_clock(base) as clock:
            gateway = stack.enter_context(with_gateway(base, *flags))
        up = gateway.system
        up.apply(up.tiny_model(), service("tiny", contextSize=32768))
        up.ready()
        yield Timed(up, gateway, clock, {"Authorization": f"Bearer {token}"})


def told_time(system: System) -> float:
    """The wall clock as the system sees it."""
    return float(json.loads(system.fetch("/status")[1])["at"])


@pytest.mark.parametrize(
    "jump_s",
    [
        pytest.param(
            -HOUR_S,
            id="back",
            marks=fault(
                "M108",
                "the clock is set back an hour under a streaming chat",
                happens="nothing is restarted; what crashes afterwards is restarted at once",
                sees="/healthz stays 200",
                bound="0 engine restarts, 0 bytes lost",
            ),
        ),
        pytest.param(
            8 * HOUR_S,
            id="ahead",
            marks=fault(
                "M107",
                "the clock jumps eight hours ahead, as after a sleep",
                happens="nothing is restarted; what crashes afterwards is restarted at once",
                sees="/healthz stays 200",
                bound="0 engine restarts, 0 bytes lost",
            ),
        ),
    ],
)
def test_a_clock_that_is_set_restarts_nothing_and_hides_nothing(timed: Timed, jump_s: int, figure: Figure) -> None:
    system, clock = timed.system, timed.clock
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
    "W22",
    "the clock is set eight hours ahead and then back while models on demand are used through the gateway",
    happens="an engine that answers is not unloaded; limits per minute hold; an idle model makes room at once",
    sees="nothing",
    bound="the stream is whole; every request answered",
)
def test_the_gateway_does_not_care_what_time_it_is(timed: Timed) -> None:
    """There is room for one of the two beside what is always there."""
    system, gateway, clock = timed.system, timed.gateway, timed.clock
    system.ready()
    demanded = [service(name, contextSize=32768) for name in ("one", "two")]
    for each in demanded:
        each["metadata"]["annotations"] = {"metal-supervisor.io/on-demand": "true"}
    system.apply(*demanded)
    for name in ("one", "two"):
        eventually(lambda name=name: system.condition("MetalReady", name).get("reason") == "Unloaded", 30, name)
    stream = Stream(system.port("one"), 600).flowing().last()
    engine = system.pid("one")
    try:
        with slowed(engine):
            clock.set(8 * HOUR_S)
            assert gateway.chat("one", timed.headers)[0] == 200
            assert stream.completed(), stream.error
        assert system.pid("one") == engine
        clock.set(-HOUR_S)
        began = time.monotonic()
        assert gateway.chat("two", timed.headers)[0] == 200
        assert time.monotonic() - began < on_demand.MIN_AWAKE_S / 2, "it was taken for one that is in use"
        assert [gateway.chat("two", timed.headers)[0] for _ in range(3)] == [200, 200, 429]
    finally:
        clock.set(0)
    gone(system, "one", "two")
