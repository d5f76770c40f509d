"""An engine is restarted only when nobody can lose a token by it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from metal_supervisor.host.liveness import GAP_S, HangLimits, LivenessSigns, ProbeResult, Pulse, heard, wants_signs

LIMITS = HangLimits(loading_s=600.0, silent_s=60.0)
IDLE = LivenessSigns(cpu_s=10.0, io_bytes=1000, clients=True, halted=False)
SERVING = Pulse(born=0.0, ready=True, served=True, last_at=100.0)


def silence(
    pulse: Pulse,
    seconds: int,
    *,
    cpu_share: float = 0.0,
    io: int = 0,
    clients: bool = True,
    halted: bool = False,
    answers: bool = False,
    blind: bool = False,
    limits: HangLimits = LIMITS,
) -> Pulse:
    """One look a second, each finding something wrong."""
    start = pulse.last_at
    for passed in range(1, seconds + 1):
        signs = LivenessSigns(10.0 + cpu_share * passed, 1000 + io * passed, clients, halted, blind)
        at = start + passed
        found = ProbeResult(
            at, answers, False, "/health has not answered within 5 s", signs if wants_signs(pulse, at, limits) else None
        )
        pulse = heard(pulse, found, limits)
    return pulse


def test_an_answer_is_readiness_and_forgets_every_doubt() -> None:
    doubted = silence(SERVING, 30)
    assert not doubted.ready
    assert heard(doubted, ProbeResult(200.0, True, True, ""), LIMITS) == Pulse(
        0.0, ready=True, served=True, last_at=200.0
    )


def test_one_silence_is_doubted_and_the_third_takes_the_endpoint_out() -> None:
    assert silence(SERVING, 2).ready
    assert not silence(SERVING, 3).ready


def test_a_halted_engine_is_out_at_once_and_restarted_only_after_the_timeout() -> None:
    halted = silence(SERVING, 1, halted=True)
    assert not halted.ready and not halted.hung
    assert silence(SERVING, 62, halted=True).hung


def test_one_that_does_nothing_for_the_timeout_is_hung_whoever_waits_for_it() -> None:
    assert not silence(SERVING, 59).hung
    hung = silence(SERVING, 63)
    assert hung.hung == "/health has not answered within 5 s for 62 s, and it does no work"


def test_one_that_counts_as_hung_is_out_however_few_looks_that_took() -> None:
    impatient = HangLimits(loading_s=4.0, silent_s=3.0)
    pulse = SERVING
    for at in (108.0, 114.0):  # a look that waits for an answer takes six seconds
        pulse = heard(pulse, ProbeResult(at, False, False, "/health has not answered within 5 s", IDLE), impatient)
    assert pulse.hung and not pulse.ready


@pytest.mark.parametrize(("cpu_share", "io"), [(0.05, 0), (0.0, 1 << 20)])
def test_one_that_works_for_somebody_is_never_restarted(cpu_share: float, io: int) -> None:
    assert not silence(SERVING, 3600, cpu_share=cpu_share, io=io).hung


def test_one_that_spins_for_nobody_is_restarted_after_the_timeout() -> None:
    assert silence(SERVING, 63, cpu_share=1.0, clients=False).hung.endswith("no client is connected to it")


def test_a_client_that_comes_back_in_time_starts_the_timeout_again() -> None:
    pulse = silence(SERVING, 50, cpu_share=1.0, clients=False)
    pulse = silence(pulse, 2, cpu_share=1.0, clients=True)
    assert not silence(pulse, 50, cpu_share=1.0, clients=False).hung


def test_a_work_loop_that_takes_nothing_is_doubted_later_than_a_silent_server() -> None:
    assert silence(SERVING, 15, answers=True).ready
    assert not silence(SERVING, 25, answers=True).ready
    assert silence(SERVING, 63, answers=True, clients=False).hung
    assert not silence(SERVING, 590, answers=True).hung  # somebody waits, and a GPU's work may not be seen
    assert silence(SERVING, 605, answers=True).hung


def test_where_a_gpu_works_unseen_somebody_who_is_connected_is_waited_for_as_long_as_loading_may_take() -> None:
    assert not silence(SERVING, 590, blind=True).hung
    assert silence(SERVING, 605, blind=True).hung
    assert silence(SERVING, 63, blind=True, clients=False).hung
    assert silence(SERVING, 63, blind=True, halted=True).hung


def test_loading_has_its_own_time_and_then_may_take_longer_as_long_as_it_works() -> None:
    loading = Pulse(born=0.0)
    assert not silence(loading, 590).hung
    assert "not ready 601 s after its start" in silence(loading, 601).hung
    assert not silence(loading, 3600, io=1 << 20, clients=False).hung


def test_time_in_which_we_did_not_look_counts_for_nothing() -> None:
    pulse = silence(SERVING, 30)
    away = heard(pulse, ProbeResult(pulse.last_at + 3600, False, False, "x", IDLE), LIMITS)
    assert not away.hung
    assert not silence(replace(away, last_at=away.last_at), 20).hung
    assert silence(away, 60 + int(GAP_S)).hung


def test_a_timeout_of_0_restarts_nothing() -> None:
    assert not silence(SERVING, 3600, limits=HangLimits(600.0, 0.0)).hung


def test_signs_are_not_looked_for_while_they_do_not_matter() -> None:
    assert not wants_signs(Pulse(born=0.0), 100.0, LIMITS)
    assert wants_signs(Pulse(born=0.0), 500.0, LIMITS)
    seen = heard(SERVING, ProbeResult(101.0, False, True, "x", IDLE), LIMITS)
    assert not wants_signs(seen, 101.5, LIMITS)
    assert wants_signs(seen, 102.0, LIMITS)


def waiting(pulse: Pulse, seconds: int, *, cpu_share: float = 0.0, limits: HangLimits = LIMITS) -> Pulse:
    """One look a second at an engine whose first answer is waited for."""
    start = pulse.last_at
    for passed in range(1, seconds + 1):
        at = start + passed
        signs = LivenessSigns(10.0 + cpu_share * passed, 1000, True, False, blind=True)
        seen = signs if wants_signs(pulse, at, limits) else None
        pulse = heard(pulse, ProbeResult(at, False, True, "its first answer is waited for", seen, asked=True), limits)
    return pulse


def test_a_first_answer_may_take_as_long_as_loading_did() -> None:
    loaded = silence(Pulse(born=0.0), 590)
    compiling = waiting(loaded, 595)
    assert not compiling.hung and not compiling.ready and not compiling.served
    assert "its first answer is waited for" in waiting(compiling, 10).hung
    assert not waiting(loaded, 3600, cpu_share=0.05).hung, "it works on it"


def test_a_first_answer_that_fails_again_and_again_is_given_that_time_once() -> None:
    pulse = waiting(Pulse(born=0.0), 300)
    pulse = heard(pulse, ProbeResult(301.0, False, True, "/v1/chat/completions answered 500: no", asked=True), LIMITS)
    assert not waiting(pulse, 295).hung
    assert waiting(pulse, 305).hung


def test_a_first_answer_is_readiness() -> None:
    answered = heard(waiting(Pulse(born=0.0), 10), ProbeResult(11.0, True, True, ""), LIMITS)
    assert answered.ready and answered.served and not answered.message
