"""Histogram of durations in Prometheus' form: an immutable value that a file can hold.

The controller counts its passes and writes them into its report; the sidecar counts what it sees itself.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any

from metal_supervisor.spec.types import Json

PASS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
PROBE_S = (0.005, 0.025, 0.1, 0.5, 2.5, 10.0)
START_S = (1.0, 2.5, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Few, as there is one such histogram per service; the bounds of probes are among those of LLMKube's agent."""
WITHDRAW_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 15.0, 60.0)


@dataclass(frozen=True)
class Histogram:
    """Counted values."""

    bounds: tuple[float, ...]
    """Upper bounds of the buckets, ascending, without the last one, which is infinite."""
    counts: tuple[int, ...]
    """Values in each bucket alone; one more than there are bounds."""
    total: float = 0.0
    """Sum of the values."""

    def with_value(self, value: float) -> Histogram:
        """The same with one value more."""
        at = bisect_left(self.bounds, value)
        counts = (*self.counts[:at], self.counts[at] + 1, *self.counts[at + 1 :])
        return replace(self, counts=counts, total=self.total + value)

    @property
    def buckets(self) -> list[tuple[str, int]]:
        """(upper bound as Prometheus writes it, values up to there), the last bound `+Inf`."""
        found, count = [], 0
        for bound, more in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            count += more
            found.append((bound, count))
        return found

    def as_json(self) -> Json:
        """JSON form for a file."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "total": self.total}


def empty(bounds: tuple[float, ...]) -> Histogram:
    """A histogram with nothing in it."""
    return Histogram(bounds, (0,) * (len(bounds) + 1))


def read(found: Any) -> Histogram | None:
    """Histogram from what `as_json` wrote into a file; None if another version wrote something else."""
    try:
        bounds, counts = tuple(map(float, found["bounds"])), tuple(map(int, found["counts"]))
        float(sum(counts))  # a scrape writes it as one
        return Histogram(bounds, counts, float(found["total"])) if len(counts) == len(bounds) + 1 else None
    except (LookupError, TypeError, ValueError, OverflowError):
        return None
