"""Disk space for downloads: several of them must not each count the same free bytes."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import NoReturn

from metal_supervisor.models.listing import Unusable
from metal_supervisor.spec.sizes import amount

KEPT_FREE_BYTES = 2 << 30
"""Reserve of disk space that no download crosses: below that, macOS itself begins to fail."""


def nearest_existing(path: Path) -> Path:
    """A path itself, or the nearest of its parents that exists: they are on the disk that it would be on."""
    return next(each for each in (path, *path.parents) if each.exists())


class Space:
    """Reservations of running downloads on the store's disk. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._claims: dict[int, int] = {}

    def _free(self) -> int:
        return shutil.disk_usage(self._directory).free

    def claim(self, who: object, need_bytes: int, what: str, total_bytes: int) -> None:
        """Reserve the bytes that a download still needs. Raises Unusable with the arithmetic, OSError."""
        with self._lock:
            free = self._free()
            others = sum(size for each, size in self._claims.items() if each != id(who))
            if need_bytes > free - others - KEPT_FREE_BYTES:
                text = f"{what} needs {amount(need_bytes, 'up')}"
                if total_bytes > need_bytes:
                    text += f" more ({amount(total_bytes)}, of which {amount(total_bytes - need_bytes)} are here)"
                text += f"; {amount(free, 'down')} are free, {amount(KEPT_FREE_BYTES)} of them are left to the machine"
                if others:
                    text += f", {amount(others)} are for other downloads"
                raise _insufficient(text)
            self._claims[id(who)] = need_bytes

    def full(self, what: str, need_bytes: int) -> NoReturn:
        """Report that a write found no space. Always raises: Unusable, or OSError."""
        text = f"{what}: the disk is full; {amount(max(0, need_bytes), 'up')} are still to come, and "
        text += f"{amount(self._free(), 'down')} are free"
        raise _insufficient(text)

    def left(self, who: object, need_bytes: int) -> None:
        """Lower a download's reservation to the bytes that are still to come."""
        with self._lock:
            if id(who) in self._claims:
                self._claims[id(who)] = need_bytes

    def release(self, who: object) -> None:
        """Release all that is reserved for a download."""
        with self._lock:
            self._claims.pop(id(who), None)

    def check(self) -> None:
        """Raise Unusable if the disk has filled up meanwhile. Raises OSError."""
        free = self._free()
        if free < KEPT_FREE_BYTES:
            left = f"{amount(KEPT_FREE_BYTES)} are left to the machine"
            raise _insufficient(f"only {amount(free, 'down')} of the disk are free, and {left}")


def _insufficient(text: str) -> Unusable:
    return Unusable("InsufficientDisk", f"{text}; free some, see metal-supervisor models gc")
