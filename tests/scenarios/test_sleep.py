"""A Mac that sleeps while a request waits for a model on demand."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.faults import fault
from tests.support.gateway import with_gateway
from tests.support.system import eventually, halted, service

WITHIN_S = 1.0


@fault(
    "W21",
    "the Mac sleeps while a request waits for a model on demand",
    happens="once the Mac is awake its engine continues to load",
    sees="an answer, later, if its connection outlasts the sleep",
    bound="200",
)
def test_a_wake_goes_on_after_a_sleep(tmp_path: Path) -> None:
    demanded = service("tiny")
    demanded["metadata"]["annotations"] = {"metal-supervisor.io/on-demand": "true"}
    with with_gateway(tmp_path) as gateway, ThreadPoolExecutor() as clients:
        system = gateway.system
        system.apply(system.tiny_model(), demanded)
        eventually(lambda: system.condition("MetalReady").get("reason") == "Unloaded", 30, system.said())
        with halted(system.own_pid("sidecar")):  # nobody finds it ready
            asked = clients.submit(gateway.chat, "tiny", timeout_s=90)
            engine = eventually(system.pid, what="its engine to load")
            os.kill(engine, signal.SIGSTOP)
        with contextlib.ExitStack() as asleep:
            for name in ("controller", "sidecar", "gateway"):
                asleep.enter_context(halted(system.own_pid(name)))
            time.sleep(2)
        os.kill(engine, signal.SIGCONT)
        assert not asked.done()
        assert asked.result()[0] == 200
        eventually(system.slice_ready, WITHIN_S, "its endpoint to be back")
