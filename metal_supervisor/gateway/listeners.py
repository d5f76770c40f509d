"""The listeners of a worker: the public one, and one for each on-demand service of this Mac."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterable

from metal_supervisor.gateway.holder import BACKLOG
from metal_supervisor.gateway.link import HolderLink, LinkEvents

HANDSHAKE_S, TAKEN_RETRY_S = 10.0, 5.0


class Listeners:
    """Accepts connections on the holder's sockets, from when there is one until another worker does."""

    def __init__(
        self,
        path: str,
        public: str,
        protocol: Callable[[bool], asyncio.BaseProtocol],
        problem: Callable[[str, str], None],
        retire: Callable[[], None],
    ) -> None:
        """`path`: of the holder's socket; `public`: the public address, as ADDRESS:PORT.

        `protocol`: makes that of an accepted connection, which is to have TLS or not.

        `problem`: called with an address and why it cannot be listened on, "" once it can; `retire`: called once
        another worker serves.
        """
        self._public, self._protocol, self._problem = public, protocol, problem
        self._loop = asyncio.get_running_loop()
        self._given: asyncio.Queue[tuple[str, socket.socket]] = asyncio.Queue()
        self._servers: dict[str, asyncio.Server] = {}
        self._fronts: frozenset[str] = frozenset()
        self._link = HolderLink(
            path, (public,),
            LinkEvents(
                listener=lambda address, given: self._soon(self._given.put_nowait, (address, given)),
                retire=lambda: self._soon(retire),
                problem=lambda address, why: self._soon(self._not_given, address, why),
            ),
        )  # fmt: skip

    @property
    def ports(self) -> list[int]:
        """The ports of on-demand services at which it accepts connections."""
        return sorted(int(each.rpartition(":")[2]) for each in self._servers.keys() - {self._public})

    def _soon(self, call: Callable[..., object], *arguments: object) -> None:
        """Have the loop make a call, from the link's thread; not if it has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *arguments)

    def fronts(self, addresses: Iterable[str]) -> None:
        """Replace the addresses of on-demand services."""
        wanted = frozenset(addresses) - {self._public}
        if wanted != self._fronts:
            self._fronts = wanted
            self._link.want((self._public, *sorted(wanted)))
            for address in self._servers.keys() - wanted - {self._public}:
                close(self._servers.pop(address))

    async def serve(self, tls: ssl.SSLContext | None, serving: Callable[[], None]) -> None:
        """Accept connections until cancelled. `tls`: of the public listener; `serving`: called once it accepts."""
        self._link.start()
        try:
            while True:
                address, listener = await self._given.get()
                if address == self._public:
                    handshake_s = HANDSHAKE_S if tls else None
                    self._servers[address] = await self._loop.create_server(
                        lambda: self._protocol(tls is not None), sock=listener, backlog=BACKLOG, ssl=tls,
                        ssl_handshake_timeout=handshake_s,
                    )  # fmt: skip
                    serving()
                    self._link.serving()
                elif address in self._fronts:
                    self._servers[address] = await self._loop.create_server(
                        lambda: self._protocol(False), sock=listener, backlog=BACKLOG
                    )
                else:  # given up meanwhile
                    listener.close()
                self._problem(address, "")
        finally:
            for each in self._servers.values():
                close(each)

    def _not_given(self, address: str, why: str) -> None:
        self._problem(address, why)
        self._loop.call_later(TAKEN_RETRY_S, self._link.ask_again, address)


def close(server: asyncio.Server) -> None:
    """Accept no more, and close a server once what it has accepted is served: closed before, it would reset that."""
    loop = asyncio.get_running_loop()
    for each in server.sockets:
        loop.remove_reader(each.fileno())
    loop.call_soon(server.close)
