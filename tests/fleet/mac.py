"""A Mac of a fleet that is cheap enough to have a hundred: its cluster half is real, its engines are simulated.

Real, and composed as controller/loop.py and sidecar/loop.py do: the three reflectors, Placement with its Claimer,
ControllerStatus with the report in the state directory, and the Membership, Registrar, Publisher and Statuses of a
sidecar, which learn of peers, namespaces and Models from that report. Controller and sidecar have a client each, with
connections and TLS sessions of their own.

Simulated: a controller's pass and a sidecar's are one function in one thread, without a bell between them; engines
(a record for each held slot, ready LOAD_S later, never dead), memory (every model fits and is at hand), supervisord,
probes, addresses of the documentation range. Passes in a row are paced as the controller's, by the part of this
machine that each Mac has: a real one has cores of its own, and reacts sooner. Manifests are read once for all Macs of a
process, because what is read of equal manifests is equal. So the CPU of these Macs is not that of real ones; `fleet.py`
measures a whole Mac beside them.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from metal_supervisor.cluster import status_mode
from metal_supervisor.cluster.manifests import api_path
from metal_supervisor.cluster.reflector import Reflector
from metal_supervisor.cluster.report import report
from metal_supervisor.controller import reconcile
from metal_supervisor.controller.controller_status import ControllerStatus
from metal_supervisor.controller.loop import LONGEST_PAUSE_S, SHARE, TICK_S
from metal_supervisor.controller.snapshot import Snapshot
from metal_supervisor.placement.leases import PREFIX
from metal_supervisor.placement.placement import Placed, Placement
from metal_supervisor.settings.loader import Settings
from metal_supervisor.sidecar.board import Row
from metal_supervisor.sidecar.cluster_context import cluster_context
from metal_supervisor.sidecar.membership import Membership, session_kept
from metal_supervisor.sidecar.registrar import Registrar
from metal_supervisor.sidecar.statuses import WantedModel, WantedStatus
from metal_supervisor.spec import resources
from metal_supervisor.spec.processes import Observed
from metal_supervisor.spec.record import Record, Verdict
from metal_supervisor.spec.types import Json, Key, ModelFile, Probe, Rejected, Service, Standing, engine_key
from metal_supervisor.state.directory import SESSION_FILE, StateDir
from metal_supervisor.state.programs import program_name
from metal_supervisor.state.reports import CONTROLLER_REPORT
from metal_supervisor.state.throttle import Throttle
from tests.fleet.tally import CountedKube, Tally

LOAD_S = 2.0
SOONEST_S = 0.02
FILE = ModelFile("Ready", path="/models/simulated.gguf", size_bytes=1 << 20)
Read = Callable[[Mapping[Key, Json], Mapping[Key, Json]], dict[Key, "Service | Rejected"]]
Held = tuple[float, Key, int, bool]
"""(monotonic time, InferenceService, slot, True once the Mac holds it and False once it does not)."""
log = logging.getLogger(__name__)


class Reader:
    """Reads manifests once for all Macs of this process. Thread-safe: at worst something is read twice."""

    def __init__(self, settings: Settings) -> None:
        self._policy = resources.Policy(
            default_runtime=settings.runtime,
            runtimes={"llama-server": frozenset({"gguf"})},
            installed=frozenset({"llama-server"}),
        )
        self._known: dict[tuple[str, ...], Service | resources.Bad] = {}

    def read(self, services: Mapping[Key, Json], models: Mapping[Key, Json]) -> dict[Key, Service | Rejected]:
        """The services of a Mac that could run all of them."""
        return resources.interpret(services, models, self._policy, read=self._one)

    def _one(
        self, resource: Json, model_of: Callable[[Key], Json | None], policy: resources.Policy, kept: str
    ) -> Service | resources.Bad:
        metadata = resource["metadata"]
        model = model_of((metadata["namespace"], resource["spec"]["modelRef"]))
        found = (model or {}).get("metadata", {})
        key = tuple(str(each.get(name)) for each in (metadata, found) for name in ("uid", "generation"))
        if key not in self._known:
            self._known[key] = resources.read_service(resource, model_of, policy, kept)
        return self._known[key]


class Readings:
    """What a Mac has read; as controller/resource_filter.py does, it reads again only what is another."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._seen: dict[Key, tuple[Json, Json | None]] = {}
        """Service -> its manifest and that of its Model."""
        self._answer: dict[Key, Service | Rejected] = {}

    def of(self, services: Mapping[Key, Json], models: Mapping[Key, Json]) -> dict[Key, Service | Rejected]:
        """The services of a Mac that could run all of them."""
        changed, seen = dict[Key, Json](), dict[Key, tuple[Json, Json | None]]()
        for key, each in services.items():
            found, before = models.get((key[0], each["spec"]["modelRef"])), self._seen.get(key)
            if before is None or before[0] is not each or before[1] is not found:
                before = each, found
                changed[key] = each
            seen[key] = before
        kept = {key: each for key, each in self._answer.items() if key in services and key not in changed}
        self._seen, self._answer = seen, kept | (self._read(changed, models) if changed else {})
        return self._answer


class SimulatedMac:
    """One Mac. `start` it; it runs until its process ends."""

    def __init__(self, base: Path, kubeconfig: Path, settings: Settings, number: int, read: Read, part: float) -> None:
        """`part`: of this machine that is this Mac's, in cores."""
        self.name, self.settings, self._readings = settings.node_name, settings, Readings(read)
        self._throttle = Throttle(SHARE * min(1.0, part), LONGEST_PAUSE_S / min(1.0, part))
        self.tally = Tally()
        self.state = StateDir(base)
        self.state.create()
        self._address, self._wake = f"198.51.{100 + number // 250}.{number % 250 + 1}", threading.Event()
        kube, sidecar_kube = CountedKube(kubeconfig, self.tally), CountedKube(kubeconfig, self.tally)
        wake, scope = self._wake.set, settings.namespace
        self.services = Reflector(kube, api_path("inferenceservices", scope), wake, namespace=scope)
        self.models = Reflector(kube, api_path("models", scope), wake)
        self.placement = Placement(settings, self.state, kube, self.name, wake)
        self.status = ControllerStatus(settings, self.state, kube)
        session = session_kept(self.state.path / SESSION_FILE)
        self.membership = Membership(sidecar_kube, self.name, settings.lease_duration, session)
        self.registrar = Registrar(sidecar_kube, self.name, self.membership, wake)
        self.records: dict[Key, Record] = {}
        self._ready_at: dict[Key, float] = {}
        """Engine -> monotonic time at which it serves."""
        self._mine: Mapping[Key, tuple[int, ...]] = {}
        self._held: list[Held] = []
        self.passes, self.pass_s = 0, 0.0
        self.errors: list[str] = []

    def start(self) -> None:
        """Start all threads."""
        self.services.start()
        self.models.start()
        self.placement.start()
        self.registrar.start()
        threading.Thread(target=self._run, name="passes", daemon=True).start()

    def held(self) -> list[Held]:
        """When this Mac came to hold slots, and ceased to, since the last call."""
        found, self._held = self._held, []
        return found

    def _run(self) -> None:
        pause_s = 0.0
        while True:
            self._wake.wait(pause_s)
            self._wake.clear()
            began = time.thread_time()
            self._throttle.begin()
            try:
                pause_s = self.one_pass()
            except Exception as error:
                log.exception("a pass failed")
                self.errors.append(repr(error))
                pause_s = 1.0
            self.passes, self.pass_s = self.passes + 1, self.pass_s + time.thread_time() - began
            time.sleep(self._throttle.pause_s())

    def one_pass(self) -> float:
        """One pass of controller and sidecar; returns the seconds until the next."""
        services, models = self.services.seen, self.models.seen
        if services.synced and models.synced:
            found = self._readings.of(services.items, models.items)
            operator = self.status.look_for_operator(services.items, models.items)
            placed = self.placement.place(
                found,
                services.items.keys() - found.keys(),
                self._serving(),
                lambda _: 0.0,
                {record.owner for record in self.records.values()},
            )
            if placed.known:
                self._note(placed)
                self._run_engines(found, placed)
        else:
            found, placed, operator = {}, Placed({}, known=False), None
        snapshot = Snapshot(time.time(), services.items, True, models.items, {}, {}, {})
        self.status.publish(
            snapshot,
            "",
            (self.services, self.models),
            self._file_of,
            (self.placement, placed),
            {"budget": 1 << 36, "left": 1 << 35},
        )
        self._tell_cluster()
        later = [] if placed.again_in_s is None else [max(SOONEST_S, placed.again_in_s)]
        loading = [at - time.monotonic() for at in self._ready_at.values() if at > time.monotonic()]
        later += [max(SOONEST_S, left_s) for left_s in loading]
        return min([TICK_S, *later, *([status_mode.UNDECIDED_S] if operator is None else [])])

    def _note(self, placed: Placed) -> None:
        before = {(key, slot) for key, slots in self._mine.items() for slot in slots}
        after = {(key, slot) for key, slots in placed.mine.items() for slot in slots}
        now = time.monotonic()
        self._held += [(now, *each, each in after) for each in before ^ after]
        self._mine = placed.mine

    def _serving(self) -> dict[Key, frozenset[int]]:
        now, found = time.monotonic(), dict[Key, frozenset[int]]()
        for key, record in self.records.items():
            if record.claimed and self._ready_at[key] <= now:
                found[record.owner] = found.get(record.owner, frozenset()) | {record.slot}
        return found

    def _run_engines(self, found: Mapping[Key, Service | Rejected], placed: Placed) -> None:
        """A record for each slot that is held; one that was lost goes once it is handed over, as in Assignment."""
        for owner, slots in placed.mine.items():
            item = found[owner]
            if isinstance(item, Service):
                for ordinal, slot in enumerate(slots):
                    key = engine_key(*owner, ordinal)
                    if key not in self._ready_at:
                        self._ready_at[key] = time.monotonic() + LOAD_S
                    self.records[key] = self._record(item, ordinal, slot, self.placement.peers_ready(placed, item))
        for key, record in list(self.records.items()):
            if record.slot in placed.mine.get(record.owner, ()):
                continue
            wanted = found.get(record.owner)
            if wanted is None or self.placement.handed_over(placed, record, max(1, wanted.replicas)):
                del self.records[key], self._ready_at[key]
            else:
                self.records[key] = replace(record, claimed=False)

    def _record(self, item: Service, ordinal: int, slot: int, peers: int) -> Record:
        key = engine_key(item.namespace, item.name, ordinal)
        known = self.records.get(key)
        verdict = known.verdict if known else Verdict(Standing.RUN, "Running", "", time.time())
        return Record(
            namespace=item.namespace,
            name=item.name,
            uid=item.uid,
            generation=item.generation,
            program=program_name(key),
            model=item.model.name,
            model_uid=item.model.uid,
            runtime=item.runtime,
            replicas=item.replicas,
            mode=item.mode,
            priority=item.priority,
            endpoint=item.endpoint,
            ordinal=ordinal,
            slot=slot,
            peers_ready=peers,
            port=20000 + hash(key) % 1000,
            host="127.0.0.1",
            edition="simulated",
            probe=Probe(),
            verdict=verdict,
        )

    def _file_of(self, model: Json) -> ModelFile:
        """As controller_status.file_of, with a store that has every file."""
        metadata = model["metadata"]
        where = metadata["namespace"], metadata["name"]
        used = any((record.namespace, record.model) == where for record in self.records.values())
        return reconcile.fitting(FILE, "gguf") if used else ModelFile("Pending")

    def _tell_cluster(self) -> None:
        """As Sidecar._register, with simulated observations."""
        told = json.loads((self.state.path / CONTROLLER_REPORT).read_text("utf-8"))
        now, rows = time.monotonic(), list[Row]()
        for key, record in self.records.items():
            ready = self._ready_at[key] <= now
            seen = Observed(record.program, 1, ready, 0.0, "RUNNING", served=ready)
            rows.append(Row(record, seen, report(record, seen), f"{self._address}:{record.port}", 0))
        wanted = {row.record.key: WantedStatus(row.record, row.report, self._address, "") for row in rows}
        models = {}
        for name, item in told["models"].items():
            namespace, _, short = name.partition("/")
            file = ModelFile(**item["file"])
            models[namespace, short] = WantedModel(item["uid"], item["generation"], item["source"], file)
        notes = {PREFIX + "address": self._address, PREFIX + "memory-budget": str(1 << 36)}
        self.registrar.want(wanted, models, cluster_context(self.settings.namespace, rows, told, notes))
