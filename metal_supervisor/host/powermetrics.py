"""Parser of powermetrics' output: property lists to watts.

With `-f plist` it prints one XML property list per sample, for as long as it runs. A NUL leads every list but the
first, lists arrive in pieces of any size, and their content differs from chip to chip. It runs as root and for months:
so nothing in its output may raise here or pile up, and a value that is missing is unknown, never 0 W.
"""

from __future__ import annotations

import math
import plistlib
from typing import TypeAlias
from xml.parsers.expat import ExpatError

END = b"</plist>"
BEGINNINGS = b"<?xml", b"<plist"
"""Beginnings of a list; the second only where the declaration is missing."""
MOST_BYTES = 1 << 20
"""Size limit of one list; those of a 24-core chip have 65 KB."""
DOMAINS = "combined", "gpu", "cpu", "ane"
"""The first is CPU, GPU and ANE together, not the whole Mac; the ANE is the Neural Engine."""
FORMAT = 1
"""Format of the file that passes a reading on."""
Power: TypeAlias = dict[str, float]
"""Average power over one sample, in watts, of each domain that is known."""


class Frames:
    """Splitter of a stream into property lists, whatever its chunks are."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._skipping = False
        """The current list is too long already, and is skipped to its end."""
        self.dropped = 0
        """Number of lists discarded: too long, or without a beginning."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lists that this chunk completes, without NULs and without any text before them."""
        seen = max(0, len(self._held) - len(END) + 1)
        self._held += chunk.replace(b"\0", b"")
        found = []
        while (at := self._held.find(END, seen)) >= 0:
            piece = bytes(self._held[: at + len(END)])
            del self._held[: at + len(END)]
            seen = 0
            frame = b"" if self._skipping or len(piece) > MOST_BYTES else _from_beginning(piece)
            self._skipping = False
            if frame:
                found.append(frame)
            else:
                self.dropped += 1
        # One that is as long as this without its end is longer than allowed with it.
        self._skipping = self._skipping or len(self._held) > MOST_BYTES
        if self._skipping:
            del self._held[: -len(END) + 1]
        return found


def _from_beginning(piece: bytes) -> bytes:
    """A list without anything before it, be it text or a list that was cut off; empty if it has no beginning."""
    for beginning in BEGINNINGS:
        if (at := piece.rfind(beginning)) >= 0:
            return piece[at:]
    return b""


def reading(frame: bytes) -> Power | None:
    """The power in a property list; None if there is none in it, or it is no property list. Never raises."""
    try:
        sample = plistlib.loads(frame, fmt=plistlib.FMT_XML)  # which refuses declarations of entities
    except (ExpatError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return None
    if not isinstance(sample, dict) or not isinstance(sample.get("processor"), dict):
        return None
    processor, elapsed_s = sample["processor"], _amount(sample.get("elapsed_ns"), 1e9)
    found = {name: _watts(processor, name, elapsed_s) for name in DOMAINS}
    return {name: value for name, value in found.items() if value is not None} or None


def _watts(processor: dict[str, object], domain: str, elapsed_s: float | None) -> float | None:
    """Watts of one domain: from its milliwatts, or where there is no such key from its millijoules."""
    if f"{domain}_power" in processor:
        return _amount(processor[f"{domain}_power"], 1000)
    joules = _amount(processor.get(f"{domain}_energy"), 1000)
    return _amount(joules, elapsed_s) if elapsed_s else None


def _amount(value: object, per: float) -> float | None:
    """A finite number that is not negative, divided; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        amount = float(value) / per
    except OverflowError:
        return None
    return amount if math.isfinite(amount) and amount >= 0 else None
