"""Small files that are read and written in every pass: looked at and parsed again only once they have changed."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from metal_supervisor.spec.document import UnreadableRecord

T = TypeVar("T")
Edition: TypeAlias = tuple[int, int, int]
"""(inode, mtime, size) of a file: different once it was replaced or edited.

A time alone is not enough: all that Nix installs is of 1970, and `cp -p` keeps one.
"""
Files: TypeAlias = dict[str, Edition]
"""Edition of each file of a directory, by its name without the suffix. It is never changed, only replaced."""
LISTED_S = 1.0
"""Time for which a listing without a change counts."""
EACH_LISTED_S = 0.02
"""Added to that time for each file."""
SETTLED_NS = 20_000_000
"""Twice the resolution of a directory's times on Linux, a tick of at most 10 ms; those of APFS are exact."""
MOST_KNOWN = 4096


def write_atomic(
    path: Path, text: str | bytes, durable: bool = True, as_before: bool = False, mode: int = 0o600
) -> bool:
    """Write exactly `text` to a file; False if it held that already. Readers see the old file or the new.

    `mode`: of a new file; with `as_before`, one that is replaced keeps its mode, owner and group.
    """
    content = text.encode("utf-8") if isinstance(text, str) else text
    with contextlib.suppress(OSError):
        if path.read_bytes() == content:
            return False
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            if as_before and path.exists():
                _copy_access(path.stat(), descriptor)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return True


def _copy_access(found: os.stat_result, descriptor: int) -> None:
    made = os.fstat(descriptor)
    if (made.st_uid, made.st_gid) != (found.st_uid, found.st_gid):
        os.fchown(descriptor, found.st_uid, found.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(found.st_mode))


def edition_from(found: os.stat_result) -> Edition:
    """Edition of a file that was looked at."""
    return found.st_ino, found.st_mtime_ns, found.st_size


def edition_of(path: Path) -> Edition | None:
    """Edition of a file, None if it cannot be looked at."""
    try:
        return edition_from(path.stat())
    except OSError:
        return None


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


class KeptFiles:
    """The files of one directory's folders, of which each has one writer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.path_of: Callable[[str, str], Path] = lru_cache(MOST_KNOWN)(lambda folder, name: path / folder / name)
        """Path of a file in a folder, made once: a pass asks for some twenty of each engine."""
        self._known: dict[Path, tuple[Edition, Any]] = {}
        self._written: dict[Path, _LastWrite] = {}
        self._listings: dict[str, _Listing] = {}
        self._read: defaultdict[str, tuple[Files, dict[str, Any]]] = defaultdict(lambda: ({}, {}))
        """Directory -> its files, and what was read from them, if all could be."""

    def _entries(self, directory: str, suffix: str) -> list[os.DirEntry[str]]:
        """The files there with the suffix, without those that are being written."""
        with contextlib.suppress(FileNotFoundError), os.scandir(f"{self._path}/{directory}") as entries:
            return [each for each in entries if each.name.endswith(suffix) and each.name[0] != "."]
        return []

    def names(self, directory: str, suffix: str) -> list[str]:
        """Name of each file there with the suffix, without a look at the files."""
        return [each.name for each in self._entries(directory, suffix)]

    def listed(self, directory: str, suffix: str) -> Files:
        """The files there with the suffix.

        The very same object while none is replaced. Each directory is always asked for with one suffix. A file that is
        edited in place changes nothing of its directory: that is seen once the listing does not count any more.
        """
        now, before = time.monotonic(), time.time_ns()
        try:
            changed = os.stat(f"{self._path}/{directory}").st_mtime_ns
        except FileNotFoundError:
            return {}
        known = self._listings.get(directory)
        if known is not None and known.changed_ns == changed and now < known.until:
            return known.files
        files = {}
        for each in self._entries(directory, suffix):
            try:  # for hundreds of files, `suppress` takes a third of the time
                files[each.name.removesuffix(suffix)] = edition_from(each.stat())
            except FileNotFoundError:
                continue
        files = known.files if known is not None and known.files == files else files
        # Within the resolution of its clock, a further change may leave the directory's time as it is.
        until = now + max(LISTED_S, EACH_LISTED_S * len(files)) if before - changed > SETTLED_NS else now
        self._listings[directory] = _Listing(changed, until, files)
        return files

    def parsed(self, path: Path, parse: Callable[[str], T], edition: Edition | None = None) -> T:
        """Parsed content of a file, cached until it is replaced. Our files are always replaced, never edited in place.

        `edition`: the file's own, if it is known. Raises OSError, and what `parse` raises.
        """
        edition = edition or edition_from(path.stat())
        known = self._known.get(path)
        if known is None or known[0] != edition:
            if len(self._known) > MOST_KNOWN:
                self._known.clear()
            known = self._known[path] = edition, parse(path.read_text("utf-8"))
        value: T = known[1]
        return value

    def read_all(self, directory: str, parse: Callable[[str], T]) -> tuple[dict[str, T], dict[str, str]]:
        """(readable files, reasons why the others cannot be read), both by program name."""
        files = self.listed(directory, ".json")
        before, read = self._read[directory]
        if before is files:
            return dict(read), {}
        good: dict[str, T] = {name: value for name, value in read.items() if name in files}
        bad: dict[str, str] = {}
        for name in sorted(name for name, edition in files.items() if before.get(name) != edition):
            good.pop(name, None)
            try:
                good[name] = self.parsed(self.path_of(directory, f"{name}.json"), parse, files[name])
            except FileNotFoundError:
                continue
            except (OSError, UnicodeDecodeError, UnreadableRecord) as error:
                bad[name] = str(error)
        if not bad:
            self._read[directory] = files, dict(good)
        return good, bad

    def write(self, path: Path, value: T, text_of: Callable[[T], str], durable: bool = True) -> bool:
        """Write a value to a file; False if it held that already. A file unchanged since our own write is not read.

        If it was looked at within LISTED_S, it is not even looked at.
        """
        known, now = self._written.get(path), time.monotonic()
        if known is not None and known.value is value and now < known.until:
            return False
        with contextlib.suppress(OSError):
            if known is not None and known.value == value and known.edition == edition_from(path.stat()):
                self._written[path] = _LastWrite(value, known.edition, now + LISTED_S)
                return False
        changed = write_atomic(path, text_of(value), durable)
        if len(self._written) > MOST_KNOWN:
            self._written.clear()
        self._written[path] = _LastWrite(value, edition_from(path.stat()), now + LISTED_S)
        return changed

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._written.pop(path, None)

    def put(self, directory: str, name: str, text: str | None) -> None:
        """Write a file of which this process is the one writer, or remove it for None; its directory stays listed.

        What others change there in that moment is seen once the listing does not count any more.
        """
        path, folder = self.path_of(directory, name), f"{self._path}/{directory}"
        known, before = self._listings.get(directory), os.stat(folder).st_mtime_ns
        if text is None:
            path.unlink(missing_ok=True)
        else:
            write_atomic(path, text)
        if known is not None and known.changed_ns == before:
            files = {each: edition for each, edition in known.files.items() if each != path.stem}
            if text is not None:
                files[path.stem] = edition_from(path.stat())
            self._listings[directory] = replace(known, changed_ns=os.stat(folder).st_mtime_ns, files=files)
