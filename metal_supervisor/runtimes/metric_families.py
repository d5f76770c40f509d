"""What a page of metrics says, once it has been read: families of samples, whoever wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

COUNTER, GAUGE, HISTOGRAM, SUMMARY, UNTYPED = "counter", "gauge", "histogram", "summary", "untyped"
PARTS: Mapping[str, tuple[str, ...]] = {HISTOGRAM: ("_bucket", "_sum", "_count"), SUMMARY: ("_sum", "_count")}
"""What the names of a family's samples end in, beside the family's own name."""


class Unreadable(ValueError):
    """What was said is not taken; `reason` is "format", or "series" or "size" if it is too much."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Sample:
    """One value."""

    name: str
    labels: tuple[tuple[str, str], ...]
    """(name, value) in the order in which they were said; values are printable and bounded."""
    value: float


@dataclass(frozen=True)
class Family:
    """The samples of one metric."""

    name: str
    """Of a counter, with `_total` if its samples have it."""
    kind: str
    help: str
    """Printable, "" if there is none."""
    samples: tuple[Sample, ...]
