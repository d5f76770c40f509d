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
import shutil
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from metal_supervisor import launch
from metal_supervisor.spec.attachment import Attachment
from metal_supervisor.spec.processes import Observed, RunNote
from metal_supervisor.spec.record import Record
from metal_supervisor.state import programs

T = TypeVar("T")
Edition: TypeAlias = tuple[int, int, int]
"""(inode, mtime, size) of a file: different once it was replaced or edited."""
Files: TypeAlias = tuple[tuple[str, Edition], ...]
LISTED_S, SETTLED_NS = 1.0, 100_000_000
DIRECTORIES = (
    "records", "specs", "models.d", "pending", "observed", "runs", "attached", "log", "quarantine", "current", "hub",
    "scratch",
)  # fmt: skip
# sun_path has 104 bytes on macOS, and supervisord first binds `<path>.<pid>`.
LONGEST_HOME = 60
LONGEST_ASIDE = 200
MOST_KNOWN = 4096
CRASH_LOG_BYTES = 1 << 18
CORDON_FILE, SESSION_FILE, POWER_FILE = "cordon", "session", "power.json"


class StateError(Exception):
    """The state directory cannot be used; the message says what to do."""


def write_atomic(path: Path, text: str | bytes, durable: bool = True) -> bool:
    """Write exactly `text` to a file; False if it held that already. Readers see the old file or the new."""
    content = text.encode("utf-8") if isinstance(text, str) else text
    with contextlib.suppress(OSError):
        if path.read_bytes() == content:
            return False
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return True


def _edition(found: os.stat_result) -> Edition:
    return found.st_ino, found.st_mtime_ns, found.st_size


def _text_of(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _link_for(path: Path) -> Path:
    digest = hashlib.sha256(str(path).encode("utf-8", "surrogateescape")).hexdigest()[:10]
    # Not the temporary directory of the session: on a Mac that alone is too long for a socket.
    return Path("/tmp").resolve() / f"metal-supervisor-{os.getuid()}-{digest}"


@dataclass(frozen=True)
class _Listing:
    changed_ns: int
    """Time of the directory's last change."""
    until: float
    """Monotonic time until which it counts."""
    files: Files


@dataclass(frozen=True)
class _LastWrite:
    """A file as we wrote it."""

    value: Any
    edition: Edition
    until: float
    """Monotonic time until which it counts as unchanged."""


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
        self._known: dict[Path, tuple[Edition, Any]] = {}
        self._written: dict[Path, _LastWrite] = {}
        self._paths: dict[tuple[str, str], Path] = {}
        self._listings: dict[str, _Listing] = {}
        self._read: dict[str, tuple[Files, dict[str, Any]]] = {}
        """Directory -> its files, and what was read from them, if all could be."""

    @property
    def socket(self) -> str:
        """Path of supervisord's socket. Raises StateError if the short link is another user's."""
        self._check_link()
        return f"{self.home}/supervisor.sock"

    # ── making it ────────────────────────────────────────────────────────────────────────────────

    def create(self) -> None:
        """Make the directories, mode 0700. Raises StateError."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.path.chmod(0o700)
            for name in DIRECTORIES:
                (self.path / name).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            text = f"state directory {self.path}: {error.strerror}; choose another with --state-dir"
            raise StateError(text) from None
        self.refresh_link()

    def remove_unfinished(self) -> None:
        """Remove what writers that were killed left unfinished: that of a spec holds its service's environment."""
        for path in self.path.glob("*/*.tmp"):
            pid = path.name.removesuffix(".tmp").rpartition(".")[2]
            if pid.isascii() and pid.isdigit() and not launch.start_time(int(pid)):
                with contextlib.suppress(OSError):
                    path.unlink()

    def refresh_link(self) -> None:
        """Make the short link again if a cleaner of temporary files removed it. Raises StateError."""
        if self.link is None:
            return
        self._check_link()
        with contextlib.suppress(FileNotFoundError):
            if self.link.readlink() == self.path:
                return
            self.link.unlink()
        try:
            self.link.symlink_to(self.path)
        except FileExistsError:
            self._check_link()  # another process made it just now

    def _check_link(self) -> None:
        """Raise StateError for a short link that is not this user's: anyone may make one in /tmp before us."""
        with contextlib.suppress(FileNotFoundError):
            found = self.link.lstat() if self.link is not None else None
            if found is not None and not (stat.S_ISLNK(found.st_mode) and found.st_uid == os.getuid()):
                text = f"{self.link} is not a link of this user (it is of uid {found.st_uid}): what is behind it"
                raise StateError(f"{text} is not trusted; remove it, or choose a shorter --state-dir")

    def remove_link(self) -> None:
        """Remove the short link, once nothing runs."""
        if self.link is not None:
            self.link.unlink(missing_ok=True)

    # ── files ────────────────────────────────────────────────────────────────────────────────────

    def cordoned(self) -> str:
        """"", `cordon` or `drain`, as last set by the administrator; `cordon` if the file is unreadable."""
        try:
            word = (self.path / CORDON_FILE).read_text("utf-8").strip()
        except FileNotFoundError:
            return ""
        except (OSError, UnicodeDecodeError):
            word = ""
        return word if word in ("cordon", "drain") else "cordon"

    def _path(self, folder: str, name: str) -> Path:
        """Path of a file, made once: a pass asks for some twenty of each engine."""
        found = self._paths.get((folder, name))
        if found is None:
            if len(self._paths) > MOST_KNOWN:
                self._paths.clear()
            found = self._paths[folder, name] = self.path / folder / name
        return found

    def record_path(self, program: str) -> Path:
        return self._path("records", f"{program}.json")

    def section_path(self, program: str) -> Path:
        return self._path("models.d", f"{program}.conf")

    def pending_path(self, program: str) -> Path:
        """Path of the pending section, which replaces the one in `models.d` when its engine does not run."""
        return self._path("pending", f"{program}.conf")

    def section_text(self, program: str) -> str:
        """A program's section on file, "" without one that can be read."""
        return _text_of(self.section_path(program))

    def sections_on_file(self) -> dict[str, object]:
        """File name -> edition of each section, which is another once it was replaced or edited."""
        return dict(self._listed("models.d", ".conf"))

    def specs_on_file(self) -> list[str]:
        """File names of all specs."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path / "specs") as entries:
            return [each.name for each in entries if each.name.endswith(".json") and each.name[0] != "."]
        return []

    def section_spec(self, program: str) -> str:
        """The spec that a program's section on file names; "" without one, or if it is not ours."""
        return programs.section_spec(self.section_text(program))

    def pending_spec(self, program: str) -> str:
        """The spec that a program's waiting section names; as above."""
        return programs.section_spec(_text_of(self.pending_path(program)))

    def spec_path(self, spec_file: str) -> Path:
        return self._path("specs", spec_file)

    def read_spec(self, spec_file: str) -> dict[str, Any]:
        """A spec as it is on file, {} if it cannot be read."""
        if not spec_file:
            return {}
        try:
            found = self._parsed(self.spec_path(spec_file), json.loads)
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def write_spec(self, spec_file: str, text: str) -> bool:
        """Write a spec; False if the file held that already."""
        return self._kept(self.spec_path(spec_file), text, str)

    def scratch_path(self, program: str) -> Path:
        """Path of an engine's own scratch directory."""
        return self.path / "scratch" / programs.scratch_name(program, self.home)

    def note_path(self, program: str) -> Path:
        return self._path("runs", f"{program}.json")

    def specs_of(self, program: str) -> str:
        """Common prefix of the paths of a program's specs, in the form that launchers are given."""
        return f"{self.home}/specs/{program}"

    def attached_path(self, program: str) -> Path:
        return self._path("attached", f"{program}.json")

    def log_path(self, program: str) -> Path:
        return self._path("log", f"{program}.log")

    def _read_all(self, directory: str, parse: Callable[[str], T]) -> tuple[dict[str, T], dict[str, str]]:
        """(readable files, reasons why the others cannot be read), both by program name."""
        files = self._listed(directory, ".json")
        known = self._read.get(directory)
        if known is not None and known[0] is files:
            return dict(known[1]), {}
        before, good = (frozenset(known[0]), dict[str, T](known[1])) if known is not None else (frozenset(), {})
        bad: dict[str, str] = {}
        for file_name, _ in before.difference(files):
            good.pop(file_name[:-5], None)
        for file_name, edition in sorted(set(files) - before):
            name = file_name[:-5]
            try:
                good[name] = self._parsed(self._path(directory, file_name), parse, edition)
            except FileNotFoundError:
                continue
            except (OSError, UnicodeDecodeError, programs.UnreadableRecord) as error:
                bad[name] = str(error)
        if not bad:
            self._read[directory] = files, dict(good)
        return good, bad

    def _listed(self, directory: str, suffix: str) -> Files:
        """(file name, edition) of each file there with the suffix, without those that are being written.

        The very same object while none is replaced. Each directory is always asked for with one suffix. A file that is
        edited in place changes nothing of its directory: that is seen LISTED_S later.
        """
        path, now, before = f"{self.path}/{directory}", time.monotonic(), time.time_ns()
        try:
            changed = os.stat(path).st_mtime_ns
        except FileNotFoundError:
            return ()
        known = self._listings.get(directory)
        if known is not None and known.changed_ns == changed and now < known.until:
            return known.files
        found = []
        with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
            for each in entries:
                if each.name.endswith(suffix) and each.name[0] != ".":
                    with contextlib.suppress(FileNotFoundError):
                        found.append((each.name, _edition(each.stat())))
        files = tuple(sorted(found))
        files = known.files if known is not None and known.files == files else files
        # Within the resolution of its clock, a further change may leave the directory's time as it is.
        until = now + LISTED_S if before - changed > SETTLED_NS else now
        self._listings[directory] = _Listing(changed, until, files)
        return files

    def _parsed(self, path: Path, parse: Callable[[str], T], edition: Edition | None = None) -> T:
        """Parsed content of a file, cached until it is replaced. Our files are always replaced, never edited in place.

        `edition`: the file's own, if it is known. Raises OSError, and what `parse` raises.
        """
        edition = edition or _edition(path.stat())
        known = self._known.get(path)
        if known is None or known[0] != edition:
            if len(self._known) > MOST_KNOWN:
                self._known.clear()
            known = self._known[path] = edition, parse(path.read_text("utf-8"))
        value: T = known[1]
        return value

    def records(self) -> tuple[dict[str, Record], dict[str, str]]:
        """(readable records, reasons why the others cannot be read), both by program."""
        good, bad = self._read_all("records", programs.read_record)
        for name in [name for name, record in good.items() if record.program != name]:
            bad[name] = f"the record of {good.pop(name).program} under another name"
        return good, bad

    def record_of(self, program: str) -> Record | None:
        """The record of one program, None if there is none that can be read."""
        try:
            return self._parsed(self.record_path(program), programs.read_record)
        except (OSError, UnicodeDecodeError, programs.UnreadableRecord):
            return None

    def attachment(self, program: str) -> Attachment | None:
        """The note of a model's attacher, None if there is none that can be read."""
        try:
            return self._parsed(self.attached_path(program), programs.read_attached)
        except (OSError, UnicodeDecodeError, programs.UnreadableRecord):
            return None

    def attachments(self) -> list[Attachment]:
        """All notes of attachers."""
        return list(self._read_all("attached", programs.read_attached)[0].values())

    def write_attached(self, attachment: Attachment) -> None:
        """Write an attacher's note, without a sync: it is made anew with every start."""
        with contextlib.suppress(OSError):
            text = programs.attached_text(attachment)
            write_atomic(self.attached_path(attachment.program), text, durable=False)

    def observations(self) -> dict[str, Observed]:
        """The sidecar's observations, by program."""
        return self._read_all("observed", programs.read_observed)[0]

    def run_note(self, program: str) -> RunNote | None:
        """The launcher's note of a program, None if there is none that can be read."""
        try:
            return self._parsed(self.note_path(program), programs.read_run)
        except (OSError, UnicodeDecodeError, programs.UnreadableRecord):
            return None

    def report(self, name: str) -> dict[str, Any]:
        """A JSON object that another process keeps, {} if it cannot be read; the same until it is replaced."""
        try:
            found = self._parsed(self.path / name, json.loads)
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def run_notes(self) -> dict[str, RunNote]:
        """All notes of launchers, by program."""
        return self._read_all("runs", programs.read_run)[0]

    def _kept(self, path: Path, value: T, text_of: Callable[[T], str], durable: bool = True) -> bool:
        """Write a value to a file; False if it held that already. A file unchanged since our own write is not read.

        If it was looked at within LISTED_S, it is not even looked at.
        """
        known, now = self._written.get(path), time.monotonic()
        if known is not None and known.value is value and now < known.until:
            return False
        with contextlib.suppress(OSError):
            if known is not None and known.value == value and known.edition == _edition(path.stat()):
                self._written[path] = _LastWrite(value, known.edition, now + LISTED_S)
                return False
        changed = write_atomic(path, text_of(value), durable)
        if len(self._written) > MOST_KNOWN:
            self._written.clear()
        self._written[path] = _LastWrite(value, _edition(path.stat()), now + LISTED_S)
        return changed

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._written.pop(path, None)

    def remove_spec(self, spec_file: str) -> None:
        """Remove a spec that nothing names any more."""
        self._remove(self.spec_path(spec_file))

    def write_record(self, record: Record) -> bool:
        """Write a record; False if the file held that already."""
        return self._kept(self.record_path(record.program), record, programs.record_text)

    def write_observed(self, observed: Observed) -> bool | None:
        """Write an observation; False if the file held that already, None if it cannot be written.

        Without a sync: it is made anew in every pass, and a full disk must not stop the pass.
        """
        path = self._path("observed", f"{observed.program}.json")
        try:
            return self._kept(path, observed, programs.observed_text, durable=False)
        except OSError:
            return None

    def forget(self, program: str) -> None:
        """Remove all files of a program except its logs."""
        with contextlib.suppress(OSError):  # where it cannot be removed, the applier keeps trying
            self.section_path(program).unlink(missing_ok=True)
        for path_of in (self.record_path, self.pending_path, self.note_path, self.attached_path):
            self._remove(path_of(program))
        for name in self.specs_on_file():
            if name.startswith(f"{program}.") and name.count(".") == program.count(".") + 2:
                self.remove_spec(name)
        shutil.rmtree(self.scratch_path(program), ignore_errors=True)

    def forget_observed(self, program: str) -> None:
        """Remove the sidecar's observation."""
        self._remove(self._path("observed", f"{program}.json"))

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
