"""Disk space for downloads: several of them must not each count the same free bytes."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NoReturn

from metal_supervisor.models.listing import Unusable
from metal_supervisor.models.model_directory import ModelDirectory
from metal_supervisor.spec.limits import Amount, limit_of
from metal_supervisor.spec.sizes import amount
from metal_supervisor.state import trees

KEPT_FREE_BYTES = 2 << 30
"""Free space left to the machine: below that, macOS itself begins to fail."""


def nearest_existing(path: Path) -> Path:
    """A path itself, or the nearest of its parents that exists: they are on the disk that it would be on."""
    return next(each for each in (path, *path.parents) if each.exists())


class Space:
    """Reservations of running downloads on the store's disk, and the disk limits of namespaces. Thread-safe."""

    def __init__(
        self, directory: Path, kept_free_bytes: int = KEPT_FREE_BYTES, limits: Mapping[str, Amount] | None = None
    ) -> None:
        """`limits`: by namespace, `*` for all others; a share is a share of the whole disk."""
        self._directory, self._kept_free, self._limits = directory, kept_free_bytes, limits or {}
        self._lock = threading.Lock()
        self._claims: dict[int, int] = {}
        self._fetching: dict[int, tuple[str, int]] = {}
        """Namespace and size of each running download; kept only if there are limits."""

    def _free(self) -> int:
        return shutil.disk_usage(self._directory).free

    def claim(self, who: object, need_bytes: int, what: str, total_bytes: int) -> None:
        """Reserve the bytes that a download still needs. Raises Unusable with the arithmetic, OSError."""
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
                raise _insufficient(text)
            self._claims[id(who)] = need_bytes

    def count(
        self, who: object, slot: ModelDirectory, namespaces: Collection[str], what: str, total_bytes: int
    ) -> None:
        """Count a download towards one of the namespaces that want it: the first whose limit has room for it.

        `total_bytes`: its size, 0 if unknown. Raises Unusable with the arithmetic, OSError.
        """
        if not self._limits or not namespaces:
            return
        before, problem = slot.fetched_for(), ""
        with self._lock:
            for name in sorted(namespaces, key=lambda each: (each != before, each)):
                problem = self._over(name, total_bytes, slot, who, what)
                if not problem:
                    slot.count_for(name)
                    self._fetching[id(who)] = name, total_bytes
                    return
        raise Unusable("InsufficientDisk", problem)

    def _over(self, namespace: str, total_bytes: int, slot: ModelDirectory, who: object, what: str) -> str:
        """Reason why a model of that size exceeds a namespace's limit, or "" if it fits. Call it with the lock held."""
        limit = limit_of(self._limits, namespace)
        if limit is None:
            return ""
        if not total_bytes:
            return f"{what}: its server does not tell its size, which --namespace-disk needs for namespace {namespace}"
        limit_bytes = limit.of(shutil.disk_usage(self._directory).total)
        coming = [size for each, (name, size) in self._fetching.items() if name == namespace and each != id(who)]
        used = self._used(namespace, slot) + sum(coming)
        if used + total_bytes <= limit_bytes:
            return ""
        return (
            f"{what} has {amount(total_bytes, 'up')}, and the models of namespace {namespace} fill "
            f"{amount(used, 'up')} of its {amount(limit_bytes, 'down')} (--namespace-disk); remove some with "
            "metal-supervisor models rm, or have the limit raised"
        )

    def _used(self, namespace: str, but: ModelDirectory) -> int:
        """Bytes of the other models that count towards a namespace, without those being fetched now."""
        used = 0
        for path in self._directory.iterdir():
            slot = ModelDirectory(self._directory, path.name)
            if path.name == but.name or slot.busy() or slot.fetched_for() != namespace:
                continue
            used += trees.size_bytes(path)
        return used

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
        """Release all that is reserved and counted for a download."""
        with self._lock:
            self._claims.pop(id(who), None)
            self._fetching.pop(id(who), None)

    def check(self) -> None:
        """Raise Unusable if the disk has filled up meanwhile. Raises OSError."""
        free = self._free()
        if free < self._kept_free // 2:
            left = f"{amount(self._kept_free // 2)} are left to the machine"
            raise _insufficient(f"only {amount(free, 'down')} of the disk are free, and {left}")


def _insufficient(text: str) -> Unusable:
    return Unusable("InsufficientDisk", f"{text}; free some, see metal-supervisor models gc")
