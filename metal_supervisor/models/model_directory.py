"""The store of fetched models on the disk: a directory (slot) for each, with a note of its files and their state.

A file that is not in the note does not count, because a fetch may have been cut off at any byte. Two processes may
fetch one model at once (the controller, and a command at a terminal), so a slot is locked while it is filled. The
store is private to its user, and symbolic links within it are not followed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
import unicodedata
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from metal_supervisor.models import repository
from metal_supervisor.models.listing import Unusable
from metal_supervisor.state import trees

FORMAT = 1
NOTE = "slot.json"
USED = ".used"
LOCK = ".lock"
PARTIAL = ".partial"
OURS = NOTE, f"{NOTE}.new", USED, LOCK
SUFFIXES = PARTIAL, f"{PARTIAL}.json", f"{PARTIAL}.json.new"
"""Names that no file of a model may have in its slot."""
USED_EVERY_S = 3600.0


@dataclass(frozen=True)
class PinnedFiles:
    """Record of one complete file."""

    size_bytes: int
    mtime_ns: int
    sha256: str = ""
    """SHA-256 that it was found to have, "" if there was none to compare it with."""
    validator: str = ""
    """The server's ETag or date of the file, "" if there was none."""


@dataclass(frozen=True)
class Contents:
    """The note of a slot."""

    source: str
    """Source without credentials or query."""
    model: str
    """Path for the engine: a file or a directory, below the slot; absolute for a model that is used in place."""
    directory: bool = False
    files: Mapping[str, PinnedFiles] = field(default_factory=dict)
    """Complete files, by their path below the slot."""
    commit: str = ""
    whole: bool = False
    """True if all files are complete."""
    namespace: str = ""
    """Namespace of the Secret that it was fetched with, "" if there was none."""
    mismatch: tuple[str, str] | None = None
    """(wanted sha256, found sha256) of a fetch that was refused."""

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in self.files.values())


class ModelDirectory:
    """The directory of one model in the store: its slot."""

    def __init__(self, store: Path, name: str) -> None:
        self.store, self.name, self.path = store, name, store / name

    def prepare(self) -> None:
        """Create the directory. Raises Unusable for a link in its place, OSError."""
        self.store.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path.mkdir(exist_ok=True, mode=0o700)
        check_own(self.path)

    def place(self, name: str) -> Path:
        """Return the path for a file, with its directory created. Raises Unusable for one outside the slot, OSError."""
        target = self.path / name
        plain = repository.folded(name)  # a Mac's disk has one file for slot.json and SLOT.JSON
        ours = plain in OURS or any(part.endswith(SUFFIXES) for part in Path(plain).parts)
        if ours or not repository.is_safe(name) or not target.is_relative_to(self.path):
            raise Unusable("InvalidModelFile", f"{name!r:.80} is no name of a file within the model store")
        directory = self.path
        for part in Path(name).parts[:-1]:
            directory = directory / part
            directory.mkdir(exist_ok=True, mode=0o700)
            check_own(directory)
        return target

    def read(self) -> Contents | None:
        """Read the note; None if there is none that can be read. Raises Unusable for a link in its place."""
        if status_below(self.store, f"{self.name}/{NOTE}") is None:
            return None
        try:
            said: Any = json.loads((self.path / NOTE).read_text("utf-8"))
            if said.pop("format") != FORMAT:
                return None
            files = {str(name): PinnedFiles(**kept) for name, kept in said.pop("files").items()}
            mismatch = said.pop("mismatch", None)
            found = Contents(**said, files=files, mismatch=tuple(mismatch) if mismatch else None)
            return found if all(isinstance(text, str) for text in (found.source, found.model, found.commit)) else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def note(self) -> Contents | None:
        """Read the note; None if there is none that can be read, or a link in its place."""
        with contextlib.suppress(Unusable):
            return self.read()
        return None

    def write(self, contents: Contents) -> None:
        """Write the note durably: it survives a power cut. Raises OSError."""
        write_text(self.path / NOTE, json.dumps({"format": FORMAT, **asdict(contents)}, indent=1))
        sync_path(self.path)

    def remove_others(self, model: str, names: Collection[str]) -> None:
        """Remove what is in the model's directory besides these files: a library would load it with them.

        `names`: of files, from the slot on. Raises Unusable for a link in its place, OSError.
        """
        if status_below(self.store, f"{self.name}/{model}") is None:
            return
        kept = {_composed(f"{name}{suffix}") for name in names for suffix in ("", *SUFFIXES)}
        for directory, _, files in trees.walk(self.path / model):
            for path in (Path(directory, file) for file in files):
                if _composed(str(path.relative_to(self.path))) not in kept:
                    path.unlink(missing_ok=True)

    def model_path(self) -> Path | None:
        """Path of the model if it is complete and each file still has its size; None otherwise. Raises Unusable."""
        contents = self.read()
        if contents is None or not contents.whole:
            return None
        if not all(self.has(name, kept) for name, kept in contents.files.items()):
            return None
        return self.path / contents.model

    def has(self, name: str, kept: PinnedFiles) -> bool:
        """True if a file is here and still has its size. Raises Unusable for a link."""
        found = status_below(self.store, f"{self.name}/{name}")
        return found is not None and stat.S_ISREG(found.st_mode) and found.st_size == kept.size_bytes

    def partial_bytes(self) -> int:
        """Bytes on disk of files that are not complete yet."""
        return trees.size_bytes(self.path, PARTIAL)

    def touch(self) -> None:
        """Record that the slot is in use; writes at most once an hour."""
        with contextlib.suppress(OSError):
            descriptor = open_own(self.path / USED, os.O_WRONLY | os.O_CREAT)
            try:
                if not 0 <= time.time() - os.fstat(descriptor).st_mtime <= USED_EVERY_S:
                    os.utime(descriptor)
            finally:
                os.close(descriptor)

    def last_used(self) -> float:
        """Unix time of the last recorded use, else of the note or of the directory; 0.0 if none can be read."""
        for path in (self.path / USED, self.path / NOTE, self.path):
            with contextlib.suppress(OSError):
                return path.lstat().st_mtime
        return 0.0

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Try to lock the slot. Yields True if that worked, False if another job or process has it. Raises OSError."""
        descriptor = open_own(self.path / LOCK, os.O_RDWR | os.O_CREAT)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                got = os.path.samestat(os.fstat(descriptor), os.lstat(self.path / LOCK))
            except (BlockingIOError, FileNotFoundError):  # it may have been removed, and created again, meanwhile
                got = False
            yield got
        finally:
            os.close(descriptor)

    def busy(self) -> bool:
        """True if a job or process holds the lock. A job that locks during the check may fail, and tries again."""
        try:
            descriptor = os.open(self.path / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)


def _composed(name: str) -> str:
    """A name as its letters are usually encoded: some file systems of a Mac take them apart."""
    return unicodedata.normalize("NFC", name)


def check_own(path: Path) -> None:
    """Raise Unusable if a path of the store is a symbolic link. Raises OSError."""
    if stat.S_ISLNK(path.lstat().st_mode):
        text = f"{path} is a symbolic link, which is not followed within the model store; remove it"
        raise Unusable("InvalidModelFile", text)


def status_below(store: Path, name: str) -> os.stat_result | None:
    """Stat a path in the store; None if it does not exist. Raises Unusable for a link on the way to it."""
    path = store
    try:
        for part in Path(name).parts:
            path = path / part
            check_own(path)
        return path.lstat()
    except (OSError, ValueError):
        return None


def open_own(path: Path, flags: int) -> int:
    """Open a file of the store, and return its descriptor. Raises OSError, also for a symbolic link."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically, even if the power is cut meanwhile. Raises OSError."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)  # left by a killed process, or a link
    with os.fdopen(open_own(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        sync(file.fileno())
    fresh.replace(path)


def sync(descriptor: int) -> None:
    """Flush written data to the disk, so that it survives a power cut. Raises OSError."""
    full = getattr(fcntl, "F_FULLFSYNC", None)  # on macOS, fsync leaves the data in the disk's cache
    if full is not None:
        with contextlib.suppress(OSError):  # not every file system supports it
            fcntl.fcntl(descriptor, full)
            return
    os.fsync(descriptor)


def sync_path(path: Path) -> None:
    """Flush a file, or a directory's entries, to the disk. Raises OSError, also for a symbolic link."""
    descriptor = open_own(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def kept(path: Path, sha256: str = "", validator: str = "") -> PinnedFiles:
    """Record of a complete file, from its status. Raises OSError."""
    status = path.lstat()
    return PinnedFiles(status.st_size, status.st_mtime_ns, sha256, validator)


def with_file(contents: Contents, name: str, found: PinnedFiles) -> Contents:
    """Copy of a note with one more complete file."""
    return replace(contents, files={**contents.files, name: found})
