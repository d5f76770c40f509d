"""The Leases of placement: one for each claim on a replica, one for each Mac; how they are written, and read back."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from metal_supervisor.cluster.manifests import node_lease_name
from metal_supervisor.spec.resources import GROUP, VERSION
from metal_supervisor.spec.types import Json

PREFIX = "metal-supervisor.io/"
KIND = PREFIX + "kind"
NODE = PREFIX + "node"
SERVICE = PREFIX + "inferenceservice"
REAPER_LEASE = "metal-reaper"
READY = PREFIX + "ready"
UNABLE = PREFIX + "unable"
SESSION = PREFIX + "session"
UNSCHEDULABLE = PREFIX + "unschedulable"
CREATED = PREFIX + "created"
ENGINES = PREFIX + "engines"
LONGEST_NAME = 200
LONGEST_LABEL = 63
SlotId = tuple[str, str, int]
"""(namespace, InferenceService, index of the replica)."""


@dataclass(frozen=True)
class Claim:
    """A Lease on one slot."""

    slot: SlotId
    holder: str
    version: str
    owner_uid: str
    """uid of the InferenceService it was made for."""
    acquired: str
    ready: bool
    """True if the holder reports that it serves."""
    created: str = ""
    """creationTimestamp of that InferenceService."""
    unable: bool = False
    """True if the holder cannot run it, and any Mac that can may take it."""

    @property
    def edition(self) -> tuple[str, str]:
        """Order of the objects that had one name, on which all Macs agree: by the server's clock, then by uid."""
        return self.created, self.owner_uid


@dataclass(frozen=True)
class NodeLease:
    """A Mac's heartbeat in one namespace."""

    namespace: str
    node: str
    released: bool
    duration_s: float
    unschedulable: str
    """"" or `cordon` or `drain`."""
    session: str


class ClaimAction(str, Enum):
    """Kinds of requests about a slot."""

    CLAIM = "claim"
    TAKE = "take over"
    UPDATE = "update"
    RELEASE = "release"


@dataclass(frozen=True)
class Move:
    """One request about one slot."""

    do: ClaimAction
    slot: SlotId
    uid: str
    version: str = ""
    acquired: str = ""
    ready: bool = False
    created: str = ""
    unable: bool = False


def _short(name: str, most: int) -> str:
    if len(name) <= most:
        return name
    return f"{name[: most - 9].rstrip('-.')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def claim_name(service: str, index: int) -> str:
    """Name of the Lease of a slot."""
    return f"isvc-{_short(service, LONGEST_NAME)}-{index}"


def claim_object(move: Move, node: str, now_micro: str) -> Json:
    """Lease of a slot, as its holder applies it."""
    namespace, service, index = move.slot
    owner = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "InferenceService", "name": service, "uid": move.uid}
    metadata: Json = {
        "name": claim_name(service, index),
        "namespace": namespace,
        "labels": {KIND: "claim", NODE: node, SERVICE: _short(service, LONGEST_LABEL)},
        "annotations": {
            READY: "true" if move.ready else "false",
            CREATED: move.created,
            UNABLE: "true" if move.unable else "false",
        },
        "ownerReferences": [owner],
    }
    if move.do is not ClaimAction.CLAIM:
        metadata["resourceVersion"] = move.version
    return _lease(metadata, {"holderIdentity": node, "acquireTime": move.acquired or now_micro})


def node_lease_object(
    namespace: str, node: str, duration_s: float, annotations: Mapping[str, str], now_micro: str
) -> Json:
    """A Mac's node Lease. A duration of 0 releases it: peers act at once."""
    released = duration_s <= 0
    metadata = {
        "name": node_lease_name(node),
        "namespace": namespace,
        "labels": {KIND: "node", NODE: node},
        "annotations": dict(annotations),
    }
    spec = {
        "holderIdentity": "" if released else node,
        "leaseDurationSeconds": 1 if released else max(1, round(duration_s)),
        "renewTime": now_micro,
    }
    return _lease(metadata, spec)


def _lease(metadata: Json, spec: Json) -> Json:
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}


def _owner(metadata: Json) -> tuple[str, str]:
    """(name, uid) of the InferenceService that owns an object."""
    for each in metadata.get("ownerReferences") or []:
        if each.get("kind") == "InferenceService":
            return str(each.get("name", "")), str(each.get("uid", ""))
    return "", ""


def parse(lease: Json) -> Claim | NodeLease | None:
    """A Lease that is a claim or a Mac's own; None for any other, and for a damaged one."""
    metadata, spec = lease["metadata"], lease.get("spec") or {}
    labels, notes = metadata.get("labels") or {}, metadata.get("annotations") or {}
    namespace = metadata.get("namespace", "")
    if labels.get(KIND) == "node" and metadata["name"] == node_lease_name(labels.get(NODE, "")):
        duration = spec.get("leaseDurationSeconds")
        return NodeLease(
            namespace,
            labels[NODE],
            not spec.get("holderIdentity"),
            float(duration) if isinstance(duration, int) and duration > 0 else 40.0,
            notes.get(UNSCHEDULABLE, ""),
            notes.get(SESSION, ""),
        )
    if labels.get(KIND) != "claim":
        return None
    service, uid = _owner(metadata)
    service = service or labels.get(SERVICE, "")  # one without an owner is void: its holder, or another Mac, mends it
    index = metadata["name"].rpartition("-")[2]
    if not (service and index.isascii() and index.isdigit() and metadata["name"] == claim_name(service, int(index))):
        return None
    return Claim(
        (namespace, service, int(index)),
        spec.get("holderIdentity") or "",
        str(metadata.get("resourceVersion", "")),
        uid,
        spec.get("acquireTime") or "",
        notes.get(READY) == "true",
        notes.get(CREATED, ""),
        notes.get(UNABLE) == "true",
    )


class LeaseReader:
    """Reads all Leases, and parses each object once: of the thousands that a fleet has, few change between passes."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Json, Claim | NodeLease | None]] = {}
        """id of an object -> the object, so that no other gets its id, and what it was parsed to."""

    def read(self, leases: Iterable[Json]) -> tuple[dict[SlotId, Claim], dict[tuple[str, str], NodeLease]]:
        """(claims by slot, node Leases by (namespace, node))."""
        before = self._known
        self._known = {id(lease): before.get(id(lease)) or (lease, parse(lease)) for lease in leases}
        claims: dict[SlotId, Claim] = {}
        nodes: dict[tuple[str, str], NodeLease] = {}
        for _, found in self._known.values():
            if isinstance(found, Claim):
                claims[found.slot] = found
            elif found is not None:
                nodes[found.namespace, found.node] = found
        return claims, nodes
