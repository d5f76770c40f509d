"""Prerequisites of a service on this Mac, as of now: model files, port, engine binary, confinement.

The controller asks for every service in every pass; this module looks at the machine, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from metal_supervisor.controller import context_choice, reconcile
from metal_supervisor.controller.composer import Composer, EngineParts
from metal_supervisor.controller.confinement_policies import Confined, Confinement
from metal_supervisor.controller.context_choice import Composition
from metal_supervisor.controller.daemons import Daemons
from metal_supervisor.controller.ports import PortChoice, Ports, front_key
from metal_supervisor.controller.reconcile import Outlook, Running
from metal_supervisor.controller.remembered import Remembered, nothing
from metal_supervisor.controller.snapshot import Room, Snapshot
from metal_supervisor.host import machine
from metal_supervisor.memory.refusals import over_pool, too_large
from metal_supervisor.models.headers import Headers
from metal_supervisor.models.metadata import Demand, Reading
from metal_supervisor.models.store import Store
from metal_supervisor.runtimes import RUNTIMES, Binary
from metal_supervisor.runtimes.builds import Broken, Builds
from metal_supervisor.runtimes.metal_state import ASKED
from metal_supervisor.runtimes.runtime import Runtime
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.document import whole
from metal_supervisor.spec.limits import limit_of
from metal_supervisor.spec.processes import RunNote
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.sources import Artifact, library_model
from metal_supervisor.spec.types import Engine, Json, ModelFile, PartKey, Program, Rejected, Service
from metal_supervisor.state import programs
from metal_supervisor.state.directory import StateDir

Files: TypeAlias = dict[PartKey | None, tuple[Artifact, ModelFile]]
"""The file's role in a service, None for its model -> the artifact, and its state on this Mac."""
READY_S, FETCH_S, CANNOT_S = 0.0, 2.0, 8.0
ASKING = ModelFile("Checking", message="the engine's program is being asked what it knows")
METAL_ASKED = ModelFile("Checking", message=ASKED)
LOOKING = ModelFile("Checking", message="it is being found out whether the user's own daemon answers")
CONFINING = ModelFile("Checking", message="checking that this machine can confine the engine")
LIBRARY = ModelFile("Ready")
"""State of a model in Ollama's library, which Ollama stores itself."""
FOREIGN = Reading(None, problem="a manifest may not name it")
READING = ModelFile("Checking", message="the header of the model file is being read")


class Prerequisites:
    """Looks at the machine on behalf of the controller."""

    def __init__(
        self,
        settings: Settings,
        directory: StateDir,
        store: Store,
        headers: Headers,
        builds: Builds,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings, self._state = settings, directory
        self._store, self._headers, self._builds = store, headers, builds
        self._read: set[str] = set()
        """Files whose headers were asked for in this pass."""
        self._builds_seen: dict[str, tuple[Binary | None, tuple[str, str] | None]] = {}
        """Runtime -> its build, as this pass found it."""
        self._builds_before: Mapping[str, tuple[Binary | None, tuple[str, str] | None]] = {}
        """As the pass before found them: what is equal stays the same object, and is compared quickly."""
        self._confined_seen: dict[str, Confined | None] = {}
        """Runtime -> the outcome of its build's trial, as this pass found it."""
        self._offered_bytes = 0
        """Memory of the services that this Mac has offered to run in this pass."""
        self.specs: dict[str, str] = {}
        """Content of the specs composed so far, by file name."""
        self._composer = Composer(settings, directory.home)
        self.ports = PortChoice(settings, directory)
        self._advised: Remembered[Demand, str, Reading | None] = Remembered()
        self._composed: Remembered[tuple[Composition, ...] | None, str, Reading | None] = Remembered()
        self._lacks: Remembered[tuple[str, str] | None, str, None] = Remembered()
        self._programs: Remembered[Program, str, None] = Remembered()
        self._confinement = Confinement(settings, directory, wake)
        self.daemons = Daemons(settings, directory, builds, self._keep_spec, wake, self._confine)

    def _keep_spec(self, name: str, text: str) -> None:
        self.specs[name] = text

    def _confine(
        self, program: str, binary: Binary, port: int, services: Sequence[Service], own: Sequence[str],
        write: Sequence[str],
    ) -> Confined | None:  # fmt: skip
        """Confinement of a shared daemon, which may read the checked files of its services and its `own` paths."""
        judged = [path for each in services for _, file in self._files(each).values() for path in file.real]
        return self._confinement.daemon(program, binary, port, [*own, *judged], write)

    def still_reads(self, paths: Collection[str]) -> None:
        """Keep the headers of files for another pass without a look at them."""
        self._read.update(paths)

    def keep(self, records: Collection[Record]) -> None:
        """Drop what no record needs any more, and headers not requested since the last call."""
        wanted = {name for each in records for name in (each.spec_file, each.next_spec)}
        self.specs = {name: text for name, text in self.specs.items() if name in wanted}
        keys = {record.key for record in records}
        for remembered in (self._composed, self._advised, self._lacks, self._programs):
            remembered.forget_all_but(keys)
        self._headers.keep(self._read)
        self._read, self._offered_bytes = set(), 0
        self._builds_before, self._builds_seen, self._confined_seen = self._builds_seen, {}, {}

    def outlook(
        self,
        service: Service,
        record: Record | None,
        ports: Ports,
        snapshot: Snapshot,
    ) -> Outlook:
        """The service's prerequisites on this Mac, as of now."""
        name = programs.program_name(service.key)
        up = snapshot.live_note(name)
        if RUNTIMES[service.runtime].shared is None:
            found = self._found(service, record, self.ports.of(service, record, ports, snapshot.notes), up, snapshot)
            front = self.ports.front(service, record, found.port, ports)
            return replace(found, host=self._settings.bind_address, live=self._live(up), front_port=front)
        if not self.daemons.is_known(service.runtime):
            return Outlook(LOOKING, record.port if record else None)
        where, problem = self.daemons.address(service.runtime, ports), self.daemons.problem(service)
        if where is None:
            problem = problem or self.ports.none_free()
        chosen = None if problem or where is None else where[1], problem
        found = self._found(service, record, chosen, up, snapshot)
        front = self.ports.front(service, record, found.port, ports)
        return replace(found, host=where[0] if where else "", front_port=front)

    def basis(self, service: Service, record: Record, ports: Ports, snapshot: Snapshot) -> tuple[object, ...] | None:
        """All that the outlook of an engine depends on that runs from its spec, or waits for its turn; else None."""
        note, up = snapshot.notes.get(record.program), snapshot.live_note(record.program)
        steady = record.runs and not record.withdraw and (up is None or up.spec_file == record.spec_file)
        if not steady or not reconcile.same_request(record.asked, service.asked):
            return None
        around = self._around(service, record, ports, snapshot)
        return None if around is None else (service, record, note, up is None, *around)

    def _around(
        self, service: Service, record: Record, ports: Ports, snapshot: Snapshot
    ) -> tuple[object, ...] | None:
        """As `basis`, of what is neither the service nor its record; None also where that is more than this."""
        opened = service.allowed_args and any("/" in each for each in service.extra_args)  # files, looked at each time
        further = RUNTIMES[service.runtime].shared is not None or service.companions or opened
        if further or record.port not in self._settings.port_range:
            return None
        file, build = self._store.state(service.model.artifact), self._build(RUNTIMES[service.runtime])
        if build[0] is None or file.phase != "Ready":
            return None
        if service.runtime not in self._confined_seen:
            self._confined_seen[service.runtime] = self._confinement.tried(service.runtime, build[0])
        confined = self._confined_seen[service.runtime]
        if confined is None:
            return None
        held = ports.holder(service.container_port or record.port or 0, service.key)
        front = record.front_port and ports.holder(record.front_port, front_key(service.key))
        room = snapshot.room.total, snapshot.room.budget
        return file, self._look(file.path), build, snapshot.metal.problem, confined, held, front, room

    def _found(
        self,
        service: Service,
        record: Record | None,
        chosen: tuple[int | None, tuple[str, str] | None],
        up: RunNote | None,
        snapshot: Snapshot,
    ) -> Outlook:
        """The outlook without the running engine's address. `chosen`: (port, None), or (None, its problem)."""
        files = self._files(service)
        port, problem = chosen
        binary = None
        if problem is None:
            binary, problem = self._binary(service, snapshot)
        if problem or port is None:
            for artifact, _ in files.values():
                self._store.give_leave(artifact)  # its files can be fetched while it waits
            return Outlook(files[None][1], port or (record.port if record else None), problem=problem)
        if binary is None:
            return Outlook(ASKING, port)
        new = up is None and not (record and record.runs)  # a record may be lost while its engine serves
        if snapshot.metal.asking and new:
            return Outlook(METAL_ASKED, port)
        if any(file.phase != "Ready" for _, file in files.values()):
            return self._before_all_is_here(service, binary, files, port, snapshot.room)
        file, further = files[None][1], {role: each.path for role, (_, each) in files.items() if role is not None}
        library = library_model(service.model.source)
        reading = self._library(service.model.source) if library else self._look(file.path)
        parts = EngineParts(service, binary, file.path, port, reading, further, file.real)
        contexts = self._composer.contexts(context_choice.known(service, record), parts)
        compositions = self._composed.of(
            service.key, (contexts, parts), self._look_from_home,
            lambda look: self._composer.alternatives(contexts, parts, look),
        )  # fmt: skip
        if compositions is None:
            return Outlook(READING, port)
        has = record.room_bytes if record is not None and record.runs else 0
        free = self._free(service, snapshot.room) + has
        composed = context_choice.choose(compositions, free, snapshot.room.budget)
        engine, demand = composed.engine, composed.demand
        budget = snapshot.room.budget
        if demand.bytes is not None and demand.bytes > budget:
            demand = self._advised.of(
                service.key, (parts, demand, budget), self._look_from_home,
                lambda look: replace(demand, advice=self._composer.advice(parts, demand, budget, look)),
            )  # fmt: skip
        judged = [path for _, each in files.values() for path in each.real]
        confined = self._confinement.of(service, binary, engine, judged, port)
        if confined is None and new:
            return Outlook(CONFINING, port)
        if confined is not None and confined.problem:
            return Outlook(file, port, problem=confined.problem)
        if library and demand.bytes is None and record is not None and record.reserved_bytes:
            demand = Demand(record.reserved_bytes, record.mapped_bytes, record.memory)  # as when its model was on file
        bind, home, name = self._settings.bind_address, self._state.home, programs.program_name(service.key)
        sizes = demand.bytes or 0, demand.mapped_bytes
        policy = False if engine.daemon else confined.policy if confined else None  # an attacher is ours
        program = self._programs.of(
            service.key, (engine, port, service.asked, sizes, policy), nothing,
            lambda _: programs.compose(name, engine, port, bind, home, service.asked, *sizes, policy),
        )  # fmt: skip
        self.specs[program.spec_file] = program.spec
        running = self._running(name, record, engine, up)
        limit = service.model.limit.resolve(snapshot.room.total)
        return Outlook(
            file, port, engine, program, running=running, demand=demand, limit_bytes=limit,
            slot_context=composed.slot_context, unconfined=confined.why if confined else "",
            warning=confined.warning if confined else None,
        )

    def _files(self, service: Service) -> Files:
        """State of each file of a service, the model's first."""
        artifact = service.model.artifact
        state = LIBRARY if library_model(artifact.source) else self._store.state(artifact)
        file = state if state is LIBRARY else reconcile.fitting(state, service.model.format)
        found: Files = {None: (artifact, file)}
        for each in service.companions:
            found[each.key] = each.artifact, reconcile.fitting(self._store.state(each.artifact), "gguf")
        return found

    def _binary(self, service: Service, snapshot: Snapshot) -> tuple[Binary | None, tuple[str, str] | None]:
        """(the engine's binary, its problem); either may be None, and both are while the binary is being probed."""
        runtime = RUNTIMES[service.runtime]
        if runtime.shared is not None and not self.daemons.needs_binary(service.runtime):
            return Binary("", frozenset()), None  # the user's own daemon, in a context of its own
        if snapshot.metal.problem:
            return None, snapshot.metal.problem
        binary, problem = self._build(runtime)
        if binary is None:
            return None, problem
        lacks = self._lacks.of(service.key, (service, binary), nothing, lambda _: runtime.lacks(service, binary))
        return binary, lacks

    def _build(self, runtime: Runtime) -> tuple[Binary | None, tuple[str, str] | None]:
        """As `_build_of`, looked up once in a pass."""
        if runtime.name not in self._builds_seen:
            found, before = self._build_of(runtime), self._builds_before.get(runtime.name)
            self._builds_seen[runtime.name] = before if before is not None and before == found else found
        return self._builds_seen[runtime.name]

    def _build_of(self, runtime: Runtime) -> tuple[Binary | None, tuple[str, str] | None]:
        """(a runtime's build, its problem); both None while it is being probed."""
        try:
            return self._builds.look(runtime.executables), None
        except machine.NoBinary as error:
            return None, ("RuntimeBinaryMissing", str(error))
        except Broken as error:
            return None, ("RuntimeBroken", str(error))

    def _look_from_home(self, path: str) -> Reading | None:
        """Metadata of a file in a command line. A file that a manifest may not name is never opened."""
        whole = Path(self._state.home, path)
        return self._look(str(whole)) if self._store.may_open(whole) else FOREIGN

    def _library(self, source: str) -> Reading | None:
        """Metadata of a model of Ollama's library, from its registry; None while the request is under way."""
        self._read.add(source)
        return self._headers.library(source, self._settings.ollama_registry)

    def _look(self, path: str) -> Reading | None:
        self._read.add(path)
        return self._headers.look(path)

    def _before_all_is_here(
        self, service: Service, binary: Binary, files: Files, port: int, room: Room
    ) -> Outlook:
        """Outlook while files are missing. Headers are checked first: 80 GB that can never fit are not downloaded."""
        awaited = {role: each for role, each in files.items() if each[1].phase != "Ready"}
        failed = {role: each for role, each in awaited.items() if each[1].phase == "Failed"}
        asking = [artifact for artifact, _ in awaited.values() if self._store.asks_leave(artifact)]
        if asking and not failed:  # what lacks a part would not run, so nothing of it is fetched
            refusal = self._too_large(service, binary, files, port, room)
            if refusal is None:
                return Outlook(READING, port)
            for artifact in asking:
                if refusal.reason:
                    self._store.refuse(artifact, refusal)
                else:
                    self._store.give_leave(artifact)
            if refusal.reason:
                return Outlook(refusal, port)
        role, (_, file) = next(iter((failed or awaited).items()))
        if role is None:
            return Outlook(file, port)
        field = next(each.field for each in service.companions if each.key == role)
        if file.phase == "Failed":
            return Outlook(ModelFile("Pending"), port, problem=(file.reason, f"{field}: {file.message}"))
        return Outlook(replace(file, message=f"{field}: {file.message or 'its file is being looked at'}"), port)

    def _too_large(
        self, service: Service, binary: Binary, files: Files, port: int, room: Room
    ) -> ModelFile | None:
        """Refusal to download a service's missing files, without a reason if they may be; None while a header is read.

        The phase is always Pending; `reason` and `message` are set if the service can never fit.
        """
        paths = {role: file.path or each.source for role, (each, file) in files.items()}
        remote = {each.source: each for each, file in files.values() if file.phase != "Ready"}

        def look(path: str) -> Reading | None:
            return self._store.reading(remote[path]) if path in remote else self._look_from_home(path)

        reading, further = look(paths[None]), {role: path for role, path in paths.items() if role is not None}
        if reading is None:
            return None
        known = reading.header or reading.config
        parts = EngineParts(service, binary, paths[None], port, reading, further)
        composed = self._composer.compose(parts, look) if known else None
        if composed is None and known:
            return None
        if composed is not None:
            limit, pool = service.model.limit.resolve(room.total), self._limit(service, room)
            need, weights = composed[1].bytes, composed[1].mapped_bytes
            refusal = too_large(need, limit, room.budget, room.left, weights)
            refusal = refusal or over_pool(need, pool, service.namespace, weights)
            if refusal:
                reason, message = refusal
                if advice := self._composer.advice(parts, composed[1], room.budget, look):
                    message += f"; {advice}"
                return ModelFile("Pending", reason=reason, message=f"{message}; it is not fetched")
        return ModelFile("Pending")

    def _live(self, up: RunNote | None) -> tuple[str, int] | None:
        """(address, port) of the engine that is up, whatever it is to run next."""
        spec = self._state.read_spec(up.spec_file) if up is not None else {}
        host_, port = spec.get("host"), spec.get("port")
        return (host_, port) if isinstance(host_, str) and isinstance(port, int) else None

    def _running(self, name: str, record: Record | None, engine: Engine, up: RunNote | None) -> Running | None:
        """The running engine if it runs from the spec that its record names, or its section if the record is lost."""
        if up is None:
            return None
        if record is None:  # its record was lost; the spec remembers
            spec = self._spec_on_file(name)
            if up.spec_file != self._state.section_spec(name) or not isinstance(spec.get("port"), int):
                return None
            reserved, mapped = whole(spec, "reserved_bytes"), whole(spec, "mapped_bytes")
            demand = Demand(reserved or None, mapped)
            return Running(up.spec_file, str(spec.get("asked")), engine.probe, spec["port"], demand)
        if up.spec_file != record.spec_file or record.port is None:
            return None
        demand = Demand(record.reserved_bytes or None, record.mapped_bytes, record.memory)
        return Running(up.spec_file, record.asked, record.probe, record.port, demand)

    def delay_s(self, item: Service | Rejected, snapshot: Snapshot) -> float:
        """Seconds to leave a free slot to Macs that could serve it sooner."""
        if isinstance(item, Rejected) or not item.replicas or item.suspended:
            return READY_S
        parts = item.model.artifact, *(each.artifact for each in item.companions)
        nears = [self._store.near(artifact) for artifact in parts]
        near = None if None in nears else all(nears)
        binary, problem = self._binary(item, snapshot)
        if problem or (RUNTIMES[item.runtime].shared is not None and self.daemons.foreign(item)):
            return CANNOT_S
        if near:
            fits = self._has_room(item, binary, snapshot.room) if binary is not None else None
            return FETCH_S if fits is None else READY_S if fits else CANNOT_S
        return CANNOT_S if near is None else FETCH_S

    def _limit(self, service: Service, room: Room) -> int | None:
        """The memory that the models of its namespace may take together, None without a limit."""
        limit = limit_of(self._settings.limits.memory, service.namespace)
        return None if limit is None else limit.of(room.budget)

    def _free(self, service: Service, room: Room) -> int:
        """Memory that is left for a service, by the budget and its namespace's limit."""
        limit = self._limit(service, room)
        return room.left if limit is None else min(room.left, limit - room.charged.get(service.namespace, 0))

    def _has_room(self, service: Service, binary: Binary, room: Room) -> bool | None:
        """True if a service fits beside the engines of this Mac and the earlier offers of this pass.

        None while the header of its model is being read; True for a model whose size is known only once it runs.
        """
        path = str(self._store.here(service.model.artifact) or "")
        further = {each.key: str(self._store.here(each.artifact) or "") for each in service.companions}
        files = {path, *further.values()} - {""}

        def look(named: str) -> Reading | None:
            return self._look(named) if named in files else self._look_from_home(named)

        parts = EngineParts(service, binary, path, 0, self._look(path) if path else None, further)
        composed = self._composer.compose(parts, look)
        if composed is None and path:
            return None
        needs = composed[1].bytes or 0 if composed else 0
        if self._offered_bytes + needs > max(self._free(service, room), 0):
            return False
        self._offered_bytes += needs
        return True

    def _spec_on_file(self, program: str) -> Json:
        """The spec that the section of a program without a record names: its record was lost, its engine may run."""
        return self._state.read_spec(self._state.section_spec(program))

