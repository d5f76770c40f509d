"""Reads supervisord's process table in a thread, so that its reader can be called away while supervisord hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from metal_supervisor.spec.processes import ProgramState
from metal_supervisor.supervisord.client import Supervisord

Table = Mapping[str, ProgramState]


class TableReader:
    """Has at most one request under way: one that was left is waited for by the next call."""

    def __init__(self, supervisord: Supervisord) -> None:
        self._supervisord = supervisord
        self._asked: Future[Table] | None = None
        self._heard = threading.Event()
        """Set by an answer and by `interrupt`, so that one wait serves both."""

    def interrupt(self) -> None:
        """Have `read` look at `is_called` again; from any thread."""
        self._heard.set()

    def read(self, is_called: Callable[[], bool]) -> Table | None:
        """The table; None as soon as `is_called` is true. Raises Unavailable, Refused, RuntimeError for no thread."""
        while not is_called():
            if self._asked is None:
                asked: Future[Table] = Future()
                threading.Thread(target=self._ask, args=(asked,), name="table", daemon=True).start()
                self._asked = asked
            if self._asked.done():
                answer, self._asked = self._asked, None
                return answer.result()
            self._heard.wait()
            self._heard.clear()
        return None

    def _ask(self, answer: Future[Table]) -> None:
        try:
            answer.set_result(self._supervisord.table())
        except Exception as error:  # noqa: BLE001 - raised where the answer is read
            answer.set_exception(error)
        self._heard.set()
