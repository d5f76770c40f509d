"""On-demand services: which of them ask for memory, and which could give theirs to another.

An engine is loaded while requests wait for it, and unloaded once there was none for its idle time. Its memory may go to
an engine that waits: at once while it is idle. One that is in use keeps it for MIN_AWAKE_S, and gives it to an engine
that has waited for MAX_WAIT_S, so that two models that do not fit together are served in turns; it always answers first
what it has. An engine counts as in use until SETTLED_S after its last answer, as a client's next request is on its way,
and while no worker of the gateway tells of it, as after one was killed that had the only word of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from metal_supervisor.cluster.report import UNLOADED
from metal_supervisor.controller import reconcile
from metal_supervisor.controller.snapshot import Snapshot
from metal_supervisor.memory.refusals import INSUFFICIENT, too_large
from metal_supervisor.spec.processes import UNUSED, EngineUse
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Key, Standing

MIN_AWAKE_S = 30.0
MAX_WAIT_S = 30.0
SETTLED_S = 0.5
LOOK_EVERY_S = 0.5
SOONEST_S = 0.02
AHEAD_S = 10.0
"""Longer than a snapshot takes on a busy Mac."""
DRAIN_S = 7 * 86_400.0
"""An engine that makes room, or was not used, ends after its last answer, however long that takes."""
UNTOLD = EngineUse(in_flight=1)
"""Use of an engine of which no worker tells."""
FRESH = "nobody has asked for it yet"


@dataclass(frozen=True)
class Yielding:
    """Readiness of an on-demand engine to give its memory to another."""

    before: float
    """Unix time: to those that have waited since before it, if they are of no lower priority."""
    busy: bool
    used_at: float
    """Unix time of the latest use."""


def settle(
    proposals: Mapping[Key, Record],
    before: Mapping[Key, Record],
    up: Collection[Key],
    snapshot: Snapshot,
    budget_bytes: int | None = None,
) -> dict[Key, Record]:
    """The proposals, with those on-demand services at rest that nobody asks for.

    `up`: keys of engines that are up. `budget_bytes`: an engine that needs more does not rest, and the ledger
    refuses it at once; None where another Mac may have room for it.
    """
    result, now = dict(proposals), snapshot.now
    for key, proposal in proposals.items():
        if proposal.idle_s is None or not proposal.asks:
            continue
        was, use = before.get(key), snapshot.uses.get(proposal.program, UNTOLD)
        if use.waiting or proposal.stopped_by_hand or (was is None and key in up):
            continue
        if proposal.evicted_at is not None and key in up:
            continue  # it goes sooner than one that rests
        if was is not None and was.runs:
            idle_s = now - used_at(was, snapshot)
            if use.in_flight or not proposal.idle_s or idle_s < proposal.idle_s:
                continue
            result[key] = at_rest(proposal, was, f"it had no request for {proposal.idle_s:g} s", now)
        elif budget_bytes is None or not too_large(
            proposal.reserved_bytes or None, proposal.limit_bytes, budget_bytes, 0
        ):
            same = was is not None and was.verdict.reason == UNLOADED
            result[key] = at_rest(proposal, was, was.verdict.message if was and same else FRESH, now)
    return result


def used_at(record: Record, snapshot: Snapshot) -> float:
    """Unix time of an engine's latest use; of its start, if it had none since.

    A time far ahead of now is of a clock that has been set back since, and counts as long ago; one that is no more
    than AHEAD_S ahead is of a use since the snapshot was begun.
    """
    seen, now = snapshot.observed.get(record.program), snapshot.now
    ready_at = seen.since if seen is not None and seen.ready else 0.0
    times = snapshot.uses.get(record.program, UNUSED).used_at, record.admitted_at, ready_at
    return max((min(at, now) for at in times if at <= now + AHEAD_S), default=0.0)


def never_fits(record: Record) -> bool:
    """True if an on-demand service was refused for its size: it does not wait for memory either."""
    decided = record.verdict.standing is Standing.WAIT and record.verdict.reason == INSUFFICIENT
    return record.idle_s is not None and decided and not record.queue_position


def at_rest(proposal: Record, was: Record | None, why: str, now: float) -> Record:
    """The proposal to have no engine until a request comes."""
    verdict = reconcile.verdict(was.verdict if was else None, Standing.WAIT, UNLOADED, why, now)
    return replace(
        proposal,
        verdict=verdict,
        edition=None,
        drain_s=DRAIN_S,
        queued_at=None,
        edit_queued_at=None,
        queue_position=0,
        evicted_at=None,
        stopped_by_hand=False,
    )


def yields(proposals: Mapping[Key, Record], before: Mapping[Key, Record], snapshot: Snapshot) -> dict[Key, Yielding]:
    """The on-demand engines whose memory another may have."""
    found, now = {}, snapshot.now
    for key, proposal in proposals.items():
        was, seen = before.get(key), snapshot.observed.get(proposal.program)
        if proposal.idle_s is None or proposal.protected or was is None or not was.runs or was.withdraw:
            continue
        if seen is None or not seen.ready:
            continue
        use, last = snapshot.uses.get(proposal.program, UNTOLD), used_at(was, snapshot)
        busy = bool(use.in_flight or use.waiting) or now - last < SETTLED_S
        if not busy or not 0 <= now - seen.since < MIN_AWAKE_S:
            found[key] = Yielding(now - MAX_WAIT_S if busy else now, busy, last)
    return found


def again_in_s(records: Mapping[Key, Record], snapshot: Snapshot) -> float | None:
    """Seconds until the next pass that on-demand services need without a wake, None if they need none."""
    running = [each for each in records.values() if each.idle_s is not None and each.runs]
    if running and any(each.queue_position for each in records.values()):
        # Until one of them may give up its memory: at the latest that is when it has settled.
        settles = [used_at(each, snapshot) + SETTLED_S - snapshot.now for each in running]
        return max(SOONEST_S, min([LOOK_EVERY_S, *(each for each in settles if each > 0)]))
    left = [used_at(each, snapshot) + each.idle_s - snapshot.now for each in running if each.idle_s]
    return max(1.0, min(left)) if left else None
