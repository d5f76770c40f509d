"""Follows where this machine is: awake or just woken, at this address or another.

A connection that was open before a sleep or a change of network is dead and does not say so; whoever holds
one is made to begin anew. Each process follows for its own connections, in a thread that hardly ever runs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from metal_supervisor.cluster.kube import Kube
from metal_supervisor.cluster.wake_detector import NetworkChange
from metal_supervisor.host import addresses

EVERY_S = 10.0
log = logging.getLogger(__name__)


class NetworkWatcher(threading.Thread):
    """Kicks the connections of a Kube when they are worth nothing any more."""

    def __init__(self, kube: Kube, on_change: Callable[[], None] = lambda: None) -> None:
        super().__init__(name="roam", daemon=True)
        self._kube, self.on_change = kube, on_change
        self._roaming = NetworkChange(kube)
        self._pause = threading.Event()

    def run(self) -> None:
        while True:
            self._pause.clear()
            self.look()
            self._pause.wait(EVERY_S)

    def look_now(self) -> None:
        """Has the thread look at once."""
        self._pause.set()

    def look(self) -> None:
        """One look."""
        if self._dropped():
            self.on_change()

    def _dropped(self) -> bool:
        """Drops the connections if they are dead."""
        why = self._roaming.check()
        if why:
            log.info("connections dropped", extra={"why": why})
            self._kube.kick()
        return bool(why)


class AddressBook(NetworkWatcher):
    """Keeps the address that pods are told, too. It may wait for a name to be looked up; nobody else does."""

    def __init__(self, kube: Kube, asked: str, embedded: bool, on_change: Callable[[], None]) -> None:
        """`asked`: the address that the user insists on, "" to find one."""
        super().__init__(kube, on_change)
        self._asked, self._embedded = asked, embedded
        self._choice = addresses.AddressChoice("", "")
        self._known = threading.Event()

    @property
    def address(self) -> str:
        return self._choice.address

    @property
    def problem(self) -> str:
        """`NoRoutableAddress: …`, "" if all is well or nothing is known yet."""
        return self._choice.problem

    @property
    def choice(self) -> addresses.AddressChoice:
        """The address with where it comes from, and what speaks against it."""
        return self._choice

    def wait(self, timeout_s: float) -> None:
        """Waits for the first look."""
        self._known.wait(timeout_s)

    def look(self) -> None:
        """One look."""
        dropped = self._dropped()
        found = addresses.advertised(self._asked, self._kube.server, self._embedded)
        if found.problem and self._choice.address and not self._asked:
            found = self._choice  # no network for now: what was true may be true again
        changed, self._choice = found != self._choice, found
        self._known.set()
        if changed:
            log.info("address", extra={"advertised": found.address or found.problem, "origin": found.origin})
            if found.note:
                log.warning("address", extra={"doubt": found.note})
        if changed or dropped:  # not before: what is written anew after a sleep has to have the new address
            self.on_change()
