"""Memory of this machine, of containers: really read here, and recorded elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from metal_supervisor.host import cgroups
from metal_supervisor.host import machine as host
from metal_supervisor.memory import machine_memory
from metal_supervisor.memory.machine_memory import sample
from tests.support import psi

MIB, GIB = 1024**2, 1024**3
ROOT = Path(__file__).resolve().parents[2]
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
STALL = "some avg10=12.34 avg60=5.60 avg300=1.00 total=123456\nfull avg10=10.01 avg60=2.00 avg300=0.50 total=65432\n"
MEMINFO = (
    "MemTotal:       24684084 kB\nMemFree:          689832 kB\nMemAvailable:    4221412 kB\nBuffers:  14836 kB\n"
    "Active(anon):       1536 kB\nSwapTotal:       2097148 kB\nSwapFree:        1048572 kB\nHugePages_Total:       0\n"
)


def machine(base: Path, meminfo: str = MEMINFO, stall: str | None = STALL, cgroup: str = "0::/\n") -> Path:
    """A /proc as it was recorded."""
    (base / "proc" / "pressure").mkdir(parents=True)
    (base / "proc" / "self").mkdir()
    (base / "proc" / "meminfo").write_text(meminfo)
    (base / "proc" / "self" / "cgroup").write_text(cgroup)
    if stall is not None:
        (base / "proc" / "pressure" / "memory").write_text(stall)
    return base / "proc"


def group(path: Path, **files: object) -> Path:
    """A directory of a cgroup tree: `memory_max=1` becomes memory.max."""
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name.replace("_", ".", 1)).write_text(f"{text}\n" if isinstance(text, int) else str(text))
    return path


def v2(path: Path, limit: int, current: int = 0, files: int = 0, **more: object) -> Path:
    stat = f"anon 1\nfile {files}\ninactive_file {files}\nactive_file 0\nslab_reclaimable 0\n"
    return group(path, memory_max=limit, memory_current=current, memory_stat=stat, **more)


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
    found = sample(machine(tmp_path), tmp_path / "none")
    assert (found.total_bytes, found.available_bytes) == (24684084 * 1024, 4221412 * 1024)
    assert found.swap_used_bytes == (2097148 - 1048572) * 1024
    assert (found.some_avg10, found.full_avg10, found.problems) == (12.34, 10.01, ())


def test_a_kernel_without_pressure_figures_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = sample(machine(tmp_path, stall=None), tmp_path)
    assert (found.some_avg10, found.full_avg10, found.problems) == (None, None, ())
    switched_off(monkeypatch, 95)  # EOPNOTSUPP: psi=0 at boot
    assert sample(tmp_path / "proc", tmp_path).problems == ()
    switched_off(monkeypatch, 5)
    found = sample(tmp_path / "proc", tmp_path)
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
        found = sample(proc, tmp_path)
        assert (found.some_avg10, found.full_avg10) == (None, None), length
        assert found.problems == ("memory: not what the kernel writes",)
        assert found.available_bytes == 4221412 * 1024


@pytest.mark.parametrize("stall", ["some avg10=nan", STALL.replace("12.34", "112.34"), "\0" * 100, STALL + STALL])
def test_no_such_pressure_is_believed(tmp_path: Path, stall: str) -> None:
    found = sample(machine(tmp_path, stall=stall), tmp_path)
    assert (found.some_avg10, found.full_avg10) == (None, None) and found.problems


def test_half_of_meminfo_gives_whole_numbers_or_none(tmp_path: Path) -> None:
    proc = machine(tmp_path)
    whole = sample(proc, tmp_path)
    for length in range(len(MEMINFO)):
        (proc / "meminfo").write_text(MEMINFO[:length])
        found = sample(proc, tmp_path)
        assert found.total_bytes in (0, whole.total_bytes)
        assert found.available_bytes in (None, whole.available_bytes)
        assert found.swap_used_bytes in (None, whole.swap_used_bytes)
        assert found.some_avg10 == 12.34
        assert found.problems or found.swap_used_bytes is not None


def test_nothing_to_read_is_a_sample_without_readings(tmp_path: Path) -> None:
    found = sample(tmp_path / "proc", tmp_path / "cgroup")
    assert (found.total_bytes, found.available_bytes, found.swap_used_bytes, found.some_avg10) == (0, None, None, None)
    assert len(found.problems) == 1 and "meminfo" in found.problems[0]


def test_psutil_asks_for_host_memory_nowhere_else() -> None:
    """On macOS 27 these raise, and the last can hang."""
    calls = re.compile(r"\.(virtual_memory|swap_memory|memory_full_info|memory_info_ex)\(")
    paths = [path for part in ("metal_supervisor", "tools", "tests/support") for path in (ROOT / part).rglob("*.py")]
    assert [path.name for path in paths if calls.search(path.read_text("utf-8"))] == ["machine.py"]


# --- containers


def limit(base: Path, cgroup: str) -> int | None:
    return cgroups.container_bytes(machine(base, cgroup=cgroup), base / "cg")


def test_the_least_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    group(tmp_path / "cg" / "pods" / "a" / "b", memory_max="max\n")
    group(tmp_path / "cg" / "pods" / "a", memory_max=3 * GIB)
    group(tmp_path / "cg" / "pods", memory_max=4 * GIB)
    group(tmp_path / "cg" / "other", memory_max=1 * GIB)
    assert limit(tmp_path, "0::/pods/a/b\n") == 3 * GIB


@pytest.mark.parametrize("path", ["/", "/pods/on/the/host", "/../../escaped"])
def test_a_container_may_see_its_group_as_the_root(tmp_path: Path, path: str) -> None:
    group(tmp_path / "cg", memory_max=2 * GIB)
    assert limit(tmp_path, f"0::{path}\n") == 2 * GIB


@pytest.mark.parametrize("text", ["max\n", "", "0\n", "9223372036854771712\n", "-1\n", "\xff"])
def test_no_limit(tmp_path: Path, text: str) -> None:
    group(tmp_path / "cg", memory_max=text)
    assert limit(tmp_path, "0::/\n") is None


@pytest.mark.parametrize(
    "text",
    ["", "0", "nonsense\n", "\0", "0:::::\n", "0::/\0\n4:memory:/\0\n", f"0::/{'x' * 300}\n4:memory:/{'y' * 5000}\n"],
)
def test_a_strange_list_of_cgroups_is_no_limit(tmp_path: Path, text: str) -> None:
    assert limit(tmp_path, text) is None


def test_a_sample_in_a_container_is_of_the_container(tmp_path: Path) -> None:
    own = STALL.replace("12.34", "50.00")
    v2(tmp_path / "cg" / "a", GIB, 900 * MIB, 300 * MIB, memory_pressure=own, **{"memory_swap.current": 7})
    found = sample(machine(tmp_path, cgroup="0::/a\n"), tmp_path / "cg")
    assert (found.total_bytes, found.available_bytes) == (GIB, (1024 - 900 + 300) * MIB)
    assert (found.some_avg10, found.swap_used_bytes, found.problems) == (50.0, 7, ())


def test_a_container_has_no_more_left_than_its_machine(tmp_path: Path) -> None:
    v2(tmp_path / "cg", 8 * GIB)
    found = sample(machine(tmp_path), tmp_path / "cg")
    assert (found.total_bytes, found.available_bytes) == (8 * GIB, 4221412 * 1024)
    assert found.some_avg10 == 12.34, "without a figure of its own, that of the machine"


def test_a_limit_above_the_machine_is_none(tmp_path: Path) -> None:
    v2(tmp_path / "cg", 64 * GIB)
    assert sample(machine(tmp_path), tmp_path / "cg").total_bytes == 24684084 * 1024


@pytest.mark.parametrize("lost", ["memory.current", "memory.stat"])
@pytest.mark.parametrize("text", [None, "", "half", "\xff"])
def test_a_container_that_cannot_be_read_is_not_taken_for_its_machine(
    tmp_path: Path, lost: str, text: str | None
) -> None:
    path = v2(tmp_path / "cg", GIB, 500 * MIB) / lost
    path.unlink()
    if text is not None:
        path.write_text(text, "latin-1")
    found = sample(machine(tmp_path), tmp_path / "cg")
    assert (found.total_bytes, found.available_bytes) == (GIB, None)
    assert len(found.problems) == 1 and found.some_avg10 == 12.34


# --- a squeeze


@linux
def test_a_recorded_squeeze_goes_up_and_comes_back(tmp_path: Path) -> None:
    found = [(step.phase, sample(tmp_path, tmp_path)) for step in psi.Replay(tmp_path)]
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
    assert sample(tmp_path, tmp_path).available_bytes == 2048 * 1024
    replay.put(next(step for step in replay.steps if step.phase == "squeeze"))
    assert sample(tmp_path, tmp_path).available_bytes == 1024 * 1024


@pytest.mark.skipif(not os.environ.get("METAL_SQUEEZE"), reason="METAL_SQUEEZE=1: needs root and stalls the machine")
def test_a_real_squeeze(tmp_path: Path) -> None:
    out = tmp_path / "squeeze.jsonl"
    command = [sys.executable, ROOT / "tests/support/squeeze.py", out, "--before-s", "3", "--squeeze-s", "25"]
    done = subprocess.run([*command, "--after-s", "30"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = [sample(tmp_path / "proc", tmp_path) for _ in psi.Replay(tmp_path / "proc", out)]
    assert max(each.some_avg10 or 0 for each in found) >= 10
    assert max(each.full_avg10 or 0 for each in found) >= 10
    assert list(tmp_path.glob(".squeeze-*")) == []


@pytest.mark.skipif(not os.environ.get("METAL_SQUEEZE"), reason="METAL_SQUEEZE=1: needs root and cgroups")
def test_a_real_limit_is_found_by_who_is_under_it() -> None:
    from tests.support import squeeze

    code = (
        "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "from metal_supervisor.memory import machine_memory as memory\n"
        "found = memory.sample(); print(memory.container_bytes(), found.total_bytes, found.available_bytes)"
    )
    with squeeze.group(96 * MIB) as mine:
        command = [sys.executable, "-c", code, mine / "cgroup.procs"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=ROOT)
        assert cgroups.container_bytes() != 96 * MIB
    assert done.returncode == 0, done.stderr
    limit_bytes, total, available = map(int, done.stdout.split())
    assert limit_bytes == total == 96 * MIB and 32 * MIB < available < 96 * MIB
