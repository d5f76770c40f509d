"""Processors that a program was built for, from the first bytes of a Mach-O file, thin or universal.

An engine for Intel also starts on an Apple chip, translated by Rosetta, and is then a tenth as fast.
"""

from __future__ import annotations

import struct

HEAD_BYTES = 4096
THIN_64, THIN_32, FAT, FAT_64 = 0xFEEDFACF, 0xFEEDFACE, 0xCAFEBABE, 0xCAFEBABF
MOST_SLICES = 20
"""Most processors of a universal file. A Java class file has the same magic number, and its version, 45 or more, in the
place of their number."""
PROCESSORS = {0x0100000C: "arm64", 0x01000007: "x86_64", 0x00000007: "i386", 0x0200000C: "arm64_32"}


def processors(head: bytes) -> tuple[str, ...]:
    """Processors, e.g. `("x86_64", "arm64")`, from a file's first 4096 bytes; none if it is no Mach-O file."""
    if len(head) < 8:
        return ()
    (little,), (big, count) = struct.unpack("<I", head[:4]), struct.unpack(">II", head[:8])
    if little in (THIN_64, THIN_32):
        return (_name(struct.unpack("<I", head[4:8])[0]),)
    if big not in (FAT, FAT_64) or not 0 < count <= MOST_SLICES:
        return ()
    size = 20 if big == FAT else 32
    starts = range(8, 8 + count * size, size)
    return tuple(_name(struct.unpack(">I", head[at : at + 4])[0]) for at in starts if at + 4 <= len(head))


def _name(cpu: int) -> str:
    return PROCESSORS.get(cpu, f"processor {cpu:#x}")
