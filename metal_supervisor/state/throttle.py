"""Pauses between the passes of a loop, so that many in a row take only a part of a core."""

from __future__ import annotations

import time

BURST_S = 0.5
"""Pauses that are left out after a rest: an edit, or a swap, takes a few passes, and none of them waits."""


class Throttle:
    """Measures each pass by its CPU: on a busy machine it lasts much longer, which is no reason to wait longer."""

    def __init__(self, share: float, longest_s: float) -> None:
        """`share`: of a core, at most. `longest_s`: no pause is longer."""
        self._share, self._longest_s = share, longest_s
        self._began = self._cpu_s = 0.0
        self._due_at = 0.0
        """Monotonic time of the next pass, if none were left out."""

    def begin(self) -> None:
        """Note that a pass begins, in the thread that calls."""
        self._began, self._cpu_s = time.monotonic(), time.thread_time()

    def pause_s(self) -> float:
        """Seconds to wait after the pass that began last; called at its end by its thread."""
        took_s, now = time.thread_time() - self._cpu_s, time.monotonic()
        self._due_at = max(self._due_at, self._began - BURST_S) + took_s / self._share
        self._due_at = min(self._due_at, now + self._longest_s)
        return max(0.0, self._due_at - now)
