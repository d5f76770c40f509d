"""Memory pressure watchdog: samples the machine every few seconds, in a thread of its own.

It asks engines whether they are busy while pressure is critical and one may be evicted. It decides nothing; it wakes
the controller when the level or the budget changes, and with every sample while the level is critical.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from metal_supervisor.host import machine
from metal_supervisor.memory import machine_memory as host_memory
from metal_supervisor.memory.budget import Budget
from metal_supervisor.memory.pressure import Level, MemorySample, Pace, Watch, in_force, thresholds, watch
from metal_supervisor.runtimes import RUNTIMES, builds
from metal_supervisor.runtimes.probing import Asked, are_busy
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.types import Key

ALERT_S = 2.0
BUDGET_EVERY_S = 60.0
"""Seconds between looks at the budget."""
log = logging.getLogger("controller")


def pace_of(settings: Settings) -> Pace:
    """Time constants for raising and clearing a level, from the settings' recovery time and sampling interval."""
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
    """The watchdog's knowledge, as one value that is replaced as a whole."""

    watch: Watch = field(default_factory=Watch)
    sample: MemorySample | None = None
    warning_bytes: int = 0
    """Available memory below which the pressure is at least a warning."""
    busy: Mapping[Key, bool] = field(default_factory=dict)
    """Engine -> True if it was serving a request when last asked; they are asked only while the level is critical."""

    @property
    def young(self) -> bool:
        """True while there are too few samples for a level to rise."""
        return self.watch.known_before is None


class Watchdog(threading.Thread):
    """Samples until the process ends."""

    def __init__(self, settings: Settings, wake: Callable[[], None]) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._settings, self._wake = settings, wake
        # Metal's limit is read from the engine in the thread, because that may be slow.
        self.budget = host_memory.host_budget(settings.memory_fraction or None, None)
        """Memory for models; refreshed now and then, because an administrator may raise Metal's wired limit."""
        self._budget_at = 0.0
        log.info("memory budget", extra={"budget": self.budget.explain()})
        self.pace = pace_of(settings)
        self.seen = MemoryState()
        self._engines: Callable[[], Mapping[Key, Asked]] = dict
        """Candidates for eviction."""

    def level(self, seen: MemoryState) -> Level | None:
        """The level that may be acted on, None while it is unknown."""
        return in_force(seen.watch, time.monotonic(), self.pace)

    def ask_about(self, engines: Callable[[], Mapping[Key, Asked]]) -> None:
        """Replace the engines that are asked whether they are busy while one may have to be evicted.

        `engines`: called by this thread, and only then.
        """
        self._engines = engines

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
        now = time.monotonic()
        if self._budget_at and now - self._budget_at < BUDGET_EVERY_S:
            return
        found, self._budget_at = budget_of(self._settings), now
        if found != self.budget and found.total_bytes:  # without a total it is not a measurement
            self.budget = found
            log.info("memory budget", extra={"budget": found.explain()})
            self._wake()

    def look(self) -> None:
        """Take one sample."""
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
        busy = are_busy(self._engines()) if critical else {}
        self.seen = MemoryState(now, sample, limits.warning_bytes, busy)
        if now.level is not before.level:
            detail = {"level": now.level.value, "was": before.level.value, "why": now.why}
            (log.info if now.level is Level.NORMAL else log.warning)("memory pressure", extra=detail)
        if now.level is not before.level or critical:
            self._wake()


def budget_of(settings: Settings) -> Budget:
    """Memory that models may use on this Mac. May take seconds: the engine is asked for Metal's wired limit."""
    try:
        binary: Path | None = builds.find(settings, RUNTIMES["llama-server"].executables)[1]
    except machine.NoBinary:
        binary = None
    return host_memory.host_budget(settings.memory_fraction or None, binary)
