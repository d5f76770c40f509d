"""Services on demand: who says that one is, when its engine is loaded, unloaded, and makes room for another."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest

from metal_supervisor.cluster.report import UNLOADED, report
from metal_supervisor.controller import admission, on_demand, plan, reconcile
from metal_supervisor.controller.admission import AdmissionRules, Up
from metal_supervisor.controller.on_demand import MAX_WAIT_S, MIN_AWAKE_S, SETTLED_S
from metal_supervisor.controller.plan import Stopping
from metal_supervisor.controller.prerequisites.ports import Ports, front_key
from metal_supervisor.controller.snapshot import Snapshot
from metal_supervisor.spec.fields import Bad
from metal_supervisor.spec.limits import PRIORITIES
from metal_supervisor.spec.on_demand import IDLE_TTL_ANNOTATION, ON_DEMAND_ANNOTATION, OnDemandPolicy, unloading
from metal_supervisor.spec.processes import EngineUse, Observed
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Json, Key, Standing
from metal_supervisor.spec.withdrawal import withdrawal_token
from tests.support.effort import cases
from tests.support.records import a_record

# ── what manifests and settings say ──────────────────────────────────────────────────────────────


def annotated(**said: str) -> Json:
    names = {"on_demand": ON_DEMAND_ANNOTATION, "ttl": IDLE_TTL_ANNOTATION}
    return {"metadata": {"annotations": {names[name]: value for name, value in said.items()}}}


OFF = OnDemandPolicy()
ON = OnDemandPolicy(default=True, idle_ttl_s=60.0)


@pytest.mark.parametrize(
    ("service", "model", "policy", "idle_s"),
    [
        (annotated(), annotated(), OFF, None),
        (annotated(), annotated(), ON, 60.0),
        (annotated(on_demand="true"), annotated(), OFF, 900.0),
        (annotated(on_demand="true"), annotated(on_demand="false"), OFF, 900.0),
        (annotated(on_demand="false"), annotated(on_demand="true"), ON, None),
        (annotated(), annotated(on_demand="true", ttl="1m"), OFF, 60.0),
        (annotated(on_demand="true", ttl="1h"), annotated(ttl="1m"), OFF, 3600.0),
        (annotated(on_demand="true", ttl="off"), annotated(), OFF, 0.0),
        (annotated(on_demand="true"), annotated(), replace(OFF, gateway=False), None),
        ({}, {}, OFF, None),
    ],
)
def test_the_service_comes_before_its_model_and_that_before_the_setting(
    service: Json, model: Json, policy: OnDemandPolicy, idle_s: float | None
) -> None:
    assert unloading(service, model, policy).idle_s == idle_s


def test_without_a_gateway_that_is_told_where_it_was_asked_for() -> None:
    off = replace(ON, gateway=False)
    assert unloading(annotated(on_demand="true"), {}, off).not_granted[0][0] == "OnDemandIgnored"
    assert not unloading(annotated(), {}, off).not_granted


def test_an_engine_of_its_own_idle_time_is_another_matter() -> None:
    assert unloading(annotated(ttl="15m"), {}, OFF).engine_s == 900
    assert unloading(annotated(on_demand="true", ttl="15m"), {}, OFF).engine_s is None


@pytest.mark.parametrize(
    ("service", "model", "where"),
    [
        (annotated(on_demand="yes"), {}, ON_DEMAND_ANNOTATION),
        (annotated(), annotated(on_demand="True"), f"{ON_DEMAND_ANNOTATION} of its Model"),
        (annotated(on_demand="true", ttl="soon"), {}, IDLE_TTL_ANNOTATION),
        (annotated(on_demand="true"), annotated(ttl="1s"), f"{IDLE_TTL_ANNOTATION} of its Model"),
    ],
)
def test_what_means_nothing_is_refused_by_name(service: Json, model: Json, where: str) -> None:
    with pytest.raises(Bad) as refused:
        unloading(service, model, OFF)
    assert refused.value.message.startswith(f"annotation {where} must be")


# ── one service ──────────────────────────────────────────────────────────────────────────────────

NOW = 10_000.0
SPEC = "aaaaaaaaaaaa"
RUNS = a_record(idle_s=60.0, front_port=18101, port=18100, edition=SPEC, reserved_bytes=10, admitted_at=NOW - 100)
ASKS = reconcile.unchanged(RUNS)
READY = Observed("default.tiny", 7, True, NOW - 100, "RUNNING")


def world(uses: dict[str, EngineUse], observed: dict[str, Observed], now: float = NOW) -> Snapshot:
    return Snapshot(now, {}, True, {}, {}, {}, observed, uses)


def settled(use: EngineUse, was: Record | None = RUNS, asks: Record = ASKS, up: bool = True) -> Record:
    key, program = RUNS.key, RUNS.program
    before, held = {} if was is None else {key: was}, [key] if up else []
    return on_demand.settle({key: asks}, before, held, world({program: use}, {program: READY}))[key]


@pytest.mark.parametrize(
    ("use", "stays"),
    [
        (EngineUse(), False),
        (EngineUse(used_at=NOW - 61), False),
        (EngineUse(used_at=NOW - 59), True),
        (EngineUse(in_flight=1, used_at=NOW - 1000), True),
        (EngineUse(waiting=1), True),
    ],
)
def test_an_engine_is_unloaded_after_its_idle_time(use: EngineUse, stays: bool) -> None:
    found = settled(use)
    assert found.asks is stays
    if not stays:
        assert (found.verdict.standing, found.verdict.reason) == (Standing.WAIT, UNLOADED)
        assert found.edition is None and found.drain_s == on_demand.DRAIN_S


def test_an_engine_of_which_no_worker_tells_counts_as_in_use() -> None:
    """As in the second after a worker was killed: it alone knew that the engine was used, hours after its start."""
    snapshot = world({}, {RUNS.program: READY})
    found = on_demand.settle({RUNS.key: ASKS}, {RUNS.key: RUNS}, [RUNS.key], snapshot)
    assert found[RUNS.key].asks and on_demand.yields(found, {RUNS.key: RUNS}, snapshot)[RUNS.key].busy


def test_times_ahead_of_a_clock_that_was_set_back_count_as_long_ago() -> None:
    back = NOW - 3600
    uses, seen = {RUNS.program: EngineUse(used_at=NOW - 1)}, {RUNS.program: READY}
    idle = on_demand.settle({RUNS.key: ASKS}, {RUNS.key: RUNS}, [RUNS.key], world(uses, seen, back))
    assert not idle[RUNS.key].asks
    for used_at in (back - 0.1, back + 2.0):  # since the clock was set; and while the snapshot was taken
        used = {RUNS.program: EngineUse(used_at=used_at)}
        stays = on_demand.settle({RUNS.key: ASKS}, {RUNS.key: RUNS}, [RUNS.key], world(used, seen, back))
        assert stays[RUNS.key].asks
        assert on_demand.yields(stays, {RUNS.key: RUNS}, world(used, seen, back))[RUNS.key].busy


def test_one_that_is_evicted_ends_as_such_and_not_as_one_that_rests() -> None:
    evicted = replace(RUNS, evicted_at=NOW, evicted_why="memory is short", evictions=1)
    asks, rules = replace(ASKS, evicted_at=NOW), AdmissionRules(10, paused="short of memory")
    record, key, ups = evicted, RUNS.key, {RUNS.key: Up(SPEC, "", 10)}
    for use in (EngineUse(in_flight=1, used_at=NOW), EngineUse(in_flight=1), EngineUse(waiting=1, in_flight=1)):
        found = on_demand.settle({key: asks}, {key: record}, [key], world({RUNS.program: use}, {RUNS.program: READY}))
        record = admission.settle(found, {key: record}, ups, rules, NOW)[0][key]
        assert not record.runs and record.verdict.reason == "Evicted" and record.drain_s == admission.EVICTED_DRAIN_S


def test_it_stays_where_only_others_may_end_it() -> None:
    assert settled(EngineUse(), asks=replace(ASKS, idle_s=0.0)).asks
    assert settled(EngineUse(), asks=replace(ASKS, stopped_by_hand=True)).asks
    assert settled(EngineUse(), asks=replace(ASKS, idle_s=None)).asks
    assert settled(EngineUse(), was=None).asks  # its record was lost


def test_it_is_loaded_for_a_request_only() -> None:
    new = settled(EngineUse(), was=None, up=False)
    assert new.verdict.message == on_demand.FRESH
    assert settled(EngineUse(waiting=1), was=None, up=False).asks


def test_one_that_was_to_end_keeps_its_memory_if_it_is_asked_for_again() -> None:
    rests = settled(EngineUse())
    rules, ups = AdmissionRules(10), {RUNS.key: Up(SPEC, "", 10)}
    kept, _ = admission.settle({RUNS.key: ASKS}, {RUNS.key: rests}, ups, rules, NOW)
    assert kept[RUNS.key].runs and kept[RUNS.key].edition == SPEC


def test_it_is_not_ended_before_the_gateway_has_seen_the_withdrawal() -> None:
    token = withdrawal_token(NOW)
    drained = Stopping(withdrawn=True, drained=True)
    assert plan.with_use(drained, None, token) == drained
    assert plan.with_use(drained, EngineUse(withdrawn=token), token) == drained
    assert not plan.with_use(drained, EngineUse(), token).drained
    busy = plan.with_use(drained, EngineUse(in_flight=1, withdrawn=token), token)
    assert busy.busy and not busy.drained


RESTS = replace(
    RUNS, edition=None, verdict=reconcile.verdict(None, Standing.WAIT, UNLOADED, "it had no request for 60 s", NOW)
)


def test_its_endpoint_is_the_gateway_s_and_stays_ready() -> None:
    rests = report(RESTS, None)
    assert (rests.phase, rests.ready, rests.engine_ready, rests.reason) == ("Ready", True, False, UNLOADED)
    assert rests.port == 18101
    wakes = report(RUNS, None)
    assert (wakes.phase, wakes.ready, wakes.engine_ready, wakes.reason) == ("Ready", True, False, "Waking")
    serves = report(RUNS, READY)
    assert (serves.ready, serves.engine_ready, serves.reason, serves.port) == (True, True, "Serving", 18101)
    assert not report(RESTS, None, leaving=True).ready


def test_until_the_gateway_listens_it_is_the_engine_s() -> None:
    assert (report(RUNS, READY, fronts=[]).port, report(RUNS, READY, fronts=[]).ready) == (18100, True)
    assert not report(RESTS, None, fronts=[]).ready
    assert report(RESTS, None, fronts=[18101]).ready


@pytest.mark.parametrize("reason", ["InsufficientMemory", "MemoryCheckFailed"])
def test_one_that_waits_for_memory_holds_its_requests_and_one_that_never_fits_refuses_them(reason: str) -> None:
    waits = replace(RESTS, verdict=reconcile.verdict(None, Standing.WAIT, reason, "needs 9 GiB", NOW), queue_position=1)
    assert (report(waits, None).ready, report(waits, None).reason) == (True, "Waking")
    assert report(replace(waits, queue_position=0, evicted_at=NOW), None).ready, "it comes back by itself"
    never = report(replace(waits, queue_position=0), None)
    assert (never.ready, never.reason, never.phase) == (False, reason, "Pending")


def test_a_crash_is_waited_for_and_a_crash_loop_is_not() -> None:
    assert report(RUNS, replace(READY, ready=False, pid=0, state="BACKOFF")).reason == "Waking"
    assert not report(RUNS, replace(READY, ready=False, pid=0, state="FATAL")).ready


def test_each_service_has_a_port_of_its_own_at_the_gateway() -> None:
    ports = Ports([RUNS])
    assert ports.holder(18101, front_key(("default", "another"))) == front_key(RUNS.key)
    assert ports.holder(18101, front_key(RUNS.key)) is None
    assert ports.holder(18100, front_key(RUNS.key)) == RUNS.key


# ── many services, and too little memory ─────────────────────────────────────────────────────────


@dataclass
class Process:
    spec: str
    bytes: int
    ready_at: float
    flight: int = 0


class Mac:
    """A Mac whose engines load, answer and end as they are told; its clients come and go."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = NOW
        self.records: dict[Key, Record] = {}
        self.processes: dict[str, Process] = {}
        self.waiting: Counter[str] = Counter()
        self.used_at: dict[str, float] = {}
        self.wanted: dict[str, dict[str, Any]] = {}
        self.seen: Counter[str] = Counter()
        self.editions = 0

    def edit(self, name: str, **asked: Any) -> None:
        ordinary = {"idle_s": 60.0, "reserved_bytes": 30, "priority": "normal", "protected": False}
        self.editions += 1  # the name of a spec says what is in it
        self.wanted[name] = {**ordinary, **asked, "edition": self.editions}

    def uses(self) -> dict[str, EngineUse]:
        return {
            f"default.{name}": EngineUse(
                self.waiting[name],
                self.processes[name].flight if name in self.processes else 0,
                self.used_at.get(name, 0.0),
            )
            for name, asked in self.wanted.items()
            if asked["idle_s"] is not None
        }

    def observed(self) -> dict[str, Observed]:
        return {
            f"default.{name}": Observed(f"default.{name}", 1, each.ready_at <= self.now, each.ready_at, "RUNNING")
            for name, each in self.processes.items()
        }

    def proposals(self) -> dict[Key, Record]:
        found = {}
        for name, asked in self.wanted.items():
            plain = {key: value for key, value in asked.items() if key != "edition"}
            record = a_record(name, edition=f"default.{name}.{asked['edition']:012x}.json", front_port=1, **plain)
            if (was := self.records.get(record.key)) is not None:
                record = replace(
                    record, queued_at=was.queued_at, admitted_at=was.admitted_at, displaced_by=was.displaced_by
                )
            found[record.key] = reconcile.unchanged(record)
        for key, was in self.records.items():
            if key not in found and key[1] in self.processes:
                found[key] = reconcile.unchanged(reconcile.dismiss(was, self.now))
        return found

    def one_pass(self) -> None:
        ups = {("default", name): Up(each.spec, "", each.bytes) for name, each in self.processes.items()}
        before, uses, observed = self.records, self.uses(), self.observed()
        asked = on_demand.settle(self.proposals(), before, ups, world(uses, observed, self.now))
        yielding = on_demand.yields(asked, before, world(uses, observed, self.now))
        self.records, book = admission.settle(asked, before, ups, AdmissionRules(100), self.now, yielding)
        for key, said in book.decisions.items():
            for victim in said.displaces:
                self.check_victim(victim, key, before, uses, observed)

    def check_victim(
        self, victim: Key, key: Key, before: dict[Key, Record], uses: dict[str, EngineUse], seen: dict[str, Observed]
    ) -> None:
        lost, won, use = self.wanted[victim[1]], self.wanted[key[1]], uses[f"default.{victim[1]}"]
        assert lost["idle_s"] is not None and not lost["protected"]
        assert PRIORITIES[lost["priority"]] <= PRIORITIES[won["priority"]]
        if use.in_flight or use.waiting or self.now - use.used_at < SETTLED_S:
            asked = self.records[key].queued_at
            assert asked is not None and asked <= self.now - MAX_WAIT_S
            assert self.now - seen[f"default.{victim[1]}"].since >= MIN_AWAKE_S
            self.seen["busy one"] += 1
        else:
            self.seen["idle one"] += 1

    def move(self, loading_s: float = 0.0) -> None:
        """What supervisord, the engines and the gateway do of it."""
        for name, process in list(self.processes.items()):
            record = self.records.get(("default", name))
            if (record is None or record.edition != process.spec) and not process.flight:
                del self.processes[name]
        for (_, name), record in self.records.items():
            if record.edition and name not in self.processes:
                self.processes[name] = Process(record.edition, record.reserved_bytes, self.now + loading_s)
                self.seen["loads"] += 1
        self.forward()

    def forward(self) -> None:
        for name, process in self.processes.items():
            record = self.records.get(("default", name))
            if process.ready_at <= self.now and record is not None and record.edition == process.spec:
                process.flight += self.waiting[name]
                self.waiting[name] = 0
                if process.flight:
                    self.used_at[name] = self.now

    def ask(self, name: str) -> None:
        self.waiting[name] += 1
        self.used_at[name] = self.now
        self.forward()

    def answer(self, name: str) -> None:
        if name in self.processes and self.processes[name].flight:
            self.processes[name].flight -= 1
            self.used_at[name] = self.now
            self.seen["answers"] += 1

    def anything(self) -> None:
        """One thing that happens."""
        chance, name = self.chance, f"m{self.chance.randrange(5)}"
        what = chance.choice([*["ask"] * 6, *["answer"] * 4, *["time"] * 6, "edit", "delete", "leave", "crash"])
        if what == "edit" or name not in self.wanted:
            self.edit(
                name,
                reserved_bytes=chance.choice([5, 40, 60, 60, 90, 101]),
                protected=chance.random() < 0.1,
                priority=chance.choice(["low", "normal", "normal", "high"]),
                idle_s=chance.choice([0.0, 60.0, 60.0, None]),
            )
        elif what == "delete":
            del self.wanted[name]
            self.waiting[name] = 0
        elif what == "ask" and self.wanted[name]["idle_s"] is not None:
            self.ask(name)
        elif what == "answer":
            self.answer(name)
        elif what == "leave" and self.waiting[name]:
            self.waiting[name] -= 1
        elif what == "crash":
            self.processes.pop(name, None)
        elif what == "time":
            self.now += chance.choice([0.05, 0.6, 5.0, 31.0, 31.0, 61.0])


SHARE = 25
"""Of some fifty changes to `on_demand` and `admission`, those that were found at all the first 160 histories found: of
1000 for each change to the one, 250 to the other."""


def test_random_histories_keep_the_budget_and_end_nothing_that_is_used() -> None:
    seen: Counter[str] = Counter()
    for seed in range(cases(10_000, SHARE)):
        mac = Mac(seed)
        for _ in range(30):
            mac.anything()
            mac.one_pass()
            flights = {name: each.flight for name, each in mac.processes.items()}
            mac.move(mac.chance.choice([0.0, 2.0]))
            assert sum(each.bytes for each in mac.processes.values()) <= 100, seed
            assert all(name in mac.processes for name, count in flights.items() if count), seed
            mac.now += 0.05
        end_quietly(mac, seed)
        seen += mac.seen
    assert min(seen[each] for each in ("busy one", "idle one", "loads", "answers")) > cases(300, SHARE), seen


def end_quietly(mac: Mac, seed: int) -> None:
    """Nothing new comes: everyone who waits is answered, or refused because it never fits, beside what stays."""
    waits: list[int] = []
    while len(waits) < 16 or waits[-16] != waits[-1]:  # 75 s without a change: longer than a turn
        waits.append(mac.waiting.total() + sum(each.flight for each in mac.processes.values()))
        if not waits[-1]:
            return
        for name in list(mac.processes):
            mac.answer(name)
        mac.one_pass()
        mac.move()
        mac.now += 5.0
    for name, count in mac.waiting.items():
        if count:
            record = mac.records["default", name]
            assert record.verdict.reason == "InsufficientMemory", (seed, name, record.verdict)
            assert is_kept_out(mac, name), (seed, name, record.verdict)


def is_kept_out(mac: Mac, name: str) -> bool:
    """True if there is never room: it is larger than the budget, or what may not be unloaded for it is in its way."""
    mine = mac.wanted[name]
    in_its_way = [
        each["reserved_bytes"]
        for other, each in mac.wanted.items()
        if other != name
        and other in mac.processes
        and (each["idle_s"] is None or each["protected"] or PRIORITIES[each["priority"]] > PRIORITIES[mine["priority"]])
    ]
    waits = [
        each["reserved_bytes"]
        for other, each in mac.wanted.items()
        if other != name
        and PRIORITIES[each["priority"]] >= PRIORITIES[mine["priority"]]
        and mac.records["default", other].queue_position
    ]
    return mine["reserved_bytes"] + sum(in_its_way) + sum(waits) > 100


@pytest.mark.parametrize("models", [2, 3, 5])
def test_models_that_never_fit_together_are_served_in_turns(models: int) -> None:
    """Each has a client that asks again as soon as it is answered; none waits longer than a turn of each other."""
    mac, names = Mac(1), [f"m{number}" for number in range(models)]
    for name in names:
        mac.edit(name, reserved_bytes=60)
    waited: dict[str, float] = dict.fromkeys(names, 0.0)
    longest = 0.0
    for _ in range(20 * models * 60):
        for name in names:
            if not mac.waiting[name] and not (name in mac.processes and mac.processes[name].flight):
                mac.ask(name)
            waited[name] = waited[name] + 0.5 if mac.waiting[name] else 0.0
            longest = max(longest, waited[name])
        mac.one_pass()
        mac.move(1.0)
        mac.now += 0.5
        for name in list(mac.processes):
            mac.answer(name)
    assert mac.seen["answers"] > 100 * models
    assert longest <= (models - 1) * (max(MIN_AWAKE_S, MAX_WAIT_S) + 5.0), longest


def test_one_that_waits_for_what_never_ends_keeps_none_on_demand_out_and_gets_their_memory_once_it_helps() -> None:
    mac = Mac(1)
    mac.edit("stays", reserved_bytes=20, idle_s=None)
    mac.one_pass()
    mac.move()
    mac.edit("large", reserved_bytes=90, idle_s=None)
    mac.edit("tiny", reserved_bytes=10)
    mac.edit("later", reserved_bytes=10, idle_s=None)

    def live(seconds: int) -> None:
        for _ in range(seconds):
            for name in ("tiny", *mac.processes):
                mac.answer(name)
            if not mac.waiting["tiny"]:
                mac.ask("tiny")
            mac.one_pass()
            mac.move()
            mac.now += 1.0

    live(90)
    assert set(mac.processes) == {"stays", "tiny"} and mac.seen["answers"] > 60
    assert "default/large needs" in mac.records["default", "later"].verdict.message, "it would not give its memory back"
    del mac.wanted["stays"]
    live(int(MAX_WAIT_S + MIN_AWAKE_S))
    assert "large" in mac.processes and "stays" not in mac.processes


def test_one_that_waits_while_the_clock_is_set_back_gets_its_turn_all_the_same() -> None:
    mac = Mac(1)
    for name in ("m0", "m1"):
        mac.edit(name, reserved_bytes=60)
        mac.ask(name)
        for _ in range(2):
            mac.one_pass()
            mac.move()
    assert set(mac.processes) == {"m0"} and mac.waiting["m1"] == 1
    mac.now -= 8 * 3600
    mac.processes["m0"].ready_at = mac.now - MIN_AWAKE_S  # it stays ready, whatever the clock says
    mac.answer("m0")
    for _ in range(5):
        mac.now += 1.0
        mac.one_pass()
        mac.move()
    assert "m1" in mac.processes and not mac.waiting["m1"]


def test_the_idle_one_of_lowest_priority_goes_first_and_then_the_longest_unused() -> None:
    mac = Mac(1)
    for name, priority in (("m0", "normal"), ("m1", "low"), ("m2", "normal")):
        mac.edit(name, reserved_bytes=30, priority=priority)
        mac.ask(name)
        for _ in range(2):
            mac.one_pass()
            mac.move()
        mac.answer(name)
        mac.now += 1.0
    gone = []
    for number in (3, 4, 5):
        mac.edit(f"m{number}", reserved_bytes=30)
        mac.ask(f"m{number}")
        before = set(mac.processes)
        for _ in range(3):
            mac.one_pass()
            mac.move()
        gone += sorted(before - set(mac.processes))
    assert gone == ["m1", "m0", "m2"]
