"""The open connections of the API server, and which of them gives way when there are too many."""

from __future__ import annotations

import contextlib
import socket
import threading

MOST = 512
"""Open at once. For one more, the longest idle one is closed: first of clients that never knew the prefix."""


class Connections:
    """Every open connection. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[socket.socket, bool] = {}
        """Those that are not being answered, the longest idle first -> whether the client has known the prefix."""
        self._working: set[socket.socket] = set()

    def admit(self, connection: socket.socket) -> bool:
        """Take in a new connection, if need be for an idle one; False if all are being answered."""
        with self._lock:
            if len(self._idle) + len(self._working) >= MOST:
                if not self._idle:
                    return False
                victim = min(self._idle, key=lambda each: self._idle[each])
                del self._idle[victim]
                with contextlib.suppress(OSError):
                    victim.shutdown(socket.SHUT_RDWR)  # its thread closes it
            self._idle[connection] = False
        return True

    def working(self, connection: socket.socket) -> None:
        """Keep a connection: its client knows the prefix, and is being answered."""
        with self._lock:
            if self._idle.pop(connection, None) is not None:
                self._working.add(connection)

    def resting(self, connection: socket.socket) -> None:
        """Note that a connection is idle again."""
        with self._lock:
            if connection in self._working:
                self._working.discard(connection)
                self._idle[connection] = True

    def gone(self, connection: socket.socket) -> None:
        """Forget a connection that has ended."""
        with self._lock:
            self._idle.pop(connection, None)
            self._working.discard(connection)

    def all(self) -> list[socket.socket]:
        """Every connection that is open now."""
        with self._lock:
            return [*self._idle, *self._working]
