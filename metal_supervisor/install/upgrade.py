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
from metal_supervisor.controller.confinement_policies import complete_specs
from metal_supervisor.settings import loader
from metal_supervisor.spec.types import LIVE, State
from metal_supervisor.state.directory import StateDir
from metal_supervisor.supervisord.client import BrokenFile, Supervisord, Unavailable

WAIT_S = 60.0


def upgrade(state: Path, say: Callable[[str], None]) -> int:
    """Take over the system of a state directory. Returns the exit code.

    It is 1 if one of our programs does not come up, or the settings on file are wrong. Raises CannotBoot, Unavailable,
    Refused.
    """
    directory = StateDir(state)
    supervisord = Supervisord(directory.socket)
    if not supervisord.answers():
        raise boot.CannotBoot(f"no supervisord runs on {directory.path}; start it with: metal-supervisor run")
    directory.create()  # a release may know directories that the one before it did not
    settings, problem = loader.load_good(directory.path)
    complete_specs(directory, settings.confinement)
    boot.link_current(directory)
    if settings.embedded and not _lives(supervisord, "apiserver"):
        boot.embedded_access(directory)  # it may be new here; one that lives keeps its port
    boot.write_conf(directory, settings)
    fresh = _take_over(supervisord, say)
    failed = [program for program in boot.OWN_PROGRAMS if not _renewed(supervisord, program, program in fresh)]
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

    Returns the programs that it has just started.
    """
    try:
        diff = supervisord.reload()
    except BrokenFile as error:  # the controller puts such a file aside, and the next upgrade can proceed
        say(f"programs that are new in this release have to wait: {error}")
        return frozenset()
    ours = frozenset((*boot.OWN_PROGRAMS, *boot.OPTIONAL_PROGRAMS))
    for program in sorted((diff.removed | diff.changed) & ours):
        supervisord.stop(program)
        _ended(supervisord, program)
        if program in diff.changed:
            supervisord.replace(program)
        else:
            supervisord.remove(program)
    if new := sorted(diff.added & ours):
        supervisord.add(*new)
    return (diff.added | diff.changed) & ours


def _ended(supervisord: Supervisord, program: str) -> None:
    """Wait until a program that is stopping has no process."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        if not _lives(supervisord, program):
            return
        time.sleep(0.05)


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


def _comes_up(supervisord: Supervisord, program: str, former_pid: int) -> bool:
    """Wait until a program runs, in another process than before."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        with contextlib.suppress(Unavailable):  # it may be slow for a moment
            now = supervisord.table().get(program)
            if now is not None and now.state is State.RUNNING and now.pid != former_pid:
                return True
        time.sleep(0.05)
    return False
