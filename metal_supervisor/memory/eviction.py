"""Eviction of engines under memory pressure, and their return.

No more engines are evicted than necessary: one at a time, and the next only once the memory of the last one is free and
still not enough. Evicted engines are readmitted one at a time, after memory has been Normal for a while. Each further
eviction doubles an engine's back-off, so that a machine that is too small for all does not restart them for ever.

All functions are pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from metal_supervisor.memory.ledger import Entry
from metal_supervisor.memory.pressure import PACE, Level, Pace, Watch, in_force
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.resources import rank_of
from metal_supervisor.spec.sizes import amount
from metal_supervisor.spec.types import Key


@dataclass(frozen=True)
class EvictionChoice:
    """The engine to evict, or the reason why none is."""

    victim: Key | None
    skipped: str
    """`empty`, `floor`, `all_protected` or `below_guard`; "" if there is a victim."""
    text: str
    """One sentence with the numbers."""


def _because(chosen: Entry, other: Entry) -> str:
    """Reason why one candidate comes before the next in the order of eviction."""
    name = "/".join(other.key)
    if chosen.priority != other.priority:
        return f"its priority {chosen.priority} is below the {other.priority} of {name}"
    if chosen.busy != other.busy:
        return f"it is idle and {name} is busy"
    if chosen.charge_bytes != other.charge_bytes:
        size, less = amount(chosen.charge_bytes, "up"), amount(other.charge_bytes, "down")
        return f"it takes {size} and {name} {less}"
    if chosen.admitted != other.admitted:
        return f"it runs longer than {name}"
    return f"its name comes before {name}"


def choose(candidates: Collection[Entry], used_bytes: int, floor: int = 1, guard: float = 0.30) -> EvictionChoice:
    """Choose the engine to evict: lowest priority, idle before busy, largest charge, longest running, then by name.

    `candidates`: all that are running, except those that are stopping already; `floor` of them always stay.
    `used_bytes`: memory that is not available; all of it if that is unknown. `guard`: share of `used_bytes` that the
    engines must hold together, or else stopping one would not help.
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
        text = f"engines hold {shares}, less than {guard:.0%}: others are the cause"
        return EvictionChoice(None, "below_guard", text)
    able.sort(key=lambda each: (each.priority, each.busy, -each.charge_bytes, each.admitted, each.key))
    why = _because(able[0], able[1]) if len(able) > 1 else "no other may be stopped"
    name, freed = "/".join(able[0].key), amount(able[0].charge_bytes)
    return EvictionChoice(able[0].key, "", f"{name} is stopped to free {freed}: {why}; engines hold {shares}")


def may_evict(watch: Watch, last_exit_at: float | None, still_leaving: bool, now: float, pace: Pace = PACE) -> bool:
    """True if another engine may be evicted now.

    `last_exit_at`: time at which the last victim's process was seen to be gone, None if there was none.
    `still_leaving`: True if a process that was told to stop, for whatever reason, still holds its memory.
    The level alone is not enough, because it falls with a delay: the latest samples must be critical themselves, and
    after an exit two of them must be later than it.
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


def back_off_s(times: int, pace: Pace = PACE) -> float:
    """Back-off in seconds after so many evictions: 5, 10, 20, 40, then 60 minutes."""
    return float(min(pace.back_off_s * 2 ** min(max(times - 1, 0), 30), pace.back_off_limit_s))


def _over(since: float | None, length_s: float, now: float) -> bool:
    """True if a wait is over or never began. A clock that was set back before `since` ends it, as it has to end."""
    return since is None or not 0 <= now - since < length_s


def may_return(
    evicted: Iterable[Record],
    watch: Watch,
    now: float,
    last_return_at: float | None,
    pace: Pace = PACE,
    clock: float | None = None,
) -> Key | None:
    """Choose the engine that may return now, None if none may: of those whose back-off is over, the one with the
    highest priority, then the one evicted first. The ledger decides whether it fits into the budget.

    `watch`: must be Normal, without a gap for `pace.recover_s`, up to now. `now`: by the clock of the samples.
    `clock`: the present by the clock of `evicted_at` and `last_return_at`, if that is another one, such as Unix time,
    which lasts over restarts.
    """
    calm = in_force(watch, now, pace) is Level.NORMAL and watch.raw is Level.NORMAL
    if not calm or watch.normal_since is None or now - watch.normal_since < pace.recover_s:
        return None
    present = now if clock is None else clock
    if not _over(last_return_at, pace.return_every_s, present):
        return None
    able = [
        (-rank_of(each.priority), each.evicted_at or 0.0, each.key)
        for each in evicted
        if _over(each.evicted_at, back_off_s(each.evictions, pace), present)
    ]
    return min(able)[2] if able else None
