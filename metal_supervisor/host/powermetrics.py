"""powermetrics: the one command line that sudo allows, and the watts in what it prints.

With `-f plist` it prints one XML property list per sample, for as long as it runs. Lists arrive in pieces of any size,
a NUL leads each but the first, and their content differs from chip to chip. A value that is missing is unknown, never
0 W. It needs root, and as root can write any file (`-o`): so the rule for sudo, which `tools/powermetrics_sudo.py`
installs, is made of the same constants as the command, every argument literal.
"""

from __future__ import annotations

import math
import plistlib
from typing import TypeAlias
from xml.parsers.expat import ExpatError

EVERY_S = 5
"""Long enough for chips that count in batches, short enough for a scrape every 15 s."""
POWERMETRICS = (
    "/usr/bin/powermetrics",
    "--samplers",
    "cpu_power,gpu_power,thermal",
    "-f",
    "plist",
    "-i",
    str(EVERY_S * 1000),
)
COMMAND = ("/usr/bin/sudo", "-n", *POWERMETRICS)
FRAGMENT = "/etc/sudoers.d/metal-supervisor-power"
END = b"</plist>"
MOST_BYTES = 1 << 20
"""Size limit of one list; those of a 24-core chip have 65 KB."""
DOMAINS = "combined", "gpu", "cpu", "ane"
"""The first is CPU, GPU and ANE together, not the whole Mac; the ANE is the Neural Engine."""
FORMAT = 1
"""Format of the file that passes a reading on."""
Power: TypeAlias = dict[str, float]
"""Average power over one sample, in watts, of each domain that is known."""


class Frames:
    """Splitter of a stream into property lists, for chunks of any size."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lists that this chunk completes, without NULs, with any text before them."""
        *found, self._held = (self._held + chunk.replace(b"\0", b"")).split(END)
        if len(self._held) > MOST_BYTES:
            self._held = self._held[-len(END) :]  # the rest of that list is unreadable
        return [each + END for each in found]


def reading(frame: bytes) -> Power | None:
    """The power in a property list; None if there is none in it, or it is no property list. Never raises."""
    frame = frame[max(frame.rfind(b"<?xml"), 0) :]
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
