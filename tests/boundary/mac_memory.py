"""A libc as a Mac has it, for the memory calls: real C calling convention, recorded values, refusals to order."""

from __future__ import annotations

import ctypes
import errno
import struct
from collections.abc import Callable
from typing import Any

GIB = 1024**3
SYSCTL = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.c_void_p,
    ctypes.c_size_t,
    use_errno=True,
)
RUSAGE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, use_errno=True)


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


# `vm.swapusage: total = 23552.00M  used = 22392.56M  free = 1159.44M  (encrypted)`, of a machine short of memory.
SWAPUSAGE = struct.pack("<QQQIi", 24696061952, 1215758336, 23480303616, 16384, 1)
M4_MAX: dict[str, bytes] = {
    "hw.memsize": u64(128 * GIB),
    "kern.memorystatus_level": u32(81),
    "kern.memorystatus_vm_pressure_level": u32(1),
    "vm.swapusage": SWAPUSAGE,
    "iogpu.wired_limit_mb": u32(0),
    "kern.osproductversion": b"26.1\0",
}
DEVICES = "Available devices:\n  MTL0: Apple M4 Max (110100 MiB, 110100 MiB free)\n"


def rusage_v4(footprint: int, resident: int) -> bytes:
    """296 bytes with the two figures at the offsets of <sys/resource.h>; everything else is noise."""
    area = bytearray(b"\xa5" * 296)
    area[64:72], area[72:80] = u64(resident), u64(footprint)
    return bytes(area)


class FakeLibc:
    """`sysctlbyname` and `proc_pid_rusage`, called by pointer as the real ones are."""

    def __init__(self, sysctls: dict[str, bytes], processes: dict[int, tuple[int, int]] | None = None) -> None:
        self.sysctls, self.processes = dict(sysctls), dict(processes or {})
        self.refused: dict[str | int, int] = {}
        """errno of a sysctl, or of a pid."""
        self.asked: list[str] = []
        self.sysctlbyname = self._errno(SYSCTL, self._sysctl)
        self.proc_pid_rusage = self._errno(RUSAGE, self._rusage)

    @staticmethod
    def _errno(kind: Any, call: Callable[..., int]) -> Any:
        """A C function that fails with -1 and errno."""

        def answer(*arguments: Any) -> int:
            number = call(*arguments)
            ctypes.set_errno(number)
            return -1 if number else 0

        return kind(answer)

    def _sysctl(self, name: bytes, area: int, size: Any, new: int | None, new_size: int) -> int:
        key = name.decode()
        self.asked.append(key)
        assert not new and new_size == 0, "never writes"
        if key in self.refused:
            return self.refused[key]
        value = self.sysctls.get(key)
        if value is None:
            return errno.ENOENT
        if len(value) > size[0]:
            return errno.ENOMEM
        ctypes.memmove(area, value, len(value))
        size[0] = len(value)
        return 0

    def _rusage(self, pid: int, flavor: int, area: int) -> int:
        assert flavor == 4
        if pid in self.refused:
            return self.refused[pid]
        if pid not in self.processes:
            return errno.ESRCH
        ctypes.memmove(area, rusage_v4(*self.processes[pid]), 296)
        return 0
