"""Programs of the system itself: each runs once and is found by its note; the embedded API by its saved address."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from pathlib import Path
from typing import TextIO, TypeAlias

from metal_supervisor import launch
from metal_supervisor.spec.user_error import UserError
from metal_supervisor.state import gateway_note
from metal_supervisor.state.home import StateHome

OWN_PROGRAMS = ("apiserver", "controller", *gateway_note.PROGRAMS, "power", "sidecar")
OUTLIVING = ".outlives"
TERM_WAIT_S = 5.0
KILL_WAIT_S = 2.0
Noted: TypeAlias = tuple[str, int, str]
"""A process by its note: (program, pid, start identity)."""


class CannotBoot(UserError):
    """Something is in the way; the message says what to do."""


def saved_access(directory: StateHome) -> tuple[int, str]:
    """(port, path prefix) of the embedded API, as chosen at boot. Raises CannotBoot."""
    try:
        kept = json.loads((directory.path / "apiserver.json").read_text("utf-8"))
        port, prefix = int(kept["port"]), str(kept["prefix"])
        if not 0 < port < 1 << 16:
            raise ValueError(f"port {port}")
        return port, prefix
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CannotBoot(f"apiserver.json: {error!r:.100}; start the system with `metal-supervisor run`") from None


def run_holds(state: Path) -> bool:
    """True if a `metal-supervisor run` has this state directory: its system starts, runs or stops."""
    gone = FileNotFoundError, NotADirectoryError, ValueError
    with contextlib.suppress(*gone), (state / "run.lock").open() as lock:
        if not launch.start_time(int(lock.read())):
            return False  # without a try at the lock, which a run that starts at this moment would find taken
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def own(directory: StateHome, program: str) -> TextIO:
    """Make this process the only one of its program; the returned file must stay open as long as it lives.

    supervisord starts each program once, so another holder of the lock is an orphan of a killed supervisord, and is
    ended. Raises CannotBoot if it cannot be.
    """
    lock = (directory.path / "runs" / f"{program}.own").open("a+", encoding="utf-8")
    until = time.monotonic() + TERM_WAIT_S + KILL_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > until:
                raise CannotBoot(f"another {program} holds {lock.name} and cannot be ended") from None
            end_all(_holder(directory, program))
            time.sleep(0.05)
    lock.seek(0)
    lock.truncate()
    lock.write(json.dumps(_this_process(directory)))
    lock.flush()
    return lock


def outlive(directory: StateHome, program: str) -> None:
    """Note this process, which goes on when its supervisord is killed, for the system's stop to end."""
    outliving(directory)
    launch.write_note(str(directory.path / "runs" / f"{program}.{os.getpid()}{OUTLIVING}"), _this_process(directory))


def outliving(directory: StateHome) -> list[Noted]:
    """The live processes that `outlive` noted; forgets those that ended."""
    found = []
    for path in (directory.path / "runs").glob(f"*{OUTLIVING}"):
        if live := _noted(path.name.partition(".")[0], path):
            found += live
        else:
            path.unlink(missing_ok=True)
    return found


def _this_process(directory: StateHome) -> dict[str, object]:
    return {"format": launch.FORMAT, **launch.this_process(str(directory.path))}


def _noted(program: str, path: Path) -> list[Noted]:
    """The process of a note in `runs`, if it lives and belongs to this state directory."""
    found = launch.read_note(str(path))
    return [(program, int(str(found["pid"])), str(found["started"]))] if is_own(found, path.parent.parent) else []


def _holder(directory: StateHome, program: str) -> list[Noted]:
    return _noted(program, directory.path / "runs" / f"{program}.own")


def live(directory: StateHome) -> list[Noted]:
    """The live processes of our own programs that end with their supervisord."""
    return [holder for program in OWN_PROGRAMS for holder in _holder(directory, program)]


def left_over(directory: StateHome) -> list[Noted]:
    """The live processes of a system that outlived its supervisord: our own programs, and the engines."""
    notes = (directory.path / "runs").glob("*.json")
    engines = [each for path in notes for each in _noted(path.name.removesuffix(".json"), path)]
    return [*live(directory), *outliving(directory), *engines]


def is_alive(note: dict[str, object]) -> bool:
    """True if the process lives that a note with its `pid` and `started` is of."""
    pid, started = note.get("pid"), note.get("started")
    return isinstance(pid, int) and pid > 0 and bool(started) and launch.start_time(pid) == started


def is_own(note: dict[str, object], state: Path) -> bool:
    """True if the process of a note lives and belongs to this state directory, not to one that this is a copy of."""
    return is_alive(note) and launch.belongs_to(note, str(state))


def _alive(noted: list[Noted]) -> list[Noted]:
    return [(program, pid, started) for program, pid, started in noted if launch.start_time(pid) == started]


def end_all(doomed: list[Noted]) -> None:
    """TERM to all at once, a bounded wait, KILL to those that are left."""
    for signum, wait_s in ((signal.SIGTERM, TERM_WAIT_S), (signal.SIGKILL, KILL_WAIT_S)):
        doomed = _alive(doomed)
        for _, pid, _ in doomed:
            with contextlib.suppress(ProcessLookupError):  # it may end by itself at this very moment
                os.kill(pid, signum)
        until = time.monotonic() + wait_s
        while doomed and time.monotonic() < until:
            time.sleep(0.02)
            doomed = _alive(doomed)
