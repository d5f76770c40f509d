"""What a process and its children hold of the memory: real ones, that take a known amount."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from metal_supervisor import launch
from metal_supervisor.host import processes
from metal_supervisor.memory import machine_memory
from metal_supervisor.memory.machine_memory import Held, used_bytes
from tests.support.faults import fault

MIB = 1024**2
SIZE_MIB = 64
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

HOLDER = """
import mmap, os, sys
print("up", flush=True)
for line in sys.stdin:
    what, _, size = line.strip().partition(" ")
    if what == "touch":
        kept = bytearray(os.urandom(1)) * int(size)
    elif what == "map":
        file = open(size, "rb")
        kept = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        sum(kept[at] for at in range(0, len(kept), mmap.PAGESIZE))
    elif what == "fork" and os.fork() == 0:
        print("done", flush=True)
        os.read(int(size), 1)
        os._exit(0)
    if what != "fork":
        print("done", flush=True)
"""


@contextlib.contextmanager
def holder() -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """A process that holds what it is told to."""
    read, write = os.pipe()
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, pass_fds=(read,)
    ) as process:
        assert process.stdin and process.stdout
        assert process.stdout.readline() == "up\n"

        def tell(what: str, argument: object) -> Held:
            assert process.stdin and process.stdout
            process.stdin.write(f"{what} {read if argument is None else argument}\n")
            assert process.stdout.readline() == "done\n"
            return held(process.pid)

        try:
            yield process, tell
        finally:
            os.close(write)  # ends what was forked
            process.stdin.close()
            process.wait(30)
            os.close(read)


def held(pid: int) -> Held:
    found = used_bytes(pid)
    assert found is not None
    return found


@linux
def test_what_a_process_touched_is_charged_within_a_per_cent() -> None:
    with holder() as (process, tell):
        before, after = held(process.pid), tell("touch", SIZE_MIB * MIB)
    grown = after.footprint_bytes - before.footprint_bytes
    assert grown == pytest.approx(SIZE_MIB * MIB, rel=0.01)
    assert after.charged_bytes == after.footprint_bytes <= after.rss_bytes


@linux
def test_a_mapped_file_is_charged_and_once_only(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(os.urandom(MIB) * SIZE_MIB)
    with holder() as (process, tell):
        before, after = held(process.pid), tell("map", tmp_path / "model")
        told = used_bytes(process.pid, mapped_bytes=SIZE_MIB * MIB)
    assert after.charged_bytes - before.charged_bytes == pytest.approx(SIZE_MIB * MIB, rel=0.01)
    assert told is not None and told.charged_bytes == pytest.approx(after.charged_bytes, rel=0.01)


@linux
def test_children_are_charged_and_what_they_share_but_once() -> None:
    with holder() as (_, tell):
        alone = tell("touch", SIZE_MIB * MIB)
        both = tell("fork", None)
    assert both.footprint_bytes - alone.footprint_bytes < 6 * MIB
    assert both.rss_bytes - alone.rss_bytes > SIZE_MIB * MIB


@linux
def test_a_child_of_its_own_is_charged() -> None:
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLDER!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdin and process.stdout and process.stdout.readline() == "up\n"
        before = held(process.pid)
        process.stdin.write(f"touch {SIZE_MIB * MIB}\n")
        assert process.stdout.readline() == "done\n"
        grown = held(process.pid).charged_bytes - before.charged_bytes
        process.stdin.close()
        process.wait(30)
    assert grown == pytest.approx(SIZE_MIB * MIB, rel=0.01)


@linux
def test_one_that_is_gone_holds_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert used_bytes(process.pid) is None, "a zombie"
    assert used_bytes(process.pid) is None
    assert used_bytes(0) is None and used_bytes(-1) is None and used_bytes(1 << 30) is None


def test_another_program_by_the_same_number_is_not_charged_for() -> None:
    started = launch.start_time(os.getpid())
    assert used_bytes(os.getpid(), started=started) is not None
    assert used_bytes(os.getpid(), started="ticks 1") is None


def test_one_that_is_replaced_while_it_is_read_is_not_charged_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["ticks 1", "ticks 2"])
    monkeypatch.setattr(processes, "descendants", lambda pid: [])
    monkeypatch.setattr(launch, "start_time", lambda pid: next(answers))
    assert used_bytes(os.getpid(), started="ticks 1") is None


@linux
def test_a_child_that_is_replaced_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with holder() as (other, tell):
        tell("touch", SIZE_MIB * MIB)
        monkeypatch.setattr(processes, "descendants", lambda pid: [(other.pid, "ticks 1"), (1 << 30, "ticks 2")])
        found, mine = held(os.getpid()), psutil.Process().memory_info().rss
    assert found.rss_bytes == pytest.approx(mine, abs=8 * MIB)


def test_a_process_that_ends_while_its_children_are_looked_for_has_none() -> None:
    for _ in range(300):
        pid = os.posix_spawn("/bin/sh", ["sh", "-c", ":"], {})
        waits = threading.Thread(target=os.waitpid, args=(pid, 0))
        waits.start()
        while waits.is_alive():
            assert processes.children(pid) == []
        waits.join()


@linux
def test_where_pss_is_refused_the_resident_size_counts(tmp_path: Path) -> None:
    with holder() as (process, tell):
        tell("touch", SIZE_MIB * MIB)
        real = held(process.pid)
        (tmp_path / str(process.pid)).mkdir()
        for text in (None, "", "Rss: 12 kB\n", "Pss: 1"):
            if text is not None:
                (tmp_path / str(process.pid) / "smaps_rollup").write_text(text)
            found = used_bytes(process.pid, procfs=tmp_path)
            assert found is not None and found.charged_bytes == found.footprint_bytes == found.rss_bytes
            assert found.rss_bytes == pytest.approx(real.rss_bytes, rel=0.02)


@fault(
    "M105",
    "psutil raises, whatever it is asked",
    happens="an engine is measured without it, or counts as estimated",
    sees="nothing",
    bound="no exception, no other number",
)
@linux
@pytest.mark.parametrize(
    "error",
    [
        SystemError("x"),
        RuntimeError("host_statistics64"),
        OSError(5, "x"),
        psutil.AccessDenied(1),
        KeyError(1),
        psutil.ZombieProcess(1),
        psutil.NoSuchProcess(1),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_psutil_raises_stays_inside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception) -> None:
    def fail(*_: object) -> None:
        raise error

    for name in ("Process", "virtual_memory"):
        monkeypatch.setattr(psutil, name, fail)
    assert processes.resident_bytes(os.getpid()) is None
    assert machine_memory.total_bytes() == 0
    assert used_bytes(os.getpid()) is not None
    assert used_bytes(os.getpid(), procfs=tmp_path) is None
