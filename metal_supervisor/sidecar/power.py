"""The latest reading of the power program, while it is fresh.

A stale figure is worse than none: its age is checked by a monotonic clock, and a figure that is too old is left out,
never shown as 0. A thread reads the file, because HTTP answers must not wait for the disk.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from metal_supervisor.host.powermetrics import DOMAINS, FORMAT
from metal_supervisor.spec.types import Json
from metal_supervisor.state.home import POWER_FILE
from metal_supervisor.state.kept_files import KeptFiles

LOOK_EVERY_S = 2.0
HOLDS_FOR = 3
"""Number of intervals after which a reading is too old."""
NOTHING_YET = "nothing has been measured yet; see log/power.log in the state directory"


@dataclass(frozen=True)
class PowerReading:
    """The contents of power.json."""

    source: str = ""
    """What measures, "" if nothing does."""
    problem: str = ""
    """Reason why nothing is measured, or ""."""
    at: float = 0.0
    """Unix time."""
    monotonic_s: float = 0.0
    """Monotonic time of it; all processes of a machine share that clock."""
    every_s: float = 0.0
    """Seconds between readings."""
    watts: Mapping[str, float] = field(default_factory=dict)
    """By domain; unknown ones are left out."""

    def fresh_watts(self) -> Mapping[str, float]:
        """The watts, or {} if they are too old."""
        return self.watts if 0 <= time.monotonic() - self.monotonic_s <= HOLDS_FOR * self.every_s else {}


def read(text: str) -> PowerReading:
    """Parse the text of a power.json; if it is malformed, the reading has only a `problem`."""
    try:
        found = json.loads(text)
        if found["format"] != FORMAT:
            raise ValueError
        at, monotonic_s, every_s = (float(found.get(name, 0)) for name in ("at", "monotonic_s", "every_s"))
        watts = {name: float(found["watts"][name]) for name in DOMAINS if name in found.get("watts", {})}
        if not all(0 <= each < math.inf for each in (at, monotonic_s, every_s, *watts.values())):
            raise ValueError
        return PowerReading(
            str(found.get("source", "")), str(found.get("problem", "")), at, monotonic_s, every_s, watts
        )
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
        return PowerReading(problem=f"{POWER_FILE} cannot be read; a newer version may have written it")


def shown_power(reading: PowerReading | None) -> Json | None:
    """The reading as JSON, for /status; None unless enabled."""
    if reading is None:
        return None
    watts, problem = reading.fresh_watts(), reading.problem
    if not problem and not watts:
        problem = f"the latest figures are older than {HOLDS_FOR * reading.every_s:g} s, or there is none"
    return {"source": reading.source, "problem": problem, "at": reading.at, "watts": dict(watts)}


class PowerFile:
    """The latest reading; None unless enabled."""

    def __init__(self, state: Path, enabled: bool) -> None:
        self._path, self._files, self._enabled = state / POWER_FILE, KeptFiles(state), enabled
        self.reading = PowerReading(problem=NOTHING_YET) if enabled else None

    def start(self) -> None:
        """Start the thread that reads the file, if enabled."""
        if self._enabled:
            threading.Thread(target=self._run, name="power", daemon=True).start()

    def look(self) -> None:
        """Read the file if it was replaced."""
        try:
            self.reading = self._files.parsed(self._path, read)
        except (OSError, UnicodeDecodeError):
            self.reading = PowerReading(problem=NOTHING_YET)

    def _run(self) -> None:
        while True:
            self.look()
            time.sleep(LOOK_EVERY_S)
