"""Whether LLMKube's operator writes status here, told from its traces.

The managed fields of every status it writes tell its name, the fields and a time. The name is that of its binary, so
the fields are what it is known by. Two writers of one status would undo each other for ever, so its presence is
believed at once, and its absence only after a while.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime

from metal_supervisor.core.manifests import MANAGED_BY
from metal_supervisor.core.types import Json

FIELD = "f:lastUpdated"
"""Field that the operator changes with every write, and that nothing else but us sets."""
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


def operator_wrote(entries: object) -> str:
    """Newest time (RFC 3339) at which the operator wrote a status, by `metadata.managedFields`; "" if it never did."""
    times = [""]
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, dict) or (entry.get("subresource"), entry.get("operation")) != ("status", "Update"):
            continue  # ours are applied, but for the two fields that the operator writes as well
        manager, owns = str(entry.get("manager")), entry.get("fieldsV1")
        fields = owns.get("f:status") if isinstance(owns, dict) else None
        if FIELD in (fields if isinstance(fields, dict) else ()) and not is_ours(manager):
            times.append(str(entry.get("time") or ""))
    return max(times)


def is_ours(manager: str) -> bool:
    """Whether a field manager is this Mac or another one."""
    return manager == MANAGED_BY or manager.startswith("metal/")


def look(before: Signs, items: Iterable[Json], now: float, server_now: float) -> Signs:
    """The signs after a look at what is watched. `server_now`: Unix time by the API server's clock."""
    latest = max((item["metadata"].get("operatorWrote", "") for item in items), default="")
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
