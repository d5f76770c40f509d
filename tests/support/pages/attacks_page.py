#!/usr/bin/env python3
"""Writes docs/attacks.md: what the tests in tests/attacks try, as they say it themselves.

    python -m tests.support.pages.attacks_page [--check]

One row for each test; `make test` and `make test-cluster` run them, and CI fails if one was skipped.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "attacks.md"
ATTACKS = ROOT / "tests" / "attacks"
HEAD = """# What has been tried against it

<!-- written by tests/support/pages/attacks_page.py from tests/attacks -->

Each row is a test that attacks the running system, or the very code that judges a manifest, and passes only if the
attack fails. Most are repeated for every flag, variable, path or request of a list; the file has the list. Run them
with `.venv/bin/python -m pytest tests/attacks`, those of test_cluster.py with `make test-cluster`. CI fails if one
succeeds or is skipped.
"""


def tests(path: Path) -> Iterator[tuple[str, str]]:
    """(name, its sentence) of each test of a file."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.name, node.name.removeprefix("test_").replace("_", " ")


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for path in sorted(ATTACKS.glob("test_*.py")):
        about = " ".join((ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").split())
        rows = "\n".join(f"| {sentence} |" for _, sentence in tests(path))
        parts.append(f"## [{path.stem}](../tests/attacks/{path.name})\n\n{about}\n\n| what holds |\n| --- |\n{rows}\n")
    return "\n".join(parts)


def main(arguments: list[str]) -> int:
    """0: the page is as it should be, 1: it was not (`--check`)."""
    if arguments == ["--check"]:
        same = PAGE.exists() and PAGE.read_text("utf-8") == page()
        print("" if same else "docs/attacks.md is out of date; run: python -m tests.support.pages.attacks_page")
        return 0 if same else 1
    PAGE.write_text(page(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
