"""Who goes when memory runs out, and who returns: the order, the guards, and a machine in a closed loop."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from metal_supervisor.memory.eviction import (
    EvictionChoice,
    back_off_s,
    choose,
    may_evict,
    may_return,
)
from metal_supervisor.memory.ledger import Entry
from metal_supervisor.memory.pressure import Level, MemorySample, Watch, thresholds, watch
from metal_supervisor.spec.limits import PRIORITIES
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.sizes import GIB
from metal_supervisor.spec.types import Key
from tests.support.effort import cases
from tests.support.records import a_record

HIGH = 100_000
NORMAL = 10_000
LOW = 1_000
TOTAL = 128 * GIB
LIMITS = thresholds(TOTAL, 107 * GIB)


def key(name: str) -> Key:
    return "default", name


def entry(name: Key, priority: int, size: int, started: float, **more: bool) -> Entry:
    return Entry(name, priority, size, False, 0.0, started, **more)


def runs(name: str, gib: float = 20, priority: int = NORMAL, started: float = 0.0, **more: bool) -> Entry:
    return entry(key(name), priority, int(gib * GIB), started, **more)


# ── the order ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("candidates", "victim", "because"),
    [
        ([runs("a", 30), runs("b", 1, LOW, busy=True)], "b", "its priority 1000 is below the 10000 of default/a"),
        ([runs("a", 30, busy=True), runs("b", 1)], "b", "it is idle and default/a is busy"),
        ([runs("a", 30), runs("b", 31, started=9)], "b", "it takes 31.0 GiB and default/a 30.0 GiB"),
        ([runs("a", started=9), runs("b", started=8)], "b", "it runs longer than default/a"),
        ([runs("b"), runs("a")], "a", "its name comes before default/b"),
        ([runs("a", priority=LOW, protected=True), runs("b", 40)], "b", "no other may be stopped"),
    ],
)
def test_the_order_and_its_words(candidates: list[Entry], victim: str, because: str) -> None:
    found = choose(candidates, 100 * GIB)
    assert (found.victim, found.skipped) == (key(victim), "")
    assert because in found.text
    assert choose(candidates[::-1], 100 * GIB) == found


def test_the_choice_is_explained_with_numbers() -> None:
    found = choose([runs("a", 30), runs("b", 20, LOW)], 100 * GIB)
    assert found == EvictionChoice(
        key("b"),
        "",
        "default/b is stopped to free 20.0 GiB: its priority 1000 is below the 10000 of default/a; "
        "engines hold 50.0 GiB of 100.0 GiB used",
    )


@pytest.mark.parametrize(
    ("candidates", "floor", "skipped", "text"),
    [
        ([], 1, "empty", "no engine runs"),
        ([runs("a", 90)], 1, "floor", "1 running, and 1 must stay"),
        ([runs("a", 90), runs("b", 90)], 2, "floor", "2 running, and 2 must stay"),
        ([runs("a", 90, protected=True)] * 2, 1, "all_protected", "all 2 that run are protected from eviction"),
        (
            [runs("a", 20), runs("b", 9)],
            1,
            "below_guard",
            "engines hold 29.0 GiB of 100.0 GiB used, less than 30%: others are the cause",
        ),
    ],
)
def test_why_nobody_is_chosen(candidates: list[Entry], floor: int, skipped: str, text: str) -> None:
    assert choose(candidates, 100 * GIB, floor) == EvictionChoice(None, skipped, text)


def test_the_last_may_go_if_that_is_configured() -> None:
    assert choose([runs("a", 90)], 100 * GIB, floor=0).victim == key("a")


def test_a_protected_one_counts_towards_the_floor_and_the_guard() -> None:
    candidates = [runs("a", 25, protected=True), runs("b", 5)]
    assert choose(candidates, 100 * GIB).victim == key("b")
    assert choose(candidates, 101 * GIB).skipped == "below_guard"


def goes_before(one: Entry, other: Entry) -> bool:
    """The stated order once more, rule by rule."""
    if one.priority != other.priority:
        return one.priority < other.priority
    if one.busy is not other.busy:
        return other.busy
    if one.charge_bytes != other.charge_bytes:
        return one.charge_bytes > other.charge_bytes
    if one.admitted != other.admitted:
        return one.admitted < other.admitted
    return one.key < other.key


def test_every_choice_is_explained_by_the_order() -> None:
    seen: dict[str, int] = {}
    for seed in range(20_000):
        chance = random.Random(seed)
        candidates = [
            entry(
                key(f"m{index}"),
                chance.choice([LOW, NORMAL, HIGH]),
                chance.choice([0, 5, 5, 20]) * GIB,
                chance.choice([1.0, 2.0, 3.0]),
                protected=chance.random() < 0.4,
                busy=chance.random() < 0.4,
            )
            for index in range(chance.randrange(6))
        ]
        chance.shuffle(candidates)
        used, floor = chance.randrange(128) * GIB, chance.randrange(3)
        found = choose(candidates, used, floor)
        able = [each for each in candidates if not each.protected]
        enough = sum(each.charge_bytes for each in candidates) * 10 >= used * 3
        assert (found.victim is not None) is (len(candidates) > floor and bool(able) and enough and bool(candidates))
        assert (found.victim is None) is bool(found.skipped)
        seen[found.skipped] = seen.get(found.skipped, 0) + 1
        if found.victim is not None:
            chosen = next(each for each in candidates if each.key == found.victim)
            assert not chosen.protected
            assert all(goes_before(chosen, each) for each in able if each is not chosen)
    assert set(seen) == {"", "empty", "floor", "all_protected", "below_guard"} and min(seen.values()) > 300, seen


# ── one at a time ────────────────────────────────────────────────────────────────────────────────


def seen(*samples: tuple[float, float | None]) -> Watch:
    """After samples of (at, GiB available)."""
    found = Watch()
    for at, gib in samples:
        found = watch(found, MemorySample(at, TOTAL, None if gib is None else int(gib * GIB)), LIMITS)
    return found


def test_it_takes_critical_samples_and_nobody_who_is_leaving() -> None:
    assert not may_evict(seen((0, 8), (5, 8)), None, False, 5)
    assert not may_evict(seen((0, 4)), None, False, 0)
    assert may_evict(seen((0, 4), (5, 4)), None, False, 5)
    assert not may_evict(seen((0, 4), (5, 4)), None, True, 5)
    assert may_evict(seen((0, 1)), None, False, 0), "a desperate one is enough"


def test_a_level_that_only_lingers_stops_nobody() -> None:
    lingers = seen((0, 4), (5, 4), (10, 6))
    assert lingers.level is Level.CRITICAL
    assert not may_evict(lingers, None, False, 10)
    assert not may_evict(seen((0, 4), (5, 4), (10, 6), (15, 4)), None, False, 15), "it has to be confirmed again"


def test_unknown_and_old_samples_stop_nobody() -> None:
    assert not may_evict(seen((0, 4), (5, 4), (10, None)), None, False, 10)
    assert may_evict(seen((0, 4), (5, 4)), None, False, 35)
    assert not may_evict(seen((0, 4), (5, 4)), None, False, 36)
    assert not may_evict(seen((0, 4), (5, 4), (7200, 4)), None, False, 7200), "nor does one sample after a sleep"
    assert may_evict(seen((0, 4), (5, 4), (7200, 4), (7205, 4)), None, False, 7205)
    assert not may_evict(Watch(), None, False, 0)


def test_the_next_one_waits_for_the_exit_and_for_what_it_brought() -> None:
    found = seen(*((at, 4) for at in range(0, 35, 5)))
    assert may_evict(found, 10, False, 30)
    assert not may_evict(found, 10.1, False, 30), "20 s after the exit"
    slow = seen((0, 4), (5, 4), (20, 4), (40, 4))
    assert not may_evict(slow, 20, False, 40), "one fresh sample is not enough"
    assert may_evict(slow, 19, False, 40)


# ── who returns ──────────────────────────────────────────────────────────────────────────────────


def gone(name: str, rank: int, at: float, times: int = 1) -> Record:
    priority = next(name for name, each in PRIORITIES.items() if each == rank)
    return a_record(name, priority=priority, evicted_at=at, evictions=times)


def calm(until: float, since: float = 0.0) -> Watch:
    return seen(*((since + index * 5, 50.0) for index in range(int((until - since) / 5) + 1)))


def test_the_most_important_returns_first_then_who_left_first() -> None:
    evicted = [
        gone("late", HIGH, -900),
        gone("low", LOW, -2000),
        gone("early", HIGH, -1000),
    ]
    assert may_return(evicted, calm(300), 300, None) == key("early")
    assert may_return(evicted[:2], calm(300), 300, None) == key("late")
    assert may_return(evicted[1:2], calm(300), 300, None) == key("low")
    assert may_return([], calm(300), 300, None) is None


def test_normal_must_have_lasted_and_still_be() -> None:
    evicted = [gone("a", NORMAL, -9000)]
    assert may_return(evicted, calm(295), 295, None) is None
    assert may_return(evicted, calm(295), 300, None) == key("a")
    assert may_return(evicted, calm(300), 361, None) is None, "nothing is known any more"
    assert may_return(evicted, Watch(), 300, None) is None
    doubtful = seen(*((at, 50.0) for at in range(0, 305, 5)), (305, 8))
    assert (doubtful.level, may_return(evicted, doubtful, 305, None)) == (Level.NORMAL, None)
    woken = seen(*((at, 50.0) for at in range(0, 305, 5)), (7200, 50))
    assert may_return(evicted, woken, 7200, None) is None, "what was in the sleep is not known"


def test_one_returns_at_a_time() -> None:
    evicted = [gone("a", NORMAL, -9000)]
    assert may_return(evicted, calm(300), 300, 241) is None
    assert may_return(evicted, calm(300), 300, 240) == key("a")


def test_the_back_off_doubles_up_to_an_hour() -> None:
    assert [back_off_s(times) / 60 for times in (0, 1, 2, 3, 4, 5, 6, 10**9)] == [5, 5, 10, 20, 40, 60, 60, 60]
    watched = calm(1200)
    for times, minutes in ((1, 5), (2, 10), (3, 20)):
        away = [gone("a", NORMAL, 1200 - minutes * 60 + 1, times)]
        assert may_return(away, watched, 1200, None) is None
        away = [replace(away[0], evicted_at=1200 - minutes * 60)]
        assert may_return(away, watched, 1200, None) == key("a")


def test_one_that_must_stay_away_holds_up_nobody() -> None:
    evicted = [gone("high", HIGH, 290, 5), gone("low", LOW, -9000)]
    assert may_return(evicted, calm(300), 300, None) == key("low")


def test_times_may_be_of_another_clock_and_it_may_be_set_back() -> None:
    unix = 1_790_000_000.0
    away = [gone("a", NORMAL, unix)]
    assert may_return(away, calm(300), 300, None, clock=unix + 299) is None
    assert may_return(away, calm(300), 300, None, clock=unix + 300) == key("a")
    assert may_return(away, calm(300), 300, unix + 299, clock=unix + 300) is None
    assert may_return(away, calm(300), 300, unix, clock=unix - 86_400) == key("a")


# ── a machine in a closed loop ───────────────────────────────────────────────────────────────────


@dataclass
class Machine:
    """Models that fit into the budget together, and somebody else who takes memory and gives it back."""

    seed: int
    now: float = 0.0
    watched: Watch = field(default_factory=Watch)
    running: dict[Key, Entry] = field(default_factory=dict)
    leaving: dict[Key, tuple[float, Entry]] = field(default_factory=dict)
    """Whose process still is there: when it will have exited."""
    away: dict[Key, Record] = field(default_factory=dict)
    times: dict[Key, int] = field(default_factory=dict)
    others_bytes: int = 0
    last_exit: float | None = None
    last_return: float | None = None
    evictions: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        left = 107 * GIB
        for index in range(self.chance.randint(1, 6)):
            size = self.chance.randint(0, left)
            left -= size
            made = entry(
                key(f"m{index}"),
                self.chance.choice([LOW, NORMAL, HIGH]),
                size,
                float(index),
                protected=self.chance.random() < 0.2,
                busy=self.chance.random() < 0.3,
            )
            self.running[made.key] = made
        self.everybody = dict(self.running)

    def available(self) -> int:
        here = sum(each.charge_bytes for each in self.running.values())
        here += sum(each.charge_bytes for _, each in self.leaving.values())
        return max(TOTAL - 3 * GIB - here - self.others_bytes, 0)

    def step(self) -> None:
        chance = self.chance
        slept = chance.random() < 0.002
        self.now += chance.uniform(3600, 9000) if slept else chance.uniform(2, 8)
        for name, (exit_at, _) in list(self.leaving.items()):
            if exit_at <= self.now:
                del self.leaving[name]
                self.last_exit = self.now
        available = None if chance.random() < 0.05 else self.available()
        self.watched = watch(self.watched, MemorySample(self.now, TOTAL, available), LIMITS)
        if may_evict(self.watched, self.last_exit, bool(self.leaving), self.now):
            self.evict()
        name = may_return(list(self.away.values()), self.watched, self.now, self.last_return)
        if name is not None:
            assert self.watched.level is Level.NORMAL and not self.leaving
            assert self.last_return is None or self.now - self.last_return >= 60
            del self.away[name]
            self.running[name], self.last_return = replace(self.everybody[name], admitted=self.now), self.now

    def evict(self) -> None:
        assert not self.leaving, "never two at once"
        assert self.available() < LIMITS.critical_bytes
        found = choose(list(self.running.values()), TOTAL - self.available())
        if found.victim is None:
            return
        victim = self.running.pop(found.victim)
        assert self.running, "never the last"
        assert not victim.protected
        assert all(goes_before(victim, each) for each in self.running.values() if not each.protected)
        self.evictions += 1
        self.times[victim.key] = self.times.get(victim.key, 0) + 1
        self.away[victim.key] = gone(victim.key[1], victim.priority, self.now, self.times[victim.key])
        self.leaving[victim.key] = self.now + self.chance.uniform(0, 40), victim


def test_pressure_that_comes_and_goes_always_ends_with_everybody_back() -> None:
    evictions = squeezes = 0
    for seed in range(cases(100)):
        machine = Machine(seed)
        for _ in range(machine.chance.randint(1, 4)):
            machine.others_bytes = machine.chance.randrange(120) * GIB
            squeezes += 1
            for _ in range(machine.chance.randint(1, 150)):
                machine.step()
            machine.others_bytes = 0
            for _ in range(machine.chance.randint(1, 150)):
                machine.step()
        machine.others_bytes = 0
        for _ in range(1500):
            machine.step()
        assert machine.watched.level is Level.NORMAL
        assert not machine.away and machine.running.keys() == machine.everybody.keys()
        evictions += machine.evictions
    assert evictions > cases(100), (evictions, squeezes)


def test_no_more_go_than_the_squeeze_asks_for() -> None:
    """One large victim is enough, though the level stays Critical for a minute after it is gone."""
    machine = Machine(0)
    machine.running = {each.key: each for each in (runs("a", 30), runs("b", 30), runs("c", 30))}
    machine.everybody = dict(machine.running)
    machine.others_bytes = 34 * GIB
    for _ in range(40):
        machine.step()
    assert machine.evictions == 1 and len(machine.running) == 2
