"""Whom to stop when the machine runs out of memory, and when whoever was stopped may come back.

Only as many go as must: one at a time, and the next only once the memory of the one before is back and it still is
not enough. Whoever went comes back by itself, one at a time too, after it has been quiet for long; one that has gone
again and again stays away longer each time, so that a machine that is too small for all does not toil for ever.

All is a function of its arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from metal_supervisor.memory.pressure import PACE, Level, Pace, Watch, in_force
from metal_supervisor.spec.sizes import amount
from metal_supervisor.spec.types import Key


@dataclass(frozen=True)
class Candidate:
    """An engine that runs, or takes its memory to run."""

    key: Key
    priority: int
    """The larger the more important."""
    charge_bytes: int
    started: float
    """Only compared with that of others."""
    protected: bool = False
    busy: bool = False


@dataclass(frozen=True)
class EvictionChoice:
    """Who is to be stopped, or why nobody is."""

    victim: Key | None
    skipped: str
    """`empty`, `floor`, `all_protected` or `below_guard`; "" if there is a victim."""
    text: str
    """One sentence with the numbers."""


def _name(key: Key) -> str:
    return "/".join(key)


def _because(chosen: Candidate, other: Candidate) -> str:
    """What put one before the next in the order."""
    if chosen.priority != other.priority:
        return f"its priority {chosen.priority} is below the {other.priority} of {_name(other.key)}"
    if chosen.busy != other.busy:
        return f"it is idle and {_name(other.key)} is busy"
    if chosen.charge_bytes != other.charge_bytes:
        size, less = amount(chosen.charge_bytes, "up"), amount(other.charge_bytes, "down")
        return f"it takes {size} and {_name(other.key)} {less}"
    if chosen.started != other.started:
        return f"it runs longer than {_name(other.key)}"
    return f"its name comes before {_name(other.key)}"


def choose(candidates: Collection[Candidate], used_bytes: int, floor: int = 1, guard: float = 0.30) -> EvictionChoice:
    """Whom to stop: lowest priority, idle before busy, largest charge, longest running, then by name.

    `candidates`: all that run, without those that are leaving already; `floor` of them always stay. `used_bytes`:
    what is not available; all memory if that is not known. `guard`: the share of it that the engines must hold
    together, or else stopping them would not help.
    """
    if not candidates:
        return EvictionChoice(None, "empty", "no engine runs")
    if len(candidates) <= floor:
        return EvictionChoice(None, "floor", f"{len(candidates)} running, and {floor} must stay")
    able = [each for each in candidates if not each.protected]
    if not able:
        return EvictionChoice(None, "all_protected", f"all {len(candidates)} that run are protected from eviction")
    held = sum(each.charge_bytes for each in candidates)
    shares = f"{amount(held)} of {amount(used_bytes)} used"
    if held < guard * used_bytes:
        return EvictionChoice(
            None, "below_guard", f"engines hold {shares}, less than {guard:.0%}: others are the cause"
        )
    able.sort(key=lambda each: (each.priority, each.busy, -each.charge_bytes, each.started, each.key))
    why = _because(able[0], able[1]) if len(able) > 1 else "no other may be stopped"
    freed = amount(able[0].charge_bytes)
    return EvictionChoice(
        able[0].key, "", f"{_name(able[0].key)} is stopped to free {freed}: {why}; engines hold {shares}"
    )


def may_evict(watch: Watch, last_exit_at: float | None, still_leaving: bool, now: float, pace: Pace = PACE) -> bool:
    """Whether one more may be stopped now.

    `last_exit_at`: when the process of the last victim was seen to be gone, None if there was none.
    `still_leaving`: a process that was told to stop, for whatever reason, still holds its memory.
    The level alone is not enough, because it stays up for a while: the latest samples must be critical themselves,
    and after an exit there must be two that know of it.
    """
    if still_leaving or watch.level is not Level.CRITICAL or watch.raw is not Level.CRITICAL:
        return False
    if watch.known_at is None or watch.known_at != watch.at or now - watch.known_at > pace.gap_s:
        return False
    if not watch.desperate and watch.criticals < pace.raise_samples:
        return False
    if last_exit_at is None:
        return True
    seen = watch.known_before is not None and watch.known_before > last_exit_at
    return seen and now - last_exit_at >= pace.settle_s


# ── who returns ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Returning:
    """One that was stopped for want of memory and should come back."""

    key: Key
    priority: int
    evicted_at: float
    times: int = 1
    """How often it has been stopped, this time included."""


def back_off_s(times: int, pace: Pace = PACE) -> float:
    """How long one stays away that was stopped so often: 5, 10, 20, 40, then 60 minutes."""
    return float(min(pace.back_off_s * 2 ** min(max(times - 1, 0), 30), pace.back_off_limit_s))


def _over(since: float | None, length_s: float, now: float) -> bool:
    """Whether a wait is over. A clock that was set back behind its beginning ends it: it must not last for ever."""
    return since is None or not 0 <= now - since < length_s


def may_return(
    evicted: Sequence[Returning],
    watch: Watch,
    now: float,
    last_return_at: float | None,
    pace: Pace = PACE,
    clock: float | None = None,
) -> Key | None:
    """Who may come back now: the most important of those whose back-off is over, then who left first.

    Whether it fits into the budget is for the ledger to say. `now` is by the clock of the samples. `clock`: the
    present by that of `evicted_at` and `last_return_at`, if it is another one, such as Unix time that is kept over
    restarts. `watch` must have known Normal for a while without a gap, and still.
    """
    calm = in_force(watch, now, pace) is Level.NORMAL and watch.raw is Level.NORMAL
    if not calm or watch.normal_since is None or now - watch.normal_since < pace.recover_s:
        return None
    present = now if clock is None else clock
    if not _over(last_return_at, pace.return_every_s, present):
        return None
    able = [each for each in evicted if _over(each.evicted_at, back_off_s(each.times, pace), present)]
    return min(able, key=lambda each: (-each.priority, each.evicted_at, each.key)).key if able else None
