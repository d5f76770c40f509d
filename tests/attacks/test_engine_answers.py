"""Answers by which an engine would send the clients of the gateway elsewhere, steer a browser, or load the gateway.

The engine is a socket of the test's own behind a real gateway; the clients are a socket, and OpenAI's and Anthropic's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anthropic
import openai
import pytest

from metal_supervisor.gateway import engine_connections
from metal_supervisor.gateway.engine_connections import MOST_INFORMATIONAL, READ_BYTES, EngineConnection
from tests.boundary.test_gateway_requests import EVENT, STREAM, Answer, Open, engine, run, serving, until

BODY = b'{"model":"tiny"}'
STEERING = (
    b"Location: http://evil.example/",
    b"Content-Location: http://evil.example/",
    b"Refresh: 0; url=http://evil.example/",
    b"Link: <http://evil.example/>; rel=preload",
    b'Clear-Site-Data: "*"',
    b'Alt-Svc: h2="evil.example:443"',
    b'WWW-Authenticate: Basic realm="x"',
    b'Proxy-Authenticate: Basic realm="x"',
    b'Authentication-Info: nextnonce="x"',
    b"Set-Cookie: a=b",
    b"Set-Cookie2: a=b",
    b"Strict-Transport-Security: max-age=9",
    b"Public-Key-Pins: x",
    b"Access-Control-Allow-Origin: *",
    b"Access-Control-Allow-Credentials: true",
    b"Timing-Allow-Origin: *",
    b"Cross-Origin-Resource-Policy: cross-origin",
    b"Content-Security-Policy: default-src *",
    b"X-Frame-Options: ALLOW",
    b'Report-To: {"url":"http://evil.example/"}',
    b"NEL: {}",
    b"Reporting-Endpoints: a='http://evil.example/'",
    b"SourceMap: http://evil.example/",
    b"Service-Worker-Allowed: /",
    b"X-Accel-Redirect: /etc/passwd",
    b"X-Sendfile: /etc/passwd",
    b"X-Accel-Expires: 9",
    b"Via: 1.1 evil",
    b"Server: evil",
    b"x-request-id: evil",
    b"x-should-retry: true",
    b"X-New-In-2030: x",
)
"""What browsers, proxies and SDKs act on, and one header that nothing knows yet."""


def ask_by_openai(url: str) -> None:
    with openai.OpenAI(api_key="k", base_url=f"{url}/v1", max_retries=0) as client:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "SECRET PROMPT"}])


def ask_by_anthropic(url: str) -> None:
    with anthropic.Anthropic(api_key="k", base_url=url, max_retries=0) as client:
        client.messages.create(model="tiny", max_tokens=3, messages=[{"role": "user", "content": "SECRET PROMPT"}])


def answering(*parts: bytes) -> Answer:
    """An engine that answers each request with these bytes."""

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.writelines(parts)
        await writer.drain()

    return answer


async def told_by(*parts: bytes, body: bytes = BODY) -> bytes:
    """All that a client of the gateway receives when the engine answers so."""
    server, port = await serving(answering(*parts))
    async with server, Open(engine(port)) as gateway:
        return await gateway.ask(body)


@pytest.mark.parametrize("status", [300, 301, 302, 303, 304, 305, 307, 308, 399])
@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
def test_a_redirect_of_an_engine_reaches_no_client(status: int, body: bytes) -> None:
    async def go() -> None:
        where = b"Location: http://evil.example/\r\n"
        told = await told_by(b"HTTP/1.1 %d Moved\r\n%sContent-Length: 0\r\n\r\n" % (status, where), body=body)
        assert told.startswith(b"HTTP/1.1 502 ") and b'"code": "engine_refused"' in told and b"evil" not in told

    run(go)


@pytest.mark.parametrize("ask", [ask_by_openai, ask_by_anthropic])
def test_no_sdk_sends_its_prompt_to_an_address_that_an_engine_names(ask: Callable[[str], None]) -> None:
    async def go() -> None:
        seen: list[bytes] = []

        async def elsewhere(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.append(b"a request")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

        trap, trap_port = await serving(elsewhere)
        where = b"http://127.0.0.1:%d/v1/messages" % trap_port
        server, port = await serving(answering(b"HTTP/1.1 307 X\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n" % where))
        async with trap, server, Open(engine(port)) as gateway:
            with pytest.raises((openai.InternalServerError, anthropic.InternalServerError), match="307"):
                await asyncio.to_thread(ask, f"http://127.0.0.1:{gateway.port}")
            await until(lambda: not gateway.connections.connections)
        assert not seen

    run(go)


@pytest.mark.parametrize("status", [b"200", b"401", b"503"])
def test_a_header_that_steers_a_client_is_not_passed_on(status: bytes) -> None:
    async def go() -> None:
        headers = b"".join(each + b"\r\n" for each in STEERING)
        told = await told_by(b"HTTP/1.1 " + status + b" X\r\n" + headers + b"Content-Length: 4\r\n\r\nfine")
        head = told.partition(b"\r\n\r\n")[0].lower()
        assert head.startswith(b"http/1.1 " + status) and told.endswith(b"\r\n\r\nfine")
        for each in STEERING:
            assert each.lower() not in head
        names = {line.partition(b":")[0] for line in head.split(b"\r\n")[1:]}
        assert names == {b"content-length", b"content-type", b"connection", b"date", b"server", b"x-request-id"}

    run(go)


def test_what_a_client_needs_is_passed_on_and_once() -> None:
    async def go() -> None:
        needed = (
            b"content-type: audio/mpeg",
            b"content-encoding: identity",
            b"cache-control: no-cache",
            b"retry-after: 7",
            b"retry-after-ms: 7000",
            b"openai-processing-ms: 12",
        )
        headers = b"".join(each + b"\r\n" for each in needed)
        told = await told_by(b"HTTP/1.1 503 X\r\n" + headers + b"Content-Type: text/html\r\nContent-Length: 1\r\n\r\nx")
        head = told.partition(b"\r\n\r\n")[0].lower()
        assert all(head.count(each) == 1 for each in needed) and head.count(b"content-type") == 1

    run(go)


def test_trailers_and_headers_before_the_answer_are_not_passed_on() -> None:
    async def go() -> None:
        early = b"HTTP/1.1 103 Early Hints\r\nLink: <http://evil.example/>; rel=preload\r\n\r\n"
        chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: Location\r\n\r\n4\r\nfine\r\n"
        told = await told_by(early, chunked, b"0\r\nLocation: http://evil.example/\r\n\r\n")
        assert told.startswith(b"HTTP/1.1 200 ") and told.endswith(b"0\r\n\r\n")
        assert b"evil" not in told and b"trailer" not in told.lower() and b" 103 " not in told

    run(go)


EARLY = b"HTTP/1.1 103 Early Hints\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("code", [b"100", b"102", b"103", b"199"])
def test_informational_answers_without_end_end_the_request(code: bytes) -> None:
    async def go() -> None:
        ended = asyncio.Event()

        async def flood(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while True:
                    writer.write(b"HTTP/1.1 " + code + b" X\r\n\r\n")
                    await writer.drain()
                    await asyncio.sleep(0)
            except ConnectionError:
                ended.set()

        server, port = await serving(flood)
        async with server, Open(engine(port)) as gateway:
            told = await gateway.ask(BODY)
            assert told.startswith(b"HTTP/1.1 502 ") and b'"code": "engine_refused"' in told and b"100" in told
            await ended.wait()

    run(go)


def test_as_many_informational_answers_as_there_may_be_precede_an_answer() -> None:
    async def go() -> None:
        fine = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nfine"
        assert (await told_by(EARLY * MOST_INFORMATIONAL + fine)).endswith(b"fine")
        assert (await told_by(EARLY * (MOST_INFORMATIONAL + 1) + fine)).startswith(b"HTTP/1.1 502 ")

    run(go)


def pieces(told: bytes) -> list[bytes]:
    """The chunks in which a client received a body: one for each write of the gateway."""
    rest, found = told.partition(b"\r\n\r\n")[2], []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        found.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    assert found.pop() == b"", "the body is whole"
    return found


def test_chunks_of_one_byte_are_passed_on_together_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a read that costs more than it does, the engine is beyond its share on a machine of any speed."""
    monkeypatch.setattr(engine_connections, "PASS_ON_S", 0.001)

    async def go() -> None:
        async def trickle(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(CHUNKED)
            for _ in range(2000):
                writer.write(b"1\r\na\r\n")
                await asyncio.sleep(0)
            writer.write(b"0\r\n\r\n")

        server, port = await serving(trickle)
        async with server, Open(engine(port)) as gateway:
            found = pieces(await gateway.ask(BODY))
        assert b"".join(found) == b"a" * 2000 and len(found) < 500, len(found)

    run(go)


def test_a_read_takes_little_of_what_an_engine_has_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    receive = EngineConnection.data_received

    def counted(connection: EngineConnection, data: bytes) -> None:
        sizes.append(len(data))
        receive(connection, data)

    monkeypatch.setattr(EngineConnection, "data_received", counted)

    async def go() -> None:
        told = await told_by(CHUNKED, b"1\r\na\r\n" * 50_000, b"0\r\n\r\n")
        assert b"".join(pieces(told)) == b"a" * 50_000

    run(go)
    assert max(sizes) <= READ_BYTES


def test_a_stream_of_tokens_is_passed_on_event_by_event() -> None:
    async def go() -> None:
        taken = asyncio.Event()

        async def speak(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
            for _ in range(200):
                writer.write(EVENT)
                await taken.wait()
                taken.clear()

        server, port = await serving(speak)
        async with server, Open(engine(port)) as gateway:
            reader, writer = await gateway.connect(STREAM)
            for _ in range(200):
                assert (await reader.readuntil(EVENT)).endswith(EVENT)
                taken.set()
            writer.close()

    run(go)
