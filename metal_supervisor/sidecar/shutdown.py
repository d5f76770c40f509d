"""Shutdown of the whole system: wait for requests in flight, within a limit, then terminate all engines at once.

supervisord stops its programs one after another, and each may take its time; launchd kills supervisord after its own
limit, and then the engines would be left running without a supervisor.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping

from metal_supervisor import launch
from metal_supervisor.sidecar.probes import DRAIN_EVERY_S, Prober, ProbeTarget

TOKEN = "leaving"


def answers_ended(prober: Prober, targets: Mapping[str, ProbeTarget], within_s: float) -> bool:
    """Wait until no engine has requests in flight; False if that took longer than `within_s`."""
    until, waiting = time.monotonic() + within_s, dict(targets)
    while time.monotonic() < until:
        waiting = {name: each for name, each in waiting.items() if prober.busy(name, TOKEN, each) is not False}
        if not waiting:
            return True
        time.sleep(DRAIN_EVERY_S)
    return not waiting


def end(processes: Mapping[int, str]) -> None:
    """Send SIGTERM to these processes: pid -> launch.start_time, because a pid may have been reused meanwhile."""
    for pid, started in processes.items():
        if started and launch.start_time(pid) == started:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)
