"""The ports of this Mac's engines, and of the gateway in front of those on demand: who holds which, and the next one.

A service keeps its port for as long as it can: clients, and slices in other caches, know it. While an on-demand service
is unloaded, it holds the gateway's port only, and its engine's port is free for another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from metal_supervisor.cluster.report import PORT_IN_USE
from metal_supervisor.controller.snapshot import Snapshot
from metal_supervisor.host import processes
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.processes import UNUSED, RunNote
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Key, Service
from metal_supervisor.state import programs
from metal_supervisor.state.directory import StateDir

MOST_NAMED = 3
"""Namespaces that are named once no port is free."""


def choose_port(wanted: int | None, kept: Sequence[int], allowed: range, is_free: Callable[[int], bool]) -> int | None:
    """Choose a service's port within the `allowed` range: the wanted one, else one it has, else the first free one.

    `kept`: ports of its record and its specs, the most current first. A `wanted` port outside of the range counts as
    none: a manifest must not put a server on port 22 of this Mac.
    """
    if wanted is not None and wanted in allowed:
        return wanted
    stays = (port for port in kept if port in allowed and is_free(port))
    return next(stays, None) or next((port for port in allowed if is_free(port)), None)


def is_unloaded(service: Service, record: Record | None, snapshot: Snapshot) -> bool:
    """True if a service is on demand, has no engine, and no request waits for one."""
    if service.idle_s is None or (record is not None and record.runs):
        return False
    program = programs.program_name(service.key)
    return not snapshot.uses.get(program, UNUSED).waiting and snapshot.live_note(program) is None


def front_key(key: Key) -> Key:
    """Key of the port at which the gateway answers for an engine."""
    return key[0], f"{key[1]}/front"


def next_key(key: Key) -> Key:
    """Key of the port of an engine's next start."""
    return key[0], f"{key[1]}/next"


class Ports:
    """The ports that this Mac's engines hold. The services of a shared daemon all have its port."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._of: dict[Key, int] = {}
        self._holders: dict[int, dict[Key, str]] = {}
        self._further: list[tuple[Record, int | None]] = []
        """(engine, the port of its process): those whose ports are not indexed yet."""
        for record in records:
            self.hold(record, record.idle_s is not None and not record.runs)

    def hold(self, engine: Record, unloaded: bool = False) -> None:
        """Note the ports of an engine, in place of those that it had; `unloaded`: it needs none for a process."""
        self._further.append((engine, None if unloaded else engine.port))

    def hold_next(self, engine: Record, port: int) -> None:
        """Note the port that an engine will have from its next start."""
        self._hold(next_key(engine.key), port, engine.runtime)

    def _hold(self, key: Key, port: int | None, runtime: str) -> None:
        if key in self._of:
            del self._holders[self._of.pop(key)][key]
        if port is not None:
            self._of[key] = port
            self._holders.setdefault(port, {})[key] = runtime

    def _index(self) -> None:
        for engine, port in self._further:
            self._hold(engine.key, port, engine.runtime)
            self._hold(front_key(engine.key), engine.front_port, "gateway")
        self._further = []

    def holders(self) -> str:
        """The namespaces with the most ports, and their numbers, as text."""
        self._index()
        counted = Counter(key[0] or "shared daemons" for key in self._of)
        return ", ".join(f"{namespace} holds {number}" for namespace, number in counted.most_common(MOST_NAMED))

    def holder(self, port: int, but: Key, but_runtime: str = "") -> Key | None:
        """An engine that holds a port, other than the one named, and of another runtime than the one named."""
        self._index()
        found = self._holders.get(port, {}).items()
        own = but, next_key(but)
        return next((key for key, runtime in found if key not in own and runtime != but_runtime), None)


class PortChoice:
    """Chooses the ports of services."""

    def __init__(self, settings: Settings, directory: StateDir) -> None:
        self._settings, self._state = settings, directory

    def held(self, records: Collection[Record]) -> Ports:
        """The ports of this Mac's engines, with those of their next starts."""
        found = Ports(records)
        for each in records:
            port = self._state.spec_of(each.program).get("port") if each.runs and not each.daemon else None
            if isinstance(port, int) and port != each.port:
                found.hold_next(each, port)
        return found

    def of(
        self, service: Service, record: Record | None, ports: Ports, snapshot: Snapshot
    ) -> tuple[int | None, tuple[str, str] | None]:
        """(the service's port, None), or (None, its problem).

        An unloaded service gets one in any case, by which it is judged; which one its engine gets is decided when it is
        loaded. Clients of an on-demand service do not see that port, so a taken containerPort does not keep it down.
        """
        kept = self._kept_ports(service, record)
        note = snapshot.notes.get(record.program) if record else None
        allowed = self._settings.port_range
        wanted = service.container_port
        if wanted is not None and wanted not in allowed:
            wanted = None
        holder = None if wanted is None else ports.holder(wanted, service.key)
        if holder is not None and service.idle_s is None:
            known = f"belongs to {'.'.join(holder)} already" if holder[0] == service.namespace else "is taken"
            return None, (PORT_IN_USE, f"spec.containerPort {wanted} {known}; choose another")
        reserved = self._settings.own_ports
        if wanted in reserved:
            own = "--port, --gateway, --metrics-listen"
            return None, (PORT_IN_USE, f"spec.containerPort {wanted} is this Mac's own ({own}); choose another")
        if holder is not None:
            wanted = None
        refused = note is not None and note.refused == PORT_IN_USE and record and note.edition == record.edition
        barred = kept if refused and wanted is None else ()  # a foreign process has it: move, rather than wait for ever
        port = self._chosen(wanted, kept, reserved.union(barred), service.key, ports)
        if port is None and is_unloaded(service, record, snapshot):
            taken = {*reserved, record.front_port} if record else reserved
            port = next((each for each in (*kept, *allowed) if each not in taken), None)
        return (None, self.none_free(ports)) if port is None else (port, None)

    def front(
        self, service: Service, record: Record | None, own: int | None, ports: Ports, taken: Collection[int]
    ) -> int | None:
        """Port for the gateway to answer at for an on-demand service; None if it is not one, or none is free.

        `taken`: those that other programs have.
        """
        if service.idle_s is None or own is None:
            return None
        kept = (record.front_port,) if record is not None and record.front_port is not None else ()
        return self._chosen(None, kept, {own, *self._settings.own_ports, *taken}, front_key(service.key), ports)

    def _chosen(
        self, wanted: int | None, kept: Sequence[int], barred: Collection[int], key: Key, ports: Ports
    ) -> int | None:
        """As `choose_port`; a port is free if it is not `barred`, no engine but that of `key` has it, nor a process."""

        def is_free(port: int) -> bool:
            if port in barred or ports.holder(port, key) is not None:
                return False
            return port in kept or processes.port_free(port, self._settings.bind_address)

        return choose_port(wanted, kept, self._settings.port_range, is_free)

    def _kept_ports(self, service: Service, record: Record | None) -> tuple[int, ...]:
        """Ports of a service: of its record, and of the spec that it is about to start from."""
        if record is None:
            found = [self._state.spec_of(programs.program_name(service.key)).get("port")]
        elif record.port in self._settings.port_range:
            found = [record.port]
        else:  # its engine still runs on a port that is not allowed any more; the next one was chosen before
            found = [record.port, self._state.spec_of(record.program).get("port")]
        return tuple(port for port in found if isinstance(port, int))

    def with_trouble(self, record: Record, service: Service, notes: Mapping[str, RunNote]) -> Record:
        """Warn of a port that another program holds, or that `--ports` does not allow."""
        note, wanted = notes.get(record.program), service.container_port
        if note is not None and note.refused == PORT_IN_USE and note.edition == record.edition:
            holder = processes.port_holder(record.port or 0)
            text = f"spec.containerPort {wanted} is taken by {holder}; free it, or choose another"
            if wanted is None:
                others = f"another of --ports {self._settings.ports}; widen the range if none is free"
                text = f"port {record.port} is taken by {holder}, and the engine gets {others}"
            return replace(record, warning=(PORT_IN_USE, text))
        if wanted is None or wanted in self._settings.port_range or record.warning or not record.asks:
            return record
        text = f"spec.containerPort {wanted} is not within this Mac's --ports {self._settings.ports}"
        if record.port == wanted:
            text += "; the engine keeps it until it starts next"
        return replace(record, warning=("PortIgnored", f"{text}; remove it, or choose one of these"))

    def none_free(self, ports: Ports) -> tuple[str, str]:
        """(reason, message) of a service that gets none."""
        held = ports.holders()
        who = f": {held}" if held else ""
        return "NoPort", f"no port of --ports {self._settings.ports} is free{who}; widen the range"
