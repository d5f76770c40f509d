"""Detection of a sleep of this machine, or of a new local address towards the API server.

Connections from before are dead, but report no error; on a Mac a read timeout does not even advance during sleep.
Nothing here waits, sends or resolves a name, so it can be called from any loop, every ten seconds.
"""

from __future__ import annotations

from collections.abc import Callable

from metal_supervisor.cluster.kube import Kube
from metal_supervisor.host import machine
from metal_supervisor.host.sleep_clock import Clocks, Wake


class NetworkChange:
    """Detects that the connections of a Kube are dead. For one thread."""

    def __init__(
        self, kube: Kube, clocks: Clocks | None = None, route: Callable[[str, int], str | None] = machine.route_to
    ) -> None:
        """`route`: returns the local address that a numeric address and port are reached from, None without a route."""
        self._kube, self._wake, self._route = kube, Wake(clocks), route
        self._peer: tuple[str, int] | None = None
        self._address: str | None = None
        self._lost = False

    def check(self) -> str:
        """Reason why `kube.kick()` is due now, or "" if it is not. Call it about every ten seconds."""
        moved, slept_s = self._moved(), self._wake.slept_s()
        return f"slept for {slept_s:.0f} s" if slept_s else moved

    def _moved(self) -> str:
        """Reason why the connections are dead, by a change of the local address towards the last peer, or ""."""
        peer = self._kube.peer
        if peer is None:
            return ""
        address = self._route(*peer)
        if address is None:
            self._lost = self._lost or self._address is not None  # wait until there is a route again
            return ""
        before, lost = self._address, self._lost
        known = before is not None and peer == self._peer
        self._peer, self._address, self._lost = peer, address, False
        if known and address != before:
            return f"local address changed from {before} to {address}"
        return "the network is back" if lost else ""
