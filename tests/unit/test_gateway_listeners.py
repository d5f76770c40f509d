"""A listener that is closed resets no connection that it has accepted."""

from __future__ import annotations

import asyncio
import socket

import pytest

from metal_supervisor.gateway import listeners


class Answer(asyncio.Protocol):
    """Answers whatever comes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, _data: bytes) -> None:
        assert isinstance(self._transport, asyncio.Transport)
        self._transport.write(b"here")
        self._transport.close()


@pytest.mark.parametrize("at", ["before it is accepted", "in the turn in which it is accepted"])
def test_a_connection_that_comes_while_a_listener_is_closed_is_answered_or_left_to_the_next(at: str) -> None:
    async def asked() -> bytes:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = await loop.create_server(Answer, sock=listener.dup())
            with socket.create_connection(listener.getsockname(), 5) as client:  # it waits in the queue of the socket
                client.sendall(b"x")
                if at == "before it is accepted":
                    listeners.close(server)
                    await asyncio.sleep(0)
                    await loop.create_server(Answer, sock=listener.dup())  # as the next worker, with the same socket
                else:  # the turn closes the server after the connection is accepted, before it has a transport
                    loop.call_soon(lambda: loop.call_soon(listeners.close, server))
                return await loop.run_in_executor(None, client.recv, 10)

    assert asyncio.run(asked()) == b"here"
