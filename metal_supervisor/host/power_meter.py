"""Meters of the chip's power: powermetrics through sudo, else zeus-apple-silicon.

powermetrics needs root, and as root can write any file (`-o`). So the rule for sudo allows one command line, every
argument of it literal, and both the rule and the command that runs come from the constants below. zeus-apple-silicon
needs no root, but uses a private interface of Apple's, which since macOS 27 always reports 0 for the CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import select
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import IO, Any, Protocol

from metal_supervisor.host.commands import Runner, run
from metal_supervisor.host.powermetrics import Frames, Power, average_w, reading

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
WINDOW_S = 10
"""Time between two readings of zeus-apple-silicon's counters: some chips move them every few seconds only."""
END_WAIT_S = 2.0
CHUNK_BYTES, ERROR_BYTES, SHOWN = 1 << 16, 2048, 200
# A macOS account may have dots. Nothing here means anything to sudoers, which a capital letter (ALL) might.
USER = re.compile(r"[a-z_][a-z0-9_.-]*")


class PowerError(Exception):
    """Failure to measure power now; the message says why."""


class NoMeter(PowerError):
    """Lack of any meter on this Mac; the message says what to do."""


def sudoers(user: str) -> str:
    """The sudoers file that lets a user run exactly this powermetrics as root. Raises ValueError for a strange name."""
    if not USER.fullmatch(user):
        raise ValueError(
            f"{user!r:.80} is no user name that can be put into sudoers: it takes small letters, digits, _, - and ., "
            "and no digit, - or . at the beginning"
        )
    words = " ".join(word.replace(",", r"\,") for word in POWERMETRICS)
    return (
        "# metal_supervisor: lets its user measure the power of the chip, and nothing else. Every argument is\n"
        "# literal: a wildcard would also match -o FILE, which writes any file as root.\n"
        f"{user} ALL=(root) NOPASSWD: NOSETENV: {words}\n"
    )


class Alarm:
    """An event that ends a wait, from a signal handler or from any thread."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe()
        for descriptor in (self._out, self._in):
            os.set_blocking(descriptor, False)

    def ring(self) -> None:
        """End the wait under way, or the next one."""
        with contextlib.suppress(BlockingIOError):  # enough rings are waiting
            os.write(self._in, b".")

    def wait(self, timeout_s: float, *files: IO[bytes]) -> tuple[bool, list[IO[bytes]]]:
        """Wait for at most `timeout_s`; return (True if it rang, the files that are readable or have ended)."""
        ready = select.select([self._out, *(file.fileno() for file in files)], [], [], max(0.0, timeout_s))[0]
        rang = self._out in ready
        if rang:
            os.read(self._out, 4096)
        return rang, [file for file in files if file.fileno() in ready]


class PowerMeter(Protocol):
    """A meter that measures for as long as it is open."""

    @property
    def source(self) -> str:
        """Its name in /status."""

    @property
    def every_s(self) -> int:
        """Seconds between readings."""

    @property
    def unreadable(self) -> int:
        """Number of samples so far that could not be read."""

    def next(self, alarm: Alarm) -> Power | None:
        """The next reading, or None if the alarm rang first. Raises PowerError."""

    def close(self) -> None:
        """Stops measuring."""

    def left(self) -> str:
        """Description of the process that could not be ended, "" if none is left."""


OpenMeter = Callable[[], PowerMeter]
"""Function that opens a meter. Raises PowerError, NoMeter."""


def open_meter(runner: Runner = run) -> PowerMeter:
    """Open the best meter on this Mac. Raises PowerError, NoMeter."""
    # sudo itself tells if the command is allowed; only the run tells if it needs no password.
    if runner((SUDO, "-n", "-l", *POWERMETRICS), 10.0).ok:
        return FirstOf(Powermetrics(), Zeus)
    try:
        return Zeus()
    except ImportError:
        text = f"sudo does not let this user run powermetrics; allow it on this Mac with: {ALLOW}"
        raise NoMeter(f"{text}; or install zeus-apple-silicon, which needs no root") from None


class FirstOf:
    """powermetrics, or another meter if its run ends without a single reading.

    sudo lists the command even for an administrator who would need a password to run it.
    """

    def __init__(self, first: PowerMeter, instead: OpenMeter) -> None:
        """`instead` may raise ImportError."""
        self._first = self._meter = first
        self._instead = instead
        self._settled = False

    @property
    def source(self) -> str:
        return self._meter.source

    @property
    def every_s(self) -> int:
        return self._meter.every_s

    @property
    def unreadable(self) -> int:
        return self._meter.unreadable

    def next(self, alarm: Alarm) -> Power | None:
        try:
            power = self._meter.next(alarm)
        except PowerError as error:
            if self._settled:
                raise
            self._settle_for_another(error)
            return self._meter.next(alarm)
        self._settled = self._settled or power is not None
        return power

    def _settle_for_another(self, error: PowerError) -> None:
        """Open the other meter. Raises PowerError: the first meter's if there is no other."""
        self._settled = True
        try:
            self._meter = self._instead()
        except ImportError:
            raise error from None
        self._first.close()

    def close(self) -> None:
        self._meter.close()

    def left(self) -> str:
        return self._first.left()


class Powermetrics:
    """One run of powermetrics, read through a pipe."""

    source, every_s = "powermetrics", EVERY_S

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
        return self._frames.dropped + self._strange

    def next(self, alarm: Alarm) -> Power | None:
        until = time.monotonic() + self._silent_s
        while (left_s := until - time.monotonic()) > 0:
            rang, ready = alarm.wait(left_s, *self._files)
            if rang:
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
        return "" if self._child.poll() is not None else f"an earlier powermetrics, pid {self._child.pid}, does not end"


class Zeus:
    """zeus-apple-silicon's counters, compared over a window."""

    source, every_s = "zeus-apple-silicon", WINDOW_S
    unreadable = 0

    def __init__(self, monitor: Any = None, window_s: float = WINDOW_S) -> None:
        """Raises ImportError where the package is not installed, PowerError where it does not work."""
        self._window_s = window_s
        if monitor is None:
            package = _guarded(lambda: importlib.import_module("zeus_apple_silicon"))
            monitor = _guarded(package.AppleEnergyMonitor)
        self._monitor = monitor
        self._before, self._at = self._energy()

    def _energy(self) -> tuple[dict[str, Any], float]:
        """(millijoules by domain since an arbitrary time, None where there are none; monotonic seconds)."""
        found = _guarded(self._monitor.get_cumulative_energy)
        names = {"cpu": "cpu_total_mj", "gpu": "gpu_mj", "ane": "ane_mj"}
        return {domain: getattr(found, name, None) for domain, name in names.items()}, time.monotonic()

    def next(self, alarm: Alarm) -> Power | None:
        while (left_s := self._at + self._window_s - time.monotonic()) > 0:
            if alarm.wait(left_s)[0]:
                return None
        before, since = self._before, self._at
        self._before, self._at = self._energy()
        return spent(before, self._before, self._at - since)

    def close(self) -> None:
        """Nothing runs."""

    def left(self) -> str:
        return ""


def spent(before: dict[str, Any], after: dict[str, Any], elapsed_s: float) -> Power:
    """Power between two readings of counters, in millijoules by domain; None where one is missing or went back."""
    watts = {}
    for domain, value in after.items():
        both = isinstance(value, (int, float)) and isinstance(before.get(domain), (int, float))
        watts[domain] = average_w(value - before[domain], elapsed_s) if both else None
    if not watts["cpu"]:
        # No CPU rests for seconds: its counter stands still, and where it does that of the ANE does too.
        watts["cpu"] = watts["ane"] = None
    cpu, gpu, ane = watts["cpu"], watts["gpu"], watts["ane"]
    combined = cpu + gpu + (ane or 0.0) if cpu is not None and gpu is not None else None
    return Power(combined, gpu, cpu, ane)


def _guarded(call: Callable[[], Any]) -> Any:
    """Result of a call into a package that may fail in any way. Raises PowerError, ImportError."""
    try:
        return call()
    except ImportError:
        raise
    except Exception as error:  # noqa: BLE001 - native code of others, over an interface that changes
        raise PowerError(f"zeus-apple-silicon: {error!r:.200}") from None
