"""Cases of fault: a scenario says what is done, what happens, what a user sees and within what bound, and measures.

`@fault(...)` on a test makes it a row of docs/faults.md; the `figure` fixture takes what the test measured. Both
travel with the test's report, so they also arrive from the processes of pytest-xdist, are printed at the end of
every run, and are kept in build/figures.json for `tests/support/pages/faults.py`, which writes the page.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest

FIGURES = Path(__file__).resolve().parents[2] / "build" / "figures.json"
PROPERTY = "figure"


@dataclass(frozen=True)
class Case:
    """One row of the page."""

    id: str
    """Letter and number of the list of cases, e.g. `S49`; a case shown in parts has one row for each, `S49a`."""
    fault: str
    happens: str
    sees: str
    bound: str


def fault(id: str, fault: str, *, happens: str, sees: str, bound: str) -> pytest.MarkDecorator:
    """Declares the test to be the proof of a case. Every text is one short clause."""
    return pytest.mark.fault(id=id, fault=fault, happens=happens, sees=sees, bound=bound)


def cases_of(item: pytest.Item) -> list[Case]:
    """The cases that a test proves, the uppermost first."""
    return [Case(**mark.kwargs) for mark in reversed(list(item.iter_markers("fault")))]


class Figure:
    """Takes what one test measured."""

    def __init__(self, item: pytest.Item) -> None:
        self._item, self._cases = item, [case.id for case in cases_of(item)]

    def add(self, name: str, value: float, unit: str = "s", case: str = "") -> None:
        """One sample; several of one name become a median and a worst. `case`: of a test with several."""
        assert self._cases, "a figure belongs to a test with @fault"
        assert not case or case in self._cases, case
        self._item.user_properties.append((PROPERTY, [case or self._cases[0], name, float(value), unit]))

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the seconds that the block took."""
        start = time.monotonic()
        yield
        self.add(name, time.monotonic() - start)


def told(samples: list[float], unit: str) -> str:
    """`0.21 s`, or `p50 0.21, p99 0.40 s (n=50)`."""
    digits = 0 if all(value == int(value) for value in samples) else 1 if min(samples) >= 10 else 2
    tail = f" {unit}" if unit else ""
    if len(set(samples)) == 1:
        return f"{samples[0]:.{digits}f}{tail}" + (f" (n={len(samples)})" if len(samples) > 1 else "")
    worst = sorted(samples)[min(len(samples) - 1, int(len(samples) * 0.99))]
    return f"p50 {median(samples):.{digits}f}, p99 {worst:.{digits}f}{tail} (n={len(samples)})"


def line(figures: dict[str, dict[str, Any]]) -> str:
    """All figures of one case in a line."""
    return "; ".join(f"{name} {told(each['samples'], each['unit'])}" for name, each in figures.items())


def gather(properties: list[tuple[str, Any]], into: dict[str, dict[str, Any]]) -> None:
    """Adds the figures of a test's report: case -> name -> {samples, unit}."""
    for key, value in properties:
        if key == PROPERTY:
            case, name, sample, unit = value
            found = into.setdefault(case, {}).setdefault(name, {"samples": [], "unit": unit})
            found["samples"].append(sample)


def keep(found: dict[str, dict[str, Any]]) -> None:
    """Keeps this run's figures beside those of cases that it did not run."""
    kept: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        kept = json.loads(FIGURES.read_text())
    FIGURES.parent.mkdir(exist_ok=True)
    FIGURES.write_text(json.dumps({**kept, **found}, indent=1, sort_keys=True) + "\n")
