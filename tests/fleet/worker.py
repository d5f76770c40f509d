"""A process with some Macs of a fleet, which answers its parent over a pipe; SIGKILL is a power cut for all of them."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import sys
import threading
import time
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from metal_supervisor.placement import claims, peers
from metal_supervisor.settings.loader import Settings
from tests.fleet.mac import Reader, SimulatedMac

THREAD_STACK_BYTES = 256 << 10


@dataclass(frozen=True)
class Order:
    """What a worker is to run."""

    base: Path
    kubeconfig: Path
    names: tuple[str, ...]
    first: int
    """Number of the first Mac in the fleet."""
    namespace: str
    lease_s: float
    part: float
    """Cores of this machine for each Mac."""


def _serve(order: Order, pipe: Connection) -> None:
    logging.basicConfig(filename=order.base / "worker.log", level=logging.WARNING)
    threading.stack_size(THREAD_STACK_BYTES)
    common = {"kubeconfig": str(order.kubeconfig), "namespace": order.namespace, "lease_duration": order.lease_s}
    reader = Reader(Settings(**common))
    # A Mac remembers what it has digested; those of all here would push each other out.
    claims.digest = peers.digest = lru_cache(maxsize=None)(claims.digest.__wrapped__)
    macs = []
    for number, name in enumerate(order.names, order.first):
        settings = Settings(**common, node_name=name)
        macs.append(SimulatedMac(order.base / name, order.kubeconfig, settings, number, reader.read, order.part))
    gc.collect()
    gc.disable()  # a real Mac looks through its own heap alone; here all would wait a second for that of all
    pipe.send("built")
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            os._exit(0)  # the parent is gone; hundreds of threads would take their time
        if asked == "start":
            for mac in macs:
                mac.start()
            pipe.send("started")
        else:
            pipe.send(
                {
                    "requests": {mac.name: mac.tally.taken() for mac in macs},
                    "held": {mac.name: mac.held() for mac in macs},
                    "passes": {mac.name: (mac.passes, mac.pass_s) for mac in macs},
                    "errors": [f"{mac.name}: {each}" for mac in macs for each in mac.errors],
                    "cpu_s": time.process_time(),
                }
            )


class Worker:
    """The parent's end."""

    def __init__(self, order: Order) -> None:
        order.base.mkdir(parents=True)
        self.names = order.names
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(order, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def built(self) -> None:
        """Wait until all Macs are made."""
        assert self._pipe.recv() == "built"

    def start(self) -> None:
        """Start the Macs; `started` waits for that."""
        self._pipe.send("start")

    def started(self) -> None:
        assert self._pipe.recv() == "started"

    def told(self) -> dict[str, Any]:
        """What the Macs have counted since the last call."""
        self._pipe.send("tell")
        return dict(self._pipe.recv())

    def kill(self) -> None:
        """Cut the power of all Macs."""
        self.process.kill()
        self.process.join(30)
        self._pipe.close()


if __name__ == "__main__":
    sys.exit("run python -m tests.fleet.fleet")
