"""Who may start, when the memory is not enough for everybody.

Every engine that runs or starts is charged what it was estimated to take, or what it was measured to take if that
is more: an idle engine gives memory back to the system, but not its claim to it. Whatever waits is admitted only
if the sum stays within the budget, to the byte.

The queue: higher priority first, then who has waited longer. A later one may start past one that does not fit, but
only if both fit into the budget together, along with all others from behind it that have passed it already. So
nothing behind it ever keeps a big one out: it waits for what was there before it, and for what is ahead of it in
the queue. One that is larger than the whole budget holds up nobody.

A namespace may have a limit of its own. It is kept by the same rules among the engines of that namespace, and who waits
for it alone holds up nobody of another.

With preemption, lower priorities make room; what they leave is kept for whom they left it.
It is a function of its arguments alone: the order of the entries does not matter, and asking again changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from metal_supervisor.spec.sizes import amount
from metal_supervisor.spec.types import Key

INSUFFICIENT, CHECK_FAILED, PRESSURE = "InsufficientMemory", "MemoryCheckFailed", "MemoryPressure"
"""The words for why something waits; the first two are LLMKube's."""
UNKNOWN_STARTED = "its size is not known, so it was started without knowing whether it fits"


class LedgerPhase(str, Enum):
    """Where an engine stands."""

    WAITING = "waiting"
    STARTING = "starting"
    """Admitted; it takes its memory now."""
    RUNNING = "running"


@dataclass(frozen=True)
class Entry:
    """One engine in the ledger."""

    key: Key
    priority: int
    """The larger the more important."""
    estimate_bytes: int | None
    """None: nobody can tell."""
    phase: LedgerPhase
    asked: float
    """Unix time at which it began to wait; kept when it is admitted."""
    admitted: float = 0.0
    """Unix time at which it was admitted."""
    measured_bytes: int | None = None
    protected: bool = False
    """It is never displaced."""
    limit_bytes: int | None = None
    """What its Model allows it at most."""
    unknown_why: str = ""
    """Why its size is not known."""
    holds_bytes: int = 0
    """Of one that waits: what is its own already, and counts for another entry of it."""
    held_back: bool = False
    """Of one that waits: it may not start yet, whatever room there is; what is behind it does not pass it for that."""
    weights_bytes: int = 0
    """Weights within the estimate, 0 if they are not told apart."""
    optional: bool = False
    """Of one that waits: nobody waits for its sake."""

    @property
    def charge_bytes(self) -> int:
        """What it counts for."""
        return max(self.estimate_bytes or 0, self.measured_bytes or 0)

    @property
    def needs_bytes(self) -> int:
        """What has to be free for it."""
        return max(self.charge_bytes - self.holds_bytes, 0)

    @property
    def unknown(self) -> bool:
        return self.estimate_bytes is None and not self.measured_bytes


@dataclass(frozen=True)
class Decision:
    """What becomes of an engine that waits."""

    admitted: bool
    reason: str = ""
    """`InsufficientMemory`, `MemoryCheckFailed` or `MemoryPressure`; "" if it is admitted without more ado."""
    message: str = ""
    """The arithmetic, and what would help; of an admitted one, a warning."""
    position: int = 0
    """In the queue, from 1; 0 if it is admitted, or would not start however much room there was."""
    displaces: tuple[Key, ...] = ()
    """Who has to stop for it first; it starts once they have."""


@dataclass(frozen=True)
class Pool:
    """The memory that the engines of one namespace may take together."""

    limit_bytes: int
    leaving_bytes: int = 0
    """Of engines on their way out that are none of the entries."""


@dataclass(frozen=True)
class Ledger:
    """The whole of it."""

    budget_bytes: int
    charged_bytes: int
    """Of everything that runs, starts, or was admitted now."""
    decisions: Mapping[Key, Decision]
    """For every entry that waited."""
    charged: Mapping[str, int] = field(default_factory=dict)
    """Namespace with a limit -> its part of `charged_bytes`."""

    @property
    def left_bytes(self) -> int:
        """Negative if engines grew beyond the budget, or it shrank."""
        return self.budget_bytes - self.charged_bytes


def _rank(entry: Entry) -> tuple[int, float, Key]:
    return -entry.priority, entry.asked, entry.key


def _smaller(need: int, weights: int) -> tuple[str, ...]:
    """Changes of an engine that make it need less. `weights`: bytes of them, 0 if not known."""
    if weights and 2 * weights < need:
        return (f"a shorter context, as {amount(need - weights)} of that are not weights",)
    return "a smaller quantization", "a shorter context"


def _advice(need: int, weights: int, namespace: str = "") -> str:
    """Advice for an engine that does not fit. `namespace`: the one whose limit it exceeds, "" for this Mac's memory."""
    if namespace:
        return f"try {' or '.join(_smaller(need, weights))}, or have the limit raised"
    return f"try {', '.join(_smaller(need, weights))}, or --memory-fraction"


def _arithmetic(need: int, left: int, budget: int, weights: int) -> str:
    return f"needs {amount(need, 'up')}, {_room(left, budget)}; {_advice(need, weights)}"


def _room(left: int, budget: int) -> str:
    return f"{amount(max(left, 0), 'down')} of {amount(budget)} left"


class _Book:
    """The state of one pass over the queue."""

    def __init__(
        self,
        budget_bytes: int,
        admitted: Sequence[Entry],
        queued: frozenset[Key],
        leaving_bytes: int,
        namespace: str = "",
    ) -> None:
        """`namespace`: whose limit `budget_bytes` is, "" for that of the machine."""
        self.budget, self.namespace = budget_bytes, namespace
        self.admitted = list(admitted)
        self.charged = sum(entry.charge_bytes for entry in admitted) + leaving_bytes
        self.leaving_bytes = self.coming = leaving_bytes
        """Room that engines on their way out will leave, and that nobody waits for yet."""
        self.blocked: list[tuple[Entry, dict[Key, int]]] = []
        """Who waits ahead in the queue, and what has passed each of them, in bytes by key."""
        self.kept = 0
        """Room that is free but kept for those who wait for more."""
        self.leaving: set[Key] = set()
        self.queued = queued
        """Who waits for an edit keeps what it has: it counts on that."""

    @property
    def left(self) -> int:
        return self.budget - self.charged - self.kept

    def room(self, entry: Entry) -> str:
        """What there is for an entry, in words."""
        room = _room(self.left + entry.holds_bytes, self.budget)
        return f"{room} to namespace {self.namespace} (--namespace-memory)" if self.namespace else room

    def admit(self, entry: Entry) -> None:
        self.charged += entry.needs_bytes
        self.admitted.append(entry)
        for _, passed in self.blocked:
            passed[entry.key] = entry.charge_bytes

    def fits(self, entry: Entry) -> bool:
        """Whether it can start now without keeping out one that is ahead of it."""
        return entry.needs_bytes <= self.left and self.held_up_by(entry) is None

    def held_up_by(self, entry: Entry) -> Entry | None:
        """The one ahead in the queue that this one would keep out; what it takes the place of does not count too."""
        for ahead, passed in self.blocked:
            others = sum(size for key, size in passed.items() if key != entry.key)
            if ahead.charge_bytes + others + entry.charge_bytes > self.budget:
                return ahead
        return None

    def block(self, entry: Entry) -> None:
        passed = [each for each in self.admitted if _rank(each) > _rank(entry) and each.admitted >= entry.asked]
        self.blocked.append((entry, {each.key: each.charge_bytes for each in passed}))

    def victims(self, entry: Entry) -> list[Entry]:
        """Whom to stop so that the entry fits: lowest priority, largest, oldest; [] if it can't."""
        candidates = sorted(
            (
                each
                for each in self.admitted
                if each.priority < entry.priority
                and not each.protected
                and each.key not in self.leaving
                and each.key not in self.queued
                and each.phase is not LedgerPhase.WAITING
                and each.charge_bytes
            ),
            key=lambda each: (each.priority, -each.charge_bytes, each.admitted, each.key),
        )
        missing, chosen = entry.needs_bytes - self.left - self.coming, []
        for each in candidates:
            if missing <= 0:
                break
            chosen.append(each)
            missing -= each.charge_bytes
        if missing > 0:
            return []
        for each in reversed(chosen[:]):  # whoever turns out not to be needed stays, the most important first
            if missing + each.charge_bytes <= 0:
                chosen.remove(each)
                missing += each.charge_bytes
        return chosen

    def reserve(self, entry: Entry, victims: Sequence[Entry]) -> None:
        """Keeps for one that waits what will be left to it, and as much of what is free as it needs besides."""
        self.leaving.update(each.key for each in victims)
        missing = max(entry.needs_bytes - sum(each.charge_bytes for each in victims), 0)
        expected = min(missing, self.coming)
        self.coming -= expected
        self.kept += missing - expected


def _hopeless(entry: Entry, budget: int, left: int, mode: str) -> Decision | None:
    """The refusal of one that would not start however long it waited."""
    if entry.unknown and mode == "enforce":
        why = f" ({entry.unknown_why})" if entry.unknown_why else ""
        message = (
            f"its size is not known{why}, so nobody can tell whether it fits into the {amount(max(left, 0), 'down')} "
            "left; make its file or header readable, or set --memory-check-mode warn"
        )
        return Decision(False, CHECK_FAILED, message)
    room = left + entry.holds_bytes
    refusal = too_large(entry.charge_bytes, entry.limit_bytes, budget, room, entry.weights_bytes)
    return Decision(False, *refusal) if refusal else None


def over_pool(need: int, limit: int, namespace: str, weights: int = 0) -> tuple[str, str] | None:
    """(reason, message) for an engine that its namespace's limit does not allow even alone; None if it does."""
    if need <= limit:
        return None
    return INSUFFICIENT, (
        f"needs {amount(need, 'up')}, and the models of namespace {namespace} may take {amount(limit, 'down')} "
        f"together (--namespace-memory); {_advice(need, weights, namespace)}"
    )


def over_limit(need: int | None, limit: int | None, weights: int = 0) -> str:
    """Message about an engine that takes more than its Model allows, "" if it does not. `weights`: of its need."""
    if need is None or limit is None or need <= limit:
        return ""
    return (
        f"needs {amount(need, 'up')}, its Model allows {amount(limit, 'down')} (spec.hardware.memoryBudget or "
        f"memoryFraction); raise that, or try {' or '.join(_smaller(need, weights))}"
    )


def too_large(
    need: int | None, limit: int | None, budget: int, left: int, weights: int = 0
) -> tuple[str, str] | None:
    """(reason, message) for what its Model, or this machine, does not allow even alone; None if there is a chance."""
    if over := over_limit(need, limit, weights):
        return INSUFFICIENT, over
    if need is not None and need > budget:
        return INSUFFICIENT, _arithmetic(need, left, budget, weights)
    return None


def admit(
    budget_bytes: int,
    entries: Collection[Entry],
    mode: Literal["enforce", "warn"] = "enforce",
    preemption: bool = False,
    leaving_bytes: int = 0,
    paused: str = "",
    pools: Mapping[str, Pool] | None = None,
) -> Ledger:
    """Decides for everything that waits.

    `mode` is about engines of unknown size: refused, or admitted with a warning and charged what they are measured.
    `leaving_bytes`: what engines on their way out still hold; they are none of the entries. `paused`: why nothing
    that takes room may start now, "" if it may. `pools`: the limits of namespaces.
    """
    running = [entry for entry in entries if entry.phase is not LedgerPhase.WAITING]
    waiting = sorted((entry for entry in entries if entry.phase is LedgerPhase.WAITING), key=_rank)
    queued = frozenset(entry.key for entry in waiting)
    book = _Book(budget_bytes, running, queued, leaving_bytes)
    own = {}
    for name, pool in (pools or {}).items():
        inside = [each for each in running if each.key[0] == name]
        own[name] = _Book(pool.limit_bytes, inside, queued, pool.leaving_bytes, name)
    decisions: dict[Key, Decision] = {}
    position = 0
    for entry in waiting:
        books = [each for each in (own.get(entry.key[0]), book) if each is not None]
        if entry.held_back:
            for each in books:
                each.block(entry)
            decisions[entry.key] = Decision(False, PRESSURE)
        elif hopeless := _hopeless(entry, budget_bytes, book.left, mode) or _never(entry, books[0]):
            decisions[entry.key] = hopeless
        elif not entry.needs_bytes and not entry.unknown:  # an edit that gives room back
            for each in books:
                each.admit(entry)
            decisions[entry.key] = Decision(True)
        elif paused:
            position += 1
            decisions[entry.key] = Decision(False, PRESSURE, f"{paused} (queue position {position})", position)
        elif entry.unknown or all(each.fits(entry) for each in books):
            for each in books:
                each.admit(entry)
            decisions[entry.key] = Decision(True, CHECK_FAILED, UNKNOWN_STARTED) if entry.unknown else Decision(True)
        elif entry.optional:
            decisions[entry.key] = Decision(False, INSUFFICIENT)
        else:
            position += 1
            decisions[entry.key] = _wait(books, entry, position, preemption)
    return Ledger(budget_bytes, book.charged, decisions, {name: each.charged for name, each in own.items()})


def _never(entry: Entry, book: _Book) -> Decision | None:
    """The refusal of one that is larger than the limit of its namespace."""
    refusal = None
    if book.namespace:
        refusal = over_pool(entry.charge_bytes, book.budget, book.namespace, entry.weights_bytes)
    return Decision(False, *refusal) if refusal else None


def _wait(books: Sequence[_Book], entry: Entry, position: int, preemption: bool) -> Decision:
    """What becomes of one that does not fit in the first of these books that is short."""
    at = next(index for index, each in enumerate(books) if not each.fits(entry))
    decision = _queued(books[at], entry, position, preemption)
    for each in books[:at]:  # its namespace has room for it: none of the same namespace passes it
        each.block(entry)
    if decision.displaces:
        for each in books[at + 1 :]:  # what they leave is for whom they left it
            each.reserve(entry, [one for one in each.admitted if one.key in decision.displaces])
    return decision


def _queued(book: _Book, entry: Entry, position: int, preemption: bool) -> Decision:
    """What becomes of one that has to wait, and of those that make room for it."""
    held_up, need, left = book.held_up_by(entry), entry.needs_bytes, book.left
    there, advice = book.room(entry), _advice(entry.charge_bytes, entry.weights_bytes, book.namespace)
    message = f"needs {amount(entry.charge_bytes, 'up')}, {there}; {advice}"
    if need <= left and held_up is not None:
        message = (
            f"needs {amount(entry.charge_bytes, 'up')}, {there}, "
            f"but {_named(held_up.key)} needs {amount(held_up.charge_bytes, 'up')} and waits ahead of it"
        )
    victims = book.victims(entry) if preemption and held_up is None else []
    if victims:
        book.reserve(entry, victims)
        message += f"; {', '.join(_named(each.key) for each in victims)} will be stopped for it"
    elif held_up is None and need <= left + book.coming:
        book.reserve(entry, ())
        message = (
            f"needs {amount(entry.charge_bytes, 'up')}, {there}, "
            f"and {amount(book.leaving_bytes)} more when what is ending has ended"
        )
    else:
        book.block(entry)
    text = f"{message} (queue position {position})"
    return Decision(False, INSUFFICIENT, text, position, tuple(each.key for each in victims))


def _named(key: Key) -> str:
    return "/".join(key)
