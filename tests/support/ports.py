"""Ports for tests that run beside others on one machine.

A port that was free a moment ago may be the next client's, or another test's. So ports are below those that systems
give to clients, and each process of tests holds ranges of its own, by a lock that ends with the process.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
import weakref
from pathlib import Path

LOWEST = 10000
SIZE = 100
RANGES = 220


class Range:
    """Ports that no other process of tests uses, until it is released."""

    def __init__(self) -> None:
        self.first, lock = _claim()
        # A test that fails before it releases its range must not fail the next one with a ResourceWarning.
        self._unlock = weakref.finalize(self, os.close, lock)
        self._next = 0

    @property
    def last(self) -> int:
        return self.first + SIZE - 1

    def free(self) -> int:
        """The next of its ports on which nothing listens."""
        for _ in range(SIZE):
            port = self.first + self._next % SIZE
            self._next += 1
            with socket.socket() as tried:
                # As servers do: a closed connection's remains are no hindrance.
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    tried.bind(("127.0.0.1", port))
                except OSError:
                    continue
                return port
        raise OSError(f"no port of {self.first}-{self.last} is free")

    def release(self) -> None:
        """Lets others have it."""
        self._unlock()


def _claim() -> tuple[int, int]:
    directory = Path(tempfile.gettempdir(), f"metal-supervisor-ports-{os.getuid()}")
    directory.mkdir(exist_ok=True)
    for number in random.sample(range(RANGES), RANGES):
        lock = os.open(directory / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        return LOWEST + number * SIZE, lock
    raise OSError(f"all {RANGES} ranges of ports are in use; see {directory}")
