"""Moves supervisord's process table towards the records: files, one reload, then the planned steps.

The files come first and are always complete, so a supervisord that restarts at any moment starts what is
wanted; XML-RPC then makes a running supervisord take them up. A file that blocks reloads is put aside.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from metal_supervisor import launch
from metal_supervisor.controller import pacing, plan
from metal_supervisor.controller.plan import Action, Hung, Step, Stopping, Wanted
from metal_supervisor.runtimes.use_probe import Asked, are_busy
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.processes import LIVE, Diff, EngineUse, Observed, ProgramState, RunNote
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.withdrawal import WithdrawalToken, withdrawal_token
from metal_supervisor.state import programs
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.kept_files import write_atomic
from metal_supervisor.supervisord.client import BrokenFile, Supervisord
from metal_supervisor.supervisord.section_files import refusal

YOUNG_S = 1.0
ADD_AT_ONCE = 50
log = logging.getLogger("controller")


def put_aside_refused(directory: StateDir) -> list[tuple[str, str]]:
    """Quarantine every file in `models.d` that supervisord would refuse; returns (file name, reason) of each."""
    refused = []
    for path in sorted((directory.path / "models.d").glob("*.conf")):
        reason = refusal(path)
        if reason:
            directory.quarantine(path, reason)
            refused.append((path.name, reason))
    return refused


def _hangs(note: RunNote | None, seen: Observed | None) -> bool:
    """True if the sidecar reports the process that runs now as hung."""
    return seen is not None and bool(seen.hung) and note is not None and seen.pid == note.pid


class Applier:
    """Carries the controller's decisions out: files in the state directory, and calls to supervisord."""

    def __init__(self, directory: StateDir, supervisord: Supervisord, settings: Settings) -> None:
        self.state, self.supervisord, self._settings = directory, supervisord, settings
        self._diff = Diff()
        self._unread: set[str] = set()
        """Programs whose sections supervisord has to read again, though their files are as they were."""
        self._read: Mapping[str, object] | None = None
        """The sections on file that it has read, by edition; None before the first reload."""
        self._in_place: dict[str, tuple[object, ...]] = {}
        """Program whose section is in place, and nothing is pending -> what that was decided by."""
        self.lacks = False
        """A section was put aside in this pass, and may have to be written anew."""
        self._stopping: dict[str, Stopping] = {}
        self._told: dict[str, tuple[int, Hung]] = {}
        """Hung engines that were told to end, with their pids."""
        self._swept: dict[str, int] = {}
        """Pid of the last engine whose leftovers were ended, by program."""
        self._ours: set[str] = set()
        self._to_add: list[str] = []
        self._late: frozenset[str] = frozenset()
        """Programs that wait for their turn to be added, whose sections supervisord has read."""

    def write_specs(self, records: Collection[Record], specs: Mapping[str, str]) -> None:
        """Write the specs that the records name, as far as they have been composed."""
        for record in records:
            with self._forgiving(record.program):
                for spec_file in (record.spec_file, record.next_spec):
                    if spec_file and spec_file in specs:
                        self.state.write_spec(spec_file, specs[spec_file])
                if record.spec_file and record.spec_file not in specs:
                    self._mark(record, record.spec_file)

    def _mark(self, record: Record, spec_file: str) -> None:
        """Keep a revocation in the spec itself: a reboot without a cluster goes by it too."""
        spec = self.state.read_spec(spec_file)
        if spec and spec.get("revoked", "") != record.revoked:
            write_atomic(self.state.spec_path(spec_file), programs.with_revocation(spec, record.revoked))

    def write_sections(
        self,
        records: Collection[Record],
        complete: bool,
        table: Mapping[str, ProgramState],
        notes: Mapping[str, RunNote],
    ) -> None:
        """Make `models.d/` match the records: write wanted sections, and delete our own that are not wanted.

        Unless the records are `complete`, a section without a record is left alone: its record may have been lost.
        """
        wanted = {}
        known = {record.program for record in records}
        for record in records:
            self._ours.add(record.program)
            if record.runs:
                wanted[record.program] = record
        # Delete sections before adding new ones, so that a boot in between cannot start both.
        on_file = self.state.sections_on_file()
        for name in on_file:
            if name not in wanted and (complete or name in known) and self.state.section_spec(name):
                self._ours.add(name)
                if name in table and table[name].state in LIVE:
                    continue  # it drains; if supervisord is killed, the next boot still needs its section
                with self._forgiving(name):
                    self.state.section_path(name).unlink(missing_ok=True)
        before, self._in_place = self._in_place, {}
        for name, record in wanted.items():
            assert record.spec_file is not None
            spec_file = record.next_spec or record.spec_file
            basis = spec_file, record.next_spec, self._autostart(record, table.get(name)), on_file.get(name)
            if before.get(name) == basis:
                self._in_place[name] = basis
                continue
            if not self.state.spec_path(spec_file).exists():
                continue  # lost, and not composed yet: a running engine keeps running, a stopped one could not start
            with self._forgiving(name):
                if self._write_section(record, spec_file, table.get(name), notes.get(name)):
                    self._in_place[name] = basis

    @contextlib.contextmanager
    def _forgiving(self, program: str) -> Iterator[None]:
        """A file that cannot be written (full disk, read-only) delays its own program only; the next pass tries."""
        try:
            yield
        except OSError as error:
            self._unread.add(program)
            log.error("section cannot be kept", extra={"program": program, "error": str(error)})

    def _autostart(self, record: Record, state: ProgramState | None) -> bool:
        """True if supervisord is to start the program at a boot."""
        if not record.stopped_by_hand:
            return True
        if state is not None:
            return not plan.stays_stopped(state, time.time())
        return programs.starts_itself(self.state.section_text(record.program))

    def _write_section(self, record: Record, spec_file: str, state: ProgramState | None, note: RunNote | None) -> bool:
        """Write a section: in place at once, or as pending until the running engine has exited.

        True if it was in place already, as nearly always.

        A section in place that the engine does not run from is a trap: `supervisorctl update` would restart the engine,
        and a boot after supervisord was killed would not know it.
        """
        name, settings = record.program, self._settings
        current, pending = self.state.section_text(name), self.state.pending_path(name)
        autostart = self._autostart(record, state)

        def section(spec: str) -> str:
            return programs.section(name, spec, self.state.home, autostart, settings.log_size, settings.log_files)

        text = section(spec_file)
        if current == text and not record.next_spec:
            pending.unlink(missing_ok=True)
            return True
        up, known = state is not None and state.state in LIVE, plan.live_note(note, state)
        fits = programs.is_unedited(current) and note is not None and programs.section_spec(current) == note.spec_file
        if known is not None and not fits and known.spec_file == record.spec_file:  # edited, or deleted
            current, fits = section(known.spec_file), True
            write_atomic(self.state.section_path(name), current)
        if up and fits and current != text:
            write_atomic(pending, text)
            return False
        pending.unlink(missing_ok=True)
        write_atomic(self.state.section_path(name), text)
        return False

    def collect(
        self, records: Iterable[Record], table: Mapping[str, ProgramState], notes: Mapping[str, RunNote]
    ) -> None:
        """Remove specs that are no longer referenced: they hold environments, and so perhaps secrets."""
        used: set[str | None] = {name for each in records for name in (each.spec_file, each.next_spec)}
        used |= {note.spec_file for note in notes.values()}
        unused = [name for name in self.state.specs_on_file() if name not in used]
        if not unused:
            return
        # A launcher that has not said yet what it runs may be about to read a spec that an edit has replaced meanwhile.
        starting = {
            name for name, state in table.items()
            if state.state in LIVE and plan.live_note(notes.get(name), state) is None
        }  # fmt: skip
        used |= {self.state.section_spec(program) for program in self.state.sections_on_file()}
        waiting = (self.state.path / "pending").glob("*.conf")
        used |= {self.state.pending_spec(path.name.removesuffix(".conf")) for path in waiting}
        for name in unused:
            if name not in used and name.rsplit(".", 2)[0] not in starting:
                self.state.remove_spec(name)

    def reload(self, quarantined: Callable[[str, str], None]) -> Diff:
        """Have supervisord read the sections again that changed; return the pending differences.

        A file that blocks that is quarantined, and `quarantined` called with its name and the reason. Raises BrokenFile
        if it stays blocked.
        """
        self.lacks = False
        on_file = self.state.sections_on_file()
        changed = {program for program, _ in on_file.items() ^ (self._read or {}).items()}
        late = self._diff.added & self._late
        again, found = self._unread | (self._diff.names - late) | changed, None
        if self._read is not None and not again:
            return self._diff
        if self._read is not None and changed <= self._ours:  # what is not ours may hold anything
            found = self.supervisord.reread(again)
        if found is None:
            self._diff = self._reload_all(quarantined)
        else:
            self._diff = replace(found, added=found.added | (late - again))
        self._unread, self._read = set(), on_file
        return self._diff

    def _reload_all(self, quarantined: Callable[[str, str], None]) -> Diff:
        """Have supervisord read all its files again: of 500 programs, that takes it half a second."""
        try:
            return self.supervisord.reload()
        except BrokenFile as error:
            refused = put_aside_refused(self.state)
            if not refused:
                raise error from None
            for name, reason in refused:
                quarantined(name, reason)
            self.lacks = True  # one may be a wanted section: write it again now, not at the next resync
            return self.supervisord.reload()

    def plan(
        self,
        records: Collection[Record],
        at_rest: Collection[str],
        table: Mapping[str, ProgramState],
        diff: Diff,
        notes: Mapping[str, RunNote],
        observed: Mapping[str, Observed],
        uses: Mapping[str, EngineUse],
        now: float,
        held: Callable[[str], str],
    ) -> list[Step]:
        """The steps of this pass.

        `at_rest`: programs that run as they should; they have none but for a section that has changed. `held`: why a
        program must not be started now, "" if it may.
        """
        wanted, stopping, shift = {}, dict(self._stopping), now - time.monotonic()
        answering = self._answering([each for each in records if self._is_unsaid(each, notes, observed)], notes)

        def on_wall(at: float) -> float:
            """Unix time of a monotonic time, 0 for 0: we remember monotonic times, the plan works in Unix time."""
            return at + shift if at else 0.0

        idle = frozenset(at_rest) - self._told.keys() - diff.changed
        for record in records:
            if record.program in idle:
                continue
            seen, known = observed.get(record.program), stopping.get(record.program)
            if record.runs and record.spec_file:
                hung = self._hung_engine(record.program, notes.get(record.program), seen)
                hung = hung and replace(hung, told_at=on_wall(hung.told_at))
                spec_file = self._possible(record.program, record.spec_file, notes.get(record.program))
                wanted[record.program] = Wanted(spec_file, record.stopped_by_hand, hung)
            if known and record.withdraw:
                busy = answering.get(record.program)
                found = self._on_its_way(known, record, notes.get(record.program), seen, busy)
                stopping[record.program] = plan.with_use(found, uses.get(record.program), record.withdraw)
        stopping = {
            name: replace(each, asked_at=on_wall(each.asked_at), told_at=on_wall(each.told_at))
            for name, each in stopping.items()
        }
        due = plan.steps(wanted, frozenset(self._ours - idle), table, diff, notes, stopping, now, held)
        most = pacing.most_at_once(self._settings.parallel_starts, os.cpu_count())
        steps = pacing.paced(due, records, table, observed, uses, most, now)
        self._late = frozenset(one.program for one, other in zip(due, steps, strict=True) if one is not other)
        self._unread |= {step.program for step in steps if step.why == plan.RELOAD}
        self._to_add = [step.program for step in steps if step.do is Action.ADD]
        return steps

    def _possible(self, program: str, spec_file: str, note: RunNote | None) -> str:
        """Spec to run: the wanted one, or that of the running engine while the wanted one is lost and not composed."""
        lost = program not in self._in_place and not self.state.read_spec(spec_file)
        return note.spec_file if lost and note is not None and note.spec_file else spec_file

    def _is_unsaid(
        self, record: Record, notes: Mapping[str, RunNote], observed: Mapping[str, Observed]
    ) -> bool:
        """True if the sidecar has not reported in time on an engine that is to stop, so that we ask the engine."""
        known = self._stopping.get(record.program)
        if known is None or not record.withdraw or known.told_at:
            return False
        overdue = time.monotonic() - known.asked_at >= plan.WITHDRAW_WAIT_S
        return overdue and not _hangs(notes.get(record.program), observed.get(record.program))

    def _answering(self, records: Sequence[Record], notes: Mapping[str, RunNote]) -> dict[str, bool]:
        """Program -> whether its engine is busy."""
        asked = {}
        for each in records:
            note, host = notes.get(each.program), each.host or self._settings.bind_address
            asked[each.program] = Asked(note.pid if note else 0, host, each.port or 0, each.probe)
        return are_busy(asked)

    def _on_its_way(
        self, known: Stopping, record: Record, note: RunNote | None, seen: Observed | None, answers: bool | None
    ) -> Stopping:
        """State of an engine that is to stop. `answers`: whether it said that it is busy, None if it was not asked."""
        withdrawn = known.withdrawn or (seen is not None and seen.withdrawn == record.withdraw)
        busy, drained = (seen.busy, seen.drained == record.withdraw) if seen else (False, False)
        if _hangs(note, seen):
            busy, drained = False, True  # a hung engine serves no request
        elif answers is not None:
            busy, drained = answers, not answers
        drain_s = self._settings.drain_timeout if record.drain_s is None else record.drain_s
        return replace(known, withdrawn=withdrawn, busy=busy, drained=drained, drain_s=drain_s)

    def _hung_engine(self, program: str, note: RunNote | None, seen: Observed | None) -> Hung | None:
        """State of an engine that the sidecar reports as hung; None if it is not, or the report is of another process.

        Once told to end, an engine counts as told until it serves again: its handling of TERM looks like work.
        """
        if note is None or seen is None or seen.pid != note.pid or seen.ready:
            self._told.pop(program, None)
            return None
        pid, told = self._told.get(program, (0, None))
        if told is not None and pid == note.pid:
            return told
        return Hung(seen.hung) if seen.hung else None

    def ask_withdrawal(self, step: Step, now: float) -> WithdrawalToken:
        """Note that a withdrawal was requested; returns its token."""
        self._stopping[step.program] = Stopping(asked_at=time.monotonic())
        return withdrawal_token(now)

    def perform(self, step: Step, state: ProgramState | None, note: RunNote | None) -> None:
        """Carry one step out. Raises Unavailable or Refused."""
        name = step.program
        if step.do in (Action.RESTART, Action.KILL):
            self._end_hung(step, note)
        elif step.do is Action.STOP:
            young = state is not None and time.time() - state.start < YOUNG_S
            known = self._stopping.get(name, Stopping())
            self._stopping[name] = replace(known, told_at=time.monotonic(), young=young, cut=step.cut)
            self.supervisord.stop(name)
        elif step.do is Action.TERM:
            self._stopping[name] = replace(self._stopping[name], told_at=0.0)
            self.supervisord.signal(name, "TERM")
        elif step.do is Action.ADD:
            self._add(name)
            self._unread.add(name)
        elif step.do is Action.REPLACE:
            self.supervisord.replace(name)
            self._unread.add(name)
        elif step.do is Action.REMOVE:
            self.supervisord.remove(name)
            self._unread.add(name)
        elif step.do is Action.START:
            self.supervisord.start(name)

    def _end_hung(self, step: Step, note: RunNote | None) -> None:
        """End a hung engine. Without a note there is nothing to do: only an engine with a note can be found hung."""
        if note is None:
            return
        self._told[step.program] = note.pid, Hung(step.why, time.monotonic())
        if step.do is Action.RESTART:
            self.supervisord.signal(step.program, "TERM")
        else:
            launch.kill_engine(note.pid, note.started)  # not through supervisord, which may only know a stand-in

    def sweep(self, table: Mapping[str, ProgramState], notes: Mapping[str, RunNote]) -> None:
        """End the processes that a dead engine left behind, once per engine: its launcher may never run again."""
        for program, note in notes.items():
            if not note.pid or self._swept.get(program) == note.pid:
                continue
            gone = program not in table or table[program].state not in LIVE
            if gone and not launch.start_time(note.pid):
                self._swept[program] = note.pid
                if left := launch.sweep_group(note.pid, self.state.specs_of(program)):
                    log.warning("leftovers ended", extra={"program": program, "engine": note.pid, "pids": left})

    def _add(self, name: str) -> None:
        """Add a program, in a batch of ADD_AT_ONCE with the next ones: each call takes a turn of supervisord's loop."""
        if name in self._to_add:
            batch, self._to_add = self._to_add[:ADD_AT_ONCE], self._to_add[ADD_AT_ONCE:]
            self.supervisord.add(*batch)

    def forget_all_but(self, busy: Collection[str]) -> None:
        """Drop the state of programs that are no longer stopping."""
        self._stopping = {name: known for name, known in self._stopping.items() if name in busy}
