"""Watch for exits of processes that are not our children; notifies within a millisecond.

supervisord alone notices an exit after one to two seconds; a process that watches the pid can wake it, and withdraw
the endpoint meanwhile. pidfd on Linux, kqueue on macOS; nothing is polled.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any


class ExitWatch:
    """Watcher that calls `on_exit(pid)` from its own thread, once for each watched process that ends."""

    def __init__(self, on_exit: Callable[[int], None], waiter: _Kqueue | _Pidfds | None = None) -> None:
        """`waiter`: replaces the one for this system."""
        self._on_exit = on_exit
        self._lock = threading.Lock()
        self._watched: dict[int, int] = {}
        self._waiter = waiter or (_Kqueue() if sys.platform == "darwin" else _Pidfds())
        threading.Thread(target=self._run, name="exits", daemon=True).start()

    def watch_only(self, pids: Iterable[int]) -> None:
        """Watch exactly these processes from now on; one that is gone already counts as ended."""
        wanted = {pid for pid in pids if pid > 0}
        gone = []
        with self._lock:
            for pid in self._watched.keys() - wanted:
                self._waiter.drop(pid, self._watched.pop(pid))
            for pid in wanted - self._watched.keys():
                handle = self._waiter.add(pid)
                if handle is None:
                    gone.append(pid)
                else:
                    self._watched[pid] = handle
        for pid in gone:
            self._on_exit(pid)

    def _run(self) -> None:
        while True:
            told = self._waiter.wait()
            with self._lock:
                # Between the two a descriptor may have been closed and its number given to another process.
                ended = [pid for pid in map(self._waiter.ended, told) if pid in self._watched]
                for pid in ended:
                    self._waiter.drop(pid, self._watched.pop(pid))
            for pid in ended:
                self._on_exit(pid)


class _Kqueue:
    """kqueue, as macOS has it: an event per process, delivered once."""

    def __init__(self, system: Any = select) -> None:
        """`system`: the module with kqueue and its constants."""
        self._system, self._queue = system, system.kqueue()

    def add(self, pid: int) -> int | None:
        """A handle for `drop`; None if there is no such process."""
        try:
            self._queue.control([self._event(pid, self._system.KQ_EV_ADD | self._system.KQ_EV_ONESHOT)], 0)
        except OSError as error:
            if error.errno == errno.ESRCH:
                return None
            raise
        return pid

    def _event(self, pid: int, flags: int) -> Any:
        return self._system.kevent(pid, self._system.KQ_FILTER_PROC, flags, self._system.KQ_NOTE_EXIT)

    def drop(self, pid: int, _handle: int) -> None:
        """Forget a process; one whose exit was reported is forgotten already."""
        with contextlib.suppress(OSError):
            self._queue.control([self._event(pid, self._system.KQ_EV_DELETE)], 0)

    def wait(self) -> list[int]:
        """Handles of which there is news."""
        return [event.ident for event in self._queue.control(None, 16)]

    def ended(self, handle: int) -> int:
        """Pid of what `wait` named; kqueue names processes by pid."""
        return handle


class _Pidfds:
    """epoll over pidfds, as Linux has them: readable when the process has ended. Methods as above."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._pids: dict[int, int] = {}

    def add(self, pid: int) -> int | None:
        try:
            handle = os.pidfd_open(pid)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            return None  # gone, or no process at all
        self._pids[handle] = pid
        self._epoll.register(handle, select.EPOLLIN)
        return handle

    def drop(self, _pid: int, handle: int) -> None:
        with contextlib.suppress(OSError):
            self._epoll.unregister(handle)
        self._pids.pop(handle, None)
        os.close(handle)

    def wait(self) -> list[int]:
        return [handle for handle, _ in self._epoll.poll()]

    def ended(self, handle: int) -> int:
        """Pid of a descriptor that `wait` named, 0 if it is a new one by the same number. Under the lock."""
        pid = self._pids.get(handle, 0)
        again = select.poll()
        if pid:
            again.register(handle, select.POLLIN)
        return pid if pid and again.poll(0) else 0
