"""Notices that this machine slept, or reaches the API server from another address than before.

Connections made before that are dead and don't know it; on a Mac a read timeout doesn't even run on while
it sleeps. Nothing here waits, sends or resolves a name: it can be asked in any loop, every ten seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from metal_supervisor.boundary import host
from metal_supervisor.boundary.kube import Kube

NOTABLE_S = 2.0


class Clocks(NamedTuple):
    """Two clocks, seconds, that differ by how long the machine slept and by a constant."""

    inclusive: Callable[[], float]
    """Runs on during sleep."""
    exclusive: Callable[[], float]
    """Stands still meanwhile."""


def system_clocks() -> Clocks:
    """This machine's; where it has no such pair, two of a kind, which never tell of any sleep."""
    mac = sys.platform == "darwin"
    names = ("CLOCK_MONOTONIC_RAW", "CLOCK_UPTIME_RAW") if mac else ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC")
    if not all(hasattr(time, name) for name in names):
        return Clocks(time.monotonic, time.monotonic)
    inclusive, exclusive = (getattr(time, name) for name in names)
    return Clocks(lambda: time.clock_gettime(inclusive), lambda: time.clock_gettime(exclusive))


class Wake:
    """Tells how long the machine slept since it was asked last."""

    def __init__(self, clocks: Clocks | None = None) -> None:
        self._clocks = clocks or system_clocks()
        # Between two looks at clocks any time may pass. So what was before is taken for too much, and what is
        # now for too little: then a busy machine never looks like one that slept.
        awake_s = self._clocks.exclusive()
        self._asleep_s = self._clocks.inclusive() - awake_s

    def slept_s(self) -> float:
        """Seconds slept since the last sleep that was told, or since the start; 0.0 up to two seconds."""
        total_s = self._clocks.inclusive()
        asleep_s = total_s - self._clocks.exclusive()
        slept_s = asleep_s - self._asleep_s
        if slept_s <= NOTABLE_S:
            return 0.0
        self._asleep_s = asleep_s
        return slept_s


class Roaming:
    """Tells when the connections of a Kube are worth nothing any more. For one thread."""

    def __init__(
        self, kube: Kube, clocks: Clocks | None = None, route: Callable[[str, int], str | None] = host.route_to
    ) -> None:
        """`route`: the local address from which a numeric address and port are reached, None if they are not."""
        self._kube, self._wake, self._route = kube, Wake(clocks), route
        self._peer: tuple[str, int] | None = None
        self._address: str | None = None
        self._lost = False

    def check(self) -> str:
        """Why `kube.kick()` is due now, "" if it is not. Call it about every ten seconds."""
        moved, slept_s = self._moved(), self._wake.slept_s()
        return f"slept for {slept_s:.0f} s" if slept_s else moved

    def _moved(self) -> str:
        """Compares with the address of before, for the peer that the last connection was made to."""
        peer = self._kube.peer
        if peer is None:
            return ""
        address = self._route(*peer)
        if address is None:
            self._lost = self._lost or self._address is not None  # nothing can be done before there is a way again
            return ""
        before, lost = self._address, self._lost
        known = before is not None and peer == self._peer
        self._peer, self._address, self._lost = peer, address, False
        if known and address != before:
            return f"local address changed from {before} to {address}"
        return "the network is back" if lost else ""
