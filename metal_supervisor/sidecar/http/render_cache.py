"""What is long to render is rendered once, however many ask for it, and beside them while somebody looks.

Of a hundred services /metrics and the page take some ten milliseconds of the interpreter, which the loop and a thread
for each engine want as well: whoever asked in vain for that long would hold it against the sidecar's health.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from metal_supervisor.sidecar.board import Board

HOLDS_S = 1.0
"""How long something rendered holds: power, for one, grows old without a new board."""
FRESH_S = 1.5
"""How old what is kept warm may be: it is rendered anew more often than that, unless the machine is very busy."""
WAIT_S = 0.02
"""How long somebody waits for what is newer than that; mostly it is there by then."""
WARM_EVERY_S = 0.5
LOOKED_AT_S = 90.0
"""How long it is kept warm after it was asked for; scrapers come once a minute at least."""
T = TypeVar("T")


@dataclass(frozen=True)
class _Rendered(Generic[T]):
    """Something rendered."""

    board: Board
    kind: str
    rendered_at: float
    of_s: float
    """When its board was looked at last, and said the same, by a clock that cannot be set."""
    found: T


class RenderCache(Generic[T]):
    """Something rendered, until the board says something else; several threads may ask."""

    def __init__(self, board: Callable[[], Board], render: Callable[[Board, str], T], warm: bool = False) -> None:
        """`warm`: rendered by a thread while it is asked for now and then; what takes long may be of a board before."""
        self._board, self._render, self._warm = board, render, warm
        self._lock, self._rendering = threading.Lock(), threading.Lock()
        self._wanted, self._news = threading.Event(), threading.Condition()
        self._known: _Rendered[T] | None = None
        self._asked_at, self._kind = float("-inf"), ""
        self._warms = False

    def get(self, kind: str = "") -> T:
        """What is rendered of the board; `kind` says in which form, and only the latest is kept."""
        now = time.monotonic()
        with self._lock:
            self._asked_at, self._kind = now, kind
            if self._warm and not self._warms:
                self._warms = True
                threading.Thread(target=self._keep_warm, name="rendering", daemon=True).start()
        known = self._known
        if not self._warm or known is None or known.kind != kind or now - known.of_s >= FRESH_S:
            return self._made(kind).found
        self._wanted.set()
        with self._news:
            self._news.wait_for(lambda: self._is_of(now), WAIT_S)
        newest = self._known
        return newest.found if newest is not None and newest.kind == kind else known.found

    def _is_of(self, moment_s: float) -> bool:
        return self._known is not None and self._known.of_s >= moment_s

    def _made(self, kind: str) -> _Rendered[T]:
        """Rendered now, unless nothing has changed."""
        with self._rendering:
            board, now, known = self._board(), time.monotonic(), self._known
            holds = known is not None and known.kind == kind and now - known.rendered_at < HOLDS_S
            if known is not None and holds and known.board == board:
                made = replace(known, of_s=now)
            else:
                made = _Rendered(board, kind, now, now, self._render(board, kind))
            self._known = made
        with self._news:
            self._news.notify_all()
        return made

    def _keep_warm(self) -> None:
        """Renders until nobody has asked for long; who asks next finds out what went wrong, if it did."""
        try:
            while True:
                self._wanted.wait(WARM_EVERY_S)
                self._wanted.clear()
                with self._lock:
                    if time.monotonic() - self._asked_at > LOOKED_AT_S:
                        return
                    kind = self._kind
                self._made(kind)
        except Exception:  # noqa: BLE001 - a page that cannot be rendered must not end the heartbeat
            return
        finally:
            with self._lock:
                self._warms = False
