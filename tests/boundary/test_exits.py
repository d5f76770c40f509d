"""The exit watch over real processes."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from metal_supervisor.host.exit_watch import ExitWatch, _Kqueue
from tests.support import kqueue
from tests.support.pace import within
from tests.support.system import eventually

WITHIN_S = 30.0


class Seen:
    """An exit watch and what it said."""

    def __init__(self, waiter: _Kqueue | None) -> None:
        self.ended: queue.Queue[int] = queue.Queue()
        self.watch = ExitWatch(self.ended.put, waiter)

    def next(self) -> int:
        return self.ended.get(timeout=WITHIN_S)

    def silent(self, for_s: float = 0.1) -> bool:
        try:
            self.ended.get(timeout=for_s)
        except queue.Empty:
            return True
        return False


OURS = pytest.mark.parametrize("seen", ["own"], indirect=True)


@pytest.fixture(params=["own"] if sys.platform == "darwin" else ["own", "kqueue"])
def seen(request: pytest.FixtureRequest) -> Iterator[Seen]:
    """By this system's own means, and by what a Mac has."""
    made = Seen(_Kqueue(kqueue) if request.param == "kqueue" else None)
    yield made
    made.watch.watch_only([])


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_a_living_process_is_not_reported_and_its_death_is_at_once(
    seen: Seen, sleeper: subprocess.Popen[bytes]
) -> None:
    seen.watch.watch_only([sleeper.pid])
    assert seen.silent()
    sleeper.kill()
    started = time.monotonic()
    assert seen.next() == sleeper.pid
    assert within(time.monotonic() - started, 1.0)
    assert seen.silent(), "one death, said twice"


def test_a_process_that_is_gone_already_counts_as_ended(seen: Seen) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    seen.watch.watch_only([process.pid])
    assert seen.next() == process.pid


def test_a_zombie_counts_as_ended(seen: Seen) -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    seen.watch.watch_only([process.pid])
    assert seen.next() == process.pid
    process.wait()


def test_a_process_that_is_not_our_child_is_watched_too(seen: Seen) -> None:
    code = "import subprocess; p = subprocess.Popen(['sleep', '60'], stdout=-3, stderr=-3); print(p.pid)"
    pid = int(subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, check=True).stdout)
    seen.watch.watch_only([pid])
    assert seen.silent()
    os.kill(pid, 9)
    assert seen.next() == pid


def test_what_is_no_longer_watched_is_not_reported(seen: Seen, sleeper: subprocess.Popen[bytes]) -> None:
    other = subprocess.Popen(["sleep", "60"])
    seen.watch.watch_only([sleeper.pid, other.pid])
    seen.watch.watch_only([sleeper.pid])
    other.kill()
    other.wait()
    assert seen.silent()
    sleeper.kill()
    assert seen.next() == sleeper.pid


def test_no_process_at_all_is_fine(seen: Seen) -> None:
    seen.watch.watch_only([])
    seen.watch.watch_only([0, -1])
    assert seen.silent()


def test_many_deaths_at_once_are_all_reported_once(seen: Seen) -> None:
    processes = [subprocess.Popen(["sleep", "60"]) for _ in range(40)]
    seen.watch.watch_only([process.pid for process in processes])
    for process in processes:
        process.kill()
    assert sorted(seen.next() for _ in processes) == sorted(process.pid for process in processes)
    assert seen.silent()
    for process in processes:
        process.wait()


def test_it_goes_on_after_the_listener_was_slow(seen: Seen, sleeper: subprocess.Popen[bytes]) -> None:
    for _ in range(3):
        process = subprocess.Popen(["true"])
        seen.watch.watch_only([sleeper.pid, process.pid])
        assert seen.next() == process.pid
        process.wait()
    seen.watch.watch_only([sleeper.pid])
    assert seen.silent()


@OURS
def test_thousands_of_changes_leak_no_descriptor_and_invent_no_death(
    seen: Seen, sleeper: subprocess.Popen[bytes]
) -> None:
    dead = subprocess.Popen(["true"])
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
    before = len(os.listdir("/dev/fd"))
    invented = 0
    for _ in range(3000):
        seen.watch.watch_only([dead.pid])
        seen.watch.watch_only([sleeper.pid])
    seen.watch.watch_only([])
    assert len(os.listdir("/dev/fd")) == before
    while not seen.ended.empty():
        invented += seen.ended.get() == sleeper.pid
    assert not invented, f"a living process was reported dead {invented} times"
    assert any(thread.name == "exits" for thread in threading.enumerate())
    seen.watch.watch_only([dead.pid])
    eventually(lambda: not seen.silent(1), WITHIN_S, "the watch to be still alive")
    dead.wait()


@OURS
def test_a_pid_that_cannot_be_watched_does_not_keep_the_others_from_it(
    seen: Seen, sleeper: subprocess.Popen[bytes]
) -> None:
    """A thread's number is not a process's; a stale note may hold one."""
    if sys.platform != "linux":
        pytest.skip("threads have no numbers of this kind")
    hold = threading.Event()
    thread = threading.Thread(target=hold.wait)
    thread.start()
    assert thread.native_id
    try:
        seen.watch.watch_only([thread.native_id, sleeper.pid])
    finally:
        hold.set()
        thread.join()
    sleeper.kill()
    assert sleeper.pid in {seen.next(), seen.next()}
