"""Choice of the models to remove from the store, each with a reason: unused models, the longest unused first.

A model is hours of download, so nothing is chosen beyond the given bounds, and never a model that is in use or being
fetched.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from metal_supervisor.spec import sizes
from metal_supervisor.spec.fields import Bad

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
LEFT_ALONE_S = 600.0
"""A partial model that is younger may be waiting for its next try."""


class Kind(str, Enum):
    """Kind of a directory in the store."""

    WHOLE = "whole"
    PARTIAL = "partial"
    """A model that is not fetched completely."""
    IN_PLACE = "in place"
    """Only a note on a model elsewhere on this Mac, which is used where it is."""
    UNKNOWN = "unknown"
    """A directory without a note."""
    LLMKUBE = "LLMKube"
    """A directory of LLMKube's own agent."""


@dataclass(frozen=True)
class Item:
    """One model of the store, with what the choice depends on."""

    name: str
    kind: Kind
    frees_bytes: int
    """Bytes that its removal alone frees: a file that is hard-linked elsewhere frees none."""
    used_at: float
    """Unix time of its last use; for a partial model, of its last byte."""
    used: bool
    """True if a service uses it, or it is being fetched."""


@dataclass(frozen=True)
class Bounds:
    """Limits requested by the user; None: no such limit."""

    keep: int | None = None
    """Number of unused models to keep."""
    size_bytes: int | None = None
    """Maximum size of the store."""
    older_s: float | None = None
    """Longest time that a model may be unused."""


def choose(items: Sequence[Item], bounds: Bounds, store_bytes: int, now: float) -> dict[str, str]:
    """Choose the models to remove: name → reason, in the order of removal. `now`: Unix time."""
    chosen = {item.name: "never became whole" for item in items if _is_left_over(item, now)}
    left_bytes = store_bytes - sum(item.frees_bytes for item in items if item.name in chosen)
    unused = unused_models(items)
    for at, item in enumerate(unused):
        idle_s = now - item.used_at
        if bounds.older_s is not None and idle_s > bounds.older_s:
            chosen[item.name] = f"unused for {age(idle_s)}"
        elif bounds.keep is not None and len(unused) - at > bounds.keep:
            chosen[item.name] = f"more than {bounds.keep} are unused" if bounds.keep else "nothing uses it"
        elif bounds.size_bytes is not None and left_bytes > bounds.size_bytes and item.frees_bytes:
            chosen[item.name] = f"the store is larger than {sizes.amount(bounds.size_bytes)}"
        if item.name in chosen:
            left_bytes -= item.frees_bytes
    return chosen


def unused_models(items: Sequence[Item]) -> list[Item]:
    """Models that no service uses, the longest unused first."""
    found = [item for item in items if item.kind in (Kind.WHOLE, Kind.UNKNOWN) and not item.used]
    return sorted(found, key=lambda item: (item.used_at, item.name))


def left_alone(items: Sequence[Item], now: float) -> list[Item]:
    """Partial models that are neither used nor old enough to be left over. `now`: Unix time."""
    return [each for each in items if each.kind is Kind.PARTIAL and not each.used and not _is_left_over(each, now)]


def _is_left_over(item: Item, now: float) -> bool:
    return item.kind is Kind.PARTIAL and not item.used and not 0 <= now - item.used_at < LEFT_ALONE_S


def age(seconds: float) -> str:
    """Format a duration as `5 min`, `3 h` or `12 d`: whole units, rounded down."""
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length_s or (unit == "min" and seconds >= 60):
            return f"{int(seconds // length_s)} {unit}"
    return f"{max(0, int(seconds))} s"


def period_s(text: str, flag: str) -> float:
    """Seconds of a period such as `30d` or `12h`. Raises Bad, which names the flag."""
    found = re.fullmatch(r"([0-9]{1,6})([smhdw])", text.strip(), re.ASCII)
    if found is None:
        raise Bad("InvalidSpec", f"{flag} must be a period such as 30d, 12h or 2w, not {text!r:.40}")
    return float(int(found[1]) * SECONDS[found[2]])


def size_bytes(text: str, flag: str) -> int:
    """Bytes of a size such as `200G` (decimal) or `200Gi` (binary). Raises Bad, which names the flag."""
    try:
        return sizes.quantity(text.strip().removesuffix("B"), flag)
    except Bad:
        raise Bad("InvalidSpec", f"{flag} must be a size such as 200G or 200Gi, not {text!r:.40}") from None
