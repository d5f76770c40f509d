"""The gateway's note in the state directory: where it listens and what is wrong with it, for `status`."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from metal_supervisor.spec.document import Json, items
from metal_supervisor.state.kept_files import write_atomic
from metal_supervisor.state.reports import read_object

FILE = "gateway.json"
FORMAT = 1
WORKERS = ("gateway", "gateway-2")
"""Programs of the gateway's workers: one serves; the other stands by, or finishes its answers."""
PROGRAMS = (*WORKERS, "gateway-holder")


def write(state: Path, note: Json) -> None:
    """Write the note, without a sync: it is made anew with every start."""
    with contextlib.suppress(OSError):  # a full disk
        write_atomic(state / FILE, json.dumps({"format": FORMAT, **note}) + "\n", durable=False)


def read(state: Path) -> Json:
    """The note, {} if there is none that can be read."""
    return read_object(state / FILE)


def taken(note: Json) -> frozenset[int]:
    """Ports, by the note, at which the gateway cannot listen for on-demand services: other programs have them."""
    return frozenset(each for each in items(note, "taken") if isinstance(each, int))


def closed(note: Json) -> bool:
    """True if the gateway, by its note, cannot listen at its address for all models: another program may there."""
    return note.get("closed") is True
