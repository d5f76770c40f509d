"""Turns to download: only so many models are fetched at a time, and no namespace waits for all that another one has.

A free turn goes to the namespace with the fewest downloads under way, then to the one whose last turn is longest ago,
then to the download that has waited longest. A download keeps its turn until it ends, because not every server can
resume; one of a slow server may take days. So a namespace without any gets a turn of its own, beyond the most that
there may be, once those under way have all lasted for LONG_S.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from typing import Protocol

LONG_S = 600.0


class TurnTaker(Protocol):
    """Something that takes turns."""

    namespaces: frozenset[str]
    """Those that want it, one of which its turn counts for; empty for a download of the administrator's."""


class DownloadTurns:
    """The turns of one store. Thread-safe."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._lock = threading.Lock()
        self._waiting: dict[TurnTaker, threading.Event] = {}
        """Those that wait, the longest first."""
        self._under_way: dict[TurnTaker, tuple[str, float]] = {}
        """(namespace, monotonic time of its turn)."""
        self._latest: dict[str, int] = {}
        """Number of a namespace's latest turn."""
        self._numbers = itertools.count(1)

    def ask(self, download: TurnTaker) -> threading.Event:
        """Wait for a turn from now on; the event is set once it has one, or has given up."""
        with self._lock:
            given = self._waiting[download] = threading.Event()
            self._give()
        return given

    def look(self) -> None:
        """Give turns that are due by the time that has passed."""
        with self._lock:
            self._give()

    def give_up(self, download: TurnTaker) -> None:
        """End the wait for a turn, if it waits."""
        with self._lock:
            if given := self._waiting.pop(download, None):
                given.set()

    def leave(self, download: TurnTaker) -> None:
        """End the turn, or the wait for one, if it has either."""
        self.give_up(download)
        with self._lock:
            self._under_way.pop(download, None)
            self._give()

    def _give(self) -> None:
        """Give all turns that there are; the caller holds the lock."""
        while self._waiting:
            now, full = time.monotonic(), len(self._under_way) >= self._at_once
            if full and any(now - since < LONG_S for _, since in self._under_way.values()):
                return
            counts = Counter(namespace for namespace, _ in self._under_way.values())
            count, _, _, namespace, download = min(
                (counts[name], self._latest.get(name, 0), place, name, each)
                for place, each in enumerate(self._waiting)
                for name in each.namespaces or ("",)
            )
            if full and count:
                return
            self._under_way[download] = namespace, now
            self._latest[namespace] = next(self._numbers)
            self._waiting.pop(download).set()
