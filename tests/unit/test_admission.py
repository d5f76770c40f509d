"""Who has memory and who waits: records through the ledger and back, one pass after another.

The histories play what the controller does: every pass decides all services as if there were room for each, and
`settle` says what there is room for. Processes live on for a while after they have been told to end.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from metal_supervisor.controller import admission, reconcile
from metal_supervisor.controller.admission import AdmissionRules, Up
from metal_supervisor.memory.ledger import Ledger
from metal_supervisor.spec.record import Record, Verdict
from metal_supervisor.spec.sizes import GIB
from metal_supervisor.spec.types import Key, Standing
from tests.support.effort import cases
from tests.support.records import a_record

BUDGET = 48 * GIB


def wants(name: str, gib: float | None, priority: str = "normal", digest: str = "a", **other: Any) -> Record:
    """A service as it is decided on while nobody has looked at the memory."""
    record = a_record(
        name,
        uid="uid",
        model="model",
        priority=priority,
        verdict=Verdict(Standing.RUN, "Admitted", "", 0.0),
        endpoint=None,
        edition=f"default.{name}.{digest}.json",
        reserved_bytes=round(gib * GIB) if gib else 0,
        memory="weights 1 GiB",
    )
    return replace(record, **other)


def settle(
    proposed: Mapping[Key, Record],
    before: Mapping[Key, Record],
    ups: Mapping[Key, Up],
    rules: AdmissionRules,
    now: float,
) -> tuple[dict[Key, Record], Ledger]:
    """`admission.settle` of records that ask to be kept as they are given."""
    proposals = {key: reconcile.unchanged(record) for key, record in proposed.items()}
    return admission.settle(proposals, before, ups, rules, now)


def of(*records: Record) -> dict[Key, Record]:
    return {record.key: record for record in records}


def up(record: Record, gib: float | None = None) -> Up:
    assert record.edition
    return Up(record.edition, "", max(record.reserved_bytes, round((gib or 0) * GIB)))


def admitted(*records: Record) -> dict[Key, Record]:
    return settle(of(*records), {}, {}, AdmissionRules(10**15), 1.0)[0]


def test_two_that_fit_alone_but_not_together() -> None:
    a, b = wants("a", 30), wants("b", 20)
    first, _ = settle(of(a), {}, {}, AdmissionRules(BUDGET), 1.0)
    both, book = settle(of(first[a.key], b), first, {a.key: up(a)}, AdmissionRules(BUDGET), 2.0)
    assert both[a.key].verdict.standing is Standing.RUN
    waiting = both[b.key]
    assert (waiting.verdict.standing, waiting.verdict.reason) == (Standing.WAIT, "InsufficientMemory")
    assert waiting.edition is None
    assert waiting.verdict.message.startswith("needs 20.0 GiB, 18.0 GiB of 48.0 GiB left; try a smaller quantization")
    assert waiting.verdict.message.endswith("(queue position 1)") and waiting.queue_position == 1
    assert book.charged_bytes == 30 * GIB


def test_it_starts_by_itself_once_the_other_s_process_is_gone_and_not_before() -> None:
    a, b = wants("a", 30), wants("b", 20)
    both, _ = settle(of(a, b), {}, {}, AdmissionRules(BUDGET), 1.0)
    leaving = {a.key: replace(both[a.key], verdict=Verdict(Standing.REMOVING, "Deleted", "", 2.0), edition=None)}
    again = replace(b, queued_at=both[b.key].queued_at)
    still, _ = settle({**leaving, b.key: again}, both, {a.key: up(a)}, AdmissionRules(BUDGET), 2.0)
    assert still[b.key].verdict.standing is Standing.WAIT
    assert "and 30.0 GiB more when what is ending has ended" in still[b.key].verdict.message
    gone, _ = settle({b.key: again}, still, {}, AdmissionRules(BUDGET), 3.0)
    assert gone[b.key].verdict.standing is Standing.RUN
    assert (gone[b.key].queued_at, gone[b.key].admitted_at) == (1.0, 3.0)


@pytest.mark.parametrize("over, standing", [(0, Standing.RUN), (1, Standing.WAIT)])
def test_an_exact_fit_is_a_fit_and_a_byte_more_is_not(over: int, standing: Standing) -> None:
    first = admitted(wants("a", 30))
    b = replace(wants("b", 18), reserved_bytes=18 * GIB + over)
    both, _ = settle(of(*first.values(), b), first, {}, AdmissionRules(BUDGET), 2.0)
    assert both[b.key].verdict.standing is standing


def test_what_was_measured_counts_if_it_is_more() -> None:
    first = admitted(wants("a", 10))
    b = wants("b", 30)
    grown = {("default", "a"): up(wants("a", 10), 19)}
    assert settle(of(*first.values(), b), first, grown, AdmissionRules(BUDGET), 2.0)[0][b.key].verdict.reason
    assert settle(of(*first.values(), b), first, grown, AdmissionRules(BUDGET), 2.0)[0][b.key].edition is None


def test_an_edit_that_does_not_fit_leaves_the_engine_as_it_was_and_says_so() -> None:
    first = admitted(wants("a", 20), wants("b", 20))
    a = first["default", "a"]
    edited = replace(wants("a", 40, digest="b", generation=2), queued_at=a.queued_at, admitted_at=a.admitted_at)
    held = {record.key: up(record) for record in first.values()}
    kept, _ = settle({**first, a.key: edited}, first, held, AdmissionRules(BUDGET), 2.0)
    assert (kept[a.key].edition, kept[a.key].generation) == (a.edition, 2)
    assert kept[a.key].warning and kept[a.key].warning[0] == "InsufficientMemory"
    assert kept[a.key].warning[1].startswith("needs 40.0 GiB, 28.0 GiB of 48.0 GiB left")
    assert "keeps running as it last could" in kept[a.key].warning[1]
    larger = replace(edited, reserved_bytes=50 * GIB, priority="high", protected=True)
    never = settle({**first, a.key: larger}, kept, held, AdmissionRules(BUDGET), 2.5)[0][a.key]
    assert never.warning and never.warning[1].startswith("needs 50.0 GiB, 28.0 GiB of 48.0 GiB left")
    assert (never.edition, never.priority, never.protected) == (a.edition, "high", True), "these need no memory"
    alone = {a.key: edited}
    taken, _ = settle(alone, kept, {a.key: held[a.key]}, AdmissionRules(BUDGET), 3.0)
    assert (taken[a.key].edition, taken[a.key].warning) == (edited.edition, None)


def test_a_barred_engine_stays_barred_while_its_edit_waits_for_memory() -> None:
    first = admitted(wants("a", 20, barred="NotAllowed: x"), wants("b", 20))
    a = first["default", "a"]
    edited = replace(wants("a", 40, digest="b"), queued_at=a.queued_at)
    held = {record.key: up(record) for record in first.values()}
    kept, _ = settle({**first, a.key: edited}, first, held, AdmissionRules(BUDGET), 2.0)
    assert kept[a.key].barred == "NotAllowed: x", "its spec is the one of before"


def test_an_engine_that_crashes_while_its_edit_waits_keeps_its_room_and_starts_as_it_was() -> None:
    first = admitted(wants("a", 20), wants("b", 20))
    a, c = first["default", "a"], wants("c", 10)
    edited = replace(wants("a", 40, digest="b"), queued_at=a.queued_at, admitted_at=a.admitted_at)
    b_only = {("default", "b"): up(wants("b", 20))}
    kept, book = settle({**first, a.key: edited, c.key: c}, first, b_only, AdmissionRules(BUDGET), 2.0)
    assert (kept[a.key].edition, kept[a.key].verdict.standing) == (a.edition, Standing.RUN)
    assert kept[a.key].warning and kept[c.key].edition is None
    assert kept[a.key].warning[1].endswith("the engine starts again as it last could")
    assert book.charged_bytes == 40 * GIB
    taken, _ = settle({a.key: edited}, kept, {}, AdmissionRules(BUDGET), 3.0)
    assert taken[a.key].edition == edited.edition


def test_an_edit_that_takes_less_is_never_refused() -> None:
    first = admitted(wants("a", 60))
    a = first["default", "a"]
    smaller = replace(wants("a", 50, digest="b"), queued_at=1.0)
    rules = AdmissionRules(BUDGET, paused="the machine is short of memory")
    taken, _ = settle(of(smaller), first, {a.key: up(a)}, rules, 2.0)
    assert taken[a.key].edition == smaller.edition


def test_an_engine_whose_edit_was_admitted_is_charged_for_both_until_the_old_one_is_gone() -> None:
    first = admitted(wants("a", 30))
    a = first["default", "a"]
    smaller = replace(wants("a", 10, digest="b"), queued_at=1.0)
    second, _ = settle(of(smaller), first, {a.key: up(a)}, AdmissionRules(BUDGET), 2.0)
    b = wants("b", 20)
    third, book = settle(of(second[a.key], b), second, {a.key: up(a)}, AdmissionRules(BUDGET), 3.0)
    assert third[b.key].verdict.standing is Standing.WAIT
    assert book.charged_bytes == 30 * GIB


def test_an_engine_that_runs_and_lost_its_record_is_not_stopped() -> None:
    a = wants("a", 60)
    kept, book = settle(of(a), {}, {a.key: up(a)}, AdmissionRules(BUDGET), 5.0)
    assert kept[a.key].edition == a.edition
    assert (kept[a.key].queued_at, kept[a.key].admitted_at) == (5.0, 5.0)
    assert book.charged_bytes > BUDGET


def test_a_service_made_anew_waits_only_for_what_its_old_engine_does_not_give() -> None:
    old = wants("a", 40)
    removing = {old.key: replace(old, verdict=Verdict(Standing.REMOVING, "Deleted", "", 1.0), edition=None)}
    again = wants("a", 44, digest="b", uid="another")
    made, _ = settle(of(again), removing, {old.key: up(old)}, AdmissionRules(BUDGET), 2.0)
    assert made[again.key].edition == again.edition
    too_much = replace(again, reserved_bytes=49 * GIB)
    assert settle(of(too_much), removing, {old.key: up(old)}, AdmissionRules(BUDGET), 2.0)[0][old.key].edition is None


def test_unknown_sizes_are_refused_or_started_with_a_warning() -> None:
    a = replace(wants("a", None), memory="--lora /x.gguf cannot be read")
    refused, _ = settle(of(a), {}, {}, AdmissionRules(BUDGET), 1.0)
    assert refused[a.key].verdict.reason == "MemoryCheckFailed"
    assert "(--lora /x.gguf cannot be read)" in refused[a.key].verdict.message
    warned, _ = settle(of(a), {}, {}, AdmissionRules(BUDGET, "warn"), 1.0)
    assert warned[a.key].warning and warned[a.key].warning[0] == "MemoryCheckFailed"
    later, _ = settle(of(replace(a, queued_at=1.0)), warned, {a.key: up(a)}, AdmissionRules(BUDGET), 2.0)
    assert later[a.key].edition and later[a.key].warning, "it is said for as long as it is so"


def test_a_more_important_one_takes_the_room_only_where_that_is_configured() -> None:
    first = admitted(wants("low", 30, "low"), wants("normal", 15))
    held = {record.key: up(record) for record in first.values()}
    high = wants("high", 20, "high")
    waits, _ = settle({**first, high.key: high}, first, held, AdmissionRules(BUDGET), 2.0)
    assert [record.edition is not None for record in waits.values()] == [True, True, False]

    rules = AdmissionRules(BUDGET, preemption=True)
    taken, _ = settle({**first, high.key: high}, first, held, rules, 2.0)
    low = taken["default", "low"]
    assert (low.verdict.standing, low.verdict.message) == (
        Standing.WAIT,
        "it was stopped for default/high (priority high)",
    )
    assert taken["default", "normal"].edition and taken[high.key].edition is None
    # While it drains it is not taken for somebody who may have his own room back.
    decided = {
        low.key: replace(first[low.key], queued_at=1.0, displaced_by=low.displaced_by),
        ("default", "normal"): first["default", "normal"],
        high.key: replace(high, queued_at=2.0),
    }
    again, _ = settle(decided, taken, held, rules, 3.0)
    assert again[low.key].edition is None and again[high.key].edition is None
    gone = {key: each for key, each in held.items() if key != low.key}
    end, _ = settle(decided, again, gone, rules, 4.0)
    assert end[high.key].edition
    assert end[low.key].verdict.message.startswith("it was stopped for default/high (priority high); needs 30.0 GiB")


def test_while_memory_is_short_nothing_new_starts_and_nothing_stops() -> None:
    first = admitted(wants("a", 10))
    b = wants("b", 1)
    rules = AdmissionRules(BUDGET, paused="the machine is short of memory (x)")
    found, _ = settle({**first, b.key: b}, first, {}, rules, 2.0)
    assert found["default", "a"].edition
    assert (found[b.key].verdict.reason, found[b.key].edition) == ("MemoryPressure", None)
    assert found[b.key].verdict.message == "the machine is short of memory (x) (queue position 1)"


def test_an_evicted_one_stays_away_and_keeps_its_reason_until_it_may_return() -> None:
    first = admitted(wants("a", 10))
    evicted = replace(first["default", "a"], evicted_at=5.0, evictions=1, evicted_why="1.0 GiB of 24.0 GiB available")
    gone = settle(of(evicted), of(evicted), {evicted.key: up(evicted)}, AdmissionRules(BUDGET), 5.0)[0][evicted.key]
    assert (gone.verdict.reason, gone.evicted_at, gone.evictions) == ("Evicted", 5.0, 1)
    assert gone.drain_s == admission.EVICTED_DRAIN_S
    decided = replace(wants("a", 10), evicted_at=5.0, evictions=1, queued_at=1.0, evicted_why=gone.evicted_why)
    still, _ = settle(of(decided), of(gone), {}, AdmissionRules(BUDGET), 6.0)
    assert (still[gone.key].verdict, still[gone.key].edition) == (gone.verdict, None)
    back, _ = settle(of(replace(decided, evicted_at=None)), still, {}, AdmissionRules(BUDGET), 7.0)
    assert back[gone.key].edition


def test_an_evicted_one_is_passed_by_nobody_who_would_keep_it_out() -> None:
    away = replace(wants("a", 30, "high"), evicted_at=5.0, evictions=1, queued_at=1.0)
    small, large = wants("small", 10, "batch", queued_at=2.0), wants("large", 35, "batch", queued_at=3.0)
    found, _ = settle(of(away, small, large), of(away), {}, AdmissionRules(BUDGET), 9.0)
    assert found[small.key].edition and found[large.key].edition is None
    assert "but default/a needs 30.0 GiB and waits ahead of it" in found[large.key].verdict.message


def test_an_engine_of_a_release_that_kept_no_books_counts_and_its_edit_is_judged() -> None:
    old = replace(wants("a", None), memory="")
    runs, book = settle(
        of(wants("a", 20)), of(old), {old.key: Up(old.edition or "", "", 0)}, AdmissionRules(BUDGET), 1.0
    )
    assert runs[old.key].edition and book.charged_bytes == 20 * GIB, "it runs; what it takes is known from now on"
    # Its size is not known even now: it counts for what it is measured, and an edit that says its size asks for it.
    b, edited = admitted(wants("b", 25))["default", "b"], wants("a", 60, digest="b")
    ups = {old.key: Up(old.edition or "", "", 20 * GIB), b.key: up(b)}
    found, _ = settle(of(edited, b), of(old, b), ups, AdmissionRules(BUDGET), 2.0)
    assert found[old.key].edition == old.edition and found[old.key].warning


def test_an_engine_that_crashes_keeps_its_place_whatever_it_would_be_started_from_today() -> None:
    a, b = admitted(wants("a", 20), wants("b", 25)).values()
    today = replace(wants("a", 30, digest="b"), queued_at=1.0)
    found, _ = settle(of(today, b), of(a, b), {b.key: up(b)}, AdmissionRules(BUDGET), 2.0)
    assert (found[a.key].edition, found[a.key].verdict.standing) == (a.edition, Standing.RUN)


def test_what_its_next_start_would_take_is_asked_for_too_and_holds_up_nobody() -> None:
    a, b = (replace(each, asked="|same") for each in admitted(wants("a", 20), wants("b", 20)).values())
    ups = {a.key: up(a), b.key: up(b)}
    larger = replace(a, edition="next", reserved_bytes=40 * GIB)  # of the same request
    small = wants("small", 5)
    found, _ = settle(of(larger, b, small), of(a, b), ups, AdmissionRules(BUDGET), 2.0)
    assert (found[a.key].edition, found[a.key].reserved_bytes) == (a.edition, 20 * GIB)
    assert found[a.key].warning is None and found[small.key].edition, "it is not kept waiting for that"
    found, book = settle(of(larger), of(a), {a.key: up(a)}, AdmissionRules(BUDGET), 3.0)
    assert found[a.key].edition == "next" and book.charged_bytes == 40 * GIB


def test_nobody_is_stopped_for_its_own_edit() -> None:
    first = admitted(wants("a", 20), wants("b", 15, protected=True))
    ups = {key: up(record) for key, record in first.items()}
    edited = wants("a", 40, "high", "b")
    found, _ = settle({**first, edited.key: edited}, first, ups, AdmissionRules(BUDGET, preemption=True), 2.0)
    assert found[edited.key].edition == first[edited.key].edition and found[edited.key].warning


def test_an_edit_waits_since_it_was_made_and_what_is_not_of_the_engine_follows_at_once() -> None:
    first = admitted(wants("a", 20), wants("c", 20))
    ups = {key: up(record) for key, record in first.items()}
    edited = replace(wants("a", 40, "high", "b", protected=True), queued_at=1.0)
    kept, _ = settle({**first, edited.key: edited}, first, ups, AdmissionRules(BUDGET), 1000.0)
    assert (kept[edited.key].priority, kept[edited.key].protected) == ("high", True)
    assert kept[edited.key].edit_queued_at == 1000.0
    later = replace(edited, priority="normal")
    small = wants("small", 5)
    found, _ = settle({**first, later.key: later, small.key: small}, first, ups, AdmissionRules(BUDGET), 1001.0)
    assert found[small.key].edition, "who was there before the edit did not pass it"


def test_what_was_estimated_at_the_start_counts_while_the_engine_lives() -> None:
    a = admitted(wants("a", 40))["default", "a"]
    smaller_file = replace(a, reserved_bytes=5 * GIB)
    found, book = settle(of(smaller_file), of(a), {a.key: Up(a.edition or "", "", 0)}, AdmissionRules(BUDGET), 2.0)
    assert book.charged_bytes == 40 * GIB or found[a.key].reserved_bytes == 40 * GIB


def test_an_engine_over_a_limit_that_was_lowered_says_so_and_runs_on() -> None:
    a = admitted(wants("a", 20))["default", "a"]
    limited = replace(a, limit_bytes=10 * GIB)
    found, _ = settle(of(limited), of(a), {a.key: up(a)}, AdmissionRules(BUDGET), 2.0)
    assert found[a.key].edition and found[a.key].warning
    assert "its Model allows 10.0 GiB (spec.hardware.memoryBudget" in found[a.key].warning[1]


# ── random histories ─────────────────────────────────────────────────────────────────────────────


@dataclass
class Process:
    spec: str
    bytes: int
    ends_at: int | None = None
    """The step in which it is gone, once it was told to end."""


class Mac:
    """Services come, change and go; processes follow their records, and take their time to end."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.rules = AdmissionRules(100, preemption=self.chance.random() < 0.4)
        self.asked: dict[str, tuple[int, str, int, bool]] = {}
        """name -> (size, priority, edition, protected)"""
        self.records: dict[Key, Record] = {}
        self.processes: dict[Key, Process] = {}
        self.step = self.editions = 0
        self.displaced = self.waited = self.started = 0

    def edit(self) -> None:
        chance = self.chance
        name = f"m{chance.randrange(8)}"
        if name in self.asked and chance.random() < 0.35:
            del self.asked[name]
        else:
            size, priority = chance.choice([1, 5, 10, 20, 30, 50, 80, 101]), chance.choice(["low", "normal", "high"])
            self.editions += 1  # the name of a spec says what is in it
            self.asked[name] = size, priority, self.editions, chance.random() < 0.1

    def decided(self) -> dict[Key, Record]:
        """What the controller makes of what is asked, before anybody has looked at the memory."""
        result = {}
        for name, (size, priority, edition, protected) in self.asked.items():
            record = wants(name, None, priority, f"e{edition}", reserved_bytes=size, protected=protected)
            was = self.records.get(record.key)
            if was is not None:
                record = replace(
                    record, queued_at=was.queued_at, admitted_at=was.admitted_at, displaced_by=was.displaced_by
                )
            result[record.key] = record
        for key, was in self.records.items():
            if key not in result and key in self.processes:
                result[key] = replace(was, edition=None, verdict=Verdict(Standing.REMOVING, "Deleted", "", 0.0))
        return result

    def crash(self) -> None:
        """An engine ends by itself; supervisord starts it again, from the same spec."""
        if self.processes and self.chance.random() < 0.3:
            del self.processes[self.chance.choice(sorted(self.processes))]

    def one_pass(self) -> None:
        self.step += 1
        held = {key: Up(each.spec, "", each.bytes) for key, each in self.processes.items()}
        decided = self.decided()
        items = list(decided.items())
        self.chance.shuffle(items)
        self.records, book = settle(dict(items), self.records, held, self.rules, float(self.step))
        self.displaced += sum(len(each.displaces) for each in book.decisions.values())
        self.waited += sum(not each.admitted for each in book.decisions.values())
        self.move()

    def move(self) -> None:
        """What supervisord does of it: one process per record, the next only after the one before has ended."""
        for key, process in list(self.processes.items()):
            record = self.records.get(key)
            if process.ends_at is None and (record is None or record.edition != process.spec):
                process.ends_at = self.step + self.chance.randrange(4)
            if process.ends_at is not None and process.ends_at <= self.step:
                del self.processes[key]
        for key, record in self.records.items():
            if record.edition and key not in self.processes:
                self.processes[key] = Process(record.edition, record.reserved_bytes)
                self.started += 1


def comes_to_rest(mac: Mac) -> bool:
    """Whether it stays as it is, once nobody edits anything for a while."""
    same = 0
    for _ in range(40):
        before = {key: each.edition for key, each in mac.records.items()}, mac.processes.keys()
        mac.one_pass()
        rests = all(each.ends_at is None for each in mac.processes.values())
        same = same + 1 if rests and before[0] == {key: each.edition for key, each in mac.records.items()} else 0
        if same == 2:
            return True
    return False


def test_random_histories_never_hold_more_than_the_budget() -> None:
    seen = {"started": 0, "waited": 0, "displaced": 0}
    for seed in range(cases(10_000)):
        mac = Mac(seed)
        for _ in range(6):
            for _ in range(mac.chance.randrange(5)):
                mac.edit()
            running = {key: each.spec for key, each in mac.processes.items() if each.ends_at is None}
            before = mac.records
            mac.crash()
            mac.one_pass()
            assert sum(each.bytes for each in mac.processes.values()) <= 100, seed
            for key, spec in running.items():
                record = mac.records.get(key)
                untouched = record is not None and mac.asked.get(key[1], (0, "", -1, False))[2] == int(
                    (before[key].edition or ".e-1.").split(".")[2][1:]
                )
                if key[1] in mac.asked and record is not None and not mac.rules.preemption:
                    assert record.edition, f"{seed}: {key} may not run any more, whatever it was edited to"
                if untouched and record is not None and record.edition != spec:
                    assert mac.rules.preemption and record.displaced_by, f"{seed}: {key} was stopped for nothing"
        assert comes_to_rest(mac), seed
        for record in mac.records.values():
            if record.edition is None:
                assert record.verdict.reason == "InsufficientMemory" and "needs" in record.verdict.message
        seen["started"] += mac.started
        seen["waited"] += mac.waited
        seen["displaced"] += mac.displaced
    assert min(seen.values()) > cases(1000), f"the histories reach everything: {seen}"
