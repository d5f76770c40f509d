"""Program that has endpoints withdrawn before this Mac sleeps, so that no request waits for a machine asleep.

A program of its own, because only a system run loop in the main thread receives notifications of sleep. It touches
neither engines nor the cluster: it leaves a note that sidecar and controller act on, and lets the system sleep as soon
as the sidecar reports that it is done, or after three seconds. If the program dies, the note no longer counts.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from metal_supervisor.host import iokit, sleep_note
from metal_supervisor.state.doorbell import Doorbell, ring

PROGRAM = "sleepwatch"
PATIENCE_S = 3.0
log = logging.getLogger(PROGRAM)


class Sleepwatch:
    """Handler of the system's notifications of sleep and wake."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._bell = Doorbell(state, PROGRAM)
        self._call_off()  # of one that was killed

    def will_sleep(self) -> None:
        """Have all endpoints withdrawn; return once they are, or after three seconds."""
        coming, until = sleep_note.announce(self._state), time.monotonic() + PATIENCE_S
        self._tell()
        while not (done := sleep_note.answered(self._state, coming)) and time.monotonic() < until:
            self._bell.wait(max(0.0, until - time.monotonic()))
        if done:
            log.info("asleep", extra={"endpoints": "withdrawn"})
        else:
            log.warning("asleep", extra={"endpoints": "not withdrawn in time", "seconds": PATIENCE_S})

    def awake(self) -> None:
        """Remove the note: this Mac serves again."""
        if self._call_off():
            log.info("awake")

    def _call_off(self) -> bool:
        there = sleep_note.call_off(self._state)
        self._tell()
        return there

    def _tell(self) -> None:
        """Wake the sidecar to withdraw endpoints, and the controller to say on its claims that nothing serves here."""
        for part in ("sidecar", "controller"):
            ring(self._state, part)


def run(state: Path, frameworks: iokit.Frameworks) -> None:
    """Listen in this thread, which must be the main one. Raises iokit.Untold, OSError."""
    watch = Sleepwatch(state)
    iokit.PowerEvents(frameworks, watch.will_sleep, watch.awake).run()
