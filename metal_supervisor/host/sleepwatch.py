"""Before this Mac sleeps its endpoints go out, so that no request waits for a machine that does not answer.

A program of its own, because the system's word on sleep comes to whoever runs one of its loops in the main thread. It
touches neither engines nor the cluster: it leaves a note that sidecar and controller act on, and lets the system sleep
as soon as the sidecar says that it is done, or after three seconds. If this dies, the note counts no more.
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
    """What is done when the system speaks of sleep."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._bell = Doorbell(state, PROGRAM)
        self._call_off()  # of one that was killed

    def will_sleep(self) -> None:
        """Has all endpoints taken out; returns once they are, or after three seconds."""
        coming, until = sleep_note.announce(self._state), time.monotonic() + PATIENCE_S
        self._tell()
        while not (done := sleep_note.answered(self._state, coming)) and time.monotonic() < until:
            self._bell.wait(max(0.0, until - time.monotonic()))
        if done:
            log.info("asleep", extra={"endpoints": "withdrawn"})
        else:
            log.warning("asleep", extra={"endpoints": "not withdrawn in time", "seconds": PATIENCE_S})

    def awake(self) -> None:
        """This Mac takes part again."""
        if self._call_off():
            log.info("awake")

    def _call_off(self) -> bool:
        there = sleep_note.call_off(self._state)
        self._tell()
        return there

    def _tell(self) -> None:
        """The sidecar takes endpoints out, the controller says on its claims that nothing is served here."""
        for part in ("sidecar", "controller"):
            ring(self._state, part)


def run(state: Path, frameworks: iokit.Frameworks) -> None:
    """Listens in this thread, which must be the main one. Raises iokit.Untold, OSError."""
    watch = Sleepwatch(state)
    iokit.PowerEvents(frameworks, watch.will_sleep, watch.awake).run()
