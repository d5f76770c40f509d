"""Memory that a claimed service takes is counted from its claim on."""

from __future__ import annotations

from dataclasses import replace

from metal_supervisor.controller.assignment import _charged
from metal_supervisor.spec.types import Standing
from tests.unit.test_report import record


def test_a_service_that_is_still_being_checked_is_not_counted_as_charged() -> None:
    admitted = replace(record(reason="InsufficientMemory"), namespace="a", name="one")
    checking = replace(record(Standing.WAIT, "Checking"), namespace="a", name="two")
    assert _charged([admitted, checking]) == {("a", "one")}
