"""Memory pressure: the level of the machine, from samples of its memory.

The budget bounds the engines; it does not cover the browser and the build next to them. A Mac that runs out of memory
reboots, so the memory that is really available has to be watched. Of four signals the worst counts: the available
memory, the kernel's own level, the time that tasks waited for memory (PSI), and the growth of swap. Thresholds are
scaled to the headroom, which is the memory beyond the budget: with engines that use the whole budget, exactly the
headroom is available, so fixed shares would be critical for ever on a well used machine.

A single sample changes no level, unless it is desperate. A level falls one step at a time, after the signals have been
well below it for a while. A signal that cannot be read is ignored, and a sample without any changes no level; after a
while without any signal, the level is no longer in force. Samples that are far apart, because the machine slept, are
not consecutive, and the time between them does not count.

All functions are pure. Times are seconds of the clock that stamps the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from metal_supervisor.spec.sizes import MIB, amount

WARNING_OF_HEADROOM = 0.50
CRITICAL_OF_HEADROOM = 0.25
STALL_PERCENT = 10.0
SWAP_WARNING_BYTES_PER_S = 32.0 * MIB
SWAP_CRITICAL_BYTES_PER_S = 256.0 * MIB
EASE = 1.25
"""Factor by which a signal must be better than its threshold to count as well below (hysteresis)."""
DESPERATE = 0.5
"""Share of the critical threshold below which one sample is enough."""
HISTORY = 60
"""Most samples of swap that are kept."""


class Level(Enum):
    """Level of memory pressure."""

    NORMAL = "Normal"
    WARNING = "Warning"
    """No new engines are started."""
    CRITICAL = "Critical"
    """Engines are evicted, if that is allowed."""

    @property
    def rank(self) -> int:
        """Order of the levels; larger is worse."""
        return (Level.NORMAL, Level.WARNING, Level.CRITICAL).index(self)


KERNEL = {1: Level.NORMAL, 2: Level.WARNING, 4: Level.CRITICAL}


@dataclass(frozen=True)
class Pace:
    """Delays of raising and lowering a level, and of evictions and returns."""

    raise_samples: int = 2
    """Consecutive samples that raise a level."""
    clear_s: float = 60.0
    """Time well below a level before it falls one step."""
    gap_s: float = 30.0
    """Samples further apart are not consecutive."""
    stale_s: float = 60.0
    """Time for which a level is in force without a known sample."""
    swap_window_s: float = 60.0
    """Window for the growth of swap; unknown before a quarter of it has passed."""
    settle_s: float = 20.0
    """Least time from the exit of one victim to the next eviction."""
    recover_s: float = 300.0
    """Time at Normal before an evicted engine returns."""
    return_every_s: float = 60.0
    """Least time between two returns."""
    back_off_s: float = 300.0
    """Back-off after an engine's first eviction; doubled with each further one."""
    back_off_limit_s: float = 3600.0


PACE = Pace()


@dataclass(frozen=True)
class MemorySample:
    """Memory of the machine at one time; a value that could not be read is None."""

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
    """Per cent of the last 10 s in which all tasks waited for memory at once (PSI)."""
    problems: tuple[str, ...] = ()
    """Reasons why values could not be read."""
    wired_bytes: int | None = None
    """Memory that can be neither paged out nor compressed; macOS only, and not a signal."""


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of the levels on one machine."""

    warning_bytes: int
    """Available bytes below which the level is Warning."""
    critical_bytes: int


def thresholds(total_bytes: int, budget_bytes: int, warning: float = 0.20, critical: float = 0.10) -> Thresholds:
    """Thresholds of a machine whose engines may use `budget_bytes`.

    `warning`, `critical`: shares of the memory, as upper bounds; half and a quarter of the headroom are used
    if they are less. Without any headroom the available memory is not a signal, and only the others remain.
    """
    headroom_bytes = max(total_bytes - budget_bytes, 0)
    warning_bytes = min(round(warning * total_bytes), round(WARNING_OF_HEADROOM * headroom_bytes))
    critical_bytes = min(round(critical * total_bytes), round(CRITICAL_OF_HEADROOM * headroom_bytes), warning_bytes)
    return Thresholds(warning_bytes, critical_bytes)


@dataclass(frozen=True)
class Watch:
    """State of the watch after all samples so far."""

    level: Level = Level.NORMAL
    why: str = "nothing is known yet"
    """One line with the numbers that led to this level; changes only with the level."""
    since: float = 0.0
    """Start of this level."""
    normal_since: float | None = None
    """Start of Normal without a gap between samples, None at other levels."""
    raw: Level = Level.NORMAL
    """Level of the latest known sample alone."""
    reading: str = "nothing is known yet"
    """One line about the latest sample."""
    at: float | None = None
    """Time of the latest sample."""
    known_at: float | None = None
    """Time of the latest known sample: one with at least one signal."""
    known_before: float | None = None
    """Time of the known sample before that."""
    desperate: bool = False
    """True if the latest known sample is enough to raise the level by itself."""
    warnings: int = 0
    """Consecutive known samples at Warning or worse."""
    criticals: int = 0
    below_since: float | None = None
    """Start of the signals being well below the level, None while they are not."""
    swap: tuple[tuple[float, int], ...] = ()
    """(at, bytes used) over the latest window."""


def _swap_growth(swap: Sequence[tuple[float, int]], pace: Pace) -> float | None:
    """Growth of swap in bytes per second over the window, None if there are too few samples."""
    if not swap or swap[-1][0] - swap[0][0] < pace.swap_window_s / 4 or len(swap) < 2:
        return None
    return (swap[-1][1] - swap[0][1]) / (swap[-1][0] - swap[0][0])


def _signals(sample: MemorySample, growth: float | None, limits: Thresholds, ease: float) -> list[tuple[Level, str]]:
    """(level, text) of each signal that can be read. `ease`: factor by which signals must be better than thresholds."""
    found: list[tuple[Level, str]] = []

    def add(critical: bool, warning: bool, text: str) -> None:
        found.append((Level.CRITICAL if critical else Level.WARNING if warning else Level.NORMAL, text))

    available, warning_bytes, critical_bytes = sample.available_bytes, limits.warning_bytes, limits.critical_bytes
    if available is not None:
        critical, warning = available < critical_bytes * ease, available < warning_bytes * ease
        text = f"{amount(available)} of {amount(sample.total_bytes)} available"
        if warning:
            share = 100 * (critical_bytes if critical else warning_bytes) / sample.total_bytes
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
    """State after one more sample; a sample that is not newer than the latest is ignored."""
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
        before,
        at=sample.at,
        known_at=sample.at,
        known_before=before.known_at,
        raw=raw,
        reading=reading,
        swap=swap,
        desperate=sample.available_bytes is not None and sample.available_bytes < DESPERATE * limits.critical_bytes,
        warnings=0 if raw is Level.NORMAL else 1 + (0 if apart else before.warnings),
        criticals=0 if raw is not Level.CRITICAL else 1 + (0 if apart else before.criticals),
    )
    if before.level is Level.NORMAL and (apart or before.normal_since is None):
        known = replace(known, normal_since=sample.at)
    if before.known_at is None:
        known = replace(known, since=sample.at, why=reading)
    if (target := _raised(known, pace)).rank > known.level.rank:
        return replace(known, level=target, why=reading, since=sample.at, normal_since=None, below_since=None)
    eased = max((level for level, _ in _signals(sample, growth, limits, EASE)), key=lambda level: level.rank)
    return _lowered(known, eased, apart, pace)


def _raised(known: Watch, pace: Pace) -> Level:
    """Level that the latest consecutive samples amount to."""
    if known.desperate or known.criticals >= pace.raise_samples:
        return Level.CRITICAL
    return Level.WARNING if known.warnings >= pace.raise_samples else Level.NORMAL


def _lowered(known: Watch, eased: Level, apart: bool, pace: Pace) -> Watch:
    """State one level lower once the signals have been well below for `clear_s`; the next step takes as long again."""
    at = known.known_at or 0.0
    if eased.rank >= known.level.rank:
        return replace(known, below_since=None)
    since = at if apart or known.below_since is None else known.below_since
    if at - since < pace.clear_s:
        return replace(known, below_since=since)
    level = Level.WARNING if known.level is Level.CRITICAL else Level.NORMAL
    why = known.reading if level is Level.NORMAL else f"{known.reading}; {known.level.value} until now"
    return replace(
        known,
        level=level,
        why=why,
        since=at,
        below_since=at if eased.rank < level.rank else None,
        normal_since=at if level is Level.NORMAL else None,
    )


def in_force(watch: Watch, now: float, pace: Pace = PACE) -> Level | None:
    """Level to act on; None if unknown, which blocks no start, evicts no engine and lets none return."""
    if watch.known_at is None or now - watch.known_at > pace.stale_s:
        return None
    return watch.level
