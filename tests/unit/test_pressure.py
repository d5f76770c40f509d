"""The pressure watchdog: what a sample says, and how slowly that is believed."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from metal_supervisor.memory.pressure import Level, MemorySample, Pace, Thresholds, Watch, in_force, thresholds, watch
from metal_supervisor.spec.sizes import GIB, MIB
from tests.support.effort import cases

NORMAL = Level.NORMAL
WARNING = Level.WARNING
CRITICAL = Level.CRITICAL
TOTAL = 128 * GIB
LIMITS = thresholds(TOTAL, 107 * GIB)  # warning below 10.5 GiB, critical below 5.25 GiB


def sample(at: float, gib: float | None = None, **more: object) -> MemorySample:
    return replace(MemorySample(at, TOTAL, None if gib is None else int(gib * GIB)), **more)  # type: ignore[arg-type]


def series(start: float, *gib: float | None, every_s: float = 5.0) -> list[MemorySample]:
    return [sample(start + index * every_s, each) for index, each in enumerate(gib)]


def after(samples: Iterable[MemorySample], before: Watch = Watch()) -> Watch:  # noqa: B008 - frozen
    for each in samples:
        before = watch(before, each, LIMITS)
    return before


def raw(each: MemorySample) -> Level:
    return watch(Watch(), each, LIMITS).raw


def critical(at: float = 100.0) -> Watch:
    """Critical since `at`."""
    found = after(series(at - 5, 4, 4))
    assert (found.level, found.since) == (CRITICAL, at)
    return found


# ── thresholds ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("total_gib", "budget_gib", "warning", "critical"),
    [
        (16, 10.2, 18, 9),
        (16, 11.3, 14.7, 7.3),
        (36, 27.6, 11.7, 5.8),
        (64, 51.3, 9.9, 5),
        (128, 107.0, 8.2, 4.1),
        (128, 115.2, 5, 2.5),
        (128, 32, 20, 10),  # the configured shares cap them
    ],
)
def test_thresholds_are_scaled_to_what_the_budget_leaves_free(
    total_gib: float, budget_gib: float, warning: float, critical: float
) -> None:
    total = round(total_gib * GIB)
    found = thresholds(total, round(budget_gib * GIB))
    assert 100 * found.warning_bytes / total == pytest.approx(warning, abs=0.13)
    assert 100 * found.critical_bytes / total == pytest.approx(critical, abs=0.07)


def test_configured_shares_are_caps() -> None:
    assert thresholds(100, 10, warning=0.05, critical=0.02) == Thresholds(5, 2)
    assert thresholds(100, 10, warning=0.05, critical=0.40) == Thresholds(5, 5)


def test_without_headroom_the_available_memory_is_no_reason() -> None:
    limits = thresholds(TOTAL, TOTAL + GIB)
    assert limits == Thresholds(0, 0)
    assert watch(Watch(), sample(0, 0), limits).raw is NORMAL
    assert watch(Watch(), sample(0, 0, kernel_level=4), limits).raw is CRITICAL


def test_a_full_and_legal_load_is_normal_on_every_machine() -> None:
    for total, budget in ((16, 10.2), (36, 27.6), (64, 51.3), (128, 107.0), (128, 115.2), (512, 460.8)):
        left = int((total - budget) * GIB * 0.63)  # some of the headroom is the system's own
        limits = thresholds(total * GIB, int(budget * GIB))
        assert watch(Watch(), MemorySample(0, total * GIB, left), limits).raw is NORMAL


# ── what a sample says ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"available_bytes": LIMITS.warning_bytes}, NORMAL),
        ({"available_bytes": LIMITS.warning_bytes - 1}, WARNING),
        ({"available_bytes": LIMITS.critical_bytes}, WARNING),
        ({"available_bytes": LIMITS.critical_bytes - 1}, CRITICAL),
        ({"available_bytes": 0}, CRITICAL),
        ({"kernel_level": 1}, NORMAL),
        ({"kernel_level": 2}, WARNING),
        ({"kernel_level": 4}, CRITICAL),
        ({"some_avg10": 9.99, "full_avg10": 9.99}, NORMAL),
        ({"some_avg10": 10.0, "full_avg10": 1.0}, WARNING),
        ({"some_avg10": 80.0, "full_avg10": 10.0}, CRITICAL),
        ({"available_bytes": 100 * GIB, "kernel_level": 4, "some_avg10": 0.0}, CRITICAL),  # the worst one counts
        ({"available_bytes": GIB, "kernel_level": 1}, CRITICAL),
        ({"available_bytes": 100 * GIB, "kernel_level": 3}, NORMAL),
    ],
)
def test_the_worst_signal_counts(more: dict[str, object], expected: Level) -> None:
    assert raw(sample(0, **more)) is expected


@pytest.mark.parametrize(
    ("mib_per_s", "gib", "expected"),
    [
        (31, 12, NORMAL),
        (33, 12, WARNING),
        (33, 22, NORMAL),
        (300, 12, WARNING),
        (300, 10, CRITICAL),
        (250, 10, WARNING),
    ],
)
def test_growth_of_swap_counts_when_little_is_available(mib_per_s: float, gib: float, expected: Level) -> None:
    found = after(sample(at, gib, swap_used_bytes=int(at * mib_per_s * MIB)) for at in range(0, 65, 5))
    assert found.raw is expected


def test_growth_of_swap_is_that_of_a_minute() -> None:
    burst = [sample(at, 12, swap_used_bytes=(0 if at < 30 else GIB)) for at in range(0, 65, 5)]
    assert after(burst).raw is NORMAL, "1 GiB in a minute is 17 MiB/s"
    assert after(burst[:2]).raw is NORMAL, "two samples tell nothing of a minute"
    shrinks = [sample(at, 12, swap_used_bytes=100 * GIB - at * GIB) for at in range(0, 65, 5)]
    assert after(shrinks).raw is NORMAL


def test_the_history_of_swap_is_bounded() -> None:
    found = after(sample(at / 100, 12, swap_used_bytes=at) for at in range(2000))
    assert len(found.swap) == 60
    assert not after([sample(1000, 12, swap_used_bytes=1)], found).swap[:-1], "nor does it reach over a gap"


def test_why_is_told_with_numbers() -> None:
    assert critical().why == "4.0 GiB of 128.0 GiB available, below 4.1 %"
    assert after(series(0, 8, 8)).why == "8.0 GiB of 128.0 GiB available, below 8.2 %"
    assert after(series(0, 50)).why == "50.0 GiB of 128.0 GiB available"
    assert after([sample(0, kernel_level=4), sample(5, kernel_level=4)]).why == "the kernel's level is Critical"
    stalls = [sample(at, 50, some_avg10=40.25, full_avg10=2.0) for at in (0, 5)]
    assert after(stalls).why == "some tasks waited for memory 40.2 % of 10 s"
    swaps = [sample(at, 12, swap_used_bytes=at * 64 * MIB) for at in range(0, 65, 5)]
    assert after(swaps).why == "swap grows by 64 MiB/s with 12.0 GiB available"


# ── how slowly it is believed ────────────────────────────────────────────────────────────────────


def test_two_samples_raise_a_level_and_one_does_not() -> None:
    assert after(series(0, 50, 8)).level is NORMAL
    found = after(series(0, 50, 8, 8))
    assert (found.level, found.since, found.normal_since) == (WARNING, 10.0, None)
    assert after(series(0, 50, 8, 50, 8, 50, 8)).level is NORMAL
    assert after(series(0, 8, 4)).level is WARNING, "both are a warning at least"
    assert after(series(0, 8, 4, 4)).level is CRITICAL
    assert after(series(0, 4, 4)).level is CRITICAL


def test_a_desperate_sample_is_critical_at_once() -> None:
    half = LIMITS.critical_bytes / 2
    assert after([sample(0, available_bytes=int(half) - 1)]).level is CRITICAL
    assert after([sample(0, available_bytes=int(half) + 1)]).level is NORMAL


def test_a_level_falls_a_step_at_a_time() -> None:
    found = critical(100)
    seen = []
    for at in range(105, 250, 5):
        found = after([sample(at, 50)], found)
        seen.append((found.level, found.since, found.normal_since))
    assert seen[11] == (CRITICAL, 100, None)  # 55 s
    assert seen[12] == (WARNING, 165, None)
    assert seen[23] == (WARNING, 165, None)
    assert seen[24] == (NORMAL, 225, 225)
    assert found.why == "50.0 GiB of 128.0 GiB available"


def test_why_it_is_still_a_warning_is_told() -> None:
    found = after(series(105, *[50] * 13), critical(100))
    assert (found.level, found.why) == (WARNING, "50.0 GiB of 128.0 GiB available; Critical until now")


def test_it_must_be_well_below_for_the_whole_time() -> None:
    found = after(series(105, *[6] * 100), critical(100))
    assert found.level is CRITICAL, "6 GiB are not a quarter more than 5.25 GiB"
    found = after(series(605, *[7] * 13), found)
    assert found.level is WARNING
    assert after(series(670, *[12] * 100), found).level is WARNING, "12 GiB are not a quarter more than 10.5 GiB"
    interrupted = series(670, *[14] * 11, 12, *[14] * 11)
    assert after(interrupted, found).level is WARNING
    assert after([*interrupted, *series(785, 14, 14)], found).level is NORMAL


@pytest.mark.parametrize(("some", "falls"), [(9.0, False), (7.9, True)])
def test_stalls_must_be_well_below_too(some: float, falls: bool) -> None:
    found = after(sample(at, 50, some_avg10=20.0) for at in (0, 5))
    assert found.level is WARNING
    found = after((sample(at, 50, some_avg10=some) for at in range(10, 80, 5)), found)
    assert (found.level is NORMAL) is falls


@pytest.mark.parametrize("period", [1, 2, 3, 6, 11])
def test_flapping_changes_the_level_once(period: int) -> None:
    """Samples that alternate for an hour, faster than it is forgotten."""
    found, changes = Watch(), 0
    for index in range(720):
        was = found.level
        found = after([sample(index * 5.0, 4 if index // period % 2 else 50)], found)
        changes += found.level is not was
    assert changes == (0 if period == 1 else 1)
    assert found.level is (NORMAL if period == 1 else CRITICAL)


def test_noise_about_a_threshold_changes_the_level_once() -> None:
    chance = random.Random(104)
    found, changes = Watch(), 0
    for index in range(10_000):
        was = found.level
        found = after([sample(index * 5.0, chance.uniform(9.5, 11.5))], found)
        changes += found.level is not was
    assert changes == 1


def test_the_pace_can_be_another() -> None:
    pace = Pace(raise_samples=1, clear_s=1)
    found = watch(Watch(), sample(0, 4), LIMITS, pace)
    assert found.level is CRITICAL
    for at in (0.1, 1.1, 2.1):
        found = watch(found, sample(at, 50), LIMITS, pace)
    assert found.level is NORMAL


# ── nothing known, and time lost ─────────────────────────────────────────────────────────────────


def test_an_unknown_sample_changes_no_level() -> None:
    unknown = [sample(at, swap_used_bytes=at * GIB, problems=("no such file",)) for at in range(105, 1000, 5)]
    found = after(unknown, critical(100))
    assert replace(found, at=100, reading=critical(100).reading) == critical(100)
    assert found.reading == "nothing could be read; no such file"
    assert after(unknown).level is NORMAL
    assert after(unknown).normal_since is None


def test_unknown_samples_neither_count_nor_interrupt() -> None:
    assert after(series(0, 8, None, 8)).level is WARNING
    assert after(series(0, 8, None, None)).level is NORMAL
    calm = series(105, *[50, None] * 7)
    assert after(calm, critical(100)).level is WARNING


def test_a_level_that_nobody_has_confirmed_for_a_minute_is_not_in_force() -> None:
    found = after(series(105, *[None] * 20), critical(100))
    assert (in_force(found, 160), in_force(found, 160.5)) == (CRITICAL, None)
    assert in_force(Watch(), 0) is None
    again = after([sample(205, 4)], found)
    assert in_force(again, 205) is CRITICAL
    assert again.criticals == 1, "it has to be confirmed before anybody goes for it"


def test_samples_on_both_sides_of_a_sleep_are_not_consecutive() -> None:
    asleep = after([sample(7200, 8)], after(series(0, 50, 8)))
    assert (asleep.level, asleep.warnings) == (NORMAL, 1)
    assert after([sample(7205, 8)], asleep).level is WARNING


def test_a_sleep_is_no_calm() -> None:
    woken = after([sample(7200, 50)], after(series(105, 50, 50), critical(100)))
    assert (woken.level, woken.below_since) == (CRITICAL, 7200)
    assert after(series(7205, *[50] * 11), woken).level is CRITICAL
    assert after(series(7205, *[50] * 12), woken).level is WARNING
    calm = after([sample(7200, 50)], after(series(0, 50, 50)))
    assert (calm.level, calm.normal_since) == (NORMAL, 7200)


def test_swap_does_not_grow_over_a_sleep() -> None:
    before = after(sample(at, 12, swap_used_bytes=0) for at in range(0, 65, 5))
    woken = after([sample(7200, 12, swap_used_bytes=900 * GIB)], before)
    assert (woken.raw, len(woken.swap)) == (NORMAL, 1)


def test_an_old_sample_changes_nothing() -> None:
    found = critical(100)
    assert after([sample(100, 50), sample(99, 50), sample(-5, 0)], found) == found


# ── random samples ───────────────────────────────────────────────────────────────────────────────


def test_what_holds_for_random_samples() -> None:
    """The level is always explained by samples of the right kind, and calm always ends in Normal."""
    raised = lowered = 0
    for seed in range(cases(400)):
        chance, now, found = random.Random(seed), 0.0, Watch()
        known: list[tuple[float, Level]] = []
        for index in range(150):
            now += chance.choice([2, 5, 29, 31, 5000]) * (1 - chance.random()) if chance.random() < 0.1 else 5
            quiet = index // 25 % 2 == 1
            gib = None if chance.random() < 0.1 else chance.choice([8, 20, 20, 50] if quiet else [1, 4, 6, 8, 12, 50])
            kernel = None if quiet or gib is None else chance.choice([None, None, 0, 1, 1, 1, 2, 4, 7])
            was, found = found, after([sample(now, gib, kernel_level=kernel)], found)
            if gib is None:
                assert found.level is was.level
                continue
            known.append((now, found.raw))
            if found.level.rank > was.level.rank:
                raised += 1
                latest = known[-2:]
                together = len(latest) == 2 and latest[1][0] - latest[0][0] <= 30
                confirmed = together and min(each.rank for _, each in latest) >= found.level.rank
                assert confirmed or (found.level is CRITICAL and gib == 1)
            elif found.level.rank < was.level.rank:
                lowered += 1
                minute = [each for at, each in known if at >= now - 60]
                assert found.level.rank == was.level.rank - 1
                assert max(each.rank for each in minute) < was.level.rank
            assert (found.normal_since is None) is (found.level is not NORMAL)
        for index in range(30):
            found = after([sample(now + 5 + index * 5, 50)], found)
        assert found.level is NORMAL
    assert min(raised, lowered) > cases(400), (raised, lowered)
