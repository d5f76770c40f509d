"""The pauses of a loop, on clocks of the test's own: they follow the CPU of its passes, and not how long these last."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from metal_supervisor.state import throttle
from metal_supervisor.state.throttle import BURST_S, Throttle

SHARE = 0.25
LONGEST_S = 0.2


class Clocks:
    """The time, and the CPU that this thread has used."""

    now_s, cpu_s = 100.0, 7.0

    def monotonic(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        return self.cpu_s


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], float]:
    """Make a pass that lasts so long and takes so much CPU, and the pause after it; returns that pause."""
    clocks, made = Clocks(), Throttle(SHARE, LONGEST_S)
    monkeypatch.setattr(throttle, "time", clocks)

    def one(lasts_s: float, cpu_s: float) -> float:
        made.begin()
        clocks.now_s, clocks.cpu_s = clocks.now_s + lasts_s, clocks.cpu_s + cpu_s
        pause_s = made.pause_s()
        clocks.now_s += pause_s
        return pause_s

    return one


def test_the_first_passes_after_a_rest_wait_for_nothing(passed: Callable[[float, float], float]) -> None:
    assert [passed(0.01, 0.01) for _ in range(3)] == [0.0, 0.0, 0.0]


def test_many_passes_take_their_share_of_a_core(passed: Callable[[float, float], float]) -> None:
    spent = sum(0.01 + passed(0.01, 0.01) for _ in range(100))
    assert spent == pytest.approx(100 * 0.01 / SHARE - BURST_S, abs=0.01)


def test_a_pass_that_lasts_long_for_a_busy_machine_makes_no_pause(passed: Callable[[float, float], float]) -> None:
    assert [passed(5.0, 0.02) for _ in range(10)] == [0.0] * 10


def test_no_pause_is_longer_than_the_longest(passed: Callable[[float, float], float]) -> None:
    assert max(passed(0.5, 0.5) for _ in range(10)) == pytest.approx(LONGEST_S)
