"""Prerequisites of a service on this Mac, as of now: model files, port, engine binary, confinement.

The controller asks for every service in every pass; this module looks at the machine, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from metal_supervisor.controller import reconcile
from metal_supervisor.controller.prerequisites import context_choice
from metal_supervisor.controller.prerequisites.claim_check import ClaimCheck
from metal_supervisor.controller.prerequisites.composer import Composer, EngineParts
from metal_supervisor.controller.prerequisites.confinement_policies import Confined, Confinement
from metal_supervisor.controller.prerequisites.context_choice import Composition
from metal_supervisor.controller.prerequisites.daemons import Daemons
from metal_supervisor.controller.prerequisites.missing_files import READING, Files, MissingFiles
from metal_supervisor.controller.prerequisites.ports import PortChoice, Ports
from metal_supervisor.controller.prerequisites.readings import Readings
from metal_supervisor.controller.reconcile import Outlook
from metal_supervisor.controller.remembered import Remembered, nothing
from metal_supervisor.controller.snapshot import Snapshot
from metal_supervisor.host import machine
from metal_supervisor.models.headers import Headers
from metal_supervisor.models.metadata import Demand, Reading
from metal_supervisor.models.store import Store
from metal_supervisor.runtimes import RUNTIMES, Binary
from metal_supervisor.runtimes.builds import Broken, Builds
from metal_supervisor.runtimes.metal_state import ASKED
from metal_supervisor.runtimes.omlx import CACHE_DIRECTORY
from metal_supervisor.runtimes.runtime import Runtime
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.processes import RunNote
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.sources import library_model
from metal_supervisor.spec.types import ModelFile, Program, Service
from metal_supervisor.state import programs
from metal_supervisor.state.directory import StateDir

ASKING = ModelFile("Checking", message="the engine's program is being asked what it knows")
METAL_ASKED = ModelFile("Checking", message=ASKED)
LOOKING = ModelFile("Checking", message="it is being found out whether the user's own daemon answers")
PLACING = ModelFile("Checking", message=f"spec.{CACHE_DIRECTORY} is being looked at")
CONFINING = ModelFile("Checking", message="checking that this machine can confine the engine")
LIBRARY = ModelFile("Ready")
"""State of a model in Ollama's library, which Ollama stores itself."""


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
        self._store, self._builds = store, builds
        self.headers, self._readings = headers, Readings(headers, store, directory.home)
        self._builds_seen: dict[str, tuple[Binary | None, tuple[str, str] | None]] = {}
        """Runtime -> its build, as this pass found it."""
        self.composed: dict[str, Program] = {}
        """The latest composition of each program, perhaps of more memory than it was granted."""
        self._composer = Composer(settings, directory.home)
        self.ports = PortChoice(settings, directory)
        self._advised: Remembered[Demand, str, Reading | None] = Remembered()
        self._composed: Remembered[tuple[Composition, ...] | None, str, Reading | None] = Remembered()
        self._lacks: Remembered[tuple[str, str] | None, str, None] = Remembered()
        self._programs: Remembered[Program, str, None] = Remembered()
        self._confinement = Confinement(settings, directory, wake)
        self.daemons = Daemons(settings, directory, builds, self._keep_spec, wake, self._confine)
        self._missing = MissingFiles(store, self._composer, self._readings)
        self.claim_check = ClaimCheck(store, self._composer, self._readings, self.daemons, self._binary, wake)

    def _keep_spec(self, made: Program) -> None:
        self.composed[made.name] = made

    def _confine(
        self,
        program: str,
        binary: Binary,
        port: int,
        services: Sequence[Service],
        own: Sequence[str],
        write: Sequence[str],
    ) -> Confined | None:
        """Confinement of a shared daemon, which may read the checked files of its services and its `own` paths."""
        judged = [path for each in services for _, file in self._files(each).values() for path in file.real]
        return self._confinement.daemon(program, binary, port, [*own, *judged], write)

    def keep(self, records: Collection[Record]) -> None:
        """Drop what no record needs any more, and headers not requested since the last call."""
        wanted = {each.program for each in records}
        self.composed = {name: made for name, made in self.composed.items() if name in wanted}
        keys = {record.key for record in records}
        for remembered in (self._composed, self._advised, self._lacks, self._programs):
            remembered.forget_all_but(keys)
        for each in (self.headers, self._confinement.paths, self.daemons.paths):
            each.forget_others()
        self.claim_check.begin()
        self._builds_seen = {}

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
        port: int | None
        if RUNTIMES[service.runtime].shared is None:
            host, live = self._settings.bind_address, self._live(up)
            port, problem = self.ports.of(service, record, ports, snapshot)
        elif not self.daemons.is_looked_at(service):
            return _looking(PLACING, record)
        elif self.daemons.is_known(service.runtime):
            host, port = self.daemons.address(service.runtime, ports) or ("", None)
            problem = self.daemons.problem(service) or (self.ports.none_free(ports) if port is None else None)
            live = None
        else:
            return _looking(LOOKING, record)
        found = self._found(service, record, None if problem else port, problem, up, snapshot)
        front = self.ports.front(service, record, found.port, ports, snapshot.taken)
        if service.idle_s is not None and front is None and found.port is not None:
            found = replace(found, problem=found.problem or self.ports.none_free(ports))
        return replace(found, host=host, live=live, live_edition=up.edition if up else "", front_port=front)

    def _found(
        self,
        service: Service,
        record: Record | None,
        port: int | None,
        problem: tuple[str, str] | None,
        up: RunNote | None,
        snapshot: Snapshot,
    ) -> Outlook:
        """The outlook without the engine's address. `problem`: of its port, which is None then."""
        files = self._files(service)
        binary = None
        if problem is None:
            binary, problem = self._binary(service, snapshot)
        if problem or port is None:
            for artifact, _ in files.values():
                self._store.give_leave(artifact)  # its files can be fetched while it waits
            return Outlook(files[None][1], port or (record.port if record else None), problem=problem)
        if binary is None:
            return Outlook(ASKING, port)
        if snapshot.metal.asking and _is_new(record, up):
            return Outlook(METAL_ASKED, port)
        if any(file.phase != "Ready" for _, file in files.values()):
            return self._missing.outlook(service, binary, files, port, snapshot.room)
        return self._complete(service, record, binary, files, port, up, snapshot)

    def _complete(
        self,
        service: Service,
        record: Record | None,
        binary: Binary,
        files: Files,
        port: int,
        up: RunNote | None,
        snapshot: Snapshot,
    ) -> Outlook:
        """The outlook of a service of which all files are here."""
        room, new = snapshot.room, _is_new(record, up)
        file, further = files[None][1], {role: each.path for role, (_, each) in files.items() if role is not None}
        library = library_model(service.model.source)
        if library:
            reading = self.headers.library(service.model.source, self._settings)
        else:
            reading = self.headers.look(file.path)
            if reading is not None and reading.header is not None and reading.header.companion:
                text = f"spec.source names {file.path}: {reading.header.companion}"
                return Outlook(file, port, problem=("InvalidModelFile", text))
        parts = EngineParts(service, binary, file.path, port, reading, further, file.real)
        contexts = self._composer.contexts(context_choice.known(service, record), parts)
        compositions = self._composed.of(
            service.key,
            (contexts, parts),
            self._readings.look_from_home,
            lambda look: self._composer.alternatives(contexts, parts, look),
        )
        if compositions is None:
            return Outlook(READING, port)
        has = record.reserved_bytes if record is not None and record.runs else 0
        composed = context_choice.choose(compositions, room.left + has, room.budget)
        engine, demand = composed.engine, self._with_advice(parts, composed.demand, room.budget)
        judged = [path for _, each in files.values() for path in each.real]
        confined = self._confinement.of(service, binary, engine, judged, port)
        if confined is None and (new or self._confinement.is_looking(service)):
            return Outlook(CONFINING, port)
        if confined is not None and confined.problem:
            return Outlook(file, port, problem=confined.problem)
        if library and demand.bytes is None and record is not None and record.reserved_bytes:
            demand = Demand(record.reserved_bytes, record.mapped_bytes, record.memory)  # as when its model was on file
        bind, home, name = self._settings.bind_address, self._state.home, programs.program_name(service.key)
        sizes = demand.bytes or 0, demand.mapped_bytes
        policy = False if engine.daemon else confined.policy if confined else None  # an attacher is ours
        program = self._programs.of(
            service.key,
            (engine, port, service.asked, sizes, policy),
            nothing,
            lambda _: programs.compose(name, engine, port, bind, home, service.asked, *sizes, policy),
        )
        self._keep_spec(program)
        return Outlook(
            file,
            port,
            engine,
            program,
            demand=demand,
            limit_bytes=service.model.limit.resolve(room.total),
            slot_context=composed.slot_context,
            unconfined=confined.why if confined else "",
            warning=confined.warning if confined else None,
        )

    def _with_advice(self, parts: EngineParts, demand: Demand, budget_bytes: int) -> Demand:
        """The estimate, with advice if it exceeds the budget."""
        if demand.bytes is None or demand.bytes <= budget_bytes:
            return demand
        return self._advised.of(
            parts.service.key,
            (parts, demand, budget_bytes),
            self._readings.look_from_home,
            lambda look: replace(demand, advice=self._composer.advice(parts, demand, budget_bytes, look)),
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
            self._builds_seen[runtime.name] = self._build_of(runtime)
        return self._builds_seen[runtime.name]

    def _build_of(self, runtime: Runtime) -> tuple[Binary | None, tuple[str, str] | None]:
        """(a runtime's build, its problem); both None while it is being probed."""
        try:
            return self._builds.look(runtime.executables), None
        except machine.NoBinary as error:
            return None, ("RuntimeBinaryMissing", str(error))
        except Broken as error:
            return None, ("RuntimeBroken", str(error))

    def _live(self, up: RunNote | None) -> tuple[str, int] | None:
        """(address, port) of the engine that is up, whatever it is to run next."""
        spec = up.spec if up is not None else {}
        host_, port = spec.get("host"), spec.get("port")
        return (host_, port) if isinstance(host_, str) and isinstance(port, int) else None


def _looking(file: ModelFile, record: Record | None) -> Outlook:
    """The outlook until what a shared daemon depends on has been looked at; ports stay as they are."""
    return Outlook(file, record.port, front_port=record.front_port) if record else Outlook(file, None)


def _is_new(record: Record | None, up: RunNote | None) -> bool:
    """True for an engine that neither is up nor is to run by its record, which may be lost while it serves."""
    return up is None and not (record and record.runs)
