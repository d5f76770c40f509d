"""Services that this Mac holds and cannot run, which are left to another one.

An on-demand service that never fits is left to a Mac with an engine for it once a request has shown that. One that
waits for memory is left to a Mac that says in its Lease that it has some: that one may have come later, as after a
power cut, or been emptied. What fails for something that this Mac lacks is left to one with an engine for it: who has
the rest offers itself first.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Set

from metal_supervisor.cluster.report import NO_METAL
from metal_supervisor.controller import on_demand
from metal_supervisor.memory.refusals import INSUFFICIENT
from metal_supervisor.placement import peers
from metal_supervisor.placement.peers import PlacementRequest
from metal_supervisor.placement.placement import Placed
from metal_supervisor.runtimes import RUNTIMES
from metal_supervisor.spec.document import mapping
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Json, Key, Rejected, Service, Standing

LEAVE_S, OFFERS_EVERY_S, OFFER_AGAIN_S, LACKING_AGAIN_S = 5.0, 60.0, 300.0, 3600.0
"""Seconds in which a service is left; until others are left to Macs with room, whose Leases then say what is left of
that; until the same one is again, as they may not want it; and until one is that lacks what no Lease tells of.
"""
KNOWN_BEFORE = frozenset({"RuntimeBinaryMissing", "RuntimeBroken", "ModelFileMissing"})
"""Reasons of failures that a Mac knows of before it claims a service: one without them claims it first."""
LACKING = KNOWN_BEFORE | {"InsufficientDisk", NO_METAL}
"""Reasons of failures that another Mac may not have."""
OFF = frozenset({Standing.STOPPED, Standing.SUSPENDED})


def _lacks_something(record: Record) -> bool:
    """True if a service cannot run for lack of something that another Mac may have."""
    verdict = record.verdict
    return verdict.standing is Standing.FAILED and verdict.reason in LACKING and record.runtime in RUNTIMES


def _waits_for_memory(record: Record) -> bool:
    """True if memory is all that a service lacks here: on this Mac, and not by its Model's limit."""
    verdict, limit = record.verdict, record.limit_bytes
    waits = verdict.standing is Standing.WAIT and verdict.reason == INSUFFICIENT and record.reserved_bytes > 0
    within = limit is None or record.reserved_bytes <= limit
    return waits and within and record.idle_s is None and record.runtime in RUNTIMES


def _never_fits(record: Record) -> bool:
    """True if an on-demand service was refused for its size."""
    return on_demand.never_fits(record) and record.runtime in RUNTIMES


def _is_pinned(written: Json) -> bool:
    """True if `spec.nodeSelector` says which Macs may run a service; the labels of other Macs are not known here."""
    return bool(mapping(written, "spec").get("nodeSelector"))


def _asked(item: Service | Rejected | None) -> str:
    """Digest of what a service asks for, which an edit changes; "" if it cannot run as it is written."""
    return item.asked.rpartition("|")[2] if isinstance(item, Service) else ""


def _wanted(
    records: Collection[Record], services: Mapping[Key, Json], placed: Placed, but: Collection[Key]
) -> Iterator[PlacementRequest]:
    """The services that another Mac may be able to run, in the order of their queue. `but`: not these."""
    engines = Counter(each.owner for each in records)  # of several, one may run
    waiting = (each for each in records if _waits_for_memory(each) or _lacks_something(each) or _never_fits(each))
    for each in sorted(waiting, key=lambda each: each.queue_position):
        if engines[each.owner] > 1 or each.owner in but or _is_pinned(services.get(each.owner, {})):
            continue
        programs = frozenset(program.name for program in RUNTIMES[each.runtime].executables)
        holders = frozenset(claim.holder for claim in placed.by_service.get(each.owner, ()))
        need = 0 if _never_fits(each) else each.room_bytes  # that Mac may unload others for it
        yield PlacementRequest(each.owner, need, programs, holders)


class Leaving:
    """What is left to others at present."""

    def __init__(self) -> None:
        self._left: dict[Key, float] = {}
        """InferenceService -> monotonic time at which it was."""
        self._offered: dict[tuple[Key, str], float] = {}
        """(InferenceService that was left, its request) -> monotonic time from which it may be again."""
        self._offered_at = -OFFERS_EVERY_S
        self._contested: dict[Key, str | None] = {}
        """Service here -> the request that other Macs let this one claim; None if it was edited, off, or failed."""

    def keys(
        self,
        records: Collection[Record],
        services: Mapping[Key, Json],
        placed: Placed,
        found: Mapping[Key, Service | Rejected] = {},
    ) -> Set[Key]:
        """The services that another Mac should have. `placed`: as of the last pass; `found`: what they ask for."""
        now = time.monotonic()
        self._left = {key: at for key, at in self._left.items() if now - at < LEAVE_S}
        self._offered = {key: until for key, until in self._offered.items() if now < until}
        asked = {each.owner: _asked(found.get(each.owner)) for each in records}
        off = {each.owner for each in records if each.verdict.standing in OFF}
        self._contested = {
            key: now_asked
            if placed.open and key not in off and self._contested.get(key, now_asked) == now_asked else None
            for key, now_asked in asked.items()
        }  # fmt: skip
        lacking = {each.owner: each.verdict.reason for each in records if _lacks_something(each)}
        for key, reason in lacking.items():
            if reason in KNOWN_BEFORE and self._contested[key] is not None:  # no other Mac has what it lacks
                self._offered[key, asked[key]], self._contested[key] = now + LACKING_AGAIN_S, None
        if placed.open and now - self._offered_at >= OFFERS_EVERY_S:
            wanted = _wanted(records, services, placed, {key for key in asked if (key, asked[key]) in self._offered})
            for key in list(peers.have_room(wanted, placed.open)):
                self._offered[key, asked[key]] = now + (LACKING_AGAIN_S if key in lacking else OFFER_AGAIN_S)
                self._left[key] = self._offered_at = now
        return self._left.keys()
