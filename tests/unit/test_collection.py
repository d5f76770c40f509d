"""What one run of pytest collects: files of one name, in directories that are no packages, shadow each other."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_files_that_run_together_have_names_of_their_own() -> None:
    found = [path for path in TESTS.glob("*/test_*.py") if not (path.parent / "__init__.py").exists()]
    names = Counter(path.name for path in found)
    assert len(names) > 100 and [name for name, count in names.items() if count > 1] == []
