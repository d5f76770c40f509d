"""The sidecar's HTTP server against clients that are slow, large, many, or not whom they should be asking."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from metal_supervisor.sidecar.http import server as servers
from metal_supervisor.sidecar.http.app import PATHS
from tests.support import page_boards as boards
from tests.support.system import eventually

SECURITY = {name.lower() for name in servers.HEADERS}


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with boards.served(lambda: boards.board(4)) as found:
        yield found


def port_of(server: Any) -> int:
    return int(server.effective_port)


def raw(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def answered(sock: socket.socket) -> bytes:
    """Everything until the server closes, or resets because of what it did not read."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(65536):
            found += part
    return found


def ask(port: int, path: str = "/healthz", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def test_a_server_without_a_connection_sleeps_until_there_is_one(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    loop = server.asyncore.loop

    def counted(**given: Any) -> None:
        pauses.append(given["timeout"])
        loop(**given)

    monkeypatch.setattr(server.asyncore, "loop", counted)
    with raw(port_of(server)):  # the loop under way is still one without a connection
        eventually(lambda: 1 in pauses)
    eventually(lambda: pauses[-1] == servers.REST_S)
    assert ask(port_of(server))[0] == 200


def with_host(port: int, host: str | None) -> bytes:
    line = "" if host is None else f"Host: {host}\r\n"
    with raw(port) as sock:
        sock.sendall(f"GET /status HTTP/1.1\r\n{line}Connection: close\r\n\r\n".encode("latin-1"))
        return answered(sock)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.0.0.1:9090", "LOCALHOST:1", "[::1]:9090"])
def test_loopback_may_be_asked_by_its_names(server: Any, host: str) -> None:
    assert with_host(port_of(server), host).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "host",
    [
        None,
        "",
        "evil.example",
        "evil.example:9090",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "localhost.",
        "127.0.0.1:9090:1",
        "127.0.0.1@evil.example",
        "localhost:x",
        "::1",
        "[::1",
        "127.0.0.2",
        "10.0.0.5",
        "localhost, evil.example",
        "evil.example\r\nHost: localhost",
        "localhost\r\nHost: evil.example",
        "localhos\xfe",
    ],
)
def test_any_other_name_is_refused_and_reads_nothing(server: Any, host: str | None) -> None:
    answer = with_host(port_of(server), host)
    assert answer.startswith(b"HTTP/1.1 421 ")
    assert b"model-000" not in answer and b"mac-studio" not in answer
    assert set(json.loads(answer.partition(b"\r\n\r\n")[2])) == {"error", "message"}


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"])
@pytest.mark.parametrize("path", ["/status", "/healthz", "/nothing"])
def test_only_get_and_head_are_taken(server: Any, method: str, path: str) -> None:
    code, headers, _ = ask(port_of(server), path, method)
    assert (code, headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", [*PATHS, "/nothing"])
def test_head_says_what_get_would_and_has_no_body(server: Any, path: str) -> None:
    code, headers, body = ask(port_of(server), path)
    with raw(port_of(server)) as sock:
        sock.sendall(f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        head, _, rest = answered(sock).partition(b"\r\n\r\n")
    assert rest == b""
    assert head.startswith(f"HTTP/1.1 {code} ".encode())
    assert f"\r\nContent-Length: {len(body)}\r\n".encode() in head and int(headers["content-length"]) == len(body)


@pytest.mark.parametrize(
    ("method", "path", "host"),
    [("GET", path, "localhost") for path in PATHS]
    + [("GET", "/nothing", "localhost"), ("POST", "/status", "localhost"), ("GET", "/status", "evil.example")],
)
def test_every_answer_tells_browsers_to_do_nothing_with_it(server: Any, method: str, path: str, host: str) -> None:
    _, headers, _ = ask(port_of(server), path, method, Host=host)
    assert headers.keys() >= SECURITY and "server" not in headers
    assert headers["cache-control"] == "no-store" and headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]


# ── what is large ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("request_", "refused"),
    [
        (b"GET /status HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (64 << 10) + b"\r\n\r\n", b"431"),
        (b"GET /" + b"y" * (64 << 10) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", b"431"),
        (b"POST /status HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999999\r\n\r\n", b"413"),
        (
            b"GET /status HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            + b"400\r\n"
            + b"z" * 1024
            + b"\r\n",
            b"413",
        ),
        (b"GET /status HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n", b"501"),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"400"),
    ],
)
def test_what_is_too_large_or_no_request_is_refused_and_nobody_else_notices(
    server: Any, request_: bytes, refused: bytes
) -> None:
    with raw(port_of(server)) as sock:
        with contextlib.suppress(ConnectionError):  # it may have been refused before all was sent
            sock.sendall(request_)
        answer = answered(sock)
    assert answer or len(request_) > servers.MAX_HEADER_BYTES  # only a reset, of what was not read, may take it along
    assert not answer or answer.split()[1] == refused
    head = answer.partition(b"\r\n\r\n")[0].decode().lower()
    assert not answer or all(f"\r\n{name}:" in head for name in SECURITY)
    assert b"model-000" not in answer
    assert ask(port_of(server))[0] == 200


def test_a_short_body_is_read_so_that_its_sender_sees_why_it_is_refused(server: Any) -> None:
    with raw(port_of(server)) as sock:
        sock.sendall(b"POST /status HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
        assert answered(sock).startswith(b"HTTP/1.1 405 ")


# ── who is slow, and who are many ────────────────────────────────────────────────────────────────


def test_a_request_that_does_not_arrive_in_time_is_given_up_though_a_byte_comes_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with boards.served(boards.board) as server, raw(port_of(server)) as slow:
        monkeypatch.setattr(servers, "REQUEST_S", 0.2)
        slow.settimeout(0.02)
        slow.sendall(b"GET /status HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        closed = False
        for _ in range(1000):
            try:
                closed = slow.recv(1) == b""
            except TimeoutError:
                with contextlib.suppress(ConnectionError):
                    slow.sendall(b"a")
            except ConnectionError:
                closed = True
            if closed:
                break
        assert closed
        assert ask(port_of(server))[0] == 200


def test_200_idle_connections_and_a_slow_sender_are_in_nobodys_way(server: Any) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(200):
            sock = stack.enter_context(raw(port_of(server)))
            if number % 2:
                sock.sendall(b"GET /status HT")
        for path in PATHS:
            assert ask(port_of(server), path)[0] in (200, 503), path


def test_more_connections_than_are_taken_end_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "MAX_CONNECTIONS", 20)
    with boards.served(boards.board) as server, contextlib.ExitStack() as stack:
        server.adj.channel_timeout, server.adj.cleanup_interval = 1, 1
        for _ in range(40):
            stack.enter_context(raw(port_of(server)))
        assert ask(port_of(server))[0] == 200


def test_clients_that_ask_and_never_read_are_in_nobodys_way_and_are_put_out() -> None:
    page = b"x" * (8 << 20)

    def large(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        body = page if environ["PATH_INFO"] == "/large" else b"ok"
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]

    with boards.served(boards.board, large) as server, contextlib.ExitStack() as stack:
        server.adj.channel_timeout, server.adj.cleanup_interval = 1, 1
        deaf = [stack.enter_context(raw(port_of(server))) for _ in range(4)]
        for sock in deaf:
            sock.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20)
        assert ask(port_of(server))[0] == 200
        eventually(lambda: not server.active_channels, 20, "their connections to be closed")
        assert all(len(answered(sock)) < len(page) for sock in deaf), "each is still connected, from its side"


def test_a_client_that_leaves_in_the_middle_costs_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with boards.served(lambda: boards.board(100)) as server:
        for _ in range(20):
            with raw(port_of(server)) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # leaves with a reset
                sock.sendall(b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n" * 5)
        assert ask(port_of(server))[0] == 200
        # Before the end of the server, which tells of what it leaves unanswered.
        assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("target", [b"//[/", b"http://[::1/metrics", b"\xff", b"*", b"/%00"])
def test_no_target_of_a_request_costs_a_line_of_the_log(
    server: Any, caplog: pytest.LogCaptureFixture, target: bytes
) -> None:
    caplog.set_level(logging.INFO)
    with raw(port_of(server)) as sock:
        sock.sendall(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % target)
        answered(sock)
    assert ask(port_of(server))[0] == 200
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_page_that_cannot_be_made_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_environ: dict[str, Any], _start_response: Any) -> list[bytes]:
        raise RuntimeError("a mistake of ours")

    with boards.served(boards.board, broken) as server:
        assert ask(port_of(server), "/x")[0] == 500
        (record,) = caplog.records
        assert record.exc_info and (record.name, vars(record)["path"]) == ("sidecar", "/x")


def test_a_burst_is_answered_whole(server: Any) -> None:
    codes: list[int] = []
    threads = [threading.Thread(target=lambda: codes.append(ask(port_of(server), "/metrics")[0])) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert codes == [200] * 50


# ── what others wrote ────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def hostile() -> Iterator[Any]:
    with boards.served(lambda: boards.board(8, boards.HOSTILE, supervisord_error=boards.HOSTILE)) as found:
        yield found


def test_status_stays_json_whatever_the_names_are(hostile: Any) -> None:
    body = ask(port_of(hostile), "/status")[2]
    assert body.isascii() and body.count(b"\n") == 1
    assert json.loads(body)["node"] == boards.HOSTILE


def test_readiness_stays_one_line_each(hostile: Any) -> None:
    code, _, body = ask(port_of(hostile), "/readyz?verbose")
    text = body.decode()
    assert code == 503 and len(text.splitlines()) == 5
    assert not [char for char in text.replace("\n", "") if not char.isprintable()]
    assert "\n[+]forged" not in text


def test_metrics_stay_metrics(server: Any) -> None:
    name = 'a"b\\c\nmetal_supervisor_forged 1'
    with boards.served(lambda: boards.board(1, name)) as found:
        text = ask(port_of(found), "/metrics")[2].decode()
    assert "metal_supervisor_forged" not in {family.name for family in text_string_to_metric_families(text)}
