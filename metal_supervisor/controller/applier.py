"""Moves supervisord's process table towards the records: one reload of the files, then the planned steps.

The files come first (see `program_files`); XML-RPC then makes a running supervisord take them up. A file that blocks
reloads is put aside.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from metal_supervisor import launch
from metal_supervisor.controller import leftovers, pacing, plan
from metal_supervisor.controller.plan import Action, Hung, Step, Stopping, Wanted
from metal_supervisor.controller.program_files import ProgramFiles, put_aside_refused
from metal_supervisor.controller.snapshot import Snapshot
from metal_supervisor.runtimes.probing import Asked, are_busy
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.processes import LIVE, Diff, Observed, RunNote
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.withdrawal import WithdrawalToken, withdrawal_token
from metal_supervisor.state.directory import StateDir
from metal_supervisor.supervisord.client import BrokenFile, Supervisord

YOUNG_S = 1.0
ADD_AT_ONCE = 50
log = logging.getLogger("controller")


def _hangs(note: RunNote | None, seen: Observed | None) -> bool:
    """True if the sidecar reports the process that runs now as hung."""
    return seen is not None and bool(seen.hung) and note is not None and seen.pid == note.pid


class Applier:
    """Carries the controller's decisions out through supervisord."""

    def __init__(self, directory: StateDir, supervisord: Supervisord, settings: Settings) -> None:
        self.state, self.supervisord, self._settings = directory, supervisord, settings
        self.files = ProgramFiles(directory, settings)
        self._diff = Diff()
        """What the sections on file would change, as of the latest reload."""
        self._read: Mapping[str, object] | None = None
        """The sections on file that it has read, by edition; None before the first reload."""
        self.lacks = False
        """A section was put aside in this pass, and may have to be written anew."""
        self._stopping: dict[str, Stopping] = {}
        self._told: dict[str, tuple[int, Hung]] = {}
        """Hung engines that were told to end, with their pids."""
        self._swept: dict[str, int] = {}
        """Pid of the last engine whose leftovers were ended, by program."""
        self._to_add: list[str] = []
        self._late: frozenset[str] = frozenset()
        """Programs that wait for their turn to be added, whose sections supervisord has read."""

    def reload(self, quarantined: Callable[[str, str], None]) -> None:
        """Have supervisord read the sections again that changed.

        A file that blocks that is quarantined, and `quarantined` called with its name and the reason. Raises BrokenFile
        if it stays blocked.
        """
        self.lacks = False
        on_file = self.state.sections_on_file()
        same = on_file is self._read
        changed = set() if same else {program for program, _ in on_file.items() ^ (self._read or {}).items()}
        late = self._diff.added & self._late
        again = self.files.unread | (self._diff.names - late) | changed
        if self._read is not None and not again:
            return
        # What is not ours may hold anything.
        found = self.supervisord.reread(again) if self._read is not None and changed <= self.files.ours else None
        if found is None:
            self._diff = self._reload_all(quarantined)
        else:
            self._diff = replace(found, added=found.added | (late - again))
        self._read = on_file
        self.files.unread.clear()

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

    def plan(self, records: Collection[Record], snapshot: Snapshot, is_users: Callable[[Record], bool]) -> list[Step]:
        """The steps of this pass, after its reload.

        `is_users`: true for a model on the user's own daemon, whose start needs no Metal device.
        """
        wanted, stopping = {}, dict(self._stopping)
        answering = self._answering([each for each in records if self._is_unsaid(each, snapshot)], snapshot.notes)
        for record in records:
            name = record.program
            note, seen, known = snapshot.notes.get(name), snapshot.observed.get(name), stopping.get(name)
            if record.runs:
                held = "" if is_users(record) else snapshot.metal.held
                hung = self._hung_engine(name, note, seen)
                wanted[name] = Wanted(self._runnable(record, note), hung, held)
            if known and record.withdraw:
                found = self._on_its_way(known, record, note, seen, answering.get(name))
                stopping[name] = plan.with_use(found, snapshot.uses.get(name), record.withdraw)
        due = plan.steps(
            wanted,
            frozenset(self.files.ours),
            snapshot.table,
            self._diff,
            snapshot.notes,
            stopping,
            snapshot.now,
            time.monotonic(),
        )
        most = pacing.most_at_once(self._settings.parallel_starts, os.cpu_count())
        steps = pacing.paced(due, records, snapshot, most)
        self._late = frozenset(one.program for one, other in zip(due, steps, strict=True) if one is not other)
        self.files.unread |= {step.program for step in steps if step.why == plan.RELOAD}
        self._to_add = [step.program for step in steps if step.do is Action.ADD]
        return steps

    def _runnable(self, record: Record, note: RunNote | None) -> Record:
        """A record; that of the running engine while its spec is lost and not composed."""
        lost = self.state.spec_of(record.program).get("edition") != record.edition
        return replace(record, edition=note.edition, asked=note.asked) if lost and note is not None else record

    def _is_unsaid(self, record: Record, snapshot: Snapshot) -> bool:
        """True if the sidecar has not reported in time on an engine that is to stop, so that we ask the engine."""
        known = self._stopping.get(record.program)
        if known is None or not record.withdraw or known.told_at:
            return False
        overdue = time.monotonic() - known.asked_at >= plan.WITHDRAW_WAIT_S
        return overdue and not _hangs(snapshot.notes.get(record.program), snapshot.observed.get(record.program))

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

    def perform(self, step: Step, snapshot: Snapshot) -> None:
        """Carry one step out. Raises Unavailable or Refused."""
        name, state = step.program, snapshot.table.get(step.program)
        if step.do in (Action.RESTART, Action.KILL):
            self._end_hung(step, snapshot.notes.get(name))
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
        elif step.do is Action.REPLACE:
            self.supervisord.replace(name)
        elif step.do is Action.REMOVE:
            self.supervisord.remove(name)
        elif step.do is Action.START:
            self.supervisord.start(name)
        if step.do in (Action.ADD, Action.REPLACE, Action.REMOVE):
            self.files.unread.add(name)

    def _end_hung(self, step: Step, note: RunNote | None) -> None:
        """End a hung engine. Without a note there is nothing to do: only an engine with a note can be found hung."""
        if note is None:
            return
        self._told[step.program] = note.pid, Hung(step.why, time.monotonic())
        if step.do is Action.RESTART:
            self.supervisord.signal(step.program, "TERM")
        else:
            launch.kill_engine(note.pid, note.started)  # not through supervisord, which may only know a stand-in

    def sweep(self, snapshot: Snapshot) -> None:
        """End the processes that a dead engine left behind, and name who holds its port then, once per engine.

        Its launcher may never run again.
        """
        table = snapshot.table
        for program, note in snapshot.notes.items():
            if not note.pid or self._swept.get(program) == note.pid:
                continue
            gone = program not in table or table[program].state not in LIVE
            if gone and not launch.start_time(note.pid):
                if left := launch.sweep_group(note.pid, self.state.launched_path(program), note.session):
                    log.warning("leftovers ended", extra={"program": program, "engine": note.pid, "pids": left})
                    continue  # the next pass sees whether that was all
                self._swept[program] = note.pid
                engines = {row.pid for row in table.values()} | {each.pid for each in snapshot.notes.values()}
                if held := leftovers.held_port(note.spec, engines):
                    log.warning("an ended engine's port is held", extra={"program": program, "why": held})

    def _add(self, name: str) -> None:
        """Add a program, in a batch of ADD_AT_ONCE with the next ones: each call takes a turn of supervisord's loop."""
        if name in self._to_add:
            batch, self._to_add = self._to_add[:ADD_AT_ONCE], self._to_add[ADD_AT_ONCE:]
            self.supervisord.add(*batch)

    def forget_all_but(self, busy: Collection[str]) -> None:
        """Drop the state of programs that are no longer stopping."""
        self._stopping = {name: known for name, known in self._stopping.items() if name in busy}
