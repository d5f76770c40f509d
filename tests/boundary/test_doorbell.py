"""Doorbells over a real FIFO: a ring wakes, and nobody ever waits for a listener."""

from __future__ import annotations

import os
import select
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor import launch
from metal_supervisor.state import doorbell
from metal_supervisor.state.doorbell import LATER_S, Doorbell, ring

LONG_S = 10.0


@pytest.fixture
def bell(tmp_path: Path) -> Iterator[Doorbell]:
    made = Doorbell(tmp_path, "controller")
    yield made
    os.close(made._descriptor)


def woken(bell: Doorbell, timeout_s: float = LONG_S) -> bool:
    """Whether it woke well before the time was up."""
    started = time.monotonic()
    bell.wait(timeout_s)
    return time.monotonic() - started < timeout_s * 0.8


def test_without_a_ring_it_sleeps_for_the_whole_time(bell: Doorbell) -> None:
    assert not woken(bell, 0.1)


def test_a_ring_before_the_wait_is_not_lost(bell: Doorbell) -> None:
    bell.ring()
    assert woken(bell)


def test_a_thread_wakes_it(bell: Doorbell) -> None:
    timer = threading.Timer(0.05, bell.ring)
    timer.start()
    assert woken(bell)
    timer.join()


def test_another_process_wakes_it(bell: Doorbell, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from metal_supervisor.state.doorbell import ring\n"
        "ring(Path(sys.argv[1]), 'controller')"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) as other:
        assert woken(bell)
    assert other.returncode == 0


def test_a_signal_handler_wakes_it(bell: Doorbell) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: bell.ring())
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        assert woken(bell)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def test_many_rings_wake_it_once(bell: Doorbell, tmp_path: Path) -> None:
    for _ in range(100):
        ring(tmp_path, "controller")
    assert woken(bell)
    assert not woken(bell, 0.1)


def test_news_that_can_wait_wakes_it_once_and_later(bell: Doorbell, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    look = select.select

    def wait(readers: list[Any], *others: Any) -> Any:
        slept.append(others[-1])
        return look(readers, [], [], 0)

    monkeypatch.setattr(doorbell.select, "select", wait)
    for _ in range(3):
        bell.ring_later()
    bell.wait(LONG_S)
    assert len(slept) == 2 and slept[0] == pytest.approx(LONG_S, abs=1) and 0 < slept[1] <= LATER_S


def test_news_that_can_wait_delays_none_that_cannot(bell: Doorbell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell, "LATER_S", LONG_S)
    bell.ring_later()
    bell.ring()
    assert woken(bell)
    bell.ring_later()
    timer = threading.Timer(0.05, bell.ring)
    timer.start()
    assert woken(bell)
    timer.join()


def test_news_for_those_in_a_hurry_wakes_them_at_once(
    bell: Doorbell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorbell, "LATER_S", 0.1)
    ring(tmp_path, "controller", launch.SOON)
    started = time.monotonic()
    bell.wait(LONG_S)
    assert 0.1 <= time.monotonic() - started < LONG_S * 0.8
    monkeypatch.setattr(doorbell, "LATER_S", LONG_S)
    ring(tmp_path, "controller", launch.SOON)
    started = time.monotonic()
    bell.wait(LONG_S, hurried=True)
    assert time.monotonic() - started < LONG_S * 0.8


@pytest.mark.parametrize("sound", [launch.NOW, launch.LATER])
def test_a_full_bell_blocks_nobody_and_still_rings(
    bell: Doorbell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sound: bytes
) -> None:
    monkeypatch.setattr(doorbell, "LATER_S", LONG_S)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(bell._descriptor, sound * 4096)
    ring(tmp_path, "controller")
    bell.ring()
    assert woken(bell)
    assert not woken(bell, 0.1)


def test_a_ring_that_nobody_hears_is_lost_at_once(tmp_path: Path) -> None:
    ring(tmp_path, "nobody")
    ring(tmp_path / "missing", "nobody")
    assert list(tmp_path.iterdir()) == []
    os.mkfifo(tmp_path / "gone.bell")
    ring(tmp_path, "gone")


def test_a_ringer_that_leaves_does_not_keep_it_awake(bell: Doorbell, tmp_path: Path) -> None:
    ring(tmp_path, "controller")
    bell.wait(0)
    assert not woken(bell, 0.1)


def test_ringing_leaks_no_descriptor(bell: Doorbell, tmp_path: Path) -> None:
    before = len(os.listdir("/dev/fd"))
    for _ in range(500):
        ring(tmp_path, "controller")
        ring(tmp_path, "nobody")
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.parametrize("kind", ["file", "link", "fifo"])
def test_what_lies_at_its_place_becomes_a_private_bell(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "sidecar.bell"
    if kind == "file":
        path.write_text("stale")
    elif kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        os.mkfifo(path, 0o600)
    bell = Doorbell(tmp_path, "sidecar")
    try:
        assert stat.S_ISFIFO(path.lstat().st_mode)
        assert stat.S_IMODE(path.lstat().st_mode) == 0o600
        ring(tmp_path, "sidecar")
        assert woken(bell)
    finally:
        os.close(bell._descriptor)


def test_a_ring_never_writes_into_an_ordinary_file(tmp_path: Path) -> None:
    path = tmp_path / "sidecar.bell"
    path.write_text("not a bell")
    ring(tmp_path, "sidecar")
    assert path.read_text() == "not a bell"
