"""What the watchdog keeps when the machine does not tell."""

from __future__ import annotations

import pytest

from metal_supervisor.controller.pressure_watch import BUDGET_EVERY_S, Watchdog
from metal_supervisor.settings.loader import Settings
from tests.support.faults import fault


@fault(
    "M105b",
    "the size of the memory cannot be read any more",
    happens="the budget stays as it was, until it can",
    sees="nothing",
    bound="the same budget",
)
def test_a_machine_that_does_not_tell_its_size_for_once_keeps_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[bool] = []
    watchdog = Watchdog(Settings(), lambda: woken.append(True))
    before = watchdog.budget
    assert before.bytes

    def fail() -> None:
        raise RuntimeError("host_statistics64(HOST_VM_INFO64) syscall failed")

    with monkeypatch.context() as broken:
        broken.setattr("metal_supervisor.host.machine.memory_bytes", fail)
        look_again(watchdog)
        assert watchdog.budget == before and not woken
    monkeypatch.setattr("metal_supervisor.host.machine.memory_bytes", lambda: before.total_bytes // 2)
    look_again(watchdog)
    assert watchdog.budget.total_bytes == before.total_bytes // 2 and woken


def look_again(watchdog: Watchdog) -> None:
    """It is time to look up the budget again."""
    watchdog._budget_at -= BUDGET_EVERY_S
    watchdog._refresh_budget()
