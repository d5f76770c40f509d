"""The state directory: this Mac's persistent state, and all that the processes share.

Each file has one writer and is written atomically, so a reader never sees half of one; a damaged file is
quarantined with a reason and rebuilt, never read as "not wanted".
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from metal_supervisor import launch
from metal_supervisor.spec import first_request
from metal_supervisor.spec.attachment import Attachment
from metal_supervisor.spec.document import UnreadableRecord
from metal_supervisor.spec.processes import Observed, RunNote
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Program
from metal_supervisor.state import programs
from metal_supervisor.state.home import StateHome
from metal_supervisor.state.kept_files import KeptFiles, write_atomic

T = TypeVar("T")
LONGEST_ASIDE = 200
CRASH_LOG_BYTES = 1 << 18
MOST_LEFT_BYTES = 1 << 30
"""Logs kept of engines whose services are gone: one that gets a new name with each release leaves many."""
MOST_LEFT_FILES = 1000
LOG_NAME = re.compile(r"(.+)\.log(\.[0-9]+)?")
LAUNCHD_LOG = "launchd.log"
"""What launchd itself opens for supervisord, and may open as root."""
CORDON_FILE = "cordon"
SESSION_FILE = "session"
APPLIED_FILE = "applied"
"""Digest of the manifest that `run --apply` applied last."""


def _text_of(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


class StateDir(StateHome):
    """Paths and files of one state directory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._files = KeptFiles(path)

    def cordoned(self) -> str:
        """ "", `cordon` or `drain`, as last set by the administrator; `cordon` if the file is unreadable."""
        try:
            word = (self.path / CORDON_FILE).read_text("utf-8").strip()
        except FileNotFoundError:
            return ""
        except (OSError, UnicodeDecodeError):
            word = ""
        return word if word in ("cordon", "drain") else "cordon"

    def record_path(self, program: str) -> Path:
        return self._files.path_of("records", f"{program}.json")

    def section_path(self, program: str) -> Path:
        return self._files.path_of("models.d", f"{program}.conf")

    def section_text(self, program: str) -> str:
        """A program's section on file, "" without one that can be read."""
        return _text_of(self.section_path(program))

    def write_section(self, program: str, text: str) -> None:
        """Write a program's section."""
        self._files.put("models.d", f"{program}.conf", text)

    def remove_section(self, program: str) -> None:
        """Remove a program's section, if it has one."""
        self._files.put("models.d", f"{program}.conf", None)

    def sections_on_file(self) -> Mapping[str, object]:
        """Program -> edition of its section, which is another once it was replaced or edited.

        The very same object while none is.
        """
        return self._files.listed("models.d", ".conf")

    def specs_on_file(self) -> list[str]:
        """Programs that have a spec."""
        return [name.removesuffix(".json") for name in self._files.names("specs", ".json")]

    def has_section(self, program: str) -> bool:
        """True if a program has a section on file that this program wrote."""
        return programs.is_section(self.section_text(program))

    def spec_path(self, program: str) -> Path:
        return self._files.path_of("specs", f"{program}.json")

    def spec_of(self, program: str) -> dict[str, Any]:
        """The spec for a program's next start, {} if it cannot be read."""
        return self._object(self.spec_path(program))

    def key_of(self, program: str) -> tuple[str, str]:
        """(variable, key) of the API key in the environment of a program's engine, ("", "") if none is known."""
        note = self.run_note(program)
        return first_request.key_of((note.spec if note else self.spec_of(program)).get("env"))

    def write_spec(self, made: Program) -> bool:
        """Write a program's spec; False if the file held that already."""
        return self._files.write(self.spec_path(made.name), made.spec, str)

    def scratch_path(self, program: str) -> Path:
        """Path of an engine's own scratch directory."""
        return self.path / "scratch" / programs.scratch_name(program, self.home)

    def note_path(self, program: str) -> Path:
        return self._files.path_of("runs", f"{program}.json")

    def bar_path(self, program: str) -> Path:
        """Path of the file whose presence keeps a program's launcher from starting the engine."""
        return self._files.path_of("runs", f"{program}.bar")

    def launched_path(self, program: str) -> str:
        """Path of a program's spec in the form that launchers are given."""
        return f"{self.home}/specs/{program}.json"

    def attached_path(self, program: str) -> Path:
        return self._files.path_of("attached", f"{program}.json")

    def log_path(self, program: str) -> Path:
        return self._files.path_of("log", f"{program}.log")

    def records(self) -> tuple[dict[str, Record], dict[str, str]]:
        """(readable records, reasons why the others cannot be read), both by program."""
        good, bad = self._files.read_all("records", programs.read_record)
        for name in [name for name, record in good.items() if record.program != name]:
            bad[name] = f"the record of {good.pop(name).program} under another name"
        return good, bad

    def record_of(self, program: str) -> Record | None:
        """The record of one program, None if there is none that can be read."""
        return self._readable(self.record_path(program), programs.read_record)

    def attachment(self, program: str) -> Attachment | None:
        """The note of a model's attacher, None if there is none that can be read."""
        return self._readable(self.attached_path(program), programs.read_attached)

    def attachments(self) -> list[Attachment]:
        """All notes of attachers."""
        return list(self._files.read_all("attached", programs.read_attached)[0].values())

    def write_attached(self, attachment: Attachment) -> None:
        """Write an attacher's note, without a sync: it is made anew with every start."""
        with contextlib.suppress(OSError):
            text = programs.text_of(attachment)
            write_atomic(self.attached_path(attachment.program), text, durable=False)

    def observations(self) -> dict[str, Observed]:
        """The sidecar's observations, by program."""
        return self._files.read_all("observed", programs.read_observed)[0]

    def run_note(self, program: str) -> RunNote | None:
        """The launcher's note of a program, None if there is none that can be read."""
        return self._readable(self.note_path(program), programs.read_run)

    def report(self, name: str) -> dict[str, Any]:
        """A JSON object that another process keeps, {} if it cannot be read; the same until it is replaced."""
        return self._object(self.path / name)

    def _object(self, path: Path) -> dict[str, Any]:
        found = self._readable(path, json.loads)
        return found if isinstance(found, dict) else {}

    def _readable(self, path: Path, parse: Callable[[str], T]) -> T | None:
        """Parsed content of a file, None if it cannot be read; the same until it is replaced."""
        try:
            return self._files.parsed(path, parse)
        except (OSError, ValueError, RecursionError, UnreadableRecord):
            return None

    def run_notes(self) -> dict[str, RunNote]:
        """All notes of launchers, by program."""
        return self._files.read_all("runs", programs.read_run)[0]

    def remove_spec(self, program: str) -> None:
        """Remove a program's spec, if it has one."""
        self._files.remove(self.spec_path(program))

    def write_record(self, record: Record) -> bool:
        """Write a record, with the bar of its program; False if the file held that already."""
        bar = self.bar_path(record.program)
        if record.barred:
            self._files.write(bar, record.barred, str)
        elif bar.exists():
            self._files.remove(bar)
        return self._files.write(self.record_path(record.program), record, programs.text_of)

    def write_observed(self, observed: Observed) -> bool | None:
        """Write an observation; False if the file held that already, None if it cannot be written.

        Without a sync: it is made anew in every pass, and a full disk must not stop the pass.
        """
        path = self._files.path_of("observed", f"{observed.program}.json")
        try:
            return self._files.write(path, observed, programs.text_of, durable=False)
        except OSError:
            return None

    def forget(self, program: str) -> None:
        """Remove all files of a program except its logs; its scratch becomes trash. Raises OSError."""
        with contextlib.suppress(OSError):  # where it cannot be removed, the applier keeps trying
            self.remove_section(program)
        for path_of in (self.spec_path, self.note_path, self.bar_path, self.attached_path):
            self._files.remove(path_of(program))
        launch.set_aside(str(self.scratch_path(program)))
        self._files.remove(self.record_path(program))  # last: after an interruption it has all of this done again

    def remove_left_logs(self, programs_here: Collection[str]) -> None:
        """Remove logs of services that are gone, the oldest first, until few enough are left."""
        found: list[tuple[float, int, Path]] = []
        for path in (*(self.path / "log").glob("*.log*"), *(self.path / "log" / "crashed").glob("*.log")):
            name = LOG_NAME.fullmatch(path.name)
            if name is not None and programs.PROGRAM_NAME.fullmatch(name[1]) and name[1] not in programs_here:
                with contextlib.suppress(OSError):
                    status = path.lstat()
                    found.append((status.st_mtime, status.st_size, path))
        kept_bytes = 0
        for number, (_, size, path) in enumerate(sorted(found, reverse=True), 1):
            kept_bytes += size
            if kept_bytes > MOST_LEFT_BYTES or number > MOST_LEFT_FILES:
                with contextlib.suppress(OSError):
                    path.unlink()

    def forget_observed(self, program: str) -> None:
        """Remove the sidecar's observation."""
        self._files.remove(self._files.path_of("observed", f"{program}.json"))

    def quarantine(self, path: Path, reason: str) -> None:
        """Move a file aside, with a note of the reason beside it; never deletes it."""
        directory = self.path / "quarantine"
        directory.mkdir(mode=0o700, exist_ok=True)
        name = path.name
        if len(os.fsencode(name)) > LONGEST_ASIDE:
            name = f"{hashlib.sha256(os.fsencode(name)).hexdigest()[:12]}{path.suffix}"
        stamp = time.strftime("%Y%m%dT%H%M%S")
        target = next(each for n in itertools.count() if not (each := directory / f"{stamp}-{n}-{name}").exists())
        if not path.is_symlink() and not path.exists():
            return
        path.rename(target)
        target.with_name(target.name + ".why").write_text(reason + "\n", "utf-8", errors="replace")

    def crash_log_path(self, program: str) -> Path:
        """Path of the kept end of the last crash's log, which the next run's output does not rotate away."""
        return self.path / "log" / "crashed" / f"{program}.log"

    def keep_crash_log(self, program: str) -> None:
        """Keep the end of a program's log as the log of its last crash."""
        kept = self.crash_log_path(program)
        with contextlib.suppress(OSError):  # a full disk: the log itself is still there
            kept.parent.mkdir(mode=0o700, exist_ok=True)
            write_atomic(kept, self._log_end(program, CRASH_LOG_BYTES), durable=False)

    def _log_end(self, program: str, most_bytes: int) -> bytes:
        """The end of a program's log, with part of the rotated file if the current one is shorter than `most_bytes`."""
        end, path = b"", self.log_path(program)
        for each in (path, path.with_name(f"{path.name}.1")):
            with contextlib.suppress(OSError), each.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - (most_bytes - len(end))))
                end = file.read() + end
            if len(end) >= most_bytes:
                break
        return end[-most_bytes:]

    def log_tail(self, program: str, lines: int, most_bytes: int = 16384) -> list[str]:
        """The last lines of a program's log, control characters stripped."""
        text = self._log_end(program, most_bytes).decode("utf-8", "replace")
        clean = ("".join(char for char in line if char.isprintable()) for line in text.splitlines()[-lines:])
        return [line for line in clean if line.strip()]
