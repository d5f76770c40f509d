"""Claims: which replica of a service each Mac runs, decided from a snapshot of their Leases.

There is no scheduler and no leader. Every replica of an InferenceService is a slot with a Lease of its own,
created by the first Mac to claim it and never renewed; server-side apply without force lets only one win.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, lru_cache

from metal_supervisor.placement.leases import Claim, ClaimAction, Move, SlotId
from metal_supervisor.spec.types import Key

LOAD_S = 0.05
JITTER_S = 0.05
ANOTHER_S = 3.0
BACK_S = 5.0
"""Time until a Mac takes back a slot that it serves, while another one holds the slot and does not serve it."""
CANNOT_S = 8.0
"""Time until a Mac claims a slot that it cannot run, to report the reason: by then no other Mac can run it either."""
MOST_SLOTS = 1000
"""Slots of one service that are looked at: more than any fleet has Macs for."""


class Life(str, Enum):
    """State of a Mac, as judged by its node Lease."""

    LIVE = "live"
    DRAINING = "draining"
    """Live, and wants others to take its slots over."""
    SILENT = "silent"
    """Has released its Lease before it stopped, or has not renewed it within the Lease's own duration."""


@dataclass(frozen=True)
class Ask:
    """Request of one InferenceService for slots."""

    uid: str
    slots: int
    ready: frozenset[int] = frozenset()
    """The slots that are served here, also those that another Mac has taken over."""
    unable: frozenset[int] = frozenset()
    """The slots that this Mac holds and cannot run: any Mac that can takes them."""
    created: str = ""
    """creationTimestamp of the InferenceService."""

    @property
    def edition(self) -> tuple[str, str]:
        """As of `Claim.edition`."""
        return self.created, self.uid


@dataclass(frozen=True)
class ClaimDecision:
    """Outcome of one evaluation of the Leases."""

    mine: Mapping[Key, tuple[int, ...]]
    """InferenceService -> the slots of it that this Mac holds."""
    moves: tuple[Move, ...]
    waiting: Mapping[SlotId, float]
    """Monotonic time since which each slot could be claimed."""
    again_in_s: float | None
    """Seconds until the next evaluation is worthwhile although nothing has changed, None if it is not."""


@lru_cache(maxsize=1 << 14)
def digest(me: str, *what: object) -> bytes:
    """Digest of this Mac and something, in which equal Macs differ."""
    return hashlib.sha256("/".join((me, *map(str, what))).encode()).digest()


def _takeable(
    claim: Claim, ask: Ask, delay_s: Callable[[Key], float | None], lives: Mapping[tuple[str, str], Life], me: str
) -> bool:
    if not claim.holder or (claim.owner_uid != ask.uid and claim.edition < ask.edition):
        return True
    life = lives.get((claim.slot[0], claim.holder), Life.LIVE)
    if claim.holder == me or life is Life.SILENT:
        return claim.holder != me
    return (claim.unable or life is Life.DRAINING) and delay_s(claim.slot[:2]) is not None


def _keep(held: Iterable[Claim], ask: Ask, alone: bool, most: int) -> tuple[list[Claim], list[Move]]:
    """(the claims on a service that this Mac keeps of those it holds, requests that release or change some of them)."""
    kept: list[Claim] = []
    moves: list[Move] = []
    for claim in sorted(held, key=lambda each: each.slot[2]):
        if claim.slot[2] < ask.slots and len(kept) < most:
            kept.append(claim)
        else:
            moves.append(Move(ClaimAction.RELEASE, claim.slot, ask.uid, claim.version))
    for claim in kept:
        # Worth a write only if another Mac may read it.
        told = claim.slot[2] in ask.ready and (claim.ready or not alone or ask.slots > 1)
        unable = claim.slot[2] in ask.unable and (claim.unable or not alone)
        move = Move(ClaimAction.TAKE, claim.slot, ask.uid, claim.version, "", told, ask.created, unable)
        if claim.owner_uid != ask.uid:
            moves.append(move)
        elif (told, unable) != (claim.ready, claim.unable):
            moves.append(replace(move, do=ClaimAction.UPDATE, acquired=claim.acquired))
    return kept, moves


def _pause_s(delay_s: float | None, slot: SlotId, me: str, load: int, more: int) -> float:
    """Seconds until this Mac claims a slot. `load`: slots that this Mac has; `more`: of the service."""
    own_s = CANNOT_S if delay_s is None else delay_s
    jitter_s = JITTER_S * digest(me, *slot)[0] / 255  # equal Macs do not all claim at once
    # One on each Mac is better than several on one.
    return own_s + ANOTHER_S * more + LOAD_S * load + jitter_s


def decide(
    asks: Mapping[Key, Ask],
    delay_s: Callable[[Key], float | None],
    claims: Mapping[SlotId, Claim],
    lives: Mapping[tuple[str, str], Life],
    me: str,
    accepting: bool,
    waiting: Mapping[SlotId, float],
    now: float,
    not_ours: Collection[Key] = (),
    most: int = 1,
) -> ClaimDecision:
    """Slots that this Mac holds, and the requests to make. One Mac holds at most `most` slots of a service.

    `delay_s`: delay in seconds before this Mac claims a slot of a service, None if it cannot run one now; called once
    for each service with a slot to claim.
    `accepting` is False on a cordoned Mac: it keeps its slots and takes no new ones. `not_ours`: services
    that exist and are not for this Mac; slots it holds of them are released.
    """
    held: dict[Key, list[Claim]] = {}
    mine: dict[Key, tuple[int, ...]] = {}
    moves: list[Move] = []
    for claim in claims.values():
        if claim.holder == me and claim.slot[:2] in asks:
            held.setdefault(claim.slot[:2], []).append(claim)
        elif claim.holder == me and claim.slot[:2] in not_ours:
            moves.append(Move(ClaimAction.RELEASE, claim.slot, claim.owner_uid, claim.version))
    delay_s = cache(delay_s)
    since: dict[SlotId, float] = {}
    again: list[float] = []
    load = len(held)
    shared = shared_namespaces(lives, me)
    # Each Mac has an order of its own: with one for all, each of many equal Macs would ask for the same few slots.
    for key, ask in sorted(asks.items(), key=lambda each: digest(me, *each[0])):
        # Until this Mac's own node Lease is seen in a namespace, those of its peers may be missing as well.
        alone = (key[0], me) in lives and key[0] not in shared
        live = lives.get((key[0], me)) is Life.LIVE  # otherwise a peer would take over at once what is taken back
        usable, changes = _keep(held.get(key, []), ask, alone, most)
        moves += changes
        if usable:
            mine[key] = tuple(claim.slot[2] for claim in usable)
        if not accepting or len(usable) >= most:
            continue
        wanted = 0
        for index in range(min(ask.slots, MOST_SLOTS)):
            if len(usable) + wanted >= most:
                break
            slot = (*key, index)
            found = claims.get(slot)
            taken = found is not None and not _takeable(found, ask, delay_s, lives, me)
            # What serves here is an earlier object's if the watch of InferenceServices lags behind that of Leases.
            serves = index in ask.ready and (found is None or not (found.ready or found.edition > ask.edition))
            if found is not None and (found.holder == me or (taken and not serves)):
                continue
            back = taken and serves
            since[slot] = now if back and not live else waiting.get(slot, now)
            if serves:  # who took it while this Mac was away may lack the room, or be about to serve it
                pause_s = BACK_S if back else 0.0
            else:
                pause_s = 0.0 if alone else _pause_s(delay_s(key), slot, me, load, len(usable) + wanted)
            left_s = since[slot] + pause_s - now
            if left_s > 0:
                again.append(left_s)
                continue
            load += 1
            if found is None:
                moves.append(Move(ClaimAction.CLAIM, slot, ask.uid, created=ask.created))
            else:
                moves.append(Move(ClaimAction.TAKE, slot, ask.uid, found.version, ready=serves, created=ask.created))
            wanted += 1
    return ClaimDecision(mine, tuple(moves), since, min(again, default=None))


def peers_ready(held: Iterable[Claim], lives: Mapping[tuple[str, str], Life], me: str, slots: int) -> int:
    """Number of a service's replicas that live peers report to serve. `held`: the claims on it."""
    return sum(
        claim.ready
        and claim.holder not in ("", me)
        and claim.slot[2] < slots
        and lives.get((claim.slot[0], claim.holder)) is not Life.SILENT
        for claim in held
    )


def shared_namespaces(lives: Mapping[tuple[str, str], Life], me: str) -> frozenset[str]:
    """Namespaces in which another Mac is live."""
    return frozenset(space for (space, node), life in lives.items() if node != me and life is not Life.SILENT)
