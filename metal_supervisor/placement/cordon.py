"""`metal-supervisor cordon | uncordon | drain`: keep new models off one Mac of several, or move all of them away.

The whole state is one word in a file of the state directory: while it is there the controller takes nothing
new, and the node Lease tells the peers. A drained Mac keeps serving each model until a peer serves it, and
then finishes its requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from metal_supervisor.spec.user_error import NOT_RUNNING
from metal_supervisor.state.directory import CORDON_FILE, StateDir
from metal_supervisor.state.doorbell import ring
from metal_supervisor.state.kept_files import write_atomic
from metal_supervisor.supervisord.client import Supervisord

LOOK_EVERY_S = 0.2
TELL_EVERY_S = 30.0


def _write(directory: StateDir, word: str) -> None:
    path = directory.path / CORDON_FILE
    if word:
        write_atomic(path, word + "\n")
    else:
        path.unlink(missing_ok=True)
    for name in ("controller", "sidecar"):
        ring(directory.path, name)


def say(directory: StateDir, cordoned: bool, out: Callable[[str], None]) -> None:
    """Cordon or uncordon this Mac."""
    _write(directory, "cordon" if cordoned else "")
    out("cordoned: it keeps what it runs and takes nothing new" if cordoned else "uncordoned: it takes part again")


def _here(directory: StateDir) -> frozenset[str]:
    """The programs that have a record; one that cannot be read may be of an engine that runs."""
    readable, unreadable = directory.records()
    return frozenset(readable) | frozenset(unreadable)


def drain(directory: StateDir, timeout_s: float, out: Callable[[str], None]) -> int:
    """Cordon this Mac and wait until its peers have taken over.

    Returns the exit code: 0 once nothing is left, 1 after the timeout, 3 if no system runs that could hand over.
    """
    _write(directory, "drain")
    if not Supervisord(directory.socket).answers():
        out("nothing runs here that could be handed over: other Macs take over by themselves what this one has left")
        out("it stays drained when it is started; `metal-supervisor uncordon` lets it take part again")
        return NOT_RUNNING
    until = time.monotonic() + timeout_s
    known, told_at = _here(directory), time.monotonic()
    out(f"draining: {', '.join(sorted(known)) or 'nothing runs here'}")
    while True:
        left = _here(directory)
        for program in sorted(known - left):
            out(f"{program} has moved")
        known = left
        if not left:
            out("drained; `metal-supervisor uncordon` lets it take part again")
            return 0
        if time.monotonic() > until:
            out(f"still here: {', '.join(sorted(left))}; no other Mac has taken it over, and it keeps serving")
            return 1
        if time.monotonic() - told_at > TELL_EVERY_S:
            told_at = time.monotonic()
            out(f"waiting for {', '.join(sorted(left))}")
        time.sleep(LOOK_EVERY_S)
