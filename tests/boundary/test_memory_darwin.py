"""Memory as a Mac tells of it, without a Mac: a libc called by pointer, with recorded values."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from metal_supervisor import launch
from metal_supervisor.host import chip, darwin_memory, machine, processes
from metal_supervisor.host.darwin_memory import Mac, RusageInfo, SwapUsage
from metal_supervisor.memory import machine_memory
from tests.boundary.mac_memory import DEVICES, GIB, M4_MAX, FakeLibc, u32, u64

MIB = 1024**2


@pytest.fixture
def libc(monkeypatch: pytest.MonkeyPatch) -> FakeLibc:
    """This machine is an M4 Max with 128 GiB, on a system where psutil's host memory raises."""

    def fail(*_: object) -> Any:
        raise RuntimeError("host_statistics64(HOST_VM_INFO64) syscall failed: (ipc/mig) array not large enough")

    fake = FakeLibc(M4_MAX)
    mac = Mac(fake)
    monkeypatch.setattr(darwin_memory, "mac", lambda: mac)
    for name in ("virtual_memory", "swap_memory"):
        monkeypatch.setattr(psutil, name, fail)
    machine_memory._devices.clear()
    return fake


def test_the_structures_are_those_of_the_headers() -> None:
    assert ctypes.sizeof(RusageInfo) == 296
    offsets = {"wired_size": 56, "resident_size": 64, "phys_footprint": 72, "lifetime_max_phys_footprint": 240}
    assert {name: getattr(RusageInfo, name).offset for name in offsets} == offsets
    assert ctypes.sizeof(SwapUsage) == 32
    assert {name: getattr(SwapUsage, name).offset for name in ("total", "avail", "used")} == {
        "total": 0,
        "avail": 8,
        "used": 16,
    }


@pytest.mark.skipif(sys.platform == "darwin", reason="what it is elsewhere")
def test_elsewhere_nothing_is_asked_and_no_symbol_missed() -> None:
    assert darwin_memory.mac() is None
    assert machine_memory.metal_limits(Path("/bin/false")) == (0, 0, None)
    with pytest.raises(AttributeError):
        Mac(ctypes.CDLL(None)).number("hw.memsize")


def test_a_sample_of_a_mac(libc: FakeLibc) -> None:
    found = machine_memory.sample()
    assert (found.total_bytes, found.available_bytes) == (128 * GIB, 128 * GIB * 81 // 100)
    assert (found.kernel_level, found.swap_used_bytes) == (1, 23480303616)
    assert (found.some_avg10, found.full_avg10, found.problems) == (None, None, ())
    assert machine_memory.total_bytes() == machine.memory_bytes() == 128 * GIB
    assert machine.capabilities.__wrapped__(chip.Chip())["memory"] == str(128 * GIB)


@pytest.mark.parametrize("level", [1, 2, 4])
def test_levels_of_the_kernel(libc: FakeLibc, level: int) -> None:
    libc.sysctls["kern.memorystatus_vm_pressure_level"] = u32(level)
    assert machine_memory.sample().kernel_level == level


@pytest.mark.parametrize("level", [0, 3, 5, 0xFFFFFFFF])
def test_other_levels_mean_nothing(libc: FakeLibc, level: int) -> None:
    libc.sysctls["kern.memorystatus_vm_pressure_level"] = u32(level)
    found = machine_memory.sample()
    assert found.kernel_level is None and len(found.problems) == 1


READINGS = {
    "kern.memorystatus_level": "available_bytes",
    "kern.memorystatus_vm_pressure_level": "kernel_level",
    "vm.swapusage": "swap_used_bytes",
}


@pytest.mark.parametrize("name", READINGS)
@pytest.mark.parametrize("number", [errno.ENOENT, errno.EPERM, errno.ENOMEM])
def test_each_reading_fails_alone(libc: FakeLibc, name: str, number: int) -> None:
    whole = machine_memory.sample()
    libc.refused[name] = number
    found = machine_memory.sample()
    for other, field in READINGS.items():
        assert getattr(found, field) == (None if other == name else getattr(whole, field))
    assert found.problems == (f"[Errno {number}] sysctl {name}: {os.strerror(number)}",)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kern.memorystatus_level", u32(101)),
        ("kern.memorystatus_level", b"\x01"),
        ("vm.swapusage", b"\0" * 24),
        ("vm.swapusage", b"\0" * 40),
        ("kern.memorystatus_level", u32(0xFFFFFFFF)),
    ],
)
def test_a_reading_of_another_shape_is_none(libc: FakeLibc, name: str, value: bytes) -> None:
    libc.sysctls[name] = value
    found = machine_memory.sample()
    assert getattr(found, READINGS[name]) is None and len(found.problems) == 1


def test_a_size_that_is_not_told_is_a_problem(libc: FakeLibc) -> None:
    libc.refused["hw.memsize"] = errno.EPERM
    assert machine_memory.total_bytes() == 0
    found = machine_memory.sample()
    assert (found.total_bytes, found.available_bytes) == (0, None) and found.problems


# --- what a process holds


def family(monkeypatch: pytest.MonkeyPatch, **born: str) -> None:
    """Processes 100 and below: `p101="tv 1 2"`."""
    known = {100: "tv 1 1", **{int(name[1:]): when for name, when in born.items()}}
    monkeypatch.setattr(launch, "start_time", lambda pid: known.get(pid, ""))
    monkeypatch.setattr(processes, "descendants", lambda pid: [(each, known[each]) for each in known if each != pid])


def test_metal_and_the_mapped_model_are_charged(libc: FakeLibc, monkeypatch: pytest.MonkeyPatch) -> None:
    family(monkeypatch, p101="tv 1 2")
    libc.processes = {100: (6 * GIB, 2 * GIB), 101: (GIB, GIB)}
    assert machine_memory.used_bytes(100) == machine_memory.Held(7 * GIB, 7 * GIB, 3 * GIB)
    found = machine_memory.used_bytes(100, mapped_bytes=40 * GIB, started="tv 1 1")
    assert found == machine_memory.Held(47 * GIB, 7 * GIB, 3 * GIB)
    assert machine_memory.used_bytes(100, started="tv 9 9") is None


def test_no_less_than_what_is_resident_is_charged(libc: FakeLibc, monkeypatch: pytest.MonkeyPatch) -> None:
    family(monkeypatch)
    libc.processes = {100: (GIB, 30 * GIB)}
    assert machine_memory.used_bytes(100, mapped_bytes=4 * GIB) == machine_memory.Held(30 * GIB, GIB, 30 * GIB)


def test_one_that_may_not_be_asked_counts_by_what_is_resident(libc: FakeLibc, monkeypatch: pytest.MonkeyPatch) -> None:
    family(monkeypatch, p101="tv 1 2")
    libc.processes, libc.refused = {100: (6 * GIB, GIB)}, {101: errno.EPERM}
    monkeypatch.setattr(processes, "resident_bytes", lambda pid: 3 * GIB)
    assert machine_memory.used_bytes(100) == machine_memory.Held(9 * GIB, 9 * GIB, 4 * GIB)


def test_one_that_is_gone(libc: FakeLibc, monkeypatch: pytest.MonkeyPatch) -> None:
    family(monkeypatch, p101="tv 1 2")
    monkeypatch.setattr(processes, "resident_bytes", lambda pid: None)
    assert machine_memory.used_bytes(100) is None and machine_memory.used_bytes(999) is None
    libc.processes = {100: (GIB, GIB)}
    assert machine_memory.used_bytes(100) == machine_memory.Held(GIB, GIB, GIB), "its child ended meanwhile"


# --- what Metal wires


def engine(path: Path, text: str = DEVICES, then: str = "") -> Path:
    """A llama-server that lists its devices, and counts how often it was asked."""
    lines = ("#!/bin/sh", '[ "$*" = --list-devices ] || exit 9', f"echo x >>{path}.asked", then, f"cat <<E\n{text}E\n")
    path.write_text("\n".join(lines))
    path.chmod(0o755)
    return path


def asked(path: Path) -> int:
    return len(Path(f"{path}.asked").read_text().split()) if Path(f"{path}.asked").exists() else 0


def test_metal_limits_are_asked_once_per_build(libc: FakeLibc, tmp_path: Path) -> None:
    binary = engine(tmp_path / "llama-server")
    assert machine_memory.metal_limits(None) == (0, 0, 26)
    assert [machine_memory.metal_limits(binary) for _ in range(3)] == [(0, 110100, 26)] * 3
    assert asked(binary) == 1
    os.utime(binary, (1, 1))
    machine_memory.metal_limits(binary)
    assert asked(binary) == 2
    libc.sysctls["iogpu.wired_limit_mb"] = u32(120000)
    assert machine_memory.metal_limits(binary) == (120000, 0, 26), "can be set at any time, and spares the question"


def test_an_engine_that_does_not_tell_is_left_alone_for_a_while(
    libc: FakeLibc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = engine(tmp_path / "llama-server", then="exec sleep 60")
    monkeypatch.setattr(machine_memory, "DEVICES_TIMEOUT_S", 0.3)
    assert [machine_memory.metal_limits(binary)[1] for _ in range(3)] == [0] * 3
    assert asked(binary) == 1
    monkeypatch.setattr(machine_memory, "DEVICES_AGAIN_S", 0.0)
    machine_memory.metal_limits(binary)
    assert asked(binary) == 2
    assert machine_memory.metal_limits(tmp_path / "none")[1] == 0


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        (DEVICES, 110100),
        ("ggml_metal: x\n  BLAS: Accelerate (0 MiB, 0 MiB free)\n  Metal: M1 (10922 MiB, 9 MiB free)\n", 10922),
        ("Available devices:\n  CUDA0: NVIDIA RTX (24000 MiB, 1 MiB free)\n", 0),
        ("error: invalid argument: --list-devices\n", 0),
        ("", 0),
        ("  MTL0: Apple M4 Max (110100 MiB, 110", 0),
        ("  MTL0: a (b) (7 MiB, 7 MiB free)\r\n  MTL1: c (9 MiB, 9 MiB free)\n", 7),
    ],
)
def test_the_list_of_devices(text: str, mib: int) -> None:
    assert machine_memory.device_mib(text) == mib


def test_an_old_mac_says_it_in_bytes(libc: FakeLibc) -> None:
    del libc.sysctls["iogpu.wired_limit_mb"]
    libc.sysctls |= {"debug.iogpu.wired_limit": u64(24 * GIB), "kern.osproductversion": b"13.6.1\0"}
    assert machine_memory.metal_limits(None) == (24 * 1024, 0, 13)
    del libc.sysctls["debug.iogpu.wired_limit"], libc.sysctls["kern.osproductversion"]
    assert machine_memory.metal_limits(None) == (0, 0, None)


def test_the_budget_of_a_mac(libc: FakeLibc, tmp_path: Path) -> None:
    found = machine_memory.host_budget(None, engine(tmp_path / "llama-server"))
    assert found.bytes == 110100 * MIB - 512 * MIB and "Metal" in found.reason
    libc.sysctls["iogpu.wired_limit_mb"] = u32(125000)
    assert machine_memory.host_budget(None, None).bytes == round(0.9 * 128 * GIB)
    assert machine_memory.host_budget(0.5, None).bytes == 64 * GIB


@pytest.mark.skipif(sys.platform != "linux", reason="what it is there")
def test_the_budget_where_there_is_no_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_bytes", lambda: 64 * GIB)
    found = machine_memory.host_budget(None, Path("/bin/false"))
    assert (found.total_bytes, found.bytes) == (64 * GIB, round(0.75 * 64 * GIB))
    assert not any("Metal" in name for name in found.limits)


@pytest.mark.skipif(sys.platform != "darwin", reason="needs a Mac")
def test_a_real_mac() -> None:
    found = machine_memory.sample()
    assert found.problems == () and found.available_bytes is not None
    told = subprocess.run(["/usr/sbin/sysctl", "-n", "hw.memsize"], capture_output=True, text=True, check=True)
    assert machine_memory.total_bytes() == int(told.stdout)
    mine = machine_memory.used_bytes(os.getpid())
    assert mine is not None and mine.footprint_bytes > MIB


def test_wired_memory_is_what_is_neither_available_nor_compressed() -> None:
    libc = FakeLibc({**M4_MAX, "vm.compressor_bytes_used": u64(4 * GIB)})
    assert darwin_memory.Mac(libc).wired_bytes() == 128 * GIB * 19 // 100 - 4 * GIB
    libc.sysctls["vm.compressor_bytes_used"] = u64(100 * GIB)
    assert darwin_memory.Mac(libc).wired_bytes() == 0
    assert darwin_memory.Mac(FakeLibc(M4_MAX)).wired_bytes() is None
