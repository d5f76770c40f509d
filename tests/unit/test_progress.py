"""How far a download is: a rate that can be read, and a time that is left."""

from __future__ import annotations

import pytest

from metal_supervisor.spec.progress import DownloadProgress, duration

GB = 10**9


def metered(total: int, steps: list[tuple[float, int]], here: int = 0) -> DownloadProgress:
    """A meter that began at 100 s with `here` bytes; steps: (seconds since then, bytes more)."""
    meter = DownloadProgress(total)
    meter.got(here)
    meter.begin(100.0)
    for at, size in steps:
        meter.got(size)
        meter.look(100.0 + at)
    return meter


def test_nothing_is_promised_before_anything_came() -> None:
    meter = metered(10 * GB, [])
    assert (str(meter), meter.left_s, meter.rate) == ("0 % of 9.3 GiB", None, 0.0)


def test_a_steady_line_is_read_off_at_once() -> None:
    meter = metered(10 * GB, [(2.0, GB // 10), (4.0, GB // 10)])
    assert meter.rate == pytest.approx(50e6)
    assert str(meter) == "2 % of 9.3 GiB, 50.0 MB/s, 3 min left"


def test_what_was_here_before_came_at_no_rate() -> None:
    meter = metered(10 * GB, [(1.0, 200_000_000)], here=5 * GB)
    assert str(meter) == "52 % of 9.3 GiB, 200 MB/s, 24 s left"


def test_a_line_that_stops_for_a_moment_does_not_jump() -> None:
    meter = metered(10 * GB, [(2.0, GB // 10), (3.0, 0)])
    assert meter.rate == pytest.approx(50e6 * 14 / 15)
    meter.look(103.0 + 60)
    assert meter.rate == 0 and meter.left_s is None and str(meter) == "1 % of 9.3 GiB"


def test_a_clock_that_stands_still_and_bytes_that_are_taken_back_do_no_harm() -> None:
    meter = metered(GB, [(0.0, 1000), (1.0, 1000)])
    assert meter.rate == pytest.approx(2000)
    meter.got(-2000)
    meter.look(102.0)
    assert meter.got_bytes == 0 and 0 < meter.rate < 2000


def test_a_size_that_nobody_knows_is_not_made_up() -> None:
    meter = metered(0, [(2.0, 3 * GB)])
    assert (str(meter), meter.left_s) == ("2.8 GiB, 1500 MB/s", None)
    assert str(DownloadProgress()) == "0 MiB"


def test_no_more_than_all_is_said_to_be_here() -> None:
    meter = metered(GB, [(1.0, 2 * GB)])
    assert str(meter).startswith("100 %") and meter.left_s == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.4, "0 s"),
        (89, "89 s"),
        (89.7, "90 s"),
        (90, "2 min"),
        (719, "12 min"),
        (5369, "89 min"),
        (5400, "1 h 30 min"),
        (7200, "2 h 0 min"),
        (11100, "3 h 5 min"),
        (360000, "100 h 0 min"),
    ],
)
def test_a_time_is_said_as_people_say_it(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_figures_that_another_counts_give_the_same_rate_and_a_fresh_start_none() -> None:
    meter = DownloadProgress()
    for at, got in ((0.0, 0), (60.0, GB), (62.0, GB + GB // 10)):  # what came before the second look is not counted
        meter.update(got, 10 * GB, at)
    assert meter.rate == pytest.approx(50e6) and meter.total_bytes == 10 * GB
    meter.update(GB, 10 * GB, 63.0)
    assert (meter.got_bytes, meter.rate) == (GB, 0.0)
