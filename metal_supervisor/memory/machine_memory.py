"""What this machine's memory is, how much of it is left, and what an engine holds of it.

The budget must know the machine or its container, the watchdog how short memory is, and the ledger what a process
really takes, which on a Mac neither its resident size (no GPU buffers) nor its footprint (no pages of the mapped
model) tells alone. Whatever cannot be read is None and said in a few words: a reading that failed must not pass for a
full machine, nor for an empty one. Nothing here raises.
"""

from __future__ import annotations

import errno
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from metal_supervisor import launch
from metal_supervisor.host import cgroups, darwin_memory
from metal_supervisor.host import machine as host
from metal_supervisor.host.cgroups import CGROUPS, PROC, container_bytes
from metal_supervisor.memory.budget import Budget, budget, metal_limit
from metal_supervisor.memory.pressure import MemorySample

__all__ = [
    "Held", "container_bytes", "host_budget", "metal_limits", "metal_there", "sample", "total_bytes", "used_bytes",
]  # fmt: skip

KIB = 1024
KERNEL_LEVELS = (1, 2, 4)
NO_FIGURES = (errno.ENOENT, errno.ENOTDIR, errno.EOPNOTSUPP)
DEVICES_TIMEOUT_S, DEVICES_AGAIN_S = 20.0, 600.0
"""A list of devices compiles nothing, but the first use of Metal after a boot takes its time."""
_STALL = re.compile(rb"some avg10=(\d+\.\d+) [^\n]* total=\d+\nfull avg10=(\d+\.\d+) [^\n]* total=\d+\n")


@dataclass(frozen=True)
class Held:
    """What a process and its children hold together."""

    charged_bytes: int
    """For the ledger. macOS: the footprint with the mapped files, at least what is resident. Linux: the footprint."""
    footprint_bytes: int
    """macOS: as Activity Monitor says. Linux: PSS and swap. Resident bytes of those that tell nobody."""
    rss_bytes: int
    """Resident; what several processes share counts for each."""


def total_bytes() -> int:
    """All of this machine's memory; 0 if it does not say."""
    try:
        return host.memory_bytes()
    except Exception:  # noqa: BLE001 - psutil lets out whatever the system's answers lead it to
        return 0


def sample(procfs: Path = PROC, root: Path = CGROUPS) -> MemorySample:
    """One look at the memory of this Mac, or of this Linux machine or container.

    `procfs`, `root`: where Linux's proc and cgroup file systems are. A container with a limit is a machine of its own.
    """
    mac = darwin_memory.mac()
    return _sample_darwin(mac) if mac else _sample_linux(procfs, root)


def _sample_darwin(mac: darwin_memory.Mac) -> MemorySample:
    problems: list[str] = []
    total, available, level, swap = total_bytes(), None, None, None
    if not total:
        problems.append("hw.memsize cannot be read")
    try:
        percent = mac.number("kern.memorystatus_level")
        if 0 <= percent <= 100 and total:
            available = total * percent // 100
        else:
            problems.append(f"kern.memorystatus_level is {percent}")
    except OSError as error:
        problems.append(_text(error))
    try:
        level = mac.number("kern.memorystatus_vm_pressure_level")
        if level not in KERNEL_LEVELS:
            problems.append(f"kern.memorystatus_vm_pressure_level is {level}")
            level = None
    except OSError as error:
        problems.append(_text(error))
    try:
        swap = mac.swap_used_bytes()
    except OSError as error:
        problems.append(_text(error))
    return MemorySample(
        at=time.monotonic(), total_bytes=total, available_bytes=available, kernel_level=level, swap_used_bytes=swap,
        some_avg10=None, full_avg10=None, problems=tuple(problems), wired_bytes=mac.wired_bytes(),
    )  # fmt: skip


def _sample_linux(procfs: Path, root: Path) -> MemorySample:
    problems: list[str] = []
    known = _meminfo(procfs / "meminfo", problems)
    total, available = known.get("MemTotal", 0), known.get("MemAvailable")
    swap = max(0, known["SwapTotal"] - known["SwapFree"]) if {"SwapTotal", "SwapFree"} <= known.keys() else None
    stall_of = procfs / "pressure" / "memory"
    group = cgroups.limiting(procfs, root)
    if group and (group.limit_bytes < total or not total):
        total = group.limit_bytes
        try:
            left = total - group.used_bytes() + group.reclaimable_bytes()
            # No more than the machine itself has left, whatever the group may have.
            available = max(0, min(left, total, total if available is None else available))
        except (OSError, ValueError) as error:
            problems.append(f"{group.path.name}: {_text(error)}")
            available = None
        swap = _swap_of(group, swap)
        own = group.path / "memory.pressure"
        stall_of = own if cgroups.exists(own) else stall_of
    some, full = _stall(stall_of, problems)
    return MemorySample(
        at=time.monotonic(), total_bytes=total, available_bytes=available, kernel_level=None, swap_used_bytes=swap,
        some_avg10=some, full_avg10=full, problems=tuple(problems),
    )  # fmt: skip


def _meminfo(path: Path, problems: list[str]) -> dict[str, int]:
    """The bytes that meminfo tells of, by their names there."""
    try:
        text = path.read_bytes()
    except OSError as error:
        problems.append(_text(error))
        return {}
    # A number counts only with its unit: half of one is a number too.
    known = {name.decode(): int(kib) * KIB for name, kib in re.findall(rb"(?m)^(\w+): +(\d+) kB\n", text)}
    missing = [name for name in ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree") if name not in known]
    if missing:
        problems.append(f"{path.name} without {', '.join(missing)}")
    return known


def _swap_of(group: cgroups.Group, machine: int | None) -> int | None:
    """What of a group lies in swap; the machine's where groups do not tell."""
    try:
        return int((group.path / "memory.swap.current").read_text("ascii"))
    except (OSError, ValueError):
        return machine


def _stall(path: Path, problems: list[str]) -> tuple[float | None, float | None]:
    """(some avg10, full avg10) in per cent; neither where the kernel has no such figures."""
    try:
        text = path.read_bytes()
    except OSError as error:
        # Built without them the file is missing, and EOPNOTSUPP if they were switched off at boot.
        if error.errno not in NO_FIGURES:
            problems.append(_text(error))
        return None, None
    found = _STALL.fullmatch(text)
    if not found or not (float(found[1]) <= 100 and float(found[2]) <= 100):
        problems.append(f"{path.name}: not what the kernel writes")
        return None, None
    return float(found[1]), float(found[2])


def _text(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__


def used_bytes(pid: int, mapped_bytes: int = 0, started: str = "", procfs: Path = PROC) -> Held | None:
    """What a process holds with all that it started and that is still below it; None if it is gone, or nobody tells.

    `mapped_bytes`: model files that it maps, which a Mac's footprint leaves out; Linux counts them itself.
    `started`: its identity (launch.start_time), so that another program by the same number is not charged for.
    Linux walks the page tables for this: 3 ms per GiB of files, 11 ms of other memory, so do not ask every second.
    """
    born = launch.start_time(pid)
    if not born or (started and born != started):
        return None
    footprint, resident = 0, 0
    for each, since in [(pid, born), *host.descendants(pid)]:
        found = _memory_of(each, procfs)
        if found is None or launch.start_time(each) != since:  # it ended meanwhile, and perhaps was replaced
            if each == pid:
                return None
            continue
        footprint, resident = footprint + found[0], resident + found[1]
    if darwin_memory.mac() is None:
        return Held(footprint, footprint, resident)  # PSS has the mapped files, and shares each page but once
    return Held(max(footprint + mapped_bytes, resident), footprint, resident)


def _memory_of(pid: int, procfs: Path) -> tuple[int, int] | None:
    """(footprint, resident bytes) of one process; the footprint is the resident size where it is refused."""
    mac = darwin_memory.mac()
    try:
        return mac.process(pid) if mac else _rollup(procfs / str(pid) / "smaps_rollup")
    except (OSError, ValueError):
        resident = host.resident_bytes(pid)
        return None if resident is None else (resident, resident)


def _rollup(path: Path) -> tuple[int, int]:
    """(PSS and swap, RSS) in bytes. Raises OSError, ValueError. What was swapped out is still held, and comes back."""
    known = {name: int(kib) * KIB for name, kib in re.findall(rb"(?m)^(\w+): +(\d+) kB\n", path.read_bytes())}
    try:
        return known[b"Pss"] + known.get(b"SwapPss", 0), known[b"Rss"]
    except KeyError as error:
        raise ValueError(f"smaps_rollup without {error}") from None


_devices: dict[tuple[Path, float], tuple[str, float]] = {}
"""What an engine said of its devices, "" if it did not, and when; by the file and its age."""


def metal_limits(binary: Path | None) -> tuple[int, int, int | None]:
    """(`iogpu.wired_limit_mb`, MiB of the engine's first Metal device, major version of macOS).

    `binary`: llama-server, None for no question to it. 0 is what is not known or not set; (0, 0, None) off a Mac.
    """
    mac = darwin_memory.mac()
    if mac is None:
        return 0, 0, None
    wired_mib = mac.wired_limit_mib()
    # An administrator's word spares the engine the question, which may take long.
    return wired_mib, _device_mib(binary) if binary and not wired_mib else 0, mac.macos_major()


def _device_mib(binary: Path) -> int:
    return device_mib(_devices_of(binary, DEVICES_AGAIN_S))


def _devices_of(binary: Path, again_s: float) -> str:
    """Asked once per build of the engine; anything but a Metal device is believed for so long, as asking can take long.

    What fails is not asked again sooner than that takes in any case.
    """
    try:
        build = binary, binary.stat().st_mtime
    except OSError:
        return ""
    text, at = _devices.get(build, ("", 0.0))
    again_s = again_s if text else DEVICES_AGAIN_S
    if device_mib(text) or (at and time.monotonic() - at < again_s):
        return text
    try:
        done = subprocess.run(
            [str(binary), "--list-devices"],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=DEVICES_TIMEOUT_S,
        )  # fmt: skip
        text = (done.stdout + done.stderr).decode("utf-8", "replace")
    except (OSError, subprocess.SubprocessError):
        text = ""
    _devices[build] = text, time.monotonic()
    return text


def metal_there(binary: Path, again_s: float) -> bool | None:
    """Whether the engine sees a Metal device from within this process's context; None if it does not tell.

    It depends on how launchd started us. `binary`: llama-server. `again_s`: how long a "no" is believed. Only a list
    that came is an answer: an engine that fails, or does not know the question, has not said that there is none.
    """
    listed = _devices_of(binary, again_s)
    if re.search(r"(?m)^\s*(?:MTL|Metal)\d*: ", listed):
        return True
    return False if re.search(r"(?m)^Available devices:\s*$", listed) else None


def device_mib(listed: str) -> int:
    """MiB of the first Metal device in the words of `llama-server --list-devices`, 0 without one."""
    found = re.search(r"(?m)^\s*(?:MTL|Metal)\d*: .*\((\d+) MiB, \d+ MiB free\)\s*$", listed)
    return int(found[1]) if found else 0


def host_budget(configured: float | None, binary: Path | None) -> Budget:
    """What models may use together on this machine.

    `configured`: a share from the configuration. `binary`: llama-server, which knows what Metal will wire.
    """
    total = total_bytes()
    if darwin_memory.mac() is None:
        return budget(total, configured, container_bytes=container_bytes())
    wired_mib, listed_mib, macos = metal_limits(binary)
    return budget(total, configured, *metal_limit(total, wired_mib, listed_mib, macos))
