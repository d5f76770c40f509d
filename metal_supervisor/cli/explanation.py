"""Explanation of the latest decisions about one service, as sentences with the numbers behind them.

Everything is read from the state that the deciding parts keep anyway, so a sentence here cannot differ from what was
done; the one that the cluster shows (the message of MetalReady) comes first, word for word. From an engine's spec only
fields that cannot hold a secret are shown: neither its arguments nor its environment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from metal_supervisor.cluster.report import Report, confinement, last_known, report, rests
from metal_supervisor.memory.refusals import over_limit
from metal_supervisor.spec.document import mapping, string, whole
from metal_supervisor.spec.instants import utc
from metal_supervisor.spec.processes import Observed, RunNote
from metal_supervisor.spec.progress import duration
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.sizes import amount
from metal_supervisor.spec.types import Json, Standing

STALE_S = 60.0
"""Age from which a report of the controller is out of date; it makes a pass every quarter of a minute."""
STANDINGS = {
    Standing.RUN: "it is to run",
    Standing.WAIT: "it is to run, and waits",
    Standing.STOPPED: "it is not to run: spec.replicas is 0",
    Standing.SUSPENDED: "it is not to run: spec.suspend is true",
    Standing.FAILED: "it cannot run as things are",
    Standing.REMOVING: "it is being removed from this Mac",
}


@dataclass(frozen=True)
class Case:
    """Facts about one service."""

    record: Record
    observed: Observed | None
    note: RunNote | None
    program: str
    """Path of the engine's program, "" if it is not known."""
    told: Json
    """The controller's report (`controller.json`), {} without one."""
    now: float
    """Unix time."""
    ahead: tuple[str, ...] = ()
    """Services ahead of it in the queue for memory."""
    up: bool = True
    """A supervisord runs."""


@dataclass(frozen=True)
class Sentence:
    """One sentence of an explanation."""

    topic: str
    text: str


def explain(case: Case) -> tuple[Report, list[Sentence]]:
    """(report for the cluster, sentences in the order of the circle)."""
    told = (report if case.up else last_known)(case.record, case.observed)
    topics = (
        ("now", iter((told.message,))),
        ("wanted", _wanted(case)),
        ("model", _model(case)),
        ("runtime", _runtime(case)),
        ("memory", _memory(case)),
        ("port", _port(case)),
        ("process", _process(case)),
        ("confined", _confined(case)),
        ("probe", _probe(case)),
        ("published", _published(case, told)),
        ("restarts", _restarts(case)),
        ("next", _next(case)),
    )
    return told, [Sentence(topic, text) for topic, texts in topics for text in texts if text]


def numbers(case: Case) -> Json:
    """The numbers of the sentences, for scripts; null for unknown ones. Bytes, and Unix times."""
    record, observed, memory = case.record, case.observed, mapping(case.told, "memory")
    return {
        "reservedBytes": record.reserved_bytes or None,
        "measuredBytes": _measured(case) or None,
        "limitBytes": record.limit_bytes,
        "budgetBytes": memory.get("budget"),
        "chargedBytes": memory.get("charged"),
        "leftBytes": memory.get("left"),
        "queuePosition": record.queue_position or None,
        "port": record.port,
        "pid": observed.pid if observed and observed.pid else None,
        "restarts": observed.restarts if observed else 0,
        "nextAttempt": _due(case),
        "decidedAt": record.verdict.since,
        "controllerAt": case.told.get("at"),
    }


def _ago(then: float, now: float) -> str:
    return f"{duration(max(0.0, now - then))} ago"


# ── what is asked for ────────────────────────────────────────────────────────────────────────────


def _wanted(case: Case) -> Iterator[str]:
    record, verdict = case.record, case.record.verdict
    why = f" ({verdict.reason})" if verdict.reason else ""
    said = "it runs on demand, and rests" if rests(record) else STANDINGS[verdict.standing]
    yield f"{said}{why}, decided {_ago(verdict.since, case.now)} at {utc(verdict.since)}"
    if case.observed is not None and case.observed.wakes:
        latest = (f"{asked} in {seconds:g} s" for asked, seconds in reversed(case.observed.wakes.items()))
        yield f"its latest loads for a request: {', '.join(latest)}"
    many = "s" if record.replicas != 1 else ""
    yield (
        f"generation {record.generation} asks for {record.replicas} replica{many} in mode {record.mode}, "
        f"with priority {record.priority}"
    )
    if record.replicas > 1 or record.peers_ready or record.ordinal:
        yield f"this engine has slot {record.slot}; {record.peers_ready} others are ready"
    if not record.claimed:
        yield "its slot is another Mac's now; this engine serves until that one does"
    if record.stopped_by_hand:
        yield "it was stopped with supervisorctl, which holds until the spec changes"
    if record.warning is not None:
        yield f"something is wrong that does not stop it: {': '.join(record.warning)}"


def _model(case: Case) -> Iterator[str]:
    record = case.record
    file = mapping(mapping(mapping(case.told, "models"), f"{record.namespace}/{record.model}"), "file")
    if not file:
        yield f"Model {record.model}: nothing is told of its file" if record.model else ""
        return
    got, total, said = whole(file, "got_bytes"), whole(file, "total_bytes"), str(file.get("message") or "")
    size, path = whole(file, "size_bytes"), str(file.get("path") or "")
    text = f"Model {record.model}: its file is {file.get('phase')}"
    text += f" at {path}" if path else ""
    text += f", {amount(size)}" if size else ""
    if total and got < total:
        text += f", {amount(got, 'down')} of {amount(total)} are here ({100 * got // total} %)"
    yield f"{text}: {said}" if said else text


def _runtime(case: Case) -> Iterator[str]:
    record = case.record
    why = _reason(case, "runtime")
    yield f"{record.runtime}{f', because {why}' if why else ''}" if record.runtime else "none has been chosen"
    if record.daemon:
        yield f"its model is served by the shared daemon {record.daemon}"
    if case.program:
        yield f"its program is {case.program}"


# ── memory ───────────────────────────────────────────────────────────────────────────────────────


def _measured(case: Case) -> int:
    return case.observed.memory_bytes if case.observed is not None and case.observed.pid else 0


def _memory(case: Case) -> Iterator[str]:
    record, measured = case.record, _measured(case)
    if record.reserved_bytes:
        yield f"it is estimated to take {record.memory or amount(record.reserved_bytes)}"
    elif record.memory:
        yield f"what it takes is not known: {record.memory}"
    if record.guessed:
        yield f"that is a guess by the size of its file: {record.guessed}"
    if measured:
        larger = "more than the estimate" if measured > record.reserved_bytes else "no more than the estimate"
        charged = amount(max(measured, record.reserved_bytes))
        yield f"its engine holds {amount(measured)}, {larger}: it is charged {charged}"
    if record.limit_bytes is not None:
        over = over_limit(record.reserved_bytes, record.limit_bytes, record.mapped_bytes)
        yield over or f"its Model allows it {amount(record.limit_bytes, 'down')}"
    yield from _room(case)
    if record.queue_position:
        since = f", since {utc(record.queued_at)}" if record.queued_at else ""
        ahead = f", behind {', '.join(case.ahead)}" if case.ahead else ""
        yield f"it is number {record.queue_position} in the queue for memory{since}{ahead}"
    if record.displaced_by:
        yield f"it was stopped to make room for {record.displaced_by}"
    if record.evicted_at is not None:
        yield f"it was stopped at {utc(record.evicted_at)} because {record.evicted_why}"
    if record.evictions:
        yield f"it had to go {record.evictions} times for want of memory"
    if record.pressure is not None:
        yield f"the machine's memory is {record.pressure[0]}: {record.pressure[1]}"


def _room(case: Case) -> Iterator[str]:
    memory, record = mapping(case.told, "memory"), case.record
    budget, charged = whole(memory, "budget"), whole(memory, "charged")
    left = budget - charged  # negative if engines outgrew it
    if not budget:
        return
    yield f"this Mac's budget is {memory.get('because') or amount(budget)}"
    yield f"of that {amount(charged)} are reserved by all engines, and {amount(left, 'down')} are left"
    if record.verdict.standing is Standing.WAIT and record.queue_position and record.reserved_bytes:
        need = amount(record.reserved_bytes, "up")
        compared = "more than" if record.reserved_bytes > left else "not more than"
        yield f"it needs {need}, {compared} the {amount(left, 'down')} that are left"


# ── the engine ───────────────────────────────────────────────────────────────────────────────────


def _port(case: Case) -> Iterator[str]:
    record = case.record
    if record.port is None:
        yield "it has none yet"
    else:
        where = f" on {record.host}" if record.host else ""
        yield f"{record.port}{where}, which stays its own until the InferenceService is deleted"
    if record.front_port is not None and record.idle_s is not None:
        yield f"it is on demand: clients reach it at {record.front_port}, which is the gateway's"


def _process(case: Case) -> Iterator[str]:
    record, observed, note = case.record, case.observed, case.note
    state = observed.state if observed else ""
    pid = observed.pid if observed else 0
    word = f"supervisord says {state}" if state else "supervisord has no program for it"
    word = word if case.up else "no supervisord runs"
    own = note if note is not None and pid and note.pid == pid else None
    since = f", started at {utc(own.starts[-1])}" if own is not None and own.starts else ""
    yield f"pid {pid}{since}; {word}" if pid else f"none; {word}"
    if own is not None and own.launcher_pid != pid:
        yield f"its engine outlived a supervisord; launcher {own.launcher_pid} stands in for it"
    if own is not None and record.edition:
        if not record.is_run_by(own.edition, own.asked):
            yield "it runs as before the last edit, until it is restarted"
        elif own.edition != record.edition:
            yield "its next start takes up changes of this Mac, such as an upgrade or a setting"
    if note is not None and note.refused and not pid:
        yield f"its launcher refused to start it: {note.refused}: {note.refused_message}"


def _confined(case: Case) -> Iterator[str]:
    if case.observed is not None and case.observed.pid:
        confined, _, text = confinement(case.record, case.observed)
        yield f"{'unknown' if confined is None else 'yes' if confined else 'no'}; {text}"


def _probe(case: Case) -> Iterator[str]:
    record, observed = case.record, case.observed
    if observed is None or not observed.pid:
        return
    word = "it has answered as it should" if observed.ready else "it does not count as ready"
    path = record.probe.path
    said = f": {observed.message}" if observed.message else ""
    yield f"{word} since {utc(observed.since)}, asked at {path}{said}"
    if observed.hung:
        yield f"it hangs: {observed.hung}"
    if observed.busy:
        yield "it is answering a request"


def _published(case: Case, told: Report) -> Iterator[str]:
    record, observed = case.record, case.observed
    if observed is not None and observed.published:
        yield f"the cluster could not be told: {observed.published}"
    elif record.endpoint is None:
        yield "it has no endpoint"
    else:
        state = "ready" if told.ready else "not ready"
        if not told.wants_slice:
            state = "not there"
        name = f"Service {record.endpoint.service}, port {record.endpoint.port}"
        yield f"{name}: this Mac's endpoint is {state}"


# ── what comes next ──────────────────────────────────────────────────────────────────────────────


def _due(case: Case) -> float | None:
    if case.record.retry_at is not None:
        return case.record.retry_at
    return case.note.not_before if case.note is not None and case.note.not_before else None


def _restarts(case: Case) -> Iterator[str]:
    observed, note = case.observed, case.note
    count = observed.restarts if observed is not None else 0
    last = f"; it last ended with {observed.last_exit}" if observed is not None and observed.last_exit else ""
    yield f"{count} unplanned{last}"
    if note is not None and len(note.starts) > 1:
        latest = _ago(note.starts[-1], case.now)
        yield f"{len(note.starts)} recent starts count towards a crash loop, the latest {latest}"
    due = _due(case)
    if due is not None:
        left_s = due - case.now
        yield f"it is held; the next attempt is {f'in {left_s:.0f} s' if left_s > 0 else 'due'}, at {utc(due)}"


def _next(case: Case) -> Iterator[str]:
    record = case.record
    if step := _reason(case, "step"):
        yield f"the controller's latest step: {step}"
    if record.withdraw:
        yield "its endpoint is to be withdrawn before the process is stopped"
    if record.edit_queued_at is not None:
        yield f"an edit that takes more memory waits since {utc(record.edit_queued_at)}"
    at = case.told.get("at")
    if not isinstance(at, int | float) or isinstance(at, bool):
        yield "the controller has left no report"
    elif case.now - at > STALE_S:
        yield f"the controller last told of a pass {_ago(at, case.now)}: what is said here may be out of date"


def _reason(case: Case, which: str) -> str:
    return string(mapping(mapping(case.told, "reasons"), case.record.program), which)
