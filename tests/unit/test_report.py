"""What the cluster is shown of a service: LLMKube's words for phase, conditions and scheduling, and our own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_supervisor.cluster.report import UNLOADED, WAITING, Condition, Report, happening, report
from metal_supervisor.spec.processes import Observed
from metal_supervisor.spec.record import Record, Verdict
from metal_supervisor.spec.types import Probe, Standing
from tests.support.records import a_record

PROPERTY = settings(max_examples=200, database=None, derandomize=True)
PHASES = {"Pending", "Creating", "Progressing", "Ready", "WaitingForGPU", "Stopped", "Suspended", "Failed"}
UP = Observed("default.tiny", 7, True, 1.0, "RUNNING")
LOADING = replace(UP, ready=False)


def record(standing: Standing = Standing.RUN, reason: str = "Admitted", message: str = "", **other: Any) -> Record:
    base = a_record(
        verdict=Verdict(standing, reason, message, 1.0),
        port=18100,
        host="a" if standing is Standing.RUN else None,
    )
    return replace(base, **other)


def condition(told: Report, kind: str) -> tuple[str, str, str] | None:
    found = [(each.status, each.reason, each.message) for each in told.conditions if each.type == kind]
    assert len(found) <= 1
    return found[0] if found else None


# ── LLMKube's contract (reference/llmkube-controller.md, 2.1 to 2.3) ─────────────────────────────


def test_a_serving_service_is_ready_in_the_operators_words() -> None:
    told = report(record(), UP)
    assert (told.phase, told.ready, told.ready_replicas, told.replicas) == ("Ready", True, 1, 1)
    assert condition(told, "Available") == ("True", "InferenceReady", "Inference service is ready and serving requests")
    assert condition(told, "MetalReady") == ("True", "Serving", "llama-server serves tiny on port 18100")
    assert condition(told, "Suspended") == ("False", "NotSuspended", "spec.suspend is not set")
    assert condition(told, "Progressing") is None and condition(told, "Degraded") is None
    assert told.scheduling is None, "a value of earlier times must not stay on a healthy service"


@pytest.mark.parametrize(
    ("name", "words"), [("org/Phi-4", "requests have to use org/Phi-4"), ("", "the one that its /v1/models lists")]
)
def test_a_service_whose_engine_takes_no_name_says_what_it_answers_to(name: str, words: str) -> None:
    told = report(record(runtime="mlx-server", probe=Probe(names_itself=True)), replace(UP, model_name=name))
    assert told.message.startswith("mlx-server serves tiny on port 18100, under a model name of its own: ")
    assert told.message.endswith(words)


def test_a_loading_service_is_creating_and_waits_for_the_agent() -> None:
    for observed in (LOADING, None):
        told = report(record(), observed)
        assert (told.phase, told.reason, told.ready, told.ready_replicas) == ("Creating", "Loading", False, 0)
        assert told.scheduling == ("WaitingForMetalAgent", WAITING)
        assert condition(told, "Progressing") == ("True", "Creating", "Creating inference service (0/1 replicas ready)")
        assert condition(told, "Available") == (
            "False",
            "NoReadyReplicas",
            "0/1 replicas ready; service is not serving (phase Creating)",
        )
    assert WAITING == "Waiting for the host metal-agent to fetch the model and register Endpoints"


def test_zero_replicas_are_stopped_in_the_operators_words() -> None:
    told = report(record(Standing.STOPPED, "ManuallyScaledToZero", "spec.replicas=0", replicas=0), None)
    assert (told.phase, told.replicas, told.ready_replicas) == ("Stopped", 0, 0)
    assert condition(told, "Available") == ("False", "ManuallyScaledToZero", "spec.replicas=0; workload scaled to zero")
    assert condition(told, "Progressing") is None and condition(told, "Degraded") is None
    assert (told.wants_service, told.wants_slice) == (True, False), "Service and clusterIP stay"


def test_suspension_is_told_in_the_operators_words_and_keeps_the_service() -> None:
    told = report(record(Standing.SUSPENDED, "Suspended", "spec.suspend=true", replicas=2), None)
    assert (told.phase, told.replicas) == ("Suspended", 0)
    assert condition(told, "Available") == (
        "False",
        "Suspended",
        "spec.suspend=true; workload scaled to zero; spec.replicas preserved",
    )
    suspended = condition(told, "Suspended")
    assert suspended is not None and suspended[:2] == ("True", "Suspended")
    assert (told.wants_service, told.wants_slice) == (True, False)


def test_a_failed_service_is_degraded_and_says_why_everywhere() -> None:
    told = report(record(Standing.FAILED, "ModelNotFound", "Model not found: x"), None)
    assert (told.phase, told.reason, told.message) == ("Failed", "ModelNotFound", "Model not found: x")
    assert condition(told, "Degraded") == ("True", "Failed", "see MetalReady")
    available = condition(told, "Available")
    assert available is not None and available[:2] == ("False", "NoReadyReplicas")
    assert available[2] == "0/1 replicas ready; service is not serving (phase Failed)"
    assert condition(told, "Progressing") is None
    assert told.scheduling == ("ModelNotFound", "Model not found: x")
    assert not told.wants_slice


@pytest.mark.parametrize("reason", ["Downloading", "Checking", "InsufficientMemory"])
def test_a_waiting_service_is_pending_with_the_reason(reason: str) -> None:
    told = report(record(Standing.WAIT, reason, "12 %", port=None), None)
    assert (told.phase, told.reason, told.scheduling) == ("Pending", reason, (reason, "12 %"))
    assert condition(told, "Progressing") == ("True", "Pending", "12 %")
    assert not told.wants_slice and not told.wants_service


def test_one_of_several_replicas_is_progressing_but_available() -> None:
    told = report(record(replicas=3), UP)
    assert (told.phase, told.ready_replicas, told.replicas, told.scheduling) == ("Progressing", 1, 3, None)
    assert condition(told, "Progressing") == ("True", "Creating", "Creating inference service (1/3 replicas ready)")
    available = condition(told, "Available")
    assert available is not None and available[0] == "True"


# ── our own words ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("state", "phase"), [("FATAL", "Failed"), ("BACKOFF", "Creating")])
def test_an_engine_that_does_not_stay_up_is_a_crash_loop_with_its_last_words(state: str, phase: str) -> None:
    observed = replace(LOADING, pid=0, state=state, message="exit status 1; bad magic")
    told = report(record(), observed)
    assert (told.phase, told.reason, told.message) == (phase, "CrashLoopBackOff", "exit status 1; bad magic")
    assert told.scheduling == ("CrashLoopBackOff", "exit status 1; bad magic")
    assert report(record(), replace(observed, message="")).message


@pytest.mark.parametrize("state", ["STARTING", "RUNNING", "BACKOFF", "FATAL", "EXITED", "STOPPING"])
@pytest.mark.parametrize("hung", ["", "it does not answer"])
def test_a_crash_loop_is_failed_whatever_its_process_does(state: str, hung: str) -> None:
    observed = replace(LOADING, state=state, message="exit status 1; bad magic", failing="asked", hung=hung)
    told = report(record(), observed)
    assert told.phase == "Failed" and not told.ready
    assert hung or (told.reason, told.message) == ("CrashLoopBackOff", "exit status 1; bad magic")
    assert report(record(), replace(observed, ready=True, served=True, failing="", hung="")).phase == "Ready"


def test_a_taken_port_has_its_own_reason_and_words_of_an_engine_do_not_make_one() -> None:
    observed = replace(LOADING, pid=0, state="FATAL", message="something cannot be bound")
    told = report(record(warning=("PortInUse", "port 1 belongs to somebody else")), observed)
    assert (told.phase, told.reason, told.message) == ("Failed", "PortInUse", "port 1 belongs to somebody else")
    assert report(record(), observed).reason == "CrashLoopBackOff"


def test_a_stop_by_hand_is_told_as_such_and_keeps_the_slice_not_ready() -> None:
    told = report(record(stopped_by_hand=True), replace(LOADING, pid=0, state="STOPPED"))
    assert (told.phase, told.reason, told.replicas) == ("Stopped", "StoppedByHand", 1)
    assert condition(told, "Available") == ("False", "StoppedByHand", told.message)
    assert told.wants_slice and not told.ready


def test_what_could_not_be_published_is_said() -> None:
    told = report(record(), replace(LOADING, published='Service "tiny" exists and is not ours'))
    assert (told.phase, told.reason, told.message) == (
        "Creating",
        "PublishFailed",
        'Service "tiny" exists and is not ours',
    )


def test_a_service_that_serves_but_cannot_be_published_is_not_called_ready() -> None:
    told = report(record(), replace(UP, published='Service "tiny" exists and is not ours'))
    assert (told.phase, told.reason) != ("Ready", "Serving")
    assert told.reason == "PublishFailed"


def test_a_withdrawn_engine_is_not_ready_and_drains_while_it_lives() -> None:
    told = report(record(withdraw="token"), UP)
    assert (told.phase, told.reason, told.ready, told.ready_replicas) == ("Progressing", "Restarting", False, 0)
    assert (told.draining, told.wants_slice) == (True, True)
    gone = report(record(withdraw="token"), replace(LOADING, pid=0))
    assert (gone.draining, gone.wants_slice) == (False, True)


def test_a_suspended_engine_drains_until_it_has_ended_then_its_slice_goes() -> None:
    suspended = record(Standing.SUSPENDED, "Suspended", "", withdraw="token")
    told = report(suspended, UP)
    assert (told.phase, told.ready, told.draining, told.wants_slice) == ("Progressing", False, True, True)
    assert not report(suspended, replace(LOADING, pid=0)).wants_slice


def test_a_deleted_service_wants_nothing_in_the_cluster() -> None:
    told = report(record(Standing.REMOVING, "Deleted", "gone", withdraw="token"), UP)
    assert (told.wants_service, told.wants_slice, told.ready) == (False, False, False)


def test_an_engine_that_serves_despite_a_bad_edit_stays_ready_and_is_degraded() -> None:
    told = report(record(warning=("InvalidSpec", "spec.x is wrong")), UP)
    assert (told.phase, told.ready) == ("Ready", True)
    assert condition(told, "Degraded") == ("True", "InvalidSpec", "spec.x is wrong")


def test_readiness_of_a_process_that_should_not_run_counts_for_nothing() -> None:
    for standing in set(Standing) - {Standing.RUN}:
        told = report(record(standing, "Reason", "text"), UP)
        assert (told.ready, told.ready_replicas) == (False, 0)


# ── always ───────────────────────────────────────────────────────────────────────────────────────

TEXT = st.text(max_size=8)
RECORDS = st.builds(
    record,
    st.sampled_from(Standing),
    st.sampled_from(["Admitted", "Downloading", "X"]),
    TEXT,
    replicas=st.integers(0, 3),
    withdraw=st.sampled_from(["", "t"]),
    stopped_by_hand=st.booleans(),
    port=st.none() | st.just(1),
    warning=st.none() | st.just(("InvalidSpec", "x")),
)
OBSERVED = st.none() | st.builds(
    Observed,
    st.just("default.tiny"),
    st.integers(0, 2),
    st.booleans(),
    st.just(1.0),
    st.sampled_from(["RUNNING", "STARTING", "BACKOFF", "FATAL", "STOPPED", "EXITED", "STOPPING", ""]),
    TEXT,
)


@PROPERTY
@given(RECORDS, OBSERVED)
def test_every_report_is_consistent_with_itself(asked: Record, observed: Observed | None) -> None:
    told = report(asked, observed)
    kinds = [each.type for each in told.conditions]
    by_kind = {each.type: each for each in told.conditions}
    assert told.phase in PHASES
    assert kinds == sorted(set(kinds))
    assert {"Available", "MetalReady", "Suspended"} <= set(kinds)
    assert (by_kind["MetalReady"].status == "True") == told.ready == bool(told.ready_replicas)
    assert by_kind["MetalReady"].reason == told.reason
    assert (by_kind["Available"].status == "True") == told.ready
    assert (by_kind["Suspended"].status == "True") == (asked.verdict.standing is Standing.SUSPENDED)
    assert (told.phase == "Ready") <= told.ready
    assert ("Progressing" in kinds) == (told.phase in ("Pending", "Creating", "Progressing"))
    assert not (told.ready and told.draining)
    assert not told.wants_slice or told.wants_service
    assert told.scheduling is None or not told.ready
    assert all(each.reason for each in told.conditions)


# ── events ───────────────────────────────────────────────────────────────────────────────────────


def test_nothing_new_is_no_event() -> None:
    told = report(record(), UP)
    assert happening(told, told, "") is None
    assert happening(told, replace(told, message="other"), "") is None


def test_a_service_that_begins_to_serve_is_an_event() -> None:
    event = happening(report(record(), LOADING), report(record(), UP), "")
    assert event is not None and (event.type, event.reason) == ("Normal", "Serving")


def test_a_crash_is_a_warning_with_the_last_words() -> None:
    event = happening(report(record(), UP), report(record(), LOADING), "the engine ended: SIGKILL\nlast line")
    assert event is not None and (event.type, event.reason) == ("Warning", "Crashed")
    assert event.note == "the engine ended: SIGKILL\nlast line"


def test_a_planned_end_is_no_crash() -> None:
    assert happening(report(record(), UP), report(record(withdraw="t"), LOADING), "") is None


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (report(record(Standing.FAILED, "ModelNotFound", "x"), None), ("Warning", "ModelNotFound")),
        (report(record(), replace(LOADING, state="BACKOFF", message="x")), ("Warning", "CrashLoopBackOff")),
        (report(record(), replace(LOADING, published="x")), ("Warning", "PublishFailed")),
        (report(record(Standing.SUSPENDED, "Suspended", ""), None), ("Normal", "Suspended")),
        (report(record(stopped_by_hand=True), None), ("Normal", "StoppedByHand")),
        (report(record(), LOADING), None),
        (report(record(Standing.WAIT, "Downloading", ""), None), None),
    ],
)
def test_changes_worth_a_humans_attention_are_events(after: Report, expected: tuple[str, str] | None) -> None:
    event = happening(None, after, "")
    assert (event and (event.type, event.reason)) == expected


@pytest.mark.parametrize("text", ["x" * 5000, "漢" * 5000, "🦙" * 5000])
def test_a_note_fits_into_an_event_whatever_language_the_engine_speaks(text: str) -> None:
    # The API server counts bytes: a note may have 1024.
    crash = happening(report(record(), UP), report(record(), LOADING), text)
    failed = happening(None, report(record(Standing.FAILED, "X", text), None), "")
    for event in (crash, failed):
        assert event is not None and 0 < len(event.note.encode()) <= 1024


def test_conditions_are_values() -> None:
    assert Condition("a", "True", "b", "c") == Condition("a", "True", "b", "c")


def test_a_system_that_stops_withdraws_its_endpoints_and_reports_why() -> None:
    told = report(record(), UP, leaving=True)
    assert (told.phase, told.ready, told.reason, told.ready_replicas) == ("Creating", False, "Stopping", 0)
    assert "has stopped on this Mac" in told.message
    assert told.wants_slice and told.wants_service, "the slice stays, and says that it is not ready"
    assert happening(report(record(), UP), told, "") is None, "no cause for an alarm"
    assert report(record(), UP).ready
    for other in (record(Standing.WAIT, "Downloading"), record(Standing.SUSPENDED, "Suspended")):
        assert report(other, None, leaving=True) == report(other, None)


def test_a_service_on_demand_is_told_with_the_port_at_which_it_is_reached() -> None:
    told = report(replace(record(), idle_s=60.0, front_port=18200), UP, fronts=[18200])
    assert condition(told, "MetalReady")[2] == "llama-server serves tiny on port 18200"


def test_the_last_word_of_a_mac_that_stops_stays_true_while_it_is_away() -> None:
    """ "the engine is ending" stood in the cluster for as long as the Mac was off, and an idle one as Ready."""
    ending = replace(UP, ready=False, state="STOPPING")
    gone = Observed("", 0, False, 1.0, "STOPPING")
    rests = replace(record(Standing.WAIT, UNLOADED), idle_s=60.0, front_port=18200)
    for each, observed in ((record(), ending), (record(), gone), (record(), None), (rests, None)):
        told = report(each, observed, leaving=True)
        assert (told.phase, told.ready, told.reason) == ("Creating", False, "Stopping")
        assert "metal-supervisor has stopped on this Mac" in told.message
    for each in (record(Standing.WAIT, "Downloading"), record(Standing.SUSPENDED, "Suspended")):
        assert report(each, None, leaving=True) == report(each, None)
    assert report(record(), replace(gone, state="FATAL"), leaving=True).reason == "CrashLoopBackOff"
