#!/usr/bin/env python3
"""Writes docs/mistakes.md from tests/support/mistakes.py.

python -m tests.support.pages.mistakes_page [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.mistakes import MISTAKES

PAGE = Path(__file__).resolve().parents[3] / "docs" / "mistakes.md"
HEAD = """# Typical mistakes, and where their answer is

<!-- written by tests/support/pages/mistakes_page.py from tests/support/mistakes.py -->

Each row is a test that makes the mistake at a running system. The answer is shown where the second column says, and has
these words in it; an engine that serves goes on as it was while an edit of it is refused. Conditions are shown by
`kubectl describe isvc NAME`, the page and `metal-supervisor status`; [conditions.md](conditions.md) has all reasons.

| mistake | told by | with these words |
| --- | --- | --- |
"""


def page() -> str:
    """The whole page."""
    rows = []
    for each in MISTAKES.values():
        words = ", ".join(f"*{word}*" for word in each.words)
        rows.append(f"| {each.title} | {each.where} | {words} |")
    return HEAD + "\n".join(rows) + "\n"


def main(arguments: list[str]) -> int:
    """0: the page is as it should be, 1: it was not (`--check`)."""
    if arguments == ["--check"]:
        same = PAGE.exists() and PAGE.read_text("utf-8") == page()
        print("" if same else "docs/mistakes.md is out of date; run: python -m tests.support.pages.mistakes_page")
        return 0 if same else 1
    PAGE.write_text(page(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
