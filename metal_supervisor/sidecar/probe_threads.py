"""The threads that probe the engines: as many as there are probes that wait for an answer, not as there are engines.

A probe that is due goes to a thread that is free. Another thread begins only if none took a probe for STUCK_S, as when
an engine hangs, and ends once there are enough without it. Probes far away are due at shared times, so that a Mac at
rest wakes once for many of them.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable

Turn = Callable[[], "float | None"]
"""Does what is due; returns the seconds until it is due again, None for never."""
STUCK_S = 0.01
MOST_THREADS = 64
MOST_IDLE = 2
ROUNDED_FROM_S = 10.0
SHARED_EVERY_S = 5.0
AGAIN_S = 1.0
log = logging.getLogger("sidecar")


class ProbeThreads:
    """Calls turns when they are due. A turn is never called twice at once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Turn]] = []
        self._numbers = itertools.count()
        self._ready: queue.SimpleQueue[Turn] = queue.SimpleQueue()
        self._begun = 0
        """Number of turns that a thread has taken."""
        self._threads = self._idle = 0
        self._timer: threading.Thread | None = None

    def add(self, turn: Turn, pause_s: float = 0.0) -> None:
        """Call a turn after a pause, and again after each pause that it asks for.

        Raises RuntimeError, and then calls nothing, if the system lets no thread be started.
        """
        at = time.monotonic() + pause_s
        at = round(at / SHARED_EVERY_S) * SHARED_EVERY_S if pause_s >= ROUNDED_FROM_S else at
        due = at, next(self._numbers), turn
        with self._changed:
            if self._timer is None:
                timer = threading.Thread(target=self._watch_clock, name="probes due", daemon=True)
                timer.start()
                self._timer = timer
            heapq.heappush(self._due, due)
            if self._due[0] is due:
                self._changed.notify()

    def _watch_clock(self) -> None:
        begun, since = 0, 0.0  # number of turns that had begun, and since when
        while True:
            with self._changed:
                self._changed.wait(self._pause_s())
                now, idle = time.monotonic(), self._ready.empty()
                while self._due and self._due[0][0] <= now:
                    self._ready.put(heapq.heappop(self._due)[2])
                if idle or begun != self._begun:
                    begun, since = self._begun, now
                stuck = not self._ready.empty() and (not self._threads or now - since >= STUCK_S)
                if stuck and self._threads < MOST_THREADS:
                    since = now
                    with contextlib.suppress(RuntimeError):  # the system has no more: tried again on the next look
                        threading.Thread(target=self._work, name="probe", daemon=True).start()
                        self._threads += 1

    def _pause_s(self) -> float | None:
        """Seconds until the next look at what is due, None for none."""
        pauses = [STUCK_S] if not self._ready.empty() else []
        pauses += [max(0.0, self._due[0][0] - time.monotonic())] if self._due else []
        return min(pauses) if pauses else None

    def _work(self) -> None:
        while self._has_work():
            turn = self._ready.get()
            with self._changed:
                self._idle -= 1
                self._begun += 1
            again_s: float | None = AGAIN_S
            try:
                again_s = turn()
            except Exception:  # of one engine: the thread serves the others too, and this one is asked again
                log.exception("a probe failed; it is tried again")
            if again_s is not None:
                self.add(turn, again_s)

    def _has_work(self) -> bool:
        """True for a thread that is to wait for a turn, False for one that is to end: enough others wait."""
        with self._changed:
            wanted = self._idle < MOST_IDLE or not self._ready.empty()
            self._idle += wanted
            self._threads -= not wanted
            return wanted
