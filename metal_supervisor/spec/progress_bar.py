"""A download as one line of a terminal: name, bar, share, size, rate, time left; what does not fit is left out.

A line that is rewritten in place must never wrap, so its width is counted in the terminal's cells, and what servers
and users wrote is made harmless first.
"""

from __future__ import annotations

from metal_supervisor.spec.progress import DownloadProgress, duration, speed
from metal_supervisor.spec.sizes import GIB, amount
from metal_supervisor.spec.terminal_text import cells, fitted

SHORTEST_NAME, LONGEST_NAME = 12, 40
SHORTEST_BAR, LONGEST_BAR = 10, 30


def line(name: str, meter: DownloadProgress, width: int, note: str = "") -> str:
    """One line of less than `width` cells. `note`: words that matter more than the numbers, "" for none."""
    room = max(1, width - 1)  # some terminals wrap as soon as the last cell is written
    if note:
        head = fitted(name, LONGEST_NAME)
        return fitted(f"{head}  {note}", room)
    parts = _numbers(meter)
    # The least important is left out first: time left and rate are nice to have, the share matters most.
    while len(parts) > 1 and SHORTEST_NAME + 2 + cells("  ".join(parts)) > room:
        parts.pop()
    tail = "  ".join(parts)
    left = room - cells(tail) - 2
    if left < 1:
        return fitted(tail, room)
    head = fitted(name, min(left, LONGEST_NAME))
    spare = left - cells(head) - 2
    if not meter.total_bytes or spare < SHORTEST_BAR + 2:
        return f"{head}  {tail}"
    return f"{head}  {_bar(meter, min(LONGEST_BAR, spare - 2))}  {tail}"


def _bar(meter: DownloadProgress, length: int) -> str:
    full = min(length, length * meter.got_bytes // meter.total_bytes)
    return f"[{'=' * full}{' ' * (length - full)}]"


def _numbers(meter: DownloadProgress) -> list[str]:
    """The texts of share, size, rate and time left, as far as known, the most important first."""
    rate = speed(meter.rate) if meter.rate else ""
    if not meter.total_bytes:
        return [each for each in (amount(meter.got_bytes), rate) if each]
    share = f"{min(100, 100 * meter.got_bytes // meter.total_bytes):3d} %"
    left = meter.left_s
    size = f"{_like(meter.got_bytes, meter.total_bytes)} of {amount(meter.total_bytes)}"
    return [each for each in (share, size, rate, f"{duration(left)} left" if left is not None else "") if each]


def _like(got_bytes: int, total_bytes: int) -> str:
    """The one amount, without its unit if that is the other's."""
    text = amount(got_bytes, "down")
    return text.partition(" ")[0] if (got_bytes >= GIB) == (total_bytes >= GIB) else text
