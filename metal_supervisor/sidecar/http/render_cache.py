"""Cache of expensive answers, which are rendered once for all clients.

With a hundred services /metrics and the page take some ten milliseconds of the interpreter, which the loop and the
probes need as well: however many clients ask, they are rendered twice a second at most, and not at all while none asks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from metal_supervisor.sidecar.board import Board

HOLDS_S = 1.0
"""Longest life of an answer while the board is the same: values such as power expire without a new board."""
LAG_S = 0.5
"""For /metrics and the page: the answer may be of a board that is older by this."""
T = TypeVar("T")


@dataclass(frozen=True)
class _Rendered(Generic[T]):
    """A rendered answer."""

    board: Board
    at: float
    """Monotonic time."""
    found: T


class RenderCache(Generic[T]):
    """A rendered answer, kept until the board changes; thread-safe."""

    def __init__(self, board: Callable[[], Board], render: Callable[[Board], T], lag_s: float = 0.0) -> None:
        """`lag_s`: time for which the answer is kept whatever the board says."""
        self._board, self._render, self._lag_s = board, render, lag_s
        self._lock = threading.Lock()
        self._known: _Rendered[T] | None = None

    def get(self) -> T:
        """The board, rendered."""
        with self._lock:
            now, known = time.monotonic(), self._known
            if known is not None and now - known.at < self._lag_s:
                return known.found
            board = self._board()
            if known is None or now - known.at >= HOLDS_S or known.board != board:
                known = self._known = _Rendered(board, now, self._render(board))
            return known.found
