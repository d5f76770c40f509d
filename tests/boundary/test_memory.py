"""Memory of this machine: really read here, and recorded elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from metal_supervisor.host import machine as host
from metal_supervisor.memory import machine_memory
from metal_supervisor.memory.machine_memory import sample
from tests.support import psi

MIB = 1024**2
GIB = 1024**3
ROOT = Path(__file__).resolve().parents[2]
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
STALL = "some avg10=12.34 avg60=5.60 avg300=1.00 total=123456\nfull avg10=10.01 avg60=2.00 avg300=0.50 total=65432\n"
MEMINFO = (
    "MemTotal:       24684084 kB\nMemFree:          689832 kB\nMemAvailable:    4221412 kB\nBuffers:  14836 kB\n"
    "Active(anon):       1536 kB\nSwapTotal:       2097148 kB\nSwapFree:        1048572 kB\nHugePages_Total:       0\n"
)


def machine(base: Path, meminfo: str = MEMINFO, stall: str | None = STALL) -> Path:
    """A /proc as it was recorded."""
    (base / "proc" / "pressure").mkdir(parents=True)
    (base / "proc" / "meminfo").write_text(meminfo)
    if stall is not None:
        (base / "proc" / "pressure" / "memory").write_text(stall)
    return base / "proc"


# --- the machine


@linux
def test_this_machine_is_read_whole() -> None:
    told = int(re.findall(r"MemTotal: +(\d+)", Path("/proc/meminfo").read_text())[0]) * 1024
    assert machine_memory.total_bytes() == host.memory_bytes() == told
    found = sample()
    assert found.problems == ()
    assert found.available_bytes is not None and 0 < found.available_bytes <= found.total_bytes <= told
    assert found.swap_used_bytes is not None and found.kernel_level is None
    assert (found.some_avg10 is not None) == Path("/proc/pressure/memory").exists()


def test_a_recorded_machine(tmp_path: Path) -> None:
    found = sample(machine(tmp_path))
    assert (found.total_bytes, found.available_bytes) == (24684084 * 1024, 4221412 * 1024)
    assert found.swap_used_bytes == (2097148 - 1048572) * 1024
    assert (found.some_avg10, found.full_avg10, found.problems) == (12.34, 10.01, ())


def test_a_kernel_without_pressure_figures_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = sample(machine(tmp_path, stall=None))
    assert (found.some_avg10, found.full_avg10, found.problems) == (None, None, ())
    switched_off(monkeypatch, 95)  # EOPNOTSUPP: psi=0 at boot
    assert sample(tmp_path / "proc").problems == ()
    switched_off(monkeypatch, 5)
    found = sample(tmp_path / "proc")
    assert found.some_avg10 is None and "Input/output error" in found.problems[0]


def switched_off(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    real = Path.read_bytes

    def read(path: Path) -> bytes:
        if path.parent.name == "pressure":
            raise OSError(number, os.strerror(number), str(path))
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read)


def test_half_of_a_pressure_file_is_no_figure(tmp_path: Path) -> None:
    proc = machine(tmp_path)
    for length in range(len(STALL)):
        (proc / "pressure" / "memory").write_text(STALL[:length])
        found = sample(proc)
        assert (found.some_avg10, found.full_avg10) == (None, None), length
        assert found.problems == ("memory: not what the kernel writes",)
        assert found.available_bytes == 4221412 * 1024


@pytest.mark.parametrize("stall", ["some avg10=nan", STALL.replace("12.34", "112.34"), "\0" * 100, STALL + STALL])
def test_no_such_pressure_is_believed(tmp_path: Path, stall: str) -> None:
    found = sample(machine(tmp_path, stall=stall))
    assert (found.some_avg10, found.full_avg10) == (None, None) and found.problems


def test_half_of_meminfo_gives_whole_numbers_or_none(tmp_path: Path) -> None:
    proc = machine(tmp_path)
    whole = sample(proc)
    for length in range(len(MEMINFO)):
        (proc / "meminfo").write_text(MEMINFO[:length])
        found = sample(proc)
        assert found.total_bytes in (0, whole.total_bytes)
        assert found.available_bytes in (None, whole.available_bytes)
        assert found.swap_used_bytes in (None, whole.swap_used_bytes)
        assert found.some_avg10 == 12.34
        assert found.problems or found.swap_used_bytes is not None


def test_nothing_to_read_is_a_sample_without_readings(tmp_path: Path) -> None:
    found = sample(tmp_path / "proc")
    assert (found.total_bytes, found.available_bytes, found.swap_used_bytes, found.some_avg10) == (0, None, None, None)
    assert len(found.problems) == 1 and "meminfo" in found.problems[0]


def test_psutil_asks_for_host_memory_nowhere_else() -> None:
    """On macOS 27 these raise, and the last can hang."""
    calls = re.compile(r"\.(virtual_memory|swap_memory|memory_full_info|memory_info_ex)\(")
    paths = [path for part in ("metal_supervisor", "tools", "tests/support") for path in (ROOT / part).rglob("*.py")]
    assert [path.name for path in paths if calls.search(path.read_text("utf-8"))] == ["machine.py"]


# --- a squeeze


@linux
def test_a_recorded_squeeze_goes_up_and_comes_back(tmp_path: Path) -> None:
    found = [(step.phase, sample(tmp_path)) for step in psi.Replay(tmp_path)]
    assert not any(each.problems for _, each in found)
    by = {phase: [each for name, each in found if name == phase] for phase in ("before", "squeeze", "after")}
    assert max(each.some_avg10 or 0 for each in by["before"]) < 1
    assert max(each.some_avg10 or 0 for each in by["squeeze"]) >= 10
    assert max(each.full_avg10 or 0 for each in by["squeeze"]) >= 10
    assert (by["after"][-1].some_avg10 or 0) < 2 and (by["after"][-1].full_avg10 or 0) < 2
    assert len(found) >= 60


def test_the_replay_keeps_the_time_of_the_recording_and_can_make_up_memory(tmp_path: Path) -> None:
    replay = psi.Replay(tmp_path, made_up_available_kib=lambda step: 1024 if step.phase == "squeeze" else 2048)
    replay.play(speed=1000)
    assert sample(tmp_path).available_bytes == 2048 * 1024
    replay.put(next(step for step in replay.steps if step.phase == "squeeze"))
    assert sample(tmp_path).available_bytes == 1024 * 1024


@pytest.mark.skipif(not os.environ.get("METAL_SQUEEZE"), reason="METAL_SQUEEZE=1: needs root and stalls the machine")
def test_a_real_squeeze(tmp_path: Path) -> None:
    out = tmp_path / "squeeze.jsonl"
    command = [sys.executable, ROOT / "tests/support/squeeze.py", out, "--before-s", "3", "--squeeze-s", "25"]
    done = subprocess.run([*command, "--after-s", "30"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = [sample(tmp_path / "proc") for _ in psi.Replay(tmp_path / "proc", out)]
    assert max(each.some_avg10 or 0 for each in found) >= 10
    assert max(each.full_avg10 or 0 for each in found) >= 10
    assert list(tmp_path.glob(".squeeze-*")) == []
