"""The ledger: who starts when the memory is not enough for all, to the byte, and in whatever order it is asked."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from metal_supervisor.memory.ledger import Decision, Entry, Ledger, admit
from metal_supervisor.spec.sizes import GIB, MIB
from metal_supervisor.spec.types import Key
from tests.support.effort import cases

HIGH = 100_000
NORMAL = 10_000
LOW = 1_000


def key(name: str) -> Key:
    return "default", name


def waits(name: str, gib: float | None, asked: float = 0.0, priority: int = NORMAL, **more: object) -> Entry:
    size = None if gib is None else int(gib * GIB)
    return replace(Entry(key(name), priority, size, True, asked), **more)  # type: ignore[arg-type]


def runs(name: str, gib: float | None, admitted: float = 0.0, priority: int = NORMAL, **more: object) -> Entry:
    return waits(name, gib, admitted, priority, **{"waits": False, "admitted": admitted, **more})


def decisions(found: Ledger) -> dict[str, bool]:
    return {name: decision.admitted for (_, name), decision in found.decisions.items()}


# ── arithmetic ───────────────────────────────────────────────────────────────────────────────────


def test_two_that_fit_alone_but_not_together() -> None:
    found = admit(48 * GIB, [waits("a", 30, 1), waits("b", 30, 2)])
    assert decisions(found) == {"a": True, "b": False}
    assert found.decisions[key("b")].message.startswith(
        "needs 30.0 GiB, 18.0 GiB of 48.0 GiB left; try a smaller quantization, a shorter context, or --memory-fraction"
    )


def test_what_does_not_fit_is_told_with_its_arithmetic() -> None:
    found = admit(48 * GIB, [runs("a", 37.7), waits("b", 61.2)])
    assert found.decisions[key("b")] == Decision(
        False,
        "InsufficientMemory",
        "needs 61.2 GiB, 10.3 GiB of 48.0 GiB left, so it never fits here; "
        "try a smaller quantization, a shorter context, or --memory-fraction",
        blocked=True,
    )


def test_an_engine_is_blocked_only_while_no_other_ends_for_it() -> None:
    """Otherwise another Mac would take it while this one stops engines for it."""
    low, high = replace(runs("a", 40), priority=1), replace(waits("b", 30, 2), priority=2)

    def blocked(*entries: Entry, **rules: Any) -> bool:
        return admit(48 * GIB, entries, **rules).decisions[key("b")].blocked

    assert blocked(low, high)
    assert not blocked(low, high, preemption=True)
    assert not blocked(high, leaving_bytes=40 * GIB)
    assert blocked(replace(high, held_back=True)), "it was evicted"
    assert not blocked(replace(low, key=key("b")), replace(high, holds_bytes=20 * GIB, optional=True)), "its edit waits"


def test_one_whose_cache_is_what_is_large_is_told_to_shorten_its_context() -> None:
    large = replace(waits("b", 61.2), weights_bytes=4 * GIB)
    advice = "try a shorter context, as 57.2 GiB of that are not weights, or --memory-fraction"
    assert admit(48 * GIB, [runs("a", 37.7), large]).decisions[key("b")].message.endswith(advice)
    capped = admit(100 * GIB, [replace(large, limit_bytes=10 * GIB)]).decisions[key("b")].message
    assert capped.endswith("raise that, or try a shorter context, as 57.2 GiB of that are not weights")
    half = replace(large, weights_bytes=int(30.7 * GIB))
    assert "a smaller quantization" in admit(48 * GIB, [half]).decisions[key("b")].message


@pytest.mark.parametrize(("over", "admitted"), [(-1, True), (0, True), (1, False)])
def test_an_exact_fit_is_a_fit_and_a_byte_more_is_not(over: int, admitted: bool) -> None:
    entry = Entry(key("b"), NORMAL, 18 * GIB + over, True, 5)
    found = admit(48 * GIB, [runs("a", 30), entry])
    assert decisions(found) == {"b": admitted}
    if not admitted:
        assert "needs 18.1 GiB, 18.0 GiB of 48.0 GiB left" in found.decisions[key("b")].message, "it never looks enough"


def test_whatever_is_larger_counts_the_estimate_or_the_measure() -> None:
    grown, idle = runs("grown", 10, measured_bytes=14 * GIB), runs("idle", 10, measured_bytes=GIB)
    assert admit(24 * GIB, [grown, idle]).charged_bytes == 24 * GIB
    assert decisions(admit(24 * GIB, [grown, idle, waits("b", 0.001)])) == {"b": False}


def test_a_budget_that_is_exceeded_admits_nobody_and_stops_nobody() -> None:
    found = admit(24 * GIB, [runs("a", 10, measured_bytes=30 * GIB), waits("b", 1)])
    assert (found.charged_bytes, decisions(found)) == (30 * GIB, {"b": False})
    assert "0 MiB of 24.0 GiB left" in found.decisions[key("b")].message


def test_the_limit_of_a_model_holds_whatever_room_there_is() -> None:
    found = admit(48 * GIB, [waits("a", 12, limit_bytes=10 * GIB), waits("b", 10, limit_bytes=10 * GIB)])
    assert decisions(found) == {"a": False, "b": True}
    refusal = found.decisions[key("a")]
    assert (refusal.reason, refusal.position) == ("InsufficientMemory", 0)
    assert refusal.message.startswith("needs 12.0 GiB, its Model allows 10.0 GiB (spec.hardware.memoryBudget")


# ── unknown sizes ────────────────────────────────────────────────────────────────────────────────


def test_an_unknown_size_is_refused_or_admitted_with_a_warning() -> None:
    entries = [runs("a", 30), waits("b", None)]
    refused = admit(48 * GIB, entries).decisions[key("b")]
    assert (refused.admitted, refused.reason) == (False, "MemoryCheckFailed")
    assert "18.0 GiB left" in refused.message
    warned = admit(48 * GIB, entries, mode="warn").decisions[key("b")]
    assert (warned.admitted, warned.reason) == (True, "MemoryCheckFailed")
    assert warned.message


def test_a_known_size_that_does_not_fit_is_refused_even_under_warn() -> None:
    assert decisions(admit(48 * GIB, [runs("a", 30), waits("b", 20)], mode="warn")) == {"b": False}


def test_one_of_unknown_size_holds_up_nobody_and_is_charged_once_measured() -> None:
    assert decisions(admit(48 * GIB, [waits("a", None, 1), waits("b", 48, 2)])) == {"a": False, "b": True}
    measured = runs("a", None, measured_bytes=10 * GIB)
    assert decisions(admit(48 * GIB, [measured, waits("b", 39)])) == {"b": False}


# ── the queue ────────────────────────────────────────────────────────────────────────────────────


def test_priority_goes_first_then_who_has_waited_longer() -> None:
    waiting = [waits("new", 10, 3), waits("old", 10, 2), waits("low", 10, 1, LOW), waits("high", 10, 4, HIGH)]
    found = admit(20 * GIB, waiting)
    assert decisions(found) == {"high": True, "old": True, "new": False, "low": False}
    assert found.decisions[key("new")].position == 1
    assert found.decisions[key("low")].position == 2
    assert found.decisions[key("low")].message.endswith("(queue position 2)")


def test_one_larger_than_the_whole_budget_holds_up_nobody() -> None:
    found = admit(48 * GIB, [waits("huge", 61, 1, HIGH), waits("b", 48, 2)])
    assert decisions(found) == {"huge": False, "b": True}
    assert found.decisions[key("huge")].position == 0


def test_an_evicted_one_that_can_never_fit_holds_up_nobody_and_another_keeps_its_place() -> None:
    never = admit(48 * GIB, [waits("big", 200, 1, held_back=True), waits("small", 5, 2)])
    assert decisions(never) == {"big": False, "small": True}
    later = admit(48 * GIB, [waits("big", 40, 1, held_back=True), waits("small", 20, 2)])
    assert decisions(later) == {"big": False, "small": False}


def test_a_small_one_passes_a_big_one_if_both_fit_together() -> None:
    found = admit(48 * GIB, [runs("a", 30), waits("big", 40, 1), waits("small", 8, 2)])
    assert decisions(found) == {"big": False, "small": True}


def test_a_small_one_that_would_keep_a_big_one_out_waits_behind_it() -> None:
    found = admit(48 * GIB, [runs("a", 30), waits("big", 40, 1), waits("small", 9, 2)])
    assert decisions(found) == {"big": False, "small": False}
    assert found.decisions[key("small")].message == (
        "needs 9.0 GiB, 18.0 GiB of 48.0 GiB left, but default/big needs 40.0 GiB and waits ahead of it "
        "(queue position 2)"
    )


def test_many_small_ones_do_not_keep_a_big_one_out_either() -> None:
    small = [waits(f"s{index}", 4, 2 + index) for index in range(4)]
    found = admit(48 * GIB, [runs("a", 30), waits("big", 40, 1), *small])
    assert decisions(found) == {"big": False, "s0": True, "s1": True, "s2": False, "s3": False}


def test_those_that_passed_are_remembered_in_the_next_pass() -> None:
    passed = runs("passed", 8, 5)
    found = admit(48 * GIB, [runs("a", 30), passed, waits("big", 40, 1), waits("small", 4, 6)])
    assert decisions(found) == {"big": False, "small": False}
    ahead = replace(runs("was ahead", 8, 5), asked=0.5)
    for not_passed in (runs("there before", 8, 0), ahead, runs("more important", 8, 5, HIGH)):
        found = admit(48 * GIB, [runs("a", 30), not_passed, waits("big", 40, 1), waits("small", 4, 6)])
        assert decisions(found) == {"big": False, "small": True}


def test_an_on_demand_engine_that_passed_one_that_is_stuck_keeps_no_small_one_out() -> None:
    """It was counted beside the large one, so that a model in use kept out whatever would fit beside both."""
    stays, large = runs("stays", 20), waits("large", 90, asked=1)
    on_demand = runs("on-demand", 30, admitted=4, on_demand=True)
    small = waits("small", 5, asked=6)
    assert decisions(admit(100 * GIB, [stays, large, on_demand, small])) == {"large": False, "small": True}
    small_runs = runs("small", 5, admitted=6)
    later = waits("later", 6, asked=7)
    found = decisions(admit(100 * GIB, [stays, large, on_demand, small_runs, later]))
    assert found == {"large": False, "later": False}, "those that stay count as ever"
    found = decisions(admit(100 * GIB, [large, on_demand, small]))
    assert found == {"large": False, "small": False}, "it counts where the large one waits for it"


def test_when_room_appears_the_one_ahead_starts_by_itself() -> None:
    queue = [waits("big", 40, 1), waits("small", 9, 2)]
    assert decisions(admit(48 * GIB, queue)) == {"big": True, "small": False}


# ── preemption ───────────────────────────────────────────────────────────────────────────────────


def displaced(found: Ledger, name: str = "new") -> list[str]:
    return [victim for _, victim in found.decisions[key(name)].displaces]


def test_nobody_is_displaced_unless_that_is_configured() -> None:
    entries = [runs("low", 40, priority=LOW), waits("new", 40, priority=HIGH)]
    assert displaced(admit(48 * GIB, entries)) == []
    found = admit(48 * GIB, entries, preemption=True)
    assert displaced(found) == ["low"]
    assert not found.decisions[key("new")].admitted, "not before the other has gone"
    assert "default/low will be stopped for it" in found.decisions[key("new")].message


def test_only_lower_priorities_that_are_not_protected_make_room() -> None:
    for other in (runs("x", 40), runs("x", 40, priority=HIGH), runs("x", 40, priority=LOW, protected=True)):
        assert displaced(admit(48 * GIB, [other, waits("new", 40)], preemption=True)) == []


def test_nobody_is_displaced_in_vain() -> None:
    entries = [runs("low", 10, priority=LOW), runs("peer", 30), waits("new", 40)]
    assert displaced(admit(48 * GIB, entries, preemption=True)) == []


def test_the_order_is_priority_then_largest_then_oldest() -> None:
    def of(*entries: Entry, need: float) -> list[str]:
        return displaced(admit(40 * GIB, [*entries, waits("new", need, priority=HIGH)], preemption=True))

    assert of(runs("n", 20), runs("l", 20, priority=LOW), need=20) == ["l"]
    assert of(runs("small", 15), runs("large", 25), need=15) == ["large"]
    assert of(runs("young", 20, 2), runs("old", 20, 1), need=20) == ["old"]
    assert of(runs("a", 10, priority=LOW), runs("b", 30), need=25) == ["b"], "the small one alone would not do"
    assert of(runs("a", 10, priority=LOW), runs("b", 30), need=35) == ["a", "b"]


def test_two_that_displace_do_not_count_on_the_same_room() -> None:
    entries = [runs("x", 20, 1, LOW), runs("y", 20, 2, LOW), waits("first", 20, 1, HIGH), waits("second", 20, 2, HIGH)]
    found = admit(40 * GIB, entries, preemption=True)
    assert (displaced(found, "first"), displaced(found, "second")) == (["x"], ["y"])


def test_the_room_that_is_left_is_kept_for_whom_others_are_stopped() -> None:
    entries = [runs("x", 20, priority=LOW), waits("new", 30, priority=HIGH), waits("small", 15, priority=LOW)]
    found = admit(40 * GIB, entries, preemption=True)
    assert displaced(found) == ["x"]
    assert decisions(found) == {"new": False, "small": False}
    gone = [entry for entry in entries if entry.key != key("x")]
    assert decisions(admit(40 * GIB, gone, preemption=True)) == {"new": True, "small": False}


# ── random histories ─────────────────────────────────────────────────────────────────────────────

BUDGET = 100


class History:
    """Engines that come, wait, start, grow, stop and go, at random."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.preemption = self.chance.random() < 0.4
        self.grows = self.chance.random() < 0.3
        self.now = 0.0
        self.entries: dict[Key, Entry] = {}

    def arrive(self) -> None:
        chance = self.chance
        size = None if chance.random() < 0.05 else chance.choice([1, 5, 10, 20, 30, 50, 50, 80, 100, 101])
        name = key(f"m{chance.randrange(12)}")
        if name not in self.entries:
            made = Entry(
                name,
                chance.choice([LOW, NORMAL, NORMAL, HIGH]),
                size,
                True,
                self.now,
                protected=chance.random() < 0.1,
                limit_bytes=chance.choice([None, None, None, 40]),
            )
            self.entries[name] = made

    def change(self) -> None:
        chance = self.chance
        for _ in range(chance.randint(1, 4)):
            self.arrive()
        for entry in list(self.entries.values()):
            if chance.random() < 0.15:
                del self.entries[entry.key]
            elif not entry.waits and self.grows and chance.random() < 0.2:
                grown = (entry.estimate_bytes or 1) + chance.randint(0, 9)
                self.entries[entry.key] = replace(entry, measured_bytes=grown)

    def decide(self) -> Ledger:
        shuffled = list(self.entries.values())
        self.chance.shuffle(shuffled)
        return admit(BUDGET, shuffled, "enforce", self.preemption)

    def apply(self, found: Ledger) -> None:
        for name, decision in found.decisions.items():
            if decision.admitted:
                self.entries[name] = replace(self.entries[name], waits=False, admitted=self.now)
            for victim in decision.displaces:
                if self.chance.random() < 0.7:  # some take longer to stop
                    self.entries[victim] = replace(self.entries[victim], waits=True, asked=self.now)


def check(history: History, before: dict[Key, Entry], found: Ledger) -> None:
    """What must hold after every pass."""
    charged = {name: entry.charge_bytes for name, entry in before.items()}
    admitted = {name for name, decision in found.decisions.items() if decision.admitted}
    live = {name for name, entry in before.items() if not entry.waits}
    assert found.decisions.keys() == before.keys() - live
    assert found.charged_bytes == sum(charged[name] for name in live | admitted)
    assert not admitted or found.charged_bytes <= BUDGET, "nobody is admitted beyond the budget"
    assert all(before[name].estimate_bytes is not None for name in admitted)
    positions = sorted(decision.position for decision in found.decisions.values() if decision.position)
    assert positions == list(range(1, len(positions) + 1))
    leaving: list[Key] = []
    for name, decision in found.decisions.items():
        victims = [before[victim] for victim in decision.displaces]
        assert not victims or (history.preemption and not decision.admitted)
        assert all(each.priority < before[name].priority and not each.protected for each in victims)
        leaving += decision.displaces
    assert len(leaving) == len(set(leaving)), "nobody is stopped for two"
    wanted = sum(charged[name] for name, decision in found.decisions.items() if decision.displaces)
    if wanted:
        assert found.charged_bytes + wanted - sum(charged[name] for name in leaving) <= BUDGET, "it is enough"


def never_kept_out(before: dict[Key, Entry], found: Ledger) -> None:
    """Once all that was there before has gone, the one that waits starts, whatever came after it."""
    admitted = {name for name, decision in found.decisions.items() if decision.admitted}
    for name, decision in found.decisions.items():
        if decision.admitted or not decision.position or decision.displaces:
            continue
        waiting = before[name]
        rank = -waiting.priority, waiting.asked, name
        after = [
            each
            for each in before.values()
            if each.key == name
            or (each.key in admitted and (-each.priority, each.asked, each.key) > rank)
            or (not each.waits and (-each.priority, each.asked, each.key) > rank and each.admitted >= waiting.asked)
        ]
        assert admit(BUDGET, after).decisions[name].admitted


def test_random_histories_keep_every_rule() -> None:
    seen = {"admitted": 0, "waiting": 0, "displaced": 0}
    for seed in range(cases(10_000)):
        history = History(seed)
        for _ in range(5):
            history.now += 1
            history.change()
            before = dict(history.entries)
            found = history.decide()
            check(history, before, found)
            if not history.grows:
                never_kept_out(before, found)
            history.apply(found)
            for decision in found.decisions.values():
                seen["admitted"] += decision.admitted
                seen["waiting"] += not decision.admitted
                seen["displaced"] += len(decision.displaces)
        # In another order of entries nothing is different.
        ordered = admit(BUDGET, list(history.entries.values()), "enforce", history.preemption)
        assert history.decide() == ordered
    assert min(seen.values()) > cases(1000), f"the histories reach everything: {seen}"


def test_asking_again_changes_nothing() -> None:
    for seed in range(cases(2000)):
        history = History(seed)
        history.preemption = False
        for _ in range(4):
            history.now += 1
            history.change()
            history.apply(history.decide())
            assert not any(decision.admitted for decision in history.decide().decisions.values())


def test_every_queue_that_is_left_alone_drains_as_room_appears() -> None:
    """Engines that run go one by one; in the end everything that could ever run has run."""
    for seed in range(300):
        history = History(seed)
        history.grows = False
        for _ in range(4):
            history.now += 1
            history.change()
        able = {
            entry.key
            for entry in history.entries.values()
            if not entry.unknown and entry.charge_bytes <= min(BUDGET, entry.limit_bytes or BUDGET)
        }
        history.preemption = False
        for _ in range(40):
            history.now += 1
            history.apply(history.decide())
            running = [entry for entry in history.entries.values() if not entry.waits]
            if running:
                del history.entries[min(running, key=lambda entry: entry.admitted).key]
        assert not able & history.entries.keys()


def test_megabytes_are_told_as_such() -> None:
    found = admit(GIB, [Entry(key("a"), NORMAL, GIB - 10 * MIB, False, 0), waits("b", 0.5)])
    assert "needs 512 MiB, 10 MiB of 1.0 GiB left" in found.decisions[key("b")].message


def test_an_edit_counts_once_beside_whom_it_would_keep_out_not_with_the_engine_whose_place_it_takes() -> None:
    running = [runs("a", 20, 5), runs("b", 20, 5)]
    ahead = waits("ahead", 26, 1)
    edit = waits("b", 22, 2, holds_bytes=20 * GIB)
    fits = admit(70 * GIB, [*running, runs("c", 15, 0), ahead, edit])
    assert decisions(fits) == {"ahead": False, "b": True}, "26 + 20 + 22 fit, once c is gone"
    larger = replace(edit, estimate_bytes=25 * GIB)
    assert decisions(admit(70 * GIB, [*running, runs("c", 15, 0), ahead, larger])) == {"ahead": False, "b": False}


# ── messages ─────────────────────────────────────────────────────────────────────────────────────


def of_team(entry: Entry, team: str = "team-a") -> Entry:
    return replace(entry, key=(team, entry.key[1]))


def test_memory_messages_name_no_service_of_another_namespace() -> None:
    ahead = admit(48 * GIB, [runs("x", 30), waits("a", 40, 1), of_team(waits("b", 12, 2))])
    assert "but a service of another namespace needs 40.0 GiB" in ahead.decisions["team-a", "b"].message
    low = [runs(name, 20, priority=LOW) for name in ("x", "y")]
    taken = admit(48 * GIB, [*low, of_team(waits("b", 40, priority=HIGH))], preemption=True)
    assert "; a service of another namespace will be stopped for it" in taken.decisions["team-a", "b"].message
