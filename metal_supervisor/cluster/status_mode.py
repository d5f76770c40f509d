"""Detection of LLMKube's operator: whether it writes status in this cluster.

The managedFields of every status that it writes hold its name and the fields. The name is that of its binary, so it is
recognized by the fields, and by a time in the status that is not of this program's form. Two writers of one status
would overwrite each other for ever, so its presence is assumed at once, and its absence only after a while.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from metal_supervisor.cluster.manifests import MANAGED_BY, NODES, OUR_ZONE
from metal_supervisor.spec.document import mapping, objects
from metal_supervisor.spec.instants import unix
from metal_supervisor.spec.types import Json

FIELD = "f:lastUpdated"
"""Field that the operator changes with every write; only this program sets it too."""
GO_AGENT = "metal-agent"
"""End of the name of LLMKube's agent. Its updates write the whole status that it has read, with times in Go's form."""
SILENCE_S = 300.0
UNDECIDED_S = 3.0
QUIET_S = 120.0
"""Silence after which the operator may be gone: it writes every service that is served at least every 90 s."""


@dataclass(frozen=True)
class OperatorEvidence:
    """Evidence of the operator so far."""

    latest: str = ""
    """Time of its newest write that was seen (RFC 3339)."""
    writes: Mapping[str, str] = field(default_factory=dict)
    """Uid of each resource at the latest check -> time of its latest write of that one that was seen, "" for none."""
    seen_at: float | None = None
    """Monotonic time at which that write was first seen, None if there is none or it was old."""
    first_at: float | None = None
    """Monotonic time of the first check."""
    believed: bool | None = None
    """Result when the previous process ended, None if unknown."""


def operator_wrote(entries: object, updated: object) -> str:
    """Time (RFC 3339) of the operator's latest write of a status, "" if this program wrote it last, or nobody did.

    `entries`: of `metadata.managedFields`, which whoever may write the object can make up; `updated`: `lastUpdated` of
    its status, which they cannot.
    """
    at = updated if isinstance(updated, str) and not updated.endswith(OUR_ZONE) else ""
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, dict) or (entry.get("subresource"), entry.get("operation")) != ("status", "Update"):
            continue  # this program applies, except for two fields that the operator writes too
        owned = mapping(mapping(entry, "fieldsV1"), "f:status")
        manager = str(entry.get("manager"))
        if FIELD in owned and entry.get("time") and not is_ours(manager) and not manager.endswith(GO_AGENT):
            return at
    return ""


def wrote(item: Json) -> str:
    """As `operator_wrote`, of an object that a watch has read."""
    return str(item["metadata"].get("operatorWrote", ""))


def operator_failure(item: Json) -> Json | None:
    """{reason, message} of a Model that the operator reports as Failed; None if it does not, or did not write last."""
    status = mapping(item, "status")
    if status.get("phase") != "Failed" or not wrote(item):
        return None
    degraded = next((each for each in objects(status, "conditions") if each.get("type") == "Degraded"), {})
    return {name: str(degraded.get(name) or "") for name in ("reason", "message")}


def condition_of_others(entries: object, kind: str) -> bool:
    """True if a field manager other than this program owns a condition, by `metadata.managedFields`."""
    key = f'k:{{"type":"{kind}"}}'
    return any(key in mapping(status, "f:conditions") for status in _statuses_of_others(entries))


def field_of_others(entries: object, name: str) -> bool:
    """True if a field manager other than this program owns a field of a status, or a part of it; as above."""
    return any(f"f:{name}" in status for status in _statuses_of_others(entries))


def _statuses_of_others(entries: object) -> list[Json]:
    """What each field manager other than this program owns of a status."""
    others = [each for each in entries if isinstance(each, dict)] if isinstance(entries, list) else []
    owned = [mapping(each, "fieldsV1") for each in others if not is_ours(str(each.get("manager")))]
    return [mapping(each, "f:status") for each in owned]


def is_ours(manager: str) -> bool:
    """True if a field manager is this program, on this Mac or on another."""
    return manager == MANAGED_BY or manager.startswith(NODES)


def look(before: OperatorEvidence, items: Iterable[Json], now: float, server_now: float) -> OperatorEvidence:
    """Evidence after a check of the watched objects. `server_now`: Unix time by the API server's clock."""
    found = {item["metadata"]["uid"]: wrote(item) for item in items}
    written = {uid: at or before.writes.get(uid, "") for uid, at in found.items()}
    # By each resource, not by the newest time of all: the server's clock may be set back.
    news = {uid: at for uid, at in written.items() if at and at != before.writes.get(uid)}
    first_at = now if before.first_at is None else before.first_at
    if not news:
        return replace(before, writes=written, first_at=first_at)
    latest = max(news.values())
    # After another write of the same resource it is fresh, whatever the clocks say; else it may be old: made-up
    # managedFields may point to a time that an operator, or an older release of this program, left behind.
    fresh = any(before.writes.get(uid) or age_s(at, server_now) < SILENCE_S for uid, at in news.items())
    seen_at = now if fresh else before.seen_at
    return replace(before, latest=latest, writes=written, seen_at=seen_at, first_at=first_at)


def age_s(time: str, server_now: float) -> float:
    """Seconds since a time that an object names, infinite if it names none."""
    try:
        return server_now - unix(time)
    except ValueError:
        return float("inf")


def quiet_s(signs: OperatorEvidence, now: float) -> float:
    """Seconds since the operator's last write was seen, or since the first check; 0.0 before that."""
    since = signs.first_at if signs.seen_at is None else signs.seen_at
    return 0.0 if since is None else now - since


def operator_present(setting: str, signs: OperatorEvidence, now: float) -> bool | None:
    """True if the operator writes status here, False if not, None if that is not known yet."""
    if setting != "auto":
        return setting == "operator"
    if signs.first_at is None:
        return signs.believed
    waits = signs.seen_at is not None or signs.believed
    if waits and quiet_s(signs, now) < SILENCE_S:
        return True
    looked_s = now - signs.first_at
    return False if signs.believed is False or looked_s >= UNDECIDED_S else None


def silence(setting: str, signs: OperatorEvidence, now: float) -> str:
    """Text about an operator that is assumed to be present, but may be gone; "" before QUIET_S and after SILENCE_S.

    The text is the same for the whole silence.
    """
    if setting != "auto" or not (signs.seen_at is not None or signs.believed):
        return ""
    if not QUIET_S <= quiet_s(signs, now) < SILENCE_S:
        return ""
    since = signs.latest if signs.seen_at is not None else "this Mac's controller started"
    text = f"LLMKube's operator has not written since {since}: the phase may be out of date"
    return f"{text}; after {SILENCE_S / 60:.0f} minutes of silence this Mac writes it too"
