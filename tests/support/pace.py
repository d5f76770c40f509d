"""Bounds that hold on a slow or a busy machine: seconds scale with the time that one fixed piece of work takes there.

The piece starts an interpreter and computes, as what tests wait for does. It is measured when the tests start, and
again when a bound has passed, because load comes and goes.
"""

from __future__ import annotations

import subprocess
import sys
import time

WORK = "-I", "-S", "-c", "sum(i * i for i in range(3_000_000))"
IDLE_S = 0.2
"""Duration on the two cores that the bounds in tests were written for, with nothing else running."""
MOST = 8.0
"""A test must end although the machine has stopped; beyond this a bound stays."""
FRESH_S = 5.0
"""Age at which a measurement no longer tells of the load."""


class Pace:
    """Slowness of this machine: at least 1, which is the pace the bounds were written for."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._last, self._at = 1.0, float("-inf")

    def slowness(self) -> float:
        """The higher of the first measurement and the latest; measures if that one is old."""
        if time.monotonic() - self._at > FRESH_S:
            self._last = min(MOST, max(1.0, work_s() / IDLE_S))
            self._at = time.monotonic()
            self._first = self._last if self._first is None else self._first
        return max(self._first or 1.0, self._last)


def work_s() -> float:
    """Seconds that the piece of work takes now."""
    start = time.monotonic()
    subprocess.run([sys.executable, *WORK], check=True)
    return time.monotonic() - start


_pace = Pace()


def slowness() -> float:
    """Slowness of this machine now."""
    return _pace.slowness()


def patience(seconds: float) -> float:
    """A bound on waiting, in seconds of this machine."""
    return seconds * slowness()


def within(took_s: float, bound_s: float) -> bool:
    """Tells if a bound was kept; measures only where it would not have been on an idle machine."""
    return took_s < bound_s or took_s < patience(bound_s)
