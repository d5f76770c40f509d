"""Note that this Mac is about to sleep, which one process leaves in the state directory and others act on.

Endpoints are withdrawn while it is there, so it must never outlast its reason: it counts only while its writer lives,
and not for more than a minute of being awake without a sleep. A sleep does not end it, as the system announces neither
a dark wake nor the sleep after it. The answer says that all endpoints are withdrawn; the writer then lets the machine
sleep.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from metal_supervisor import launch
from metal_supervisor.host import sleep_clock
from metal_supervisor.state.kept_files import write_atomic

NOTE, ANSWER, FORMAT = "asleep.json", "withdrawn.json", 1
LONGEST_S = 60.0


@dataclass(frozen=True)
class Nap:
    """Note of one sleep to come."""

    pid: int
    """Process id of the writer."""
    started: str
    """The writer's launch.start_time."""
    at: float
    """Unix time of the note; together the three identify one sleep."""


def _read(path: Path) -> Nap | None:
    """The note in a file; None if there is no such file, or it is not in our format."""
    try:
        found = json.loads(path.read_text("utf-8"))
        if found["format"] != FORMAT:
            return None
        return Nap(int(found["pid"]), str(found["started"]), float(found["at"]))
    except (OSError, ValueError, LookupError, TypeError, RecursionError, OverflowError):
        return None


def _write(path: Path, nap: Nap) -> None:
    write_atomic(path, json.dumps({"format": FORMAT, **asdict(nap)}) + "\n", durable=False)


def announce(state: Path) -> Nap:
    """Leave a note of this process. Raises OSError."""
    nap = Nap(os.getpid(), launch.start_time(os.getpid()) or "", time.time())
    _write(state / NOTE, nap)
    return nap


def call_off(state: Path) -> bool:
    """Remove the note; False if there was none. Raises OSError."""
    there = (state / NOTE).exists()
    (state / NOTE).unlink(missing_ok=True)
    return there


def answered(state: Path, nap: Nap) -> bool:
    """True if all endpoints are withdrawn for this sleep."""
    return _read(state / ANSWER) == nap


def answer(state: Path, nap: Nap) -> None:
    """Report that all endpoints are withdrawn. Raises OSError."""
    _write(state / ANSWER, nap)


class SleepNoteReader:
    """Reader of the note, with its expiry. For one thread."""

    def __init__(self, state: Path, clocks: sleep_clock.Clocks | None = None) -> None:
        self._state, self._clocks = state, clocks or sleep_clock.system_clocks()
        self._known: Nap | None = None
        self._awake_since = self._asleep_s = 0.0
        """Time since which the machine has been awake with the note there, in seconds awake; and time slept by then."""

    def look(self) -> Nap | None:
        """The sleep that is to come, None if there is none."""
        nap = _read(self._state / NOTE)
        awake_s = self._clocks.exclusive()
        asleep_s = self._clocks.inclusive() - awake_s
        if nap is None or nap != self._known or asleep_s - self._asleep_s > sleep_clock.NOTABLE_S:
            self._known, self._awake_since, self._asleep_s = nap, awake_s, asleep_s
        if nap is None or awake_s - self._awake_since > LONGEST_S:
            return None
        return nap if nap.started and launch.start_time(nap.pid) == nap.started else None
