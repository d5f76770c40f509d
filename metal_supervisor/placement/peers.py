"""Peers: which Macs live, judged by their node Leases, and what is due once one does not.

A Mac counts as live while its node Lease changes, judged by our own clock alone and only while our own renewals come
back to us, so a stalled watch or a Mac that slept never takes its peers for dead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from metal_supervisor.cluster.manifests import node_lease_name
from metal_supervisor.placement.claims import Life, digest
from metal_supervisor.placement.leases import Claim, NodeLease, SlotId, parse
from metal_supervisor.spec.types import Json, Key

OVERDUE_AGAIN_S = 1.0


@dataclass(frozen=True)
class Sighting:
    """When a Lease was first seen in its present version."""

    version: str
    at: float
    """Monotonic time."""


def is_renewal(before: Json, now: Json) -> bool:
    """True if a change of a Lease says only that its holder lives: no decision depends on it but by its time."""
    old, new = parse(before), parse(now)
    return old == new and not isinstance(old, Claim)


def without_lease(
    claims: Mapping[SlotId, Claim], nodes: Mapping[tuple[str, str], NodeLease]
) -> frozenset[tuple[str, str]]:
    """(namespace, node) of the Macs that hold claims and have no node Lease: not yet, or it was deleted."""
    holders = {(slot[0], claim.holder) for slot, claim in claims.items() if claim.holder}
    return frozenset(holders - nodes.keys())


def sight(
    before: Mapping[Key, Sighting],
    leases: Mapping[Key, Json],
    now: float,
    renewals: Mapping[Key, Sighting] = {},
    missing: Collection[tuple[str, str]] = (),
) -> dict[Key, Sighting]:
    """First sighting of each Lease in its present version, and of the lack of those in `missing`.

    `renewals`: sightings that the watch noted as they came. `missing`: (namespace, node) of Macs without a node Lease.
    """
    result = {}
    for key, lease in leases.items():
        version = str(lease["metadata"].get("resourceVersion", ""))
        known = before.get(key)
        if known is None or known.version != version:
            known = renewals.get(key)
        result[key] = known if known and known.version == version else Sighting(version, now)
    for namespace, node in missing:
        key = namespace, node_lease_name(node)
        known = before.get(key)
        result[key] = known if known and not known.version else Sighting("", now)
    return result


def judge(
    claims: Mapping[SlotId, Claim],
    nodes: Mapping[tuple[str, str], NodeLease],
    sightings: Mapping[Key, Sighting],
    me: str,
    connected_at: float,
    duration_s: float,
    resumed_at: Mapping[str, float] = {},
    known_silent: Collection[tuple[str, str]] = (),
    now: float = 0.0,
) -> dict[tuple[str, str], Life]:
    """State of every Mac that has a node Lease or holds a claim, by (namespace, node).

    Ages count only up to the last of our own renewals that was seen, and start anew with every connection, and after
    each gap in our own renewals (`resumed_at`: namespace -> its end): peers had the same outage, and come back later.
    Those in `known_silent`, by (namespace, node), were silent before it. This Mac itself is silent if none of its
    renewals was seen by `now` for as long as its Lease promised: its peers see no other.
    """
    result = {}
    own = {
        namespace: sightings[namespace, node_lease_name(me)].at
        for namespace, node in nodes
        if node == me and (namespace, node_lease_name(me)) in sightings
    }

    def age(namespace: str, name: str, node: str) -> float:
        if node == me:
            return now - own.get(namespace, now)
        seen = sightings.get((namespace, name))
        resumed = resumed_at.get(namespace, 0.0) if (namespace, node) not in known_silent else 0.0
        since = max(seen.at if seen else 0.0, connected_at, resumed)
        return own.get(namespace, connected_at) - since

    for (namespace, node), lease in nodes.items():
        life = Life.DRAINING if lease.unschedulable == "drain" else Life.LIVE
        if lease.released or age(namespace, node_lease_name(node), node) >= lease.duration_s:
            life = Life.SILENT
        result[namespace, node] = life
    for namespace, node in without_lease(claims, nodes):  # its claims may be old, and a deleted Lease is renewed soon
        quiet = age(namespace, node_lease_name(node), node) >= duration_s and node != me
        result[namespace, node] = Life.SILENT if quiet else Life.LIVE
    return result


def next_silence_s(
    nodes: Mapping[tuple[str, str], NodeLease],
    lives: Mapping[tuple[str, str], Life],
    sightings: Mapping[Key, Sighting],
    me: str,
    connected_at: float,
    now: float,
) -> float | None:
    """Seconds until a live peer may be silent; None without one. One that is overdue is looked at again and again."""
    left = (
        max(sightings[where[0], node_lease_name(where[1])].at, connected_at) + lease.duration_s - now
        for where, lease in nodes.items()
        if where[1] != me and lives[where] is not Life.SILENT
    )
    return max(OVERDUE_AGAIN_S, found) if (found := min(left, default=None)) is not None else None


def turn(lives: Mapping[tuple[str, str], Life], me: str, peer: tuple[str, str]) -> int:
    """How many live Macs come before this one to withdraw the endpoints of a silent peer: each peer has its order."""
    mine = digest(me, *peer)
    return sum(
        digest(node, *peer) < mine
        for (space, node), life in lives.items()
        if space == peer[0] and node != me and life is not Life.SILENT
    )
