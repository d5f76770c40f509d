"""Custom resources on their way out, edited without end, or in any script: what the pure core makes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_decide import SERVICE, outlook
from test_plan import NOW, OLD, PID, WANTS_NEW, WANTS_OLD, WITHDRAWN, changed, do, moves, note, row
from test_resources import accepted, model, refused, service

from metal_supervisor.cluster.report import report
from metal_supervisor.controller.plan import SETTLE_S, Action
from metal_supervisor.spec.processes import Observed, State
from metal_supervisor.spec.types import Json, Standing
from tests.support.records import accept, refuse

# ── C 45: deletionTimestamp ──────────────────────────────────────────────────────────────────────


def leaving(finalizers: Any = ("example.com/a", "example.com/b"), **spec: Any) -> Json:
    found = service(**spec)
    found["metadata"] |= {"deletionTimestamp": "2026-11-21T01:41:10Z", "finalizers": finalizers and list(finalizers)}
    return found


def test_one_that_is_being_deleted_is_taken_down_and_names_what_it_waits_for() -> None:
    found = refused(leaving())
    assert (found.reason, found.keeps_running) == ("Deleting", False)
    assert "example.com/a, example.com/b" in found.message
    record = refuse(found, accept(SERVICE, None, outlook(), 100.0), 200.0)
    assert (record.verdict.standing, record.edition, record.port) == (Standing.FAILED, None, 18100)
    told = report(replace(record, claimed=True), None)
    assert (told.phase, told.reason, told.ready, told.wants_slice) == ("Failed", "Deleting", False, False)


@pytest.mark.parametrize("finalizers", [None, ()])
def test_one_whose_finalizers_are_all_gone_will_be_so_in_a_moment(finalizers: Any) -> None:
    assert refused(leaving(finalizers)).reason == "Deleting"


def test_the_deletion_of_what_is_for_others_is_theirs() -> None:
    assert refused(leaving(), model(hardware={"accelerator": "cuda"})).reason == "NotMetal"


def test_switched_off_before_it_was_deleted_it_stays_off() -> None:
    record = refuse(refused(leaving(suspend=True)), None, 200.0)
    assert record.verdict.standing is Standing.SUSPENDED
    assert record.warning is not None and record.warning[0] == "Deleting"


# ── C 46: many edits ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("state", [State.RUNNING, State.STARTING])
def test_an_engine_that_has_only_just_been_started_is_not_replaced_yet(state: State) -> None:
    # The last one was started while the pass looked around: its note is later than the pass's time.
    for up_s in (SETTLE_S / 4, -SETTLE_S / 20):
        young = note(OLD, starts=(NOW - up_s,))
        for stopping in (None, WITHDRAWN):
            (step,) = moves(row(state), want=WANTS_NEW, diff=changed(), said=young, stopping=stopping)
            assert step.do is Action.WAIT and step.again_in_s == pytest.approx(SETTLE_S - up_s)
    settled = note(OLD, starts=(NOW - SETTLE_S,))
    assert do(row(state), want=WANTS_NEW, diff=changed(), said=settled) is Action.WITHDRAW
    assert do(row(state), want=WANTS_NEW, diff=changed(), said=settled, stopping=WITHDRAWN) is Action.STOP


def test_the_wait_ends_with_the_last_edit_if_that_is_what_runs_already() -> None:
    assert do(row(State.RUNNING), want=WANTS_OLD, diff=changed(), said=note(OLD, starts=(NOW - 0.1,))) is None


@pytest.mark.parametrize("starts", [(), (NOW - 3, NOW - 0.1), (NOW + 60,)], ids=["none", "crashes", "clock-set-back"])
def test_what_crashes_or_has_an_odd_clock_is_replaced_at_once(starts: tuple[float, ...]) -> None:
    assert do(row(State.RUNNING), want=WANTS_NEW, diff=changed(), said=note(OLD, starts=starts)) is Action.WITHDRAW


def test_one_that_is_not_wanted_any_more_is_not_waited_for() -> None:
    assert do(row(State.RUNNING), said=note(OLD, PID, starts=(NOW - 0.1,))) is Action.WITHDRAW


# ── C 29: more replicas than Macs ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("peers", "count"), [(0, "1 of 3"), (1, "2 of 3"), (2, "")])
def test_replicas_that_are_missing_are_counted_with_the_reason(peers: int, count: str) -> None:
    record = replace(accept(SERVICE, None, outlook(), 100.0), replicas=3, peers_ready=peers, claimed=True)
    up = Observed("default.tiny", 5, True, 100.0, "RUNNING")
    told = report(record, up)
    assert told.reason == "Serving"
    text = f"; {count} replicas are ready: each takes a Mac of its own, or see --replicas-per-mac"
    assert told.message == "llama-server serves tiny on port 18100" + (text if count else "")


# ── C 35: any script ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("text", ["\u202eevil\u202c", "שלום עולם", "مرحبا", "e\u0301", "\u200b", "\ufeff", "🏳️‍🌈"])
def test_arguments_in_any_script_and_direction_stay_as_they_are(text: str) -> None:
    assert accepted(service(extraArgs=[text])).extra_args == (text,)
