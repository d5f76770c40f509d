"""Reading of requests' bodies, whose size the gateway holds at one time is limited."""

from __future__ import annotations

import asyncio
from collections import Counter

from aiohttp import HttpVersion11, web

from metal_supervisor.gateway.deadline import timeout
from metal_supervisor.gateway.errors import GatewayError

MOST_BODY_BYTES = 64 << 20
"""Of one body."""
MOST_OF_ONE_BYTES = 128 << 20
"""Of all bodies of one client."""
MOST_BODIES_BYTES = 256 << 20
"""Of all bodies."""
BODY_S = 300.0
"""Longest time for a request's body to arrive."""


class BodyReader:
    """Reads bodies, and counts what is held of all of them."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()
        """Client -> bytes."""

    @property
    def held_bytes(self) -> int:
        """Bytes of all bodies that are held."""
        return self._held.total()

    def release(self, client: str, size: int) -> None:
        """A body of a client is held no more."""
        self._held[client] -= size
        if not self._held[client]:
            del self._held[client]

    async def read(self, request: web.BaseRequest, client: str) -> bytes:
        """The whole body of a client's request, counted until it is released. Raises GatewayError."""
        too_long = GatewayError(
            413, "request_too_large", f"the body is longer than {MOST_BODY_BYTES >> 20} MiB", final=True, close=True
        )
        if (request.content_length or 0) > MOST_BODY_BYTES:
            raise too_long
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise GatewayError(400, "invalid_request", "send the body without Content-Encoding", final=True, close=True)
        waits = request.headers.get("Expect", "").lower() == "100-continue" and request.version >= HttpVersion11
        if waits and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            async with timeout(BODY_S):
                return await self._collected(request, client, too_long)
        except asyncio.TimeoutError:
            text = "the body did not arrive in time"
            raise GatewayError(408, "request_timeout", text, final=True, close=True) from None
        except web.RequestPayloadError:
            raise GatewayError(400, "invalid_request", "the body is not valid HTTP", final=True, close=True) from None

    async def _collected(self, request: web.BaseRequest, client: str, too_long: GatewayError) -> bytes:
        pieces: list[bytes] = []
        total = 0
        try:
            while piece := await request.content.readany():
                total += len(piece)
                self._held[client] += len(piece)
                pieces.append(piece)
                if total > MOST_BODY_BYTES:
                    raise too_long
                if self.held_bytes > MOST_BODIES_BYTES or self._held[client] > MOST_OF_ONE_BYTES:
                    text = "the gateway holds as many request bodies as it may, of this client or of all"
                    raise GatewayError(503, "queue_full", text, retry_after_s=5, close=True)
        except BaseException:
            self.release(client, total)
            raise
        return b"".join(pieces)
