"""Reader of a log with supervisord's rotation: `x.log`, and the older `x.log.1`, `x.log.2` …, renamed when it is full.

A reader that follows the log loses no line when the file is renamed, truncated, removed or made anew. Files are
identified by inode, and a renamed one is read to its end before the next: nothing is written to it any more.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

BLOCK_BYTES = 1 << 16
CUT = b""
"""Marker among the blocks of a log: the next block begins a new line, whatever the previous one ended with."""


def _opened(path: Path) -> FileIO | None:
    try:
        return path.open("rb", buffering=0)
    except OSError:
        return None


def _identity(file: FileIO) -> tuple[int, int]:
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino


def _numbers(path: Path) -> list[int]:
    """The numbers of the older files, the newest first."""
    ends = (each.name[len(path.name) + 1 :] for each in path.parent.glob(f"{path.name}.*"))
    return sorted(int(end) for end in ends if end.isdecimal() and end.isascii())


def _parts(path: Path) -> list[FileIO]:
    """All existing files, open, the newest first, each once even if they are renamed meanwhile."""
    found: dict[tuple[int, int], FileIO] = {}
    for each in (path, *(path.with_name(f"{path.name}.{number}") for number in _numbers(path))):
        if (file := _opened(each)) is not None and found.setdefault(_identity(file), file) is not file:
            file.close()
    return list(found.values())


def last_lines_at(file: FileIO, lines: int | None) -> tuple[int, int]:
    """(offset at which the last lines of a file begin, their number). `lines` None: all of them."""
    end = at = file.seek(0, os.SEEK_END)
    if lines == 0:
        return end, 0
    if lines is None:
        return 0, 0
    found = 0
    while at > 0:
        size = min(BLOCK_BYTES, at)
        at -= size
        file.seek(at)
        block = file.read(size)
        newline = block.rfind(b"\n")
        while newline >= 0:
            if at + newline + 1 < end:  # a newline at the very end begins no line
                found += 1
                if found == lines:
                    return at + newline + 1, found
            newline = block.rfind(b"\n", 0, newline)
    return 0, found + (1 if end else 0)


class LogFile:
    """Reads one log and follows it. Not safe to use from more than one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None

    def tail(self, lines: int | None) -> Iterator[bytes]:
        """The last lines, or all if None, from the older files too; `fresh` continues from there."""
        wanted, chosen = lines, []
        for file in _parts(self._path):
            offset, found = last_lines_at(file, wanted)
            file.seek(offset)
            chosen.append(file)
            if wanted is not None:
                wanted = max(0, wanted - found)
        for file in reversed(chosen):
            self._take(file)
            yield from self._rest()

    def fresh(self) -> Iterator[bytes]:
        """Blocks written since the last read, with a CUT where the log was truncated or removed."""
        while True:
            following = self._following()  # before the rest is read: if there is one, that rest is complete
            yield from self._rest()
            if following is None:
                return
            if self._file is not None and os.fstat(self._file.fileno()).st_nlink == 0:  # removed, not renamed
                yield CUT
            self._take(following)

    def close(self) -> None:
        self._take(None)

    def _take(self, file: FileIO | None) -> None:
        if self._file is not None:
            self._file.close()
        self._file = file

    def _rest(self) -> Iterator[bytes]:
        if self._file is None:
            return
        if os.fstat(self._file.fileno()).st_size < self._file.tell():  # truncated
            self._file.seek(0)
            yield CUT
        while block := self._file.read(BLOCK_BYTES):
            yield block

    def _following(self) -> FileIO | None:
        """The file that was begun after the open one, None while there is none."""
        if self._file is None:
            return _opened(self._path)
        own, changed_ns = _identity(self._file), os.fstat(self._file.fileno()).st_mtime_ns
        with contextlib.suppress(OSError):
            status = self._path.stat()
            if (status.st_dev, status.st_ino) == own:
                return None
        files, following = _parts(self._path), None
        for file in files:
            # If the open one is not among them it was removed: files older than it have nothing new.
            is_newer = file.name == str(self._path) or os.fstat(file.fileno()).st_mtime_ns > changed_ns
            if _identity(file) == own or not is_newer:
                break
            following = file
        for file in files:
            if file is not following:
                file.close()
        return following
