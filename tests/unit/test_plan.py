"""The moves of one pass: a table over everything supervisord can say, and what must hold whatever it says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_supervisor.controller.plan import (
    CUT_AFTER_S,
    EXITED_GRACE_S,
    HAND_GRACE_S,
    INSIST_AFTER_S,
    KILL_AFTER_S,
    LONGEST_RETRY_S,
    NOTE_GRACE_S,
    RESEND_AFTER_S,
    RETRY_S,
    TO_START,
    WITHDRAW_WAIT_S,
    Action,
    Hung,
    Step,
    Stopping,
    Wanted,
    retry_at,
    runs_as_wanted,
    runs_wanted_spec,
    stays_stopped,
    steps,
    stopped_by_hand,
)
from metal_supervisor.spec.processes import LIVE, Diff, ProgramState, RunNote, State
from tests.support.records import a_record

NAME = "default.tiny"
NOW = 1_000_000.0
PID = 77
OLD = "old"
NEW = "new"
PROPERTY = settings(max_examples=300, database=None, derandomize=True)
TAKES_AWAY = {Action.STOP, Action.REMOVE, Action.REPLACE, Action.TERM, Action.WITHDRAW}


def row(
    state: State,
    *,
    up_s: float = 100.0,
    pid: int | None = None,
    stop: float = 0.0,
    name: str = NAME,
    start: float | None = None,
) -> ProgramState:
    alive = PID if state in LIVE else 0
    return ProgramState(name, state, alive if pid is None else pid, NOW - up_s if start is None else start, stop)


def wanted(edition: str, by_hand: bool, hung: Hung | None = None, held: str = "") -> Wanted:
    return Wanted(a_record(edition=edition, stopped_by_hand=by_hand), hung, held)


def note(
    spec: str = OLD,
    pid: int = PID,
    starts: tuple[float, ...] = (NOW - 100,),
    not_before: float = 0.0,
    launcher: int | None = None,
) -> RunNote:
    return RunNote(pid, pid if launcher is None else launcher, "ticks 1", {"edition": spec}, starts, not_before, "", "")


def moves(
    state: ProgramState | None,
    *,
    want: Wanted | None = None,
    diff: Diff | None = None,
    said: RunNote | None = None,
    stopping: Stopping | None = None,
    now: float = NOW,
) -> list[Step]:
    """The moves for one program of ours."""
    return steps(
        {NAME: want} if want else {},
        frozenset({NAME}),
        {NAME: state} if state else {},
        diff or Diff(),
        {NAME: said} if said else {},
        {NAME: stopping} if stopping else {},
        now,
        now,
    )


def do(*args: ProgramState | None, **kwargs: object) -> Action | None:
    """The one move, None for none."""
    found = moves(*args, **kwargs)  # type: ignore[arg-type]
    assert len(found) <= 1
    return found[0].do if found else None


def changed() -> Diff:
    return Diff(changed=frozenset({NAME}))


WANTS_OLD = wanted(OLD, False)
WANTS_NEW = wanted(NEW, False)
WITHDRAWN = Stopping(asked_at=NOW - 0.5, withdrawn=True, drained=True)


# ── the table ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("state", "first", "once_withdrawn"),
    [
        (State.RUNNING, Action.WITHDRAW, Action.STOP),
        (State.STARTING, Action.WITHDRAW, Action.STOP),
        (State.BACKOFF, Action.STOP, Action.STOP),
        (State.STOPPING, Action.WAIT, Action.WAIT),
        (State.STOPPED, Action.REMOVE, Action.REMOVE),
        (State.EXITED, Action.REMOVE, Action.REMOVE),
        (State.FATAL, Action.REMOVE, Action.REMOVE),
        (State.UNKNOWN, Action.REMOVE, Action.REMOVE),
    ],
)
class TestEveryStateOfAProgramThatHasToGo:
    """The same way out for one that is no longer wanted, and for one that another spec replaces."""

    def test_an_unwanted_program_is_withdrawn_stopped_and_removed(
        self, state: State, first: Action, once_withdrawn: Action
    ) -> None:
        assert do(row(state)) is first
        assert do(row(state), stopping=WITHDRAWN) is once_withdrawn

    def test_a_program_of_another_spec_is_withdrawn_stopped_and_replaced(
        self, state: State, first: Action, once_withdrawn: Action
    ) -> None:
        swap = {Action.REMOVE: Action.REPLACE}
        shared = {"want": WANTS_NEW, "diff": changed(), "said": note(OLD)}
        assert do(row(state), **shared) is swap.get(first, first)
        assert do(row(state), **shared, stopping=WITHDRAWN) is swap.get(once_withdrawn, once_withdrawn)


@pytest.mark.parametrize("state", [State.RUNNING, State.STARTING, State.BACKOFF])
@pytest.mark.parametrize("diff", [Diff(), Diff(changed=frozenset({NAME})), Diff(removed=frozenset({NAME}))])
def test_a_program_that_runs_the_wanted_spec_is_left_alone(state: State, diff: Diff) -> None:
    said = note(OLD, pid=row(state).pid)
    assert moves(row(state), want=WANTS_OLD, diff=diff, said=said) == []


RESTS = frozenset({State.FATAL, State.STOPPED, State.EXITED})


@pytest.mark.parametrize("state", [each for each in State if each not in RESTS])
def test_a_cosmetic_change_never_touches_a_process(state: State) -> None:
    assert do(row(state), want=WANTS_OLD, diff=changed(), said=note(OLD)) not in TAKES_AWAY


@pytest.mark.parametrize("state", sorted(RESTS))
def test_a_new_section_is_taken_up_before_the_next_start(state: State) -> None:
    assert do(row(state), want=WANTS_OLD, diff=changed(), said=note(OLD)) is Action.REPLACE


@pytest.mark.parametrize("state", list(State))
def test_a_wanted_program_that_supervisord_calls_removed_is_never_taken_away(state: State) -> None:
    for said in (None, note(NEW)):
        found = do(row(state), want=WANTS_NEW, diff=Diff(removed=frozenset({NAME})), said=said)
        assert found not in TAKES_AWAY


def test_a_new_program_is_added_once_supervisord_has_read_it() -> None:
    assert do(None, want=WANTS_NEW, diff=Diff(added=frozenset({NAME}))) is Action.ADD
    (step,) = moves(None, want=WANTS_NEW)
    assert step.do is Action.WAIT and step.again_in_s > 0


def test_a_stopped_program_that_was_never_started_is_started() -> None:
    assert do(row(State.STOPPED, start=0.0), want=WANTS_OLD) is Action.START


def test_a_program_stopped_by_hand_stays_stopped() -> None:
    by_hand = wanted(OLD, True)
    for start in (0.0, NOW - 50):
        assert do(row(State.STOPPED, start=start), want=by_hand, said=note(OLD, pid=0)) is None
        assert do(row(State.STOPPED, start=start), want=by_hand, said=note(OLD, pid=0), diff=changed()) is None


def test_a_program_that_we_stopped_and_that_is_wanted_again_is_started() -> None:
    # An edit and its revert, or suspend and resume, within the seconds a stop takes.
    assert do(row(State.STOPPED, stop=NOW - 1), want=WANTS_OLD, said=note(OLD)) is Action.START
    assert do(row(State.STOPPED, stop=NOW - 1), want=WANTS_OLD, said=note(OLD), diff=changed()) is Action.REPLACE


@pytest.mark.parametrize(
    ("ago", "expected"), [(0.0, None), (EXITED_GRACE_S, None), (EXITED_GRACE_S + 0.1, Action.START)]
)
def test_an_exited_program_is_left_to_supervisord_for_a_moment(ago: float, expected: Action | None) -> None:
    assert do(row(State.EXITED, stop=NOW - ago), want=WANTS_OLD, said=note(OLD)) is expected


def test_a_fatal_program_is_started_when_its_pause_is_over_and_not_before() -> None:
    held = note(OLD, not_before=NOW + 30)
    (step,) = moves(row(State.FATAL), want=WANTS_OLD, said=held)
    assert (step.do, step.again_in_s) == (Action.WAIT, 30.0)
    assert do(row(State.FATAL), want=WANTS_OLD, said=held, now=NOW + 29.9) is Action.WAIT
    assert do(row(State.FATAL), want=WANTS_OLD, said=held, now=NOW + 30) is Action.START


def test_a_fatal_program_whose_spec_changed_is_replaced_at_once() -> None:
    assert do(row(State.FATAL), want=WANTS_NEW, said=note(OLD, not_before=NOW + 300), diff=changed()) is Action.REPLACE


@pytest.mark.parametrize("state", [State.STARTING, State.RUNNING])
def test_in_the_moments_before_the_launchers_note_nothing_is_taken_away(state: State) -> None:
    for said in (None, note(OLD, pid=PID - 1)):
        young = row(state, up_s=NOTE_GRACE_S / 2)
        (step,) = moves(young, want=WANTS_NEW, diff=changed(), said=said)
        assert step.do is Action.WAIT and step.again_in_s < 1
        assert do(row(state, up_s=NOTE_GRACE_S), want=WANTS_NEW, diff=changed(), said=said) is Action.WITHDRAW
    # A note of this very process settles it.
    assert do(row(state, up_s=0.01), want=WANTS_NEW, diff=changed(), said=note(OLD)) is Action.WITHDRAW
    assert do(row(state, up_s=0.01), want=WANTS_NEW, diff=changed(), said=note(NEW)) is None


@pytest.mark.parametrize("state", [State.STARTING, State.RUNNING])
def test_an_engine_without_a_note_is_not_left_alone_for_as_long_as_the_clock_was_set_back(state: State) -> None:
    """Its launcher could not write one, as on a full disk."""
    assert do(row(state, up_s=-3600.0), want=WANTS_NEW, diff=changed()) is Action.WITHDRAW


def test_a_program_that_exited_is_started_though_the_clock_was_set_back_since() -> None:
    assert do(row(State.EXITED, stop=NOW + 3600.0), want=WANTS_OLD, said=note(OLD)) is Action.START


def test_a_stand_in_counts_as_the_engine_it_represents() -> None:
    standing_in = note(OLD, pid=55, launcher=PID)
    assert moves(row(State.RUNNING), want=WANTS_OLD, diff=changed(), said=standing_in) == []
    assert runs_wanted_spec(WANTS_OLD, standing_in, row(State.RUNNING))


def test_a_note_of_an_earlier_process_says_nothing_about_the_present_one() -> None:
    stale = note(OLD, pid=PID - 1)
    assert not runs_wanted_spec(WANTS_OLD, stale, row(State.RUNNING))
    assert runs_wanted_spec(WANTS_OLD, stale, row(State.FATAL))
    assert not runs_wanted_spec(WANTS_NEW, note(OLD), row(State.RUNNING))
    assert not runs_wanted_spec(WANTS_NEW, None, row(State.RUNNING))


def test_a_process_that_supervisord_lost_track_of_is_left_alone_with_an_alarm() -> None:
    lost = row(State.UNKNOWN, pid=PID)
    assert do(lost) is Action.ALARM
    assert do(lost, want=WANTS_NEW, diff=changed(), said=note(OLD)) is Action.ALARM
    assert do(lost, want=WANTS_OLD, said=note(OLD)) is Action.ALARM


def test_moves_come_in_the_order_of_names_one_each() -> None:
    names = ["b.z", "a.z", "c.z"]
    table = {name: row(State.RUNNING, name=name) for name in names}
    found = steps({}, frozenset(names), table, Diff(), {}, {}, NOW, NOW)
    assert [step.program for step in found] == sorted(names)


# ── the way out ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("state", [State.RUNNING, State.STARTING])
def test_a_stop_waits_for_the_withdrawal_but_no_longer_than_its_limit(state: State) -> None:
    def after(seconds: float, done: bool = False) -> Step:
        return moves(row(state), stopping=Stopping(NOW - seconds, done, drained=done))[0]

    assert after(0.0).do is Action.WAIT
    assert after(0.5).again_in_s == pytest.approx(WITHDRAW_WAIT_S - 0.5)
    assert after(0.5, True).do is Action.STOP
    assert after(WITHDRAW_WAIT_S - 0.01).do is Action.WAIT
    assert after(WITHDRAW_WAIT_S).do is Action.STOP
    assert after(-3600.0).do is Action.STOP, "a clock that jumped back must not hold a stop"


@pytest.mark.parametrize("state", [State.RUNNING, State.STARTING])
def test_an_engine_finishes_what_it_answers_within_its_bound(state: State) -> None:
    def after(seconds: float, **seen: bool) -> Action:
        return moves(row(state), stopping=Stopping(NOW - seconds, drain_s=60.0, **seen))[0].do

    assert after(0.1, withdrawn=True) is Action.WAIT, "nobody has said yet whether it is busy"
    assert after(59.0, withdrawn=True, busy=True) is Action.WAIT
    assert after(59.0, withdrawn=False, busy=True) is Action.WAIT, "an endpoint that stays is no reason to cut"
    assert after(61.0, withdrawn=True, busy=True) is Action.STOP
    assert after(0.1, withdrawn=True, busy=True, drained=True) is Action.STOP
    assert after(0.1, withdrawn=True, drained=True) is Action.STOP
    assert after(-3600.0, withdrawn=True, busy=True) is Action.STOP, "a clock that jumped back must not hold a stop"


def test_a_term_that_may_have_been_lost_is_sent_again_and_so_is_one_that_is_not_heeded() -> None:
    def after(seconds: float, young: bool, cut: bool = False) -> Action | None:
        told = Stopping(NOW - 9, True, drained=True, told_at=NOW - seconds, young=young, cut=cut)
        return do(row(State.STOPPING), stopping=told)

    assert after(RESEND_AFTER_S / 2, young=True) is Action.WAIT
    assert after(RESEND_AFTER_S + 0.01, young=True) is Action.TERM
    assert after(RESEND_AFTER_S + 0.01, young=False) is Action.WAIT
    assert after(INSIST_AFTER_S + 0.01, young=False) is Action.TERM
    assert after(CUT_AFTER_S / 2, young=False, cut=True) is Action.WAIT
    assert after(CUT_AFTER_S + 0.01, young=False, cut=True) is Action.TERM
    assert do(row(State.STOPPING), stopping=Stopping(NOW - 9, True, drained=True)) is Action.WAIT


@pytest.mark.parametrize("replaced", [False, True])
def test_from_running_to_gone_takes_withdraw_stop_and_the_end_in_this_order(replaced: bool) -> None:
    shared = {"want": WANTS_NEW, "diff": changed(), "said": note(OLD)} if replaced else {}
    story = [
        (row(State.RUNNING), None),
        (row(State.RUNNING), Stopping(NOW)),
        (row(State.RUNNING), Stopping(NOW, True, drained=True)),
        (row(State.STOPPING), Stopping(NOW, True, drained=True)),
        (row(State.STOPPED), Stopping(NOW, True, drained=True)),
    ]
    assert [do(state, stopping=stopping, **shared) for state, stopping in story] == [
        Action.WITHDRAW,
        Action.WAIT,
        Action.STOP,
        Action.WAIT,
        Action.REPLACE if replaced else Action.REMOVE,
    ]


def test_a_stop_is_held_for_two_seconds_at_most_and_a_lost_term_for_one() -> None:
    assert (WITHDRAW_WAIT_S, RESEND_AFTER_S, LONGEST_RETRY_S) == (2.0, 1.0, 300.0)


# ── invariants ───────────────────────────────────────────────────────────────────────────────────

STATES = st.sampled_from(State)
TIMES = st.floats(NOW - 5000, NOW + 5000)
ROWS = st.builds(
    lambda state, pid, start, stop: ProgramState(NAME, state, pid if state in LIVE else 0, start, stop),
    STATES,
    st.integers(1, 5),
    st.just(0.0) | TIMES,
    st.just(0.0) | TIMES,
)
NOTES = st.none() | st.builds(
    lambda spec, pid, launcher, starts, not_before: RunNote(
        pid, launcher, "t", {"edition": spec}, tuple(starts), not_before, "", ""
    ),
    st.sampled_from([OLD, NEW]),
    st.integers(0, 5),
    st.integers(1, 5),
    st.lists(TIMES, max_size=20),
    st.just(0.0) | TIMES,
)
SETS = st.sampled_from([frozenset[str](), frozenset({NAME})])
DIFFS = st.builds(Diff, SETS, SETS, SETS)
STOPPINGS = st.none() | st.builds(Stopping, st.just(0.0) | TIMES, st.booleans(), st.just(0.0) | TIMES)
WANTS = st.none() | st.builds(wanted, st.sampled_from([OLD, NEW]), st.booleans())


@PROPERTY
@given(ROWS, NOTES, DIFFS, STOPPINGS, st.booleans(), TIMES)
def test_whatever_happens_a_wanted_program_that_runs_the_wanted_spec_keeps_running(
    state: ProgramState, said: RunNote | None, diff: Diff, stopping: Stopping | None, by_hand: bool, now: float
) -> None:
    mine = replace(said or note(), spec={"edition": NEW}, launcher_pid=state.pid)
    found = do(state, want=wanted(NEW, by_hand), diff=diff, said=mine, stopping=stopping, now=now)
    if state.state in (State.STARTING, State.RUNNING, State.BACKOFF):
        assert found is None
    if state.state in RESTS:  # no process, and what supervisord would start may be something else
        assert found not in TAKES_AWAY - {Action.REPLACE}
    else:
        assert found not in TAKES_AWAY


@PROPERTY
@given(ROWS, NOTES, DIFFS, STOPPINGS, st.booleans(), TIMES)
def test_what_runs_as_wanted_has_no_step_whatever_else_is_said(
    state: ProgramState, said: RunNote | None, diff: Diff, stopping: Stopping | None, by_hand: bool, now: float
) -> None:
    record = a_record(edition=NEW)
    mine = replace(said or note(), spec={"edition": NEW}, launcher_pid=PID)
    assert runs_as_wanted(record, row(State.RUNNING), mine, None)
    for each, its in ((state, said), (row(State.RUNNING), mine)):
        if runs_as_wanted(record, each, its, None) and NAME not in diff.changed:
            assert not moves(each, want=wanted(NEW, by_hand), diff=diff, said=its, stopping=stopping, now=now)


@PROPERTY
@given(ROWS, NOTES, DIFFS, STOPPINGS, WANTS, TIMES)
def test_what_is_not_ours_is_never_touched(
    state: ProgramState, said: RunNote | None, diff: Diff, stopping: Stopping | None, want: Wanted | None, now: float
) -> None:
    foreign = "controller"
    table = {NAME: state, foreign: replace(state, name=foreign)}
    both = {foreign: said or note(), NAME: said or note()}
    leaving = {foreign: stopping or Stopping(), NAME: stopping or Stopping()}
    found = steps({NAME: want} if want else {}, frozenset({NAME}), table, diff, both, leaving, now, now)
    assert {step.program for step in found} <= {NAME}


@PROPERTY
@given(ROWS, NOTES, DIFFS, STOPPINGS, WANTS, TIMES)
def test_a_process_is_never_stopped_before_its_withdrawal_was_asked_for_nor_held_beyond_its_limit(
    state: ProgramState, said: RunNote | None, diff: Diff, stopping: Stopping | None, want: Wanted | None, now: float
) -> None:
    found = moves(state, want=want, diff=diff, said=said, stopping=stopping, now=now)
    asked = stopping.asked_at if stopping else 0.0
    for step in found:
        if step.do is Action.STOP and state.state in (State.STARTING, State.RUNNING):
            assert asked, "stopped without a word to the sidecar"
            assert (stopping and stopping.withdrawn) or not 0 <= NOW - asked < WITHDRAW_WAIT_S
        if step.do is Action.WITHDRAW:
            assert not asked, "asked twice: the two seconds would start anew"
        if step.do in (Action.REMOVE, Action.REPLACE):
            assert state.state not in LIVE and state.state is not State.BACKOFF
        if step.do is Action.WAIT and "withdrawn" in step.why:
            assert 0 < step.again_in_s <= WITHDRAW_WAIT_S
        assert step.why


@PROPERTY
@given(ROWS, NOTES, DIFFS, STOPPINGS, TIMES)
def test_an_unwanted_program_always_has_a_next_move_and_a_wanted_one_is_never_removed(
    state: ProgramState, said: RunNote | None, diff: Diff, stopping: Stopping | None, now: float
) -> None:
    assert do(state, diff=diff, said=said, stopping=stopping, now=now) is not None
    for want in (WANTS_OLD, WANTS_NEW):
        assert do(state, want=want, diff=diff, said=said, stopping=stopping, now=now) is not Action.REMOVE


# ── stopped by hand ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("was", "state", "said", "expected"),
    [
        (False, row(State.STOPPED), note(OLD), True),
        (False, row(State.STOPPED, start=0.0), None, False),
        (True, row(State.STOPPED, start=0.0), None, True),
        (True, row(State.RUNNING), note(OLD), False),
        (True, row(State.STARTING), note(OLD), False),
        # Started by hand, but what it runs does not stay up: nobody may ever have seen it alive.
        (True, row(State.BACKOFF), note(OLD), False),
        (True, row(State.FATAL), note(OLD), False),
        (True, row(State.EXITED), note(OLD), False),
        (True, row(State.UNKNOWN, pid=PID), note(OLD), True),
        (False, row(State.RUNNING), note(OLD), False),
        (False, row(State.FATAL), note(OLD), False),
        (False, row(State.EXITED), note(OLD), False),
        (False, row(State.STOPPED), note(NEW), False),
        (True, row(State.STOPPED), note(NEW), True),
        (True, row(State.RUNNING), note(NEW), False),  # started by hand before it could be replaced
        (True, None, None, True),
        (False, None, None, False),
    ],
)
def test_stopped_by_hand_is_a_started_program_that_is_stopped_with_the_wanted_spec(
    was: bool, state: ProgramState | None, said: RunNote | None, expected: bool
) -> None:
    assert stopped_by_hand(a_record(edition=OLD, stopped_by_hand=was), state, said) is expected


@pytest.mark.parametrize("state", [*State, None])
@pytest.mark.parametrize("said", [None, note(OLD), note(NEW)], ids=["none", "old", "new"])
def test_a_stop_of_our_own_is_never_taken_for_somebodys_hand(state: State | None, said: RunNote | None) -> None:
    assert stopped_by_hand(a_record(edition=OLD, stop_sent=True), row(state) if state else None, said) is False


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (row(State.STOPPED, stop=NOW), False),
        (row(State.STOPPED, stop=NOW - HAND_GRACE_S + 0.1), False),
        (row(State.STOPPED, stop=NOW - HAND_GRACE_S), True),
        (row(State.STOPPED, start=0.0), True),
        (row(State.STOPPED, stop=NOW + 3600), True),
    ],
)
def test_a_stop_by_hand_is_kept_over_a_restart_once_it_has_lasted(state: ProgramState, expected: bool) -> None:
    # `supervisorctl update` stops, removes and adds in one go: what it adds must start.
    assert stays_stopped(state, NOW) is expected


def test_what_was_stopped_by_hand_a_moment_ago_is_not_replaced_by_what_would_start() -> None:
    by_hand = wanted(NEW, True)
    for ago, expected in ((0.0, Action.WAIT), (HAND_GRACE_S, Action.REPLACE)):
        stopped = row(State.STOPPED, stop=NOW - ago)
        assert do(stopped, want=by_hand, said=note(OLD), diff=changed()) is expected


# ── retries ──────────────────────────────────────────────────────────────────────────────────────


def test_only_the_launchers_pause_grows_with_the_crashes() -> None:
    state = row(State.FATAL, up_s=500, stop=NOW - 400)
    assert {retry_at(note(starts=(1.0,) * crashes), state, NOW) for crashes in (0, 1, 7)} == {NOW - 400 + RETRY_S}


def test_the_pause_of_a_refused_start_counts_from_the_end_of_the_last_run_or_from_a_start_that_never_ended() -> None:
    assert retry_at(None, row(State.FATAL, up_s=50, stop=NOW - 20), NOW) == NOW - 10
    assert retry_at(None, row(State.FATAL, up_s=5, stop=0.0), NOW) == NOW + 5


def test_the_launchers_own_word_on_the_next_start_is_final() -> None:
    assert retry_at(note(not_before=NOW + 123), row(State.FATAL, stop=NOW), NOW) == NOW + 123


@PROPERTY
@given(NOTES, ROWS, TIMES)
def test_a_fatal_program_is_never_held_longer_than_the_longest_pause_whatever_the_clock_did(
    said: RunNote | None, state: ProgramState, now: float
) -> None:
    fatal = replace(state, state=State.FATAL, pid=0)
    (step,) = moves(fatal, want=WANTS_OLD, said=said, now=now)
    assert step.do is Action.START or (step.do is Action.WAIT and 0 < step.again_in_s <= LONGEST_RETRY_S)


def test_an_engine_of_another_spec_goes_although_its_section_waits() -> None:
    for state in (State.STARTING, State.RUNNING):
        assert do(row(state), want=WANTS_NEW, said=note(OLD)) is Action.WITHDRAW
        assert do(row(state), want=WANTS_NEW, said=note(OLD, launcher=PID + 1)) is None  # a note of an earlier run
    assert (
        do(row(State.STOPPED), want=WANTS_NEW, said=note(OLD), diff=Diff(changed=frozenset({NAME}))) is Action.REPLACE
    )


def test_a_hung_engine_is_told_to_end_then_killed_and_never_drained() -> None:
    def after(told_at: float) -> list[Step]:
        return moves(row(State.RUNNING), want=wanted(OLD, False, Hung("it hangs", told_at)), said=note(OLD))

    assert [step.do for step in after(0.0)] == [Action.RESTART]
    (waits,) = after(NOW - 4)
    assert (waits.do, waits.again_in_s) == (Action.WAIT, KILL_AFTER_S - 4)
    assert [step.do for step in after(NOW - KILL_AFTER_S)] == [Action.KILL]
    assert [step.do for step in after(NOW + 3600)] == [Action.KILL]  # the clock was set back
    assert moves(row(State.STOPPING), want=wanted(OLD, False, Hung("it hangs")), said=note(OLD)) == []


@pytest.mark.parametrize("state", [None, *State])
@pytest.mark.parametrize("want", [WANTS_OLD, WANTS_NEW])
def test_while_nothing_may_be_started_nothing_is_and_what_is_up_goes_on(state: State | None, want: Wanted) -> None:
    found = row(state, stop=NOW - 50) if state else None
    diff = Diff(added=frozenset({NAME})) if found is None else changed() if want is WANTS_NEW else Diff()
    rest = {NAME: found} if found else {}
    for asked in (Stopping(), WITHDRAWN):
        world = frozenset({NAME}), rest, diff, {NAME: note()}, {NAME: asked}, NOW, NOW
        free = [step.do for step in steps({NAME: want}, *world)]
        held = steps({NAME: replace(want, held="no device")}, *world)
        assert [step.do for step in held] == [Action.WAIT if each in TO_START else each for each in free]
        assert all(step.why == "no device" for step, each in zip(held, free, strict=True) if each in TO_START)
