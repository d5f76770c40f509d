"""Notices that this machine slept, or reaches the API server from another address than before.

Connections made before that are dead and don't know it; on a Mac a read timeout doesn't even run on while
it sleeps. Nothing here waits, sends or resolves a name: it can be asked in any loop, every ten seconds.
"""

from __future__ import annotations

from collections.abc import Callable

from metal_supervisor.cluster.kube import Kube
from metal_supervisor.host import machine
from metal_supervisor.host.sleep_clock import Clocks, Wake


class NetworkChange:
    """Tells when the connections of a Kube are worth nothing any more. For one thread."""

    def __init__(
        self, kube: Kube, clocks: Clocks | None = None, route: Callable[[str, int], str | None] = machine.route_to
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
