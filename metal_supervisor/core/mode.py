"""Whether LLMKube's operator writes status here, told from its traces.

It leaves its name in the managed fields of every status it writes, with a time. Two writers of one status
would undo each other for ever, so its presence is believed at once, and its absence only after a while.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime

from metal_supervisor.core.types import Json

MANAGER = "manager"
"""What controller-runtime programs such as the operator call themselves when they write."""
SILENCE_S, UNDECIDED_S = 300.0, 3.0


@dataclass(frozen=True)
class Signs:
    """What has been seen of the operator."""

    latest: str = ""
    """The newest time it left behind (RFC 3339)."""
    seen_at: float | None = None
    """Monotonic time at which that was new."""
    first_at: float | None = None
    """Monotonic time of the first look."""
    believed: bool | None = None
    """What was known when the program before this one ended."""


def look(before: Signs, items: Iterable[Json], now: float, server_now: float) -> Signs:
    """The signs after a look at what is watched. `server_now`: Unix time by the API server's clock."""
    latest = max((item["metadata"].get("statusWriters", {}).get(MANAGER, "") for item in items), default="")
    first_at = now if before.first_at is None else before.first_at
    if latest <= before.latest:
        return replace(before, first_at=first_at)
    # What was left behind before we came may be old; afterwards anything new is fresh, whatever the clocks say.
    fresh = before.first_at is not None or _age_s(latest, server_now) < SILENCE_S
    return replace(before, latest=latest, seen_at=now if fresh else before.seen_at, first_at=first_at)


def _age_s(time: str, server_now: float) -> float:
    try:
        return server_now - datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return float("inf")


def operator_present(setting: str, signs: Signs, now: float) -> bool | None:
    """Whether the operator writes status here; None while that cannot be told yet."""
    if setting != "auto":
        return setting == "operator"
    if signs.first_at is None:
        return signs.believed
    if signs.seen_at is not None and now - signs.seen_at < SILENCE_S:
        return True
    looked_s = now - signs.first_at
    if signs.believed and signs.seen_at is None and looked_s < SILENCE_S:
        return True
    return False if signs.believed is False or looked_s >= UNDECIDED_S else None
