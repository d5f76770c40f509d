"""Memory admission: the engines that were proposed are granted memory or queued, and so become records.

The ledger works on entries; this module turns proposals into entries, and the ledger's decisions into records. Each
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
| an on-demand engine that was to end unused | it again | keeps it                                                   |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Literal

from metal_supervisor.cluster.report import EVICTED, UNLOADED
from metal_supervisor.controller import on_demand, reconcile
from metal_supervisor.controller.on_demand import Yielding
from metal_supervisor.memory import ledger
from metal_supervisor.memory.ledger import Decision, Entry, Ledger
from metal_supervisor.memory.refusals import CHECK_FAILED, INSUFFICIENT, over_limit
from metal_supervisor.spec.record import UNDECIDED, EngineRun, Record, Reservation, Verdict
from metal_supervisor.spec.resources import rank_of
from metal_supervisor.spec.types import Key, Standing, shown_to

EVICTED_DRAIN_S = 20.0
"""How long an engine may finish what it answers while the machine is running out of memory."""
RUNS = Verdict(Standing.RUN, "Admitted", "", 0.0)


@dataclass(frozen=True)
class Up:
    """An engine process that is up."""

    edition: str
    """Edition of the spec that it was started from, "" while unknown."""
    asked: str
    """`Service.asked` of the request that this spec answers."""
    bytes: int
    """The larger of its reservation and its measured footprint."""


@dataclass(frozen=True)
class AdmissionRules:
    """This Mac's current budget and settings for admission."""

    budget_bytes: int
    mode: Literal["enforce", "warn"] = "enforce"
    """Treatment of engines of unknown size."""
    preemption: bool = False
    paused: str = ""
    """Reason why no engine that takes memory may start, "" if they may."""


def settle(
    proposals: Mapping[Key, Record],
    before: Mapping[Key, Record],
    ups: Mapping[Key, Up],
    rules: AdmissionRules,
    now: float,
    yielding: Mapping[Key, Yielding] = MappingProxyType({}),
) -> tuple[dict[Key, Record], Ledger]:
    """The records of this pass, and the ledger behind them.

    `before`: the records of the last pass. `ups`: the engines that are up, by the key of their record. `yielding`: the
    on-demand engines among them that give their memory to others.
    """
    entries: list[Entry] = []
    leaving_bytes = 0
    for key, proposal in proposals.items():
        found, left = _entries(proposal, before.get(key), ups.get(key), now)
        entries += [_yielding(each, yielding[key]) for each in found] if key in yielding else found
        leaving_bytes += left
    book = ledger.admit(rules.budget_bytes, entries, rules.mode, rules.preemption, leaving_bytes, rules.paused)
    displaced = {victim: key for key, said in book.decisions.items() for victim in said.displaces}
    result = {}
    for key, proposal in proposals.items():
        was, said = before.get(key), book.decisions.get(key)
        if proposal.verdict is not UNDECIDED:
            stays = was is not None and reconcile.leaves_as_it_is(proposal, proposal.verdict, was)
            result[key] = was if was is not None and stays else proposal
        elif proposal.evicted_at is not None:
            result[key] = _stopped(proposal, was, EVICTED, _why_evicted(proposal), now)
        elif key in displaced:
            result[key] = _displaced(proposal, was, displaced[key], proposals, key in yielding, now)
        elif said is None:
            result[key] = _kept(proposal, was, ups.get(key), now)
        elif said.admitted:
            result[key] = _admitted(proposal, was, said, now)
        elif was is not None and was.runs:
            result[key] = _as_it_was(proposal, was, said, key in ups, now)
        else:
            result[key] = _queued(proposal, was, said, now)
    return result, book


# ── proposals to entries ─────────────────────────────────────────────────────────────────────────


def _entries(proposal: Record, was: Record | None, up: Up | None, now: float) -> tuple[list[Entry], int]:
    """Ledger entries of a service, and the bytes that its stopping engine still holds."""
    held = up.bytes if up else 0
    if not proposal.asks:
        return [], held
    if proposal.evicted_at is not None:
        return [replace(_asking(proposal, proposal.queued_at, now), held_back=True)], held
    if was is not None and was.runs:
        has = max(was.reserved_bytes, held)
        keeps = _keeps(proposal, was)
        never_judged = keeps and not was.reserved_bytes  # no estimate was possible; it counts from now on
        no_more = proposal.reserved_bytes <= has and (keeps or proposal.reserved_bytes > 0)
        if never_judged or no_more:
            return [_having(proposal, up)], 0
        asking = _asking(proposal, was.edit_queued_at, now)
        # Optional when the larger spec only applies at the next start: it never blocks the queue. Nor does that of an
        # on-demand engine, which others may have unloaded before.
        engine = replace(was, priority=proposal.priority, protected=proposal.protected)  # these follow an edit at once
        return [_having(engine, up), replace(asking, holds_bytes=has, optional=keeps or proposal.idle_s is not None)], 0
    if up is None:
        return [_asking(proposal, proposal.queued_at, now)], 0
    ending = was is not None and was.verdict.reason == UNLOADED and not was.displaced_by
    if (was is None or ending) and proposal.is_run_by(
        up.edition, up.asked
    ):  # it is asked for again before it has ended
        return [_having(proposal, up)], 0
    if was is None or was.verdict.standing is not Standing.WAIT:
        gone = replace(_having(proposal, up), estimate_bytes=None, protected=True)
        return [gone, replace(_asking(proposal, proposal.queued_at, now), holds_bytes=held)], 0
    return [_asking(proposal, proposal.queued_at, now)], held


def _keeps(proposal: Record, was: Record) -> bool:
    """True if the engine of the last record is not to be restarted."""
    return proposal.is_run_by(was.edition or "", was.asked)


def _having(engine: Record, up: Up | None) -> Entry:
    return Entry(
        engine.key,
        rank_of(engine.priority),
        engine.reserved_bytes or None,
        waits=False,
        asked=engine.queued_at or 0.0,
        admitted=engine.admitted_at,
        measured_bytes=up.bytes if up else None,
        protected=engine.protected,
        on_demand=_gives_back(engine),
    )


def _gives_back(engine: Record) -> bool:
    """True if an engine gives its memory to others that wait, as those on demand do."""
    return engine.idle_s is not None and not engine.protected


def _yielding(entry: Entry, how: Yielding) -> Entry:
    if entry.waits:
        return entry
    return replace(entry, yields_before=how.before, busy=how.busy, used_at=how.used_at)


def _asking(proposal: Record, since: float | None, now: float) -> Entry:
    return Entry(
        proposal.key,
        rank_of(proposal.priority),
        proposal.reserved_bytes or None,
        waits=True,
        asked=_since(since, now),
        limit_bytes=proposal.limit_bytes,
        weights_bytes=proposal.mapped_bytes,
        unknown_why=proposal.memory,
        on_demand=_gives_back(proposal),
    )


def _since(at: float | None, now: float) -> float:
    """The time since which an engine has waited: now, if it has not, or if the clock was set back meanwhile."""
    return now if at is None else min(at, now)


# ── decisions to records ─────────────────────────────────────────────────────────────────────────


def _running(proposal: Record, was: Record | None, now: float, **changes: Any) -> Record:
    """Record of a service that runs."""
    verdict = reconcile.verdict(was.verdict if was else None, Standing.RUN, "Admitted", "", now)
    return replace(proposal, verdict=verdict, **changes)


def _kept(proposal: Record, was: Record | None, up: Up | None, now: float) -> Record:
    """Record of a service that keeps the memory it has."""
    over = over_limit(proposal.reserved_bytes, proposal.limit_bytes, proposal.mapped_bytes)
    if was is not None and was.queued_at is not None and not over and reconcile.leaves_as_it_is(proposal, RUNS, was):
        return was  # as nearly always; to make it anew takes ten times as long
    record = _running(proposal, was, now)
    if record.queued_at is None:  # its record was lost
        record = replace(record, queued_at=now, admitted_at=now)
    if up is not None and was is not None and _keeps(record, was):
        # The estimate at its start counts for as long as it lives, even if its file has changed since.
        record = replace(record, reserved_bytes=max(record.reserved_bytes, was.reserved_bytes))
    if record.warning is not None:
        return record
    over = over_limit(record.reserved_bytes, record.limit_bytes, record.mapped_bytes)
    if over:
        return replace(record, warning=(INSUFFICIENT, f"{over}; {reconcile.keeps(up is not None)}"))
    unknown = was is not None and was.warning and was.warning[0] == CHECK_FAILED and not record.reserved_bytes
    return replace(record, warning=was.warning) if unknown and was is not None else record


def _admitted(proposal: Record, was: Record | None, said: Decision, now: float) -> Record:
    queued_at = _since(proposal.queued_at, now)
    admitted_at = proposal.admitted_at if was is not None and _keeps(proposal, was) else now
    warning = (said.reason, said.message) if said.reason else proposal.warning
    return _running(proposal, was, now, queued_at=queued_at, admitted_at=admitted_at, displaced_by="", warning=warning)


def _as_it_was(proposal: Record, was: Record, said: Decision, up: bool, now: float) -> Record:
    """Record of a service whose edit is queued: its engine stays as it is, all else follows the edit at once."""
    since = _since(was.edit_queued_at, now)
    engine = {name: getattr(was, name) for name in OF_THE_ENGINE}
    if _keeps(proposal, was):  # only its next start would take more
        return _running(proposal, was, now, **engine, edit_queued_at=since)
    warning = said.reason, f"{said.message}; {reconcile.keeps(up)}"
    return replace(proposal, verdict=was.verdict, **engine, edit_queued_at=since, warning=warning)


OF_THE_ENGINE = (
    *(each.name for part in (EngineRun, Reservation) for each in fields(part)),
    "model",
    "runtime",
    "mode",
    "stopped_by_hand",
    "queued_at",
    "admitted_at",
)
"""Fields of a record that describe the running engine rather than the request."""


def _queued(proposal: Record, was: Record | None, said: Decision, now: float) -> Record:
    message = f"it was stopped for {proposal.displaced_by}; {said.message}" if proposal.displaced_by else said.message
    message += f"; this is a guess by the size of its file: {proposal.guessed}" if proposal.guessed else ""
    message += f"; {proposal.advice}" if proposal.advice else ""
    queued_at = _since(proposal.queued_at, now)
    waits = replace(proposal, queued_at=queued_at, queue_position=said.position)
    return _stopped(waits, was, said.reason, message, now)


def _displaced(
    proposal: Record, was: Record | None, key: Key, proposals: Mapping[Key, Record], yielding: bool, now: float
) -> Record:
    name = shown_to(proposal.namespace, key)
    if yielding:
        return on_demand.at_rest(replace(proposal, displaced_by=name), was, f"it made room for {name}", now)
    name += f" (priority {proposals[key].priority})"
    return _stopped(replace(proposal, displaced_by=name), was, INSUFFICIENT, f"it was stopped for {name}", now)


def _stopped(proposal: Record, was: Record | None, reason: str, message: str, now: float) -> Record:
    """Record of a service that must not run now."""
    verdict = reconcile.verdict(was.verdict if was else None, Standing.WAIT, reason, message, now)
    drain_s = proposal.drain_s
    if proposal.evicted_at is not None:
        drain_s = EVICTED_DRAIN_S if drain_s is None else min(drain_s, EVICTED_DRAIN_S)
    return replace(proposal, verdict=verdict, edition=None, warning=None, drain_s=drain_s)


def _why_evicted(proposal: Record) -> str:
    why = proposal.evicted_why
    return f"it was stopped because {why}; it comes back by itself once memory has been ample for a while"
