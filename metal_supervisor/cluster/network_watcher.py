"""Watch of this machine's sleep and network, which drops dead connections.

A connection that was open before a sleep or a change of network is dead, but reports no error (on a Mac a read timeout
does not even advance during sleep), so all are dropped and opened again. Each process watches for its own connections,
in a thread that wakes every EVERY_S seconds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from metal_supervisor.cluster.kube import Kube
from metal_supervisor.host import addresses, machine
from metal_supervisor.host.sleep_clock import Clocks, Wake

EVERY_S = 10.0
log = logging.getLogger(__name__)


class NetworkWatcher(threading.Thread):
    """Thread that kicks a Kube when its connections are dead."""

    def __init__(
        self,
        kube: Kube,
        clocks: Clocks | None = None,
        route: Callable[[str, int], str | None] = machine.route_to,
    ) -> None:
        """`route`: returns the local address that a numeric address and port are reached from, None without a route."""
        super().__init__(name="roam", daemon=True)
        self._kube, self._wake, self._route = kube, Wake(clocks), route
        self._peer: tuple[str, int] | None = None
        self._local: str | None = None
        self._lost = False

    def run(self) -> None:
        while True:
            self.look()
            time.sleep(EVERY_S)

    def look(self) -> bool:
        """Check once, and drop the connections if they are dead. Returns True if so."""
        why = self.check()
        if why:
            log.info("connections dropped", extra={"why": why})
            self._kube.kick()
        return bool(why)

    def check(self) -> str:
        """Reason why `kube.kick()` is due now, or "" if it is not. Sends nothing, and resolves no name."""
        moved, slept_s = self._moved(), self._wake.slept_s()
        return f"slept for {slept_s:.0f} s" if slept_s else moved

    def _moved(self) -> str:
        """Reason why the connections are dead, by a change of the local address towards the last peer, or ""."""
        peer = self._kube.peer
        if peer is None:
            return ""
        local = self._route(*peer)
        if local is None:
            self._lost = self._lost or self._local is not None  # wait until there is a route again
            return ""
        before, lost = self._local, self._lost
        known = before is not None and peer == self._peer
        self._peer, self._local, self._lost = peer, local, False
        if known and local != before:
            return f"local address changed from {before} to {local}"
        return "the network is back" if lost else ""


class AddressBook(NetworkWatcher):
    """NetworkWatcher that also keeps the advertised address. Only its own thread waits for a name lookup."""

    def __init__(self, kube: Kube, asked: str, embedded: bool, on_change: Callable[[], None]) -> None:
        """`asked`: the address from the user's settings, "" to detect one."""
        super().__init__(kube)
        self._asked, self._embedded, self._on_change = asked, embedded, on_change
        self.choice = addresses.AddressChoice("", "")
        """The address with its origin, and any problem or doubt about it; neither before the first check."""
        self._known = threading.Event()

    def wait(self, timeout_s: float) -> None:
        """Wait for the first check."""
        self._known.wait(timeout_s)

    def look(self) -> bool:
        """As of a NetworkWatcher; calls `on_change` if connections were dropped, or the address changed."""
        dropped = super().look()
        try:
            found = addresses.advertised(self._asked, self._kube.first_hop, self._embedded)
        except OSError:  # the interfaces cannot be read, as with too many open files
            found = self.choice
        if found.problem and self.choice.address and not self._asked:
            found = self.choice  # no network for now: the address may come back
        changed, self.choice = found != self.choice, found
        self._known.set()
        if changed:
            log.info("address", extra={"advertised": found.address or found.problem, "origin": found.origin})
            if found.note:
                log.warning("address", extra={"doubt": found.note})
        if changed or dropped:  # last: objects written after a sleep need the new address
            self._on_change()
        return dropped
