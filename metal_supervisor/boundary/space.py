"""Room on the disk for what is being fetched: several downloads must not each count the same free bytes."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import NoReturn

from metal_supervisor.boundary.listing import Unusable
from metal_supervisor.core.sizes import amount

KEPT_FREE_BYTES = 2 << 30
"""What is left to the machine: below that, macOS itself begins to fail."""


class Space:
    """Who still needs how much of the disk that the store is on. Safe to ask from any thread."""

    def __init__(self, directory: Path, kept_free_bytes: int = KEPT_FREE_BYTES) -> None:
        self._directory, self._kept_free = directory, kept_free_bytes
        self._lock = threading.Lock()
        self._claims: dict[int, int] = {}

    def _free(self) -> int:
        return shutil.disk_usage(self._directory).free

    def claim(self, who: object, need_bytes: int, what: str, total_bytes: int) -> None:
        """Reserves what a download still needs. Raises Unusable with the arithmetic, OSError."""
        with self._lock:
            free = self._free()
            others = sum(size for each, size in self._claims.items() if each != id(who))
            if need_bytes > free - others - self._kept_free:
                text = f"{what} needs {amount(need_bytes, 'up')}"
                if total_bytes > need_bytes:
                    text += f" more ({amount(total_bytes)}, of which {amount(total_bytes - need_bytes)} are here)"
                text += f"; {amount(free, 'down')} are free, {amount(self._kept_free)} of them are left to the machine"
                if others:
                    text += f", {amount(others)} are for other downloads"
                raise Unusable("InsufficientDisk", f"{text}; free some, see metal-supervisor models gc")
            self._claims[id(who)] = need_bytes

    def full(self, what: str, need_bytes: int) -> NoReturn:
        """Says that a write found no room. Raises Unusable, OSError."""
        text = f"{what}: the disk is full; {amount(max(0, need_bytes), 'up')} are still to come, and "
        text += f"{amount(self._free(), 'down')} are free"
        raise Unusable("InsufficientDisk", f"{text}; free some, see metal-supervisor models gc")

    def left(self, who: object, need_bytes: int) -> None:
        """Less is needed than before."""
        with self._lock:
            if id(who) in self._claims:
                self._claims[id(who)] = need_bytes

    def release(self, who: object) -> None:
        """It is over."""
        with self._lock:
            self._claims.pop(id(who), None)

    def check(self) -> None:
        """Raises Unusable if others filled the disk meanwhile; OSError."""
        free = self._free()
        if free < self._kept_free // 2:
            text = f"only {amount(free, 'down')} of the disk are free, and {amount(self._kept_free // 2)} are left to"
            raise Unusable("InsufficientDisk", f"{text} the machine; free some, see metal-supervisor models gc")
