"""Time that this machine slept, computed from two of its clocks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NamedTuple

NOTABLE_S = 2.0


class Clocks(NamedTuple):
    """Two clocks, seconds, that differ by how long the machine slept and by a constant."""

    inclusive: Callable[[], float]
    """Runs on during sleep."""
    exclusive: Callable[[], float]
    """Stands still meanwhile."""


def system_clocks() -> Clocks:
    """The clocks of this machine; where it has no such pair, the same one twice, which never shows any sleep."""
    mac = sys.platform == "darwin"
    names = ("CLOCK_MONOTONIC_RAW", "CLOCK_UPTIME_RAW") if mac else ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC")
    if not all(hasattr(time, name) for name in names):
        return Clocks(time.monotonic, time.monotonic)
    inclusive, exclusive = (getattr(time, name) for name in names)
    return Clocks(lambda: time.clock_gettime(inclusive), lambda: time.clock_gettime(exclusive))


class Wake:
    """Counter of the time slept since it was last asked."""

    def __init__(self, clocks: Clocks | None = None) -> None:
        self._clocks = clocks or system_clocks()
        # Between two looks at clocks any time may pass. So what was before is taken for too much, and what is
        # now for too little: then a busy machine never looks like one that slept.
        awake_s = self._clocks.exclusive()
        self._asleep_s = self._clocks.inclusive() - awake_s

    def slept_s(self) -> float:
        """Seconds slept since the last sleep that was reported, or since the start; 0.0 up to two seconds."""
        total_s = self._clocks.inclusive()
        asleep_s = total_s - self._clocks.exclusive()
        slept_s = asleep_s - self._asleep_s
        if slept_s <= NOTABLE_S:
            return 0.0
        self._asleep_s = asleep_s
        return slept_s
