"""What engines hold of the memory, measured seldom enough not to matter.

The kernel walks a process's pages to answer, and a pass of the sidecar may come many times a second.
"""

from __future__ import annotations

import time

from metal_supervisor.boundary import memory
from metal_supervisor.boundary.memory import Held

EVERY_S = 60.0
YOUNG_EVERY_S = 1.0
"""For one that was seen less than a few times: it is loading."""
YOUNG_LOOKS = 8


class Meter:
    """Remembers the latest measurement of every engine. For one thread."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, int, Held | None]] = {}
        """pid -> (monotonic time, how many looks so far, what was found)."""

    def held(self, pid: int, started: str, mapped_bytes: int) -> Held | None:
        """What a process holds with its children, None if it is gone. `started`: its identity, "" if not known."""
        now = time.monotonic()
        at, looks, found = self._known.get(pid, (0.0, 0, None))
        if not at or now - at >= (YOUNG_EVERY_S if looks < YOUNG_LOOKS else EVERY_S):
            found = memory.used_bytes(pid, mapped_bytes, started)
            self._known[pid] = now, looks + 1, found
        return found

    def keep(self, pids: set[int]) -> None:
        """Forgets all other processes."""
        self._known = {pid: known for pid, known in self._known.items() if pid in pids}
