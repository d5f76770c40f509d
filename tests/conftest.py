"""What every test may use: the figures of fault cases (tests/faults.py), and of engines' memory (tests/memory.py)."""

from __future__ import annotations

from typing import Any

import pytest

from tests import faults, memory

_found: dict[str, dict[str, Any]] = {}
_measured: dict[str, Any] = {}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fault(id, fault, happens, sees, bound): proves a case of docs/faults.md")


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> faults.Figure:
    """Takes what this test measured, for docs/faults.md."""
    return faults.Figure(request.node)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown" and report.passed:
        faults.gather(list(report.user_properties), _found)
        memory.gather(list(report.user_properties), _measured)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _measured:
        memory.keep(_measured)
    if not _found:
        return
    terminalreporter.section("figures of fault cases")
    for case in sorted(_found, key=_order):
        terminalreporter.write_line(f"{case:<6} {faults.line(_found[case])}")
    faults.keep(_found)


def _order(case: str) -> tuple[str, int, str]:
    digits = "".join(each for each in case if each.isdigit())
    return case[0], int(digits or 0), case
