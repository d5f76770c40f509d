"""Headers of model files with something wrong in them."""

from __future__ import annotations

import random
import struct


def mutated(data: bytes, chance: random.Random) -> bytes:
    """The file with something wrong somewhere: bits, lengths, counts, pieces gone or repeated."""
    made = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(made))
        match chance.randrange(6):
            case 0:
                made[at] ^= 1 << chance.randrange(8)
            case 1:
                made[at : at + 8] = struct.pack("<Q", chance.choice([0, 1, 255, 1 << 31, 1 << 40, (1 << 64) - 1]))
            case 2:
                made[at : at + 4] = struct.pack("<I", chance.choice([0, 8, 9, 12, 13, (1 << 32) - 1]))
            case 3:
                del made[at : at + chance.randint(1, 64)]
            case 4:
                made[at:at] = made[at : at + chance.randint(1, 64)]
            case _:
                made[at:at] = chance.randbytes(chance.randint(1, 16))
        made = made or bytearray(1)
    return bytes(made)
