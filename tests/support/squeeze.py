#!/usr/bin/env python3
"""Squeezes memory for real, and records what Linux says of it: how `tests/data/psi_squeeze.jsonl` was made.

A few processes in a memory cgroup of their own, with a small limit, read a file that is larger than that limit,
again and again: every page was thrown out just before it is wanted, so all of them wait for memory. The machine
itself has memory enough all the while, which is why this is safe, and why MemAvailable hardly moves. What does move
is the pressure: `/proc/pressure/memory` tells of the whole machine, whoever is stalled.

    sudo python tests/support/squeeze.py RECORDING.jsonl [--limit-mib 96] [--file-mib 160] [--workers 16]
                                 [--before-s 8] [--squeeze-s 35] [--after-s 45]

Needs root, Linux with pressure figures (CONFIG_PSI) and the memory controller of cgroups, version 1 or 2. The file is
made in the current directory, on a real disk: in a tmpfs nothing would be stalled. One line of JSON a second is
written: `phase`, `at_s` since the beginning, `pressure` (the file as it was read) and `meminfo` (its lines in kB that
matter). Everything it made is gone at its end, and it ends only processes that it started.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

MIB = 1024**2
PRESSURE = Path("/proc/pressure/memory")
KEPT = ("MemTotal", "MemFree", "MemAvailable", "Buffers", "Cached", "SwapTotal", "SwapFree")
PR_SET_PDEATHSIG = 1
PATIENCE_S = 10.0


class CannotSqueeze(Exception):
    """What is missing here; the message says it."""


def own_group() -> tuple[Path, str]:
    """(directory of the memory cgroup that we are in, name of the file of its limit). Raises CannotSqueeze."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise CannotSqueeze("this needs Linux and root")
    if not PRESSURE.exists():
        raise CannotSqueeze(f"there is no {PRESSURE}: the kernel has no pressure figures")
    of = {names: path for _, names, path in (line.split(":", 2) for line in _lines("/proc/self/cgroup"))}
    for mount in _lines("/proc/self/mounts"):
        _, where, kind, options = mount.split()[:4]
        controllers = Path(where, of.get("", "/").strip("/"), "cgroup.controllers")
        if kind == "cgroup" and "memory" in options.split(","):
            path = next((path for names, path in of.items() if "memory" in names.split(",")), "/")
            return Path(where, path.strip("/")), "memory.limit_in_bytes"
        if kind == "cgroup2" and controllers.exists() and "memory" in controllers.read_text().split():
            return controllers.parent, "memory.max"
    raise CannotSqueeze("no memory controller of cgroups is mounted")


def _lines(path: str) -> list[str]:
    return Path(path).read_text("utf-8").splitlines()


@contextlib.contextmanager
def group(limit_bytes: int) -> Iterator[Path]:
    """A cgroup of our own below the one we are in, with a limit; removed in the end, when all in it have ended."""
    parent, limit = own_group()
    mine = parent / f"squeeze-{os.getpid()}"
    try:
        if limit == "memory.max" and "memory" not in (parent / "cgroup.subtree_control").read_text().split():
            (parent / "cgroup.subtree_control").write_text("+memory")
        mine.mkdir()
    except OSError as error:
        raise CannotSqueeze(f"no cgroup can be made below {parent}: {error.strerror}") from None
    try:
        (mine / limit).write_text(str(limit_bytes))
        yield mine
    finally:
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                mine.rmdir()
                break
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)


@contextlib.contextmanager
def workers(count: int, mine: Path, data: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes in the group that thrash the file; ended in the end."""
    command = [sys.executable, str(Path(__file__).resolve()), "--thrash", str(data), "--join", str(mine)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        yield started
    finally:
        for each in started:
            each.kill()
        for each in started:
            each.wait()


def thrash(data: Path, join: Path) -> None:
    """Touches pages of the file for ever, inside the group; ends with whoever started it."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    (join / "cgroup.procs").write_text(str(os.getpid()))
    choose = random.Random(os.getpid())
    with data.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        count = len(pages) // mmap.PAGESIZE
        while True:
            pages[choose.randrange(count) * mmap.PAGESIZE]


@contextlib.contextmanager
def big_file(size_bytes: int) -> Iterator[Path]:
    """A file that lies on the disk and nowhere else: whoever reads it first is charged for its pages."""
    with tempfile.NamedTemporaryFile(dir=Path.cwd(), prefix=".squeeze-") as file:
        for _ in range(size_bytes // MIB):
            file.write(os.urandom(MIB))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        yield Path(file.name)


def reading(phase: str, at_s: float) -> dict[str, Any]:
    """One line of the recording."""
    meminfo = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text()))
    kept = {name: int(meminfo[name]) for name in KEPT if name in meminfo}
    return {"phase": phase, "at_s": round(at_s, 2), "pressure": PRESSURE.read_text(), "meminfo": kept}


def record(out: Path, limit_mib: int, file_mib: int, count: int, phases_s: Sequence[float]) -> tuple[float, float]:
    """Makes the recording: `phases_s` are the seconds before, of and after the squeeze. Returns the largest avg10s.

    Raises CannotSqueeze.
    """
    began, most = time.monotonic(), (0.0, 0.0)

    def watch(phase: str, lasts_s: float, lines: Any) -> None:
        nonlocal most
        end = time.monotonic() + lasts_s
        while time.monotonic() < end:
            now = reading(phase, time.monotonic() - began)
            lines.write(json.dumps(now, separators=(",", ":")) + "\n")
            some, full = (float(each) for each in re.findall(r"avg10=([\d.]+)", now["pressure"]))
            most = max(most[0], some), max(most[1], full)
            print(f"{now['at_s']:7.2f} s  {phase:<8} some {some:6.2f} %  full {full:6.2f} %", file=sys.stderr)
            time.sleep(1.0 - (time.monotonic() - began) % 1.0)

    with out.open("w", encoding="utf-8") as lines, group(limit_mib * MIB) as mine, big_file(file_mib * MIB) as data:
        began = time.monotonic()
        watch("before", phases_s[0], lines)
        with workers(count, mine, data) as started:
            watch("squeeze", phases_s[1], lines)
            ended = [each.returncode for each in started if each.poll() is not None]
        watch("after", phases_s[2], lines)
    if ended:
        raise CannotSqueeze(f"{len(ended)} of {count} processes ended by themselves: {ended}")
    return most


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Squeezes memory in a cgroup of its own; records what Linux says.")
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--limit-mib", type=int, default=96)
    parser.add_argument("--file-mib", type=int, default=160)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--before-s", type=float, default=8)
    parser.add_argument("--squeeze-s", type=float, default=35)
    parser.add_argument("--after-s", type=float, default=45)
    parser.add_argument("--thrash", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--join", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.thrash:
        thrash(options.thrash, options.join)
        return 0
    if not options.out:
        parser.error("say where the recording goes")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was made is taken away
    try:
        phases_s = (options.before_s, options.squeeze_s, options.after_s)
        some, full = record(options.out, options.limit_mib, options.file_mib, options.workers, phases_s)
    except CannotSqueeze as error:
        print(error, file=sys.stderr)
        return 1
    print(f"at most some avg10 {some} %, full avg10 {full} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
