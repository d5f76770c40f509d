"""Which engines may have memory, of all that were decided on as if there were enough for each.

The ledger knows entries; this module makes them of records, and records again of what the ledger says. What runs
keeps its room whatever else is wanted. What is new waits for room, and so does an edit that takes more: until it
fits, the engine goes on as it was. What an engine on its way out still holds is nobody's until it has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from metal_supervisor.core import decide, ledger
from metal_supervisor.core.ledger import Decision, Entry, Ledger, Phase
from metal_supervisor.core.report import EVICTED
from metal_supervisor.core.resources import PRIORITIES
from metal_supervisor.core.types import Key, Record, Standing

EVICTED_DRAIN_S = 20.0
"""How long an engine may finish what it answers while the machine is running out of memory."""


@dataclass(frozen=True)
class Held:
    """An engine process that is up."""

    spec_file: str
    """What it was started from."""
    bytes: int
    """The larger of what that was estimated to take, and what it was measured to take."""


@dataclass(frozen=True)
class Rules:
    """What admission goes by on this machine, right now."""

    budget_bytes: int
    mode: Literal["enforce", "warn"] = "enforce"
    """What becomes of engines of unknown size."""
    preemption: bool = False
    paused: str = ""
    """Why nothing may start that takes room, "" if it may."""


def settle(
    decided: Mapping[Key, Record], before: Mapping[Key, Record], held: Mapping[Key, Held], rules: Rules, now: float
) -> tuple[dict[Key, Record], Ledger]:
    """The records as they can be, and the ledger that says so.

    `before`: the records of the last pass. `held`: the engines that are up, by the key of their record.
    """
    entries, leaving = [], 0
    for key, record in decided.items():
        was, up = before.get(key), held.get(key)
        if not _wants(record) or record.evicted_at is not None:
            leaving += up.bytes if up else 0
        elif _has(record, was, up):
            entries.append(_running(record, up))
        else:
            changes = up is not None and _changes(was)
            if up is not None and changes:
                old = _running(was if was is not None and _wants(was) else _nobodys(record), up)
                entries += [old, _waiting(record, old.charge_bytes, now)]
            else:
                leaving += up.bytes if up else 0
                entries.append(_waiting(record, 0, now))
    book = ledger.admit(rules.budget_bytes, entries, rules.mode, rules.preemption, leaving, rules.paused)
    displaced = {victim: key for key, said in book.decisions.items() for victim in said.displaces}
    result = {}
    for key, record in decided.items():
        was = before.get(key)
        if not _wants(record):
            result[key] = record
        elif record.evicted_at is not None:
            result[key] = _evicted(record, was, now)
        elif key in displaced:
            result[key] = _displaced(record, was, displaced[key], decided, now)
        elif key in book.decisions:
            result[key] = _settled(record, was, key in held, book.decisions[key], now)
        else:
            result[key] = _kept(record, was, now)
    return result, book


def _nobodys(record: Record) -> Record:
    """What is on its way out already: only what it was measured to hold counts, and nobody stops it for themselves."""
    return replace(record, protected=True, reserved_bytes=0)


def _wants(record: Record) -> bool:
    return record.spec_file is not None and record.verdict.standing is Standing.RUN


def _has(record: Record, was: Record | None, up: Held | None) -> bool:
    """Whether its room is its own already: it was admitted as it is wanted now, or it runs so, its record lost."""
    if was is not None and _wants(was):
        # One that gives room back, or takes no more, needs nobody's leave.
        return was.spec_file == record.spec_file or (bool(record.reserved_bytes) and (
            record.reserved_bytes <= max(was.reserved_bytes, up.bytes if up else 0)
        ))
    return was is None and up is not None and up.spec_file == record.spec_file


def _changes(was: Record | None) -> bool:
    """Whether what is up makes room for what is wanted in its place; what waits has given its room away."""
    return was is None or was.verdict.standing is not Standing.WAIT


def _running(record: Record, up: Held | None) -> Entry:
    return Entry(
        record.key,
        PRIORITIES.get(record.priority, PRIORITIES["normal"]),
        record.reserved_bytes or None,
        Phase.RUNNING if up else Phase.STARTING,
        asked=record.queued_at or 0.0,
        admitted=record.admitted_at,
        measured_bytes=up.bytes if up else None,
        protected=record.protected,
    )


def _waiting(record: Record, holds_bytes: int, now: float) -> Entry:
    return Entry(
        record.key,
        PRIORITIES.get(record.priority, PRIORITIES["normal"]),
        record.reserved_bytes or None,
        Phase.WAITING,
        asked=now if record.queued_at is None else record.queued_at,
        limit_bytes=record.limit_bytes,
        unknown_why=record.memory,
        holds_bytes=holds_bytes,
    )


def _kept(record: Record, was: Record | None, now: float) -> Record:
    """One whose room is its own."""
    if record.queued_at is None:  # its record was lost, or is of a release that kept no books
        record = replace(record, queued_at=now, admitted_at=now)
    if not record.reserved_bytes and record.warning is None and was is not None and was.warning:
        return replace(record, warning=was.warning if was.warning[0] == ledger.CHECK_FAILED else None)
    return record


def _settled(record: Record, was: Record | None, up: bool, said: Decision, now: float) -> Record:
    """One that asked for room."""
    queued_at = now if record.queued_at is None else record.queued_at
    if said.admitted:
        warning = (said.reason, said.message) if said.reason else record.warning
        return replace(record, queued_at=queued_at, admitted_at=now, displaced_by="", warning=warning)
    if up and was is not None and _wants(was):
        text = f"{said.message}; the engine keeps running as it last could"
        return replace(
            was,
            uid=record.uid,
            generation=record.generation,
            endpoint=record.endpoint,
            replicas=record.replicas,
            slot=record.slot,
            claimed=record.claimed,
            peers_ready=record.peers_ready,
            warning=(said.reason, text),
        )
    message = f"it was stopped for {record.displaced_by}; {said.message}" if record.displaced_by else said.message
    waits = replace(record, queued_at=queued_at, queue_position=said.position)
    return _stopped(waits, was, said.reason, message, now)


def _displaced(record: Record, was: Record | None, key: Key, records: Mapping[Key, Record], now: float) -> Record:
    name = f"{'/'.join(key)} (priority {records[key].priority})"
    stopped = _stopped(record, was, ledger.INSUFFICIENT, f"it was stopped for {name}", now)
    return replace(stopped, displaced_by=name)


def _evicted(record: Record, was: Record | None, now: float) -> Record:
    why = record.pressure[1] if record.pressure else "memory was short"
    times = f" for the {_ordinal(record.evictions)} time" if record.evictions > 1 else ""
    message = f"it was stopped{times} because {why}; it comes back by itself once memory has been ample for a while"
    kept = was.verdict.message if was is not None and was.verdict.reason == EVICTED else message
    return _stopped(record, was, EVICTED, kept, now)


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{ending}"


def _stopped(record: Record, was: Record | None, reason: str, message: str, now: float) -> Record:
    """One that may not run now."""
    verdict = decide.verdict(was.verdict if was else None, Standing.WAIT, reason, message, now)
    drain_s = record.drain_s
    if record.evicted_at is not None:
        drain_s = EVICTED_DRAIN_S if drain_s is None else min(drain_s, EVICTED_DRAIN_S)
    return replace(record, verdict=verdict, spec_file=None, next_spec="", warning=None, drain_s=drain_s)


def evict(record: Record, why: str, now: float) -> Record:
    """The record of an engine that is stopped because memory is short."""
    chosen = replace(record, evicted_at=now, evictions=record.evictions + 1)
    message = f"it was stopped because {why}; it comes back by itself once memory has been ample for a while"
    return _stopped(chosen, record, EVICTED, message, now)
