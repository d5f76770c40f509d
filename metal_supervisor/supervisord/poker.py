"""Has supervisord reap ended processes at once, without keeping anyone waiting for its answer.

It has a thread and a connection of its own: the thread that noticed an exit has others to notice, and supervisord may
hang.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from metal_supervisor.supervisord.client import Refused, Supervisord, Unavailable


class Poker:
    """Wakes supervisord's loop when asked to, once for all that was asked meanwhile."""

    def __init__(self, socket_path: str, then: Callable[[], None]) -> None:
        """`then`: called after each try, by its thread."""
        self._supervisord, self._then = Supervisord(socket_path), then
        self._asked = threading.Event()
        threading.Thread(target=self._run, name="poker", daemon=True).start()

    def ask(self) -> None:
        """Have supervisord woken soon; never waits."""
        self._asked.set()

    def _run(self) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()
            with contextlib.suppress(Unavailable, Refused):
                self._supervisord.poke()
            self._then()
