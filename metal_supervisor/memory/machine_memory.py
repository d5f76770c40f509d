"""Measurements of this machine's memory: its size, how much is available, and how much a process holds.

The budget needs the size of the machine, the pressure watch how much is available, and the ledger the
memory of a process, which on a Mac neither the resident size (no GPU buffers) nor the footprint (no pages of the mapped
model) shows alone. A value that cannot be read is None, with a short reason: a failed reading must count neither as a
full machine nor as an empty one. Nothing here raises.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from metal_supervisor import launch
from metal_supervisor.host import commands, darwin_memory, processes
from metal_supervisor.host import machine as host
from metal_supervisor.memory.budget import Budget, budget, metal_limit
from metal_supervisor.memory.pressure import KERNEL, MemorySample
from metal_supervisor.state.kept_files import Edition, edition_of

T = TypeVar("T")
PROC = Path("/proc")
KIB = 1024
NO_FIGURES = (errno.ENOENT, errno.ENOTDIR, errno.EOPNOTSUPP)
DEVICES_TIMEOUT_S = 20.0
"""Listing the devices compiles nothing, but the first use of Metal after a boot is slow."""
DEVICES_AGAIN_S = 600.0
_STALL = re.compile(rb"some avg10=(\d+\.\d+) [^\n]* total=\d+\nfull avg10=(\d+\.\d+) [^\n]* total=\d+\n")


@dataclass(frozen=True)
class Held:
    """Memory of a process and its children together."""

    charged_bytes: int
    """For the ledger. macOS: footprint and mapped files, at least the resident size. Linux: footprint."""
    footprint_bytes: int
    """macOS: as in Activity Monitor. Linux: PSS and swap. The resident size where that cannot be read."""
    rss_bytes: int
    """Resident size; pages that several processes share count for each."""
    family: tuple[tuple[int, str], ...] = field(default=(), compare=False)
    """The descendants: (pid, launch.start_time)."""


def total_bytes() -> int:
    """Size of this machine's memory in bytes; 0 if it cannot be read."""
    try:
        return host.memory_bytes()
    except Exception:  # noqa: BLE001 - psutil may raise anything on an unexpected answer
        return 0


def sample(procfs: Path = PROC) -> MemorySample:
    """Take one sample of the memory of this Mac, or of this Linux machine. `procfs`: path of its proc file system."""
    mac = darwin_memory.mac()
    return _sample_darwin(mac) if mac else _sample_linux(procfs)


def _sample_darwin(mac: darwin_memory.Mac) -> MemorySample:
    problems: list[str] = []
    total, available = total_bytes(), None
    if not total:
        problems.append("hw.memsize cannot be read")
    percent = _told(lambda: mac.number("kern.memorystatus_level"), problems)
    if percent is not None and 0 <= percent <= 100 and total:
        available = total * percent // 100
    elif percent is not None:
        problems.append(f"kern.memorystatus_level is {percent}")
    level = _told(lambda: mac.number("kern.memorystatus_vm_pressure_level"), problems)
    if level is not None and level not in KERNEL:
        problems.append(f"kern.memorystatus_vm_pressure_level is {level}")
        level = None
    swap = _told(mac.swap_used_bytes, problems)
    return MemorySample(
        at=time.monotonic(),
        total_bytes=total,
        available_bytes=available,
        kernel_level=level,
        swap_used_bytes=swap,
        problems=tuple(problems),
        wired_bytes=mac.wired_bytes(),
    )


def _told(read: Callable[[], T], problems: list[str]) -> T | None:
    """A value that is read; None if it cannot be, with the reason among the problems."""
    try:
        return read()
    except OSError as error:
        problems.append(_text(error))
        return None


def _sample_linux(procfs: Path) -> MemorySample:
    problems: list[str] = []
    known = _meminfo(procfs / "meminfo", problems)
    total, available = known.get("MemTotal", 0), known.get("MemAvailable")
    swap = max(0, known["SwapTotal"] - known["SwapFree"]) if {"SwapTotal", "SwapFree"} <= known.keys() else None
    some, full = _stall(procfs / "pressure" / "memory", problems)
    return MemorySample(
        at=time.monotonic(),
        total_bytes=total,
        available_bytes=available,
        swap_used_bytes=swap,
        some_avg10=some,
        full_avg10=full,
        problems=tuple(problems),
    )


def _meminfo(path: Path, problems: list[str]) -> dict[str, int]:
    """Values of meminfo in bytes, by their names there."""
    text = _told(path.read_bytes, problems)
    if text is None:
        return {}
    known = _figures(text)
    missing = [name for name in ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree") if name not in known]
    if missing:
        problems.append(f"{path.name} without {', '.join(missing)}")
    return known


def _figures(text: bytes) -> dict[str, int]:
    """Bytes by name, of a file of proc with lines such as `Name:  12 kB`."""
    # A number counts only with its unit: a truncated one is a number too.
    return {name.decode(): int(kib) * KIB for name, kib in re.findall(rb"(?m)^(\w+): +(\d+) kB\n", text)}


def _stall(path: Path, problems: list[str]) -> tuple[float | None, float | None]:
    """(some avg10, full avg10) in per cent; (None, None) if the kernel has no such figures, or they cannot be read."""
    try:
        text = path.read_bytes()
    except OSError as error:
        # A kernel built without PSI has no such file; one that has it switched off at boot answers EOPNOTSUPP.
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


def used_bytes(
    pid: int, mapped_bytes: int = 0, started: str = "", procfs: Path = PROC, known: Iterable[tuple[int, str]] = ()
) -> Held | None:
    """Measure the memory of a process and its descendants; None if it is gone, or cannot be measured.

    `mapped_bytes`: size of the model files that it maps, which a Mac's footprint leaves out; Linux counts them itself.
    `started`: its identity (launch.start_time), so that another process with the same pid is not measured instead.
    `known`: earlier descendants; those that live are measured too, with their own, if another process adopted them.
    Linux walks the page tables for this: 3 ms per GiB of files, 11 ms per GiB of other memory, so do not call it every
    second.
    """
    born = launch.start_time(pid)
    if not born or (started and born != started):
        return None
    footprint, resident = 0, 0
    family = dict(processes.descendants(pid))
    for each, since in known:
        if each not in family and launch.start_time(each) == since:
            family |= {each: since, **dict(processes.descendants(each))}
    for each, since in [(pid, born), *family.items()]:
        found = memory_of(each, procfs)
        if found is None or launch.start_time(each) != since:  # it ended meanwhile; its pid may be reused
            if each == pid:
                return None
            continue
        footprint, resident = footprint + found[0], resident + found[1]
    charged = footprint  # PSS includes mapped files, and counts a shared page once
    if darwin_memory.mac() is not None:
        charged = max(footprint + mapped_bytes, resident)
    return Held(charged, footprint, resident, tuple(family.items()))


def memory_of(pid: int, procfs: Path) -> tuple[int, int] | None:
    """(footprint, resident bytes) of one process, None if neither can be read.

    Without permission for the footprint, the resident size is used for both.
    """
    mac = darwin_memory.mac()
    try:
        return mac.process(pid) if mac else _rollup(procfs / str(pid) / "smaps_rollup")
    except (OSError, ValueError):
        resident = processes.resident_bytes(pid)
        return None if resident is None else (resident, resident)


def _rollup(path: Path) -> tuple[int, int]:
    """(PSS and swap, RSS) in bytes. Swapped-out memory counts: it is still allocated. Raises OSError, ValueError."""
    known = _figures(path.read_bytes())
    try:
        return known["Pss"] + known.get("SwapPss", 0), known["Rss"]
    except KeyError as error:
        raise ValueError(f"smaps_rollup without {error}") from None


_devices: dict[tuple[Path, Edition], tuple[str, float]] = {}
"""Output of an engine's `--list-devices`, "" if that failed, and its monotonic time; by the binary and its edition."""


def metal_limits(binary: Path | None) -> tuple[int, int, int | None]:
    """(`iogpu.wired_limit_mb`, MiB of the engine's first Metal device, major version of macOS).

    `binary`: llama-server, None to skip its list of devices. 0 means unknown or not set; (0, 0, None) off a Mac.
    """
    mac = darwin_memory.mac()
    if mac is None:
        return 0, 0, None
    wired_mib = mac.wired_limit_mib()
    # With a limit set by the administrator, the list of devices is not needed; it may be slow.
    listed = _devices_of(binary, DEVICES_AGAIN_S) if binary and not wired_mib else ""
    return wired_mib, device_mib(listed), mac.macos_major()


def _devices_of(binary: Path, again_s: float) -> str:
    """Output of `--list-devices`, cached: a Metal device for each build of the engine, any other output for `again_s`.

    A failure, "", is cached for DEVICES_AGAIN_S, because the command may be slow.
    """
    edition = edition_of(binary)
    if edition is None:
        return ""
    text, at = _devices.get((binary, edition), ("", 0.0))
    again_s = again_s if text else DEVICES_AGAIN_S
    if device_mib(text) or (at and time.monotonic() - at < again_s):
        return text
    text = commands.run((str(binary), "--list-devices"), DEVICES_TIMEOUT_S).text
    _devices[binary, edition] = text, time.monotonic()
    return text


def metal_there(binary: Path, again_s: float) -> bool | None:
    """True if the engine sees a Metal device in this process's context, False if it lists none, None if unknown.

    The answer depends on how launchd started this process. `binary`: llama-server. `again_s`: time for which a negative
    answer is cached. An engine that fails, or does not know the flag, counts as unknown, not as False.
    """
    listed = _devices_of(binary, again_s)
    if re.search(r"(?m)^\s*(?:MTL|Metal)\d*: ", listed):
        return True
    return False if re.search(r"(?m)^Available devices:\s*$", listed) else None


def device_mib(listed: str) -> int:
    """MiB of the first Metal device in the output of `llama-server --list-devices`, 0 without one."""
    found = re.search(r"(?m)^\s*(?:MTL|Metal)\d*: .*\((\d+) MiB, \d+ MiB free\)\s*$", listed)
    return int(found[1]) if found else 0


def host_budget(configured: float | None, binary: Path | None) -> Budget:
    """Budget of this machine.

    `configured`: a share from the configuration. `binary`: llama-server, whose list of devices has Metal's limit.
    """
    total = total_bytes()
    if darwin_memory.mac() is None:
        return budget(total, configured)
    wired_mib, listed_mib, macos = metal_limits(binary)
    return budget(total, configured, *metal_limit(total, wired_mib, listed_mib, macos))
