"""Starts in turns: only so many engines load at a time, so that the first ones serve while the last ones wait.

What supervisord starts by itself, at a boot or after a crash, takes places but waits for none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from metal_supervisor.controller.plan import Action, Step
from metal_supervisor.controller.snapshot import Snapshot
from metal_supervisor.spec.processes import LIVE, UNUSED, Observed, ProgramState
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.resources import rank_of
from metal_supervisor.spec.types import Json

LOADS_S = 60.0
"""An engine that loads for longer keeps no other one waiting: it may never become ready."""
AGAIN_S = 1.0
"""Pause before another look; an engine that becomes ready wakes the controller before."""
AT_LEAST = 4


def most_at_once(chosen: int, cores: int | None) -> int:
    """Engines that may load at a time: as chosen, and for 0 half of the cores, with which a chip's bandwidth grows."""
    return chosen or max(AT_LEAST, (cores or 0) // 2)


def paced(steps: Sequence[Step], records: Collection[Record], snapshot: Snapshot, most: int) -> list[Step]:
    """The steps, but starts that would make more than `most` engines load wait: by priority, then by `_since`.

    An engine that a client waits for starts in any case.
    """
    starts = {step.program for step in steps if step.do in (Action.ADD, Action.START)}
    if not starts:
        return list(steps)
    table, observed = snapshot.table, snapshot.observed
    loading = sum(_loads(table.get(each.program), observed.get(each.program), snapshot.now) for each in records)
    asked = {program for program in starts if snapshot.uses.get(program, UNUSED).waiting}
    queue = sorted(
        (each for each in records if each.program in starts - asked),
        key=lambda each: (-rank_of(each.priority), _since(each, table.get(each.program)), each.program),
    )
    late = {each.program for each in queue[max(0, most - loading - len(asked)) :]}
    why = f"its turn to start: {most} engines load at a time"
    wait: Json = {"do": Action.WAIT, "why": why, "again_in_s": AGAIN_S}
    return [replace(step, **wait) if step.program in late else step for step in steps]


def _since(record: Record, state: ProgramState | None) -> float:
    """Unix time since which an engine has waited for its start: one that crashes again and again goes to the end."""
    return max(record.admitted_at, state.stop if state is not None else 0.0)


def _loads(state: ProgramState | None, seen: Observed | None, now: float) -> bool:
    if state is None or state.state not in LIVE or (seen is not None and seen.served):
        return False
    return 0 <= now - state.start < LOADS_S
