"""Assignment of the cluster's requests to engines: one for each slot that this Mac holds of a service.

Each becomes a proposal, for admission to decide on. Services that are no longer requested are dismissed; an
engine whose slot another Mac took over keeps running here until it runs there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TypeAlias

from metal_supervisor import launch
from metal_supervisor.cluster.kube import Kube
from metal_supervisor.cluster.reference_reader import References
from metal_supervisor.cluster.report import NO_METAL, holds_requests
from metal_supervisor.controller import on_demand, reconcile
from metal_supervisor.controller.gateway_keys import GatewayKeys
from metal_supervisor.controller.prerequisites.claim_check import NO_RUNTIME
from metal_supervisor.controller.prerequisites.ports import Ports, is_unloaded
from metal_supervisor.controller.prerequisites.prerequisites import Prerequisites
from metal_supervisor.controller.resource_filter import ResourceFilter
from metal_supervisor.controller.snapshot import Snapshot
from metal_supervisor.models.store import Store
from metal_supervisor.placement import placement
from metal_supervisor.placement.placement import Placed, Placement
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec import grants, name_claims, references
from metal_supervisor.spec.processes import UNUSED, Observed
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.resources import MODEL_NOT_FOUND
from metal_supervisor.spec.sources import Artifact
from metal_supervisor.spec.types import Json, Key, Rejected, Service, Standing
from metal_supervisor.spec.withdrawal import NO_WITHDRAWAL
from metal_supervisor.state.home import StateError

Share: TypeAlias = tuple[tuple[int, ...], int, frozenset[int]]
"""Of a service: (the slots that this Mac holds, the number that other Macs serve, the slots that serve here)."""
UNSURE_S = 30.0
"""Seconds after the start in which an engine without a record is left alone until it is known what it should run."""
MODEL_LAG_S = 1.0
"""Seconds in which a service may be seen before its Model, or after it: each kind has a watch of its own."""
RESTORED_S = 600.0
"""Seconds for which an engine keeps running whose service a restored API lacks."""
AGAIN_S = 300.0
"""Seconds until this Mac takes a service again that waited here for memory, unless it is edited."""
LACKING_AGAIN_S = 3600.0
"""The same for a service that failed for lack of something: no Mac may have it, and each move costs requests."""
LACKING = NO_RUNTIME | {"RuntimeBinaryMissing", "RuntimeBroken", "ModelFileMissing", "InsufficientDisk", NO_METAL}
"""Reasons of failures that another Mac may not have."""
log = logging.getLogger("controller")


def _doubtful(item: Service | Rejected, record: Record) -> bool:
    """True if an item may come from another cluster: same name but another uid, or its Model is suddenly gone."""
    return item.uid != record.uid or (isinstance(item, Rejected) and item.reason == MODEL_NOT_FOUND)


def _replaced(found: Mapping[Key, Service | Rejected], records: Iterable[Record]) -> frozenset[Key]:
    """Services that are other objects than those of which engines run here, by the same names."""
    return frozenset(each.owner for each in records if each.owner in found and found[each.owner].uid != each.uid)


def _is_lacking(record: Record) -> bool:
    """True if a service failed for lack of something that another Mac may have."""
    return record.verdict.standing is Standing.FAILED and record.verdict.reason in LACKING


def _is_blocked(record: Record, snapshot: Snapshot) -> bool:
    """True if a service waits for memory of this Mac, or never fits into it, and its Model's limit allows it."""
    within = record.limit_bytes is None or record.reserved_bytes <= record.limit_bytes
    waits = record.verdict.standing is Standing.WAIT and record.key in snapshot.room.blocked
    return waits and within and (record.idle_s is None or on_demand.never_fits(record))


def _request(item: Service | Rejected) -> tuple[Key, str]:
    """A service and the digest of its engine's configuration, "" for one that is invalid."""
    return (item.namespace, item.name), item.asked.rpartition("|")[2] if isinstance(item, Service) else ""


def _charged(records: Iterable[Record]) -> frozenset[Key]:
    """Keys of services with an estimate; a record that is still being checked has none, and counts as an offer."""
    return frozenset(each.owner for each in records if not each.is_daemon and each.verdict.reason != reconcile.CHECKING)


@dataclass(frozen=True)
class _ServedFiles:
    """Files that this Mac's services are of, and what else they refer to."""

    inputs: tuple[object, ...]
    """What this was made from."""
    namespaces: Mapping[Artifact, frozenset[str]]
    """File -> namespaces of its services."""
    secrets: Mapping[Artifact, references.Source]
    others: frozenset[references.Source]


class Assignment:
    """Turns requests into proposals; keeps the claims of the latest pass."""

    unsure = False
    """An engine without a record had no proposal in the latest pass, because it is not known yet what it should run."""
    again_in_s: float | None = None
    """Seconds from the latest pass until a Model that it lacked is missing, None if none may still come."""
    _restored_at = 0.0
    """`Snapshot.restored_at` of the latest pass."""
    _seen_since: frozenset[Key] = frozenset()
    """Services seen since the API was restored: once such a service is absent, it was deleted."""

    def __init__(
        self,
        settings: Settings,
        kube: Kube,
        resource_filter: ResourceFilter,
        placing: Placement,
        store: Store,
        prerequisites: Prerequisites,
        wake: Callable[[], None],
    ) -> None:
        self._settings, self._resource_filter, self._placement = settings, resource_filter, placing
        self._store, self._prerequisites = store, prerequisites
        self._references = References(kube, wake)
        self._gateway_keys = GatewayKeys(settings)
        self.placed = Placed({})
        self._unsure_until = time.monotonic() + UNSURE_S
        self._files: _ServedFiles | None = None
        self._found: Mapping[Key, Service | Rejected] = {}
        """The services of the latest pass."""
        self._unable_until: dict[tuple[Key, str], float] = {}
        """Request that this Mac could not run -> monotonic time until which it takes no claim on it from others."""
        self._lacking: dict[Key, float] = {}
        """Service without its Model -> the monotonic time from which that counts."""
        self._failed: dict[Key, Service | Rejected] = {}
        """Services that could not be decided on in this pass, as they were read."""
        self._failed_before: Mapping[Key, Service | Rejected] = {}
        """Those of the pass before: that was logged."""

    def propose(self, before: Mapping[Key, Record], snapshot: Snapshot) -> dict[Key, Record]:
        """Proposals for the engines of this pass, without shared daemons. Raises StateError, OSError.

        `before`: the records of the last pass, with shared daemons.
        """
        self.unsure = False
        result = {} if snapshot.services is None else self._propose(before, snapshot.services, snapshot)
        for key, record in before.items():
            if key not in result and not record.is_daemon:
                result[key] = reconcile.unchanged(record)
        return result

    def _propose(
        self, before: Mapping[Key, Record], services: Mapping[Key, Json], snapshot: Snapshot
    ) -> dict[Key, Record]:
        """The proposals that change something, or could."""
        result: dict[Key, Record] = {}
        self._failed_before, self._failed = self._failed, {}
        if snapshot.restored_at != self._restored_at:
            self._restored_at = snapshot.restored_at
            self._seen_since = frozenset()
        self._seen_since |= services.keys()
        found = self._resource_filter.read(snapshot, before)
        replaced = frozenset() if snapshot.complete else _replaced(found, before.values())
        serving = self._ready(before, snapshot.observed)
        self.placed = self._placement.place(
            found,
            services.keys() - found.keys(),
            {key: serving[key] for key in serving.keys() - replaced},
            lambda item: self._delay_s(item, snapshot),
            _charged(before.values()),
            self._unable(before.values(), found, replaced, snapshot),
        )
        ports = self._prerequisites.ports.held(before.values())
        ours: dict[Key, tuple[Record, ...]] = {}
        for record in sorted(before.values(), key=lambda each: each.ordinal):
            ours[record.owner] = (*ours.get(record.owner, ()), record)
        mine = (
            item
            for key, item in found.items()
            if isinstance(item, Service) and (self.placed.mine.get(key) or key in ours)
        )
        self._prerequisites.daemons.prepare(mine, before)
        self._store.look_again(self._edited(found))  # before the first look at those that are new
        self._look_for(self._files_of(found, before))
        lagging = self._lagging(found)
        lost = name_claims.lost_names(found.values(), before.values())
        for key, item in found.items():
            if key in lagging:
                continue  # an engine that is there goes on
            if isinstance(item, Service):
                item = self._prerequisites.daemons.named(item)  # noqa: PLW2901
                if key in lost:
                    item = name_claims.without(item, lost[key])  # noqa: PLW2901
            try:
                self._share_out(key, item, ours.get(key, ()), serving.get(key, frozenset()), result, ports, snapshot)
            except (OSError, StateError):  # of this Mac
                raise
            except Exception:  # noqa: BLE001 - of one service: its engine goes on, and the others are decided on
                self._note_failure(key, item)
                self.unsure = True  # an engine of it may be up without a record
        for record in [each for each in before.values() if not each.is_daemon]:
            if record.owner not in found and (snapshot.complete or record.owner in services):
                if record.owner not in self._seen_since and snapshot.now < self._restored_at + RESTORED_S:
                    result[record.key] = reconcile.missing(record, self._restored_at + RESTORED_S)
                    continue
                why = reconcile.NOT_HERE if record.owner in services else reconcile.DELETED
                result[record.key] = reconcile.unchanged(reconcile.dismiss(record, snapshot.now, why))
        return result

    def _unable(
        self,
        records: Iterable[Record],
        found: Mapping[Key, Service | Rejected],
        replaced: frozenset[Key],
        snapshot: Snapshot,
    ) -> dict[Key, frozenset[int]]:
        """The slots of each service that this Mac cannot run now, while another Mac may."""
        now = time.monotonic()
        result: dict[Key, frozenset[int]] = {}
        self._unable_until = {request: until for request, until in self._unable_until.items() if now < until}
        for record in records:
            lacking, owner = _is_lacking(record), record.owner
            if owner in found and (lacking or owner in replaced or _is_blocked(record, snapshot)):
                self._unable_until[_request(found[owner])] = now + (LACKING_AGAIN_S if lacking else AGAIN_S)
                result[owner] = result.get(owner, frozenset()) | {record.slot}
        return result

    def _delay_s(self, item: Service | Rejected, snapshot: Snapshot) -> float | None:
        """As `ClaimCheck.delay_s`; None also for a service at which that fails, or that could not run here lately."""
        if _request(item) in self._unable_until:
            return None
        try:
            return self._prerequisites.claim_check.delay_s(item, snapshot)
        except (OSError, StateError):
            raise
        except Exception:  # noqa: BLE001 - of one service
            self._note_failure((item.namespace, item.name), item)
            return None

    def _note_failure(self, key: Key, item: Service | Rejected) -> None:
        """Log the error that is being handled, once for as long as it lasts."""
        if all(each.get(key) is not item for each in (self._failed_before, self._failed)):
            log.exception("a service cannot be decided on", extra={"service": ".".join(key)})
        self._failed[key] = item

    def _lagging(self, found: Mapping[Key, Service | Rejected]) -> set[Key]:
        """The services whose Model may be on its way, or that may be gone with it."""
        now = time.monotonic()
        lack = [key for key, item in found.items() if isinstance(item, Rejected) and item.reason == MODEL_NOT_FOUND]
        self._lacking = {key: self._lacking.get(key, now + MODEL_LAG_S) for key in lack}
        left_s = {key: until - now for key, until in self._lacking.items() if now < until}
        self.again_in_s = min(left_s.values(), default=None)
        return set(left_s)

    def _files_of(self, found: Mapping[Key, Service | Rejected], before: Mapping[Key, Record]) -> _ServedFiles:
        """Files of the services that this Mac serves; the very same while these are the same."""
        inputs = found, self.placed.mine, None if self.placed.known else before
        if self._files is None or self._files.inputs != inputs:
            serving = placement.to_serve(found, self.placed, before.values())
            namespaces = placement.namespaces_of(serving)
            secrets = {each: (each.secret[0], "secrets", each.secret[1]) for each in namespaces if each.secret}
            others = frozenset(source for item in serving for source in references.sources(item))
            self._files = _ServedFiles(inputs, namespaces, secrets, others)
        return self._files

    def _edited(self, found: Mapping[Key, Service | Rejected]) -> Iterable[Artifact]:
        """Files of the services that were edited, or whose Models were, since the latest pass.

        Not those of others, which may be of another namespace: each look asks a server, whose limits are for this Mac.
        """
        before, self._found = self._found, found
        if found is before:
            return ()
        edited = [item for key, item in found.items() if isinstance(item, Service) and item is not before.get(key)]
        return placement.namespaces_of(edited)

    def _look_for(self, files: _ServedFiles) -> None:
        """Have the store look for the model files, and the cluster for the referenced Secrets and ConfigMaps."""
        others = set(files.others)
        if asked := self._gateway_keys.source:
            others.add(asked)
        in_vain = {source for each, source in files.secrets.items() if self._store.state(each).phase == "Failed"}
        self._references.want(others.union(files.secrets.values()), in_vain)
        if asked:
            self._gateway_keys.keep(self._references.look(asked))
        keys = {each: references.keys_of(each, self._references.look) for each in files.namespaces}
        self._store.want(keys, files.namespaces)

    def _share_out(
        self,
        key: Key,
        item: Service | Rejected,
        ours: Sequence[Record],
        ready: frozenset[int],
        result: dict[Key, Record],
        ports: Ports,
        snapshot: Snapshot,
    ) -> None:
        """Assign an engine to each slot that this Mac holds of a service; an engine that has a slot keeps it.

        `ours`: the service's records, by ordinal; `ready`: the slots that serve here.
        """
        placed = self.placed
        if not snapshot.complete and any(_doubtful(item, record) for record in ours):
            return
        slots = placed.mine.get(key, ()) if placed.known else tuple(record.slot for record in ours if record.claimed)
        peers = self._placement.peers_ready(placed, item)
        if isinstance(item, Service) and item.references:
            item = references.filled(item, self._references.look)
        ordinals = {record.slot: record.ordinal for record in reversed(ours) if record.slot in slots}
        for slot in slots:
            if slot not in ordinals:
                ordinals[slot] = next(each for each in count() if each not in ordinals.values())
        for slot, ordinal in sorted(ordinals.items()):
            engine = replace(item, ordinal=ordinal) if ordinal != item.ordinal else item
            others = peers + len(ready.intersection(slots) - {slot})
            record = next((each for each in ours if each.ordinal == ordinal), None)
            proposal = self.take(engine, record, ports, snapshot)
            ports.hold(proposal, isinstance(engine, Service) and is_unloaded(engine, record, snapshot))
            if record is None and self._is_unsure(proposal, snapshot):
                self.unsure = True
                continue
            if (proposal.slot, proposal.claimed, proposal.peers_ready) != (slot, True, others):
                proposal = replace(proposal, slot=slot, claimed=True, peers_ready=others)
            result[engine.key] = proposal
        for record in ours:
            if record.ordinal not in ordinals.values():
                result[record.key] = self._let_go(record, max(1, item.replicas), snapshot)

    def take(
        self,
        item: Service | Rejected,
        record: Record | None,
        ports: Ports,
        snapshot: Snapshot,
    ) -> Record:
        """The proposal for one engine of this Mac, whose last record is `record`."""
        if record is not None and record.verdict.standing is Standing.REMOVING:
            record = replace(record, withdraw=NO_WITHDRAWAL)
        start_refused = self._start_refused(record, snapshot)
        if isinstance(item, Rejected):
            return reconcile.refuse(item, record, snapshot.now, start_refused, self._is_up(record, snapshot))
        return self._accepted(item, record, ports, snapshot, start_refused)

    def _accepted(
        self, service: Service, record: Record | None, ports: Ports, snapshot: Snapshot, start_refused: bool
    ) -> Record:
        outlook = self._prerequisites.outlook(service, record, ports, snapshot)
        up = self._is_up(record, snapshot)
        accepted = reconcile.accept(service, record, outlook, snapshot.now, start_refused, up)
        return grants.warned(self._prerequisites.ports.with_trouble(accepted, service, snapshot.notes), service)

    def _is_unsure(self, proposal: Record, snapshot: Snapshot) -> bool:
        """True if a service without a record waits to be known, and its engine runs: to wait would end it."""
        if proposal.verdict.standing is not Standing.WAIT:
            return False
        up = snapshot.live_note(proposal.program)
        return up is not None and time.monotonic() < self._unsure_until

    def _is_up(self, record: Record | None, snapshot: Snapshot) -> bool:
        """True if the engine of a record has a process; a launcher that refuses its start is none."""
        note = snapshot.live_note(record.program) if record is not None else None
        return note is not None and bool(note.pid)

    def _start_refused(self, record: Record | None, snapshot: Snapshot) -> bool:
        """True once the launcher has refused to start a barred program."""
        note = snapshot.notes.get(record.program) if record is not None else None
        refused = note is not None and note.refused == launch.BARRED
        return bool(refused and note and record and note.edition == record.edition)

    def _let_go(self, record: Record, slots: int, snapshot: Snapshot) -> Record:
        """The proposal after its claim was lost or released: dismissed once handed over, kept running here until then.

        One that is being loaded first answers the requests that wait for it here.
        """
        awaited = record.runs and snapshot.uses.get(record.program, UNUSED).waiting
        if not awaited and self._placement.handed_over(self.placed, record, slots):
            record = reconcile.dismiss(record, snapshot.now, reconcile.MOVED)
        return replace(reconcile.unchanged(record), claimed=False)

    def _ready(self, records: Mapping[Key, Record], observed: Mapping[str, Observed]) -> dict[Key, frozenset[int]]:
        """The slots of each service that take requests here; none if this Mac is about to sleep.

        Either the sidecar saw an engine serving, or the gateway holds requests until one of an on-demand service does.
        """
        if not self._placement.on and self._settings.replicas_per_mac == 1:
            return {}  # no use for it without claims
        found: dict[Key, frozenset[int]] = {}
        for record in records.values():
            seen = observed.get(record.program)
            serves = seen is not None and seen.ready and record.verdict.standing is Standing.RUN
            if serves or (record.claimed and holds_requests(record, seen)):
                found[record.owner] = found.get(record.owner, frozenset()) | {record.slot}
        return found
