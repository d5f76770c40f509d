"""Connections to the engines, for a client whose answers are passed on to others.

aiohttp 3.14 leaves four cases open: after a malformed chunk its reader never ends; it takes a reset for the end of an
answer without a length; it gives an answer that arrived on an idle connection to the next request; and it drops the
answer of an engine that hangs up before it has read all of a request, as one does that has no such path.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler

REST_BYTES = 65536
"""Most that is read of an answer after its connection has failed: such an answer is short."""


class EngineConnection(ResponseHandler):
    """One connection to an engine."""

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

    def __init__(self, *, kept_s: float | None) -> None:
        """`kept_s`: longest time that one is kept for another request, None to keep none."""
        if kept_s is None:
            super().__init__(limit=0, force_close=True)
        else:
            super().__init__(limit=0, keepalive_timeout=kept_s)
        made: Any = functools.partial(EngineConnection, loop=asyncio.get_running_loop())
        self._factory = made
