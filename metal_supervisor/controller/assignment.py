"""Assignment of the cluster's requests to records: one engine for each slot that this Mac holds of a service.

Memory is ignored here; admission decides on it afterwards. Services that are no longer requested are dismissed; an
engine whose slot another Mac took over keeps running here until it runs there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import count

from metal_supervisor import launch
from metal_supervisor.cluster.kube import Kube
from metal_supervisor.cluster.reference_reader import References
from metal_supervisor.controller import reconcile
from metal_supervisor.controller.prerequisites import Prerequisites
from metal_supervisor.controller.resource_filter import ResourceFilter
from metal_supervisor.controller.snapshot import Snapshot
from metal_supervisor.host import sleep_note
from metal_supervisor.models.store import Store
from metal_supervisor.placement import placement
from metal_supervisor.placement.placement import Placed, Placement
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec import limits, references
from metal_supervisor.spec.types import Key, Observed, Record, Rejected, Service, Standing
from metal_supervisor.spec.withdrawal import NO_WITHDRAWAL
from metal_supervisor.state.directory import StateDir


def _doubtful(item: Service | Rejected, record: Record) -> bool:
    """True if an item may come from another cluster: same name but another uid, or its Model is suddenly gone."""
    return item.uid != record.uid or (isinstance(item, Rejected) and item.reason == "ModelNotFound")


def _charged(records: Iterable[Record]) -> frozenset[Key]:
    """Keys of services with an estimate; a record that is still being checked has none, and counts as an offer."""
    return frozenset(each.owner for each in records if not each.is_daemon and each.verdict.reason != "Checking")


class Assignment:
    """Turns requests into records; keeps the claims and the serving replicas of the latest pass."""

    def __init__(
        self,
        settings: Settings,
        directory: StateDir,
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
        self._sleep = sleep_note.SleepNoteReader(directory.path)
        self._serving: Mapping[Key, frozenset[int]] = {}
        self.placed = Placed({})

    def ask(self, before: Mapping[Key, Record], snapshot: Snapshot) -> dict[Key, Record]:
        """The records after this pass's requests; those of shared daemons unchanged. Raises StateError, OSError."""
        records = dict(before)
        if snapshot.services is None:
            return records
        found = self._resource_filter.read(snapshot.services, snapshot.models, records)
        self._serving = self._ready(records, snapshot.observed)
        self.placed = self._placement.place(
            found, snapshot.services.keys() - found.keys(), self._serving, self._prerequisites.delay_s,
            _charged(records.values()),
        )  # fmt: skip
        mine = (item for item in found.values() if isinstance(item, Service) and self._is_mine(item, records))
        self._prerequisites.daemons.prepare(mine, records)
        self._look_for(placement.to_serve(found, self.placed, records.values()))
        for item in found.values():
            known = references.filled(item, self._references.look) if isinstance(item, Service) else item
            self._share_out(known, records, snapshot)
        for record in [each for each in records.values() if not each.is_daemon]:
            if record.owner not in found and (snapshot.complete or record.owner in snapshot.services):
                why = reconcile.NOT_HERE if record.owner in snapshot.services else reconcile.DELETED
                records[record.key] = reconcile.dismiss(record, snapshot.now, why)
        return records

    def _look_for(self, serving: list[Service]) -> None:
        """Have the store look for the model files, and the cluster for the referenced Secrets and ConfigMaps."""
        wanted = placement.artifacts(serving)
        opening = {each: (each.secret[0], "secrets", each.secret[1]) for each in wanted if each.secret}
        others = {source for item in serving for source in references.sources(item)}
        in_vain = {source for each, source in opening.items() if self._store.state(each).phase == "Failed"}
        self._references.want(others.union(opening.values()), in_vain)
        keys = {each: references.keys_of(each, self._references.look) for each in wanted}
        self._store.want(keys, placement.namespaces_of(serving))

    def _is_mine(self, item: Service, records: Mapping[Key, Record]) -> bool:
        """True if this Mac holds a slot of the service, or has a record of one of its engines."""
        return bool(self.placed.mine.get(item.key)) or any(each.owner == item.key for each in records.values())

    def _share_out(self, item: Service | Rejected, records: dict[Key, Record], snapshot: Snapshot) -> None:
        """Assign an engine to each slot that this Mac holds of a service; an engine that has a slot keeps it."""
        placed = self.placed
        ours = sorted((each for each in records.values() if each.owner == item.key), key=lambda each: each.ordinal)
        if any(not snapshot.complete and _doubtful(item, record) for record in ours):
            return
        slots = placed.mine.get(item.key, ()) if placed.known else tuple(record.slot for record in ours)
        ordinals = {record.slot: record.ordinal for record in reversed(ours) if record.slot in slots}
        for slot in slots:
            if slot not in ordinals:
                ordinals[slot] = next(each for each in count() if each not in ordinals.values())
        for slot, ordinal in sorted(ordinals.items()):
            self.take(replace(item, ordinal=ordinal), slot, records, snapshot)
        for record in ours:
            if record.ordinal not in ordinals.values():
                records[record.key] = self._let_go(record, max(1, item.replicas), snapshot.now)

    def take(self, item: Service | Rejected, slot: int, records: dict[Key, Record], snapshot: Snapshot) -> None:
        """Decide the record of one engine of this Mac, given the records decided before it."""
        record = records.get(item.key)
        if record is not None and record.verdict.standing is Standing.REMOVING:
            record = replace(record, withdraw=NO_WITHDRAWAL)
        start_refused = self._start_refused(record, snapshot)
        if isinstance(item, Rejected):
            decided = reconcile.refuse(item, record, snapshot.now, start_refused)
        else:
            outlook = self._prerequisites.outlook(item, record, list(records.values()), snapshot.table, snapshot.notes)
            accepted = reconcile.accept(item, record, outlook, snapshot.now, start_refused)
            decided = limits.warned(self._prerequisites.with_port_trouble(accepted, item, snapshot.notes), item)
        here = self._serving.get((item.namespace, item.name), frozenset()) - {slot}
        peers = self._placement.peers_ready(self.placed, item) + len(here)
        records[item.key] = replace(decided, slot=slot, claimed=True, peers_ready=peers)

    def _start_refused(self, record: Record | None, snapshot: Snapshot) -> bool:
        """True once the launcher has refused to start a revoked spec."""
        note = snapshot.notes.get(record.program) if record is not None else None
        return bool(note and record and note.refused == launch.REVOKED and note.spec_file == record.spec_file)

    def _let_go(self, record: Record, slots: int, now: float) -> Record:
        """Record after its claim was lost or released: dismissed once handed over, kept running here until then."""
        if self._placement.handed_over(self.placed, record, slots):
            record = reconcile.dismiss(record, now, reconcile.MOVED)
        return replace(record, claimed=False)

    def _ready(self, records: Mapping[Key, Record], observed: Mapping[str, Observed]) -> dict[Key, frozenset[int]]:
        """The slots of each service that the sidecar saw serving here; none if this Mac is about to sleep."""
        if not self._placement.on and self._settings.replicas_per_mac == 1:
            return {}  # no use for it without claims
        if self._sleep.look() is not None:
            return {}  # a peer that still serves a slot we had before must not stop
        found: dict[Key, frozenset[int]] = {}
        for record in records.values():
            seen = observed.get(record.program)
            if seen is not None and seen.ready and record.claimed and record.verdict.standing is Standing.RUN:
                found[record.owner] = found.get(record.owner, frozenset()) | {record.slot}
        return found
