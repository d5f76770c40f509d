"""IOKit and CoreFoundation as far as power goes, called by pointer as the real ones are.

`python -m tests.support.iokit STATE` is a sleepwatch on them: the system's words come on standard input, one a line
(`can`, `will`, `not`, `on`), and says `allowed WORD` on its standard output when it lets the system go on.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from metal_supervisor.host.iokit import (
    CALLBACK,
    CAN_SLEEP,
    HAS_POWERED_ON,
    WILL_NOT_SLEEP,
    WILL_SLEEP,
    Frameworks,
)

WORDS = {"can": CAN_SLEEP, "will": WILL_SLEEP, "not": WILL_NOT_SLEEP, "on": HAS_POWERED_ON}
CONNECTION, PORT, SOURCE, LOOP, MODE = 0x1B03, 0x7F8800001111, 0x7F8800002222, 0x7F8800003333, 0x7FF800004444
"""What the system gives out; most of it is longer than 32 bits."""
POINTER = ctypes.c_void_p


class Power:
    """The frameworks of a Mac that says so many words of sleep, one after another, and then nothing more."""

    def __init__(self, words: Iterable[str], allowed: Callable[[int], None], refuses: bool = False) -> None:
        self._words, self._allowed, self._refuses = words, allowed, refuses
        self._callback: Any = None
        port = ctypes.c_uint32
        register = ctypes.CFUNCTYPE(port, POINTER, ctypes.POINTER(POINTER), CALLBACK, ctypes.POINTER(port))

        class Library:
            """Functions by their names."""

        iokit: Any = Library()
        iokit.IORegisterForSystemPower = register(self._register)
        iokit.IONotificationPortGetRunLoopSource = ctypes.CFUNCTYPE(POINTER, POINTER)(self._source)
        iokit.IOAllowPowerChange = ctypes.CFUNCTYPE(ctypes.c_int, port, ctypes.c_ssize_t)(self._allow)
        core: Any = Library()
        core.CFRunLoopGetCurrent = ctypes.CFUNCTYPE(POINTER)(lambda: LOOP)
        core.CFRunLoopAddSource = ctypes.CFUNCTYPE(None, POINTER, POINTER, POINTER)(self._add)
        core.CFRunLoopRun = ctypes.CFUNCTYPE(None)(self._run)
        self.frameworks = Frameworks(iokit, core, MODE)
        self.added: tuple[int, int, int] | None = None

    def _register(self, refcon: int | None, port: Any, callback: Any, notifier: Any) -> int:
        port[0], notifier[0], self._callback = PORT, 7, callback
        return 0 if self._refuses else CONNECTION

    def _source(self, port: int) -> int:
        return SOURCE if port == PORT else 0

    def _add(self, loop: int, source: int, mode: int) -> None:
        self.added = loop, source, mode

    def _allow(self, connection: int, answer_by: int) -> int:
        if connection == CONNECTION:
            self._allowed(answer_by)
        return 0

    def _run(self) -> None:
        for number, word in enumerate(self._words):
            self._callback(None, 0, WORDS[word.strip()], 2**40 + number)


def main(state: Path) -> None:
    """A sleepwatch on the words of standard input."""
    from metal_supervisor.host import sleepwatch
    from metal_supervisor.settings import logging

    logging.configure("info")

    def allowed(number: int) -> None:
        sys.stdout.write(f"allowed {number - 2**40}\n")
        sys.stdout.flush()

    sleepwatch.run(state, Power(sys.stdin, allowed).frameworks)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
