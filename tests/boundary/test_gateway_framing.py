"""Where a request or an answer ends: what the gateway makes of those that are cut, or that HTTP does not allow."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import AsyncIterator

import pytest

from metal_supervisor.gateway import engines
from metal_supervisor.gateway.engines import PIECE_BYTES
from tests.boundary.test_gateway_requests import EVENT, STREAM, Open, engine, head, run, serving, until

BODY = b'{"model":"tiny"}'
FINE = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nfine"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
HTTP_1_0 = b"POST /v1/chat/completions HTTP/1.0\r\nHost: localhost\r\n%sContent-Length: %d\r\n\r\n"
NOT_HTTP = b"zz\r\n"
"""A line in place of a chunk's size."""


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection as the kernel does for a process that was killed with unread data."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def told_in_two(gateway: Open, body: bytes, passed: asyncio.Event) -> tuple[bytes, asyncio.StreamWriter]:
    """What a client is told, and its connection; the engine ends its answer once the client has its beginning."""
    reader, writer = await gateway.connect(body)
    told = await reader.readuntil(b"some")
    passed.set()
    return told + await reader.read(), writer


@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream"])
def test_an_answer_that_stops_being_http_is_cut(kind: bytes) -> None:
    async def go() -> None:
        passed = asyncio.Event()

        async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(CHUNKED[:-2] + b"Content-Type: " + kind + b"\r\n\r\n4\r\nsome\r\n")
            await passed.wait()
            writer.write(NOT_HTTP)
            await writer.drain()

        server, port = await serving(answer)
        async with server, Open(engine(port)) as gateway:
            told, writer = await told_in_two(gateway, STREAM, passed)
            assert not told.endswith(b"0\r\n\r\n") and (b"engine_lost" in told) is (kind == b"text/event-stream")
            await until(lambda: not gateway.proxy.active)
            assert not gateway.proxy.in_flight["p"]
            writer.close()

    run(go)


def test_an_answer_without_a_length_whose_connection_is_reset_is_cut() -> None:
    async def go() -> None:
        passed = asyncio.Event()

        async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\nsome")
            await passed.wait()
            reset(writer)

        server, port = await serving(answer)
        async with server, Open(engine(port)) as gateway:
            told, writer = await told_in_two(gateway, BODY, passed)
            assert not told.endswith(b"0\r\n\r\n")
            writer.close()

    run(go)


def test_a_cut_answer_is_told_from_a_whole_one_by_a_client_of_http_1_0_too() -> None:
    """Its answer has no length, so the end of the connection would be the end of the answer."""

    async def go() -> None:
        async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(CHUNKED + b"4\r\nsome\r\n")

        server, port = await serving(answer)
        async with server, Open(engine(port)) as gateway:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(HTTP_1_0 % (b"", len(BODY)) + BODY)
            with pytest.raises(ConnectionResetError):
                await reader.read()
            writer.close()

    run(go)


def test_the_last_event_of_a_cut_stream_reaches_a_client_of_http_1_0() -> None:
    async def go() -> None:
        async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + EVENT)

        server, port = await serving(answer)
        async with server, Open(engine(port)) as gateway:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(HTTP_1_0 % (b"", len(STREAM)) + STREAM)
            told = await reader.read()
            assert b"engine_lost" in told and b"ended the connection before" in told, "the engine itself may be well"
            writer.close()

    run(go)


def test_the_error_of_a_cut_stream_does_not_fill_up_its_length() -> None:
    async def go() -> None:
        async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            kind = b"Content-Type: text/event-stream\r\n"
            writer.write(b"HTTP/1.1 200 OK\r\n" + kind + b"Content-Length: %d\r\n\r\n" % (2 * len(EVENT)) + EVENT)

        server, port = await serving(answer)
        async with server, Open(engine(port)) as gateway:
            reader, writer = await gateway.connect(STREAM)
            assert (await reader.read()).endswith(b"\r\n\r\n" + EVENT)
            writer.close()

    run(go)


@pytest.mark.parametrize("unasked", [FINE.replace(b"fine", b"else"), b"HTTP/1.1 408 Late\r\nContent-Length: 0\r\n\r\n"])
def test_an_answer_that_was_not_asked_for_answers_no_other_request(unasked: bytes) -> None:
    async def go() -> None:
        connections: list[asyncio.StreamWriter] = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append(writer)
            writer.write(FINE)
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    await reader.readuntil(b"\r\n\r\n")
                    writer.write(FINE)

        server, port = await serving(answer)
        async with server, Open(engine(port)) as gateway:
            assert (await gateway.ask(BODY)).endswith(b"fine")
            assert (await gateway.ask(BODY)).endswith(b"fine")
            assert len(connections) == 1, "it is kept"
            (((kept, _),),) = gateway.proxy._engines._pooled.connector._conns.values()
            connections[0].write(unasked)
            await until(lambda: kept.should_close)
            assert (await gateway.ask(BODY)).endswith(b"fine")
            assert len(connections) == 2

    run(go)


def test_nothing_that_follows_a_request_for_another_protocol_is_read() -> None:
    """aiohttp drops what came with such a request, so that it would read the middle of the next one as a request."""

    async def go() -> None:
        asked: list[bytes] = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.append(await reader.readexactly(len(BODY)))
            writer.write(FINE[:-6] + b"Connection: close\r\n\r\nfine")

        server, port = await serving(answer)
        upgrade = b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk"
        hidden = head(BODY) + BODY
        async with server, Open(engine(port)) as gateway:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(head(BODY, *upgrade) + BODY + head(hidden))
            told = await reader.readuntil(b"fine")
            writer.write(hidden)
            with contextlib.suppress(ConnectionResetError):
                told += await reader.read()
            assert told.count(b"HTTP/1.1 ") == 1 and b"Connection: close" in told and asked == [BODY]
            writer.close()

    run(go)


def test_a_trailer_of_a_body_is_no_header_of_the_next_request() -> None:
    """aiohttp's parser keeps the last one, and would put it before the headers of the next request."""

    async def go() -> None:
        heads: list[bytes] = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(FINE[:-6] + b"Connection: close\r\n\r\nfine")

        async def noted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            await answer(reader, writer)
            writer.close()

        server = await asyncio.start_server(noted, "127.0.0.1", 0)
        async with server, Open(engine(server.sockets[0].getsockname()[1])) as gateway:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            chunked = head(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
            writer.write(chunked + b"%x\r\n%s\r\n0\r\nX-Odd: 1\r\n\r\n" % (len(BODY), BODY))
            told = await reader.readuntil(b"fine")
            writer.write(head(BODY, b"Connection: close") + BODY)
            with contextlib.suppress(ConnectionError):
                told += await reader.read()
            assert b"Connection: close" in told and heads
            assert not any(b"X-Odd" in each for each in heads)
            writer.close()

    run(go)


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_body_that_stops_being_http_is_refused_at_once(pipelined: bool) -> None:
    async def go() -> None:
        release = asyncio.Event()

        async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await release.wait()
            writer.write(FINE)

        server, port = await serving(answer)
        async with server, Open(engine(port)) as gateway:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            if pipelined:
                writer.write(head(BODY) + BODY)
                await until(lambda: gateway.proxy.in_flight["p"])
            writer.write(head(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"4\r\nsome\r\n")
            (connection,) = gateway.connections.connections
            await until(lambda: connection._messages if pipelined else gateway.proxy.active)
            writer.write(NOT_HTTP)
            await writer.drain()
            release.set()
            told = await reader.read()
            assert told.startswith(b"HTTP/1.1 200 " if pipelined else b"HTTP/1.1 400 ")
            assert told.count(b"HTTP/1.1 400 ") == 1 and b"invalid_request" in told
            assert not gateway.proxy._bodies.held_bytes
            writer.close()

    run(go)


@pytest.mark.parametrize(("version", "asked"), [(b"1.0", False), (b"1.1", True)])
def test_no_body_is_asked_for_from_a_client_of_http_1_0(version: bytes, asked: bool) -> None:
    """It would take `100 Continue` for the answer."""

    async def go() -> None:
        async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(FINE)

        server, port = await serving(answer)
        async with server, Open(engine(port)) as gateway:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            close = b"Connection: close\r\nExpect: 100-continue\r\n"
            writer.write(HTTP_1_0.replace(b"1.0", version) % (close, len(BODY)) + BODY)
            told = await reader.read()
            assert told.endswith(b"fine") and (b"100 Continue" in told) is asked
            writer.close()

    run(go)


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_answer_given_before_a_long_body_was_read_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, is_whole: bool
) -> None:
    """An engine that has no such path may answer at once and hang up, which is here between two pieces of the body."""
    body = b'{"model":"tiny","input":"%s"}' % (b"x" * (4 << 20))

    def refuse(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(1)
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\nnone" % (4 if is_whole else 5))

    async def go() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            thread = threading.Thread(target=refuse, args=(listening,), daemon=True)
            thread.start()

            async def pieces(body: bytes) -> AsyncIterator[bytes]:
                yield body[:100]
                thread.join(10)  # the loop reads nothing meanwhile
                yield body[100:PIECE_BYTES]
                yield body[PIECE_BYTES:]

            monkeypatch.setattr(engines, "_pieces", pieces)
            async with Open(engine(listening.getsockname()[1])) as gateway:
                told = await gateway.ask(body)
        is_cut = b"Content-Length: 5\r\n" in told and told.endswith(b"\r\n\r\nnone")  # it came before the hang-up
        assert told.startswith(b"HTTP/1.1 404 ") if is_whole or is_cut else told.startswith(b"HTTP/1.1 502 ")
        assert told.endswith(b"none") is (is_whole or is_cut)

    run(go)
