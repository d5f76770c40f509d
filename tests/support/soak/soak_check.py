"""What must hold while a soak does its worst, as functions of what was seen. No clock, no process, no socket.

Each rule has a number, by which a violation is reported:

1. Never two live engines of one service. A live engine is a process with the service's `--alias` that is no
   zombie and no launcher; a sample holds only what two readings a moment apart both found.
2. No endpoint is ready for more than `grace_s` while no engine of its service lives. The clock runs from the
   sample that first finds none to the answer of the API that still calls it ready. It stands while the sidecar
   or the API does not answer, or is held by a fault of ours; one that starts within `PAUSE_S` after that has
   `PAUSE_S` more, because that long the sidecar may rest between two attempts to reach an API that was away.
3. An answer under way is never cut, and an engine never restarted, unless something was done to that very
   service since everything was last quiet. What is done to our own processes is no excuse.
4. No file is lost.  5. No process and no descriptor is leaked.
6. What the specs of all live engines reserve is never more than the budget. One on its way out counts until it is
   gone; one that somebody started with supervisorctl although it is switched off does not.
7. Once faults stop, all is as it was asked for. A service, or an edit of one, may wait for memory, but only while it
   would not fit, or would keep out one that waits ahead of it (`overdue`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

PAUSE_S = 1.5
FD_SLACK = 8
FD_PER_ENGINE = 4


@dataclass(frozen=True)
class Engine:
    """One live engine process."""

    pid: int
    service: str
    port: int
    started: float = 0.0
    reserved_bytes: int = 0
    """By the spec that it was started from."""


@dataclass(frozen=True)
class Sample:
    """What was there at one moment."""

    at: float
    """Monotonic time at which the processes were read."""
    engines: tuple[Engine, ...]
    told_at: float = 0.0
    """Monotonic time at which the API was asked for `ready`."""
    ready: frozenset[str] | None = frozenset()
    """Services with a ready endpoint; None if the API did not answer."""
    sidecar: bool = True
    """Whether the sidecar answered."""
    held: frozenset[str] = frozenset()
    """What our own faults hold down: `sidecar`, `apiserver`, and what soak_faults.py has excluded besides."""

    @property
    def steady(self) -> bool:
        return self.sidecar and self.ready is not None and not self.held


@dataclass(frozen=True)
class Violation:
    """A broken rule."""

    rule: int
    at: float
    text: str


@dataclass(frozen=True)
class Answer:
    """One streamed answer of an engine, or the attempt to get one."""

    service: str
    began: float
    ended: float
    asked: int
    """Tokens asked for."""
    got: int
    """Events that came."""
    error: str = ""
    """Why it is not whole, "" if it is."""


@dataclass(frozen=True)
class Resources:
    """What one of our processes held at a quiet moment."""

    role: str
    pid: int
    fds: int
    rss_bytes: int
    engines: int
    """How many engines ran: each needs a few descriptors."""


@dataclass
class Excuses:
    """When something was done to a service, and when all was quiet."""

    touches: list[tuple[float, str]] = field(default_factory=list)
    quiets: list[float] = field(default_factory=list)
    by_hand: dict[str, float] = field(default_factory=dict)
    """Service that is switched off -> Unix time since when a start of its engine is somebody's own doing."""

    def touch(self, at: float, service: str) -> None:
        self.touches.append((at, service))

    def covers(self, service: str, began: float, ended: float) -> bool:
        """Whether something was done to the service between the last quiet moment before `began` and `ended`."""
        since = max((at for at in self.quiets if at <= began), default=float("-inf"))
        return any(since <= at <= ended for at, name in self.touches if name == service)


class Checker:
    """Rules 1 to 3 and 6 over samples in the order in which they were taken."""

    def __init__(self, grace_s: float, excuses: Excuses, budget_bytes: int | None = None) -> None:
        self._grace_s, self._excuses, self._budget_bytes = grace_s, excuses, budget_bytes
        self._over = False
        self._dead_since: dict[str, float] = {}
        self._unsteady_at = float("-inf")
        self._doubled: frozenset[str] = frozenset()
        self._last: dict[str, tuple[Engine, float]] = {}
        self.excused_restarts = 0
        self.unasked_restarts = 0
        self.longest_dead_s = 0.0
        self.steady = 0
        """Samples in which rule 2 could have been found broken."""
        self.peak_bytes = 0
        """The most that was ever reserved for live engines."""
        self.unsized = 0
        """Samples with an engine of which nobody could read what is reserved for it."""

    def see(self, sample: Sample) -> list[Violation]:
        """What this sample breaks."""
        return [
            *self._doubles(sample),
            *self._dead_endpoints(sample),
            *self._restarts(sample),
            *self._over_budget(sample),
        ]

    def _doubles(self, sample: Sample) -> list[Violation]:
        found: dict[str, list[Engine]] = {}
        for engine in sample.engines:
            found.setdefault(engine.service, []).append(engine)
        doubled = {name: several for name, several in found.items() if len(several) > 1}
        news, self._doubled = doubled.keys() - self._doubled, frozenset(doubled)
        return [
            Violation(
                1,
                sample.at,
                f"{name} has {len(doubled[name])} live engines: "
                + ", ".join(f"pid {each.pid} on port {each.port}" for each in doubled[name]),
            )
            for name in sorted(news)
        ]

    def _dead_endpoints(self, sample: Sample) -> list[Violation]:
        if not sample.steady:
            self._unsteady_at = sample.at
            self._dead_since = {}
            return []
        assert sample.ready is not None
        self.steady += 1
        dead = sample.ready - {engine.service for engine in sample.engines}
        self._dead_since = {name: self._dead_since.get(name, sample.at) for name in dead}
        found = []
        for name, since in sorted(self._dead_since.items()):
            lasted_s = sample.told_at - since
            allowed_s = self._grace_s + (PAUSE_S if since - self._unsteady_at <= PAUSE_S else 0.0)
            self.longest_dead_s = max(self.longest_dead_s, lasted_s)
            if lasted_s > allowed_s:
                found.append(Violation(2, sample.at, f"{name}: no engine, and ready for {lasted_s:.2f} s all the same"))
                self._dead_since[name] = float("inf")  # said once
        return found

    def _restarts(self, sample: Sample) -> list[Violation]:
        found = []
        for engine in sample.engines:
            if engine.service in self._doubled:
                continue  # which of them is the service's is anybody's guess
            before = self._last.get(engine.service)
            self._last[engine.service] = engine, sample.at
            if before is None or before[0].pid == engine.pid:
                continue
            if self._excuses.covers(engine.service, before[1], sample.at):
                self.excused_restarts += 1
            else:
                self.unasked_restarts += 1
                text = f"{engine.service}: pid {before[0].pid} became {engine.pid}, and nothing was done to it"
                found.append(Violation(3, sample.at, text))
        return found

    def _over_budget(self, sample: Sample) -> list[Violation]:
        theirs = self._excuses.by_hand
        counted = [each for each in sample.engines if each.started < theirs.get(each.service, float("inf"))]
        reserved = reserved_bytes(counted)
        self.peak_bytes = max(self.peak_bytes, reserved)
        self.unsized += any(not engine.reserved_bytes for engine in sample.engines)
        before, self._over = self._over, self._budget_bytes is not None and reserved > self._budget_bytes
        if not self._over or before:
            return []
        parts = ", ".join(f"{each.service} {each.reserved_bytes} (pid {each.pid})" for each in counted)
        return [Violation(6, sample.at, f"{reserved} bytes of a budget of {self._budget_bytes}: {parts}")]

    def forget(self, service: str) -> None:
        """The service was deleted: whatever comes by its name is another one."""
        self._last.pop(service, None)


def reserved_bytes(engines: Iterable[Engine]) -> int:
    """What is reserved for all of them together."""
    return sum(max(engine.reserved_bytes, 0) for engine in engines)


def check(
    samples: Iterable[Sample], grace_s: float = 1.0, excuses: Excuses | None = None, budget_bytes: int | None = None
) -> list[Violation]:
    """Everything that a history of samples breaks."""
    checker = Checker(grace_s, excuses or Excuses(), budget_bytes)
    return [violation for sample in samples for violation in checker.see(sample)]


def cut(answers: Iterable[Answer], excuses: Excuses) -> list[Violation]:
    """Rule 3 over answers."""
    return [
        Violation(3, each.ended, f"{each.service}: an answer was cut, {each.got} of {each.asked} events: {each.error}")
        for each in answers
        if each.error and not excuses.covers(each.service, each.began, each.ended)
    ]


@dataclass(frozen=True)
class Claim:
    """What one service that should run has of the memory, and what it wants, at a quiet moment."""

    service: str
    priority: int
    """The larger the more important."""
    asked: float
    """Unix time since which it wants memory."""
    need_bytes: int
    """As it is wanted now."""
    holds_bytes: int
    """Reserved for it as it runs, or may start; 0 if it may not run at all."""
    waits: bool = False
    protected: bool = False
    """It makes room for nobody."""

    @property
    def rank(self) -> tuple[int, float, str]:
        return -self.priority, self.asked, self.service


def overdue(claims: Sequence[Claim], budget_bytes: int, preemption: bool = False) -> list[str]:
    """Rule 7 over claims: who waits for memory although there is enough, and who keeps another out besides."""
    found = []
    held = sum(each.holds_bytes for each in claims)
    waiting = sorted((each for each in claims if each.waits and each.need_bytes <= budget_bytes), key=lambda c: c.rank)
    for place, claim in enumerate(waiting):
        over = held - claim.holds_bytes + claim.need_bytes - budget_bytes
        behind = {
            ahead.service: sum(each.holds_bytes for each in claims if each.rank > ahead.rank and each is not claim)
            for ahead in waiting[:place]
        }
        if any(ahead.need_bytes + behind[ahead.service] + claim.need_bytes > budget_bytes for ahead in waiting[:place]):
            continue
        if preemption:
            over -= sum(each.holds_bytes for each in claims if each.priority < claim.priority and not each.protected)
        if over <= 0:
            found.append(
                f"{claim.service} waits, but {held} of {budget_bytes} bytes are held, of these "
                f"{claim.holds_bytes} by itself, and it needs {claim.need_bytes}"
            )
    return found


def leaks(checkpoints: Sequence[Mapping[str, Resources]]) -> list[str]:
    """Rule 5 over quiet moments: whose descriptors grew since the first, beyond what more engines explain."""
    found = []
    for role in sorted({role for each in checkpoints for role in each}):
        seen = [each[role] for each in checkpoints if role in each]
        first, last = seen[0], seen[-1]
        allowed = first.fds + FD_SLACK + FD_PER_ENGINE * max(0, last.engines - first.engines)
        if last.fds > allowed:
            found.append(f"{role} holds {last.fds} descriptors, {first.fds} at the first checkpoint: {allowed} allowed")
    return found
