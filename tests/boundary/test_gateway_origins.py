"""Web pages at the gateway: those of the origins that the settings name, at the paths of models, and no others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from metal_supervisor.gateway import worker as workers
from metal_supervisor.settings.schema import Settings
from metal_supervisor.state.directory import StateDir
from tests.boundary.test_gateway_requests import EVENT, STREAM, Open, engine, run, serving

PAGE = "http://localhost:3000"
OBSIDIAN = "app://obsidian.md"
EXTENSION = f"chrome-extension://{'abcdefghijklmnop' * 2}"
OTHERS = (
    "null",
    "*",
    "http://localhost",
    "http://localhost:3001",
    "https://localhost:3000",
    "http://LOCALHOST:3000",
    "http://localhost:3000/",
    "http://localhost:3000.evil.example",
    "http://a.localhost:3000",
    "http://127.0.0.1:3000",
    "app://obsidian.md.evil.example",
    "app://evil",
    f"chrome-extension://{'p' * 32}",
    f"{PAGE}, {PAGE}",
    "",
)


async def asked(gateway: Open, method: str, path: str, *headers: str, host: str = "localhost") -> bytes:
    """The head of an answer, in lower case, and its body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", *headers]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n")
    told = await reader.read()
    writer.close()
    first, _, body = told.partition(b"\r\n\r\n")
    return first.lower() + b"\r\n\r\n" + body


def opened() -> Open:
    return Open(engine(1), origins=(PAGE, OBSIDIAN, EXTENSION))


@pytest.mark.parametrize("origin", [PAGE, OBSIDIAN, EXTENSION])
def test_a_page_of_a_named_origin_may_use_models(origin: str) -> None:
    async def go() -> None:
        async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            own = b"Access-Control-Allow-Origin: *\r\nAccess-Control-Allow-Credentials: true\r\n"
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + own + b"\r\n" + EVENT)

        server, port = await serving(answer)
        async with server, Open(engine(port), origins=(PAGE, OBSIDIAN, EXTENSION)) as gateway:
            stream = await gateway.ask(STREAM, b"Origin: " + origin.encode())
            listing = await asked(gateway, "GET", "/v1/models", f"Origin: {origin}")
            unknown = await asked(gateway, "GET", "/v1/models/none", f"Origin: {origin}")
        for told, status in ((stream.lower(), b"200"), (listing, b"200"), (unknown, b"404")):
            assert told.startswith(b"http/1.1 " + status), told
            assert told.count(b"access-control-allow-origin") == 1
            assert f"access-control-allow-origin: {origin}\r\n".encode() in told
            assert b"\r\nvary: origin\r\n" in told and b"allow-credentials" not in told

    run(go)


@pytest.mark.parametrize("origin", OTHERS)
def test_a_page_of_any_other_origin_is_refused(origin: str) -> None:
    async def go() -> None:
        async with opened() as gateway:
            for method in ("GET", "OPTIONS"):
                wanted = f"Origin: {origin}", "Access-Control-Request-Method: POST"
                told = await asked(gateway, method, "/v1/chat/completions", *wanted)
                assert told.startswith(b"http/1.1 403 ") and b"origin_not_allowed" in told, told
                assert b"access-control-" not in told and b"\r\nvary: origin\r\n" in told
            twice = await asked(gateway, "GET", "/v1/models", f"Origin: {PAGE}", f"Origin: {PAGE}")
            assert twice.startswith(b"http/1.1 403 ")

    run(go)


@pytest.mark.parametrize("origins", [(), (OBSIDIAN,)])
def test_the_refusal_names_the_setting_that_lets_an_origin_in(origins: tuple[str, ...]) -> None:
    async def go() -> None:
        async with Open(engine(1), origins=origins) as gateway:
            told = await asked(gateway, "GET", "/v1/models", f"Origin: {PAGE}")
            assert told.startswith(b"http/1.1 403 ") and b"gateway_origins" in told and PAGE.encode() in told
            null = await asked(gateway, "GET", "/v1/models", "Origin: null")
            assert b"gateway_origins" not in null, "it cannot name that"

    run(go)


@pytest.mark.parametrize("path", ["/healthz", "/", "/status", "/metrics", "/load", "/services/default/tiny/slots"])
def test_a_page_may_use_nothing_but_models(path: str) -> None:
    async def go() -> None:
        async with opened() as gateway:
            for method in ("GET", "OPTIONS"):
                wanted = f"Origin: {PAGE}", "Access-Control-Request-Method: GET"
                told = await asked(gateway, method, path, *wanted)
                assert told.startswith(b"http/1.1 403 ") and b"access-control-" not in told

    run(go)


@pytest.mark.parametrize(
    ("path", "method"),
    [("/v1/chat/completions", "POST"), ("/v1/models", "GET"), ("/services/default/tiny/v1/embeddings", "POST")],
)
def test_a_preflight_allows_what_the_path_takes(path: str, method: str) -> None:
    async def go() -> None:
        asks = f"Access-Control-Request-Method: {method}"
        wanted = "Access-Control-Request-Headers: authorization,content-type,x-stainless-os"
        async with opened() as gateway:
            told = await asked(gateway, "OPTIONS", path, f"Origin: {PAGE}", asks, wanted)
            odd = await asked(gateway, "OPTIONS", path, f"Origin: {PAGE}", "Access-Control-Request-Method: DELETE")
            bare = await asked(gateway, "OPTIONS", path, f"Origin: {PAGE}")
        assert told.startswith(b"http/1.1 204 ") and f"access-control-allow-origin: {PAGE}\r\n".encode() in told
        assert f"access-control-allow-methods: {method.lower()}\r\n".encode() in told
        assert b"access-control-allow-headers: authorization,content-type,x-stainless-os\r\n" in told
        assert b"allow-credentials" not in told and b"*" not in told
        assert f"access-control-allow-methods: {method.lower()}\r\n".encode() in odd, "the browser refuses it"
        assert bare.startswith(b"http/1.1 404 ")

    run(go)


@pytest.mark.parametrize("names", ["*", "a b", "x\x01y", "a" * 2000])
def test_a_preflight_allows_no_header_that_is_no_name(names: str) -> None:
    async def go() -> None:
        async with opened() as gateway:
            told = await asked(
                gateway,
                "OPTIONS",
                "/v1/models",
                f"Origin: {PAGE}",
                "Access-Control-Request-Method: GET",
                f"Access-Control-Request-Headers: {names}",
            )
            assert b"access-control-allow-headers" not in told

    run(go)


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("host.docker.internal", 200),
        ("gateway.docker.internal", 200),
        ("docker.for.mac.localhost", 200),
        ("docker.for.mac.host.internal", 200),
        ("host.k3d.internal:9100", 200),
        ("host.orb.internal", 200),
        ("host.containers.internal", 200),
        ("host.lima.internal", 200),
        ("host.rancher-desktop.internal", 200),
        ("host.minikube.internal", 200),
        ("HOST.DOCKER.INTERNAL", 200),
        ("localhost", 200),
        ("127.0.0.1", 200),
        ("evil.example", 421),
        ("x.host.docker.internal", 421),
        ("host.docker.internal.evil.example", 421),
        ("host.evil.internal", 421),
        ("docker.orb.internal", 421),
        ("evil.localhost", 421),
        ("", 421),
    ],
)
def test_only_exact_names_that_cannot_be_rebound_are_accepted(name: str, status: int, tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.create()

    async def go() -> None:
        worker = workers.Worker(Settings(state_dir=str(tmp_path), gateway="127.0.0.1:1"), state, lambda: None)
        await worker._proxy.close()
        async with opened() as gateway:
            gateway.proxy.hosts = worker._hosts()
            for origin in (), (f"Origin: {PAGE}",):
                told = await asked(gateway, "GET", "/v1/models", *origin, host=name)
                assert told.startswith(f"http/1.1 {status} ".encode()), told

    run(go)


def test_the_setting_reaches_the_gateway(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.create()

    async def go() -> None:
        given = Settings(state_dir=str(tmp_path), gateway="127.0.0.1:1", gateway_origins=f" {PAGE},{OBSIDIAN}")
        worker = workers.Worker(given, state, lambda: None)
        assert worker._proxy.origins == {PAGE, OBSIDIAN}
        await worker._proxy.close()

    run(go)
