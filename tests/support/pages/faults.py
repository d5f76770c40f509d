#!/usr/bin/env python3
"""Writes docs/faults.md: every case of fault as the scenarios declare it, with the figures they last reached.

This module collects the cases and takes the figures of build/figures.json, which every test run keeps; a case
that no run of this checkout reached keeps the figures that the page has. `make faults` runs the scenarios first. With
`--check` it only compares, leaving the figures aside.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support import faults

ROOT = Path(__file__).resolve().parents[3]

PAGE = ROOT / "docs" / "faults.md"
KINDS = {
    "K": "Kubernetes API",
    "C": "Custom resources",
    "S": "supervisord",
    "P": "Engines",
    "L": "Engines that have to go",
    "R": "Shared daemons",
    "M": "Host",
    "D": "Downloads",
    "G": "Security",
    "H": "macOS",
    "U": "Upgrade, restart, time",
    "W": "Gateway",
}
ELSEWHERE = (
    "boundary/test_headers.py",
    "boundary/test_kube_tls.py",
    "boundary/test_memory_held.py",
    "boundary/test_strings.py",
    "boundary/test_watchdog.py",
)
"""What proves cases without a running system."""
HEAD = """# What happens when something breaks

<!-- written by tests/support/pages/faults.py from the scenarios in tests/; change them, then run `make faults` -->

Each row is a test that does it to a running system (real supervisord, real API, a real llama-server where one can
show the fault, `tests/support/fake_runtime.py` where none can) and checks the bound; M105 is done to the part that asks
psutil, since no running system can be made to, and G130, G140 and G142 to the one part that meets them, with a real
supervisord, real TLS and real files. Bounds are generous, for slow machines;
the figures are what was last reached on two shared cores without a GPU. Numbers are those of the project's list of
150 faults, to which those of the gateway were added; a case in several parts has a row for each.
"""


class _Collector:
    def __init__(self) -> None:
        self.cases: dict[str, faults.Case] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item, case in ((each, case) for each in session.items for case in faults.cases_of(each)):
            known = self.cases.setdefault(case.id, case)
            assert known == case, f"{case.id} is declared twice, differently: {item.nodeid}"


def collected() -> list[faults.Case]:
    """Every declared case, in the order of the list."""
    collector = _Collector()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        paths = [str(ROOT / "tests" / each) for each in ("scenarios", *ELSEWHERE)]
        code = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *paths], plugins=[collector])
    assert code == 0, said.getvalue()[-2000:]
    return sorted(collector.cases.values(), key=lambda case: (list(KINDS).index(case.id[0]), _number(case.id), case.id))


def _number(case: str) -> int:
    found = re.search(r"\d+", case)
    assert found, case
    return int(found[0])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def told_before(text: str) -> dict[str, str]:
    """Case -> the figures that a page has of it."""
    rows = re.findall(r"(?m)^\| ([A-Z]\d+\w*) \|.*(?<!\\)\| ((?:\\\||[^|])*?) ?\|$", text)
    return {case: measured.replace("\\|", "|") for case, measured in rows}


def page(cases: list[faults.Case], figures: dict[str, dict[str, object]], before: Mapping[str, str]) -> str:
    """The whole page. `before`: the figures of cases that have no new ones."""
    parts = [HEAD]
    for letter, title in KINDS.items():
        chosen = [case for case in cases if case.id.startswith(letter)]
        if not chosen:
            continue
        parts.append(f"\n## {title}\n\n| case | fault | what happens | what the user sees | bound | measured |\n")
        parts.append("| --- | --- | --- | --- | --- | --- |\n")
        for case in chosen:
            found = figures.get(case.id)
            measured = faults.line(found) if found else before.get(case.id, "")  # type: ignore[arg-type]
            cells = (case.id, case.fault, case.happens, case.sees, case.bound, measured)
            parts.append("| " + " | ".join(map(_cell, cells)) + " |\n")
    return "".join(parts)


def without_figures(text: str) -> str:
    """The page without its last column, which differs from run to run."""
    return re.sub(r"(?m)^(\| [A-Z]\d+.* \| )[^|]*\|$", r"\1|", text)


def main() -> int:
    """Exit code 1 if `--check` found the page out of date."""
    figures = json.loads(faults.FIGURES.read_text()) if faults.FIGURES.exists() else {}
    old = PAGE.read_text() if PAGE.exists() else ""
    text = page(collected(), figures, told_before(old))
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text)
        return 0
    current = without_figures(old) == without_figures(text)
    if not current:
        sys.stderr.write("docs/faults.md is not what the scenarios say; run tests/support/pages/faults.py\n")
    return 0 if current else 1


if __name__ == "__main__":
    sys.exit(main())
