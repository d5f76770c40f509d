"""Looks at how short the machine is of memory, every few seconds, so that the controller need not.

A thread of its own: it samples, and asks engines whether they are busy once one of them may have to go. It decides
nothing; it wakes the controller when what it knows changes what may be done.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from metal_supervisor.host import local_status, machine
from metal_supervisor.host.left_engines import left_by_agent
from metal_supervisor.launch import MARK
from metal_supervisor.memory import machine_memory as host_memory
from metal_supervisor.memory.budget import Budget
from metal_supervisor.memory.pressure import Level, MemorySample, Pace, Watch, in_force, thresholds, watch
from metal_supervisor.runtimes import RUNTIMES, builds, probing
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.types import Key, Probe

ALERT_S = 2.0
BUDGET_EVERY_S = 60.0
BUSY_TIMEOUT_S = 0.5
log = logging.getLogger("controller")


@dataclass(frozen=True)
class Asked:
    """Where an engine is asked whether it is busy."""

    pid: int
    address: str
    port: int
    probe: Probe


def pace_of(settings: Settings) -> Pace:
    """How fast to be alarmed and how slow to be calmed: all in proportion to how long a recovery takes."""
    recover_s, interval_s = settings.memory_recovery, settings.memory_watchdog_interval
    return Pace(
        clear_s=recover_s / 5,
        gap_s=max(6 * interval_s, 1.0),
        stale_s=max(12 * interval_s, 2.0),
        settle_s=recover_s / 15,
        recover_s=recover_s,
        return_every_s=recover_s / 5,
        back_off_s=recover_s,
        back_off_limit_s=12 * recover_s,
    )


@dataclass(frozen=True)
class MemoryState:
    """What the watchdog knows, as one value that is replaced as a whole."""

    watch: Watch = field(default_factory=Watch)
    sample: MemorySample | None = None
    warning_bytes: int = 0
    """What must stay available."""
    busy: frozenset[Key] = frozenset()
    """Engines that answered somebody when they were last asked, which is while it is critical."""

    @property
    def young(self) -> bool:
        """Whether there were too few samples for a level to rise."""
        return self.watch.known_before is None


class Watchdog(threading.Thread):
    """Samples until the process ends."""

    def __init__(self, settings: Settings, wake: Callable[[], None]) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._settings, self._wake = settings, wake
        # The engine is asked what Metal wires in the thread, as it may take its time.
        self.budget = _beside_left(host_memory.host_budget(settings.memory_fraction or None, None))
        """What models may have; looked up again now and then, as an administrator may raise what Metal wires."""
        self._budget_at = 0.0
        log.info("memory budget", extra={"budget": self.budget.explain()})
        self.pace = pace_of(settings)
        self.seen = MemoryState()
        self.engines: Mapping[Key, Asked] = {}
        """Those that may have to go; set by the controller."""

    def level(self, seen: MemoryState) -> Level | None:
        """The level that may be acted on, None while nobody knows."""
        return in_force(seen.watch, time.monotonic(), self.pace)

    def run(self) -> None:
        interval_s = self._settings.memory_watchdog_interval
        while True:
            try:
                self._refresh_budget()
                if interval_s:
                    self.look()
            except Exception:
                log.exception("memory cannot be watched; it is tried again")
            calm = self.seen.watch.level is Level.NORMAL
            time.sleep((interval_s if calm else min(interval_s, ALERT_S)) or BUDGET_EVERY_S)

    def _refresh_budget(self) -> None:
        if self._budget_at and time.monotonic() - self._budget_at < BUDGET_EVERY_S:
            return
        found = budget_of(self._settings)
        self._budget_at = time.monotonic()
        if found != self.budget and found.total_bytes:  # without a total it is nobody's word
            self.budget = found
            log.info("memory budget", extra={"budget": found.explain()})
            self._wake()

    def look(self) -> None:
        """Takes one sample."""
        sample = host_memory.sample(Path(self._settings.procfs))
        settings, before = self._settings, self.seen.watch
        limits = thresholds(
            sample.total_bytes,
            self.budget.bytes,
            settings.memory_pressure_warning,
            settings.memory_pressure_critical,
        )
        now = watch(before, sample, limits, self.pace)
        critical = now.level is Level.CRITICAL
        busy = frozenset(key for key, each in self.engines.items() if _busy(each)) if critical else frozenset()
        self.seen = MemoryState(now, sample, limits.warning_bytes, busy)
        if now.level is not before.level:
            detail = {"level": now.level.value, "was": before.level.value, "why": now.why}
            (log.info if now.level is Level.NORMAL else log.warning)("memory pressure", extra=detail)
        if now.level is not before.level or critical:
            self._wake()


def budget_of(settings: Settings) -> Budget:
    """What models may have on this Mac. May take seconds: the engine is asked what Metal wires."""
    try:
        binary: Path | None = builds.find(settings, RUNTIMES["llama-server"].executables)[1]
    except machine.NoBinary:
        binary = None
    return _beside_left(host_memory.host_budget(settings.memory_fraction or None, binary))


def _beside_left(found: Budget) -> Budget:
    """The budget without what engines hold that LLMKube's agent left behind."""
    left = left_by_agent(machine.abandoned(), MARK)
    return found.less(sum(each.resident_bytes for each in left), "engines that LLMKube's agent left behind")


def _busy(asked: Asked) -> bool:
    """Whether an engine answers somebody; one that does not say so is judged by its connections."""
    told = probing.busy(asked.port, asked.probe, local_status.asked_at(asked.address), BUSY_TIMEOUT_S)
    return machine.has_clients(asked.pid, asked.port) if told is None else told
