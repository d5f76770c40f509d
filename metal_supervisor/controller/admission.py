"""Memory admission: grant or queue the engines that were decided on as if memory were unlimited.

The ledger works on entries; this module turns records into entries, and the ledger's decisions back into records. Each
service is judged by two values: the memory it has, and the memory it wants.

| it has                         | it wants           | result                                                        |
| ------------------------------ | ------------------ | ------------------------------------------------------------- |
| none                           | some               | queued                                                        |
| memory, by its record          | no more            | keeps it                                                      |
| memory, by its record          | more (an edit)     | keeps it and asks for more; if refused, it stays unchanged    |
| an engine, its record lost     | that same engine   | keeps it                                                      |
| an engine that is stopping     | another in its place | waits for the memory that the old engine does not free      |
| an evicted or displaced engine | some               | waits; the engine's memory is free only after it has exited   |
| an engine                      | none               | as above                                                      |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from metal_supervisor.cluster.report import EVICTED
from metal_supervisor.controller import reconcile
from metal_supervisor.memory import ledger
from metal_supervisor.memory.ledger import INSUFFICIENT, Decision, Entry, Ledger, LedgerPhase, Pool
from metal_supervisor.spec.limits import Amount, limit_of
from metal_supervisor.spec.resources import rank_of
from metal_supervisor.spec.sizes import amount
from metal_supervisor.spec.types import Key, Record, Standing

EVICTED_DRAIN_S = 20.0
"""How long an engine may finish what it answers while the machine is running out of memory."""
KEEPS = "the engine keeps running as it last could"


@dataclass(frozen=True)
class Up:
    """An engine process that is up."""

    spec_file: str
    """Spec it was started from, "" while unknown."""
    bytes: int
    """The larger of its reservation and its measured footprint."""


@dataclass(frozen=True)
class AdmissionRules:
    """This Mac's current budget, settings and limits for admission."""

    budget_bytes: int
    mode: Literal["enforce", "warn"] = "enforce"
    """Treatment of engines of unknown size."""
    preemption: bool = False
    paused: str = ""
    """Reason why no engine that takes memory may start, "" if they may."""
    limits: Mapping[str, Amount] = field(default_factory=dict)
    """Memory limit by namespace; `*` for all others."""


def settle(
    decided: Mapping[Key, Record],
    before: Mapping[Key, Record],
    ups: Mapping[Key, Up],
    rules: AdmissionRules,
    now: float,
) -> tuple[dict[Key, Record], Ledger]:
    """Records after admission, and the ledger behind them.

    `before`: the records of the last pass. `ups`: the engines that are up, by the key of their record.
    """
    entries: list[Entry] = []
    leaving: Counter[str] = Counter()
    for key, record in decided.items():
        found, left = _entries(record, before.get(key), ups.get(key), now)
        entries += found
        leaving[record.namespace] += left
    pools = _pools(rules, leaving)
    book = ledger.admit(
        rules.budget_bytes, entries, rules.mode, rules.preemption, leaving.total(), rules.paused, pools
    )
    displaced = {victim: key for key, said in book.decisions.items() for victim in said.displaces}
    result = {}
    for key, record in decided.items():
        was, said = before.get(key), book.decisions.get(key)
        if not record.runs:
            result[key] = record
        elif record.evicted_at is not None:
            result[key] = _stopped(record, was, EVICTED, _why_evicted(record), now)
        elif key in displaced:
            result[key] = _displaced(record, was, displaced[key], decided, now)
        elif said is None:
            result[key] = _within(_kept(record, was, ups.get(key), now), book, pools)
        elif said.admitted:
            result[key] = _admitted(record, was, said, now)
        elif was is not None and was.runs:
            result[key] = _as_it_was(record, was, said, now)
        else:
            result[key] = _queued(record, was, said, now)
    return result, book


def _pools(rules: AdmissionRules, leaving: Mapping[str, int]) -> dict[str, Pool]:
    """The limits of the namespaces that have engines here; shared daemons belong to none."""
    found = {name: limit_of(rules.limits, name) for name in leaving if name}
    return {name: Pool(each.of(rules.budget_bytes), leaving[name]) for name, each in found.items() if each is not None}


def _within(record: Record, book: Ledger, pools: Mapping[str, Pool]) -> Record:
    """Record of an admitted engine, with a warning if its namespace exceeds a limit that was set later."""
    pool = pools.get(record.namespace)
    if pool is None or record.warning is not None or book.charged[record.namespace] <= pool.limit_bytes:
        return record
    taken, limit = amount(book.charged[record.namespace], "up"), amount(pool.limit_bytes, "down")
    text = f"the models of namespace {record.namespace} take {taken}, and may take {limit} (--namespace-memory)"
    return replace(record, warning=(INSUFFICIENT, f"{text}; {KEEPS}"))


# ── records to entries ───────────────────────────────────────────────────────────────────────────


def _entries(record: Record, was: Record | None, up: Up | None, now: float) -> tuple[list[Entry], int]:
    """Ledger entries of a service, and the bytes that its stopping engine still holds."""
    held = up.bytes if up else 0
    if not record.runs:
        return [], held
    if record.evicted_at is not None:
        return [replace(_asking(record, record.queued_at, now), held_back=True)], held
    if was is not None and was.runs:
        has = max(was.room_bytes, held)
        keeps = was.spec_file == record.spec_file
        never_judged = keeps and not was.room_bytes  # by a release without accounting; it counts from now on
        no_more = record.room_bytes <= has and (keeps or record.room_bytes > 0)
        if never_judged or no_more:
            return [_having(record, up)], 0
        asking = _asking(record, was.edit_queued_at, now)
        # Optional when the larger spec only applies at the next start: it never blocks the queue.
        return [_having(was, up), replace(asking, holds_bytes=has, optional=keeps)], 0
    if up is None:
        return [_asking(record, record.queued_at, now)], 0
    if was is None and up.spec_file == record.spec_file:
        return [_having(record, up)], 0
    if was is None or was.verdict.standing is not Standing.WAIT:
        ending = replace(_having(record, up), estimate_bytes=None, protected=True)
        return [ending, replace(_asking(record, record.queued_at, now), holds_bytes=held)], 0
    return [_asking(record, record.queued_at, now)], held


def _having(record: Record, up: Up | None) -> Entry:
    return Entry(
        record.key,
        rank_of(record.priority),
        record.room_bytes or None,
        LedgerPhase.RUNNING if up else LedgerPhase.STARTING,
        asked=record.queued_at or 0.0,
        admitted=record.admitted_at,
        measured_bytes=up.bytes if up else None,
        protected=record.protected,
    )


def _asking(record: Record, since: float | None, now: float) -> Entry:
    return Entry(
        record.key,
        rank_of(record.priority),
        record.room_bytes or None,
        LedgerPhase.WAITING,
        asked=now if since is None else since,
        limit_bytes=record.limit_bytes,
        weights_bytes=record.mapped_bytes,
        unknown_why=record.memory,
    )


# ── decisions to records ─────────────────────────────────────────────────────────────────────────


def _kept(record: Record, was: Record | None, up: Up | None, now: float) -> Record:
    """Record of a service that keeps the memory it has."""
    if record.queued_at is None:  # its record was lost, or is of a release without accounting
        record = replace(record, queued_at=now, admitted_at=now)
    if up is not None and was is not None and was.spec_file == record.spec_file:
        # The estimate at its start counts for as long as it lives, even if its file has changed since.
        record = replace(record, reserved_bytes=max(record.reserved_bytes, was.reserved_bytes))
    if record.warning is not None:
        return record
    over = ledger.over_limit(record.reserved_bytes, record.limit_bytes, record.mapped_bytes)
    if over:
        return replace(record, warning=(INSUFFICIENT, f"{over}; {KEEPS}"))
    unknown = was is not None and was.warning and was.warning[0] == ledger.CHECK_FAILED and not record.reserved_bytes
    return replace(record, warning=was.warning) if unknown and was is not None else record


def _admitted(record: Record, was: Record | None, said: Decision, now: float) -> Record:
    queued_at = now if record.queued_at is None else record.queued_at
    admitted_at = record.admitted_at if was is not None and was.spec_file == record.spec_file else now
    warning = (said.reason, said.message) if said.reason else record.warning
    return replace(record, queued_at=queued_at, admitted_at=admitted_at, displaced_by="", warning=warning)


def _as_it_was(record: Record, was: Record, said: Decision, now: float) -> Record:
    """Record of a service whose edit is queued: the engine's fields stay, all others follow the edit at once."""
    since = now if was.edit_queued_at is None else was.edit_queued_at
    if was.spec_file == record.spec_file:  # only its next spec takes more
        return replace(record, next_spec="", next_bytes=0, edit_queued_at=since)
    return replace(
        record,
        **{name: getattr(was, name) for name in OF_THE_ENGINE},
        edit_queued_at=since,
        warning=(said.reason, f"{said.message}; {KEEPS}"),
    )


OF_THE_ENGINE = (
    "model", "runtime", "mode", "port", "host", "spec_file", "next_spec", "next_bytes", "asked", "probe", "files",
    "stopped_by_hand", "reserved_bytes", "mapped_bytes", "memory", "guessed", "queued_at", "admitted_at", "verdict",
)  # fmt: skip
"""Fields of a record that describe the running engine rather than the request."""


def _queued(record: Record, was: Record | None, said: Decision, now: float) -> Record:
    message = f"it was stopped for {record.displaced_by}; {said.message}" if record.displaced_by else said.message
    message += f"; this is a guess by the size of its file: {record.guessed}" if record.guessed else ""
    queued_at = now if record.queued_at is None else record.queued_at
    waits = replace(record, queued_at=queued_at, queue_position=said.position)
    return _stopped(waits, was, said.reason, message, now)


def _displaced(record: Record, was: Record | None, key: Key, records: Mapping[Key, Record], now: float) -> Record:
    name = f"{'/'.join(key)} (priority {records[key].priority})"
    return _stopped(replace(record, displaced_by=name), was, INSUFFICIENT, f"it was stopped for {name}", now)


def _stopped(record: Record, was: Record | None, reason: str, message: str, now: float) -> Record:
    """Record of a service that must not run now."""
    verdict = reconcile.verdict(was.verdict if was else None, Standing.WAIT, reason, message, now)
    drain_s = record.drain_s
    if record.evicted_at is not None:
        drain_s = EVICTED_DRAIN_S if drain_s is None else min(drain_s, EVICTED_DRAIN_S)
    return replace(record, verdict=verdict, spec_file=None, next_spec="", next_bytes=0, warning=None, drain_s=drain_s)


def evict(record: Record, why: str, now: float) -> Record:
    """Record of an engine evicted under memory pressure."""
    chosen = replace(record, evicted_at=now, evictions=record.evictions + 1, evicted_why=why)
    return _stopped(chosen, record, EVICTED, _why_evicted(chosen), now)


def _why_evicted(record: Record) -> str:
    why = record.evicted_why
    return f"it was stopped because {why}; it comes back by itself once memory has been ample for a while"
