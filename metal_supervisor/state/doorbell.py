"""The doorbell: a FIFO that a process's main loop sleeps on, and by which others wake it.

Each process has a FIFO in the state directory. Other processes ring it after they have written something
worth reading, its own threads when they have news, its signal handler when the process is to end. A FIFO has
no path limit and needs no server, and a ring without a listener is simply lost: every loop also runs a pass
by itself now and then.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
from pathlib import Path

from metal_supervisor import launch


def _path(state: Path, name: str) -> Path:
    return state / f"{name}.bell"


def ring(state: Path, name: str) -> None:
    """Wake the process of that name, if it runs."""
    launch.ring(str(state), name)


class Doorbell:
    """The listening end."""

    def __init__(self, state: Path, name: str) -> None:
        path = _path(state, name)
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
        with contextlib.suppress(BlockingIOError):  # full, so it will wake
            os.write(self._descriptor, b".")

    def wait(self, timeout_s: float) -> None:
        """Sleep until the next ring or the timeout; consume all waiting rings."""
        select.select([self._descriptor], [], [], timeout_s)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._descriptor, 4096):
                pass
