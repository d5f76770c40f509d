"""What is long to render is rendered once, however many ask for it, and beside them while somebody looks.

Of a hundred services /metrics and the page take some ten milliseconds of the interpreter, which the loop and a thread
for each engine want as well: whoever asked in vain for that long would hold it against the sidecar's health.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from metal_supervisor.sidecar.board import Board

HOLDS_S = 1.0
"""How long something rendered holds: power, for one, grows old without a new board."""
FRESH_S = 1.5
"""How long what is kept warm holds: it is rendered anew more often than that, unless the machine is very busy."""
WARM_EVERY_S = 0.5
LOOKED_AT_S = 90.0
"""How long it is kept warm after it was asked for; scrapers come once a minute at least."""
T = TypeVar("T")


class Kept(Generic[T]):
    """Something rendered, until the board says something else; several threads may ask."""

    def __init__(self, board: Callable[[], Board], render: Callable[[Board, str], T], warm: bool = False) -> None:
        """`warm`: it may be of the board before, and is rendered by a thread while it is asked for now and then."""
        self._board, self._render, self._warm = board, render, warm
        self._lock, self._rendering = threading.Lock(), threading.Lock()
        self._known: tuple[Board, str, float, T] | None = None
        self._asked_at, self._kind = float("-inf"), ""
        self._warms = False

    def get(self, kind: str = "") -> T:
        """What is rendered of the board; `kind` says in which form, and only the latest is kept."""
        with self._lock:
            self._asked_at, self._kind = time.monotonic(), kind
            if self._warm and not self._warms:
                self._warms = True
                threading.Thread(target=self._keep_warm, name="rendering", daemon=True).start()
            known, now = self._known, time.monotonic()
        if known is not None and known[1] == kind and self._warm and now - known[2] < FRESH_S:
            return known[3]
        return self._made(kind)

    def _made(self, kind: str) -> T:
        """Rendered now, unless nothing has changed."""
        with self._rendering:
            board, now, known = self._board(), time.monotonic(), self._known
            if known is not None and known[1] == kind and now - known[2] < HOLDS_S and known[0] == board:
                return known[3]
            made = self._render(board, kind)
            self._known = board, kind, now, made
            return made

    def _keep_warm(self) -> None:
        """Renders until nobody has asked for long; who asks next finds out what went wrong, if it did."""
        try:
            while True:
                time.sleep(WARM_EVERY_S)
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
