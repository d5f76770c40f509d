"""Starts in turns: how many engines load at a time, and whose turn is first."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metal_supervisor.controller.pacing import LOADS_S, most_at_once, paced
from metal_supervisor.controller.plan import Action, Step
from metal_supervisor.controller.snapshot import Snapshot
from metal_supervisor.spec.processes import EngineUse, Observed, ProgramState, State
from metal_supervisor.spec.record import Record
from tests.support.records import a_record

NOW = 1_000_000.0
STARTS = Action.ADD, Action.START


def services(count: int, **changes: Any) -> list[Record]:
    return [a_record(f"s{number}", program=f"default.s{number}", **changes) for number in range(count)]


def up(program: str, since_s: float = 1.0, state: State = State.RUNNING) -> ProgramState:
    return ProgramState(program, state, 7, NOW - since_s, 0.0)


def seen(program: str, served: bool) -> Observed:
    return Observed(program, 7, served, NOW, "RUNNING", served=served)


def started(steps: list[Step]) -> list[str]:
    return [step.program.removeprefix("default.") for step in steps if step.do in STARTS]


def world(
    table: dict[str, ProgramState], observed: Any = MappingProxyType({}), uses: Any = MappingProxyType({})
) -> Snapshot:
    return Snapshot(NOW, {}, True, {}, table, {}, observed, uses)


def adds(records: list[Record]) -> list[Step]:
    return [Step(Action.ADD, each.program, "new") for each in records]


@pytest.mark.parametrize(
    ("chosen", "cores", "most"),
    [
        (0, None, 4),
        (0, 2, 4),
        (0, 8, 4),
        (0, 12, 6),
        (0, 32, 16),
        (1, 32, 1),
        (1000, 2, 1000),
    ],
)
def test_half_of_the_cores_load_unless_a_number_is_chosen(chosen: int, cores: int | None, most: int) -> None:
    assert most_at_once(chosen, cores) == most


def test_those_that_load_take_places_and_those_that_serve_or_take_too_long_do_not() -> None:
    records = services(6)
    table = {
        "default.s0": up("default.s0"),
        "default.s1": up("default.s1"),
        "default.s2": up("default.s2", LOADS_S),
        "default.s3": up("default.s3", state=State.BACKOFF),
    }
    told = {"default.s0": seen("default.s0", False), "default.s1": seen("default.s1", True)}
    steps = paced(adds(records[4:]), records, world(table, told), 2)
    assert started(steps) == ["s4"]
    assert steps[1] == Step(Action.WAIT, "default.s5", "its turn to start: 2 engines load at a time", 1.0)


def test_priority_comes_first_and_then_the_one_that_was_admitted_first() -> None:
    first, second, third = services(3, admitted_at=5.0)
    second, third = replace(second, admitted_at=2.0), replace(third, priority="high")
    records = [first, second, third]
    assert started(paced(adds(records), records, world({}), 1)) == ["s2"]
    assert started(paced(adds(records), records, world({}), 2)) == ["s1", "s2"]


def test_an_engine_that_a_client_waits_for_starts_in_any_case() -> None:
    records = services(4)
    table = {"default.s0": up("default.s0")}
    uses = {"default.s3": EngineUse(waiting=1), "default.s2": EngineUse(in_flight=1)}
    assert started(paced(adds(records[1:]), records, world(table, {}, uses), 1)) == ["s3"]


@given(
    st.lists(st.sampled_from([*Action]), max_size=12),
    st.integers(1, 5),
    st.sets(st.integers(0, 11)),
    st.sets(st.integers(0, 11)),
)
def test_only_starts_wait_and_no_place_stays_empty(
    kinds: list[Action], most: int, live: set[int], asked: set[int]
) -> None:
    records = services(12)
    steps = [Step(kind, f"default.s{number}", "why") for number, kind in enumerate(kinds)]
    table = {f"default.s{number}": up(f"default.s{number}") for number in live}
    uses = {f"default.s{number}": EngineUse(waiting=1) for number in asked}
    result = paced(steps, records, world(table, {}, uses), most)
    assert [one.program for one in result] == [one.program for one in steps]
    assert [one for one in result if one not in steps] == [
        one for one, before in zip(result, steps, strict=True) if before.do in STARTS and one.do is Action.WAIT
    ]
    wanted = {step.program for step in steps if step.do in STARTS}
    urgent = wanted & uses.keys()
    free = max(0, most - len(live) - len(urgent))
    assert len(started(result)) == len(urgent) + min(free, len(wanted - urgent))


def test_engines_that_crash_again_and_again_keep_no_other_one_from_its_first_start() -> None:
    crashed = services(20, admitted_at=NOW - 10_000.0)
    fresh = a_record("fresh", program="default.fresh", admitted_at=NOW - 5.0)
    again = [Step(Action.START, each.program, "its pause after a crash is over") for each in crashed]
    steps = [*again, *adds([fresh])]

    def first(ended_at: float) -> list[str]:
        table = {each.program: ProgramState(each.program, State.FATAL, 0, NOW - 60.0, ended_at) for each in crashed}
        return started(paced(steps, [*crashed, fresh], world(table), 1))

    assert first(NOW - 4.0) == ["fresh"]
    assert first(NOW - 6.0) == ["s0"], "it has waited for longer"
