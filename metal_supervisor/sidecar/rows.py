"""The board's rows: what is observed of each service, and what is reported of it.

A service whose engine runs as it did keeps its row, and so does one without a program. With 50 services, making every
row in every pass costs the sidecar half as much CPU again for an edit, and a crash takes longer to be withdrawn.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from metal_supervisor import launch
from metal_supervisor.cluster.report import Happening, Report, happening, report
from metal_supervisor.host import local_status
from metal_supervisor.launch import NOW
from metal_supervisor.memory.machine_memory import Held
from metal_supervisor.settings.loader import Settings
from metal_supervisor.sidecar import exit_messages, sharing
from metal_supervisor.sidecar.board import Row
from metal_supervisor.sidecar.memory_sampler import SampledEngine
from metal_supervisor.sidecar.observer import EngineView, Observer, ServiceView
from metal_supervisor.sidecar.probes import ProbeFinding, ProbeTarget
from metal_supervisor.sidecar.publisher import Published
from metal_supervisor.sidecar.statuses import WantedStatus
from metal_supervisor.spec.hosts import in_url
from metal_supervisor.spec.processes import LIVE, Observed, ProgramState, RunNote, State
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Key

ANEW_S = 60.0
"""Age at which every row is made again."""
RESTORE_S = 1.0
"""Age at which the observations of kept rows are read from their files."""
EACH_RESTORE_S = 0.02
"""Added to that age for each row."""
log = logging.getLogger("sidecar")


@dataclass(frozen=True)
class MacView:
    """What every row depends on."""

    address: str = ""
    """The advertised IP address."""
    address_problem: str = ""
    fronts: tuple[int, ...] = ()
    """Ports at which the gateway listens for on-demand services."""
    leaving: bool = False
    """The whole system stops."""


@dataclass(frozen=True)
class PassView:
    """What one pass has read; mappings are by program."""

    records: Mapping[str, Record]
    table: Mapping[str, ProgramState]
    notes: Mapping[str, RunNote]
    mac: MacView


@dataclass(frozen=True)
class _KeptRow:
    """A row, and all that it was made from besides `MacView`."""

    view: ServiceView
    news: tuple[ProbeFinding | None, Published, Held | None]
    row: Row
    want: WantedStatus


class Rows:
    """Makes the rows, and keeps those that nothing has changed."""

    def __init__(self, settings: Settings, observer: Observer, tell: Callable[[Record, Happening], None]) -> None:
        """`tell`: called with each Event about a service."""
        self._settings, self._observer, self._tell = settings, observer, tell
        self._state, self._prober, self._meter = observer.state, observer.prober, observer.meter
        self._published, self._dead = observer.published, observer.dead
        self.all: list[Row] = []
        """Rows of the latest pass, shared daemons included."""
        self.wanted: dict[Key, WantedStatus] = {}
        """What the cluster is to be told."""
        self._kept: dict[str, _KeptRow] = {}
        self._mac = MacView()
        self._anew_at = self._restore_at = 0.0
        self._reports: dict[Key, Report] = {}

    def look(self, view: PassView) -> None:
        """Observe each service and report on it."""
        now = time.monotonic()
        if view.mac != self._mac or now >= self._anew_at:
            self._kept, self._mac, self._anew_at = {}, view.mac, now + ANEW_S
        self._kept = {name: each for name, each in self._kept.items() if self._is_as_it_was(each, view)}
        if now >= self._restore_at:
            self._restore_at = now + max(RESTORE_S, EACH_RESTORE_S * len(self._kept))
            for each in self._kept.values():
                self._observer.keep(each.row.observed, news=NOW)  # its file may be gone, or another
        fresh = {name: record for name, record in view.records.items() if name not in self._kept}
        engines = self._engines(fresh, view) | {name: each.view.engine for name, each in self._kept.items()}
        self._prober.ask_only(
            {name: each.probed for name, each in engines.items() if each.probed is not None},
            {name for name, each in fresh.items() if self._ends(each, view.table.get(name), view)},
        )
        made = {name: self._made(record, engines[name], view) for name, record in fresh.items()}
        made |= {name: (each.row, each.want) for name, each in self._kept.items() if name not in made}
        found = [made[name] for name in view.records]
        self.all = [row for row, _ in found]
        self.wanted = {row.record.key: want for row, want in found if not row.record.is_daemon}
        if gone := self._reports.keys() - {row.record.key for row in self.all}:
            self._reports = {key: told for key, told in self._reports.items() if key not in gone}
        self._meter.measure_only({each.sampled for each in engines.values() if each.pid})

    def target(self, record: Record, pid: int) -> ProbeTarget:
        """Where an engine is probed."""
        # The user's own daemon listens where its configuration says, perhaps on loopback only: pods may not reach it.
        strange = record.daemon and record.host != self._settings.bind_address and not self._settings.embedded
        reached_at = self._mac.address if strange else ""
        return ProbeTarget(pid, record.host or self._settings.bind_address, record.port or 0, record.probe, reached_at)

    # ── one service ──────────────────────────────────────────────────────────────────────────────

    def _is_as_it_was(self, kept: _KeptRow, view: PassView) -> bool:
        """True if nothing that a row was made from has changed."""
        before, name = kept.view, kept.view.record.program
        row, note = view.table.get(name), view.notes.get(name)
        if view.records.get(name) is not before.record or note is not before.note:
            return False
        if row is not before.row and row != before.row:  # to compare two that are one takes longer
            return False
        if row is None:
            same = not self._engine_pid(None, note)
        else:
            same = row.pid not in self._dead and before.engine.pid not in self._dead
        return same and self._news_of(before.record, before.engine) == kept.news

    def _news_of(self, record: Record, engine: EngineView) -> tuple[ProbeFinding | None, Published, Held | None]:
        finding, published = self._prober.finding(record.program), self._published(record.key)
        return finding, published, self._meter.held(engine.sampled)

    def _engines(self, records: Mapping[str, Record], view: PassView) -> dict[str, EngineView]:
        """The engines of some services: of shared daemons either all or none, and of their models too."""
        found = {name: self._engine_pid(view.table.get(name), view.notes.get(name)) for name in records}
        pids = sharing.pids_with_daemons(records, found)
        return {name: self._engine(record, pids[name], view) for name, record in records.items()}

    def _engine(self, record: Record, pid: int, view: PassView) -> EngineView:
        target = self.target(record, pid)
        attachment = self._state.attachment(record.program) if record.daemon else None
        probed = pid and sharing.is_asked(record, attachment, pid)
        asked = (target, self._observer.known(record, pid)) if probed else None
        return EngineView(pid, target, self._sampled(record, pid, view.notes), attachment, asked)

    def _engine_pid(self, row: ProgramState | None, note: RunNote | None) -> int:
        """Pid of the engine of a program, 0 if there is none.

        An engine that outlived its supervisord is found by its launcher's note, even before the launcher that adopts it
        has started or written its own: taken for dead meanwhile, its endpoint would be withdrawn for a moment.
        """
        launcher = row.pid if row is not None and row.state in LIVE and row.pid not in self._dead else 0
        if note is None:
            return launcher
        noted = launcher and note.launcher_pid == launcher
        lives = note.pid and (noted or launch.start_time(note.pid) == note.started)
        pid = note.pid if noted or (lives and note.pid not in self._dead) else launcher
        return 0 if pid in self._dead else pid

    def _sampled(self, record: Record, pid: int, notes: Mapping[str, RunNote]) -> SampledEngine:
        """The process whose memory is measured; for a model on a shared daemon, the daemon."""
        note = notes.get(record.daemon or record.program)
        if record.daemon and note is not None and note.pid:
            return SampledEngine(note.pid, note.started, 0)
        return SampledEngine(pid, note.started if note is not None and note.pid == pid else "", record.mapped_bytes)

    def _ends(self, record: Record, row: ProgramState | None, view: PassView) -> bool:
        """True if the engine is to end: withdrawn, stopping, or the whole system stops."""
        return bool(record.withdraw) or view.mac.leaving or (row is not None and row.state is State.STOPPING)

    def _made(self, record: Record, engine: EngineView, view: PassView) -> tuple[Row, WantedStatus]:
        name, mac = record.program, view.mac
        row, note = view.table.get(name), view.notes.get(name)
        news = self._news_of(record, engine)
        look = ServiceView(record, row, note, engine)
        seen = self._observer.see(look, view.records, mac.leaving)
        told = report(record, seen.observed, mac.fronts, mac.leaving)
        if seen.settled:
            self._announce(record, told, seen.observed, seen.crashed)
        where = f"{in_url(mac.address)}:{told.port}" if told.wants_slice and mac.address and seen.settled else ""
        made = Row(record, seen.observed, told, where, seen.rss_bytes)
        direct = local_status.asked_at(record.host or self._settings.bind_address) if self._settings.embedded else ""
        want = WantedStatus(record, told, mac.address, mac.address_problem, direct)
        if seen.settled and seen.kept and self._may_stay(record, row, note, engine.pid):
            self._kept[name] = _KeptRow(look, news, made, want)
        return made, want

    def _may_stay(self, record: Record, row: ProgramState | None, note: RunNote | None, pid: int) -> bool:
        """True for a service whose engine runs and is to go on, or that has no program."""
        if record.withdraw or record.is_daemon or record.daemon or self._mac.leaving:
            return False
        if row is None:
            return not pid
        up = bool(pid) and row.state in (State.STARTING, State.RUNNING)
        return up and (note is None or note.launcher_pid == row.pid)

    def _announce(self, record: Record, told: Report, observed: Observed, died: bool) -> None:
        """Log each change of a service's phase or reason, and tell the Events that `happening` selects."""
        before = self._reports.get(record.key)
        self._reports[record.key] = told
        if before is None or (before.phase, before.reason) != (told.phase, told.reason):
            detail = {"service": record.program, "phase": told.phase, "reason": told.reason, "why": told.message}
            log.info("service", extra=detail)
        lines = exit_messages.last_lines(self._state, record.program) if died else []
        cause = exit_messages.cause(lines, observed.last_exit)
        ended = f"the engine ended: {observed.last_exit or 'unknown'}{f'; {cause}' if cause else ''}" if died else ""
        what = happening(before, told, ended)
        if what and not record.is_daemon and not (before is None and what.type == "Normal"):
            self._tell(record, what)
