"""The share of the gateway's worker that reading one engine's answers may take."""

from __future__ import annotations

import pytest

from metal_supervisor.gateway.engine_connections import BURST_S, PASS_ON_S, SHARE, ReadingShare


def taken(reads: int, took_s: float, every_s: float) -> tuple[float, float]:
    """(time that so many reads have taken, time that passed), with the pauses that the share asks for."""
    share, now, longest = ReadingShare(), 100.0, 0.0
    for _ in range(reads):
        pause_s = share.pause_s(took_s, now)
        longest = max(longest, pause_s)
        now += max(every_s, took_s) + pause_s
    return reads * took_s / (now - 100.0), longest


@pytest.mark.parametrize("took_s", [PASS_ON_S, 1e-4, 1e-3, 0.02])
def test_reads_without_a_pause_between_them_take_no_more_than_the_share(took_s: float) -> None:
    assert taken(10_000, took_s, 0.0)[0] <= SHARE * 1.01


@pytest.mark.parametrize("tokens_per_s", [20, 200, 2000, 4000])
def test_tokens_at_the_speed_of_engines_are_read_without_a_pause(tokens_per_s: int) -> None:
    """Eight slots of 500 tokens per second included."""
    assert taken(10_000, PASS_ON_S + 15e-6, 1 / tokens_per_s)[1] == 0.0


def test_a_debt_is_forgotten_with_time_and_credit_does_not_grow() -> None:
    share = ReadingShare()
    assert share.pause_s(0.01, 100.0) == pytest.approx(0.01 / SHARE)
    assert share.pause_s(BURST_S * SHARE, 200.0) == 0.0
    assert share.pause_s(0.01, 200.0) > 0.01 / SHARE
