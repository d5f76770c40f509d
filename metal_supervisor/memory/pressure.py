"""Whether the machine runs out of memory.

The budget keeps our own engines in bounds; it knows nothing of the browser and the build next to them. A Mac whose
memory is gone reboots, so somebody has to watch what is really left. Four signals are looked at and the worst one
counts: the available share, the kernel's own level, the time that tasks waited for memory (PSI) and the growth of
swap. Thresholds are scaled to the headroom, which is what the budget leaves free: at a full and legal load exactly
that is available, so fixed shares would call a well used machine critical for ever.

One sample never decides, except one that is desperate. A level falls a step at a time, after it was well below for
a while. A signal that cannot be read says nothing, and a sample without any is a reason for nothing: it raises and
lowers no level, and once nothing has been known for a while the level is no longer in force. Samples that are far
apart, because the machine slept, are not consecutive, and the time between them counts towards nothing.

All is a function of its arguments. Times are seconds of the clock that stamps the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from metal_supervisor.spec.sizes import MIB, amount

WARNING_OF_HEADROOM, CRITICAL_OF_HEADROOM = 0.50, 0.25
STALL_PERCENT = 10.0
SWAP_WARNING_BYTES_PER_S, SWAP_CRITICAL_BYTES_PER_S = 32.0 * MIB, 256.0 * MIB
EASE = 1.25
"""How much better than its threshold a signal must be before it counts as below."""
DESPERATE = 0.5
"""Below this part of the critical threshold one sample is enough."""
HISTORY = 60
"""Samples of swap that are kept at most."""


class Level(Enum):
    """How short of memory the machine is."""

    NORMAL = "Normal"
    WARNING = "Warning"
    """No new engines."""
    CRITICAL = "Critical"
    """Somebody has to go, if that is allowed."""

    @property
    def rank(self) -> int:
        """The larger the worse."""
        return (Level.NORMAL, Level.WARNING, Level.CRITICAL).index(self)


KERNEL = {1: Level.NORMAL, 2: Level.WARNING, 4: Level.CRITICAL}


@dataclass(frozen=True)
class Pace:
    """How fast to be alarmed, and how slow to be calmed."""

    raise_samples: int = 2
    """Consecutive samples that raise a level."""
    clear_s: float = 60.0
    """How long it must have been below its level before that falls a step."""
    gap_s: float = 30.0
    """Samples further apart are not consecutive."""
    stale_s: float = 60.0
    """How long a level is in force without anything known."""
    swap_window_s: float = 60.0
    """Time over which the growth of swap is taken; nothing is said before a quarter of it."""
    settle_s: float = 20.0
    """Least time from the exit of one victim to the next."""
    recover_s: float = 300.0
    """How long Normal must have lasted before anybody returns."""
    return_every_s: float = 60.0
    """One returns at a time, this far apart."""
    back_off_s: float = 300.0
    """How long one stays away after its first eviction; twice as long after each further one."""
    back_off_limit_s: float = 3600.0


PACE = Pace()


@dataclass(frozen=True)
class MemorySample:
    """What was read of the machine at one time; whatever could not be read is None."""

    at: float
    """Monotonic seconds."""
    total_bytes: int
    available_bytes: int | None = None
    kernel_level: int | None = None
    """Darwin's 1, 2 or 4; anything else is unknown."""
    swap_used_bytes: int | None = None
    some_avg10: float | None = None
    """Per cent of the last 10 s in which some task waited for memory (PSI)."""
    full_avg10: float | None = None
    """The same of all tasks at once."""
    problems: tuple[str, ...] = ()
    """Why something could not be read."""
    wired_bytes: int | None = None
    """What can be neither paged out nor compressed; no signal of its own, and macOS alone tells."""


@dataclass(frozen=True)
class Thresholds:
    """Where the levels begin on one machine."""

    total_bytes: int
    warning_bytes: int
    """Less than this available is Warning."""
    critical_bytes: int


def thresholds(total_bytes: int, budget_bytes: int, warning: float = 0.20, critical: float = 0.10) -> Thresholds:
    """The thresholds of a machine whose engines may have `budget_bytes`.

    `warning`, `critical`: shares of the memory, which are upper caps; half and a quarter of the headroom count if
    they are less. Without any headroom the available memory is never a reason, and the other signals remain.
    """
    headroom_bytes = max(total_bytes - budget_bytes, 0)
    warning_bytes = min(round(warning * total_bytes), round(WARNING_OF_HEADROOM * headroom_bytes))
    critical_bytes = min(round(critical * total_bytes), round(CRITICAL_OF_HEADROOM * headroom_bytes), warning_bytes)
    return Thresholds(total_bytes, warning_bytes, critical_bytes)


@dataclass(frozen=True)
class Watch:
    """What is made of all samples so far."""

    level: Level = Level.NORMAL
    why: str = "nothing is known yet"
    """One line with the numbers that made it this level; changes with the level only."""
    since: float = 0.0
    """When it became this level."""
    normal_since: float | None = None
    """Since when it has been seen to be Normal without a gap, None while it is not."""
    raw: Level = Level.NORMAL
    """What the latest known sample says by itself."""
    reading: str = "nothing is known yet"
    """One line about the latest sample."""
    at: float | None = None
    """Of the latest sample."""
    known_at: float | None = None
    """Of the latest sample that told anything."""
    known_before: float | None = None
    """Of the one before that."""
    desperate: bool = False
    """The latest known sample was enough by itself."""
    warnings: int = 0
    """Consecutive known samples that say Warning or worse."""
    criticals: int = 0
    below_since: float | None = None
    """Since when it has been well below its level, None while it is not."""
    swap: tuple[tuple[float, int], ...] = ()
    """(at, bytes used) over the latest window."""


def _swap_growth(swap: Sequence[tuple[float, int]], pace: Pace) -> float | None:
    """In bytes per second over the window, None if that is too short to tell."""
    if not swap or swap[-1][0] - swap[0][0] < pace.swap_window_s / 4 or len(swap) < 2:
        return None
    return (swap[-1][1] - swap[0][1]) / (swap[-1][0] - swap[0][0])


def _signals(sample: MemorySample, growth: float | None, limits: Thresholds, ease: float) -> list[tuple[Level, str]]:
    """What each signal that can be read says; `ease` above 1 asks for that much better than the thresholds."""
    found: list[tuple[Level, str]] = []

    def add(critical: bool, warning: bool, text: str) -> None:
        found.append((Level.CRITICAL if critical else Level.WARNING if warning else Level.NORMAL, text))

    available, warning_bytes, critical_bytes = sample.available_bytes, limits.warning_bytes, limits.critical_bytes
    if available is not None:
        critical, warning = available < critical_bytes * ease, available < warning_bytes * ease
        text = f"{amount(available)} of {amount(sample.total_bytes)} available"
        if warning and limits.total_bytes:
            share = 100 * (critical_bytes if critical else warning_bytes) / limits.total_bytes
            text += f", below {share:.1f} %"
        add(critical, warning, text)
    if (kernel := KERNEL.get(sample.kernel_level or 0)) is not None:
        add(kernel is Level.CRITICAL, kernel is Level.WARNING, f"the kernel's level is {kernel.value}")
    some, full, stall = sample.some_avg10, sample.full_avg10, STALL_PERCENT / ease
    if full is not None:
        add(full >= stall, False, f"all tasks waited for memory {full:.1f} % of 10 s")
    if some is not None:
        add(False, some >= stall, f"some tasks waited for memory {some:.1f} % of 10 s")
    if growth is not None and available is not None:
        critical = growth >= SWAP_CRITICAL_BYTES_PER_S / ease and available < warning_bytes * ease
        warning = growth >= SWAP_WARNING_BYTES_PER_S / ease and available < 2 * warning_bytes * ease
        add(critical, warning, f"swap grows by {amount(round(growth))}/s with {amount(available)} available")
    return found


def watch(before: Watch, sample: MemorySample, limits: Thresholds, pace: Pace = PACE) -> Watch:
    """The state after one more sample; one that is not newer than the latest changes nothing."""
    if before.at is not None and sample.at <= before.at:
        return before
    apart = before.known_at is None or sample.at - before.known_at > pace.gap_s
    swap = () if apart else before.swap
    if sample.swap_used_bytes is not None:
        recent = [each for each in swap if each[0] >= sample.at - pace.swap_window_s]
        swap = (*recent[-HISTORY + 1 :], (sample.at, sample.swap_used_bytes))
    growth = None if sample.swap_used_bytes is None else _swap_growth(swap, pace)
    signals = _signals(sample, growth, limits, 1.0)
    if not signals:
        return replace(before, at=sample.at, reading="; ".join(("nothing could be read", *sample.problems)))

    raw, reading = max(signals, key=lambda signal: signal[0].rank)  # of equal ones the first
    known = replace(
        before, at=sample.at, known_at=sample.at, known_before=before.known_at, raw=raw, reading=reading, swap=swap,
        desperate=sample.available_bytes is not None and sample.available_bytes < DESPERATE * limits.critical_bytes,
        warnings=0 if raw is Level.NORMAL else 1 + (0 if apart else before.warnings),
        criticals=0 if raw is not Level.CRITICAL else 1 + (0 if apart else before.criticals),
    )  # fmt: skip
    if before.level is Level.NORMAL and (apart or before.normal_since is None):
        known = replace(known, normal_since=sample.at)
    if before.known_at is None:
        known = replace(known, since=sample.at, why=reading)
    if (target := _raised(known, pace)).rank > known.level.rank:
        return replace(known, level=target, why=reading, since=sample.at, normal_since=None, below_since=None)
    eased = max((level for level, _ in _signals(sample, growth, limits, EASE)), key=lambda level: level.rank)
    return _lowered(known, eased, apart, pace)


def _raised(known: Watch, pace: Pace) -> Level:
    """The level that the latest samples reach together."""
    if known.desperate or known.criticals >= pace.raise_samples:
        return Level.CRITICAL
    return Level.WARNING if known.warnings >= pace.raise_samples else Level.NORMAL


def _lowered(known: Watch, eased: Level, apart: bool, pace: Pace) -> Watch:
    """The state a step lower if it has been well below for long enough; the next step takes as long again."""
    at = known.known_at or 0.0
    if eased.rank >= known.level.rank:
        return replace(known, below_since=None)
    since = at if apart or known.below_since is None else known.below_since
    if at - since < pace.clear_s:
        return replace(known, below_since=since)
    level = Level.WARNING if known.level is Level.CRITICAL else Level.NORMAL
    why = known.reading if level is Level.NORMAL else f"{known.reading}; {known.level.value} until now"
    return replace(
        known, level=level, why=why, since=at, below_since=at if eased.rank < level.rank else None,
        normal_since=at if level is Level.NORMAL else None,
    )  # fmt: skip


def in_force(watch: Watch, now: float, pace: Pace = PACE) -> Level | None:
    """The level that may be acted on; None: nobody knows, which holds up no start, stops nobody, returns nobody."""
    if watch.known_at is None or now - watch.known_at > pace.stale_s:
        return None
    return watch.level
