"""IOKit's notifications that this Mac is about to sleep, and that it has woken.

The system asks whether it may sleep, announces that it will, and waits up to half a minute for each registered
process: so a process that registers must answer, even after an error. The frameworks are arguments, and none of their
functions is looked up before it is called, so that this can be imported, and tested, anywhere.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FRAMEWORKS = "/System/Library/Frameworks/{0}.framework/{0}"
CAN_SLEEP, WILL_SLEEP, WILL_NOT_SLEEP, HAS_POWERED_ON = 0xE0000270, 0xE0000280, 0xE0000290, 0xE0000300
"""kIOMessageCanSystemSleep and its like, of <IOKit/IOMessage.h>; docs/mac-acceptance.md has the sources."""
CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_ssize_t)
"""IOServiceInterestCallback: (refcon, service, message, notification id to answer with)."""
log = logging.getLogger(__name__)


class Untold(Exception):
    """The system does not notify us of its sleep; the message is its own."""


@dataclass(frozen=True)
class Frameworks:
    """The two libraries needed."""

    iokit: Any
    core: Any
    """CoreFoundation."""
    default_mode: int | None
    """Value of kCFRunLoopDefaultMode, a pointer."""


def load() -> Frameworks:
    """Load this Mac's frameworks. Raises Untold where there are none."""
    try:
        iokit, core = (ctypes.CDLL(FRAMEWORKS.format(name)) for name in ("IOKit", "CoreFoundation"))
        return Frameworks(iokit, core, ctypes.c_void_p.in_dll(core, "kCFRunLoopDefaultMode").value)
    except (OSError, ValueError) as error:
        raise Untold(str(error)) from None


def declare(frameworks: Frameworks) -> None:
    """Declare signatures: without them ctypes would cut pointers to 32 bits."""
    pointer, port = ctypes.c_void_p, ctypes.c_uint32
    for function, result, arguments in (
        (
            frameworks.iokit.IORegisterForSystemPower, port,
            (pointer, ctypes.POINTER(pointer), CALLBACK, ctypes.POINTER(port)),
        ),
        (frameworks.iokit.IONotificationPortGetRunLoopSource, pointer, (pointer,)),
        (frameworks.iokit.IOAllowPowerChange, ctypes.c_int, (port, ctypes.c_ssize_t)),
        (frameworks.core.CFRunLoopGetCurrent, pointer, ()),
        (frameworks.core.CFRunLoopAddSource, None, (pointer, pointer, pointer)),
        (frameworks.core.CFRunLoopRun, None, ()),
    ):  # fmt: skip
        function.restype, function.argtypes = result, list(arguments)


class PowerEvents:
    """Listener that calls `will_sleep`, which may take seconds, before this Mac sleeps, and `awake` afterwards.

    `awake` also follows a sleep that was called off.
    """

    def __init__(self, frameworks: Frameworks, will_sleep: Callable[[], None], awake: Callable[[], None]) -> None:
        self._frameworks, self._will_sleep, self._awake = frameworks, will_sleep, awake
        self._connection = 0
        self._callback = CALLBACK(self._told)  # kept, because the system calls it as long as this process lives

    def run(self) -> None:
        """Listen in this thread, for ever. Raises Untold if the system refuses the registration."""
        declare(self._frameworks)
        iokit, core = self._frameworks.iokit, self._frameworks.core
        notifications, notifier = ctypes.c_void_p(), ctypes.c_uint32()
        self._connection = iokit.IORegisterForSystemPower(
            None, ctypes.byref(notifications), self._callback, ctypes.byref(notifier)
        )
        if not self._connection:
            raise Untold("IORegisterForSystemPower: refused")
        source = iokit.IONotificationPortGetRunLoopSource(notifications)
        core.CFRunLoopAddSource(core.CFRunLoopGetCurrent(), source, self._frameworks.default_mode)
        core.CFRunLoopRun()

    def _told(self, _refcon: int | None, _service: int, message: int, answer_by: int) -> None:
        try:
            if message == WILL_SLEEP:
                self._will_sleep()
            elif message in (WILL_NOT_SLEEP, HAS_POWERED_ON):
                self._awake()
        except Exception:
            log.exception("a word of the system's on sleep could not be followed")
        finally:
            if message in (CAN_SLEEP, WILL_SLEEP):
                self._frameworks.iokit.IOAllowPowerChange(self._connection, answer_by)
