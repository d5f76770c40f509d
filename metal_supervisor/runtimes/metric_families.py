"""Parsed metrics: families of samples, from any engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

COUNTER, GAUGE, HISTOGRAM, SUMMARY, UNTYPED = "counter", "gauge", "histogram", "summary", "untyped"
PARTS: Mapping[str, tuple[str, ...]] = {HISTOGRAM: ("_bucket", "_sum", "_count"), SUMMARY: ("_sum", "_count")}
"""Suffixes of a family's samples, by type, besides the family's own name."""


class Unreadable(ValueError):
    """The page is rejected. `reason`: "format", or "series" or "size" if it is too large."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Sample:
    """One value."""

    name: str
    labels: tuple[tuple[str, str], ...]
    """(name, value) in the order of the page; values are printable and bounded."""
    value: float


@dataclass(frozen=True)
class Family:
    """The samples of one metric."""

    name: str
    """For a counter with `_total`, if its samples have it."""
    kind: str
    help: str
    """Printable, "" if there is none."""
    samples: tuple[Sample, ...]
