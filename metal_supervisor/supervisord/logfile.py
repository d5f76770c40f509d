"""Reader of a log with supervisord's rotation: `x.log`, and the older `x.log.1`, `x.log.2` …, renamed when it is full.

A reader that follows the log loses no line when the file is renamed, truncated, removed or made anew. Files are
identified by inode, and a renamed one is read to its end before the next: nothing is written to it any more.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

BLOCK_BYTES = 1 << 16
CUT = b""
"""Marker among the blocks of a log: the next block begins a new line, whatever the previous one ended with."""


@dataclass(frozen=True)
class _Part:
    """One of the files, open."""

    file: FileIO
    identity: tuple[int, int]
    changed_ns: int
    current: bool
    """True if it is the file that is written to."""


def _opened(path: Path, current: bool) -> _Part | None:
    try:
        file = path.open("rb", buffering=0)
    except OSError:
        return None
    found = os.fstat(file.fileno())
    return _Part(file, (found.st_dev, found.st_ino), found.st_mtime_ns, current)


def _numbers(path: Path) -> list[int]:
    """The numbers of the older files, the newest first."""
    ends = (each.name[len(path.name) + 1 :] for each in path.parent.glob(f"{path.name}.*"))
    return sorted(int(end) for end in ends if end.isdecimal() and end.isascii())


def _parts(path: Path) -> list[_Part]:
    """All existing files, the newest first, each once even if they are renamed meanwhile."""
    found: dict[tuple[int, int], _Part] = {}
    for each in (path, *(path.with_name(f"{path.name}.{number}") for number in _numbers(path))):
        part = _opened(each, each == path)
        if part is None:
            continue
        if part.identity in found:
            part.file.close()
        else:
            found[part.identity] = part
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
        self._part: _Part | None = None

    def tail(self, lines: int | None) -> Iterator[bytes]:
        """The last lines, or all if None, from the older files too; `fresh` continues from there."""
        wanted, chosen = lines, []
        for part in _parts(self._path):
            offset, found = last_lines_at(part.file, wanted)
            part.file.seek(offset)
            chosen.append(part)
            if wanted is not None:
                wanted = max(0, wanted - found)
        for part in reversed(chosen):
            self._take(part)
            yield from self._rest()

    def fresh(self) -> Iterator[bytes]:
        """Blocks written since the last read, with a CUT where the log was truncated or removed."""
        while True:
            following = self._following()  # before the rest is read: if there is one, that rest is complete
            yield from self._rest()
            if following is None:
                return
            if self._part is not None and os.fstat(self._part.file.fileno()).st_nlink == 0:  # removed, not renamed
                yield CUT
            self._take(following)

    def close(self) -> None:
        if self._part is not None:
            self._part.file.close()
        self._part = None

    def _take(self, part: _Part) -> None:
        if self._part is not None:
            self._part.file.close()
        self._part = part

    def _rest(self) -> Iterator[bytes]:
        if self._part is None:
            return
        file = self._part.file
        if os.fstat(file.fileno()).st_size < file.tell():  # truncated
            file.seek(0)
            yield CUT
        while block := file.read(BLOCK_BYTES):
            yield block

    def _following(self) -> _Part | None:
        """The file that was begun after the open one, None while there is none."""
        if self._part is None:
            return _opened(self._path, True)
        with contextlib.suppress(OSError):
            status = self._path.stat()
            if (status.st_dev, status.st_ino) == self._part.identity:
                return None
        parts, following = _parts(self._path), None
        changed_ns = os.fstat(self._part.file.fileno()).st_mtime_ns
        for part in parts:
            # If the open one is not among them it was removed: files older than it have nothing new.
            if part.identity == self._part.identity or not (part.current or part.changed_ns > changed_ns):
                break
            following = part
        for part in parts:
            if part is not following:
                part.file.close()
        return following
