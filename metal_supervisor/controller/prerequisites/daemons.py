"""Shared daemons, each for the models of several InferenceServices: started when first needed, stopped when unused.

Each has a record like a service's, without an InferenceService, and so is supervised, drained, restarted and watched
like any engine. Its spec stays unchanged while it is in use: an edit of one service, or a new release of this program,
must not restart the daemon under the others. A user's own Ollama is used where it answers, and never stopped.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from metal_supervisor.cluster.report import PORT_IN_USE
from metal_supervisor.controller import reconcile
from metal_supervisor.controller.prerequisites.confinement_policies import Confined
from metal_supervisor.controller.prerequisites.daemon_conflicts import (
    DAEMONS,
    cache_directory,
    conflict,
    not_shared,
    options_said,
)
from metal_supervisor.controller.prerequisites.own_ollama import Own
from metal_supervisor.controller.prerequisites.path_looks import PathLook, PathLooks
from metal_supervisor.controller.prerequisites.ports import Ports
from metal_supervisor.controller.snapshot import Snapshot
from metal_supervisor.host import machine, processes
from metal_supervisor.runtimes import RUNTIMES, Binary, Place
from metal_supervisor.runtimes.builds import Broken, Builds
from metal_supervisor.runtimes.ollama import NAME as OLLAMA
from metal_supervisor.runtimes.omlx import BASE, CACHE_DIRECTORY, KEY, KEY_FILE
from metal_supervisor.runtimes.omlx import NAME as OMLX
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec import name_claims
from metal_supervisor.spec.processes import LIVE, ProgramState, RunNote
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Json, Key, Probe, Program, Service, Standing
from metal_supervisor.spec.withdrawal import NO_WITHDRAWAL
from metal_supervisor.state import programs, trees
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.kept_files import write_atomic

UNUSED_S = 30.0
FORSAKEN_S = 60.0
"""Seconds that a user's own daemon may be away before a supervised one takes its place."""
log = logging.getLogger("controller")


def key_of(program: str) -> Key:
    """Key of a daemon's record."""
    return "", program


Confine: TypeAlias = Callable[[str, Binary, int, Sequence[Service], Sequence[str], Sequence[str]], Confined | None]
"""(program, build, port, services, paths it may read besides their models, paths it may write) -> confinement."""


class Daemons:
    """Keeps the records of shared daemons, and gives services their daemon's address or the reason for having none."""

    def __init__(
        self,
        settings: Settings,
        directory: StateDir,
        builds: Builds,
        keep_spec: Callable[[Program], None],
        wake: Callable[[], None],
        confine: Confine = lambda *_: Confined(False),
    ) -> None:
        self._confine = confine
        self._settings, self._state, self._builds, self._keep_spec = settings, directory, builds, keep_spec
        self.paths = PathLooks(settings, wake)
        self.own = Own("" if settings.ollama_url == "off" else settings.ollama_url, wake)
        self._unused_since: dict[str, float] = {}
        self._services: dict[str, list[Service]] = {}
        self._named: Mapping[Key, Service] = {}
        self._records: Mapping[Key, Record] = {}
        self._asked = False
        """True once the cluster's requests are known; until then daemons stay as they are."""
        self._strange: dict[str, int] = {}
        """Port of a daemon that a foreign process was found to hold, by program."""
        self._trouble: dict[str, str] = {}
        """Program -> the latest error that kept its files from being made, "" if they could be."""
        self.again_in_s: float | None = None
        """Seconds until the next pass that an unused daemon needs, None if there is none."""

    # ── for services ─────────────────────────────────────────────────────────────────────────────

    def prepare(self, services: Iterable[Service], records: Mapping[Key, Record]) -> None:
        """Take this pass's services: those that have a daemon first, oldest first.

        The order depends on records alone, so that neither a restart nor the order of a pass decides who is refused.
        """
        self._records, self._services, self._asked = records, {}, True
        shared = [
            each
            for each in services
            if each.runtime in DAEMONS
            and each.replicas
            and not each.suspended
            and self._has_place(each, records.get(each.key))
        ]
        for each in sorted(shared, key=lambda each: _seniority(each, records.get(each.key))):
            self._services.setdefault(each.runtime, []).append(each)
        served = [each for each in shared if self.problem(each) is None]
        names = {program: row.names for program, row in DAEMONS.items()}
        self._named = name_claims.on_daemons(served, records.values(), lambda each: names[each.runtime](each))
        self.own.want(OLLAMA in self._services or _is_own(records.get(key_of(OLLAMA))))

    def named(self, service: Service) -> Service:
        """A service with the further names that its daemon serves it under, and with a condition for those it lost."""
        return self._named.get(service.key, service)

    def address(self, program: str, ports: Ports) -> tuple[str, int] | None:
        """(host, port) of a daemon; None before it is known, or without a free port."""
        if self._uses_own(program):
            return self.own.address
        record = self._records.get(key_of(program))
        if record is not None and record.port not in (None, self._strange.get(program)) and not _is_own(record):
            return record.host, record.port or 0
        bind = self._settings.bind_address
        for port in self._settings.port_range:
            taken = port == self._strange.get(program) or ports.holder(port, key_of(program), program)
            if not taken and processes.port_free(port, bind):
                return bind, port
        return None

    def needs_binary(self, program: str) -> bool:
        """True if this Mac supervises the daemon; False while the user's own is used, or that is not known yet."""
        return program != OLLAMA or (self.own.known and not self._uses_own(program))

    def is_users(self, record: Record) -> bool:
        """True if the record's model is on the user's own daemon, which we do not start."""
        return record.daemon == OLLAMA and self._uses_own(OLLAMA)

    def is_known(self, program: str) -> bool:
        """True once it is known which daemon is used: a supervised one or the user's own."""
        return program != OLLAMA or self.own.known

    def _cache_of(self, service: Service) -> PathLook | None:
        """The directory that a service names for its daemon's cache; None for none, or until it has been looked at."""
        named = cache_directory(service)
        return self.paths.look(named) if named is not None else None

    def is_looked_at(self, service: Service) -> bool:
        """True unless a service names a directory for its daemon's cache that is still to be looked at."""
        return cache_directory(service) is None or self._cache_of(service) is not None

    def _has_place(self, service: Service, record: Record | None) -> bool:
        """True if a service names no directory for its daemon's cache, or one that it may name.

        Until it has been looked at, one that has the daemon keeps its place, and no other waits for a disk.
        """
        if not self.is_looked_at(service):
            return key_of(service.runtime) in self._records and _has_daemon(service, record)
        found = self._cache_of(service)
        return found is None or found.refusal is None

    def problem(self, service: Service) -> tuple[str, str] | None:
        """(reason, message) of what keeps a service off its daemon because of others on it."""
        if service.runtime not in DAEMONS:
            return None
        users = self._services.get(service.runtime, ())
        return conflict(service, users, self._settings, self._uses_own(service.runtime), self._cache_of(service))

    def foreign(self, service: Service) -> tuple[str, str] | None:
        """As `daemon_conflicts.not_shared`."""
        return not_shared(service, self._services.get(service.runtime, ()), self._settings)

    # ── the records ──────────────────────────────────────────────────────────────────────────────

    def keep(self, records: Mapping[Key, Record], snapshot: Snapshot) -> dict[Key, Record]:
        """The records, with those of the daemons that are needed."""
        result, self.again_in_s = dict(records), None
        self._records = records
        for program in DAEMONS:
            note = snapshot.notes.get(program)
            if note is not None and note.refused == PORT_IN_USE:
                self._strange[program] = note.spec.get("port", 0)
            users = [each for each in records.values() if each.daemon == program and _is_up(each, snapshot.table)]
            known = records.get(key_of(program))
            if users:
                self._unused_since.pop(program, None)
                if (kept := self._tried(program, known, snapshot)) is not None:
                    result[kept.key] = kept
                    result |= self._told_to_wait(program, kept, snapshot.live_note(program), result)
            elif known is not None:
                self._unneeded(result, known, snapshot.now)
        return result

    def _tried(self, program: str, known: Record | None, snapshot: Snapshot) -> Record | None:
        """As `_needed`; as it was if its files cannot be made: on a full disk others are to be stopped all the same."""
        problem, kept = "", known
        try:
            kept = self._needed(program, known, snapshot)
        except (OSError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem and problem != self._trouble.get(program):
            log.error("the files of a shared daemon cannot be made", extra={"program": program, "error": problem})
        self._trouble[program] = problem
        return kept

    def _needed(self, program: str, known: Record | None, snapshot: Snapshot) -> Record | None:
        """Record of a daemon in use; as it was (None without one) while the new record cannot be composed."""
        now, up = snapshot.now, snapshot.live_note(program)
        if not (self._asked and self.is_known(program)):
            return known
        where = self.address(program, Ports(self._records.values()))
        if where is None:
            return known
        if self._uses_own(program):
            return _record(program, known, where, Probe(), now)
        try:
            binary = self._builds.look(RUNTIMES[program].executables)
        except (machine.NoBinary, Broken):
            return known  # its services report the problem
        if binary is None:
            return known
        place = Place("", *where, None, self._state.home, daemon_models=self._settings.ollama_models_path)
        services = self._services.get(program, ())
        row = DAEMONS[program]
        options = next(filter(None, (options_said(each, row.options) for each in services)), {})
        engine = row.engine(binary, place, options)
        if program == OMLX:
            self._make_key()
        own, base = (str(self._state.path / each) for each in (f"served/{program}", program))
        Path(own).mkdir(mode=0o700, parents=True, exist_ok=True)
        further = self._further(program, options)
        if further is None:
            return known
        confined = self._confine(program, binary, where[1], services, [own], [base, *further])
        if confined is None:
            return known  # its build is being tried
        if confined.problem:
            return known if known is None or up is not None else reconcile.dismiss(known, now, confined.problem)
        host, port = where
        made = programs.compose(program, engine, port, host, self._state.home, program, confinement=confined.policy)
        self._keep_spec(made)
        record = _record(program, known, where, engine.probe, now)
        record = replace(record, edition=made.edition, asked=program, unconfined=confined.why)
        if known is not None and up is not None and up.edition != made.edition:
            record = replace(record, probe=known.probe)
        return record

    def _further(self, program: str, options: Json) -> list[str] | None:
        """Real paths of the directories elsewhere that the daemon writes to; None while they are being looked at.

        They are oMLX's cache, and the models that Ollama pulls.
        """
        ollamas = str(Path(self._settings.ollama_models_path).expanduser())
        named = ollamas if program == OLLAMA else options.get(CACHE_DIRECTORY)
        if not named:
            return []
        found = self.paths.look(named)
        if found is not None and program == OMLX and found.refusal is not None:
            return []  # reported on its service; a link was swapped since it was checked
        return None if found is None else [found.real]

    def _told_to_wait(
        self, program: str, daemon: Record, up: RunNote | None, records: Mapping[Key, Record]
    ) -> dict[Key, Record]:
        """Records of the services whose daemon settings wait for the daemon's next start, with that warning."""
        if up is None or up.edition == daemon.edition:
            return {}
        text = f"the shared {program} daemon takes up its settings when it starts next: supervisorctl restart {program}"
        options = DAEMONS[program].options
        saying = [each.key for each in self._services.get(program, ()) if options_said(each, options)]
        return {key: replace(records[key], warning=("DaemonSettingsWait", text)) for key in saying if key in records}

    def _unneeded(self, result: dict[Key, Record], known: Record, now: float) -> None:
        if _is_own(known):
            with contextlib.suppress(OSError):  # tried again by the next pass
                self._state.forget(known.program)
                del result[known.key]
            return
        since = self._unused_since.setdefault(known.program, time.monotonic())
        left_s = since + UNUSED_S - time.monotonic()
        if left_s > 0 and known.verdict.standing is Standing.RUN:
            self.again_in_s = min(left_s, self.again_in_s or left_s)
            return
        result[known.key] = reconcile.dismiss(known, now, ("Unused", "no service uses it"))
        left = self._state.path / "served" / known.program / "models"  # by an attacher that was killed
        with contextlib.suppress(OSError):
            trees.remove(left)

    def _uses_own(self, program: str) -> bool:
        """True if the user's own daemon is used. A choice once made is kept as long as possible."""
        if program != OLLAMA or self.own.address is None:
            return False
        known = self._records.get(key_of(program))
        if known is not None and not _is_own(known) and known.verdict.standing is Standing.RUN:
            return False
        return self.own.here(FORSAKEN_S if known is not None else 0.0)

    def _make_key(self) -> None:
        """Write oMLX's API key, chosen once per Mac, and a copy in a directory that the confined daemon may read."""
        path, copy = self._state.path / KEY_FILE, self._state.path / KEY
        for each in (copy.parent, self._state.path / BASE):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            write_atomic(path, secrets.token_urlsafe(32))
        write_atomic(copy, path.read_text("utf-8"))


def _seniority(service: Service, record: Record | None) -> tuple[bool, float, Key]:
    """Sort key: services that have a daemon, or wait to return to it, by how long they have wanted it; then by name."""
    has = _has_daemon(service, record)
    return not has, record.queued_at or 0.0 if record is not None and has else 0.0, service.key


def _has_daemon(service: Service, record: Record | None) -> bool:
    """True if a service has its daemon, or waits to return to it."""
    return record is not None and record.daemon == service.runtime and (record.runs or record.queued_at is not None)


def _is_own(record: Record | None) -> bool:
    """True if a daemon's record is that of the user's own daemon, which has no spec."""
    return record is not None and record.edition is None and record.verdict.standing is Standing.RUN


def _is_up(record: Record, table: Mapping[str, ProgramState]) -> bool:
    """True if a service needs its daemon: to run, or to be unloaded from it."""
    state = table.get(record.program)
    return record.runs or (state is not None and state.state in LIVE)


def _record(program: str, known: Record | None, where: tuple[str, int], probe: Probe, now: float) -> Record:
    before = known.verdict if known is not None else None
    fresh = Record(
        namespace="",
        name=program,
        uid="",
        generation=0,
        program=program,
        model="",
        runtime=program,
        replicas=1,
        mode="",
        priority="critical",
        verdict=reconcile.verdict(before, Standing.RUN, "Needed", "", now),
        endpoint=None,
        host=where[0],
        port=where[1],
        probe=probe,
        protected=True,
    )
    if known is None:
        return fresh
    leaving = known.verdict.standing is Standing.REMOVING  # it is needed again
    return replace(
        fresh,
        withdraw=NO_WITHDRAWAL if leaving else known.withdraw,
        retry_at=known.retry_at,
        stop_sent=known.stop_sent,
        stopped_by_hand=known.stopped_by_hand,
    )
