"""What the sidecar counts while it runs, and no file holds: it begins at 0 with every sidecar.

Several threads count, the scrape reads. What is counted of a program goes with the program.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from metal_supervisor.spec import histogram
from metal_supervisor.spec.histogram import Histogram


@dataclass(frozen=True)
class Counted:
    """Everything counted up to one moment."""

    probes: Mapping[str, Histogram] = field(default_factory=dict)
    """Seconds until an engine answered a probe, by program."""
    starts: Mapping[str, Histogram] = field(default_factory=dict)
    """Seconds from the start of an engine's process until it served, by program."""
    withdrawals: Histogram = field(default_factory=lambda: histogram.empty(histogram.WITHDRAW_S))
    """Seconds from the decision to take an endpoint out until the cluster had it."""
    passes: Histogram = field(default_factory=lambda: histogram.empty(histogram.PASS_S))
    """Seconds that a pass of the sidecar took."""
    refused: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Writes that failed, by (what was written, HTTP status or the reason of there being none)."""


class Counters:
    """Counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._probes: dict[str, Histogram] = {}
        self._starts: dict[str, Histogram] = {}
        self._withdrawals = histogram.empty(histogram.WITHDRAW_S)
        self._passes = histogram.empty(histogram.PASS_S)
        self._refused: dict[tuple[str, str], int] = {}

    def probed(self, program: str, seconds: float) -> None:
        """An engine has answered, or has been given up on."""
        with self._lock:
            known = self._probes.get(program) or histogram.empty(histogram.PROBE_S)
            self._probes[program] = known.with_value(seconds)

    def started(self, program: str, seconds: float) -> None:
        """An engine serves for the first time."""
        with self._lock:
            known = self._starts.get(program) or histogram.empty(histogram.START_S)
            self._starts[program] = known.with_value(seconds)

    def withdrawn(self, seconds: float) -> None:
        """An endpoint is out."""
        with self._lock:
            self._withdrawals = self._withdrawals.with_value(seconds)

    def passed(self, seconds: float) -> None:
        """A pass is over."""
        with self._lock:
            self._passes = self._passes.with_value(seconds)

    def refused(self, what: str, code: str) -> None:
        """A write has failed."""
        with self._lock:
            self._refused[what, code] = self._refused.get((what, code), 0) + 1

    def forget_all_but(self, programs: Collection[str]) -> None:
        """Drops what was counted of any other program."""
        with self._lock:
            self._probes = {name: each for name, each in self._probes.items() if name in programs}
            self._starts = {name: each for name, each in self._starts.items() if name in programs}

    def counted(self) -> Counted:
        """What there is by now."""
        with self._lock:
            return Counted(
                dict(self._probes), dict(self._starts), self._withdrawals, self._passes, dict(self._refused)
            )
