"""The content of a file in memory, for the reader of GGUF headers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InMemory:
    """All bytes of a file, or as many as there are of one that was cut."""

    data: bytes

    def read(self, offset: int, size: int) -> bytes:
        return self.data[offset : offset + size]
