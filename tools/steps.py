"""Lines of a set-up: what a step does, how far it is on a terminal, then its seconds and what it takes on the disk."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from types import TracebackType

UNIT = 1_000_000
WIDTH = 100
"""Columns of a line with progress."""


def megabytes(place: Path) -> int:
    """What a directory takes on the disk, in MB."""
    taken = 0
    for each in place.rglob("*"):
        with contextlib.suppress(OSError):  # removed meanwhile
            taken += each.lstat().st_blocks * 512
    return round(taken / UNIT)


def shown(place: Path) -> str:
    """A path with `~` for the home directory."""
    return str(place).replace(str(Path.home()), "~", 1)


class Step:
    """Context of one step, which fills `place`."""

    def __init__(self, name: str, what: str, place: Path) -> None:
        self._line = f"  {name:<16} {what} ..."
        self._place = place

    def __enter__(self) -> Step:
        self._before, self._started_at = megabytes(self._place), time.monotonic()
        print(self._line, end="", flush=True)
        return self

    def note(self, text: str) -> None:
        """Show how far it is, in the same line; a file or a pipe gets only the result."""
        if sys.stdout.isatty():
            print(f"\r\x1b[K{f'{self._line} {text}':.{WIDTH}}", end="", flush=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if sys.stdout.isatty():
            print(f"\r\x1b[K{self._line}", end="")
        grown = megabytes(self._place) - self._before
        print(" failed" if kind else f" {time.monotonic() - self._started_at:.0f} s, {grown} MB", flush=True)
