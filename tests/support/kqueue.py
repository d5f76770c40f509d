"""A stand-in for kqueue's process filter, by kqueue(2) of macOS, over real processes of a Linux machine.

EV_ADD of a process that is gone fails with ESRCH, NOTE_EXIT comes once for each EV_ONESHOT, EV_DELETE of what is not
there fails with ENOENT, and changes are taken while another thread waits.
"""

from __future__ import annotations

import errno
import os
import queue
import select as real
import threading
from dataclasses import dataclass

KQ_FILTER_PROC = -5
KQ_NOTE_EXIT = 0x80000000
KQ_EV_ADD = 1
KQ_EV_DELETE = 2
KQ_EV_ONESHOT = 16


@dataclass(frozen=True)
class kevent:
    """One change, or one event."""

    ident: int
    filter: int = KQ_FILTER_PROC
    flags: int = 0
    fflags: int = 0


class kqueue:
    """The queue."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._registered: dict[int, object] = {}
        self._told: queue.Queue[tuple[int, object]] = queue.Queue()

    def control(self, changes: list[kevent] | None, most: int) -> list[kevent]:
        for change in changes or []:
            assert change.filter == KQ_FILTER_PROC and change.fflags == KQ_NOTE_EXIT
            self._change(change)
        return [self._next()] if most else []

    def _change(self, change: kevent) -> None:
        if change.flags & KQ_EV_DELETE:
            with self._lock:
                if self._registered.pop(change.ident, None) is None:
                    raise OSError(errno.ENOENT, "No such file or directory")
            return
        assert change.flags == KQ_EV_ADD | KQ_EV_ONESHOT
        try:
            handle = os.pidfd_open(change.ident)
        except OSError:
            raise OSError(errno.ESRCH, "No such process") from None
        watched = real.poll()
        watched.register(handle, real.POLLIN)
        if watched.poll(0):  # a zombie is no process any more
            os.close(handle)
            raise OSError(errno.ESRCH, "No such process")
        ticket = object()
        with self._lock:
            self._registered[change.ident] = ticket
        threading.Thread(target=self._mind, args=(change.ident, handle, ticket), daemon=True).start()

    def _mind(self, pid: int, handle: int, ticket: object) -> None:
        try:
            watched = real.poll()
            watched.register(handle, real.POLLIN)
            while not watched.poll(20):
                if self._registered.get(pid) is not ticket:
                    return
            self._told.put((pid, ticket))
        finally:
            os.close(handle)

    def _next(self) -> kevent:
        while True:
            pid, ticket = self._told.get()
            with self._lock:
                if self._registered.get(pid) is ticket:
                    del self._registered[pid]  # EV_ONESHOT
                    return kevent(pid)
