"""Hooks of all tests: figures of fault cases and of engines' memory (tests/support/faults.py, memory.py), and skips."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from metal_supervisor.host import processes
from metal_supervisor.runtimes import setting_checks  # noqa: F401 - as in every process that reads settings
from tests.support import delays, faults, memory, pace

_found: dict[str, dict[str, Any]] = {}
_measured: dict[str, Any] = {}
_skipped: Counter[str] = Counter()


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a script's background, and then in all that tests start
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if _is_outermost(config):
        delays.begin()
    settings.register_profile("without a clock", deadline=None)  # a crowded machine is no error
    settings.load_profile("without a clock")
    config.addinivalue_line("markers", "fault(id, fault, happens, sees, bound): proves a case of docs/faults.md")


def pytest_unconfigure(config: pytest.Config) -> None:
    if _is_outermost(config):
        delays.end()


def _is_outermost(config: pytest.Config) -> bool:
    """False for a worker, and for tests that a test runs."""
    return not hasattr(config, "workerinput") and "PYTEST_CURRENT_TEST" not in os.environ


def pytest_sessionstart() -> None:
    pace.slowness()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep tests and modules, which stay, out of every search for garbage: it costs a seventh of all that tests do."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the files of unit tests, which only compute, among those of systems, which mostly wait."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    computing = [path for path in files if "unit" in path.parts]
    waiting = [path for path in files if "unit" not in path.parts]
    share = max(1, len(waiting)) / max(1, len(computing))
    places = {path: number for number, path in enumerate(waiting)}
    places |= {path: round(share * number) for number, path in enumerate(computing)}
    items[:] = [item for path in sorted(files, key=lambda path: places[path]) for item in files[path]]


@pytest.fixture(autouse=True)
def no_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide other systems on this machine from commands that run inside the tests' process."""
    monkeypatch.setattr(processes, "systems", list)


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> faults.Figure:
    """Takes what this test measured, for docs/faults.md."""
    return faults.Figure(request.node)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        _skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1
    if report.when == "teardown" and report.passed:
        faults.gather(list(report.user_properties), _found)
        memory.gather(list(report.user_properties), _measured)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if (slowness := pace.slowness()) > 1:
        terminalreporter.write_line(f"pace: this machine took up to {slowness:.1f} times as long as two idle cores")
    # Always, unlike -rs: a green run must not hide that an engine was missing.
    if _skipped:
        terminalreporter.section("skipped")
        for reason, count in _skipped.most_common():
            terminalreporter.write_line(f"{count:>5}  {reason}")
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
