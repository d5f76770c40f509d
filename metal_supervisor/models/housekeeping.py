"""Which models may go to make room, and why: what nothing uses, the longest unused first.

A model is hours of download, so nothing is chosen that was not asked for, and never one that is in use or on its way.
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
"""A beginning that is younger may be waiting for its next try."""


class Kind(str, Enum):
    """What a directory of the store is."""

    WHOLE = "whole"
    PARTIAL = "partial"
    """The beginning of a model."""
    IN_PLACE = "in place"
    """Only what was found out of a model elsewhere on this Mac, which is used where it is."""
    UNKNOWN = "unknown"
    """There is no note of what it is."""
    LLMKUBE = "LLMKube"
    """LLMKube's own agent made it."""


@dataclass(frozen=True)
class Item:
    """One model of the store, as far as the choice cares."""

    name: str
    kind: Kind
    frees_bytes: int
    """What its removal alone gives back: what is hard-linked elsewhere gives nothing."""
    used_at: float
    """Unix time of its last use, of a partial one of its last byte."""
    used: bool
    """A service uses it, or it is on its way."""


@dataclass(frozen=True)
class Bounds:
    """What somebody asked for; None: not that."""

    keep: int | None = None
    """How many unused models stay."""
    size_bytes: int | None = None
    """What the store may take."""
    older_s: float | None = None
    """How long a model may be unused."""


def choose(items: Sequence[Item], bounds: Bounds, store_bytes: int, now: float) -> dict[str, str]:
    """Name → why, of what is to go, in that order. `now`: Unix time."""
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
    """The models that nothing uses, the longest unused first."""
    found = [item for item in items if item.kind in (Kind.WHOLE, Kind.UNKNOWN) and not item.used]
    return sorted(found, key=lambda item: (item.used_at, item.name))


def _is_left_over(item: Item, now: float) -> bool:
    return item.kind is Kind.PARTIAL and not item.used and not 0 <= now - item.used_at < LEFT_ALONE_S


def age(seconds: float) -> str:
    """`5 min`, `3 h` or `12 d`; whole units, rounded down."""
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
