"""Bounds of tests scale with this machine's pace; each process of tests has ports of its own."""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
import time

import pytest

from tests.support import pace, ports, system
from tests.support.pace import Pace


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the piece of work is to take, one for each measurement."""
    durations: list[float] = []
    monkeypatch.setattr(pace, "work_s", lambda: durations.pop(0))
    monkeypatch.setattr(pace, "FRESH_S", 0.0)
    monkeypatch.setattr(pace, "_pace", Pace())
    return durations


def test_a_bound_is_longer_where_work_takes_longer_and_never_shorter(work: list[float]) -> None:
    work += [pace.IDLE_S / 4, pace.IDLE_S * 3, pace.IDLE_S * 1000]
    assert [pace.patience(2.0) for _ in range(3)] == [2.0, pytest.approx(6.0), 2.0 * pace.MOST]


def test_the_pace_at_the_start_counts_although_the_load_has_gone(work: list[float]) -> None:
    work += [pace.IDLE_S * 3, pace.IDLE_S]
    assert [round(pace.slowness(), 3) for _ in range(2)] == [3, 3]


def test_a_bound_that_was_kept_measures_nothing(work: list[float]) -> None:
    assert pace.within(0.9, 1.0)
    work += [pace.IDLE_S * 2, pace.IDLE_S * 2]
    assert pace.within(1.9, 1.0) and not pace.within(2.1, 1.0)


def test_what_is_waited_for_has_longer_on_a_machine_that_turned_slow(work: list[float]) -> None:
    start = time.monotonic()
    assert system.eventually(lambda: True, 0.1)
    work += [pace.IDLE_S * 8]
    assert system.eventually(lambda: time.monotonic() - start > 0.4, 0.1)


def test_what_never_comes_fails_with_the_bound_it_had(work: list[float]) -> None:
    work += [pace.IDLE_S * 2]
    with pytest.raises(AssertionError, match=r"not within 0\.2 s: luck \(last: 0\)"):
        system.eventually(lambda: 0, 0.1, "luck")


def test_the_work_is_real() -> None:
    assert pace.work_s() > 0.01


def test_processes_of_tests_have_ports_apart_and_below_those_of_clients() -> None:
    mine = ports.Range()
    number = (mine.first - ports.LOWEST) // ports.SIZE
    code = f"from tests.support import ports; ports.random.sample = lambda *_: [{number}]; print(ports.Range().first)"
    command = [sys.executable, "-c", code]
    refused = subprocess.run(command, cwd=system.ROOT, capture_output=True, text=True)
    assert refused.returncode == 1 and "ranges of ports are in use" in refused.stderr
    mine.release()
    assert subprocess.run(command, cwd=system.ROOT, capture_output=True, text=True).stdout == f"{mine.first}\n"
    assert mine.first >= ports.LOWEST and ports.LOWEST + ports.SIZE * ports.RANGES <= 32768


def test_a_range_that_is_forgotten_is_released_without_a_warning() -> None:
    held = ports.Range()
    first = held.first
    del held
    gc.collect()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ports.random, "sample", lambda *_: [(first - ports.LOWEST) // ports.SIZE])
        again = ports.Range()
    assert again.first == first
    again.release()


def test_a_port_on_which_something_listens_is_passed_over() -> None:
    mine = ports.Range()
    with socket.create_server(("127.0.0.1", mine.first)):
        assert mine.free() == mine.first + 1
    mine.release()
