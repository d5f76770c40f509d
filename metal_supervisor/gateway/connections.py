"""The connections of the gateway's clients: how many there may be, and the end of those that are idle."""

from __future__ import annotations

import asyncio
import logging
import resource
import time

from aiohttp import web
from aiohttp.http import RawRequestMessage
from aiohttp.web_protocol import RequestHandler

from metal_supervisor.gateway.listeners import HANDSHAKE_S
from metal_supervisor.gateway.proxy import Proxy

MOST_CONNECTIONS = 2000
SPARE_DESCRIPTORS = 64
HEADER_S = 75.0
"""Longest time for the headers of a request to arrive, and for an idle connection to be kept."""
LINGER_S = 2.0
FULL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"


class _Turned(asyncio.Protocol):
    """A connection beyond the most there may be: told so, and closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(FULL)
        transport.close()


class ClientConnection(RequestHandler):
    """A client's connection.

    aiohttp 3.14 notes that what arrives is no HTTP, but leaves a body waiting that had begun: for all of its time.
    """

    __slots__ = ()

    def data_received(self, data: bytes) -> None:
        """Take what has arrived, and end the bodies that cannot be read on."""
        super().data_received(data)
        if self._messages and not isinstance(self._messages[-1][0], RawRequestMessage):
            current = self._current_request
            begun = [body for _, body in self._messages] + ([current.content] if current is not None else [])
            for body in begun:
                if not body.is_eof():
                    body.set_exception(web.RequestPayloadError())


class ClientConnections(web.Server):
    """Counts also the connections that are accepted and not made: with TLS, until the handshake is over."""

    def __init__(self, proxy: Proxy) -> None:
        super().__init__(
            proxy,
            handler_cancellation=True,
            keepalive_timeout=HEADER_S,
            lingering_time=LINGER_S,
            auto_decompress=False,
            access_log=None,
        )
        logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # a client that speaks no HTTP is not an error
        self._proxy = proxy
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # Each request in flight takes two descriptors: its client's, and its engine's.
        self._most = min(MOST_CONNECTIONS, max(16, (soft - SPARE_DESCRIPTORS) // 2))
        self._begun: dict[RequestHandler, float] = {}
        """Monotonic time of those, the earliest first; one whose handshake failed counts until it would have ended."""

    def accept(self, tls: bool) -> asyncio.Protocol:
        """The protocol of a new connection. Raises ConnectionRefusedError for one of TLS beyond the most."""
        if self.count < self._most:
            return self()
        if tls:  # the answer would take a handshake; asyncio closes the connection
            raise ConnectionRefusedError
        return _Turned()

    def __call__(self) -> RequestHandler:
        handler = ClientConnection(self, loop=self._loop, **self._kwargs)
        self._begun[handler] = time.monotonic()
        return handler

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        self._begun.pop(handler, None)
        super().connection_made(handler, transport)

    @property
    def count(self) -> int:
        """Connections, begun or made."""
        over = time.monotonic() - HANDSHAKE_S
        while self._begun and next(iter(self._begun.values())) < over:
            del self._begun[next(iter(self._begun))]
        return len(self._begun) + len(self.connections)

    def close_idle(self) -> None:
        """Close the connections without a request under way.

        aiohttp's `pre_shutdown` would leave them open and deaf, and drop the rest of the bodies that still arrive.
        """
        for each in self.connections:
            if each not in self._proxy.busy:
                each.force_close()
