"""What a benchmark may say of a figure that it took often: the median, and how sure that is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, low, high): the ends of its 95 % interval are two of the values, whatever their distribution."""
    ranks = sorted(values)
    skip = max(0, int(len(ranks) / 2 - 0.98 * math.sqrt(len(ranks))))
    return statistics.median(ranks), ranks[skip], ranks[-1 - skip]


def shown(values: Sequence[float], digits: int = 3) -> str:
    """The same for people."""
    return "{:.{digits}f} [{:.{digits}f}, {:.{digits}f}]".format(*interval(values), digits=digits)
