"""An installation takes over a running system: its own programs start anew from here, and no engine notices.

Program sections name our code through `<state>/current/`, so pointing that here is all there is to an upgrade,
and to the downgrade after it. supervisord itself goes on: of its own file, written anew, it takes over the programs of
ours that came, went or changed, and what is said about itself at its next boot.
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
    """Takes over the system of a state directory; 1 if not all of it came to be as the files say.

    Raises CannotBoot, Unavailable, Refused.
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
    """Has supervisord run what its file now says of our own programs; models are the controller's.

    Returns those that it has just started.
    """
    try:
        diff = supervisord.reload()
    except BrokenFile as error:  # the controller puts such a file aside, and the next upgrade goes on
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
    """Waits until a program that was told to stop has no process."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        if not _lives(supervisord, program):
            return
        time.sleep(0.05)


def _renewed(supervisord: Supervisord, program: str, fresh: bool) -> bool:
    """Makes one of our programs start anew, unless it is fresh; False if it does not stay up."""
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
    """Waits until a program runs, in another process than before."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        with contextlib.suppress(Unavailable):  # it may be slow for a moment
            now = supervisord.table().get(program)
            if now is not None and now.state is State.RUNNING and now.pid != former_pid:
                return True
        time.sleep(0.05)
    return False
