"""Memory footprints of the engines, measured in a thread beside the sidecar's loop.

To answer, the kernel walks the pages of a process, some tenths of a second for a large one on Linux, and the loop must
be quick: it withdraws the endpoints of dead engines. A young engine is measured often, an old one seldom.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from metal_supervisor import launch
from metal_supervisor.memory import machine_memory
from metal_supervisor.memory.machine_memory import Held
from metal_supervisor.state.kept_files import write_atomic

FIRST_S = 2.0
"""First pause between two samples of one engine."""
FACTOR = 4
"""From one pause to the next."""
LONGEST_S = 300.0
"""Longest pause."""
TURN_S = 0.5


class SampledEngine(NamedTuple):
    """One engine process."""

    pid: int
    started: str
    """launch.start_time, which with the pid identifies the process; "" if it is not known."""
    mapped_bytes: int
    """Size of the model files that it maps."""


@dataclass
class _LastSample:
    held: Held | None = None
    pause_s: float = FIRST_S
    due_at: float = 0.0


class MemorySampler(threading.Thread):
    """Measures engines until the process ends."""

    def __init__(self, on_first: Callable[[], None], runs: Path) -> None:
        """`on_first`: called after a turn in which an engine was measured for the first time.

        `runs`: directory for a note of each engine's descendants, by which `launch.sweep_group` ends what it leaves.
        """
        super().__init__(name="meter", daemon=True)
        self._on_first, self._runs = on_first, runs
        self._known: dict[SampledEngine, _LastSample] = {}
        self._wake = threading.Event()

    def measure_only(self, engines: Set[SampledEngine]) -> None:
        """Measure exactly these engines from now on."""
        known = self._known
        if engines == known.keys():
            return
        self._known = {engine: known.get(engine) or _LastSample() for engine in engines}
        self._wake.set()

    def held(self, engine: SampledEngine) -> Held | None:
        """The latest footprint of an engine with its children, None before the first."""
        known = self._known.get(engine)
        return known.held if known else None

    def run(self) -> None:
        while True:
            waits = [known.due_at for known in self._known.values()]
            self._wake.wait(max(TURN_S, min(waits) - time.monotonic()) if waits else None)
            self._wake.clear()
            self.turn()

    def turn(self) -> None:
        """Measure the engines that are due."""
        due = [(engine, known) for engine, known in self._known.items() if time.monotonic() >= known.due_at]
        first = any(known.held is None for _, known in due)
        for engine, known in due:
            before = known.held.family if known.held else ()
            known.held = machine_memory.used_bytes(engine.pid, engine.mapped_bytes, engine.started, known=before)
            if known.held and known.held.family != before:
                with contextlib.suppress(OSError):  # a full disk
                    note = launch.family_path(str(self._runs), engine.pid)
                    write_atomic(Path(note), json.dumps(known.held.family), durable=False)
            known.due_at = time.monotonic() + known.pause_s
            known.pause_s = min(FACTOR * known.pause_s, LONGEST_S)
        if first:
            self._on_first()
