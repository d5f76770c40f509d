"""`metal-supervisor cordon | uncordon | drain`: one Mac out of several is to be left alone, or emptied.

A word in the state directory is all there is: the controller takes nothing new while it is there, and the
node Lease tells the peers. A drained Mac goes on serving each model until a peer serves it, and finishes
what it answers then.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from metal_supervisor.state.directory import CORDON_FILE, StateDir, write_atomic
from metal_supervisor.state.doorbell import ring

LOOK_EVERY_S, TELL_EVERY_S = 0.2, 30.0


def _write(directory: StateDir, word: str) -> None:
    path = directory.path / CORDON_FILE
    if word:
        write_atomic(path, word + "\n")
    else:
        path.unlink(missing_ok=True)
    for name in ("controller", "sidecar"):
        ring(directory.path, name)


def say(directory: StateDir, cordoned: bool, out: Callable[[str], None]) -> None:
    """Cordons or uncordons this Mac."""
    _write(directory, "cordon" if cordoned else "")
    out("cordoned: it keeps what it runs and takes nothing new" if cordoned else "uncordoned: it takes part again")


def drain(directory: StateDir, timeout_s: float, out: Callable[[str], None]) -> int:
    """Hands everything over; returns 0 once nothing is left here, 1 if something still is after the time."""
    _write(directory, "drain")
    until = time.monotonic() + timeout_s
    known, told_at = frozenset(directory.records()[0]), time.monotonic()
    out(f"draining: {', '.join(sorted(known)) or 'nothing runs here'}")
    while left := frozenset(directory.records()[0]):
        for program in sorted(known - left):
            out(f"{program} has moved")
        known = left
        if time.monotonic() > until:
            out(f"still here: {', '.join(sorted(left))}; no other Mac has taken it over, and it keeps serving")
            return 1
        if time.monotonic() - told_at > TELL_EVERY_S:
            told_at = time.monotonic()
            out(f"waiting for {', '.join(sorted(left))}")
        time.sleep(LOOK_EVERY_S)
    for program in sorted(known):
        out(f"{program} has moved")
    out("drained; `metal-supervisor uncordon` lets it take part again")
    return 0
