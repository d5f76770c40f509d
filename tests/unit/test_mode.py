"""Whether the operator is there: believed at once, disbelieved slowly."""

from __future__ import annotations

from typing import Any

import pytest

from metal_supervisor.cluster.status_mode import (
    QUIET_S,
    SILENCE_S,
    UNDECIDED_S,
    OperatorEvidence,
    look,
    operator_failure,
    operator_present,
    operator_wrote,
    silence,
)

WROTE_AT = "2026-11-21T11:59:58Z"
NOON = 1795262400.0  # 2026-11-21T12:00:00Z
DEGRADED = {"type": "Degraded", "reason": "R", "message": "m"}


def item(time: str = "", uid: str = "a") -> dict[str, Any]:
    return {"metadata": {"uid": uid, "operatorWrote": time}}


def entry(manager: str = "manager", **other: Any) -> dict[str, Any]:
    """A managed fields entry as the operator's update of a status leaves it."""
    owns = {"f:status": {".": {}, "f:lastUpdated": {}, "f:phase": {}}}
    return {
        "manager": manager,
        "operation": "Update",
        "subresource": "status",
        "time": "2026-11-21T11:59:59Z",
        "fieldsV1": owns,
        **other,
    }


@pytest.mark.parametrize("manager", ["manager", "llmkube-controller", "__debug_bin"])
def test_the_operator_is_known_by_the_fields_it_owns_whatever_its_binary_is_called(manager: str) -> None:
    older = entry("kubectl", time="2026-11-21T12:30:00Z", subresource="")
    assert operator_wrote([older, entry(manager), entry(manager, time="2026-11-21T11:00:00Z")], WROTE_AT) == WROTE_AT


@pytest.mark.parametrize(
    "other",
    [
        {"manager": "metal-supervisor"},
        {"manager": "metal/mac-a"},
        {"operation": "Apply"},
        {"subresource": ""},
        {"fieldsV1": {"f:status": {"f:schedulingStatus": {}}}},
        {"fieldsV1": {"f:status": {"f:phase": {}}}},
        {"fieldsV1": None},
        {"fieldsV1": {"f:status": []}},
        {"time": None},
        {"manager": "llmkube-metal-agent"},
    ],
    ids=str,
)
def test_what_we_or_people_write_is_no_trace_of_the_operator(other: dict[str, Any]) -> None:
    assert operator_wrote([entry(**other)], WROTE_AT) == ""


@pytest.mark.parametrize(
    ("status", "wrote", "expected"),
    [
        ({"phase": "Failed", "conditions": [DEGRADED]}, WROTE_AT, ("R", "m")),
        ({"phase": "Failed"}, WROTE_AT, ("", "")),
        ({"phase": "Failed", "conditions": [{"type": "Degraded", "reason": 5}, 7]}, WROTE_AT, ("5", "")),
        ({"phase": "Failed", "conditions": [{"type": "Degraded", "reason": "R"}]}, "", None),
        ({"phase": "Ready", "conditions": [{"type": "Degraded", "reason": "R"}]}, WROTE_AT, None),
        (None, WROTE_AT, None),
        ([], WROTE_AT, None),
    ],
    ids=str,
)
def test_a_failure_of_a_model_is_the_operators_if_it_wrote_last(
    status: object, wrote: str, expected: tuple[str, str] | None
) -> None:
    found = operator_failure({"metadata": {"operatorWrote": wrote}, "status": status})
    assert (found and (found["reason"], found["message"])) == expected


@pytest.mark.parametrize("updated", [None, "", 5, {}, "2026-11-21T11:59:59+00:00"])
def test_bookkeeping_alone_is_no_trace(updated: object) -> None:
    """Whoever may write an object may write its managedFields, and so had all Macs leave all statuses to nobody."""
    assert operator_wrote([entry(), entry(time="2036-11-21T11:59:59Z")], updated) == ""


@pytest.mark.parametrize("entries", [None, {}, "x", [None, 5], []], ids=str)
def test_damaged_bookkeeping_is_no_trace(entries: object) -> None:
    assert operator_wrote(entries, WROTE_AT) == ""


def test_nothing_is_said_before_the_first_look_and_for_a_moment_after_it() -> None:
    assert operator_present("auto", OperatorEvidence(), 10.0) is None
    signs = look(OperatorEvidence(), [item()], 10.0, NOON)
    assert operator_present("auto", signs, 10.0) is None
    assert operator_present("auto", signs, 10.0 + UNDECIDED_S) is False


def test_a_recent_trace_is_believed_at_once_and_for_five_minutes() -> None:
    signs = look(OperatorEvidence(), [item(), item("2026-11-21T11:58:00Z", "b")], 10.0, NOON)
    assert operator_present("auto", signs, 10.0) is True
    assert operator_present("auto", signs, 10.0 + SILENCE_S - 1) is True
    assert operator_present("auto", signs, 10.0 + SILENCE_S) is False


def test_an_old_trace_found_at_the_start_means_that_it_left() -> None:
    signs = look(OperatorEvidence(), [item("2026-11-21T11:00:00Z")], 10.0, NOON)
    assert operator_present("auto", signs, 10.0 + UNDECIDED_S) is False


@pytest.mark.parametrize("stamp", ["2026-11-21T11:00:05Z", "2026-11-21T19:00:00Z"])
def test_a_new_trace_is_fresh_whatever_the_clocks_say(stamp: str) -> None:
    first = look(OperatorEvidence(), [item("2026-11-21T11:00:00Z")], 10.0, NOON)
    again = look(first, [item(stamp)], 100.0, NOON)
    assert operator_present("auto", again, 101.0) is True
    same = look(again, [item(stamp)], 300.0, NOON)
    assert operator_present("auto", same, 100.0 + SILENCE_S) is False, "the same trace again is no news"


def test_a_server_whose_clock_is_set_back_does_not_hide_the_operator() -> None:
    old, other = item("2026-11-21T11:59:59Z"), item("2026-11-21T11:59:58Z", "b")
    signs = look(OperatorEvidence(), [old, other], 10.0, NOON)
    signs = look(signs, [old, item("2026-11-21T11:30:00Z", "b")], 100.0, NOON - 1800.0)
    assert operator_present("auto", signs, 10.0 + SILENCE_S + 1) is True
    gone = look(signs, [old], 200.0, NOON)
    again = look(gone, [old, item("2026-11-21T11:30:00Z", "b")], 300.0, NOON)
    assert operator_present("auto", again, 100.0 + SILENCE_S) is False, "listed again, but not written again"


def test_a_time_that_stayed_in_a_status_is_no_write_of_today_whenever_bookkeeping_is_made_up_around_it() -> None:
    """Nobody writes the statuses of services that no Mac serves, and an older release of ours wrote this form too."""
    left, signs = "2026-11-20T11:00:00Z", look(OperatorEvidence(), [item()], 10.0, NOON)
    for now in range(20, 60, 10):
        signs = look(signs, [item(left if now % 20 == 0 else "")], float(now), NOON)
        assert operator_present("auto", signs, now + UNDECIDED_S) is False
    signs = look(signs, [item("2026-11-21T19:00:00Z")], 60.0, NOON)
    assert operator_present("auto", signs, 60.0) is True, "it writes, after one that was seen before"


def test_what_the_program_before_knew_holds_until_something_is_seen() -> None:
    assert operator_present("auto", OperatorEvidence(believed=False), 1.0) is False
    assert operator_present("auto", OperatorEvidence(believed=True), 1.0) is True
    signs = look(OperatorEvidence(believed=False), [item()], 10.0, NOON)
    assert operator_present("auto", signs, 10.0) is False
    assert operator_present("auto", look(signs, [item("2026-11-21T11:59:59Z")], 11.0, NOON), 11.0) is True
    signs = look(OperatorEvidence(believed=True), [item()], 10.0, NOON)
    assert operator_present("auto", signs, 10.0 + SILENCE_S - 1) is True
    assert operator_present("auto", signs, 10.0 + SILENCE_S) is False


def test_a_setting_is_not_guessed_at() -> None:
    assert operator_present("operator", OperatorEvidence(), 0.0) is True
    assert operator_present("standalone", OperatorEvidence(seen_at=0.0, first_at=0.0), 1.0) is False


def test_a_damaged_time_is_no_trace() -> None:
    assert operator_present("auto", look(OperatorEvidence(), [item("yesterday")], 10.0, NOON), 20.0) is False


# ── silence ──────────────────────────────────────────────────────────────────────────────────────

WROTE = look(OperatorEvidence(), [item("2026-11-21T11:59:00Z")], 1000.0, NOON)
"""The operator wrote, which was seen at 1000."""


def test_a_long_silence_is_told_until_it_ends() -> None:
    assert silence("auto", WROTE, 1000.0 + QUIET_S - 1) == ""
    told = silence("auto", WROTE, 1000.0 + QUIET_S)
    assert "LLMKube's operator has not written since 2026-11-21T11:59:00Z" in told and "5 minutes" in told
    assert silence("auto", WROTE, 1000.0 + SILENCE_S - 1) == told, "one write for all of it"
    assert silence("auto", WROTE, 1000.0 + SILENCE_S) == ""
    assert silence("operator", WROTE, 1000.0 + QUIET_S) == ""
    assert silence("auto", OperatorEvidence(), 5.0) == ""
    assert "since this Mac's controller started" in silence(
        "auto", OperatorEvidence(believed=True, first_at=0.0), QUIET_S
    )
