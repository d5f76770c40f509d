"""What a loop of ours sleeps on, and how others wake it.

Each process has a FIFO in the state directory. Other processes ring it after they have written something
worth reading, its own threads when they have news, its signal handler when it is to end. A FIFO has no
path limit and needs no server, and a ring that nobody hears is simply lost: every loop also looks by itself
now and then.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
from pathlib import Path


def _path(state: Path, name: str) -> Path:
    return state / f"{name}.bell"


def ring(state: Path, name: str) -> None:
    """Wakes the process of that name, if it runs."""
    try:
        descriptor = os.open(_path(state, name), os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            with contextlib.suppress(BlockingIOError, BrokenPipeError):  # enough rings are waiting, or nobody is
                os.write(descriptor, b".")
    finally:
        os.close(descriptor)


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

    def ring(self) -> None:
        """Rings from within, from any thread or a signal handler."""
        with contextlib.suppress(BlockingIOError):  # enough rings are waiting
            os.write(self._descriptor, b".")

    def wait(self, timeout_s: float) -> None:
        """Sleeps until somebody rings, or the time is up; takes all rings that are waiting."""
        select.select([self._descriptor], [], [], timeout_s)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._descriptor, 4096):
                pass
