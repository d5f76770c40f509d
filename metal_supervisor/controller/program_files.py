"""Files of this Mac's programs: the specs and sections of its records; others of ours are removed.

They are always complete, so a supervisord that restarts at any moment starts what is wanted. A spec that is replaced
under a running engine counts from its next start; its section is the same for all specs.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping

from metal_supervisor.controller import plan
from metal_supervisor.controller.snapshot import Snapshot
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.processes import LIVE
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Program
from metal_supervisor.state import programs
from metal_supervisor.state.directory import StateDir
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

    def write_specs(self, records: Collection[Record], composed: Mapping[str, Program]) -> None:
        """Write the specs that the records name; one whose memory is not granted yet stays as it was."""
        for record in records:
            made = composed.get(record.program)
            if made is not None and made.edition == record.edition:
                with self._forgiving(record.program):
                    self._state.write_spec(made)

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
            if name not in wanted and (complete or name in known) and self._state.has_section(name):
                self.ours.add(name)
                if name in snapshot.table and snapshot.table[name].state in LIVE:
                    continue  # it drains; if supervisord is killed, the next boot still needs its section
                with self._forgiving(name):
                    self._state.remove_section(name)
        for name, record in wanted.items():
            if not self._state.spec_path(name).exists():
                continue  # lost, and not composed yet: a running engine keeps running, a stopped one could not start
            with self._forgiving(name):
                self._write_section(name, self._autostart(record, snapshot), snapshot)

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

    def _write_section(self, name: str, autostart: bool, snapshot: Snapshot) -> None:
        """Write a section, unless a process runs by the one on file: `supervisorctl update` would restart that."""
        settings = self._settings
        current = self._state.section_text(name)
        text = programs.section(name, self._state.home, autostart, settings.log_size, settings.log_files)
        state = snapshot.table.get(name)
        live = state is not None and state.state in LIVE
        if current != text and not (live and programs.is_unedited(current)):
            self._state.write_section(name, text)

    def collect(self, records: Iterable[Record], snapshot: Snapshot) -> None:
        """Remove specs without a record or a process: they hold environments, and so perhaps secrets."""
        used = {record.program for record in records} | snapshot.table.keys()
        for name in self._state.specs_on_file():
            if name not in used:
                with contextlib.suppress(OSError):  # tried again by the next pass
                    self._state.remove_spec(name)
