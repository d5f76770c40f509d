"""Reconciliation of one InferenceService: its next record, from the request and this Mac's prerequisites.

An engine that may run is proposed: `controller.admission` decides whether there is memory for it, and makes the record.

An engine that serves keeps its last valid spec while a bad edit, a missing Model, file or binary is reported
beside it. It is stopped only by a clear request: suspended, scaled to zero, deleted, or its Model not for a
Mac (then LLMKube runs it in a pod).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from metal_supervisor.models.metadata import Demand
from metal_supervisor.spec.instants import utc
from metal_supervisor.spec.record import UNDECIDED, Record, Verdict, values_of
from metal_supervisor.spec.types import (
    DIRECTORY_FORMATS,
    FIELD_IGNORED,
    Engine,
    ModelFile,
    Program,
    Rejected,
    Service,
    Standing,
)
from metal_supervisor.state.programs import program_name

NOTHING_KNOWN = Demand(None)
LONGEST_TEXT = 1000
MOST_NAMED = 8
"""Fields that one message names."""


@dataclass(frozen=True)
class Outlook:
    """Prerequisites of a service on this Mac, as of now."""

    file: ModelFile
    port: int | None
    engine: Engine | None = None
    program: Program | None = None
    problem: tuple[str, str] | None = None
    """(reason, message) of a problem on this Mac that prevents a start, e.g. a missing binary."""
    front_port: int | None = None
    """Port at which the gateway answers for an on-demand service."""
    host: str = ""
    """Address that a new engine is to listen on."""
    demand: Demand = NOTHING_KNOWN
    """The engine's memory estimate."""
    slot_context: int = 0
    """As `EngineRun.slot_context`."""
    limit_bytes: int | None = None
    """Memory limit of its Model."""
    unconfined: str = ""
    """Reason why the operating system will not confine it, "" if it will."""
    warning: tuple[str, str] | None = None
    """(reason, message) of a problem with this Mac's engine that does not prevent a start."""
    live: tuple[str, int] | None = None
    """(address, port) of the engine that is up, also of one that is about to be replaced."""
    live_edition: str = ""
    """Edition of the spec that it was started from, "" if no engine is up."""


CARRIED = ("withdraw", "stop_sent", "probe", "daemon", "evicted_at", "evicted_why", "evictions")
"""Fields that every proposal has from the last record: its engine is stopped and probed as it was started."""
CARRIED_IF_ACCEPTED = (*CARRIED, "slot_context", "retry_at", "queued_at", "admitted_at", "displaced_by", "pressure")
CARRIED_IF_REFUSED = (
    *CARRIED,
    "lost_names",
    "runtime",
    "mode",
    "priority",
    "port",
    "front_port",
    "slot_context",
    "idle_s",
    "host",
    "slot",
)
CHECKING = "Checking"
MISSING = "MissingAfterRestore"


def fitting(file: ModelFile, kind: str) -> ModelFile:
    """A model file, or its refusal where it is a directory and its format wants a file, or the other way round."""
    if file.phase != "Ready" or file.directory == (kind in DIRECTORY_FORMATS):
        return file
    what, wants = ("a directory", "one .gguf file") if file.directory else ("a file", "a directory with config.json")
    text = f"{file.path} is {what}, and spec.format {kind} wants {wants}; change one of the two"
    return ModelFile("Failed", reason="InvalidModelFile", message=text)


def verdict(before: Verdict | None, standing: Standing, reason: str, message: str, now: float) -> Verdict:
    """A verdict that remembers since when it holds."""
    same = before is not None and (before.standing, before.reason) == (standing, reason)
    return Verdict(standing, reason, message, before.since if before is not None and same else now)


def unchanged(record: Record) -> Record:
    """The proposal to leave a record as it is: its engine asks to keep its memory, if it runs."""
    return replace(record, verdict=UNDECIDED) if record.runs else record


def leaves_as_it_is(proposal: Record, decided: Verdict, record: Record) -> bool:
    """True if the record of a proposal would be the one it has. `decided`: its verdict, whatever its time is."""
    old = record.verdict
    if (decided.standing, decided.reason, decided.message) != (old.standing, old.reason, old.message):
        return False
    return {**values_of(proposal), "verdict": old} == values_of(record)


def _carried(record: Record | None, names: Sequence[str]) -> dict[str, Any]:
    """These fields of a record; without one there are none, and a proposal has its defaults."""
    return {name: getattr(record, name) for name in names} if record is not None else {}


def _of(item: Service | Rejected) -> dict[str, Any]:
    """The fields of a proposal that an accepted and a rejected service have alike."""
    return {
        "namespace": item.namespace,
        "name": item.name,
        "uid": item.uid,
        "generation": item.generation,
        "program": program_name(item.key),
        "replicas": item.replicas,
        "endpoint": item.endpoint,
        "ordinal": item.ordinal,
    }


def refuse(
    rejected: Rejected, record: Record | None, now: float, start_refused: bool = False, up: bool = True
) -> Record:
    """The proposal for an InferenceService that cannot run as it is written.

    `start_refused`: its start is barred, and the launcher has refused to start it; nothing is left to interrupt.
    `up`: its engine has a process.
    """
    off = rejected.suspended or rejected.replicas == 0
    if record is not None and record.runs and rejected.keeps_running and not start_refused:
        if rejected.bars_start:
            return _barred(record, rejected, up)
        return _warned(record, rejected, rejected.reason, rejected.message, up)
    before = record.verdict if record else None
    decided = verdict(before, Standing.FAILED, rejected.reason, rejected.message, now)
    if off:  # switching off must work even if the rest of the manifest is invalid
        decided = _off(rejected.suspended, before, now)
    fields = {
        "runtime": "",
        "mode": "chat",
        "priority": "normal",
        **_of(rejected),
        **_carried(record, CARRIED_IF_REFUSED),
        "model": rejected.model_name,
        "verdict": decided,
        "barred": _bar(rejected),
    }
    if off:
        fields |= {"warning": (rejected.reason, rejected.message), "evicted_at": None}
    return Record(**fields)


def _off(suspended: bool, before: Verdict | None, now: float) -> Verdict:
    if suspended:
        return verdict(before, Standing.SUSPENDED, "Suspended", "spec.suspend=true", now)
    return verdict(before, Standing.STOPPED, "ManuallyScaledToZero", "spec.replicas=0", now)


def keeps(up: bool) -> str:
    """What becomes of an engine whose service cannot be followed as it is now. `up`: it has a process."""
    return f"the engine {'keeps running' if up else 'starts again'} as it last could"


def _warned(record: Record, item: Service | Rejected, reason: str, message: str, up: bool) -> Record:
    warning = reason, f"{message}; {keeps(up)}"
    return replace(unchanged(record), uid=item.uid, generation=item.generation, warning=warning, barred="")


def _bar(rejected: Rejected) -> str:
    return f"{rejected.reason}: {rejected.message}"[:LONGEST_TEXT] if rejected.bars_start else ""


def _barred(record: Record, rejected: Rejected, up: bool) -> Record:
    """Leave a running engine alone, and bar its next start."""
    runs = "the engine keeps running, and its next start is refused" if up else "its next start is refused"
    warning = rejected.reason, f"{rejected.message}; {runs}"
    kept = replace(unchanged(record), uid=rejected.uid, generation=rejected.generation, warning=warning)
    return replace(kept, barred=_bar(rejected))


def missing(record: Record, until: float) -> Record:
    """The proposal for an engine whose InferenceService a restored API lacks. `until`: Unix time."""
    text = f"the Kubernetes API was restored to a state without this service; its engine may run until {utc(until)}"
    return replace(unchanged(record), warning=(MISSING, f"{text}. Apply its manifest again to keep it"))


def _left_out(ignored: Sequence[str]) -> tuple[str, str] | None:
    """The warning about fields that mean nothing on a Mac."""
    if not ignored:
        return None
    more = f" and {len(ignored) - MOST_NAMED} more" if len(ignored) > MOST_NAMED else ""
    return FIELD_IGNORED, f"{', '.join(ignored[:MOST_NAMED])}{more}: not known, or of no meaning on a Mac, and left out"


def _waiting(service: Service, outlook: Outlook) -> tuple[Standing, str, str] | None:
    """(standing, reason, message) of the obstacle to a service's start; None if there is none."""
    file = outlook.file
    if file.phase == "Failed":  # before what this Mac lacks: a wrong format asks for a wrong engine
        field = "" if file.message.startswith("spec.") else "spec.source: "
        return Standing.FAILED, file.reason, f'Model "{service.model.name}": {field}{file.message}'
    if outlook.problem:
        return Standing.FAILED, *outlook.problem
    if file.phase != "Ready":
        return Standing.WAIT, file.reason or file.phase, file.message or "the model file is being looked at"
    return service.awaits


def accept(
    service: Service,
    record: Record | None,
    outlook: Outlook,
    now: float,
    start_refused: bool = False,
    up: bool = True,
) -> Record:
    """The proposal for a valid InferenceService. `start_refused`, `up`: as for `refuse`."""
    before = record.verdict if record else None
    # Until it has exited, the running engine is probed, drained and published at its own address.
    host, port = outlook.live or (outlook.host, outlook.port)
    carried = _carried(record, CARRIED_IF_ACCEPTED)
    if outlook.slot_context:
        carried["slot_context"] = outlook.slot_context
    fresh = Record(
        **_of(service),
        **carried,
        verdict=UNDECIDED,
        model=service.model.name,
        model_uid=service.model.uid,
        runtime=service.runtime,
        mode=service.mode,
        priority=service.priority,
        port=port,
        front_port=outlook.front_port,
        host=host,
        drain_s=service.drain_s,
        protected=service.protected,
        aliases=service.aliases,
        lost_names=service.lost_names,
        daemon_names=service.daemon_names,
        idle_s=service.idle_s,
        warning=outlook.warning or _left_out(service.ignored),
    )
    if service.suspended or service.replicas == 0:
        off = _off(service.suspended, before, now)
        return replace(fresh, verdict=off, queued_at=None, evicted_at=None, displaced_by="")
    if hindrance := _waiting(service, outlook):
        standing, reason, message = hindrance
        if record is not None and record.runs and not start_refused:
            if reason == CHECKING and (record.uid, record.generation) == (service.uid, service.generation):
                return unchanged(record)  # a controller that has just started looks at everything anew
            return _warned(record, service, reason, message, up)
        return replace(fresh, verdict=verdict(before, standing, reason, message, now))
    assert outlook.program is not None and outlook.engine is not None
    edition = outlook.program.edition
    unedited = record is not None and record.is_run_by(edition, service.asked)
    # Unless it is to be replaced, an engine that runs from an older edition is probed as it was started.
    older = unedited and outlook.live_edition not in ("", edition)
    return replace(
        fresh,
        files=(outlook.file.path,) if outlook.file.path else (),
        asked=service.asked,
        edition=edition,
        limit_bytes=outlook.limit_bytes,
        daemon=outlook.engine.daemon,
        unconfined=outlook.unconfined,
        probe=fresh.probe if older else outlook.engine.probe,
        stopped_by_hand=bool(record and record.stopped_by_hand and unedited),
        **_estimate(outlook.demand),
    )


def _estimate(demand: Demand) -> dict[str, Any]:
    """The fields of a record that hold an estimate."""
    return {
        "reserved_bytes": demand.bytes or 0,
        "mapped_bytes": demand.mapped_bytes,
        "memory": demand.text[:LONGEST_TEXT],
        "guessed": demand.guessed[:LONGEST_TEXT],
        "advice": demand.advice[:LONGEST_TEXT],
    }


DELETED = "Deleted", "the InferenceService is gone"
MOVED = "Moved", "another Mac runs it now"
NOT_HERE = "NotHere", "it is not for this Mac any more"


def dismiss(record: Record, now: float, why: tuple[str, str] = DELETED) -> Record:
    """The record of an InferenceService that is not this Mac's any more; it goes too, once its process has."""
    return replace(
        record,
        verdict=verdict(record.verdict, Standing.REMOVING, *why, now),
        edition=None,
        warning=None,
    )
