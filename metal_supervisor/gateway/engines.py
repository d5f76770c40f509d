"""The gateway's client of the engines: requests sent to them, and their answers passed on as they come.

Nothing of an answer is kept: a client that reads slowly slows the engine down, and one that hangs up ends the
connection to the engine. Streams get a connection of their own: llama-server announces keep-alive and closes after each
streamed answer all the same, so a pooled connection would be reset under the next request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import socket
import struct
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import aiohttp
from aiohttp import HttpVersion11, hdrs, web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from metal_supervisor.gateway import routing, signs
from metal_supervisor.gateway.access import ANYONE, AccessKey
from metal_supervisor.gateway.backends import LLAMA, first_id
from metal_supervisor.gateway.deadline import timeout
from metal_supervisor.gateway.engine_connections import (
    MOST_INFORMATIONAL,
    EngineConnector,
    Shares,
    TooManyAnswersError,
)
from metal_supervisor.gateway.errors import GatewayError
from metal_supervisor.gateway.routing import Backend
from metal_supervisor.spec.hosts import in_url

PIECE_BYTES = 1 << 18
MOST_NAMES_BYTES = 1 << 20
"""Of an engine's list of models."""
CONNECT_S = 5.0
NAME_S = 5.0
POOLED_S = 3.0
SERVER = "metal-supervisor"
EVENT_END = b"\n\n"
LAST_EVENTS = (b"[DONE]", b"message_stop")
"""What the last event of a stream contains, in OpenAI's API and in Anthropic's."""
TAIL_BYTES = 200
"""End of a stream in which that is looked for."""
HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
KEPT_HERE = HOP_BY_HOP | {
    "host",
    "content-length",
    "expect",
    "authorization",
    "x-api-key",
    "api-key",
    "cookie",
    "origin",
    "accept-encoding",
}
"""Headers of a request that no engine gets: a key is the gateway's own."""
ANSWER_HEADERS: Mapping[str, str] = {
    "Content-Type": "how to read the body",
    "Content-Length": "where the body ends",
    "Content-Encoding": "the body is passed on as the engine encoded it",
    "Cache-Control": "keeps proxies from storing a stream",
    "Retry-After": "SDKs wait this long before the next attempt",
    "Retry-After-Ms": "the same, as OpenAI's SDKs prefer it",
    "OpenAI-Processing-Ms": "shown by clients of OpenAI's API",
}
"""Headers of an engine's answer that clients get, and why. Any other may steer a browser, a proxy or an SDK."""
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


@dataclass
class Exchange:
    """One request and what became of it, for the access log and the metrics."""

    path: str
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    began: float = field(default_factory=time.monotonic)
    key: AccessKey = ANYONE
    """The one that its client has shown."""
    backend: Backend | None = None
    status: int = 0
    code: str = ""
    first_byte: float | None = None
    """Monotonic time of the answer's first byte."""
    bytes_out: int = 0
    events: int = 0
    """Events of a streamed answer so far; of llama-server, each token is one."""
    streamed: bool = False
    entered: bool = False
    """Counted against its key's limits, and to be logged."""
    early: web.StreamResponse | None = None
    """An answer that was begun while its engine was being loaded."""
    end: str = "complete"
    cors: dict[str, str] = field(default_factory=dict)
    """Headers of the answer for the browser of a web page."""

    def headers(self) -> dict[str, str]:
        """Headers of every answer."""
        return {"x-request-id": self.id, "Server": SERVER, **self.cors}


class EngineClient:
    """Connections to the engines."""

    def __init__(self) -> None:
        shares: Shares = WeakValueDictionary()
        self._pooled = _session(EngineConnector(shares, kept_s=POOLED_S))
        self._fresh = _session(EngineConnector(shares, kept_s=None))
        self._names: dict[tuple[str, int], str] = {}
        """(program, pid) -> the engine's own model name."""

    async def close(self) -> None:
        await self._pooled.close()
        await self._fresh.close()

    async def name_at(self, backend: Backend) -> str:
        """The name by which an engine knows its model. Raises GatewayError."""
        if not backend.names_itself:
            return backend.name
        known = backend.program, backend.pid
        if known not in self._names:
            url = URL.build(scheme="http", host=backend.address, port=backend.port, path=routing.MODELS)
            try:
                asked = self._fresh.get(url, headers=_own_key(backend), allow_redirects=False)
                async with timeout(NAME_S), asked as answer:
                    found = first_id(json.loads(await _short(answer)))
            except (aiohttp.ClientError, OSError, ValueError, RecursionError, asyncio.TimeoutError):
                found = ""
            if not found:
                text = f"{backend.name} does not tell its model's name"
                raise GatewayError(503, "model_loading", text, retry_after_s=1)
            self._names = {key: name for key, name in self._names.items() if key[0] != backend.program}
            self._names[known] = found
        return self._names[known]

    async def send(
        self, request: web.BaseRequest, exchange: Exchange, path: str, body: bytes
    ) -> aiohttp.ClientResponse:
        """Send the request to its engine, and wait for the beginning of its answer. Raises GatewayError."""
        backend = exchange.backend
        assert backend is not None
        session = self._pooled if backend.runtime == LLAMA and not exchange.streamed else self._fresh
        url = URL(f"http://{in_url(backend.address)}:{backend.port}{path}", encoded=True)
        headers = _for_engine(request.headers, backend, len(body))
        try:
            data = _pieces(body) if len(body) > PIECE_BYTES else body
            # An engine may not send this process, which nothing confines, to another address.
            return await session.post(url, data=data, headers=headers, allow_redirects=False)
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError):
            text = f"{backend.name} does not accept connections just now"
            raise GatewayError(503, "model_unavailable", text, retry_after_s=1) from None
        except TooManyAnswersError:
            text = f"the engine sent more than {MOST_INFORMATIONAL} informational answers (1xx) and no result"
            raise GatewayError(502, "engine_refused", text) from None
        except (aiohttp.ClientError, OSError):
            raise _lost(backend) from None

    async def pass_on(
        self, request: web.BaseRequest, exchange: Exchange, upstream: aiohttp.ClientResponse, closing: bool
    ) -> web.StreamResponse:
        """Pass an answer on as it comes. Raises GatewayError before its first byte, ConnectionError after it."""
        event_stream = upstream.content_type == "text/event-stream"
        tail, begun = _Tail(upstream if event_stream else None), exchange.early is not None
        if begun and not (upstream.status == 200 and event_stream):
            raise GatewayError(502, "engine_refused", f"the engine answered {upstream.status}, and no stream")
        # 101 would make the connection another protocol's; SDKs send a prompt again to where a redirect leads.
        if not (200 <= upstream.status < 300 or 400 <= upstream.status < 600):
            text = f"the engine answered {upstream.status}, which is neither a result nor an error"
            raise GatewayError(502, "engine_refused", text)
        response = exchange.early or web.StreamResponse(
            status=upstream.status, headers=_for_client(upstream.headers, exchange)
        )
        exchange.status = upstream.status
        if closing:
            response.force_close()
        if event_stream and not begun:
            response.headers["X-Accel-Buffering"] = "no"
        assert exchange.backend is not None
        try:
            async for chunk in upstream.content.iter_any():
                if not begun:
                    begun = True
                    await response.prepare(request)
                exchange.first_byte = exchange.first_byte or time.monotonic()
                exchange.bytes_out += len(chunk)
                exchange.events += chunk.count(EVENT_END) if event_stream else 0
                tail.add(chunk)
                await response.write(chunk)
            tail.check()
        except (aiohttp.ClientError, asyncio.IncompleteReadError) as error:
            if isinstance(error, aiohttp.ClientConnectionResetError) and _is_gone(request):
                raise ConnectionResetError from None
            lost = _lost(exchange.backend)
            if not begun:
                raise lost from None
            exchange.end = "engine_lost"
            await cut(request, response, lost.event(exchange.path, exchange.id) if event_stream else b"")
        if not begun:
            await response.prepare(request)
        upstream.release()
        await response.write_eof()
        return response


class _Tail:
    """The end of an event stream of HTTP/1.0, as mlx_lm serves it: its last event tells a whole one from a cut one."""

    def __init__(self, upstream: aiohttp.ClientResponse | None) -> None:
        """`upstream`: an event stream, None for another answer."""
        told = hdrs.TRANSFER_ENCODING, hdrs.CONTENT_LENGTH
        ends_itself = upstream is None or any(each in upstream.headers for each in told)
        self._last: bytes | None = None if ends_itself else b""

    def add(self, chunk: bytes) -> None:
        """The stream went on."""
        if self._last is not None:
            self._last = (self._last + chunk)[-TAIL_BYTES:]

    def check(self) -> None:
        """The connection has ended. Raises IncompleteReadError if the stream had not."""
        if self._last is not None and not any(each in self._last for each in LAST_EVENTS):
            raise asyncio.IncompleteReadError(self._last, None)


async def show_life(request: web.BaseRequest, exchange: Exchange, event: bytes) -> None:
    """Begin a stream whose engine is still being loaded, or add a sign of life to it. Raises ConnectionError."""
    if exchange.early is None:
        exchange.early = web.StreamResponse(headers={**signs.HEADERS, **exchange.headers()})
        exchange.status = 200
        await exchange.early.prepare(request)
    await exchange.early.write(event)


async def cut(request: web.BaseRequest, response: web.StreamResponse, last: bytes) -> None:
    """End a stream that cannot be completed so that no client takes it for complete. Raises ConnectionResetError."""
    has_length = hdrs.CONTENT_LENGTH in response.headers
    try:
        if last and not has_length:  # else it would fill up what is missing
            await response.write(last)
    finally:
        if request.transport is not None:
            if not last and not has_length and request.version < HttpVersion11:
                reset(request.transport)  # to this client, an end of the connection is the end of the body
            request.transport.close()  # without the end of the body
    raise ConnectionResetError


def reset(transport: asyncio.Transport) -> None:
    """End a client's connection so that it is an error to the client."""
    if (connection := transport.get_extra_info("socket")) is not None:
        with contextlib.suppress(OSError):  # it has ended
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _is_gone(request: web.BaseRequest) -> bool:
    return request.transport is None or request.transport.is_closing()


def _session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    """A client that adds nothing of its own to a request, and waits for an answer as long as its client does."""
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
        skip_auto_headers=(hdrs.USER_AGENT, hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.CONTENT_TYPE),
    )


def _own_key(backend: Backend) -> dict[str, str]:
    return {"Authorization": f"Bearer {backend.key}"} if backend.key else {}


def _for_engine(headers: CIMultiDictProxy[str], backend: Backend, length: int) -> CIMultiDict[str]:
    named = {each.strip().lower() for value in headers.getall("Connection", ()) for each in value.split(",")}
    kept: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        if name.lower() not in KEPT_HERE | named:
            kept.add(name, value)
    kept.update(_own_key(backend))
    kept["Content-Length"] = str(length)
    return kept


def _for_client(headers: CIMultiDictProxy[str], exchange: Exchange) -> dict[str, str]:
    # aiohttp reads a value with control characters, and refuses to write it.
    kept = {name: headers[name] for name in ANSWER_HEADERS if name in headers and not _CONTROLS.search(headers[name])}
    return {**kept, **exchange.headers()}


async def _short(answer: aiohttp.ClientResponse) -> bytes:
    """The body of an answer. Raises ValueError if it is longer than MOST_NAMES_BYTES."""
    found = bytearray()
    async for chunk in answer.content.iter_any():
        found += chunk
        if len(found) > MOST_NAMES_BYTES:
            raise ValueError("too long")
    return bytes(found)


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(body), PIECE_BYTES):
        yield body[at : at + PIECE_BYTES]


def _lost(backend: Backend) -> GatewayError:
    """The answer for a request whose engine ended, or hung up. It is not sent again: it may have ended the engine."""
    text = f"the engine of {backend.name} ended the connection before its answer was complete"
    return GatewayError(502, "engine_lost", text)
