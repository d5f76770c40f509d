"""Meter of the chip's power: powermetrics, through sudo.

powermetrics needs root, and as root can write any file (`-o`). So the rule for sudo, which `tools/powermetrics_sudo.py`
installs, allows one command line, every argument of it literal: the rule and the command that runs come from the same
constants.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Sequence
from typing import IO, Any

from metal_supervisor.host.commands import Runner, run
from metal_supervisor.host.powermetrics import Frames, Power, reading
from metal_supervisor.state.doorbell import Doorbell

EVERY_S = 5
"""Long enough for chips that count in batches, short enough for a scrape every 15 s."""
POWERMETRICS = (
    "/usr/bin/powermetrics", "--samplers", "cpu_power,gpu_power,thermal", "-f", "plist", "-i", str(EVERY_S * 1000),
)  # fmt: skip
SUDO = "/usr/bin/sudo"
COMMAND = (SUDO, "-n", *POWERMETRICS)
FRAGMENT = "/etc/sudoers.d/metal-supervisor-power"
ALLOW = "make install-powermetrics-sudo"

SILENT_S = 30.0
END_WAIT_S = 2.0
CHUNK_BYTES, ERROR_BYTES, SHOWN = 1 << 16, 2048, 200


class PowerError(Exception):
    """Failure to measure power now; the message says why."""


class NoMeter(PowerError):
    """sudo does not allow powermetrics here; the message says what to do."""


def open_meter(runner: Runner = run) -> Powermetrics:
    """Start measuring. Raises PowerError, NoMeter."""
    # sudo itself tells if the command is allowed; only the run tells if it needs no password.
    if not runner((SUDO, "-n", "-l", *POWERMETRICS), 10.0).ok:
        raise NoMeter(f"sudo does not let this user run powermetrics; allow it on this Mac with: {ALLOW}")
    return Powermetrics()


class Powermetrics:
    """One run of powermetrics, read through a pipe."""

    def __init__(self, argv: Sequence[str] = COMMAND, silent_s: float = SILENT_S) -> None:
        """Start it. `silent_s`: seconds without a reading after which it counts as hung. Raises PowerError."""
        try:
            self._child = subprocess.Popen(
                list(argv), cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                bufsize=0, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise PowerError(f"{argv[0]}: {error.strerror}") from None
        assert self._child.stdout is not None and self._child.stderr is not None
        self._out, self._err = self._child.stdout, self._child.stderr
        self._files: list[IO[bytes]] = [self._out, self._err]
        self._frames, self._silent_s = Frames(), silent_s
        self._strange = 0
        self._said = b""

    @property
    def unreadable(self) -> int:
        """Number of samples so far that could not be read."""
        return self._frames.dropped + self._strange

    def next(self, bell: Doorbell) -> Power | None:
        """The next reading, or None if the bell rang first. Raises PowerError."""
        until = time.monotonic() + self._silent_s
        while (left_s := until - time.monotonic()) > 0:
            waited_for: list[Any] = [bell, *self._files]
            ready = select.select(waited_for, [], [], left_s)[0]
            if bell in ready:
                bell.wait(0.0)
                return None
            for file in ready:
                chunk = os.read(file.fileno(), CHUNK_BYTES)
                if file is self._err:
                    self._hear(chunk)
                elif not chunk:
                    raise PowerError(self._how_it_ended())
                elif (power := self._latest(chunk)) is not None:
                    return power
        raise PowerError(f"powermetrics has given no reading for {self._silent_s:g} s")

    def _hear(self, chunk: bytes) -> None:
        """Keep the end of its error output."""
        self._said = (self._said + chunk)[-ERROR_BYTES:]
        if not chunk:
            self._files.remove(self._err)

    def _latest(self, chunk: bytes) -> Power | None:
        found = [reading(frame) for frame in self._frames.feed(chunk)]
        self._strange += found.count(None)
        return next((each for each in reversed(found) if each is not None), None)

    def _how_it_ended(self) -> str:
        """Its exit code and last message, which may arrive after the end of its output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(END_WAIT_S)
        while self._err in self._files and select.select([self._err], [], [], 0)[0]:
            self._hear(os.read(self._err.fileno(), CHUNK_BYTES))
        lines = self._said.decode("utf-8", "replace").strip().splitlines()
        last = "".join(char for char in lines[-1] if char.isprintable())[:SHOWN] if lines else "it said nothing"
        code = self._child.poll()
        how = "closed its output" if code is None else f"ended with exit code {code}" if code >= 0 else "was killed"
        return f"powermetrics {how}: {last}"

    def close(self) -> None:
        """End it by TERM, which sudo passes on; where that may not be sent, its next write meets a closed pipe."""
        with contextlib.suppress(PermissionError):
            self._child.terminate()
        self._out.close()
        self._err.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(END_WAIT_S)
            return
        with contextlib.suppress(PermissionError):
            self._child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(END_WAIT_S)

    def left(self) -> str:
        """Description of the process that could not be ended, "" if none is left."""
        return "" if self._child.poll() is not None else f"an earlier powermetrics, pid {self._child.pid}, does not end"
