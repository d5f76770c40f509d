"""docs/memory.md says what the code computes and what the tests measure."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import kv_models, memory
from tests.support.memory import CASES, LARGE
from tests.support.pages import memory as page

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_code_and_the_tests_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["memory", "--check"])
    assert page.main() == 0


def test_every_case_has_a_row_with_what_was_measured() -> None:
    rows = [line for line in (ROOT / "docs" / "memory.md").read_text().splitlines() if line.startswith("| ")]
    for case in CASES:
        found = [row for row in rows if f": {case.model.name} | {case.flags} | " in row]
        assert len(found) == 1, case.id
        assert " / " in found[0], f"{case.id} was never measured; run make memory"


def test_every_kind_of_model_is_compared_and_no_case_twice() -> None:
    assert {case.kind for case in CASES} == {*kv_models.KINDS, *LARGE}
    assert len({case.id for case in CASES}) == len(CASES)


def test_what_rounding_explains_is_no_error() -> None:
    assert memory.error_percent(2.075, 2.08, 1) == 0.0
    assert memory.error_percent(2.06, 2.08, 1) < 0 < memory.error_percent(2.1, 2.08, 1)
    assert abs(memory.error_percent(110.0, 100.0) - 10.0) < 1e-9
    assert memory.error_percent(1.0, 0.0) == 100.0
    assert memory.summary([0.0, -3.0, 1.0]) == "median 1.0 %, worst -3.0 %"


def test_figures_of_cases_that_are_no_more_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "FIGURES", tmp_path / "build" / "memory.json")
    into: dict[str, Any] = {}
    first, second = CASES[0].id, CASES[1].id
    memory.gather([("memory", [first, {"measured": {}}]), ("figure", 3), ("memory", ["gone", {}])], into)
    memory.keep(into)
    memory.keep({second: {"measured": {"KV": [1.0, 1]}}})
    assert memory.kept() == {first: {"measured": {}}, second: {"measured": {"KV": [1.0, 1]}}}
