"""The page of fault cases says what the scenarios say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support import faults
from tests.support.pages import faults as page

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_scenarios_declare() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.pages.faults", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_samples_are_told_as_median_and_worst() -> None:
    assert faults.told([0.2], "s") == "0.20 s"
    assert faults.told([0.0, 0.0, 0.0], "restarts") == "0 restarts (n=3)"
    assert faults.told([0.1 * each for each in range(1, 101)], "s") == "p50 5.05, p99 10.00 s (n=100)"


def test_a_case_that_was_not_run_keeps_the_figures_of_the_page() -> None:
    cases = [faults.Case(name, "a | b", "c", "d", "e") for name in ("S1", "S2a", "S3")]
    figures = {"S1": {"back": {"samples": [1.0], "unit": "s"}}, "S2a": {"away": {"samples": [2.0], "unit": "s"}}}
    before = page.told_before(page.page(cases, figures, {}))
    assert before == {"S1": "back 1 s", "S2a": "away 2 s", "S3": ""}
    after = page.told_before(page.page(cases, {"S1": {"back": {"samples": [3.0], "unit": "s"}}}, before))
    assert after == {"S1": "back 3 s", "S2a": "away 2 s", "S3": ""}


def test_figures_are_gathered_by_case_and_name() -> None:
    into: dict[str, dict[str, object]] = {}
    faults.gather([("figure", ["S1", "back", 1.0, "s"]), ("figure", ["S1", "back", 2.0, "s"]), ("other", 3)], into)
    assert into == {"S1": {"back": {"samples": [1.0, 2.0], "unit": "s"}}}
