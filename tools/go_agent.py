#!/usr/bin/env python3
"""Writes the tables of docs/coming-from-the-go-agent.md: every flag of LLMKube's own agent and what it becomes.

They are what `metal-supervisor import-launchd` goes by. With `--check` the page is only compared.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from metal_supervisor.install.go_agent import ENVIRONMENT, FLAGS, REFUSED_ENVIRONMENT, GoFlag  # noqa: E402

PAGE = ROOT / "docs" / "coming-from-the-go-agent.md"
MARKS = "<!-- written by tools/go_agent.py from install/go_agent.py -->\n", "<!-- end -->\n"


def _becomes(flag: GoFlag) -> str:
    if flag.setting:
        return f"`{flag.setting}`"
    if flag.harmless is None:
        return "not needed"
    values = [str(each).lower() if isinstance(each, bool) else str(each) for each in flag.harmless]
    shown = " or ".join(f"`{each}`" if each else "nothing" for each in values)
    return f"refused, unless {shown}" if shown else "refused"


def _row(*cells: str) -> str:
    return "| " + " | ".join(each.replace("|", "\\|") for each in cells) + " |\n"


def tables() -> str:
    """Both tables, in Markdown."""
    parts = [_row("flag", "its default", "here", "what differs, or why"), _row(*["---"] * 4)]
    for flag in FLAGS.values():
        name = f"`--{flag.name}`" + (" (0.10)" if flag.newer else "")
        parts.append(_row(name, flag.default or "–", _becomes(flag), flag.why))
    parts += ["\n", _row("variable", "here", "why"), _row(*["---"] * 3)]
    for name, why in ENVIRONMENT.items():
        here = "refused" if name in REFUSED_ENVIRONMENT else "not taken over"
        here = "`kubeconfig`" if name == "KUBECONFIG" else here
        parts.append(_row(name if name == "other" else f"`{name}`", here, why))
    return "".join(parts)


def page(before: str) -> str:
    """The page with its tables as they have to be. Raises ValueError if the marks are not there."""
    begin, end = MARKS
    if before.count(begin) != 1 or before.count(end) != 1:
        raise ValueError(f"{PAGE.name} must hold {begin.strip()} and {end.strip()} once each")
    return re.sub(
        f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n{tables()}\n{end}", before, flags=re.DOTALL
    )


def main() -> int:
    """Exit code 1 if `--check` found the page out of date."""
    before = PAGE.read_text("utf-8")
    text = page(before)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, "utf-8")
        return 0
    if text != before:
        sys.stderr.write("docs/coming-from-the-go-agent.md is not what the code says; run tools/go_agent.py\n")
    return int(text != before)


if __name__ == "__main__":
    sys.exit(main())
