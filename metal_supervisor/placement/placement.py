"""Placement of InferenceServices on this Mac, when several Macs could run them: claims, requested and watched.

The controller passes in the services it has read, and gets back the slots that this Mac runs. With the
embedded API, or with `claims = off`, that is all of them; otherwise Leases decide, and a slot that another
Mac took over is served here until it is served there.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from metal_supervisor.cluster import manifests
from metal_supervisor.cluster.kube import Kube
from metal_supervisor.cluster.manifests import api_path
from metal_supervisor.cluster.reflector import Reflector, key_of
from metal_supervisor.placement import claims, leases, peers
from metal_supervisor.placement.claimer import Claimer
from metal_supervisor.placement.claims import Ask, Life
from metal_supervisor.placement.leases import Claim, LeaseReader, NodeLease, SlotId
from metal_supervisor.placement.peers import Sighting
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.document import mapping
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.sources import Artifact, library_model
from metal_supervisor.spec.types import Json, Key, Rejected, Service, Standing
from metal_supervisor.state.directory import SESSION_FILE, StateDir

CLONED = "another Mac uses this one's identity (a copied state directory?); set --node-name on one of them"
UNWATCHED = "if this Mac dies its traffic goes on: there is no other Mac and no reaper; apply conf/reaper/reaper.yaml"
REAPER_STALE_S = 60.0
TURN_S = 0.25
"""Pause between the turns of two Macs to withdraw a silent peer's endpoints."""
LAST_TURN_S = 2.0
"""Time until all have had their turns."""
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
    claims: Mapping[SlotId, Claim] = field(default_factory=dict)
    lives: Mapping[tuple[str, str], Life] = field(default_factory=dict)
    again_in_s: float | None = None
    namespaces: frozenset[str] = frozenset()
    """Namespaces with services that this Mac could run: it keeps a node Lease in each."""
    silent: Collection[tuple[str, str]] = ()
    """(namespace, node) of Macs whose endpoints a peer has to withdraw."""

    @cached_property
    def by_service(self) -> Mapping[Key, Sequence[Claim]]:
        """InferenceService -> the claims on it."""
        found: dict[Key, list[Claim]] = {}
        for slot, claim in self.claims.items():
            found.setdefault(slot[:2], []).append(claim)
        return found


class Placement:
    """State of Leases and claims between passes."""

    def __init__(self, settings: Settings, state: StateDir, kube: Kube, node: str, wake: Callable[[], None]) -> None:
        self._settings, self._state, self._node = settings, state, node
        self.on = settings.uses_claims
        self._claimer = Claimer(kube, node, wake, settings.host_ip, lambda: self._leases.seen.items)
        # The passes between the first and the last answer to a batch of claims would each place a few.
        self._leases = Reflector(
            kube,
            api_path("leases", settings.namespace),
            lambda: None if self._claimer.busy else wake(),
            selector=f"{leases.KIND} in (node,claim,reaper)",
            is_news=self._is_news,
        )
        self._reader = LeaseReader()
        self._sightings: dict[Key, Sighting] = {}
        self._renewals: dict[Key, Sighting] = {}
        """When each Lease was last seen to be renewed, for which there is no pass: many Macs renew all the time."""
        self._gap_s = settings.lease_duration / 2
        self._resumed_at: dict[str, float] = {}
        """Namespace -> monotonic time at which our own renewals were seen again after a gap."""
        self._silent: dict[tuple[str, str], float] = {}
        """Silent peer -> monotonic time since which it is."""
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

    def _is_news(self, before: Json, now: Json) -> bool:
        """Note the time of a renewal, which by itself is no reason for a pass; called by the watch's thread."""
        if not peers.is_renewal(before, now):
            return True
        key, at = key_of(now), time.monotonic()
        known = self._renewals.get(key)
        if known and key[1] == manifests.node_lease_name(self._node) and at - known.at > self._gap_s:
            self._resumed_at[key[0]] = at
        self._renewals[key] = Sighting(str(now["metadata"]["resourceVersion"]), at)
        return any(key == (namespace, manifests.node_lease_name(node)) for namespace, node in list(self._silent))

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
        delay_s: Callable[[Service | Rejected], float | None],
        begun: Collection[Key] = (),
        unable: Mapping[Key, frozenset[int]] = {},
    ) -> Placed:
        """Slots of `found` that this Mac holds, and the state of its peers.

        `ready`: slots that serve here. `delay_s`: as for `decide`, and called for each service that this Mac holds and
        that is not among `begun`, whose memory is counted already. `unable`: slots that this Mac cannot run.
        """
        most = self._settings.replicas_per_mac
        if not self.on:
            mine = {key: tuple(range(min(most, max(1, item.replicas)))) for key, item in found.items()}
            return Placed(mine, namespaces=frozenset(key[0] for key in found))
        if not self._leases.seen.synced:
            return Placed({}, known=False)
        now = time.monotonic()
        seen = self._claimer.seen(self._leases.seen.items)
        held, nodes = self._reader.read(seen.values())
        missing = peers.without_lease(held, nodes)
        self._sightings = peers.sight(self._sightings, seen, now, self._renewals, missing)
        for key in [key for key in list(self._renewals) if key not in seen]:
            del self._renewals[key]
        self._look_for_a_clone(nodes, now)
        self._look_for_a_watcher(nodes, now)
        lives = peers.judge(
            held,
            nodes,
            self._sightings,
            self._node,
            self._leases.connected_at,
            self._settings.lease_duration,
            self._resumed_at,
            self._silent.keys(),
            now,
        )
        ours = {slot[:2] for slot, claim in held.items() if claim.holder == self._node}
        for key, item in found.items():
            if key not in begun and key in ours:
                delay_s(item)  # just claimed: its memory is not available to others
        asks = {
            key: Ask(
                item.uid,
                max(1, item.replicas),
                ready.get(key, frozenset()),
                unable.get(key, frozenset()),
                item.created,
            )
            for key, item in found.items()
        }
        accepting = not (self._state.cordoned() or self.cloned)
        decision = claims.decide(
            asks,
            lambda key: delay_s(found[key]),
            held,
            lives,
            self._node,
            accepting,
            self._waiting,
            now,
            not_ours,
            most,
        )
        self._waiting = decision.waiting
        self._claimer.want(() if self.cloned else decision.moves)
        where = frozenset(key[0] for key in found)
        silent, turn_in_s = self._to_withdraw(lives, now)
        silence_s = peers.next_silence_s(nodes, lives, self._sightings, self._node, self._leases.connected_at, now)
        later = [each for each in (decision.again_in_s, turn_in_s, silence_s) if each is not None]
        return Placed(decision.mine, True, held, lives, min(later, default=None), where, silent)

    def _to_withdraw(
        self, lives: Mapping[tuple[str, str], Life], now: float
    ) -> tuple[Collection[tuple[str, str]], float | None]:
        """(the silent peers whose endpoints this Mac withdraws, seconds until there may be more).

        One of the live Macs does it at once. The others follow one by one, in case that it does not: it may lack the
        right. By then there is mostly nothing left to do, which costs each of them one request.
        """
        self._silent = {
            peer: self._silent.get(peer, now)
            for peer, life in lives.items()
            if life is Life.SILENT and peer[1] != self._node
        }
        left_s = {
            peer: since + min(LAST_TURN_S, TURN_S * peers.turn(lives, self._node, peer)) - now
            for peer, since in self._silent.items()
        }
        return sorted(peer for peer, left in left_s.items() if left <= 0), min(
            (left for left in left_s.values() if left > 0), default=None
        )

    def peers_ready(self, placed: Placed, item: Service | Rejected) -> int:
        """Number of a service's replicas that peers serve."""
        held = placed.by_service.get((item.namespace, item.name), ())
        return claims.peers_ready(held, placed.lives, self._node, item.replicas)

    def speaks_for(self, placed: Placed, models: Collection[Key], services: Mapping[Key, Json]) -> Collection[Key]:
        """The Models whose status this Mac writes. Of the Macs that use a Model one does, and always the same one."""
        if not self.on:
            return models
        shared, speakers = claims.shared_namespaces(placed.lives, self._node), dict[Key, str]()
        for key in sorted(services):
            name = mapping(services[key], "spec").get("modelRef")
            if isinstance(name, str) and (claim := placed.claims.get((*key, 0))):
                speakers.setdefault((key[0], name), claim.holder)
        return {key for key in models if (speakers[key] == self._node if key in speakers else key[0] not in shared)}

    def handed_over(self, placed: Placed, record: Record, slots: int) -> bool:
        """True if a record with a lost claim may be dismissed: it does not run, is surplus, or is served elsewhere."""
        if record.verdict.standing is not Standing.RUN or record.slot >= slots:
            return True
        claim = placed.claims.get((*record.owner, record.slot))
        return (
            claim is not None
            and claim.ready
            and claim.holder != self._node
            and placed.lives.get((record.namespace, claim.holder), Life.SILENT) is not Life.SILENT
        )

    def _look_for_a_watcher(self, nodes: Mapping[tuple[str, str], NodeLease], now: float) -> None:
        """Warn, once certain, if neither a peer nor a reaper would withdraw this Mac's endpoints after its death."""
        others = any(node != self._node and not lease.released for (_, node), lease in nodes.items())
        reaper = any(
            name == leases.REAPER_LEASE and now - seen.at < REAPER_STALE_S
            for (_, name), seen in self._sightings.items()
        )
        settled = self._leases.connected_at and now - self._leases.connected_at > REAPER_STALE_S
        before, self.unwatched = self.unwatched, UNWATCHED if settled and not (others or reaper) else ""
        if self.unwatched and not before:
            log.warning("no peer watches this Mac", extra={"advice": self.unwatched})

    def _look_for_a_clone(self, nodes: Mapping[tuple[str, str], NodeLease], now: float) -> None:
        """Detect another session in this Mac's node Lease after its own: two Macs with one identity.

        The one that started later gives way, for as long as the other renews the Lease; sessions begin with their start
        time.
        """
        try:
            ours = json.loads((self._state.path / SESSION_FILE).read_text("utf-8"))
            ours = [str(each) for each in ours] if isinstance(ours, list) else []
        except (OSError, ValueError, RecursionError):
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


def to_serve(found: Mapping[Key, Service | Rejected], placed: Placed, records: Collection[Record]) -> list[Service]:
    """The services of which this Mac runs an engine, or is about to."""
    owners = frozenset() if placed.known else {each.owner for each in records}
    return [
        item
        for key, item in found.items()
        if isinstance(item, Service) and item.replicas and not item.suspended and (key in placed.mine or key in owners)
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
    return {
        "kubernetes.io/hostname": node,
        "kubernetes.io/os": system.lower(),
        "kubernetes.io/arch": arch,
        "metal-supervisor.io/node": node,
        **({"metal-supervisor.io/chip": chip} if chip else {}),
        **settings.labels,
    }


def unplaced(written: Json, labels: Mapping[str, str]) -> str:
    """Reason why the `spec.nodeSelector` of a service does not match this Mac's labels, "" if it does."""
    selector = mapping(written, "spec").get("nodeSelector")
    if not selector:
        return ""
    if not isinstance(selector, dict):
        return "spec.nodeSelector must be an object of labels"
    missing = [f"{name}={value}" for name, value in sorted(selector.items()) if labels.get(name) != value]
    return f"spec.nodeSelector asks for {', '.join(missing)}" if missing else ""
