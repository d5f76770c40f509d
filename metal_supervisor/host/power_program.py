"""Program that measures the power of the chip, in a process of its own.

It runs powermetrics through sudo. That may end, hang, or crash the process that hosts it, and none of it may affect the
sidecar, which only reads the file that is kept here. The file has the latest reading and its time, or the reason why
there is none; it is removed when the program ends. What powermetrics and sudo report themselves goes to this
program's log.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from metal_supervisor.host.powermetrics import COMMAND, EVERY_S, FORMAT, Frames, Power, reading
from metal_supervisor.state.doorbell import Doorbell
from metal_supervisor.state.home import POWER_FILE
from metal_supervisor.state.kept_files import write_atomic

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
SILENT_S = 30.0
"""Seconds without a reading after which powermetrics counts as hung."""
END_WAIT_S = 2.0
CHUNK_BYTES = 1 << 16
ALLOW = "to let this user run it, use `make install-powermetrics-sudo` on the Mac"
log = logging.getLogger("power")


class PowerError(Exception):
    """Failure to measure power now; the message says why."""


class PowerProgram:
    """Measuring loop that retries after each failure, until it is to stop."""

    def __init__(
        self,
        state: Path,
        command: Sequence[str] = COMMAND,
        first_pause_s: float = FIRST_PAUSE_S,
        silent_s: float = SILENT_S,
    ) -> None:
        self._path, self._command, self._silent_s = state / POWER_FILE, command, silent_s
        self._bell = Doorbell(state, "power")
        self.wake = self._bell.ring
        self._first_pause_s = self._pause_s = first_pause_s
        self._child: subprocess.Popen[bytes] | None = None
        """The latest powermetrics, kept until it has ended."""
        self._problem: str | None = None

    def run(self, stopped: Callable[[], bool]) -> None:
        """Run until `stopped`, which is looked at after each `wake`. The file is removed then."""
        self._path.unlink(missing_ok=True)  # of one that was killed
        try:
            while not stopped():
                try:
                    self._measure(stopped)
                except PowerError as error:
                    self._report(str(error))
                    self._bell.wait(self._pause_s)
                    self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        finally:
            self._path.unlink(missing_ok=True)

    def _measure(self, stopped: Callable[[], bool]) -> None:
        """Keep the file up to date until `stopped`. Raises PowerError."""
        if self._child is not None and self._child.poll() is None:
            raise PowerError(f"an earlier powermetrics, pid {self._child.pid}, does not end")
        try:
            self._child = child = subprocess.Popen(
                self._command,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise PowerError(f"{self._command[0]}: {error.strerror}; {ALLOW}") from None
        assert child.stdout is not None
        try:
            self._follow(child, child.stdout, stopped)
        finally:
            _end(child, child.stdout)

    def _follow(self, child: subprocess.Popen[bytes], output: IO[bytes], stopped: Callable[[], bool]) -> None:
        frames, read_at = Frames(), time.monotonic()
        while not stopped():
            left_s = read_at + self._silent_s - time.monotonic()
            if left_s <= 0:
                raise PowerError(f"powermetrics has given no reading for {self._silent_s:g} s")
            sources: list[Any] = [self._bell, output]
            ready = select.select(sources, [], [], left_s)[0]
            if self._bell in ready:
                self._bell.wait(0.0)
            elif ready:
                chunk = os.read(output.fileno(), CHUNK_BYTES)
                if not chunk:
                    raise PowerError(_how_it_ended(child))
                readings = [found for frame in frames.feed(chunk) if (found := reading(frame))]
                if readings:
                    read_at, self._pause_s = time.monotonic(), self._first_pause_s
                    self._report("", readings[-1])

    def _report(self, problem: str, power: Power | None = None) -> None:
        """Report a reading, or why nothing is measured: each change in the log, in the file always."""
        if problem != self._problem:
            self._problem = problem
            if problem:
                log.warning("power is not measured; it is tried again", extra={"why": problem})
            else:
                log.info("power is measured", extra={"seconds": EVERY_S})
        content: dict[str, Any] = {"problem": problem}
        if power is not None:
            watts = {domain: round(value, 3) for domain, value in power.items()}
            content = {"source": "powermetrics", "every_s": EVERY_S, "watts": watts}
        # The monotonic clock is the same in all processes of a machine, and cannot be set.
        stamp = {"format": FORMAT, "at": round(time.time(), 3), "monotonic_s": time.monotonic()}
        with contextlib.suppress(OSError):  # on a full disk the figures age until they count no more
            write_atomic(self._path, json.dumps({**stamp, **content}) + "\n", durable=False)


def _how_it_ended(child: subprocess.Popen[bytes]) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(END_WAIT_S)
    code = child.poll()
    how = "closed its output" if code is None else f"ended with exit code {code}" if code >= 0 else "was killed"
    return f"powermetrics {how}; log/power.log has its last message; {ALLOW}"


def _end(child: subprocess.Popen[bytes], output: IO[bytes]) -> None:
    """End it by TERM, which sudo passes on; where that may not be sent, its next write meets a closed pipe."""
    output.close()
    for end in (child.terminate, child.kill):
        with contextlib.suppress(PermissionError):
            end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(END_WAIT_S)
            return
