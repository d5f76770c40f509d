"""Placement of InferenceServices on this Mac, when several Macs could run them: claims, requested and watched.

The controller passes in the services it has read, and gets back the slots that this Mac runs. With the
embedded API, or with `claims = off`, that is all of them; otherwise Leases decide, and a slot that another
Mac took over is served here until it is served there.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from metal_supervisor.cluster import manifests
from metal_supervisor.cluster.kube import Kube
from metal_supervisor.cluster.reflector import Reflector
from metal_supervisor.placement import claims
from metal_supervisor.placement.claimer import Claimer
from metal_supervisor.placement.claims import Ask, Life, Sighting, SlotId
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.sources import Artifact, library_model
from metal_supervisor.spec.types import Json, Key, Rejected, Service, Standing
from metal_supervisor.state.directory import SESSION_FILE, StateDir

CLONED = "another Mac uses this one's identity (a copied state directory?); set --node-name on one of them"
UNWATCHED = "if this Mac dies its traffic goes on: there is no other Mac and no reaper; apply conf/reaper/reaper.yaml"
REAPER_STALE_S = 60.0
CLONE_GONE_S = 90.0
"""Seconds without a renewal after which a clone counts as gone. Longer than it takes to notice a broken watch."""
log = logging.getLogger("controller")


@dataclass(frozen=True)
class Placed:
    """Slots that this Mac holds, and the state of the other Macs."""

    mine: Mapping[Key, tuple[int, ...]]
    """InferenceService -> the slots this Mac holds."""
    known: bool = True
    """False until the Leases have been read: running engines keep running, and none is started."""
    claims: Mapping[SlotId, claims.Claim] = field(default_factory=dict)
    lives: Mapping[tuple[str, str], Life] = field(default_factory=dict)
    again_in_s: float | None = None
    namespaces: frozenset[str] = frozenset()
    """Namespaces with services that this Mac could run: it keeps a node Lease in each."""
    silent: Collection[tuple[str, str]] = ()
    """(namespace, node) of Macs whose endpoints a peer has to withdraw."""


class Placement:
    """State of Leases and claims between passes."""

    def __init__(self, settings: Settings, state: StateDir, kube: Kube, node: str, wake: Callable[[], None]) -> None:
        self._settings, self._state, self._node = settings, state, node
        self.on = settings.uses_claims
        scope = f"/namespaces/{settings.namespace}" if settings.namespace else ""
        self._claimer = Claimer(kube, node, wake, settings.host_ip)
        # The passes between the first and the last answer to a batch of claims would each place a few.
        self._leases = Reflector(
            kube, f"/apis/coordination.k8s.io/v1{scope}/leases",
            lambda: None if self._claimer.busy else wake(), selector=f"{claims.KIND} in (node,claim,reaper)",
        )
        self._sightings: dict[Key, Sighting] = {}
        self._waiting: Mapping[SlotId, float] = {}
        self._own_session = ""
        self.unwatched = ""
        """Reason why no peer would withdraw this Mac's endpoints if it died, "" if one would."""
        self.cloned = False

    def start(self) -> None:
        """Start to watch Leases, if claims are on."""
        if self.on:
            self._leases.start()
            self._claimer.start()

    @property
    def error(self) -> str:
        """Error of the latest watch or claim, "" if there is none."""
        return (self._leases.seen.error or self._claimer.error) if self.on else ""

    def foreign(self) -> Mapping[Key, str]:
        """Services that another kind of agent serves -> description of it."""
        return dict(self._claimer.foreign)

    def place(
        self,
        found: Mapping[Key, Service | Rejected],
        not_ours: Collection[Key],
        ready: Mapping[Key, frozenset[int]],
        delay_s: Callable[[Service | Rejected], float],
        begun: Collection[Key] = (),
        leave: Collection[Key] = (),
    ) -> Placed:
        """Slots of `found` that this Mac holds, and the state of its peers.

        `ready`: slots that serve here. `delay_s`: delay in seconds before an offer for a service; called for each one
        that will take memory here and is not among `begun`, whose memory is counted already. `leave`: services that
        another Mac should have, if there is one.
        """
        most = self._settings.replicas_per_mac
        if not self.on:
            mine = {key: tuple(range(min(most, max(1, item.replicas)))) for key, item in found.items()}
            return Placed(mine, namespaces=frozenset(key[0] for key in found))
        if not self._leases.seen.synced:
            return Placed({}, known=False)
        now = time.monotonic()
        leases = self._claimer.seen(self._leases.seen.items)
        self._sightings = claims.sight(self._sightings, leases, now)
        held, nodes = claims.read(leases.values())
        self._look_for_a_clone(nodes, now)
        self._look_for_a_watcher(nodes, now)
        lives = claims.judge(
            held, nodes, self._sightings, self._node, self._leases.connected_at, self._settings.lease_duration
        )
        ours = {slot[:2] for slot, claim in held.items() if claim.holder == self._node}
        for key, item in found.items():
            if key not in begun and key in ours:
                delay_s(item)  # just claimed: its memory is not available to others
        asks = {
            key: Ask(
                item.uid,
                max(1, item.replicas),
                delay_s(item) if self._open(key, item, held, lives) else 0.0,
                ready.get(key, frozenset()),
                key in leave,
            )
            for key, item in found.items()
        }
        accepting = not (self._state.cordoned() or self.cloned)
        decision = claims.decide(asks, held, lives, self._node, accepting, self._waiting, now, not_ours, most)
        self._waiting = decision.waiting
        self._claimer.want(() if self.cloned else decision.moves)
        silent = claims.silent(lives, self._node)
        where = frozenset(key[0] for key in found)
        return Placed(decision.mine, True, held, lives, decision.again_in_s, where, silent)

    def _open(
        self,
        key: Key,
        item: Service | Rejected,
        held: Mapping[SlotId, claims.Claim],
        lives: Mapping[tuple[str, str], Life],
    ) -> bool:
        """True if this Mac could offer for a replica: an unclaimed one, or one of a Mac that is not live."""
        found = [held.get((*key, slot)) for slot in range(max(1, item.replicas))]
        return any(
            claim is None or (claim.holder != self._node and lives.get((key[0], claim.holder)) is not Life.LIVE)
            for claim in found
        )

    def peers_ready(self, placed: Placed, item: Service | Rejected) -> int:
        """Number of a service's replicas that peers serve."""
        if not self.on:
            return 0
        return claims.peers_ready((item.namespace, item.name), placed.claims, placed.lives, self._node, item.replicas)

    def speaks_for(self, placed: Placed, model: Key, services: Mapping[Key, Json]) -> bool:
        """True if this Mac writes a Model's status. One Mac that uses the Model does, and always the same one."""
        if not self.on:
            return True
        for key in sorted(key for key, item in services.items() if key[0] == model[0] and _uses(item, model[1])):
            if claim := placed.claims.get((*key, 0)):
                return claim.holder == self._node
        others = (node != self._node and life in (Life.LIVE, Life.DRAINING) and space == model[0]
                  for (space, node), life in placed.lives.items())
        return not any(others)

    def handed_over(self, placed: Placed, record: Record, slots: int) -> bool:
        """True if a record with a lost claim may be dismissed: it does not run, is surplus, or is served elsewhere."""
        if record.verdict.standing is not Standing.RUN or record.slot >= slots:
            return True
        holders = [claim for slot, claim in placed.claims.items() if slot[:2] == record.owner]
        return any(
            claim.ready and claim.holder != self._node
            and placed.lives.get((record.namespace, claim.holder)) in (Life.LIVE, Life.DRAINING)
            and claim.slot[2] == record.slot
            for claim in holders
        )

    def _look_for_a_watcher(self, nodes: Mapping[tuple[str, str], claims.NodeLease], now: float) -> None:
        """Warn, once certain, if neither a peer nor a reaper would withdraw this Mac's endpoints after its death."""
        peers = any(node != self._node and not lease.released for (_, node), lease in nodes.items())
        reaper = any(
            name == claims.REAPER_LEASE and now - seen.at < REAPER_STALE_S
            for (_, name), seen in self._sightings.items()
        )
        settled = self._leases.connected_at and now - self._leases.connected_at > REAPER_STALE_S
        before, self.unwatched = self.unwatched, UNWATCHED if settled and not (peers or reaper) else ""
        if self.unwatched and not before:
            log.warning("no peer watches this Mac", extra={"advice": self.unwatched})

    def _look_for_a_clone(self, nodes: Mapping[tuple[str, str], claims.NodeLease], now: float) -> None:
        """Detect another session in this Mac's node Lease after its own: two Macs with one identity.

        The one that started later gives way, for as long as the other renews the Lease; sessions begin with their start
        time.
        """
        try:
            ours = json.loads((self._state.path / SESSION_FILE).read_text("utf-8"))
            ours = [str(each) for each in ours] if isinstance(ours, list) else []
        except (OSError, ValueError):
            return
        cloned = False
        for (namespace, node), lease in nodes.items():
            if node != self._node or not lease.session or not ours:
                continue
            if lease.session in ours:
                self._own_session = lease.session
            elif self._own_session and lease.session < ours[-1] and not lease.released:
                seen = self._sightings.get((namespace, manifests.node_lease_name(node)))
                since = max(seen.at if seen else now, self._leases.connected_at)
                cloned = cloned or now - since < CLONE_GONE_S
        if cloned and not self.cloned:
            log.error("identity", extra={"error": CLONED})
        elif self.cloned and not cloned:
            log.info("no other Mac uses this one's identity any more")
        self.cloned = cloned


def _uses(service: Json, model: str) -> bool:
    spec = service.get("spec")
    return isinstance(spec, dict) and spec.get("modelRef") == model


def to_serve(found: Mapping[Key, Service | Rejected], placed: Placed, records: Collection[Record]) -> list[Service]:
    """The services of which this Mac runs an engine, or is about to."""
    owners = frozenset() if placed.known else {each.owner for each in records}
    return [
        item
        for key, item in found.items()
        if isinstance(item, Service) and item.replicas and not item.suspended
        and (key in placed.mine or key in owners)
    ]


def namespaces_of(services: Collection[Service]) -> dict[Artifact, frozenset[str]]:
    """Model or auxiliary file -> namespaces of its services, without models that Ollama downloads itself."""
    found: dict[Artifact, frozenset[str]] = {}
    for item in services:
        for artifact in (item.model.artifact, *(each.artifact for each in item.companions)):
            if not library_model(artifact.source):
                found[artifact] = found.get(artifact, frozenset()) | {item.namespace}
    return found


def node_labels(settings: Settings, node: str, system: str, machine: str, chip: str = "") -> dict[str, str]:
    """Labels that `spec.nodeSelector` is matched against: the well-known ones, the chip's, and the configured ones."""
    arch = {"arm64": "arm64", "aarch64": "arm64", "x86_64": "amd64", "amd64": "amd64"}.get(machine.lower(), machine)
    found = {
        "kubernetes.io/hostname": node,
        "kubernetes.io/os": system.lower(),
        "kubernetes.io/arch": arch,
        "metal-supervisor.io/node": node,
    }
    return {**found, **({"metal-supervisor.io/chip": chip} if chip else {}), **settings.labels}


def unplaced(written: Json, labels: Mapping[str, str]) -> str:
    """Reason why a service is not for this Mac, "" if it may be."""
    spec = written.get("spec")
    return claims.misfit(spec.get("nodeSelector") if isinstance(spec, dict) else None, labels)
