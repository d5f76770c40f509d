"""What engines hold of the memory, measured beside the sidecar's loop.

The kernel walks a process's pages to answer, some tenths of a second for a large one on Linux, and the loop has to be
quick: it withdraws the endpoints of the dead. So a thread measures, often while an engine is young, seldom later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from metal_supervisor.memory import machine_memory
from metal_supervisor.memory.machine_memory import Held

FIRST_S, FACTOR, LONGEST_S = 2.0, 4, 300.0
"""Pauses between two looks at one engine; each is so much longer than the one before."""
TURN_S = 0.5


@dataclass(frozen=True)
class SampledEngine:
    """One engine process."""

    pid: int
    started: str
    """Its identity (launch.start_time), "" if it is not known."""
    mapped_bytes: int
    """Model files that it maps."""


@dataclass
class _LastSample:
    held: Held | None = None
    pause_s: float = FIRST_S
    due_at: float = 0.0


class MemorySampler(threading.Thread):
    """Measures engines until the process ends."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        super().__init__(name="meter", daemon=True)
        self._on_change = on_change
        self._known: dict[SampledEngine, _LastSample] = {}
        self._wake = threading.Event()

    def measure_only(self, engines: Mapping[int, SampledEngine]) -> None:
        """Measures exactly these from now on; by pid."""
        known = self._known
        if set(engines.values()) == known.keys():
            return
        self._known = {engine: known.get(engine) or _LastSample() for engine in engines.values()}
        self._wake.set()

    def held(self, engine: SampledEngine | None) -> Held | None:
        """What an engine and its children held when they were last measured, None before that."""
        known = self._known.get(engine) if engine is not None else None
        return known.held if known else None

    def run(self) -> None:
        while True:
            waits = [known.due_at for known in self._known.values()]
            self._wake.wait(max(TURN_S, min(waits) - time.monotonic()) if waits else None)
            self._wake.clear()
            self.turn()

    def turn(self) -> None:
        """Measures what is due."""
        first = False
        for engine, known in list(self._known.items()):
            if time.monotonic() < known.due_at:
                continue
            first = first or known.held is None
            known.held = machine_memory.used_bytes(engine.pid, engine.mapped_bytes, engine.started)
            known.due_at = time.monotonic() + known.pause_s
            known.pause_s = min(FACTOR * known.pause_s, LONGEST_S)
        if first:
            self._on_change()
