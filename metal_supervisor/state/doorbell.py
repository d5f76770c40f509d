"""The doorbell: a FIFO that a process's main loop sleeps on, and by which others wake it.

Each process has a FIFO in the state directory. Other processes ring it after they have written something
worth reading, its own threads when they have news, its signal handler when the process is to end. A FIFO has
no path limit and needs no server, and a ring without a listener is simply lost: every loop also runs a pass
by itself now and then. News that can wait rings later: several rings together wake the loop once. Some news can wait
unless the listener is in a hurry: an engine that came up may make way for another.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import time
from pathlib import Path

from metal_supervisor import launch
from metal_supervisor.launch import LATER, NOW, SOON

LATER_S = 0.5
"""Longest delay of news that can wait."""
MANY = 4096
"""Rings that wake at once whatever they are. A FIFO that is full takes no further one, which may be urgent."""


def ring(state: Path, name: str, sound: bytes = NOW) -> None:
    """Wake the process of that name, if it runs."""
    launch.ring(str(state), name, sound)


class Doorbell:
    """The listening end."""

    def __init__(self, state: Path, name: str) -> None:
        path = state / f"{name}.bell"
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISFIFO(path.lstat().st_mode):
                path.unlink()
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        # Open for writing too, so that the last ringer's close is not an end of file.
        self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def fileno(self) -> int:
        """Descriptor that becomes readable with a ring."""
        return self._descriptor

    def ring(self) -> None:
        """Ring from within the process, from any thread or a signal handler."""
        self._ring(NOW)

    def ring_later(self) -> None:
        """Ring for news that can wait."""
        self._ring(LATER)

    def _ring(self, sound: bytes) -> None:
        with contextlib.suppress(BlockingIOError):  # full, so it will wake
            os.write(self._descriptor, sound)

    def wait(self, timeout_s: float, hurried: bool = False) -> None:
        """Sleep until a ring, until LATER_S after the first one that can wait, or the timeout; consume all rings.

        `hurried`: a ring of SOON wakes at once, too.
        """
        until = time.monotonic() + timeout_s
        while True:
            select.select([self._descriptor], [], [], max(0.0, until - time.monotonic()))
            rings = self._waiting()
            if not rings or NOW in rings or (hurried and SOON in rings) or len(rings) >= MANY:
                return
            until = min(until, time.monotonic() + LATER_S)

    def _waiting(self) -> bytes:
        rings = b""
        with contextlib.suppress(BlockingIOError):
            while found := os.read(self._descriptor, MANY):
                rings += found
        return rings
