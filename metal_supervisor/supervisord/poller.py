"""supervisord's wait for something to happen: an exit of a child ends it at once, and at rest it is long.

supervisord itself waits a second at most, and finds dead children when that has passed, or when somebody calls.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

from supervisor.states import ProcessStates, SupervisorStates

REST_S = 5.0
"""The shortest of supervisord's own ticks."""
MOVING = frozenset((ProcessStates.STARTING, ProcessStates.BACKOFF, ProcessStates.STOPPING))


class Poller:
    """A poller of supervisord's, which signals wake too."""

    def __init__(self, poller: Any, running: Any) -> None:
        """`running`: the Supervisor. Called in the main thread, after its signals have been set."""
        self._poller, self._running = poller, running
        self._again = False
        """A signal came in the last turn: children are reaped at a turn's end, and started anew in the next."""
        self._read_end, self._write_end = os.pipe()
        for end in (self._read_end, self._write_end):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)

    def end(self) -> None:
        """Have signals wake nothing any more: at a SIGHUP, supervisord closes its files and begins anew."""
        signal.set_wakeup_fd(-1)
        for end in (self._read_end, self._write_end):
            os.close(end)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._poller, name)

    def poll(self, timeout: float) -> tuple[list[int], list[int]]:
        """File descriptors that can be read, and written, after at most `timeout` seconds; at rest after REST_S."""
        self._poller.register_readable(self._read_end)
        wait_s = 0 if self._again else timeout if self._moves() else REST_S
        readable, writable = self._poller.poll(wait_s)
        self._again = self._read_end in readable
        with contextlib.suppress(BlockingIOError):
            while self._again and os.read(self._read_end, 4096):
                pass
        return [each for each in readable if each != self._read_end], list(writable)

    def _moves(self) -> bool:
        """True if time itself changes something: a state that does not last, a stop of all, an answer that waits."""
        options = self._running.options
        if options.mood < SupervisorStates.RUNNING or any(
            getattr(each, "delay", 0) for each in options.get_socket_map().values()
        ):
            return True
        return any(
            process.state in MOVING
            for group in self._running.process_groups.values()
            for process in group.processes.values()
        )
