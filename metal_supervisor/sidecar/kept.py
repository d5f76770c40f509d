"""What is long to render is rendered once, however many ask for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from metal_supervisor.sidecar.board import Board

HOLDS_S = 1.0
"""How long something rendered holds: power, for one, grows old without a new board."""
FRESH_S = 0.25
"""How long what is long to render holds whatever happens: many who look cost a busy loop no more than one does."""
T = TypeVar("T")


class Kept(Generic[T]):
    """Something rendered, until the board says something else; several threads may ask."""

    def __init__(self, board: Callable[[], Board], render: Callable[[Board, str], T], fresh_s: float = 0.0) -> None:
        """`fresh_s`: so young, it may be of the board before."""
        self._board, self._render, self._fresh_s = board, render, fresh_s
        self._lock = threading.Lock()
        self._known: tuple[Board, str, float, T] | None = None

    def get(self, kind: str = "") -> T:
        """What is rendered of the board; `kind` says in which form, and only the latest is kept."""
        with self._lock:
            board, now = self._board(), time.monotonic()
            if self._known is not None:
                of, form, at, found = self._known
                age_s = now - at
                if form == kind and (age_s < self._fresh_s or (age_s < HOLDS_S and of == board)):
                    return found
            made = self._render(board, kind)
            self._known = board, kind, now, made
            return made
