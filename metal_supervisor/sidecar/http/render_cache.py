"""Cache of expensive answers: rendered once for all clients, and ahead of requests while there are any.

With a hundred services /metrics and the page take some ten milliseconds of the interpreter, which the loop and a thread
per engine need as well: requests that wait for that long would make the sidecar look unhealthy.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from metal_supervisor.sidecar.board import Board

HOLDS_S = 1.0
"""Longest life of an answer while the board is the same: values such as power expire without a new board."""
FRESH_S = 1.5
"""Greatest age of a warm answer: it is rendered again more often than that, unless the machine is very busy."""
WAIT_S = 0.02
"""Longest time that a request waits for a warm answer to be renewed; mostly it is ready by then."""
WARM_EVERY_S = 0.5
LOOKED_AT_S = 90.0
"""Time after the last request for which the answer is kept warm; scrapers come once a minute at least."""
T = TypeVar("T")


@dataclass(frozen=True)
class _Rendered(Generic[T]):
    """A rendered answer."""

    board: Board
    rendered_at: float
    of_s: float
    """Monotonic time at which its board was last found unchanged."""
    found: T


class RenderCache(Generic[T]):
    """A rendered answer, kept until the board changes; thread-safe."""

    def __init__(self, board: Callable[[], Board], render: Callable[[Board], T], warm: bool = False) -> None:
        """`warm`: a thread keeps the answer fresh while there are requests; it may be of a slightly older board."""
        self._board, self._render, self._warm = board, render, warm
        self._lock, self._rendering = threading.Lock(), threading.Lock()
        self._wanted, self._news = threading.Event(), threading.Condition()
        self._known: _Rendered[T] | None = None
        self._asked_at = float("-inf")
        self._warms = False

    def get(self) -> T:
        """The board, rendered."""
        now = time.monotonic()
        with self._lock:
            self._asked_at = now
            if self._warm and not self._warms:
                with contextlib.suppress(RuntimeError):  # the system has no more: tried again on the next request
                    threading.Thread(target=self._keep_warm, name="rendering", daemon=True).start()
                    self._warms = True
        known = self._known
        if not self._warm or known is None or now - known.of_s >= FRESH_S:
            return self._made().found
        self._wanted.set()
        with self._news:
            self._news.wait_for(lambda: (self._known or known).of_s >= now, WAIT_S)
        return (self._known or known).found

    def _made(self) -> _Rendered[T]:
        """Render now, unless nothing has changed."""
        with self._rendering:
            board, now, known = self._board(), time.monotonic(), self._known
            if known is not None and now - known.rendered_at < HOLDS_S and known.board == board:
                made = replace(known, of_s=now)
            else:
                made = _Rendered(board, now, now, self._render(board))
            self._known = made
        with self._news:
            self._news.notify_all()
        return made

    def _keep_warm(self) -> None:
        """Render until there was no request for LOOKED_AT_S. An error ends it, and surfaces on the next request."""
        try:
            while True:
                self._wanted.wait(WARM_EVERY_S)
                self._wanted.clear()
                with self._lock:
                    if time.monotonic() - self._asked_at > LOOKED_AT_S:
                        return
                self._made()
        except Exception:  # noqa: BLE001 - a page that cannot be rendered must not end the heartbeat
            return
        finally:
            with self._lock:
                self._warms = False
