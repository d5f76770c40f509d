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
from pathlib import Path

from metal_supervisor import launch
from metal_supervisor.host import sleep_clock
from metal_supervisor.spec.types import Json
from metal_supervisor.state.kept_files import write_atomic
from metal_supervisor.state.own_processes import is_alive
from metal_supervisor.state.reports import read_object

NOTE, ANSWER, FORMAT = "asleep.json", "withdrawn.json", 1
LONGEST_S = 60.0


def _write(path: Path, note: Json) -> None:
    write_atomic(path, json.dumps(note) + "\n", durable=False)


def announce(state: Path) -> Json:
    """Leave a note of this process, and return it: process and time identify one sleep to come. Raises OSError."""
    own = os.getpid()
    note: Json = {"format": FORMAT, "pid": own, "started": launch.start_time(own), "at": time.time()}
    _write(state / NOTE, note)
    return note


def call_off(state: Path) -> bool:
    """Remove the note; False if there was none. Raises OSError."""
    there = (state / NOTE).exists()
    (state / NOTE).unlink(missing_ok=True)
    return there


def answered(state: Path, note: Json) -> bool:
    """True if all endpoints are withdrawn for this sleep."""
    return read_object(state / ANSWER) == note


def answer(state: Path, note: Json) -> None:
    """Report that all endpoints are withdrawn. Raises OSError."""
    _write(state / ANSWER, note)


class SleepNoteReader:
    """Reader of the note, with its expiry. For one thread."""

    def __init__(self, state: Path, clocks: sleep_clock.Clocks | None = None) -> None:
        self._state, self._clocks = state, clocks or sleep_clock.system_clocks()
        self._known: Json = {}
        self._awake_since = self._asleep_s = 0.0
        """Time since which the machine has been awake with the note there, in seconds awake; and time slept by then."""

    def look(self) -> Json | None:
        """The note of the sleep that is to come, None if there is none."""
        note = read_object(self._state / NOTE)
        awake_s = self._clocks.exclusive()
        asleep_s = self._clocks.inclusive() - awake_s
        if note != self._known or asleep_s - self._asleep_s > sleep_clock.NOTABLE_S:
            self._known, self._awake_since, self._asleep_s = note, awake_s, asleep_s
        counts = note.get("format") == FORMAT and awake_s - self._awake_since <= LONGEST_S
        return note if counts and is_alive(note) else None
