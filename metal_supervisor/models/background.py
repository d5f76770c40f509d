"""Answers that may take long, as of a disk or a server that hangs: asked in threads, for callers that must not wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
LOOK_WAIT_S = 0.1
"""A local disk answers within a millisecond: a short wait for the first answer saves a second pass."""


@dataclass
class _Look(Generic[T]):
    """One question and its latest answer."""

    answer: T | None = None
    at: float = 0.0
    """Monotonic time of the answer."""
    busy: bool = True
    """True while a thread asks."""
    wanted: bool = True
    """True if it was looked for since `forget_others` was called."""
    quiet: bool = True
    """True while the first caller still waits, so that `on_change` need not be called."""
    done: threading.Event = field(default_factory=threading.Event)


class BackgroundLooks(Generic[T]):
    """Latest answers, by name. Use it from one thread; `on_change` is called from others."""

    def __init__(self, kind: str, on_change: Callable[[], None]) -> None:
        """`kind`: name of the threads."""
        self._kind, self._on_change = kind, on_change
        self._lock = threading.Lock()
        self._looks: dict[str, _Look[T]] = {}
        self._waited_s = 0.0
        """Time for which first answers have been waited for since `forget_others` was called."""

    def look(self, name: str, ask: Callable[[T | None], T], wait_s: float, again_s: float) -> T | None:
        """Return the latest answer; None until there is one. Raises RuntimeError if no thread can be had for the first.

        `ask`: called in a thread, with the answer so far; it must not raise. Once an answer is `again_s` old, the next
        call asks again. `wait_s`: how long the first calls for names may wait, all together, until `forget_others` is.
        """
        with self._lock:
            look = self._looks.get(name)
            known = look is not None
            if look is None:
                look = self._looks[name] = _Look()
            start = not known or (not look.busy and time.monotonic() - look.at >= again_s)
            look.busy, look.wanted = look.busy or start, True
        if start:
            try:
                threading.Thread(target=self._ask, args=(name, look, ask), name=self._kind, daemon=True).start()
            except RuntimeError:  # the system has no more: it is asked the next time
                with self._lock:
                    look.busy = False
                    if not known:
                        del self._looks[name]
                        raise
        if not known:
            began = time.monotonic()
            look.done.wait(max(0.0, wait_s - self._waited_s))
            self._waited_s += time.monotonic() - began
        with self._lock:
            look.quiet = False
            return look.answer

    def latest(self, name: str) -> T | None:
        """The latest answer, None without one. Nothing is asked, and the answer is kept as by `look`."""
        with self._lock:
            look = self._looks.get(name)
            if look is None:
                return None
            look.wanted = True
            return look.answer

    def forget_others(self) -> None:
        """Forget the answers not looked for since the last call; what is looked for later is asked anew."""
        self._waited_s = 0.0
        with self._lock:
            self._looks = {name: look for name, look in self._looks.items() if look.wanted}
            for look in self._looks.values():
                look.wanted = False

    def _ask(self, name: str, look: _Look[T], ask: Callable[[T | None], T]) -> None:
        found = ask(look.answer)
        with self._lock:
            changed = look.answer != found
            look.answer, look.at, look.busy = found, time.monotonic(), False
            tell = changed and not look.quiet and self._looks.get(name) is look
        look.done.set()
        if tell:
            self._on_change()
