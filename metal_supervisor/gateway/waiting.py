"""Requests that wait for the engine of an on-demand service, and what the controller is told of its use."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping

from metal_supervisor.gateway.access import LastMinute
from metal_supervisor.gateway.deadline import timeout
from metal_supervisor.gateway.errors import GatewayError
from metal_supervisor.gateway.routing import ServiceTable
from metal_supervisor.spec.processes import EngineUse
from metal_supervisor.spec.types import Key

MOST_OF_CLIENT_FOR_ONE = 64
"""Waiting requests of one client for one model."""
MOST_OF_CLIENT = 128
"""Waiting requests of one client for all models."""
MOST_OF_ONE = 128
"""Waiting requests of all clients for one model: more than one client has, so none takes all places."""
MOST_WAITING = 256
"""Waiting requests of all clients for all models."""
MOST_LOADS = 60
"""Models that one client may have loaded within a minute: more often than one a second serves nobody."""
HOLD_S = 280.0
"""Longest time that a request waits: below the 300 s after which clients give up by themselves."""
TELL_EVERY_S = 0.2
"""Shortest time between two notes that nobody waits for."""
AGAIN_S = 1.0
"""Until a note that could not be kept, as on a full disk, is tried again."""
FULL_RETRY_S = 10


class WaitingRoom:
    """Counts who waits for which engine, and tells the controller. All methods are for the event loop's thread."""

    def __init__(
        self,
        in_flight: Counter[str],
        tell: Callable[[Mapping[str, EngineUse]], bool],
        waited: Callable[[Key, float], None] = lambda _service, _seconds: None,
    ) -> None:
        """`in_flight`: requests at an engine, by program; `tell`: keeps the uses, and wakes the controller; False
        if they cannot be kept just now.

        `waited`: counts a request that has waited, and for how many seconds.
        """
        self._in_flight, self._keep, self._waited = in_flight, tell, waited
        self.waiting: Counter[str] = Counter()
        self._clients: dict[str, Counter[str]] = {}
        """Client -> its waiting requests, by program."""
        self._loads = LastMinute()
        self._used_at: dict[str, float] = {}
        """Of on-demand services. That one is seen first counts as a use: nothing is known here of those before."""
        self._table = ServiceTable()
        self._told: Mapping[str, EngineUse] | None = None
        self._later: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._closed = False

    # ── what the records say ─────────────────────────────────────────────────────────────────────

    def look(self, table: ServiceTable) -> None:
        """Take note of the services as they are now, and have the waiting requests look at them."""
        if table is not self._table:
            self._table = table
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
            self._forget({*self.waiting, *self._in_flight} - {each.program for each in table.backends})
            now, before = time.time(), self._used_at
            self._used_at = {each.program: before.get(each.program, now) for each in table.backends if each.on_demand}
        self._tell()

    def _forget(self, gone: Collection[str]) -> None:
        """Drop what was counted of programs that are gone: a worker may serve for months."""
        for program in gone:
            for counts in (self.waiting, self._in_flight):
                if not counts[program]:
                    del counts[program]

    def close(self) -> None:
        """Refuse those who wait: this worker is to end."""
        self._closed = True
        self._changed.set()

    async def change(self, until: float) -> bool:
        """Wait for news of the services until a monotonic time; False if there was none. Raises GatewayError."""
        try:
            if self._closed:
                raise GatewayError(503, "restarting", "the gateway is stopping", retry_after_s=1, close=True)
            async with timeout(max(0.0, until - time.monotonic())):
                await self._changed.wait()
        except asyncio.TimeoutError:
            return False
        return True

    # ── what the requests do ─────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def wait_for(self, program: str, client: str) -> Iterator[None]:
        """Count a waiting request. Raises GatewayError if too many wait, or the client has had too much loaded."""
        own, same, every = self._clients.get(client, Counter()), self.waiting[program], self.waiting.total()
        full = own[program] >= MOST_OF_CLIENT_FOR_ONE or own.total() >= MOST_OF_CLIENT
        if full or same >= MOST_OF_ONE or every >= MOST_WAITING:
            text = f"{own.total()} requests of {client} wait, {same} for this model, {every} in all"
            raise GatewayError(503, "queue_full", text, retry_after_s=FULL_RETRY_S)
        if not self.waiting[program] and (wait_s := self._loads.enter(client, MOST_LOADS, time.monotonic())):
            text = f"{client} has had models loaded {MOST_LOADS} times within a minute"
            raise GatewayError(429, "rate_limit_exceeded", text, retry_after_s=wait_s)
        self.waiting[program] += 1
        self._clients[client] = own
        own[program] += 1
        service, began = self._table.key_of(program), time.monotonic()
        self._used_at[program] = time.time()
        if self.waiting[program] == 1:
            self._tell()
        try:
            yield
        finally:
            self.waiting[program] -= 1
            own[program] -= 1
            if not own.total():
                self._clients.pop(client, None)
            self._waited(service, time.monotonic() - began)
            self.used(program)

    def used(self, program: str) -> None:
        """Note that a request is at the engine, or has ended; `in_flight` counts it, or no longer does."""
        on_demand = next((each for each in self._table.backends if each.program == program), None)
        if on_demand is None or not on_demand.on_demand:
            return
        self._used_at[program] = time.time()
        if on_demand.withdraw and not self._in_flight.get(program, 0):
            self._tell()  # the controller waits for it
        elif self._later is None:
            self._later = asyncio.get_running_loop().call_later(TELL_EVERY_S, self._tell)

    def _tell(self) -> None:
        """Tell the controller what it does not know yet."""
        if self._later is not None:
            self._later.cancel()
            self._later = None
        uses = {
            each.program: EngineUse(
                self.waiting.get(each.program, 0),
                self._in_flight.get(each.program, 0),
                self._used_at[each.program],
                each.withdraw,
            )
            for each in self._table.backends
            if each.on_demand
        }
        if uses == (self._told or {}):
            return
        if self._keep(uses):
            self._told = uses
        else:
            self._later = asyncio.get_running_loop().call_later(AGAIN_S, self._tell)
