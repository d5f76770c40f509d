"""The gateway's way of a request, before engines that are sockets of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor.gateway import access
from metal_supervisor.gateway import worker as workers
from metal_supervisor.gateway.access import Doorman
from metal_supervisor.gateway.backends import BackendReader
from metal_supervisor.gateway.connections import ClientConnections
from metal_supervisor.gateway.errors import GatewayError
from metal_supervisor.gateway.listeners import HANDSHAKE_S
from metal_supervisor.gateway.proxy import Proxy
from metal_supervisor.gateway.routing import Backend, ServiceTable
from metal_supervisor.settings.schema import Settings
from metal_supervisor.spec.processes import EngineUse, Observed, RunNote
from metal_supervisor.state import gateway_note
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.doorbell import Doorbell, ring
from tests.support.records import a_record

WITHIN_S = 30.0
STREAM = b'{"model":"tiny","stream":true}'
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"w"}}]}\n\n'
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Services:
    """What a gateway serves, in place of the records."""

    def __init__(self, *backends: Backend) -> None:
        self.services, self.read_at = ServiceTable(backends), time.monotonic()


def engine(port: int, program: str = "p", **other: Any) -> Backend:
    given = {"ready": True, "phase": "Ready", "reason": "Serving", "message": "", **other}
    return Backend(program, "default", "tiny", address="127.0.0.1", port=port, **{"runtime": "llama-server", **given})


def at_rest(program: str = "p", **other: Any) -> Backend:
    return engine(1, program, **{"ready": False, "held": True, "on_demand": True, "reason": "Unloaded", **other})


class Open:
    """A gateway in this loop."""

    def __init__(self, *backends: Backend, origins: Iterable[str] = ()) -> None:
        self._origins = frozenset(origins)
        self.told: Mapping[str, EngineUse] = {}
        """What the controller knows, by program."""
        self.reader = Services(*backends)
        self.port = 0

    async def __aenter__(self) -> Open:
        reader: Any = self.reader
        self.proxy = Proxy(reader, Doorman(), None, 0, self._keep, self._origins)
        self.proxy.room.look(self.reader.services)
        self.connections = ClientConnections(self.proxy)
        self._server = await asyncio.get_running_loop().create_server(self.connections, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.proxy._public_port = self.port
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self.proxy.close()

    def _keep(self, uses: Mapping[str, EngineUse]) -> bool:
        self.told = uses
        return True

    def now(self, *backends: Backend) -> None:
        """The services have changed."""
        self.reader.services = ServiceTable(backends)
        self.proxy.room.look(self.reader.services)

    async def connect(self, body: bytes, *headers: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A client's connection, on which a chat was asked."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(head(body, *headers) + body)
        return reader, writer

    async def ask(self, body: bytes, *headers: bytes) -> bytes:
        """All that comes of a chat, until the connection ends."""
        reader, writer = await self.connect(body, *headers, b"Connection: close")
        try:
            return await reader.read()
        finally:
            writer.close()


def head(body: bytes, *headers: bytes) -> bytes:
    more = b"".join(each + b"\r\n" for each in headers)
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        + more
        + b"Content-Length: %d\r\n\r\n" % len(body)
    )


async def serving(answer: Answer) -> tuple[asyncio.Server, int]:
    """An engine that answers each connection so, and its port."""

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await answer(reader, writer)
        writer.close()

    server = await asyncio.start_server(served, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


async def until(what: Callable[[], object]) -> None:
    """Wait for a state. The events are turns of the loop."""
    ends = time.monotonic() + WITHIN_S
    while not what():
        assert time.monotonic() < ends
        await asyncio.sleep(0.005)


def run(go: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(go(), WITHIN_S * 2))


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_an_engine_sends_the_gateway_to_no_other_address(status: int) -> None:
    async def go() -> None:
        seen: list[bool] = []

        async def secret(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.append(True)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nSECRET")

        _, elsewhere = await serving(secret)

        async def moved(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            where = b"http://127.0.0.1:%d/x" % elsewhere
            writer.write(b"HTTP/1.1 %d Moved\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n" % (status, where))

        _, port = await serving(moved)
        async with Open(engine(port)) as gateway:
            told = await gateway.ask(b'{"model":"tiny"}')
        assert told.startswith(b"HTTP/1.1 502 ") and not seen

    run(go)


@pytest.mark.parametrize(("last", "whole"), [(b"data: [DONE]\n\n", True), (b"", False)])
def test_a_stream_of_http_1_0_is_whole_with_its_last_event_only(last: bytes, whole: bool) -> None:
    async def go() -> None:
        async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + EVENT * 20 + last)

        _, port = await serving(answer)
        async with Open(engine(port, runtime="mlx-server")) as gateway:
            told = await gateway.ask(STREAM)
        assert told.endswith(b"0\r\n\r\n") is whole and (b"engine_lost" in told) is not whole

    run(go)


def test_who_lacks_an_engine_s_key_has_nothing_loaded() -> None:
    async def go() -> None:
        async with Open(at_rest(key="secret")) as gateway:
            told = await gateway.ask(b'{"model":"tiny"}', b"Authorization: Bearer wrong")
            assert told.startswith(b"HTTP/1.1 401 ")
            assert not any(use.waiting for use in gateway.told.values())

    run(go)


def test_a_client_that_leaves_with_its_body_does_not_wait() -> None:
    async def go() -> None:
        body = b'{"model":"tiny"}'
        async with Open(at_rest()) as gateway:
            for _ in range(40):
                _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
                writer.write(head(body))
                await until(lambda: gateway.proxy.active)
                writer.write(body)
                writer.close()
                await until(lambda: not gateway.proxy.active)
            assert not gateway.proxy.room.waiting.total()

    run(go)


def test_a_worker_that_ends_closes_idle_connections_and_reads_the_bodies_of_requests_under_way() -> None:
    async def go() -> None:
        async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\nfine")

        server, port = await serving(answer)
        body = b'{"model":"tiny"}'
        async with server, Open(engine(port)) as gateway:
            idle, idle_writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(head(body))
            await until(lambda: gateway.proxy.active and len(gateway.connections.connections) == 2)
            gateway.proxy.closing = True
            gateway.connections.close_idle()
            assert not await idle.read()
            writer.write(body)
            assert (await reader.read()).endswith(b"fine")
            assert not gateway.proxy.active
            for each in (idle_writer, writer):
                each.close()
                await each.wait_closed()

    run(go)


def test_a_request_that_fails_in_the_gateway_is_logged_as_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("a mistake of ours")

    async def go() -> None:
        async with Open(engine(1)) as gateway:
            monkeypatch.setattr(gateway.proxy._engines, "send", fail)
            assert (await gateway.ask(b'{"model":"tiny"}')).startswith(b"HTTP/1.1 500 ")

    with caplog.at_level("INFO", "gateway"):
        run(go)
    failed, request = caplog.records
    assert failed.exc_info and vars(failed)["id"] == vars(request)["id"]
    assert (vars(request)["status"], vars(request)["end"]) == (500, "failed")


def test_a_client_that_leaves_while_records_change_does_not_wait() -> None:
    async def go() -> None:
        async with Open(at_rest()) as gateway:
            for _ in range(40):
                _, writer = await gateway.connect(b'{"model":"tiny"}')
                await until(lambda: gateway.proxy.room.waiting["p"])
                writer.close()
                while gateway.proxy.active:
                    gateway.now(at_rest())
                    await asyncio.sleep(0)

    run(go)


def test_who_waits_for_one_replica_waits_for_the_next_when_that_cannot_be_loaded() -> None:
    async def go() -> None:
        async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\nfine")

        server, port = await serving(answer)
        async with Open(at_rest(), at_rest("p@1")) as gateway:
            asked = asyncio.ensure_future(gateway.ask(b'{"model":"tiny"}'))
            await until(lambda: gateway.told["p"].waiting)
            failed = at_rest(held=False, phase="Failed", reason="CrashLoopBackOff")
            gateway.now(failed, at_rest("p@1"))
            await until(lambda: gateway.told["p@1"].waiting == 1 and not gateway.told["p"].waiting)
            gateway.now(failed, engine(port, "p@1", on_demand=True))
            assert (await asked).endswith(b"fine")
            server.close()

    run(go)


def test_a_connection_counts_from_when_it_is_accepted() -> None:
    async def go() -> None:
        proxy: Any = None
        made = ClientConnections(proxy)
        first = made()
        assert made.count == 1, "accepted, as before a handshake"
        transport: Any = object()
        made.connection_made(first, transport)
        assert made.count == 1
        made()
        assert made.count == 2
        made._begun = dict.fromkeys(made._begun, time.monotonic() - HANDSHAKE_S - 1)
        assert made.count == 1, "one whose handshake failed counts no longer than that may take"

    run(go)


def test_a_long_integer_in_a_body_is_refused_at_once() -> None:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(workers.INTEGER_DIGITS)
    try:

        async def go() -> None:
            async with Open(engine(1)) as gateway:
                told = await gateway.ask(b'{"model":"tiny","seed":' + b"9" * 641 + b"}")
                assert told.startswith(b"HTTP/1.1 400 ")

        run(go)
    finally:
        sys.set_int_max_str_digits(before)


def test_a_worker_that_cannot_serve_leaves_the_note_to_the_one_that_does(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.create()
    settings = Settings(state_dir=str(state.path), gateway="127.0.0.1:1")
    mine, ancestor = os.getpid(), os.getppid()

    async def go() -> None:
        waits = workers.Worker(settings, state, lambda: None)
        gateway_note.write(state.path, {"pid": ancestor, "problem": "", "at": time.time()})  # a process that lives
        waits._say("the certificate is bad")
        kept = gateway_note.read(state.path)
        assert kept["pid"] == ancestor and not kept["problem"] and "bad" in kept["next"]["problem"]
        gateway_note.write(state.path, {"pid": ancestor, "problem": "", "at": 1.0})  # of an earlier boot
        waits._say("the certificate is very bad")
        assert gateway_note.read(state.path)["pid"] == mine
        gateway_note.write(state.path, {"pid": 0, "problem": ""})
        waits._say("the certificate is worse")
        assert gateway_note.read(state.path)["pid"] == mine
        gateway_note.write(state.path, {"pid": ancestor, "problem": "", "at": time.time()})
        waits._serving(waits._public)
        assert gateway_note.read(state.path)["pid"] == mine
        await waits._proxy.close()

    run(go)


@pytest.mark.parametrize("taken", [True, False])
def test_a_port_at_which_it_cannot_listen_is_none_of_an_on_demand_service(tmp_path: Path, taken: bool) -> None:
    state = StateDir(tmp_path)
    state.create()
    state.write_record(a_record(idle_s=60.0, port=1, front_port=2))
    gateway_note.write(state.path, {"pid": 0, "fronts": [2]})
    bell = Doorbell(state.path, "controller")

    async def go() -> None:
        worker = workers.Worker(Settings(state_dir=str(state.path), gateway="127.0.0.1:1"), state, lambda: None)
        worker._reader.read()
        (address,) = worker._reader.services.fronts()
        worker._serving(worker._public)
        assert gateway_note.read(state.path)["fronts"] == [2], "the holder has it, of the worker before"
        assert not bell._waiting()
        worker._not_given(address if taken else "", "Address already in use")
        note = gateway_note.read(state.path)
        assert note["fronts"] == [] and gateway_note.taken(note) == ({2} if taken else set())
        assert bool(bell._waiting()) is taken, "the controller gives the service another"
        worker._not_given(address if taken else "", "")
        note = gateway_note.read(state.path)
        assert note["fronts"] == [] and not gateway_note.taken(note), "before it listens"
        await worker._proxy.close()

    run(go)


def test_a_worker_without_the_public_port_hears_of_its_services_and_looks_once_who_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = StateDir(tmp_path)
    state.create()
    asked: list[int] = []
    monkeypatch.setattr(workers.processes, "port_holder", lambda port: asked.append(port) or "node_exporter")

    async def go() -> None:
        worker = workers.Worker(Settings(state_dir=str(state.path), gateway="127.0.0.1:1"), state, lambda: None)
        for _ in range(2):
            worker._not_given("127.0.0.1:1", "Address already in use")
        assert asked == [1] and "node_exporter has it" in gateway_note.read(state.path)["problem"]
        worker._serving("127.0.0.1:2")
        assert not worker._serves and worker._bell is not None
        worker._news.clear()
        ring(state.path, "gateway")
        await asyncio.wait_for(worker._news.wait(), 10)
        await worker._proxy.close()

    run(go)


@pytest.mark.parametrize(("asked", "key"), [("as before", "old"), ("with another key", "")])
def test_the_key_of_an_engine_at_rest_is_not_known_after_an_edit(tmp_path: Path, asked: str, key: str) -> None:
    state = StateDir(tmp_path)
    state.create()
    spec = {"asked": "as before", "env": {"LLAMA_API_KEY": "old, new"}}
    note = asdict(RunNote(0, 0, "", spec, (), 0.0, "", "")) | {"format": 1}
    state.note_path("default.tiny").write_text(json.dumps(note))
    state.write_record(a_record(asked=asked, port=1, idle_s=60.0, edition=None))
    reader = BackendReader(Settings(state_dir=str(tmp_path)), state)
    reader.read()
    (found,) = reader.services.backends
    assert (found.key, found.further_keys) == (key, ("new",) if key else ())
    for sent in ("old", "new") if key else ():  # as while one is replaced by the other
        access.check_engine_key(access.ANYONE, {"Authorization": f"Bearer {sent}"}, found)
    if key:
        with pytest.raises(GatewayError):
            access.check_engine_key(access.ANYONE, {"Authorization": "Bearer other"}, found)


@pytest.mark.parametrize(("stopped", "ready"), [(False, True), (True, False)])
def test_an_engine_that_was_told_to_end_gets_no_request_before_the_next_one(
    tmp_path: Path, stopped: bool, ready: bool
) -> None:
    """A daemon's attacher lives on while it unloads the model; who asks meanwhile waits, and gets no 404."""
    state = StateDir(tmp_path)
    state.create()
    state.write_record(a_record(port=1, idle_s=60.0, stop_sent=stopped))
    state.write_observed(Observed("default.tiny", os.getpid(), True, 0.0, "RUNNING", served=True))
    reader = BackendReader(Settings(state_dir=str(tmp_path)), state)
    reader.read()
    assert [each.ready for each in reader.services.backends] == [ready]


def test_a_list_of_models_that_is_no_list_is_an_engine_that_is_not_ready() -> None:
    async def go() -> None:
        async def deep(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"[" * 100_000)
            await writer.drain()

        server, port = await serving(deep)
        async with server, Open(engine(port, runtime="mlx-server", checks_model=True, names_itself=True)) as gateway:
            told = await gateway.ask(b'{"model":"tiny"}')
            assert told.startswith(b"HTTP/1.1 503 ") and b"does not tell its model" in told

    run(go)


def test_a_list_of_models_without_an_end_is_not_kept() -> None:
    sent = 0

    async def go() -> None:
        async def flood(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                while sent < 1 << 28:
                    writer.write(b" " * (1 << 20))
                    sent += 1 << 20
                    await writer.drain()

        server, port = await serving(flood)
        async with server, Open(engine(port, runtime="mlx-server", checks_model=True, names_itself=True)) as gateway:
            told = await gateway.ask(b'{"model":"tiny"}')
            assert told.startswith(b"HTTP/1.1 503 ") and sent < 1 << 25

    run(go)


def test_a_header_of_an_engine_that_http_forbids_is_left_out() -> None:
    async def go() -> None:
        async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            headers = b"Retry-After: a\x01b\r\nCache-Control: a\tb\r\nContent-Length: 2\r\n\r\n"
            writer.write(b"HTTP/1.1 200 OK\r\n" + headers + b"ok")

        server, port = await serving(answer)
        async with server, Open(engine(port)) as gateway:
            told = await gateway.ask(b'{"model":"tiny"}')
            assert told.startswith(b"HTTP/1.1 200 ") and told.endswith(b"ok")
            assert b"Cache-Control" in told and b"Retry-After" not in told

    run(go)


@pytest.mark.parametrize("status", [b"000", b"099", b"101", b"199", b"600", b"999"])
def test_a_status_that_ends_no_request_is_not_passed_on(status: bytes) -> None:
    """What clients make of it differs: some wait for more, or take the connection for another protocol's."""

    async def go() -> None:
        async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            upgrade = b"Upgrade: x\r\nConnection: upgrade\r\n"
            writer.write(b"HTTP/1.1 %s Odd\r\n%sContent-Length: 2\r\n\r\nok" % (status, upgrade))

        server, port = await serving(answer)
        async with server, Open(engine(port)) as gateway:
            told = await gateway.ask(b'{"model":"tiny"}')
        assert told.startswith(b"HTTP/1.1 502 "), told[:40]

    run(go)
