"""Attacks run whole or fail: in CI one that is skipped counts as one that succeeded."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

collect_ignore = [] if os.environ.get("METAL_CLUSTER") else ["test_cluster.py"]
"""`make test-cluster` runs these, against a real API server."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and os.environ.get("CI"):
        report.outcome, report.longrepr = "failed", f"an attack was skipped: {report.longrepr}"
    return report
