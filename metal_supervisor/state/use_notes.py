"""Notes of the gateway's workers about the use of on-demand services: who waits, what is under way, and since when.

Each worker has a file of its own, because one that retired still finishes its requests beside the next. The controller
reads all of them; those of workers that ended count no more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from metal_supervisor import launch
from metal_supervisor.spec.document import UnreadableRecord, mapping
from metal_supervisor.spec.processes import UNUSED, EngineUse
from metal_supervisor.spec.withdrawal import NO_WITHDRAWAL
from metal_supervisor.state.kept_files import write_atomic
from metal_supervisor.state.own_processes import is_alive
from metal_supervisor.state.programs import built
from metal_supervisor.state.reports import read_object

FOLDER = "use"
FORMAT = 1


def _path(state: Path, pid: int) -> Path:
    return state / FOLDER / f"{pid}.json"


def write(state: Path, uses: Mapping[str, EngineUse]) -> bool:
    """Write this process's note, by program; False if it cannot be written, as on a full disk.

    Without a sync: it counts only as long as the process lives.
    """
    own = os.getpid()
    body = {"format": FORMAT, "pid": own, "started": launch.start_time(own)}
    body["programs"] = {name: asdict(use) for name, use in uses.items()}
    path = _path(state, own)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomic(path, json.dumps(body) + "\n", durable=False)
    except OSError:
        return False
    return True


def remove(state: Path) -> None:
    """Remove this process's note."""
    _path(state, os.getpid()).unlink(missing_ok=True)


def read(state: Path) -> dict[str, EngineUse]:
    """The uses by program, of all workers that live; the notes of others are removed."""
    notes = _live(state)
    names = {name for note in notes for name in note}
    return {name: _together([note.get(name, UNUSED) for note in notes]) for name in names}


def _together(uses: Sequence[EngineUse]) -> EngineUse:
    """The uses by several workers as one. One that has not seen a withdrawal may still send to the engine."""
    tokens = {use.withdrawn for use in uses}
    return EngineUse(
        sum(use.waiting for use in uses),
        sum(use.in_flight for use in uses),
        max(use.used_at for use in uses),
        tokens.pop() if len(tokens) == 1 else NO_WITHDRAWAL,
    )


def _live(state: Path) -> list[dict[str, EngineUse]]:
    live = []
    for path in (state / FOLDER).glob("*.json"):
        note = read_object(path)
        if is_alive(note):
            told = mapping(note, "programs").items()
            live.append({name: use for name, each in told if (use := _use(each)) is not None})
        elif note or not (path.stem.isdecimal() and launch.start_time(int(path.stem))):  # else it is read again later
            path.unlink(missing_ok=True)
    return live


def _use(told: object) -> EngineUse | None:
    """A use as it is on file, None if it is damaged."""
    try:
        return built(EngineUse, told, "use") if isinstance(told, dict) else None
    except UnreadableRecord:
        return None
