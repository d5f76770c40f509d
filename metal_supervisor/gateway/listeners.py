"""The listeners of a worker: the public one, and one for each on-demand service of this Mac.

Their sockets come from the holder, over a connection that is made anew whenever the holder was replaced; the same
connection brings the word to retire.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterable

from metal_supervisor.gateway.deadline import timeout
from metal_supervisor.gateway.holder import BACKLOG, received, send

HANDSHAKE_S = 10.0
CONNECT_S = 5.0
RETRY_S = 0.2
TAKEN_RETRY_S = 5.0
NO_HOLDER = "the gateway's holder does not answer; see its log"
LATE_S = 5.0
"""Time after which a holder that has not answered yet is told of: both start together, one of them first."""
ALONE_S = 60.0
"""Time without a holder after which a worker retires that has no supervisord either."""


class Listeners:
    """Accepts connections on the holder's sockets, from when there is one until another worker does."""

    def __init__(
        self,
        path: str,
        public: str,
        protocol: Callable[[bool], asyncio.BaseProtocol],
        problem: Callable[[str, str], None],
    ) -> None:
        """`path`: of the holder's socket; `public`: the public address, as ADDRESS:PORT.

        `protocol`: makes that of an accepted connection, which is to have TLS or not.

        `problem`: called with an address, "" for all of them, and why it cannot be listened on, "" once it can.
        """
        self._path, self._public, self._protocol, self._problem = path, public, protocol, problem
        self._loop = asyncio.get_running_loop()
        self._born, self._parent = time.monotonic(), os.getppid()
        self._addresses = [public]
        self._kept: dict[str, socket.socket] = {}
        """Listening sockets by address, for the next holder; asyncio serves, and closes, duplicates of them."""
        self._servers: dict[str, asyncio.Server] = {}
        self._holder: socket.socket | None = None
        self._heard_at = self._born
        self._unasked: list[str] = []
        """Addresses that the holder is still to be asked for."""
        self._awaits_answer = False
        self._refused = False
        """The holder cannot give the public socket to anybody."""
        self._announced = False
        """The holder knows that this worker serves."""
        self._retired = self._missed = False

    @property
    def ports(self) -> list[int]:
        """The ports of on-demand services at which it accepts connections."""
        return sorted(int(each.rpartition(":")[2]) for each in self._servers.keys() - {self._public})

    def fronts(self, addresses: Iterable[str]) -> None:
        """Replace the addresses of on-demand services: those that are new are asked for, the others given up."""
        before, self._addresses = self._addresses, [self._public, *sorted(set(addresses) - {self._public})]
        for address in set(before) - set(self._addresses):
            self._tell({"drop": address})
            if (listener := self._kept.pop(address, None)) is not None:
                listener.close()
            if (server := self._servers.pop(address, None)) is not None:
                close(server)
            self._problem(address, "")
        self._ask(*(each for each in self._addresses if each not in before))

    def _ask(self, *more: str) -> None:
        """Ask for one socket after another, each once the one before is answered: a buffer holds some hundred messages.

        The holder hears last that this worker serves, when it knows all that this one listens on.
        """
        self._unasked += more
        while self._unasked and not self._awaits_answer and self._holder is not None:
            address = self._unasked.pop(0)
            if address in self._addresses:  # else it was given up meanwhile
                own = [self._kept[address]] if address in self._kept else []
                self._awaits_answer = True
                self._tell({"want": address, "born": self._born, "own": bool(own)}, *own)
        serves = self._public in self._servers or (self._refused and self._servers)
        if serves and not (self._unasked or self._awaits_answer or self._announced):
            self._announced = True
            self._tell({"serving": True})

    def _tell(self, message: dict[str, object], *sockets: socket.socket) -> None:
        """Send a message if there is a holder. One that does not take it is left: the next connection tells it all."""
        if self._holder is not None:
            try:
                send(self._holder, message, *sockets)
            except OSError:
                with contextlib.suppress(OSError):
                    self._holder.shutdown(socket.SHUT_RDWR)

    async def serve(self, tls: ssl.SSLContext | None, serving: Callable[[str], None]) -> None:
        """Accept connections until another worker serves, or cancelled.

        `tls`: of the public listener; `serving`: called with each address that it accepts at.
        """
        try:
            while not self._retired:
                try:
                    await self._follow_holder(tls, serving)
                except (OSError, EOFError, asyncio.TimeoutError):
                    alone_s = time.monotonic() - self._heard_at
                    if not self._kept and alone_s > LATE_S:
                        self._missed = True
                        self._problem("", NO_HOLDER)
                    elif self._kept and alone_s > ALONE_S and os.getppid() != self._parent:
                        return  # its supervisord was killed, and the next one has no gateway
                    await asyncio.sleep(RETRY_S)
        finally:
            for server in self._servers.values():
                close(server)
            for listener in self._kept.values():
                listener.close()

    async def _follow_holder(self, tls: ssl.SSLContext | None, serving: Callable[[str], None]) -> None:
        """Do as the holder says. Raises OSError or EOFError once it ends the connection, or has not begun."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.setblocking(False)
            async with timeout(CONNECT_S):
                await self._loop.sock_connect(connection, self._path)
            try:
                self._holder, rest = connection, b""
                self._unasked, self._awaits_answer = [*self._addresses], False
                self._refused = self._announced = False
                self._ask()
                while not self._retired:
                    await self._readable(connection)
                    messages, rest, sockets = received(connection, rest)
                    if self._missed:
                        self._missed = False
                        self._problem("", "")
                    for message in messages:
                        if "retire" in message:
                            self._retired = True
                        elif "listener" in message and sockets:
                            await self._listen(str(message["listener"]), sockets.pop(0), tls, serving)
                            self._awaits_answer = False
                        elif "listener" in message or "error" in message:
                            address = str(message.get("listener", message.get("address")))
                            self._refused |= "error" in message and address == self._public
                            if address in self._addresses:  # else it was given up meanwhile
                                # The system keeps back a socket from a process that has too many files open.
                                self._problem(address, str(message.get("error", os.strerror(errno.EMFILE))))
                                self._loop.call_later(TAKEN_RETRY_S, self._ask, address)
                            self._awaits_answer = False
                    for each in sockets:
                        each.close()
                    self._ask()
            finally:
                self._holder, self._heard_at = None, time.monotonic()

    async def _readable(self, connection: socket.socket) -> None:
        ready = asyncio.Event()
        self._loop.add_reader(connection.fileno(), ready.set)
        try:
            await ready.wait()
        finally:
            self._loop.remove_reader(connection.fileno())

    async def _listen(
        self, address: str, listener: socket.socket, tls: ssl.SSLContext | None, serving: Callable[[str], None]
    ) -> None:
        """Accept connections on a socket that the holder gave."""
        if address in self._kept or address not in self._addresses:
            listener.close()
            return
        listener.setblocking(False)
        self._kept[address] = listener.dup()
        tls = tls if address == self._public else None
        server = await self._loop.create_server(
            lambda: self._protocol(tls is not None),
            sock=listener,
            backlog=BACKLOG,
            ssl=tls,
            ssl_handshake_timeout=HANDSHAKE_S if tls else None,
        )
        if address not in self._kept:  # given up meanwhile
            close(server)
            return
        self._servers[address] = server
        serving(address)
        self._problem(address, "")


def close(server: asyncio.Server) -> None:
    """Accept no more, and close a server once what it has accepted is served: closed before, it would reset that."""
    loop = asyncio.get_running_loop()
    for each in server.sockets:
        loop.remove_reader(each.fileno())
    loop.call_soon(server.close)
