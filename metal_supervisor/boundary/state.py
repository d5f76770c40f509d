"""The state directory: this Mac's memory, and the only thing the processes share.

One writer per file, written atomically, so a reader never sees half of one; a damaged file is put aside
under its name with a reason and rebuilt, never read as "not wanted".
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from metal_supervisor.core import programs
from metal_supervisor.core.types import Observed, Record, RunNote

T = TypeVar("T")
DIRECTORIES = ("records", "specs", "models.d", "observed", "runs", "log", "quarantine", "current")
# sun_path has 104 bytes on macOS, and supervisord first binds `<path>.<pid>`.
LONGEST_HOME = 60


class StateError(Exception):
    """The state directory cannot be used; the message says what to do."""


def write_atomic(path: Path, text: str, durable: bool = True) -> bool:
    """Makes the file hold exactly `text`; False if it already did. Readers see the old file or the new."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if path.read_text("utf-8") == text:
            return False
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(path)
    return True


def _link_for(path: Path) -> Path:
    digest = hashlib.sha256(str(path).encode("utf-8", "surrogateescape")).hexdigest()[:10]
    # Not the temporary directory of the session: on a Mac that alone is too long for a socket.
    return Path("/tmp").resolve() / f"metal-supervisor-{os.getuid()}-{digest}"


class StateDir:
    """Paths and files of one state directory.

    `home` is the directory as supervisord may name it: itself, or a symbolic link in the system's
    temporary directory when its own path is too long for a socket or holds what an ini cannot.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        plain = programs.SAFE_HOME.fullmatch(str(path)) and len(str(path)) <= LONGEST_HOME
        self.link = None if plain else _link_for(path)
        self.home = str(self.link or path)
        self.socket = f"{self.home}/supervisor.sock"

    # ── making it ────────────────────────────────────────────────────────────────────────────────

    def create(self) -> None:
        """Makes the directories, 0700. Raises StateError."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.path.chmod(0o700)
            for name in DIRECTORIES:
                (self.path / name).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            text = f"state directory {self.path}: {error.strerror}; choose another with --state-dir"
            raise StateError(text) from None
        self.refresh_link()

    def refresh_link(self) -> None:
        """Makes the short link again if a cleaner of temporary files took it. Raises StateError."""
        if self.link is None:
            return
        with contextlib.suppress(FileNotFoundError):
            found = self.link.lstat()
            if stat.S_ISLNK(found.st_mode) and found.st_uid == os.getuid():
                if self.link.readlink() == self.path:
                    return
                self.link.unlink()
            else:
                raise StateError(f"{self.link} is in the way and not ours; remove it")
        self.link.symlink_to(self.path)

    def remove_link(self) -> None:
        """Takes the short link away, once nothing runs."""
        if self.link is not None:
            self.link.unlink(missing_ok=True)

    # ── files ────────────────────────────────────────────────────────────────────────────────────

    def record_path(self, program: str) -> Path:
        return self.path / "records" / f"{program}.json"

    def section_path(self, program: str) -> Path:
        return self.path / "models.d" / f"{program}.conf"

    def spec_path(self, spec_file: str) -> Path:
        return self.path / "specs" / spec_file

    def log_path(self, program: str) -> Path:
        return self.path / "log" / f"{program}.log"

    def _read_all(self, directory: str, parse: Callable[[str], T]) -> tuple[dict[str, T], dict[str, str]]:
        """(every readable file, why each of the others cannot be read), by program name."""
        good: dict[str, T] = {}
        bad: dict[str, str] = {}
        for path in sorted((self.path / directory).glob("*.json")):
            name = path.name.removesuffix(".json")
            try:
                good[name] = parse(path.read_text("utf-8"))
            except FileNotFoundError:
                continue
            except (OSError, UnicodeDecodeError, programs.Unreadable) as error:
                bad[name] = str(error)
        return good, bad

    def records(self) -> tuple[dict[str, Record], dict[str, str]]:
        """(all records, why each of the others cannot be read), by program."""
        return self._read_all("records", programs.read_record)

    def observations(self) -> dict[str, Observed]:
        """What the sidecar saw, by program."""
        return self._read_all("observed", programs.read_observed)[0]

    def run_note(self, program: str) -> RunNote | None:
        """The launcher's note of a program, None if there is none that can be read."""
        try:
            return programs.read_run((self.path / "runs" / f"{program}.json").read_text("utf-8"))
        except (OSError, UnicodeDecodeError, programs.Unreadable):
            return None

    def run_notes(self) -> dict[str, RunNote]:
        """All notes of launchers, by program."""
        names = [path.name.removesuffix(".json") for path in (self.path / "runs").glob("*.json")]
        return {name: note for name in names if (note := self.run_note(name)) is not None}

    def write_record(self, record: Record) -> bool:
        """Keeps a record; False if it was there already."""
        return write_atomic(self.record_path(record.program), programs.record_text(record))

    def write_observed(self, observed: Observed) -> bool:
        """Keeps an observation. It can be made again, so it is not worth a sync."""
        path = self.path / "observed" / f"{observed.program}.json"
        return write_atomic(path, programs.observed_text(observed), durable=False)

    def forget(self, program: str) -> None:
        """Removes everything that is remembered of a program but its logs."""
        for path in (self.record_path(program), self.section_path(program), self.path / "runs" / f"{program}.json"):
            path.unlink(missing_ok=True)
        for path in (self.path / "specs").glob(f"{program}.*.json"):
            if path.name.count(".") == program.count(".") + 2:
                path.unlink(missing_ok=True)

    def forget_observed(self, program: str) -> None:
        """Removes the sidecar's observation."""
        (self.path / "observed" / f"{program}.json").unlink(missing_ok=True)

    def quarantine(self, path: Path, reason: str) -> None:
        """Puts a file aside, beside a note of why, and never loses it."""
        target = self.path / "quarantine" / f"{time.strftime('%Y%m%dT%H%M%S')}-{time.time_ns() % 10**6:06}-{path.name}"
        with contextlib.suppress(FileNotFoundError):
            path.rename(target)
            target.with_name(target.name + ".why").write_text(reason + "\n", "utf-8")

    def log_tail(self, program: str, lines: int, most_bytes: int = 16384) -> list[str]:
        """The last lines of a program's log, control characters stripped."""
        try:
            with self.log_path(program).open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - most_bytes))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return []
        clean = ("".join(char for char in line if char.isprintable()) for line in text.splitlines()[-lines:])
        return [line for line in clean if line.strip()]
