"""Files of this Mac's programs: the specs and sections of its records; others of ours are removed.

They are always complete, so a supervisord that restarts at any moment starts what is wanted. A section whose engine
still runs from another spec waits in `pending/` until that has exited.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping

from metal_supervisor.controller import plan
from metal_supervisor.controller.snapshot import Snapshot
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.processes import LIVE, RunNote
from metal_supervisor.spec.record import Record
from metal_supervisor.state import programs
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.kept_files import write_atomic
from metal_supervisor.supervisord.section_files import refusal

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


class ProgramFiles:
    """Writes and removes them."""

    def __init__(self, directory: StateDir, settings: Settings) -> None:
        self._state, self._settings = directory, settings
        self.ours: set[str] = set()
        """Programs that are or were ours; no other is ever touched."""
        self.unread: set[str] = set()
        """Programs whose sections supervisord has to read again, though their files are as they were."""
        self._in_place: dict[str, tuple[object, ...]] = {}
        """Program whose section is in place, and nothing is pending -> what that was decided by."""

    def read_specs(self, records: Iterable[Record]) -> dict[str, str]:
        """Text of each spec that the records name, as far as it can be read."""
        names = {name for record in records for name in (record.spec_file, record.next_spec) if name}
        found = {name: self._state.read_spec(name) for name in names}
        return {name: json.dumps(spec, indent=1, sort_keys=True) + "\n" for name, spec in found.items() if spec}

    def write_specs(self, records: Collection[Record], specs: Mapping[str, str]) -> None:
        """Write the specs that the records name, as far as they are known; those that were lost, again."""
        for record in records:
            with self._forgiving(record.program):
                for spec_file in (record.spec_file, record.next_spec):
                    if spec_file and spec_file in specs:
                        self._state.write_spec(spec_file, specs[spec_file])

    def write_sections(self, records: Collection[Record], complete: bool, snapshot: Snapshot) -> None:
        """Make `models.d/` match the records: write wanted sections, and delete our own that are not wanted.

        Unless the records are `complete`, a section without a record is left alone: its record may have been lost.
        """
        known = {record.program for record in records}
        wanted = {record.program: record for record in records if record.runs}
        self.ours |= known
        # Delete sections before adding new ones, so that a boot in between cannot start both.
        on_file = self._state.sections_on_file()
        for name in on_file:
            if name not in wanted and (complete or name in known) and self._state.section_spec(name):
                self.ours.add(name)
                if name in snapshot.table and snapshot.table[name].state in LIVE:
                    continue  # it drains; if supervisord is killed, the next boot still needs its section
                with self._forgiving(name):
                    self._state.remove_section(name)
        before, self._in_place = self._in_place, {}
        for name, record in wanted.items():
            assert record.spec_file is not None
            spec_file = record.next_spec or record.spec_file
            autostart = self._autostart(record, snapshot)
            basis = spec_file, record.next_spec, autostart, on_file.get(name)
            if before.get(name) == basis:
                self._in_place[name] = basis
                continue
            if not self._state.spec_path(spec_file).exists():
                continue  # lost, and not composed yet: a running engine keeps running, a stopped one could not start
            with self._forgiving(name):
                if self._write_section(record, spec_file, autostart, snapshot):
                    self._in_place[name] = basis

    @contextlib.contextmanager
    def _forgiving(self, program: str) -> Iterator[None]:
        """A file that cannot be written (full disk, read-only) delays its own program only; the next pass tries."""
        try:
            yield
        except OSError as error:
            self.unread.add(program)
            log.error("section cannot be kept", extra={"program": program, "error": str(error)})

    def _autostart(self, record: Record, snapshot: Snapshot) -> bool:
        """True if supervisord is to start the program at a boot."""
        if not record.stopped_by_hand:
            return True
        state = snapshot.table.get(record.program)
        if state is not None:
            return not plan.stays_stopped(state, snapshot.now)
        return programs.starts_itself(self._state.section_text(record.program))

    def _write_section(self, record: Record, spec_file: str, autostart: bool, snapshot: Snapshot) -> bool:
        """Write a section: in place at once, or as pending until the running engine has exited.

        True if it was in place already, as nearly always.

        A section in place that the engine does not run from is a trap: `supervisorctl update` would restart the engine,
        and a boot after supervisord was killed would not know it.
        """
        name, settings = record.program, self._settings
        current, pending = self._state.section_text(name), self._state.pending_path(name)

        def section(spec: str) -> str:
            return programs.section(name, spec, self._state.home, autostart, settings.log_size, settings.log_files)

        text = section(spec_file)
        if current == text and not record.next_spec:
            pending.unlink(missing_ok=True)
            return True
        state, note, known = snapshot.table.get(name), snapshot.notes.get(name), snapshot.live_note(name)
        fits = programs.is_unedited(current) and note is not None and programs.section_spec(current) == note.spec_file
        if known is not None and not fits and known.spec_file == record.spec_file:  # edited, or deleted
            current, fits = section(known.spec_file), True
            self._state.write_section(name, current)
        if state is not None and state.state in LIVE and fits and current != text:
            write_atomic(pending, text)
            return False
        pending.unlink(missing_ok=True)
        self._state.write_section(name, text)
        return False

    def collect(self, records: Iterable[Record], snapshot: Snapshot) -> None:
        """Remove specs that are no longer referenced: they hold environments, and so perhaps secrets."""
        used: set[str | None] = {name for each in records for name in (each.spec_file, each.next_spec)}
        used |= {note.spec_file for note in snapshot.notes.values()}
        unused = [name for name in self._state.specs_on_file() if name not in used]
        if not unused:
            return
        # A launcher that has not said yet what it runs may be about to read a spec that an edit has replaced meanwhile.
        starting = {
            name for name, state in snapshot.table.items() if state.state in LIVE and snapshot.live_note(name) is None
        }
        used |= {self._state.section_spec(program) for program in self._state.sections_on_file()}
        waiting = (self._state.path / "pending").glob("*.conf")
        used |= {self._state.pending_spec(path.name.removesuffix(".conf")) for path in waiting}
        for name in unused:
            if name not in used and name.rsplit(".", 2)[0] not in starting:
                with contextlib.suppress(OSError):  # tried again by the next pass
                    self._state.remove_spec(name)

    def runnable_spec(self, program: str, spec_file: str, note: RunNote | None) -> str:
        """Spec to run: the wanted one, or that of the running engine while the wanted one is lost and not composed."""
        lost = program not in self._in_place and not self._state.read_spec(spec_file)
        return note.spec_file if lost and note is not None and note.spec_file else spec_file
