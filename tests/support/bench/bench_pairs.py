"""Two checkouts in turns: what an edit and a crash take in one, and in the other, on a machine that others use too.

Each checkout runs a system of its own, with as many services; while one is edited, the other rests. A round is some
edits and a crash of each, in changing order, so that what slows the machine down slows both. Of each figure it prints
the medians, and the median ratio of the rounds with the interval that holds it with 95 %.

    python -m tests.support.bench.bench_pairs --against CHECKOUT [--services 150] [--rounds 20]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tests.support.bench import bench_scale
from tests.support.bench.bench_scale import Scale
from tests.support.bench.intervals import shown
from tests.support.system import eventually

ROOT = Path(__file__).parents[3]
EDITS = 5
"""Of one round."""
PORTS = {"one": "6000-7999", "other": "8000-9999"}
Figures = dict[str, float]


def one_side(services: int, ports: str) -> None:
    """A system, and a round of it for each line on stdin; its figures go to stdout as JSON, in ms."""
    bench_scale.PORTS = ports
    scale = Scale()
    with bench_scale.loaded(services, scale) as (system, slices):
        time.sleep(bench_scale.QUIET_S)
        print(json.dumps({"allReady": scale.all_ready}), flush=True)
        for _ in sys.stdin:
            made = Scale(own=statistics.median(bench_scale.own_load_s() for _ in range(3)))
            bench_scale.edits(system, slices, EDITS, made)
            bench_scale.crashes(system, slices, 1, made)
            for name in [f"edit-{number}" for number in range(EDITS)]:
                system.delete(name)
                # Its note goes with its record: the next round has services of the same names.
                eventually(lambda name=name: system.files.run_note(f"default.{name}") is None, what=f"no {name}")
            figures = {
                "apply -> pid": 1000 * statistics.median(made.to_pid),
                "apply -> ready slice, beyond load": 1000 * statistics.median(made.to_slice),
                "crash -> slice not ready": 1000 * made.withdrawn[0],
            }
            spent = {f"CPU of an edit, {name}": statistics.fmean(ms) for name, ms in made.edit_cpu_ms.items()}
            print(json.dumps({**figures, **spent}), flush=True)


class Side:
    """One checkout's system, in a process of its own."""

    def __init__(self, checkout: Path, name: str, services: int) -> None:
        self._process = subprocess.Popen(
            [checkout / ".venv/bin/python", Path(__file__), "--side", PORTS[name], "--services", str(services)],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.all_ready_s = self._told()["allReady"]

    def _told(self) -> Figures:
        assert self._process.stdout is not None
        found: Figures = json.loads(self._process.stdout.readline())
        return found

    def round(self) -> Figures:
        """The figures of one round."""
        assert self._process.stdin is not None
        print("again", file=self._process.stdin, flush=True)
        return self._told()

    def close(self) -> None:
        """End the system."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    """Measures, and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--services", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    if given.side:
        one_side(given.services, given.side)
        return
    sides = {"one": Side(ROOT, "one", given.services), "other": Side(given.against.resolve(), "other", given.services)}
    rounds: list[dict[str, Figures]] = []
    try:
        for number in range(given.rounds):
            order = sorted(sides, reverse=bool(number % 2))
            rounds.append({name: sides[name].round() for name in order})
    finally:
        for side in sides.values():
            side.close()
    ready = ", ".join(f"{name} {side.all_ready_s:.1f}" for name, side in sides.items())
    print(f"── {given.services} services, {len(rounds)} rounds; all Ready after one apply, s: {ready}")
    for figure in rounds[0]["one"]:
        ratios = [each["one"][figure] / (each["other"][figure] or 1) for each in rounds]
        here, there = ([each[name][figure] for each in rounds] for name in ("one", "other"))
        print(f"{figure:34} {shown(here, 2)} ms; against {shown(there, 2)} ms; ratio {shown(ratios, 2)}", flush=True)


if __name__ == "__main__":
    main()
