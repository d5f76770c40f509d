"""Moves supervisord's process table towards the records: files, one reload, then the planned steps.

The files come first and are always complete, so a supervisord that restarts at any moment starts what is
wanted; XML-RPC then makes a running supervisord take them up. A file that blocks reloads is put aside.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from metal_supervisor.boundary.state import StateDir, write_atomic
from metal_supervisor.boundary.supervisord import BrokenFile, Supervisord, refusal
from metal_supervisor.core import plan, programs
from metal_supervisor.core.plan import Do, Step, Stopping, Wanted
from metal_supervisor.core.types import Diff, ProgramState, Record, RunNote, Standing

YOUNG_S = 1.0
RELOAD_EVERY_S = 60.0
log = logging.getLogger("controller")


def put_aside_refused(directory: StateDir) -> list[tuple[str, str]]:
    """Quarantines every file in `models.d` that supervisord would refuse; returns (file name, reason) of each."""
    refused = []
    for path in sorted((directory.path / "models.d").glob("*.conf")):
        reason = refusal(path)
        if reason:
            directory.quarantine(path, reason)
            refused.append((path.name, reason))
    return refused


class Applier:
    """The controller's hands on supervisord."""

    def __init__(self, directory: StateDir, supervisord: Supervisord, drain_s: float = 0.0) -> None:
        """`drain_s`: how long an engine that is to stop may finish what it answers."""
        self.state, self.supervisord, self._drain_s = directory, supervisord, drain_s
        self._diff = Diff()
        self._dirty = True
        self._reloaded_at = 0.0
        self._stopping: dict[str, Stopping] = {}
        self._ours: set[str] = set()

    def write_specs(self, records: Collection[Record], specs: Mapping[str, str]) -> None:
        """Makes `specs/` hold what the records name, as far as it has been composed."""
        for record in records:
            if record.spec_file is not None and record.spec_file in specs:
                write_atomic(self.state.spec_path(record.spec_file), specs[record.spec_file])

    def write_sections(
        self, records: Collection[Record], complete: bool, table: Mapping[str, ProgramState]
    ) -> None:
        """Makes `models.d/` hold what the records say, and nothing else of ours.

        Unless the records are `complete`, a section without one is left alone: its record may have been lost.
        """
        wanted = {}
        known = {record.program for record in records}
        for record in records:
            self._ours.add(record.program)
            if record.spec_file and record.verdict.standing is Standing.RUN:
                wanted[record.program] = record
        for name, record in wanted.items():
            assert record.spec_file is not None
            if not self.state.spec_path(record.spec_file).exists():
                continue  # lost, and not composed yet: what runs goes on, what does not could not start
            stays = record.stopped_by_hand and plan.stays_stopped(table.get(name))
            text = programs.section(name, record.spec_file, self.state.home, not stays)
            self._dirty |= write_atomic(self.state.section_path(name), text)
        for path in (self.state.path / "models.d").glob("*.conf"):
            name = path.name.removesuffix(".conf")
            if name not in wanted and (complete or name in known) and self.state.section_spec(name):
                self._ours.add(name)
                path.unlink(missing_ok=True)
                self._dirty = True

    def collect(self, records: Iterable[Record], notes: Iterable[RunNote]) -> None:
        """Removes specs that nothing names any more: they hold environments, and so perhaps secrets."""
        used = {record.spec_file for record in records} | {note.spec_file for note in notes}
        unused = [path for path in (self.state.path / "specs").glob("*.json") if path.name not in used]
        if unused:
            sections = (self.state.path / "models.d").glob("*.conf")
            used |= {self.state.section_spec(path.name.removesuffix(".conf")) for path in sections}
        for path in unused:
            if path.name not in used:
                path.unlink(missing_ok=True)

    def reload(self, quarantined: Callable[[str, str], None]) -> Diff:
        """What supervisord makes of the files; asked only when something may have changed."""
        due = time.monotonic() - self._reloaded_at > RELOAD_EVERY_S
        if not (self._dirty or self._diff or due):
            return self._diff
        try:
            self._diff = self.supervisord.reload()
        except BrokenFile as error:
            refused = put_aside_refused(self.state)
            if not refused:
                raise error from None
            for name, reason in refused:
                quarantined(name, reason)
            self._diff = self.supervisord.reload()
        self._dirty, self._reloaded_at = False, time.monotonic()
        return self._diff

    def plan(
        self,
        records: Iterable[Record],
        table: Mapping[str, ProgramState],
        diff: Diff,
        notes: Mapping[str, RunNote],
        now: float,
    ) -> list[Step]:
        """The steps of this pass."""
        observed = self.state.observations()
        wanted, stopping = {}, dict(self._stopping)
        for record in records:
            if record.spec_file and record.verdict.standing is Standing.RUN:
                wanted[record.program] = Wanted(record.spec_file, record.stopped_by_hand)
            seen, known = observed.get(record.program), stopping.get(record.program)
            if known and record.withdraw and seen:
                stopping[record.program] = replace(
                    known,
                    withdrawn=known.withdrawn or seen.withdrawn == record.withdraw,
                    busy=seen.busy,
                    drained=seen.drained == record.withdraw,
                    drain_s=self._drain_s,
                )
        steps = plan.steps(wanted, frozenset(self._ours), table, diff, notes, stopping, now)
        self._dirty |= any(step.why == plan.RELOAD for step in steps)
        return steps

    def ask_withdrawal(self, step: Step, now: float) -> str:
        """Remembers that a withdrawal was asked for; returns its token."""
        self._stopping[step.program] = Stopping(asked_at=now)
        return f"{now:.6f}"

    def perform(self, step: Step, state: ProgramState | None) -> None:
        """Carries one step out. Raises Unavailable or Refused."""
        name = step.program
        if step.do is Do.STOP:
            young = state is not None and state.now - state.start < YOUNG_S
            known = self._stopping.get(name, Stopping())
            self._stopping[name] = replace(known, term_lost_at=time.time() if young else 0.0)
            self.supervisord.stop(name)
        elif step.do is Do.TERM:
            self._stopping[name] = replace(self._stopping[name], withdrawn=True, term_lost_at=0.0)
            self.supervisord.signal(name, "TERM")
        elif step.do is Do.ADD:
            self.supervisord.add(name)
            self._dirty = True
        elif step.do is Do.REPLACE:
            self.supervisord.replace(name)
            self._dirty = True
        elif step.do is Do.REMOVE:
            self.supervisord.remove(name)
            self._dirty = True
        elif step.do is Do.START:
            self.supervisord.start(name)

    def forget_all_but(self, busy: Collection[str]) -> None:
        """Drops what was remembered of programs that are no longer on their way out."""
        self._stopping = {name: known for name, known in self._stopping.items() if name in busy}
