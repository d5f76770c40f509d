"""Progress of a download for people to read: share, smoothed rate, and time left."""

from __future__ import annotations

import math
from dataclasses import dataclass

from metal_supervisor.spec.sizes import amount

STEADY_S = 15.0
"""Time over which a rate is averaged, roughly."""


@dataclass
class DownloadProgress:
    """Counts bytes, and remembers how fast they came."""

    total_bytes: int = 0
    """0 while it is not known."""
    got_bytes: int = 0
    rate: float = 0.0
    """Bytes a second, 0 while it is not known."""
    _at: float | None = None
    _counted: int = 0

    def got(self, more_bytes: int) -> None:
        """Add bytes that have arrived."""
        self.got_bytes += more_bytes

    def update(self, got_bytes: int, total_bytes: int, now: float) -> None:
        """Set counts that another process reports, and update the rate; fewer bytes than before start it anew."""
        self.total_bytes = total_bytes
        if got_bytes < self.got_bytes or not self.got_bytes:
            self.got_bytes, self.rate = got_bytes, 0.0
            self.begin(now)
        elif got_bytes > self.got_bytes:
            self.got_bytes = got_bytes
            self.look(now)

    def begin(self, now: float) -> None:
        """Start the rate: bytes here already do not count towards it. `now`: seconds of a steady clock, as below."""
        self._at, self._counted = now, self.got_bytes

    def look(self, now: float) -> None:
        """Update the rate."""
        if self._at is None:
            self.begin(now)
        elif (passed := now - self._at) > 0:
            fresh = max(0, self.got_bytes - self._counted) / passed
            weight = min(1.0, passed / STEADY_S) if self.rate else 1.0
            self.rate += (fresh - self.rate) * weight
            self.begin(now)

    @property
    def left_s(self) -> float | None:
        """Seconds left at this rate, None if it is not known."""
        if self.rate < 1 or not self.total_bytes:
            return None
        return max(0, self.total_bytes - self.got_bytes) / self.rate

    def __str__(self) -> str:
        if not self.total_bytes:
            return f"{amount(self.got_bytes)}, {speed(self.rate)}" if self.rate else amount(self.got_bytes)
        share = min(100, 100 * self.got_bytes // self.total_bytes)
        text = f"{share} % of {amount(self.total_bytes)}"
        left = self.left_s
        return text if left is None else f"{text}, {speed(self.rate)}, {duration(left)} left"


def speed(rate: float) -> str:
    """`7.5 MB/s`, from bytes a second."""
    return f"{rate / 1e6:.1f} MB/s" if rate < 1e8 else f"{rate / 1e6:.0f} MB/s"


def duration(seconds: float) -> str:
    """`40 s`, `12 min` or `3 h 5 min`; `unknown` for what is no length of time."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
