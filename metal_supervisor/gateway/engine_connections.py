"""Connections to the engines, for a client whose answers are passed on to others.

aiohttp 3.14 leaves four cases open: after a malformed chunk its reader never ends; it takes a reset for the end of an
answer without a length; it gives an answer that arrived on an idle connection to the next request; and it drops the
answer of an engine that hangs up before it has read all of a request, as one does that has no such path.

Nor does it bound what one engine costs the worker, which answers all clients in one thread: an engine may send
informational answers without end, or a body in chunks of one byte. So their number is limited, and reading an engine's
answers is paced: beyond its share of the worker's time it waits, while the kernel collects what arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.streams import EMPTY_PAYLOAD

REST_BYTES = 65536
"""Most that is read of an answer after its connection has failed: such an answer is short."""
READ_BYTES = 16384
"""Most that one read takes: in chunks of one byte, these cost the worker some milliseconds."""
SHARE = 0.25
"""Part of the worker's time that the answers of one engine may take."""
BURST_S = 0.005
"""Debt up to which an engine's answers are read without a pause."""
PASS_ON_S = 40e-6
"""Time charged for passing on what one read brought: 55 µs were measured for a token, its parsing included."""
MOST_INFORMATIONAL = 100
"""Most informational answers (1xx) before the answer to a request."""


class TooManyAnswersError(aiohttp.ClientError):
    """An engine sent more than MOST_INFORMATIONAL informational answers to a request."""


class ReadingShare:
    """Time of the worker that the answers of one engine have taken, against its share."""

    def __init__(self) -> None:
        self._paid_at = 0.0
        """Monotonic time at which the share covers what was taken."""

    def pause_s(self, took_s: float, now: float) -> float:
        """Charge a read that took so long. Returns the time to wait before the next one."""
        self._paid_at = max(self._paid_at, now) + took_s / SHARE
        debt_s = self._paid_at - now
        return debt_s if debt_s > BURST_S else 0.0


def _coalesce(answer: aiohttp.StreamReader) -> None:
    """Make one piece of what has come of a body: aiohttp keeps each chunk, and takes 10 µs to hand it out."""
    pieces, ends = answer._buffer, answer._http_chunk_splits
    if len(pieces) > 1:
        whole = b"".join(pieces)
        pieces.clear()
        pieces.append(whole)
    if ends is not None:
        ends.clear()


Shares: TypeAlias = "WeakValueDictionary[object, ReadingShare]"
"""By the engine's address and port."""


class EngineConnection(ResponseHandler):
    """One connection to an engine."""

    def __init__(self, shares: Shares, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._shares, self._share = shares, ReadingShare()
        self._heads = 0
        """Answers begun since the request, the informational ones included."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Share the worker's time with the other connections to this engine."""
        super().connection_made(transport)
        self._share = self._shares.setdefault(transport.get_extra_info("peername"), self._share)
        vars(transport)["max_size"] = READ_BYTES  # asyncio's own is 256 KiB, which it does not let us choose

    def data_received(self, data: bytes) -> None:
        """Take what has arrived, and pause if the engine has had its share."""
        began = time.thread_time()
        super().data_received(data)
        if data and self._payload is not None and self._payload is not EMPTY_PAYLOAD:
            _coalesce(self._payload)
        # Without data, aiohttp asks for what it has not parsed yet: after each chunk that it takes from its buffer.
        took_s = time.thread_time() - began + (PASS_ON_S if data else 0.0)
        pause_s = self._share.pause_s(took_s, time.monotonic())
        if pause_s and not self._buffer_paused:
            self._pause_reading_for_buffer()
            self._loop.call_later(pause_s, self._resume_reading_for_buffer)

    def set_response_params(self, **options: Any) -> None:
        """Begin to wait for the answer to a request."""
        self._heads = 0
        super().set_response_params(**options)

    def feed_data(self, data: Any, size: int = 0) -> None:
        """Take the beginning of an answer, and end the connection after too many of them."""
        self._heads += 1
        if self._heads <= MOST_INFORMATIONAL + 1:
            super().feed_data(data, size)
        elif self.transport is not None and not self.transport.is_closing():
            self.transport.close()
            self.set_exception(TooManyAnswersError())

    def is_connected(self) -> bool:
        """True if it may carry another request.

        Not with an answer that was not asked for, such as 408 after a pause: the next request would be given it.
        """
        return super().is_connected() and not self.should_close

    def set_exception(self, exc: BaseException, *cause: BaseException) -> None:
        """End the wait for an answer with an error, unless it has come."""
        if isinstance(exc, OSError):
            self._read_rest()
        super().set_exception(exc, *cause)

    def _read_rest(self) -> None:
        """Read what came before the connection failed: after a write that fails, the loop reads no more."""
        connection = self.transport.get_extra_info("socket") if self.transport is not None else None
        if connection is not None:
            with contextlib.suppress(OSError):  # it has nothing left
                if data := os.read(connection.fileno(), REST_BYTES):
                    self.data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        """End the answer that is being read with an error, unless it is whole."""
        if exc is not None:
            self._read_rest()
        answer = self._payload
        if exc is not None and answer is not None and not answer.is_eof():
            answer.set_exception(aiohttp.ClientOSError(*exc.args))
        super().connection_lost(exc)
        if answer is not None and not answer.is_eof() and answer.exception() is None:
            answer.set_exception(aiohttp.ClientPayloadError("the answer is not valid HTTP"))


class EngineConnector(aiohttp.TCPConnector):
    """Makes such connections, as many as are wanted, and keeps those that may be used again."""

    def __init__(self, shares: Shares, *, kept_s: float | None) -> None:
        """`kept_s`: longest time that one is kept for another request, None to keep none."""
        if kept_s is None:
            super().__init__(limit=0, force_close=True)
        else:
            super().__init__(limit=0, keepalive_timeout=kept_s)
        made: Any = functools.partial(EngineConnection, shares, loop=asyncio.get_running_loop())
        self._factory = made
