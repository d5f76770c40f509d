"""`metal-supervisor upgrade`: an installation takes over a running system, without interrupting engines.

Program sections name our code through `<state>/current/`, so pointing that here and restarting our own programs is all
there is to an upgrade, and to a downgrade. supervisord itself keeps running: from its rewritten file it takes over
our own programs that were added, removed or changed at once, and its own settings at its next boot.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from metal_supervisor import __version__
from metal_supervisor.controller import boot
from metal_supervisor.controller.prerequisites.confinement_policies import require_policies
from metal_supervisor.settings import loader
from metal_supervisor.spec.document import mapping
from metal_supervisor.spec.processes import LIVE, State
from metal_supervisor.spec.user_error import NOT_RUNNING
from metal_supervisor.state import gateway_note, own_processes
from metal_supervisor.state.directory import StateDir
from metal_supervisor.supervisord.client import BrokenFile, Supervisord, Unavailable

WAIT_S = 60.0
LISTED_TRIES = 5


def upgrade(state: Path, say: Callable[[str], None]) -> int:
    """Take over the system of a state directory. Returns the exit code.

    It is 1 if one of our programs does not come up, or the settings on file are wrong, and 3 if nothing runs. Raises
    Unavailable, Refused.
    """
    directory = StateDir(state)
    supervisord = Supervisord(directory.socket)
    if not supervisord.answers():
        say(f"no supervisord runs on {directory.path}; start it with: {loader.start_command(directory.path)}")
        return NOT_RUNNING
    directory.create()  # this build may know directories that the one before it did not
    settings, problem = loader.load_good(directory.path)
    require_policies(directory, settings.confinement)
    boot.link_current(directory)
    if settings.embedded and not _lives(supervisord, "apiserver"):
        boot.embedded_access(directory)  # it may be new here; one that lives keeps its port
    boot.write_conf(directory, settings)
    fresh = _take_over(supervisord, say)
    own = [program for program in own_processes.OWN_PROGRAMS if program not in gateway_note.WORKERS]
    failed = [program for program in own if not _renewed(supervisord, program, program in fresh)]
    if not fresh & frozenset(gateway_note.WORKERS) and not _succeeded(supervisord, directory, say):
        failed.append(gateway_note.WORKERS[0])
    for program in failed:
        say(f"{program} does not come up; see {directory.log_path(program)}, or go back with the old installation")
    if not failed:
        say(f"{directory.path} goes on with {__version__}; the engines were not touched")
    if problem:
        say(f"it goes on with the last settings that were right; those on file are wrong: {problem}")
    return 1 if failed or problem else 0


def _lives(supervisord: Supervisord, program: str) -> bool:
    row = supervisord.table().get(program)
    return row is not None and row.state in LIVE


def _take_over(supervisord: Supervisord, say: Callable[[str], None]) -> frozenset[str]:
    """Have supervisord run our own programs as its file now lists them; engines are left to the controller.

    Returns the programs that it has just started. The gateway's workers are left to `_succeeded`: one may be serving.
    """
    try:
        diff = supervisord.reload()
    except BrokenFile as error:  # the controller puts such a file aside, and the next upgrade can proceed
        say(f"programs that are new in this release have to wait: {error}")
        return frozenset()
    ours = frozenset((*own_processes.OWN_PROGRAMS, *boot.OPTIONAL_PROGRAMS))
    changed = diff.changed - frozenset(gateway_note.WORKERS)
    for program in sorted((diff.removed | changed) & ours):
        supervisord.stop(program)
        _ended(supervisord, program)
        if program in changed:
            supervisord.replace(program)
        else:
            supervisord.remove(program)
    if new := sorted(diff.added & ours):
        supervisord.add(*new)
    return (diff.added | changed) & ours


def _ended(supervisord: Supervisord, program: str) -> None:
    """Wait until a program that is stopping has no process."""
    waited(lambda: not _lives(supervisord, program), WAIT_S)


def _renewed(supervisord: Supervisord, program: str, fresh: bool) -> bool:
    """Restart one of our own programs, unless it is fresh; False if it does not stay up."""
    before = supervisord.table().get(program)
    if before is None:
        return True  # not asked for by the settings, as the embedded API where there is a cluster
    if fresh:  # a TERM so soon after a start may be lost
        return _comes_up(supervisord, program, 0)
    if before.state in LIVE:
        supervisord.signal(program, "TERM")  # it is started again, even if we end right here
    else:
        supervisord.stop(program)  # one that waits after a failure waits no longer
        supervisord.start(program)
    return _comes_up(supervisord, program, before.pid)


def _as_on_file(supervisord: Supervisord, program: str) -> None:
    """Have supervisord list a program that does not run as its file now has it.

    The controller's own reading of what concerns the engines may come between, after which there is no such program.
    """
    for _ in range(LISTED_TRIES):
        try:
            supervisord.reload()
        except BrokenFile:
            return
        supervisord.replace(program)
        if program in supervisord.table():
            return


def _succeeded(supervisord: Supervisord, directory: StateDir, say: Callable[[str], None]) -> bool:
    """Start the worker of the gateway that stands by; the one that serves then finishes its answers and ends.

    False if the new one does not come to serve; then the other goes on. While the one before is still finishing, there
    is no place for another: True, after a wait, with advice.
    """
    if gateway_note.WORKERS[0] not in supervisord.table():
        return True  # the gateway is off
    until = time.monotonic() + WAIT_S
    while len(live := [each for each in gateway_note.WORKERS if _lives(supervisord, each)]) > 1:
        if time.monotonic() > until:
            say(f"the gateway stays with the release before: a worker still finishes answers ({', '.join(live)})")
            say("run `metal-supervisor upgrade` again once it has ended")
            return True
        time.sleep(0.1)
    successor = next(each for each in gateway_note.WORKERS if each not in live)
    _as_on_file(supervisord, successor)
    supervisord.start(successor)
    if not live:
        return _comes_up(supervisord, successor, 0)
    while time.monotonic() < until:
        with contextlib.suppress(Unavailable):
            row = supervisord.table().get(successor)
            note = gateway_note.read(directory.path)
            after = mapping(note, "next")
            if row is not None and row.pid and note.get("pid") == row.pid:
                return not note.get("problem")
            if row is not None and row.pid and after.get("pid") == row.pid:
                say(f"the next worker of the gateway cannot serve: {after.get('problem')}")
                return False
        time.sleep(0.05)
    return False


def _comes_up(supervisord: Supervisord, program: str, former_pid: int) -> bool:
    """Wait until a program runs, in another process than before."""

    def is_up() -> bool:
        now = supervisord.table().get(program)
        return now is not None and now.state is State.RUNNING and now.pid != former_pid

    return waited(is_up, WAIT_S)


def waited(reached: Callable[[], bool], wait_s: float) -> bool:
    """Wait until a state is reached; False if it is not in time."""
    until = time.monotonic() + wait_s
    while time.monotonic() < until:
        with contextlib.suppress(Unavailable):  # it may be slow for a moment
            if reached():
                return True
        time.sleep(0.05)
    return False
