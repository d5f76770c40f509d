"""Admission: the engines that may start when memory is not enough for all.

Every running or starting engine is charged its estimate, or its measured footprint if that is more: an idle engine
returns memory to the system, but keeps its reservation. A waiting engine is admitted only if the sum of the charges
stays within the budget, to the byte.

The queue: higher priority first, then the longest wait. A later entry may pass one that does not fit, but only if both
fit into the budget together, with all others from behind that have passed it already. So nothing behind a large engine
ever keeps it out: it waits only for what was there before it, and for what is ahead of it in the queue. An engine that
is larger than the whole budget blocks nothing, and one that could not start even without the engines on demand blocks
none of these: an on-demand engine gives its memory back as soon as that helps one ahead of it.

Engines that yield are stopped to make room, and with preemption also those of lower priority; that room is reserved
for the engine that they were stopped for. `admit` is a pure function: the order of the entries does not matter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from metal_supervisor.memory.refusals import (
    CHECK_FAILED,
    INSUFFICIENT,
    PRESSURE,
    UNKNOWN_STARTED,
    advice_for,
    room_left,
    too_large,
)
from metal_supervisor.spec.sizes import amount
from metal_supervisor.spec.types import Key, shown_to


@dataclass(frozen=True)
class Entry:
    """One engine in the ledger."""

    key: Key
    priority: int
    """Larger is more important."""
    estimate_bytes: int | None
    """None if unknown."""
    waits: bool
    """False once it is admitted, whether it has started yet or not."""
    asked: float
    """Unix time at which it began to wait; unchanged when it is admitted."""
    admitted: float = 0.0
    """Unix time at which it was admitted."""
    measured_bytes: int | None = None
    protected: bool = False
    """True if it is never preempted."""
    limit_bytes: int | None = None
    """Limit from its Model, None without one."""
    unknown_why: str = ""
    """Reason why its size is not known."""
    holds_bytes: int = 0
    """If it waits: bytes that it holds already, charged to another entry of the same service."""
    held_back: bool = False
    """If it waits: it may not start yet, however much is free, but keeps its place against those behind it."""
    weights_bytes: int = 0
    """Weights within the estimate, 0 if unknown."""
    optional: bool = False
    """If it waits: it never blocks the queue."""
    on_demand: bool = False
    """It gives its memory, once it has some, to any that waits ahead of it."""
    yields_before: float = float("-inf")
    """If it runs: it gives its memory to an engine of no lower priority that has waited since before this Unix time."""
    busy: bool = False
    """If it yields, or may be evicted: it works, and others go first."""
    used_at: float = 0.0
    """If it yields: Unix time of its latest use."""

    @property
    def charge_bytes(self) -> int:
        """Bytes charged for it: the larger of estimate and measured footprint."""
        return max(self.estimate_bytes or 0, self.measured_bytes or 0)

    @property
    def needs_bytes(self) -> int:
        """Bytes that must be free to admit it."""
        return max(self.charge_bytes - self.holds_bytes, 0)

    @property
    def unknown(self) -> bool:
        return self.estimate_bytes is None and not self.measured_bytes


@dataclass(frozen=True)
class Decision:
    """Decision on a waiting engine."""

    admitted: bool
    reason: str = ""
    """`InsufficientMemory`, `MemoryCheckFailed` or `MemoryPressure`; "" if it is admitted without a warning."""
    message: str = ""
    """The arithmetic and advice; if it is admitted, a warning."""
    position: int = 0
    """Position in the queue, from 1; 0 if it has none."""
    displaces: tuple[Key, ...] = ()
    """Engines to stop for it; it starts once they have stopped."""
    blocked: bool = False
    """True if it waits for memory, and no engine is ending for it."""


@dataclass(frozen=True)
class Ledger:
    """Result of `admit`."""

    charged_bytes: int
    """Charges of all engines that are running, starting, stopping, or admitted now."""
    decisions: Mapping[Key, Decision]
    """Decision on every entry that was waiting."""


def _rank(entry: Entry) -> tuple[int, float, Key]:
    return -entry.priority, entry.asked, entry.key


class _Blocked:
    """An entry that waits ahead in the queue, with those that have passed it."""

    def __init__(self, entry: Entry, stuck: bool) -> None:
        """`stuck`: it cannot start before an engine that stays has ended, whatever the engines on demand do."""
        self.entry, self.stuck = entry, stuck
        self._passed: dict[Key, int] = {}
        self._bytes = entry.charge_bytes
        """Of itself and all that have passed it: added up here, as every entry behind asks for it."""

    def passes(self, entry: Entry) -> None:
        """Count an entry that has passed it; once only, whatever it was charged before.

        One that gives its memory back is not counted where that is not enough: it would keep out others in its stead.
        """
        if entry.on_demand and self.stuck:
            return
        self._bytes += entry.charge_bytes - self._passed.get(entry.key, 0)
        self._passed[entry.key] = entry.charge_bytes

    def bytes_beside(self, key: Key) -> int:
        """Bytes of itself and of those that have passed it, but those of one key."""
        return self._bytes - self._passed.get(key, 0)


class _Book:
    """State of one pass over the queue."""

    def __init__(
        self,
        budget_bytes: int,
        admitted: Sequence[Entry],
        queued: frozenset[Key],
        leaving_bytes: int,
        preemption: bool,
    ) -> None:
        self.budget, self.preemption = budget_bytes, preemption
        self.admitted = list(admitted)
        self.charged = sum(entry.charge_bytes for entry in admitted) + leaving_bytes
        self.leaving_bytes = self.coming = leaving_bytes
        """Bytes that stopping engines will free, and that are not reserved for a waiting one yet."""
        self.blocked: list[_Blocked] = []
        """Entries that wait ahead in the queue."""
        self.kept = 0
        """Free bytes that are reserved for entries that wait for more."""
        self.leaving: set[Key] = set()
        self.queued = queued
        """Keys with a waiting entry. An engine that waits for an edit is not preempted: the edit counts its memory."""

    @property
    def left(self) -> int:
        return self.budget - self.charged - self.kept

    def room(self, entry: Entry) -> str:
        """Text about the memory that is left for an entry."""
        return room_left(self.left + entry.holds_bytes, self.budget)

    def admit(self, entry: Entry) -> None:
        self.charged += entry.needs_bytes
        self.admitted.append(entry)
        for ahead in self.blocked:
            ahead.passes(entry)

    def fits(self, entry: Entry) -> bool:
        """True if an entry can start now without keeping out one ahead of it."""
        return entry.needs_bytes <= self.left and self.held_up_by(entry) is None

    def held_up_by(self, entry: Entry) -> Entry | None:
        """First entry ahead in the queue that this one would keep out, None if there is none.

        Bytes of the same key that passed it earlier do not count twice.
        """
        for ahead in self.blocked:
            if entry.on_demand and ahead.stuck:
                continue
            if ahead.bytes_beside(entry.key) + entry.charge_bytes > self.budget:
                return ahead.entry
        return None

    def block(self, entry: Entry) -> None:
        """Queue an entry."""
        stays_bytes = sum(each.charge_bytes for each in self.admitted if self._stays(each, entry))
        blocked = _Blocked(entry, entry.charge_bytes + stays_bytes > self.budget)
        for each in self.admitted:
            if each.admitted >= entry.asked and _rank(each) > _rank(entry):
                blocked.passes(each)
        self.blocked.append(blocked)

    def _stays(self, each: Entry, entry: Entry) -> bool:
        """True if an engine goes on for as long as its service does, whoever waits."""
        preempted = self.preemption and each.priority < entry.priority and not each.protected
        return not each.on_demand and not preempted and each.key != entry.key and each.key not in self.leaving

    def victims(self, entry: Entry) -> list[Entry]:
        """Engines to stop so that an entry fits; [] if that is not enough. None of them is protected.

        First those that yield: lowest priority, idle before busy, longest unused. Then, with preemption, those of a
        lower priority: the lowest first, then the largest, then the oldest.
        """
        candidates = sorted(
            (
                each
                for each in self.admitted
                if (_yields(each, entry) or (self.preemption and each.priority < entry.priority))
                and not each.protected
                and each.key not in self.leaving
                and each.key not in self.queued
                and not each.waits
                and each.charge_bytes
            ),
            key=lambda each: _order(each, _yields(each, entry)),
        )
        missing, chosen = entry.needs_bytes - self.left - self.coming, []
        for each in candidates:
            if missing <= 0:
                break
            chosen.append(each)
            missing -= each.charge_bytes
        if missing > 0:
            return []
        for each in reversed(chosen[:]):  # spare those that are not needed after all, the most important first
            if missing + each.charge_bytes <= 0:
                chosen.remove(each)
                missing += each.charge_bytes
        return chosen

    def reserve(self, entry: Entry, victims: Sequence[Entry]) -> None:
        """Reserve memory for a waiting entry: what the victims free, then coming and free bytes as needed."""
        self.leaving.update(each.key for each in victims)
        missing = max(entry.needs_bytes - sum(each.charge_bytes for each in victims), 0)
        expected = min(missing, self.coming)
        self.coming -= expected
        self.kept += missing - expected


def _yields(each: Entry, entry: Entry) -> bool:
    """True if an engine gives its memory to a waiting entry of its own accord."""
    return entry.asked <= each.yields_before and each.priority <= entry.priority


def _order(each: Entry, yields: bool) -> tuple[object, ...]:
    """Order in which engines are stopped for another."""
    if yields:
        return 0, each.priority, each.busy, each.used_at, each.key
    return 1, each.priority, -each.charge_bytes, each.admitted, each.key


def _hopeless(entry: Entry, book: _Book, mode: str) -> Decision | None:
    """Refusal of an entry that could never start, however long it waited; None if it could."""
    if entry.unknown and mode == "enforce":
        why = f" ({entry.unknown_why})" if entry.unknown_why else ""
        left = amount(max(book.left, 0), "down")
        message = (
            f"its size is not known{why}, so it is unknown whether it fits into the {left} "
            "left; make its file or header readable, or set --memory-check-mode warn"
        )
        return Decision(False, CHECK_FAILED, message)
    room = book.left + entry.holds_bytes
    refusal = too_large(entry.charge_bytes, entry.limit_bytes, book.budget, room, entry.weights_bytes)
    return Decision(False, INSUFFICIENT, refusal, blocked=True) if refusal else None


def admit(
    budget_bytes: int,
    entries: Collection[Entry],
    mode: Literal["enforce", "warn"] = "enforce",
    preemption: bool = False,
    leaving_bytes: int = 0,
    paused: str = "",
) -> Ledger:
    """Decide on every waiting entry.

    `mode`: engines of unknown size are refused ("enforce"), or admitted with a warning and charged their measured
    footprint ("warn"). `leaving_bytes`: memory of stopping engines that are not among the entries. `paused`: reason why
    no engine that needs memory may start now, "" if it may.
    """
    running = [entry for entry in entries if not entry.waits]
    waiting = sorted((entry for entry in entries if entry.waits), key=_rank)
    queued = frozenset(entry.key for entry in waiting if not entry.optional)
    book = _Book(budget_bytes, running, queued, leaving_bytes, preemption)
    decisions: dict[Key, Decision] = {}
    position = 0
    for entry in waiting:
        hopeless = _hopeless(entry, book, mode)
        if entry.held_back:
            if hopeless is None:
                book.block(entry)
            decisions[entry.key] = Decision(False, PRESSURE, blocked=True)
        elif hopeless is not None:
            decisions[entry.key] = hopeless
        elif paused and (entry.needs_bytes or entry.unknown):  # not an edit that needs no more memory
            position += 1
            decisions[entry.key] = Decision(False, PRESSURE, f"{paused} (queue position {position})", position)
        elif entry.unknown or not entry.needs_bytes or book.fits(entry):
            book.admit(entry)
            decisions[entry.key] = Decision(True, CHECK_FAILED, UNKNOWN_STARTED) if entry.unknown else Decision(True)
        elif entry.optional:
            need = amount(entry.charge_bytes, "up")
            decisions[entry.key] = Decision(False, INSUFFICIENT, f"needs {need}, {book.room(entry)}")
        else:
            position += 1
            decisions[entry.key] = _queued(book, entry, position)
    return Ledger(book.charged, decisions)


def _queued(book: _Book, entry: Entry, position: int) -> Decision:
    """Queue an entry: choose the engines to stop for it, reserve memory, and compose the message."""
    held_up, need, left = book.held_up_by(entry), entry.needs_bytes, book.left
    needs = f"needs {amount(entry.charge_bytes, 'up')}, {book.room(entry)}"
    message = f"{needs}; {advice_for(entry.charge_bytes, entry.weights_bytes)}"
    if need <= left and held_up is not None:
        ahead = f"{shown_to(entry.key[0], held_up.key)} needs {amount(held_up.charge_bytes, 'up')}"
        message = f"{needs}, but {ahead} and waits ahead of it"
    victims = book.victims(entry) if held_up is None else []
    blocked = False
    if victims:
        book.reserve(entry, victims)
        names = dict.fromkeys(shown_to(entry.key[0], each.key) for each in victims)
        message += f"; {', '.join(names)} will be stopped for it"
    elif held_up is None and need <= left + book.coming:
        book.reserve(entry, ())
        message = f"{needs}, and {amount(book.leaving_bytes)} more when what is ending has ended"
    else:
        book.block(entry)
        blocked = True
    text = f"{message} (queue position {position})"
    return Decision(False, INSUFFICIENT, text, position, tuple(each.key for each in victims), blocked)
