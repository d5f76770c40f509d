"""A machine that runs out of memory: nothing starts, only who must go goes, and everything comes back.

A recording of a real squeeze (tests/data) is played to the real reader of Linux's pressure figures.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.engines import Stopwatch, either, events, is_gone
from tests.support.faults import Figure, fault
from tests.support.gateway import with_gateway
from tests.support.own_logs import logged
from tests.support.psi import Replay, Step
from tests.support.system import FAKE_FLAGS, System, api_faults, eventually
from tests.support.tight import LARGE, SMALL, Tight, lean, tight

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pressure figures are Linux's")

LOOK_S = 0.1
RECOVERY_S = 2.0
"""Of the watchdog, and of whoever left; a level falls after a fifth of that."""
SPEED = 20.0
USED_KIB = 200 * 1024
"""What the machine is said to use where our engines shall be the cause: tiny ones hold half of this."""


class Squeeze(Replay):
    """The recording, and the moments of it that a test waits at."""

    def __init__(self, procfs: Path) -> None:
        super().__init__(procfs)
        self.quiet, self.worst = self.steps[0], max(self.steps, key=full)
        rises = [step for step in self.steps if step.phase == "squeeze"]
        self.warning = next(step for step in rises if some(step) >= 10 > full(step))

    def blame(self, ours: bool) -> None:
        """Whether our engines are made out to be the cause, by a MemAvailable that is made up."""
        self._available_kib = (lambda step: step.meminfo["MemTotal"] - USED_KIB) if ours else None

    def between(self, first: Step, last: Step) -> None:
        """Plays the steps after one up to another."""
        self.play(SPEED, [step for step in self.steps if first.at_s < step.at_s <= last.at_s])


def some(step: Step) -> float:
    return float(step.pressure.split("avg10=")[1].split()[0])


def full(step: Step) -> float:
    return float(step.pressure.split("avg10=")[2].split()[0])


@pytest.fixture(scope="module")
def squeeze(tmp_path_factory: pytest.TempPathFactory) -> Squeeze:
    found = Squeeze(tmp_path_factory.mktemp("squeeze") / "proc")
    found.put(found.quiet)
    return found


@pytest.fixture(scope="module")
def machine(squeeze: Squeeze, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tight]:
    usual: dict[str, Any] = {
        "procfs": str(squeeze.procfs),
        "memory_watchdog_interval": LOOK_S,
        "memory_recovery": RECOVERY_S,
        "eviction_enabled": True,
    }
    with tight(tmp_path_factory.mktemp("pressure"), **usual) as up:
        yield up


@pytest.fixture(autouse=True)
def calm(machine: Tight, squeeze: Squeeze) -> Iterator[None]:
    squeeze.blame(ours=True)
    squeeze.put(squeeze.quiet)
    machine.level("Normal")
    yield
    squeeze.put(squeeze.quiet)
    machine.empty()
    machine.configure()


@contextlib.contextmanager
def api_down(system: System) -> Iterator[None]:
    """Every request to the Kubernetes API is answered with 503."""
    api_faults(system.kube.server, {"action": {"status": 503}})
    try:
        yield
    finally:
        api_faults(system.kube.server)


def untouched(machine: Tight, engines: dict[str, int], figure: Figure) -> None:
    """Nobody was stopped: the same processes serve."""
    assert machine.metric("llmkube_metal_agent_evictions_total") == 0
    assert {name: machine.system.pid(name) for name in engines} == engines
    assert all(machine.system.slice_ready(name) for name in engines)
    figure.add("evictions", 0, "")


# ── M 99: all of it ──────────────────────────────────────────────────────────────────────────────


@fault(
    "M99",
    "memory pressure goes from Normal to Warning and Critical, and back; --eviction-enabled is set",
    happens="at Warning nothing starts; at Critical the lowest priority goes, then the next; the last one stays; "
    "after Normal has lasted all are back by themselves, the most important first",
    sees="MemoryPressure Warning, Evicted, Normal; Pending, Evicted; an Event; metrics",
    bound="one at a time; --memory-recovery to the return",
)
def test_a_squeeze_stops_the_least_important_and_brings_all_back(
    machine: Tight, squeeze: Squeeze, figure: Figure
) -> None:
    system = machine.system
    system.apply(lean("low", priority="low"), lean("middle"), lean("high", priority="high"))
    engines = machine.ready("low", "middle", "high")
    squeeze.between(squeeze.quiet, squeeze.warning)
    machine.level("Warning")
    system.apply(lean("late", priority="critical"))
    text = machine.waits("late", "MemoryPressure", "(queue position 1)")
    assert text.startswith("the machine is short of memory (some tasks waited for memory 1"), text
    assert system.status("late")["schedulingStatus"] == "MemoryPressure" and not system.pid("late")
    for name in engines:
        machine.condition(name, "MemoryPressure", "True", "Warning")
    eventually(lambda: machine.metric("llmkube_metal_agent_memory_pressure_level") == 1, what="its metric")

    squeeze.between(squeeze.warning, squeeze.worst)
    text = machine.evicted("low")
    assert "default/low is stopped to free" in text and "its priority 1000 is below the 10000 of default/" in text, text
    machine.evicted("middle")
    eventually(lambda: is_gone(engines["low"]) and is_gone(engines["middle"]), 20, "both engines to end")
    machine.skips("floor")
    status = system.status("low")
    assert (status["phase"], status["schedulingStatus"]) == ("Pending", "Evicted")
    assert events(system, "low")["Evicted"] == system.condition("MetalReady", "low")["message"]
    eventually(lambda: machine.metric("llmkube_metal_agent_evictions_total") == 2, what="its metric")
    gauge = 'metal_supervisor_service_evicted{name="low",namespace="default"}'
    eventually(lambda: machine.metric(gauge) == 1, what="its metric")
    eventually(lambda: machine.metric("llmkube_metal_agent_memory_pressure_level") == 2, what="its metric")
    assert system.pid("high") == engines["high"] and "hello world" in system.chat("high")
    evicted = [each["service"] for each in logged(system.files.log_path("controller"), "evicted")]
    assert evicted.index("default/low") < evicted.index("default/middle")

    squeeze.between(squeeze.worst, squeeze.steps[-1])
    machine.level("Normal")
    watch = Stopwatch(figure)
    watch.when("Normal to start of what waited", lambda: eventually(lambda: system.pid("late"), 20, "late to start"))
    watch.when("Normal to the first one back", lambda: eventually(lambda: system.pid("middle"), 20, "middle"))
    watch.when("Normal to all back", lambda: machine.ready("low", "middle", "late"))
    back = {each["service"]: each["ts"] for each in logged(system.files.log_path("controller"), "returns")}
    begun = psutil.Process(system.pid("middle")).create_time()
    assert begun < datetime.fromisoformat(back["default/low"].replace("Z", "+00:00")).timestamp(), "one at a time"
    for name in engines:
        machine.condition(name, "MemoryPressure", "False", "Normal")
    assert system.pid("high") == engines["high"]
    eventually(lambda: machine.metric("llmkube_metal_agent_memory_pressure_level") == 0, what="its metric")


@fault(
    "W20",
    "other programs take the memory, before a request for a model on demand and while its engine loads",
    happens="its request waits; an engine that loads is ended, and started again once there is memory",
    sees="an answer, later; MetalReady Waking, with MemoryPressure or Evicted in its message",
    bound="200",
)
def test_a_wake_waits_until_there_is_memory(squeeze: Squeeze, tmp_path: Path) -> None:
    flags = (
        "--procfs",
        str(squeeze.procfs),
        "--memory-watchdog-interval",
        str(LOOK_S),
        "--eviction-enabled",
        "--memory-recovery",
        str(RECOVERY_S),
        "--idle-ttl",
        "2",
        f"--allow-extra-args={','.join(FAKE_FLAGS)}",
    )
    with (
        with_gateway(tmp_path, *flags, engine=either(tmp_path)) as gateway,
        ThreadPoolExecutor() as clients,
    ):
        system = gateway.system
        slow = lean("slow", SMALL, "--fake-load-s", "3", priority="low")
        slow["metadata"]["annotations"] = {"metal-supervisor.io/on-demand": "true"}
        system.apply(system.tiny_model(), lean("always"), slow)
        system.ready("always")

        def said(text: str) -> None:
            eventually(lambda: text in str(system.condition("MetalReady", "slow")), 30, f"{text}; {system.said()}")

        for loading in (True, False):
            said("Unloaded")
            if not loading:
                squeeze.put(squeeze.worst)
                eventually(lambda: pressure(system) == "Critical", 20, "the level to be Critical")
            asked = clients.submit(gateway.chat, "slow", timeout_s=60)
            if loading:
                engine = eventually(lambda: system.pid("slow"), 20, "its engine to load")
                squeeze.put(squeeze.worst)
                eventually(lambda engine=engine: is_gone(engine), 30, "its engine to be ended")
            said("it was stopped because" if loading else "the machine is short of memory")
            said("Waking")
            assert not asked.done()
            squeeze.put(squeeze.quiet)
            assert asked.result()[0] == 200


def pressure(system: System) -> str:
    return str((json.loads(system.fetch("/status")[1])["memory"] or {}).get("pressure"))


# ── M 100 – 103: who stays ───────────────────────────────────────────────────────────────────────


@fault(
    "M100",
    "the machine runs out of memory because of other programs",
    happens="no engine is evicted; nothing starts",
    sees="MemoryPressure Critical; llmkube_metal_agent_evictions_skipped_total{reason=below_guard}",
    bound="0 evictions",
)
def test_whoever_is_not_the_cause_is_not_stopped(machine: Tight, squeeze: Squeeze, figure: Figure) -> None:
    squeeze.blame(ours=False)  # as it was recorded: another program was squeezed, and our engines hold a little
    machine.system.apply(lean("one"), lean("two"))
    engines = machine.ready("one", "two")
    machine.kill_controller()  # the counters of the next one begin at nothing
    squeeze.put(squeeze.worst)
    assert machine.skips("below_guard") == 1
    machine.condition("one", "MemoryPressure", "True", "Critical")
    untouched(machine, engines, figure)


@fault(
    "M101",
    "memory is critical, and one service runs",
    happens="it is not evicted",
    sees="MemoryPressure Critical; evictions_skipped_total{reason=floor}",
    bound="0 evictions",
)
def test_the_only_service_stays(machine: Tight, squeeze: Squeeze, figure: Figure) -> None:
    machine.system.apply(lean("only", LARGE))
    engines = machine.ready("only")
    machine.kill_controller()
    squeeze.put(squeeze.worst)
    assert machine.skips("floor") == 1
    untouched(machine, engines, figure)


@fault(
    "M102",
    "memory is critical, and all services are protected",
    happens="no engine is evicted",
    sees="MemoryPressure Critical; evictions_skipped_total{reason=all_protected}",
    bound="0 evictions",
)
def test_whoever_is_protected_stays(machine: Tight, squeeze: Squeeze, figure: Figure) -> None:
    machine.system.apply(*(lean(name, evictionProtection=True) for name in ("one", "two")))
    engines = machine.ready("one", "two")
    machine.kill_controller()
    squeeze.put(squeeze.worst)
    assert machine.skips("all_protected") == 1
    untouched(machine, engines, figure)


@fault(
    "M102b",
    "memory is critical, and --eviction-enabled is not set",
    happens="no engine is evicted; nothing starts",
    sees="MemoryPressure Critical; evictions_skipped_total{reason=disabled}",
    bound="0 evictions",
)
def test_without_leave_nobody_is_stopped(machine: Tight, squeeze: Squeeze, figure: Figure) -> None:
    machine.system.apply(lean("one"), lean("two"))
    engines = machine.ready("one", "two")
    machine.configure(eviction_enabled=False)
    squeeze.put(squeeze.worst)
    assert machine.skips("disabled") == 1
    machine.system.apply(lean("late"))
    machine.waits("late", "MemoryPressure")
    untouched(machine, engines, figure)


@fault(
    "M103",
    "memory is critical, and of three services of one priority the largest streams a chat",
    happens="the idle ones go",
    sees="the busy one serves on; Evicted says who was busy",
    bound="0 bytes lost",
)
def test_a_busy_service_stays_while_idle_ones_can_go(machine: Tight, squeeze: Squeeze, figure: Figure) -> None:
    system = machine.system
    slow = ("--fake-tokens", "100000", "--fake-tokens-per-s", "25")  # a chat of a known length
    system.apply(lean("busy", LARGE, *slow), lean("large", 4096), lean("small", SMALL))
    engines = machine.ready("busy", "large", "small")
    stream = system.stream("busy", tokens=100, slow=False).last()
    squeeze.put(squeeze.worst)
    text = machine.evicted("large")
    assert "default/large is stopped to free" in text, text
    assert "it is idle and default/busy is busy" in machine.evicted("small")
    squeeze.put(squeeze.quiet)
    whole = stream.completed()
    figure.add("answers cut", int(not whole), "")
    assert whole, stream.error
    assert system.pid("busy") == engines["busy"]


# ── M 104: to and fro ────────────────────────────────────────────────────────────────────────────


@fault(
    "M104",
    "pressure comes and goes three times a second",
    happens="the level rises once and stays until it has been quiet for a while",
    sees="MemoryPressure Critical",
    bound="1 rise, 1 stop; nobody returns in between",
)
def test_a_level_that_flaps_is_held(machine: Tight, squeeze: Squeeze, figure: Figure) -> None:
    system = machine.system
    machine.configure(memory_recovery=5)  # a level falls after a second: longer than a slow watchdog looks away
    system.apply(lean("one", priority="low"), lean("two"))
    machine.ready("one", "two")
    log = system.files.log_path("controller")
    before = log.stat().st_size
    squeeze.play(1.0, [replace(squeeze.worst if index % 2 else squeeze.quiet, at_s=index / 6) for index in range(19)])

    def levels() -> list[str]:
        return [each["level_"] for each in logged(log, "memory pressure", before)]

    eventually(lambda: levels()[-1:] == ["Normal"], 20, "calm")
    figure.add("changes of level", len(levels()), "")
    assert len(levels()) <= 3, levels()
    said = [each["msg"] for each in logged(log, since_bytes=before)]
    assert said.count("evicted") <= 1
    calm = len(said) - said[::-1].index("memory pressure")
    assert "returns" not in said[:calm]


# ── together with other faults ───────────────────────────────────────────────────────────────────


@fault(
    "M99b",
    "the controller is killed with -9 while a service is evicted",
    happens="it stays away, and still returns",
    sees="Evicted all the while",
    bound="5 s to the stop; as above to the return",
)
def test_an_eviction_outlives_the_controller(machine: Tight, squeeze: Squeeze, figure: Figure) -> None:
    system = machine.system
    system.apply(lean("one", priority="low"), lean("two"))
    engines = machine.ready("one", "two")
    squeeze.put(squeeze.worst)
    watch = Stopwatch(figure)
    watch.when("critical to gone", lambda: eventually(lambda: is_gone(engines["one"]), 5, "one to end"))
    text = machine.evicted("one")
    machine.kill_controller()
    machine.level("Critical")
    # A new controller has to ask the engine's program first, and says so.
    eventually(lambda: machine.evicted("one") == text, what="the same reason")
    assert not system.pid("one")
    gauge = 'metal_supervisor_service_evicted{name="one",namespace="default"}'
    eventually(lambda: machine.metric(gauge) == 1, what="its metric")
    squeeze.put(squeeze.quiet)
    machine.level("Normal")
    started = time.monotonic()
    machine.ready("one")
    figure.add("Normal to Ready", time.monotonic() - started)
    assert system.pid("two") == engines["two"]


@fault(
    "M99c",
    "the Kubernetes API is down while memory is critical",
    happens="who must go goes all the same",
    sees="/status and metrics at once; conditions when the API is back",
    bound="10 s to the stop",
)
def test_an_api_that_is_down_keeps_nobody_from_being_stopped(machine: Tight, squeeze: Squeeze, figure: Figure) -> None:
    system = machine.system
    system.apply(lean("one", priority="low"), lean("two"))
    engines = machine.ready("one", "two")
    with api_down(system):
        squeeze.put(squeeze.worst)
        watch = Stopwatch(figure)
        watch.when("critical to gone", lambda: eventually(lambda: is_gone(engines["one"]), 10, "one to end"))
        eventually(lambda: system.observe("one")["reason"] == "Evicted", 20, "/status to say so")
    machine.evicted("one")
    squeeze.put(squeeze.quiet)
    machine.ready("one")
    assert system.pid("two") == engines["two"]
