"""Random naps where a busy machine may stop a thread: right after others can see what it did, right before it looks.

`METAL_DELAYS=SEED` with pytest has them in the tests and, by a file in the virtual environment, in all of its programs:
what goes right only by luck then goes wrong within minutes. Launchers and engines have none.
"""

from __future__ import annotations

import os
import queue
import random
import socket
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SEED = os.environ.get("METAL_DELAYS", "")
SHARE = 0.05
LONGEST_S = 0.04
"""Of all these calls, how many have a nap; and the longest, as most are much shorter."""
AFTER = (
    *((socket.socket, name) for name in ("send", "sendall", "sendto", "connect", "shutdown")),
    *((os, name) for name in ("kill", "rename", "replace", "unlink")),
    (threading.Event, "set"),
    (threading.Thread, "start"),
    (queue.Queue, "put"),
    (subprocess.Popen, "__init__"),
)
BEFORE = (
    *((socket.socket, name) for name in ("recv", "recv_into")),
    (threading.Event, "wait"),
    (threading.Thread, "run"),
    (queue.Queue, "get"),
)
HOOK = Path(sysconfig.get_path("purelib")) / "zz-delays.pth"
"""Python carries its line out whenever it starts in this environment."""


def install(seed: str) -> None:
    """Have this process take naps, of its own in each process."""
    drawn, sleep = random.Random(f"{seed} {os.getpid()}"), time.sleep

    def nap() -> None:
        if drawn.random() < SHARE:
            sleep(LONGEST_S * drawn.random() ** 2)

    def with_nap(owner: Any, name: str, first: bool) -> None:
        plain: Callable[..., Any] = getattr(owner, name)

        def napping(*args: Any, **kwargs: Any) -> Any:
            if first:
                nap()
                return plain(*args, **kwargs)
            try:
                return plain(*args, **kwargs)
            finally:
                nap()

        setattr(owner, name, napping)

    for owner, name in AFTER:
        with_nap(owner, name, first=False)
    for owner, name in BEFORE:
        with_nap(owner, name, first=True)


def line(seed: str) -> str:
    """The line of HOOK, which Python carries out at its start because it begins with an import."""
    code = f"__file__ = {str(Path(__file__))!r}; exec(open(__file__).read()); install({seed!r})"
    return f"import os; exec({code!r}, {{'__name__': 'delays'}})\n"


def begin() -> None:
    """Have all programs of this environment take naps, and this one; none if no seed is given."""
    end()  # of a run that was killed
    if SEED:
        HOOK.write_text(line(SEED), "utf-8")
        install(SEED)


def end() -> None:
    """Let programs that start from now on take none."""
    HOOK.unlink(missing_ok=True)
