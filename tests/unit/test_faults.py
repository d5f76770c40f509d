"""The page of fault cases says what the scenarios say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests import faults

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_scenarios_declare() -> None:
    done = subprocess.run(
        [sys.executable, "tools/faults.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_samples_are_told_as_median_and_worst() -> None:
    assert faults.told([0.2], "s") == "0.20 s"
    assert faults.told([0.0, 0.0, 0.0], "restarts") == "0 restarts (n=3)"
    assert faults.told([0.1 * each for each in range(1, 101)], "s") == "p50 5.05, p99 10.00 s (n=100)"


def test_figures_are_gathered_by_case_and_name() -> None:
    into: dict[str, dict[str, object]] = {}
    faults.gather([("figure", ["S1", "back", 1.0, "s"]), ("figure", ["S1", "back", 2.0, "s"]), ("other", 3)], into)
    assert into == {"S1": {"back": {"samples": [1.0, 2.0], "unit": "s"}}}
