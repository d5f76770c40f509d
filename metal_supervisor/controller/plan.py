"""The plan: steps that move supervisord's process table towards the desired state, decided from a snapshot alone.

supervisord owns the processes; this module only decides on steps: add, replace, remove, start, stop, or
wait. It never trusts what supervisord calls `changed` or `removed` without checking which spec the process
really runs, because a cosmetic difference must not restart a model, and a file that could not be read must
not stop one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from metal_supervisor.spec.processes import LIVE, Diff, EngineUse, Observed, ProgramState, RunNote, State
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Key, Standing
from metal_supervisor.spec.withdrawal import NO_WITHDRAWAL, WithdrawalToken

WITHDRAW_WAIT_S = 2.0
RESEND_AFTER_S = 1.0
INSIST_AFTER_S = 3.0
CUT_AFTER_S = 0.2
NOTE_GRACE_S = 2.0
EXITED_GRACE_S = 2.0
SETTLE_S = 1.0
KILL_AFTER_S = 10.0
HAND_GRACE_S = 2.0
HELD_S = 5.0
RETRY_S = 10.0
"""Pause before a program is started again whose start was refused, as for a taken port."""
LONGEST_RETRY_S = 300.0
"""Longest pause that the launcher makes after a crash."""
LOST = "supervisord lost track of the process; nothing is done to it"
RELOAD = "supervisord has not seen its section yet"


class Action(str, Enum):
    """Kinds of steps; each is one XML-RPC call, except WITHDRAW and WAIT, which are none."""

    ADD = "add"
    REPLACE = "replace"
    REMOVE = "remove"
    START = "start"
    STOP = "stop"
    TERM = "term"
    """Signal TERM again: one within milliseconds of a start is lost, and some engines insist on a second."""
    RESTART = "restart"
    """Make a hung engine end; supervisord starts it again."""
    KILL = "kill"
    """Kill a hung engine that did not exit on TERM; supervisord starts it again."""
    WITHDRAW = "withdraw"
    """Ask the sidecar to take the endpoint out before the process is stopped."""
    WAIT = "wait"
    ALARM = "alarm"


TO_START = frozenset({Action.ADD, Action.REPLACE, Action.START, Action.WITHDRAW, Action.STOP})
"""The moves of a wanted program that end in its start."""


@dataclass(frozen=True)
class Step:
    """One move for one program."""

    do: Action
    program: str
    why: str
    again_in_s: float = 0.0
    """For WAIT: seconds until the next pass is worthwhile."""
    cut: bool = False
    """For STOP: it is answering, and its time for that is over."""


@dataclass(frozen=True)
class Hung:
    """An engine that should be restarted."""

    why: str
    told_at: float = 0.0
    """Monotonic time at which it was told to end, 0 if it was not."""


@dataclass(frozen=True)
class Wanted:
    """Desired state of a program."""

    record: Record
    hung: Hung | None = None
    held: str = ""
    """Reason why it must not be started now, "" if it may; what runs is left running."""


@dataclass(frozen=True)
class Stopping:
    """State of a program that is to stop."""

    asked_at: float = 0.0
    """Monotonic time at which the withdrawal was asked for, 0 if it was not."""
    withdrawn: bool = False
    """The sidecar has taken the endpoint out."""
    busy: bool = False
    """The engine is still serving a request."""
    drained: bool = False
    """The engine was idle after the endpoint had been taken out."""
    drain_s: float = 0.0
    """Seconds that it may take to finish its requests."""
    told_at: float = 0.0
    """Monotonic time of its first TERM, 0 if it has had none, or two."""
    cut: bool = False
    """That TERM came while it was answering: its time for that was over."""
    young: bool = False
    """That TERM came so soon after the start that it may have been lost."""


def with_use(stopping: Stopping, use: EngineUse | None, token: WithdrawalToken) -> Stopping:
    """State of an engine that is to stop, with what the gateway says of it; None: it has none of its requests."""
    if use is None:
        return stopping
    if use.in_flight:
        return replace(stopping, busy=True, drained=False)
    # Until the gateway has seen the withdrawal, it may still send a request.
    return stopping if use.withdrawn == token else replace(stopping, drained=False)


def retry_at(note: RunNote | None, state: ProgramState, now: float) -> float:
    """Unix time at which a FATAL program is to be started again: when the launcher's pause after a crash is over."""
    if note and 0 < note.not_before <= now + LONGEST_RETRY_S:
        return note.not_before
    return max(state.stop, state.start) + RETRY_S


def live_note(note: RunNote | None, state: ProgramState | None) -> RunNote | None:
    """The launcher's note, if it is that of the process that is up; None as well until it is written."""
    if state is None or note is None or state.state not in LIVE or note.launcher_pid != state.pid:
        return None
    return note


def runs_wanted_spec(wanted: Wanted, note: RunNote | None, state: ProgramState) -> bool:
    """True if the process (or the one that last ran) was started for what is wanted."""
    if note is None or not wanted.record.is_run_by(note.edition, note.asked):
        return False
    return state.state not in LIVE or note.launcher_pid == state.pid


def runs_as_wanted(record: Record, state: ProgramState | None, note: RunNote | None, seen: Observed | None) -> bool:
    """True if an engine runs as its record wants, so that it has no step unless its section has changed."""
    return (
        state is not None
        and state.state is State.RUNNING
        and note is not None
        and note.launcher_pid == state.pid
        and record.is_run_by(note.edition, note.asked)
        and record.runs
        and not record.withdraw
        and not (seen is not None and seen.hung)
    )


def _rests(wanted: Wanted, state: ProgramState) -> bool:
    """True if no process runs that a new section could disturb: it is taken up before the next start."""
    ended = state.state in (State.STOPPED, State.EXITED)
    return state.state is State.FATAL or (ended and not wanted.record.stopped_by_hand)


def _runs_another(wanted: Wanted, note: RunNote | None, state: ProgramState) -> bool:
    """True if the process is known to run for another request."""
    known = live_note(note, state)
    return known is not None and not wanted.record.is_run_by(known.edition, known.asked)


def _take_down(name: str, state: ProgramState, stopping: Stopping, then: Step, clock: float) -> Step:
    """Next step of a process that has to stop: withdraw, drain, stop, wait, and finally `then`."""
    if state.state in (State.STARTING, State.RUNNING):
        if not stopping.asked_at:
            return Step(Action.WITHDRAW, name, then.why)
        waited = clock - stopping.asked_at
        told = stopping.withdrawn and (stopping.drained or stopping.busy)
        if not told and 0 <= waited < WITHDRAW_WAIT_S:
            return Step(Action.WAIT, name, "endpoint is being withdrawn", WITHDRAW_WAIT_S - waited)
        answers = stopping.busy and not stopping.drained
        if answers and 0 <= waited < stopping.drain_s:
            return Step(Action.WAIT, name, "it finishes what it answers", min(1.0, stopping.drain_s - waited))
        return Step(Action.STOP, name, then.why, cut=answers)
    if state.state is State.BACKOFF:
        return Step(Action.STOP, name, then.why)
    if state.state is State.STOPPING:
        waited = clock - stopping.told_at
        if stopping.told_at and stopping.young and waited > RESEND_AFTER_S:
            return Step(Action.TERM, name, "the first TERM may have come too early")
        # llama-server waits for its clients until a second TERM, which would be a drain that nothing asked for.
        if stopping.told_at and waited > (CUT_AFTER_S if stopping.cut else INSIST_AFTER_S):
            return Step(Action.TERM, name, "it takes its time")
        return Step(Action.WAIT, name, "process is ending", 0.25)
    if state.state is State.UNKNOWN and state.pid:
        return Step(Action.ALARM, name, LOST)
    return then


def _keep(
    name: str, wanted: Wanted, state: ProgramState, note: RunNote | None, now: float, clock: float
) -> Step | None:
    """Next step of a program whose section is the wanted one; None if it is in the desired state."""
    if state.state is State.STOPPED and not wanted.record.stopped_by_hand:
        return Step(Action.START, name, "wanted again" if state.start else "never started")
    if state.state is State.EXITED and abs(now - state.stop) > EXITED_GRACE_S:
        return Step(Action.START, name, "exited and was not restarted")
    if state.state is State.UNKNOWN:
        return Step(Action.ALARM, name, LOST)
    if state.state in (State.STARTING, State.RUNNING) and wanted.hung:
        return _revive(name, wanted.hung, clock)
    if state.state is State.FATAL:
        due = retry_at(note, state, now)
        if now >= due or due - now > LONGEST_RETRY_S:  # further away than any pause: the clock was set back
            return Step(Action.START, name, "its pause after a crash is over")
        return Step(Action.WAIT, name, "held after crashes", due - now)
    return None


def _revive(name: str, hung: Hung, clock: float) -> Step:
    """Next step of a hung engine. It serves no request, so there is nothing to drain."""
    if not hung.told_at:
        return Step(Action.RESTART, name, hung.why)
    waited = clock - hung.told_at
    if 0 <= waited < KILL_AFTER_S:
        return Step(Action.WAIT, name, "a hung engine was told to end", KILL_AFTER_S - waited)
    return Step(Action.KILL, name, "it hangs, and does not heed TERM")


def steps(
    wanted: Mapping[str, Wanted],
    ours: frozenset[str],
    table: Mapping[str, ProgramState],
    diff: Diff,
    notes: Mapping[str, RunNote],
    stopping: Mapping[str, Stopping],
    now: float,
    clock: float,
) -> list[Step]:
    """Steps of one pass, in the order of program names.

    `ours`: names that are or were ours; nothing else in the table is ever touched. `now` is Unix time, `clock` is
    monotonic.
    """
    result: list[Step | None] = []
    for name in sorted({*wanted, *(ours & table.keys())}):
        state, want, note = table.get(name), wanted.get(name), notes.get(name)
        if want is None:
            assert state is not None
            remove = Step(Action.REMOVE, name, "no longer wanted")
            result.append(_take_down(name, state, stopping.get(name, Stopping()), remove, clock))
        elif state is None:
            result.append(Step(Action.ADD, name, "new") if name in diff.added else Step(Action.WAIT, name, RELOAD, 1.0))
        elif not _runs_another(want, note, state) and (
            name not in diff.changed or (not _rests(want, state) and runs_wanted_spec(want, note, state))
        ):
            result.append(_keep(name, want, state, note, now, clock))
        elif state.state in (State.STARTING, State.RUNNING) and _in_flight(note, state, now):
            result.append(Step(Action.WAIT, name, "launcher has not said yet what it runs", 0.05))
        elif state.state in (State.STARTING, State.RUNNING) and (left_s := _settles_s(note, now)):
            result.append(Step(Action.WAIT, name, "it has only just been started; more changes may come", left_s))
        elif want.record.stopped_by_hand and state.state is State.STOPPED and not stays_stopped(state, now):
            result.append(Step(Action.WAIT, name, "it was stopped by hand just now", HAND_GRACE_S))
        else:
            replace = Step(Action.REPLACE, name, "its spec changed")
            result.append(_take_down(name, state, stopping.get(name, Stopping()), replace, clock))
    return [
        _withheld(step, wanted[step.program].held) if step.program in wanted else step
        for step in result
        if step is not None
    ]


def _withheld(step: Step, why: str) -> Step:
    """The step of a wanted program, or a wait in its place if it would lead to a start that `why` forbids.

    A program that would be stopped only to start anew keeps running too.
    """
    return Step(Action.WAIT, step.program, why, HELD_S) if why and step.do in TO_START else step


def _in_flight(note: RunNote | None, state: ProgramState, now: float) -> bool:
    """True for the moments between a spawn and the launcher's note."""
    return live_note(note, state) is None and abs(now - state.start) < NOTE_GRACE_S


def _settles_s(note: RunNote | None, now: float) -> float:
    """Seconds that an engine is left alone after its start, so that many edits cause few restarts; 0 if it is not."""
    if note is None or len(note.starts) != 1:  # a crash loop is not left alone: the edit may fix it
        return 0.0
    left_s = note.starts[0] + SETTLE_S - now
    # The note may be later than `now`, which was taken before it was read; one far ahead is of a clock since set back.
    return left_s if 0 < left_s <= 2 * SETTLE_S else 0.0


def stopped_by_hand(record: Record, state: ProgramState | None, note: RunNote | None) -> bool:
    """True if the program was stopped with supervisorctl and has not been started since.

    A program that we stopped ourselves is STOPPED as well: `stop_sent` is set, or its note is of another request.
    """
    was = record.stopped_by_hand
    if state is None:
        return was
    if note is not None and not record.is_run_by(note.edition, note.asked):
        return was and state.state not in (State.STARTING, State.RUNNING)
    if state.state is State.STOPPED:
        return was or (state.start > 0 and not record.stop_sent)
    return was and state.state is State.UNKNOWN  # any other state takes a start


def with_hands(
    records: Mapping[Key, Record], table: Mapping[str, ProgramState], notes: Mapping[str, RunNote]
) -> dict[Key, Record]:
    """The records with programs marked that were stopped or started with supervisorctl."""
    result = dict(records)
    for key, record in records.items():
        if record.runs and not record.withdraw:
            state, note = table.get(record.program), notes.get(record.program)
            by_hand = stopped_by_hand(record, state, note)
            if by_hand != record.stopped_by_hand:
                result[key] = replace(record, stopped_by_hand=by_hand)
    return result


def after_steps(
    record: Record, state: ProgramState | None, note: RunNote | None, busy: bool, now: float
) -> Record | None:
    """The record with finished business forgotten: past retries, completed withdrawals. None once it may go.

    `busy`: the steps of this pass move its program, and not to a start.
    """
    if record.verdict.standing is Standing.REMOVING and state is None and not busy:
        return None
    held = state is not None and state.state is State.FATAL and record.verdict.standing is Standing.RUN
    up = state is not None and state.state in (State.STARTING, State.RUNNING) and not busy
    due = retry_at(note, state, now) if held and state is not None else None
    withdraw = record.withdraw if busy else NO_WITHDRAWAL
    stop_sent = record.stop_sent and state is not None and not up
    if (record.retry_at, record.withdraw, record.stop_sent) == (due, withdraw, stop_sent):
        return record
    return replace(record, retry_at=due, withdraw=withdraw, stop_sent=stop_sent)


def stays_stopped(state: ProgramState, now: float) -> bool:
    """True if a stop by hand has lasted long enough to be kept over a restart.

    `supervisorctl update` stops a program as well, only to remove it and add it again a moment later.
    """
    return not 0 <= now - state.stop < HAND_GRACE_S
