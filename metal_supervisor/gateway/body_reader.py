"""Reading of requests' bodies, whose size the gateway holds at one time is limited."""

from __future__ import annotations

import asyncio

from aiohttp import web

from metal_supervisor.gateway.errors import GatewayError

MOST_BODY_BYTES, MOST_BODIES_BYTES = 64 << 20, 256 << 20
BODY_S = 300.0
"""Longest time for a request's body to arrive."""


class BodyReader:
    """Reads bodies, and counts what is held of all of them."""

    def __init__(self) -> None:
        self.held_bytes = 0

    async def read(self, request: web.BaseRequest) -> bytes:
        """The whole body of a request, counted in `held_bytes` until the caller takes it off. Raises GatewayError."""
        too_long = GatewayError(
            413, "request_too_large", f"the body is longer than {MOST_BODY_BYTES >> 20} MiB", final=True, close=True
        )
        if (request.content_length or 0) > MOST_BODY_BYTES:
            raise too_long
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise GatewayError(400, "invalid_request", "send the body without Content-Encoding", final=True, close=True)
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if request.content.is_eof():  # it came along with the headers, as most do
            return self._counted(request.content.read_nowait(), too_long)
        try:
            return await asyncio.wait_for(self._collected(request, too_long), BODY_S)
        except asyncio.TimeoutError:
            text = "the body did not arrive in time"
            raise GatewayError(408, "request_timeout", text, final=True, close=True) from None

    def _counted(self, body: bytes, too_long: GatewayError) -> bytes:
        if len(body) > MOST_BODY_BYTES:
            raise too_long
        self.held_bytes += len(body)
        return body

    async def _collected(self, request: web.BaseRequest, too_long: GatewayError) -> bytes:
        pieces: list[bytes] = []
        total = 0
        try:
            while piece := await request.content.readany():
                total += len(piece)
                self.held_bytes += len(piece)
                pieces.append(piece)
                if total > MOST_BODY_BYTES:
                    raise too_long
                if self.held_bytes > MOST_BODIES_BYTES:
                    text = "the gateway holds as many request bodies as it may"
                    raise GatewayError(503, "queue_full", text, retry_after_s=5, close=True)
        except BaseException:
            self.held_bytes -= total
            raise
        return b"".join(pieces)
