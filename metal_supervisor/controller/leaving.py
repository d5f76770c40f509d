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

LEAVE_S = 5.0
"""Time that a service takes to be left."""
OFFERS_EVERY_S = 60.0
"""Pause between two offers to Macs with room; their Leases then show what is left of it."""
OFFER_AGAIN_S = 300.0
"""Pause before the same service is offered again, as the other Macs may not want it."""
LACKING_AGAIN_S = 3600.0
"""Pause before a service is offered again that lacks what no Lease shows."""
KNOWN_BEFORE = frozenset({"RuntimeBinaryMissing", "RuntimeBroken", "ModelFileMissing"})
"""Reasons of failures that a Mac knows of before it claims a service: one without them claims it first."""
LACKING = KNOWN_BEFORE | {"InsufficientDisk", NO_METAL}
"""Reasons of failures that another Mac may not have."""
OFF = frozenset({Standing.STOPPED, Standing.SUSPENDED})


def _lacks_something(record: Record) -> bool:
    """True if a service cannot run for lack of something that another Mac may have."""
    verdict = record.verdict
    return verdict.standing is Standing.FAILED and verdict.reason in LACKING


def _waits_for_memory(record: Record) -> bool:
    """True if memory is all that a service lacks here: on this Mac, and not by its Model's limit."""
    verdict, limit = record.verdict, record.limit_bytes
    waits = verdict.standing is Standing.WAIT and verdict.reason == INSUFFICIENT and record.reserved_bytes > 0
    within = limit is None or record.reserved_bytes <= limit
    return waits and within and record.idle_s is None


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
    for each in sorted(records, key=lambda each: each.queue_position):
        never_fits = on_demand.never_fits(each)
        if not (never_fits or _waits_for_memory(each) or _lacks_something(each)) or each.runtime not in RUNTIMES:
            continue
        if engines[each.owner] > 1 or each.owner in but or _is_pinned(services.get(each.owner, {})):
            continue
        programs = frozenset(program.name for program in RUNTIMES[each.runtime].executables)
        holders = frozenset(claim.holder for claim in placed.by_service.get(each.owner, ()))
        need = 0 if never_fits else each.reserved_bytes  # that Mac may unload others for it
        yield PlacementRequest(each.owner, need, programs, holders)


class Leaving:
    """What is left to others at present."""

    def __init__(self) -> None:
        self._left: dict[Key, float] = {}
        """InferenceService -> monotonic time at which it was."""
        self._offered: dict[tuple[Key, str], float] = {}
        """(InferenceService that was left, its request) -> monotonic time until which it is not left again."""
        self._declined: dict[tuple[Key, str], float] = {}
        """(InferenceService that others let this Mac claim, its request) -> until when they lack what this Mac does."""
        self._offered_at = -OFFERS_EVERY_S
        self._known: Set[Key] = frozenset()
        """The services of the last pass."""

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
        before, self._known = self._known, {each.owner for each in records}
        if not placed.open:
            return self._left.keys()
        asked = {each.owner: (each.owner, _asked(found.get(each.owner))) for each in records}
        self._offered, self._declined = (
            {request: until for request, until in each.items() if now < until}
            for each in (self._offered, self._declined)
        )
        self._declined.update(
            (asked[each.owner], now + LACKING_AGAIN_S)
            for each in records
            if each.owner not in before and each.verdict.standing not in OFF
        )
        if now - self._offered_at >= OFFERS_EVERY_S:
            staying = {key for key, request in asked.items() if request in self._offered} | {
                each.owner
                for each in records
                if each.verdict.reason in KNOWN_BEFORE and asked[each.owner] in self._declined
            }
            lacking = {each.owner for each in records if _lacks_something(each)}
            for key in list(peers.have_room(_wanted(records, services, placed, staying), placed.open)):
                self._offered[asked[key]] = now + (LACKING_AGAIN_S if key in lacking else OFFER_AGAIN_S)
                self._left[key] = self._offered_at = now
        return self._left.keys()
