"""Program that measures the power of the chip, in a process of its own.

A meter may end, hang, or crash the process that hosts it, and none of that may affect the sidecar, which only reads
the file that is kept here. The file has the latest reading and its time, or the reason why there is none; it is
removed when the program ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from metal_supervisor.host.power_meter import EVERY_S, NoMeter, PowerError, Powermetrics, open_meter
from metal_supervisor.host.powermetrics import FORMAT
from metal_supervisor.state.doorbell import Doorbell
from metal_supervisor.state.home import POWER_FILE
from metal_supervisor.state.kept_files import write_atomic

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
LOOK_AGAIN_S = 300.0
STEADY = 12
"""Consecutive readings after which earlier failures are forgotten: a minute of powermetrics."""
SOURCE = "powermetrics"
log = logging.getLogger("power")


class PowerProgram:
    """Measuring loop that retries after each failure, until it is to stop."""

    def __init__(
        self,
        state: Path,
        opened: Callable[[], Powermetrics] = open_meter,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        """`opened`: starts measuring; raises PowerError, NoMeter."""
        self._path, self._open = state / POWER_FILE, opened
        self._bell = Doorbell(state, "power")
        self.wake = self._bell.ring
        self._first_pause_s = self._pause_s = first_pause_s
        self._meter: Powermetrics | None = None
        """The latest meter, kept until its process has ended."""
        self._told = ""

    def run(self, stopped: Callable[[], bool]) -> None:
        """Run until `stopped`, which is looked at after each `wake`. The file is removed then."""
        self._path.unlink(missing_ok=True)  # of one that was killed
        try:
            while not stopped():
                try:
                    self._measure(stopped)
                except PowerError as error:
                    self._tell(str(error))
                    self._bell.wait(self._next_pause_s(error))
        finally:
            self._path.unlink(missing_ok=True)

    def _next_pause_s(self, error: PowerError) -> float:
        if isinstance(error, NoMeter):
            return LOOK_AGAIN_S
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        return pause_s

    def _measure(self, stopped: Callable[[], bool]) -> None:
        """Keep the file up to date until `stopped`. Raises PowerError."""
        if self._meter is not None and (left := self._meter.left()):
            raise PowerError(left)  # starting one beside it would make them ever more
        self._meter = meter = self._open()
        try:
            count = unreadable = 0
            while not stopped():
                power = meter.next(self._bell)
                if meter.unreadable and not unreadable:
                    unreadable = meter.unreadable
                    log.warning("a sample could not be read; it is left out", extra={"source": SOURCE})
                if power is None:
                    continue
                count += 1
                if count == STEADY:
                    self._pause_s = self._first_pause_s
                if self._told or count == 1:
                    log.info("power is measured", extra={"source": SOURCE, "seconds": EVERY_S})
                    self._told = ""
                watts = {domain: round(value, 3) for domain, value in power.items()}
                self._write(source=SOURCE, every_s=EVERY_S, watts=watts)
        finally:
            meter.close()

    def _tell(self, problem: str) -> None:
        """Report why nothing is measured: in the log once, in the file always."""
        if problem != self._told:
            log.warning("power is not measured; it is tried again", extra={"why": problem})
            self._told = problem
        self._write(problem=problem)

    def _write(self, **content: Any) -> None:
        # The monotonic clock is the same in all processes of a machine, and cannot be set.
        stamp = {"format": FORMAT, "at": round(time.time(), 3), "monotonic_s": time.monotonic()}
        with contextlib.suppress(OSError):  # on a full disk the figures age until they count no more
            write_atomic(self._path, json.dumps({**stamp, **content}) + "\n", durable=False)
