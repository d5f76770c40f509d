"""Counters of the sidecar, in memory only: they begin at 0 with every sidecar.

Several threads count, the scrape reads. The counters of a program are dropped with the program.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from metal_supervisor.spec import histogram
from metal_supervisor.spec.histogram import Histogram


@dataclass(frozen=True)
class Counted:
    """A snapshot of the counters."""

    probes: Mapping[str, Histogram] = field(default_factory=dict)
    """Seconds until an engine answered a probe, by program."""
    starts: Mapping[str, Histogram] = field(default_factory=dict)
    """Seconds from the start of an engine's process until it served, by program."""
    withdrawals: Histogram = field(default_factory=lambda: histogram.empty(histogram.WITHDRAW_S))
    """Seconds from the decision to withdraw an endpoint until the cluster had it."""
    passes: Histogram = field(default_factory=lambda: histogram.empty(histogram.PASS_S))
    """Seconds that a pass of the sidecar took."""
    refused: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Failed writes by (kind of write, HTTP status, or the reason why there was none)."""


class Counters:
    """The counters; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._probes: dict[str, Histogram] = {}
        self._starts: dict[str, Histogram] = {}
        self._withdrawals = histogram.empty(histogram.WITHDRAW_S)
        self._passes = histogram.empty(histogram.PASS_S)
        self._refused: dict[tuple[str, str], int] = {}

    def probed(self, program: str, seconds: float) -> None:
        """Record the seconds until an engine answered a probe, or until the probe gave up."""
        with self._lock:
            known = self._probes.get(program) or histogram.empty(histogram.PROBE_S)
            self._probes[program] = known.with_value(seconds)

    def started(self, program: str, seconds: float) -> None:
        """Record the seconds from the start of a process until it first served."""
        with self._lock:
            known = self._starts.get(program) or histogram.empty(histogram.START_S)
            self._starts[program] = known.with_value(seconds)

    def withdrawn(self, seconds: float) -> None:
        """Record the seconds that a withdrawal of an endpoint took."""
        with self._lock:
            self._withdrawals = self._withdrawals.with_value(seconds)

    def passed(self, seconds: float) -> None:
        """Record the seconds that a pass took."""
        with self._lock:
            self._passes = self._passes.with_value(seconds)

    def refused(self, what: str, code: str) -> None:
        """Count a failed write. `what`: kind of write; `code`: HTTP status, or the reason why there was none."""
        with self._lock:
            self._refused[what, code] = self._refused.get((what, code), 0) + 1

    def forget_all_but(self, programs: Collection[str]) -> None:
        """Drop the counters of all other programs."""
        with self._lock:
            self._probes = {name: each for name, each in self._probes.items() if name in programs}
            self._starts = {name: each for name, each in self._starts.items() if name in programs}

    def counted(self) -> Counted:
        """The current snapshot."""
        with self._lock:
            return Counted(dict(self._probes), dict(self._starts), self._withdrawals, self._passes, dict(self._refused))
