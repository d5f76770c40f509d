"""Explanation of the latest decisions about one service: the sentence of its condition, then fields and their values.

Everything is read from the state that the deciding parts keep anyway, so a sentence here cannot differ from what was
done; the one that the cluster shows (the message of MetalReady) comes first, word for word. From an engine's spec only
fields that cannot hold a secret are shown: neither its arguments nor its environment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from metal_supervisor.cluster.report import Report, confinement, last_known, report
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
    Standing.RUN: "run",
    Standing.WAIT: "run, waits",
    Standing.STOPPED: "stopped by spec.replicas 0",
    Standing.SUSPENDED: "stopped by spec.suspend",
    Standing.FAILED: "cannot run",
    Standing.REMOVING: "being removed from this Mac",
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


def explain(case: Case) -> tuple[Report, list[tuple[str, str]]]:
    """(report for the cluster, (topic, text) of each sentence in the order of the circle)."""
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
    return told, [(topic, text) for topic, texts in topics for text in texts if text]


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


def _wanted(case: Case) -> Iterator[str]:
    record, verdict = case.record, case.record.verdict
    why = f" ({verdict.reason})" if verdict.reason else ""
    yield f"{STANDINGS[verdict.standing]}{why}, since {utc(verdict.since)}"
    yield (
        f"generation {record.generation}, mode {record.mode}, priority {record.priority}, "
        f"replicas {record.replicas} (slot {record.slot} here, {record.peers_ready} others ready)"
    )
    if case.observed is not None and case.observed.wakes:
        latest = (f"{asked} in {seconds:g} s" for asked, seconds in reversed(case.observed.wakes.items()))
        yield f"latest loads for a request: {', '.join(latest)}"
    if record.warning is not None:
        yield f"warning: {': '.join(record.warning)}"


def _model(case: Case) -> Iterator[str]:
    record = case.record
    file = mapping(mapping(mapping(case.told, "models"), f"{record.namespace}/{record.model}"), "file")
    got, total, size = (whole(file, name) for name in ("got_bytes", "total_bytes", "size_bytes"))
    parts = (
        record.model and f"Model {record.model}",
        string(file, "phase"),
        string(file, "path"),
        amount(size) if size else "",
        f"{amount(got, 'down')} of {amount(total)} ({100 * got // total} %)" if got < total else "",
        string(file, "message"),
    )
    yield ", ".join(filter(None, parts))


def _runtime(case: Case) -> Iterator[str]:
    record = case.record
    why = _reason(case, "runtime")
    yield f"{record.runtime or 'not chosen yet'}{f': {why}' if why else ''}"
    yield record.daemon and f"shared daemon: {record.daemon}"
    yield case.program and f"program: {case.program}"


def _measured(case: Case) -> int:
    return case.observed.memory_bytes if case.observed is not None and case.observed.pid else 0


def _memory(case: Case) -> Iterator[str]:
    record, measured, memory = case.record, _measured(case), mapping(case.told, "memory")
    budget, charged = whole(memory, "budget"), whole(memory, "charged")
    if record.reserved_bytes or record.memory:
        yield f"estimate: {record.memory or amount(record.reserved_bytes)}"
    yield record.guessed and f"estimated from the file's size: {record.guessed}"
    if measured:
        yield f"measured: {amount(measured)}, charged: {amount(max(measured, record.reserved_bytes))}"
    if record.limit_bytes is not None:
        over = over_limit(record.reserved_bytes, record.limit_bytes, record.mapped_bytes)
        yield over or f"limit of its Model: {amount(record.limit_bytes, 'down')}"
    if budget:
        left = amount(budget - charged, "down")  # negative if engines outgrew it
        yield f"budget of this Mac: {memory.get('because') or amount(budget)}; {amount(charged)} charged, {left} left"
    if record.queue_position:
        since = f", since {utc(record.queued_at)}" if record.queued_at else ""
        ahead = f", behind {', '.join(case.ahead)}" if case.ahead else ""
        yield f"position in the queue: {record.queue_position}{since}{ahead}"
    yield record.displaced_by and f"stopped to make room for {record.displaced_by}"
    if record.evicted_at is not None:
        yield f"evicted at {utc(record.evicted_at)} because {record.evicted_why}"
    if record.evictions:
        yield f"evictions: {record.evictions}"
    if record.pressure is not None:
        yield f"pressure: {record.pressure[0]}: {record.pressure[1]}"


def _port(case: Case) -> Iterator[str]:
    record = case.record
    yield f"{record.port}{f' on {record.host}' if record.host else ''}" if record.port is not None else "none yet"
    if record.front_port is not None and record.idle_s is not None:
        yield f"{record.front_port}, the gateway's, for clients"


def _process(case: Case) -> Iterator[str]:
    record, observed, note = case.record, case.observed, case.note
    state = observed.state if observed else ""
    pid = observed.pid if observed else 0
    word = f"supervisord reports {state}" if state else "supervisord has no program for it"
    word = word if case.up else "no supervisord runs"
    own = note if note is not None and pid and note.pid == pid else None
    since = f", started at {utc(own.starts[-1])}" if own is not None and own.starts else ""
    yield f"pid {pid}{since}; {word}" if pid else f"none; {word}"
    if own is not None and own.launcher_pid != pid:
        yield f"outlived a supervisord; launcher {own.launcher_pid} stands in for it"
    if own is not None and record.edition:
        if not record.is_run_by(own.edition, own.asked):
            yield "runs as before the last edit, until it is restarted"
        elif own.edition != record.edition:
            yield "the next start takes up changes of this Mac, such as an upgrade or a setting"
    if note is not None and note.refused and not pid:
        yield f"start refused: {note.refused}: {note.refused_message}"


def _confined(case: Case) -> Iterator[str]:
    if case.observed is not None and case.observed.pid:
        confined, _, text = confinement(case.record, case.observed)
        yield f"{'unknown' if confined is None else 'yes' if confined else 'no'}; {text}"


def _probe(case: Case) -> Iterator[str]:
    observed = case.observed
    if observed is not None and observed.pid:
        said = observed.hung or observed.message
        ready = "ready" if observed.ready else "not ready"
        yield f"{case.record.probe.path}: {ready} since {utc(observed.since)}{f'; {said}' if said else ''}"


def _published(case: Case, told: Report) -> Iterator[str]:
    endpoint = case.record.endpoint
    yield case.observed.published if case.observed is not None else ""
    if endpoint is None:
        yield "no endpoint"
    else:
        state = "absent" if not told.wants_slice else "ready" if told.ready else "not ready"
        yield f"Service {endpoint.service}, port {endpoint.port}: endpoint {state}"


def _due(case: Case) -> float | None:
    if case.record.retry_at is not None:
        return case.record.retry_at
    return case.note.not_before if case.note is not None and case.note.not_before else None


def _restarts(case: Case) -> Iterator[str]:
    observed, note = case.observed, case.note
    count = observed.restarts if observed is not None else 0
    yield f"{count} unplanned{f'; last: {observed.last_exit}' if observed is not None and observed.last_exit else ''}"
    if note is not None and len(note.starts) > 1:
        yield f"starts that count towards a crash loop: {len(note.starts)}, the latest at {utc(note.starts[-1])}"
    due = _due(case)
    if due is not None:
        yield f"next attempt: {utc(due)}{'' if due > case.now else ', due'}"


def _next(case: Case) -> Iterator[str]:
    if step := _reason(case, "step"):
        yield f"latest step of the controller: {step}"
    if case.record.edit_queued_at is not None:
        yield f"an edit waits for memory since {utc(case.record.edit_queued_at)}"
    at = case.told.get("at")
    if not isinstance(at, int | float) or isinstance(at, bool):
        yield "no report of the controller"
    elif case.now - at > STALE_S:
        yield f"report of the controller is {duration(case.now - at)} old: these values may be out of date"


def _reason(case: Case, which: str) -> str:
    return string(mapping(mapping(case.told, "reasons"), case.record.program), which)
