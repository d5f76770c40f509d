"""Plays a recorded squeeze of memory (tests/support/squeeze.py) into a directory laid out like /proc.

The figures of pressure are real and so is meminfo; but what was squeezed was a small cgroup on a machine with memory
to spare, so MemAvailable hardly moves. A test that needs it to must make it up, and says so: `made_up_available_kib`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

RECORDING = Path(__file__).parents[1] / "data" / "psi_squeeze.jsonl"


@dataclass(frozen=True)
class Step:
    """One second of the recording."""

    phase: str
    """before, squeeze or after."""
    at_s: float
    """Since the beginning."""
    pressure: str
    """/proc/pressure/memory, as it was read."""
    meminfo: dict[str, int]
    """The lines that matter, in kB."""


@lru_cache(maxsize=4)
def steps(recording: Path = RECORDING) -> tuple[Step, ...]:
    """The whole recording."""
    return tuple(Step(**json.loads(line)) for line in recording.read_text("utf-8").splitlines())


class Replay:
    """Puts the recording into a directory, step by step; whoever reads meanwhile finds whole files."""

    def __init__(
        self, procfs: Path, recording: Path = RECORDING, made_up_available_kib: Callable[[Step], int] | None = None
    ) -> None:
        self.procfs, self.steps = procfs, steps(recording)
        self._available_kib = made_up_available_kib
        (procfs / "pressure").mkdir(parents=True, exist_ok=True)

    def put(self, step: Step) -> None:
        """This step is now."""
        meminfo = dict(step.meminfo)
        if self._available_kib:
            meminfo["MemAvailable"] = self._available_kib(step)
        self._write("meminfo", "".join(f"{name + ':':<16}{kib:>8} kB\n" for name, kib in meminfo.items()))
        self._write("pressure/memory", step.pressure)

    def _write(self, name: str, text: str) -> None:
        path = self.procfs / name
        fresh = path.with_suffix(".new")
        fresh.write_text(text, "utf-8")
        os.replace(fresh, path)

    def __iter__(self) -> Iterator[Step]:
        """Each step, after it was put; as fast as it is asked for."""
        for step in self.steps:
            self.put(step)
            yield step

    def play(self, speed: float = 1.0, steps: Sequence[Step] | None = None) -> None:
        """All of it, or these steps, in its own time, or `speed` times as fast."""
        chosen = self.steps if steps is None else steps
        began = time.monotonic() - (chosen[0].at_s / speed if chosen else 0.0)
        for step in chosen:
            time.sleep(max(0.0, began + step.at_s / speed - time.monotonic()))
            self.put(step)
