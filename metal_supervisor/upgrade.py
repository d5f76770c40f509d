"""An installation takes over a running system: its own programs start anew from here, and no engine notices.

Program sections name our code through `<state>/current/`, so pointing that here is all there is to an upgrade,
and to the downgrade after it. supervisord itself goes on; its own file is written anew at the next boot.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from metal_supervisor import __version__, boot
from metal_supervisor.boundary.state import StateDir
from metal_supervisor.boundary.supervisord import Supervisord, Unavailable
from metal_supervisor.core.types import LIVE, State

WAIT_S = 60.0


def upgrade(state: Path, say: Callable[[str], None]) -> int:
    """Takes over the system of a state directory; 1 if one of our programs does not come up again.

    Raises CannotBoot, Unavailable, Refused.
    """
    directory = StateDir(state)
    supervisord = Supervisord(directory.socket)
    if not supervisord.answers():
        raise boot.CannotBoot(f"no supervisord runs on {directory.path}; start it with: metal-supervisor run")
    directory.create()  # a release may know directories that the one before it did not
    boot.link_current(directory)
    failed = [program for program in boot.OWN_PROGRAMS if not _renewed(supervisord, program)]
    for program in failed:
        say(f"{program} does not come up; see {directory.log_path(program)}, or go back with the old installation")
    if not failed:
        say(f"{directory.path} goes on with {__version__}; the engines were not touched")
    return 1 if failed else 0


def _renewed(supervisord: Supervisord, program: str) -> bool:
    """Makes one of our programs start anew; False if it does not stay up."""
    before = supervisord.table().get(program)
    if before is None:
        return True  # the embedded API, where there is a cluster
    if before.state in LIVE:
        supervisord.signal(program, "TERM")  # it is started again, even if we end right here
    else:
        supervisord.stop(program)  # one that waits after a failure waits no longer
        supervisord.start(program)
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        with contextlib.suppress(Unavailable):  # it may be slow for a moment
            now = supervisord.table().get(program)
            if now is not None and now.state is State.RUNNING and now.pid != before.pid:
                return True
        time.sleep(0.05)
    return False
