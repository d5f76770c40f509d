"""The end of the whole system: running answers end by themselves, within a bound, and then all engines at once.

supervisord stops its programs one after another, and each may take its time; launchd kills what is still there
after its own limit, and then the models would be left without anybody.
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
    """Waits until no engine answers anybody any more; False if that took too long."""
    until, waiting = time.monotonic() + within_s, dict(targets)
    while time.monotonic() < until:
        waiting = {name: each for name, each in waiting.items() if prober.busy(name, TOKEN, each) is not False}
        if not waiting:
            return True
        time.sleep(DRAIN_EVERY_S)
    return not waiting


def end(processes: Mapping[int, str]) -> None:
    """Tells these processes to end: pid -> identity of its start, because a number may be given away meanwhile."""
    for pid, started in processes.items():
        if started and launch.start_time(pid) == started:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)
