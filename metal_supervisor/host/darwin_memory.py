"""Memory counters of macOS: sysctls and `proc_pid_rusage`, called through libc.

psutil will not do. Its host memory raises on macOS 27 and counts neither compressed nor Metal's memory, and its figures
for one process go through task_for_pid, which needs root and can hang for ever. The calls below exist since macOS
10.12, need no privileges for the user's own processes, and take about a microsecond (rusage: forty).

Everything here raises OSError when the system refuses. Nothing is looked up in libc before it is called, so that this
can be imported, and tested, anywhere.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from contextlib import suppress
from functools import lru_cache
from typing import Any

# Numbers, structures and signatures are held against Apple's headers by tests/boundary/test_darwin_headers.py.
RUSAGE_INFO_V4 = 4
FUNCTIONS = {
    "sysctlbyname": ("c_char_p", "c_void_p", "c_void_p", "c_void_p", "c_size_t"),
    "proc_pid_rusage": ("c_int", "c_int", "c_void_p"),
}
"""Functions of libSystem, which return 0 or set errno -> ctypes' names of their arguments' types."""
MIB = 1024**2


class SwapUsage(ctypes.Structure):
    """`struct xsw_usage` of <sys/sysctl.h>, in bytes."""

    _fields_ = (
        ("total", ctypes.c_uint64),
        ("avail", ctypes.c_uint64),
        ("used", ctypes.c_uint64),
        ("pagesize", ctypes.c_uint32),
        ("encrypted", ctypes.c_int32),
    )


class RusageInfo(ctypes.Structure):
    """`struct rusage_info_v4` of <sys/resource.h>; memory in bytes, times in ticks of the machine."""

    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        *((name, ctypes.c_uint64) for name in ("user_time", "system_time", "pkg_idle_wkups", "interrupt_wkups")),
        *((name, ctypes.c_uint64) for name in ("pageins", "wired_size", "resident_size", "phys_footprint")),
        ("rest_of_v3", ctypes.c_uint64 * 20),
        ("lifetime_max_phys_footprint", ctypes.c_uint64),
        ("rest", ctypes.c_uint64 * 6),
    )


class Mac:
    """The system calls of one Mac. `libc` is what ctypes.CDLL(None, use_errno=True) gives there."""

    def __init__(self, libc: Any) -> None:
        self._libc = libc

    def _call(self, name: str, what: str, *arguments: Any) -> None:
        """Call one of FUNCTIONS, declared: an undeclared argument would be passed as a C int. Raises OSError."""
        function = getattr(self._libc, name)
        function.argtypes, function.restype = [getattr(ctypes, each) for each in FUNCTIONS[name]], ctypes.c_int
        if function(*arguments):
            raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")

    def _ask(self, name: str, area: Any) -> int:
        """Read a sysctl into an area; return the number of bytes written."""
        size = ctypes.c_size_t(ctypes.sizeof(area))
        self._call("sysctlbyname", f"sysctl {name}", name.encode(), ctypes.byref(area), ctypes.byref(size), None, 0)
        return size.value

    def number(self, name: str) -> int:
        """A sysctl that is a number of 4 or 8 bytes."""
        area = ctypes.create_string_buffer(8)
        size = self._ask(name, area)
        if size not in (4, 8):
            raise OSError(0, f"sysctl {name}: a number of {size} bytes")
        return int.from_bytes(area.raw[:size], "little", signed=True)

    def text(self, name: str) -> str:
        """A sysctl that is a short string."""
        area = ctypes.create_string_buffer(256)
        self._ask(name, area)
        return area.value.decode("utf-8", "replace")

    def swap_used_bytes(self) -> int:
        """Bytes in use in the swap files. Raises OSError."""
        usage = SwapUsage()
        if self._ask("vm.swapusage", usage) != ctypes.sizeof(usage):
            raise OSError(0, "sysctl vm.swapusage: not the structure that we know")
        return int(usage.used)

    def total_bytes(self) -> int:
        found = self.number("hw.memsize")
        if found <= 0:
            raise OSError(0, "sysctl hw.memsize: no size")
        return found

    def wired_bytes(self) -> int | None:
        """Memory neither available nor compressed, to a percent of all memory; None if the system does not tell."""
        try:
            taken = self.total_bytes() * (100 - self.number("kern.memorystatus_level")) // 100
            return max(0, taken - self.number("vm.compressor_bytes_used"))
        except OSError:
            return None

    def process(self, pid: int) -> tuple[int, int]:
        """(footprint, resident bytes) of a process.

        The footprint is the figure of jetsam and Activity Monitor: private memory, compressed or not, and Metal's
        buffers, but no clean pages of files. The resident size has those, but none of the GPU's own.
        """
        usage = RusageInfo()
        self._call("proc_pid_rusage", f"proc_pid_rusage({pid})", pid, RUSAGE_INFO_V4, ctypes.byref(usage))
        return int(usage.phys_footprint), int(usage.resident_size)

    def wired_limit_mib(self) -> int:
        """The administrator's limit on memory that Metal may wire, 0 if it is left to the system."""
        # Of macOS 13 and before in bytes.
        for name, unit in (("iogpu.wired_limit_mb", 1), ("debug.iogpu.wired_limit", MIB)):
            with suppress(OSError):
                return max(self.number(name), 0) // unit
        return 0

    def macos_major(self) -> int | None:
        """26 of macOS 26.1, None if the system does not tell."""
        try:
            found = re.match(r"\d+", self.text("kern.osproductversion"))
        except OSError:
            return None
        return int(found[0]) if found else None


@lru_cache(maxsize=1)
def mac() -> Mac | None:
    """This Mac; None on any other system."""
    return Mac(ctypes.CDLL(None, use_errno=True)) if sys.platform == "darwin" else None
