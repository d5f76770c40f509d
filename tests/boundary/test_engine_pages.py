"""Scrapes that the metrics listener passes on, against servers that answer as engines and hostile programs do."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from metal_supervisor.runtimes import probing
from metal_supervisor.sidecar.board import Board, Row
from metal_supervisor.sidecar.http import metrics_server
from metal_supervisor.sidecar.http.metrics_server import AT_ONCE, create_app
from metal_supervisor.spec.types import Probe
from tests.support.boards import row
from tests.support.system import free_ports

GOOD = b"# TYPE a_total counter\na_total 1\n"
TEXT = {"Content-Type": "text/plain; version=0.0.4"}
KEY = "secret-key"
PATH = "/engines/default/tiny/metrics"


class Engine(http.server.ThreadingHTTPServer):
    """Answers what `answer` does with a request; each request is written down."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Page)
        self.answer: Callable[[Page], None] = lambda page: page.send(200, GOOD, **TEXT)
        self.asked: list[tuple[str, str]] = []
        """(path, Authorization) of each."""
        self.over = threading.Event()
        self.port = int(self.server_address[1])

    def handle_error(self, request: object, client_address: object) -> None:
        """Somebody who left."""


class Page(http.server.BaseHTTPRequestHandler):
    """One answer."""

    server: Engine

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Authorization", "")))
        self.server.answer(self)

    def send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def served() -> Iterator[Engine]:
    with Engine() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
            thread.join()


@pytest.fixture
def engine() -> Iterator[Engine]:
    with served() as server:
        yield server


def drip(page: Page) -> None:
    """A byte now and then, for ever."""
    page.send(200)
    while not page.server.over.wait(0.01):
        page.wfile.write(b"#")


def flood(page: Page) -> None:
    """As much as is taken."""
    page.send(200)
    while not page.server.over.is_set():
        page.wfile.write(b"# nothing\n" * 1000)


ANSWERS: dict[str, tuple[Callable[[Page], Any], str]] = {
    "hang": (lambda page: page.server.over.wait(30), "within 0.3 s"),
    "drip": (drip, "within 0.3 s"),
    "flood": (flood, "1 MiB"),
    "large": (lambda page: page.send(200, b"a 1\n" * (1 << 18), **TEXT), "1 MiB"),
    "redirect": (lambda page: page.send(302, Location=f"http://127.0.0.1:{page.server.port}/elsewhere"), "302"),
    "moved": (lambda page: page.send(308, GOOD, Location="http://192.0.2.1/metrics"), "308"),
    "key": (lambda page: page.send(401, KEY.encode()), "401; set LLAMA_API_KEY"),
    "none": (lambda page: page.send(501, b"{}"), "501"),
    "html": (lambda page: page.send(200, b"<html>", **{"Content-Type": "text/html"}), "Content-Type"),
    "json": (lambda page: page.send(200, b"{}", **{"Content-Type": "application/json"}), "Content-Type"),
    "no type": (lambda page: page.send(200, GOOD), "Content-Type"),
    "odd type": (lambda page: page.send(200, GOOD, **{"Content-Type": "text/plain2"}), "Content-Type"),
    "cut": (lambda page: page.send(200, GOOD, **TEXT, **{"Content-Length": "1000"}), "IncompleteRead"),
    "no HTTP": (lambda page: page.wfile.write(KEY.encode()), "BadStatusLine"),
    "many headers": (lambda page: page.send(200, GOOD, **{f"X-{n}": "1" for n in range(200)}), "HTTPException"),
    "bad chunks": (lambda page: page.send(200, b"zz\r\n", **TEXT, **{"Transfer-Encoding": "chunked"}), "Incomplete"),
}
"""Invalid answers of engines, each with a part of the error that the scraper gets."""


def serving(engine: Engine, runtime: str = "llama-server", **observed: Any) -> Row:
    found = row(**observed)
    return replace(found, record=replace(found.record, runtime=runtime, port=engine.port, host="127.0.0.1"))


App = Callable[..., Any]


def listener(*rows: Row, key: str = "") -> App:
    """The application, with these services."""
    board = Board(rows=rows)
    return create_app(lambda: board, lambda _program: ("LLAMA_API_KEY", key), "127.0.0.1")


def ask(app: App, path: str = PATH, **environ: str) -> tuple[str, dict[str, str], bytes]:
    """(status line, headers, body) of an answer."""
    said: list[Any] = []
    given = {
        "REQUEST_METHOD": "GET",
        "PATH_INFO": path.encode().decode("latin-1"),
        "HTTP_HOST": "192.0.2.10:9091",
        **environ,
    }
    body = b"".join(app(given, lambda *started: said.extend(started)))
    return said[0], dict(said[1]), body


def targets(app: App, **environ: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(ask(app, "/sd", **environ)[2])
    return found


def test_an_engine_that_serves_is_listed_and_scraped(engine: Engine) -> None:
    app = listener(serving(engine))
    labels = {"__metrics_path__": PATH, "namespace": "default", "name": "tiny"}
    assert targets(app) == [{"targets": ["192.0.2.10:9091"], "labels": labels}]
    assert engine.asked == [], "discovery asks no engine"
    status, headers, body = ask(app)
    assert (status, body) == ("200 OK", GOOD)
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert engine.asked == [("/metrics", "")]


def test_the_list_is_json_also_without_engines() -> None:
    status, headers, body = ask(listener(), "/sd")
    assert (status, headers["Content-Type"], body) == ("200 OK", "application/json", b"[]")


@pytest.mark.parametrize("kind", ANSWERS)
def test_an_invalid_answer_is_an_error_that_quotes_nothing(
    engine: Engine, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.answer, reason = ANSWERS[kind]
    monkeypatch.setattr(metrics_server, "ENGINE_S", 0.3 if "0.3 s" in reason else 5.0)
    status, headers, body = ask(listener(serving(engine), key=KEY))
    assert status == "502 Bad Gateway" and headers["Content-Type"].startswith("text/plain")
    assert reason in body.decode() and KEY not in body.decode()
    assert len(engine.asked) == 1, "no redirect is followed"


def test_a_closed_port_is_an_error(engine: Engine) -> None:
    found = serving(engine)
    (port,) = free_ports(1)
    status, _, body = ask(listener(replace(found, record=replace(found.record, port=port))))
    assert status == "502 Bad Gateway" and b"ConnectionRefusedError" in body


def test_an_answer_that_never_ends_is_abandoned_however_fast_its_bytes_come() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        over = threading.Event()

        def trickle() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                while not over.is_set():
                    connection.sendall(b"x")

        thread = threading.Thread(target=trickle, daemon=True)
        thread.start()
        found = probing.metrics_text("127.0.0.1", server.getsockname()[1], timeout_s=0.2)
        over.set()
        thread.join(30)
    assert found[0] == "" and "within 0.2 s" in found[1] and not thread.is_alive()


def test_bytes_that_are_not_utf_8_are_replaced(engine: Engine) -> None:
    engine.answer = lambda page: page.send(200, b'a{b="\xff\xfe"} 1\n', **TEXT)
    assert ask(listener(serving(engine)))[2].decode() == 'a{b="\ufffd\ufffd"} 1\n'


def test_the_key_of_an_engine_reaches_the_engine_alone(engine: Engine) -> None:
    app = listener(serving(engine), key=KEY)
    for found in (ask(app, "/sd"), ask(app)):
        assert KEY not in repr(found)
    assert engine.asked == [("/metrics", f"Bearer {KEY}")]


@pytest.mark.parametrize(
    "changed",
    [
        {"ready": False},
        {"hung": "it does nothing"},
        {"pid": 0},
        {"record": {"withdraw": "1.0"}},
        {"record": {"probe": Probe(asleep_path="/props")}},
        {"record": {"port": None}},
        *({"record": {"runtime": name}} for name in ("mlx-server", "omlx", "ollama", "of-another-version")),
    ],
    ids=str,
)
def test_an_engine_that_does_not_serve_may_sleep_or_has_no_metrics_is_never_asked(
    engine: Engine, changed: dict[str, Any]
) -> None:
    found = serving(engine)
    record = replace(found.record, **changed.pop("record", {}))
    app = listener(replace(found, record=record, observed=replace(found.observed, **changed)))
    assert targets(app) == []
    assert ask(app)[0] == "503 Service Unavailable" and engine.asked == []


@pytest.mark.parametrize("runtime", ["llama-server", "vllm-swift"])
def test_each_runtime_with_metrics_is_scraped(engine: Engine, runtime: str) -> None:
    assert ask(listener(serving(engine, runtime)))[2] == GOOD
    assert [path for path, _ in engine.asked] == ["/metrics"]


@pytest.mark.parametrize(
    "path",
    [
        "/engines/default/other/metrics",
        "/engines/default/tiny",
        "/engines/default/tiny/",
        "/engines/default/tiny/slots",
        "/engines/default/tiny/metrics/",
        "/engines/default/tiny/metrics/../../../metrics",
        "/engines/default//tiny/metrics",
        "//engines/default/tiny/metrics",
        "/engines/default/%74iny/metrics",
        "/engines/../default/tiny/metrics",
        "/engines/default/./tiny/metrics",
        "/engines/DEFAULT/tiny/metrics",
        "/engines/default/tiny/metrics\n",
        "/engines/default/tiny\x00/metrics",
        "/sd/",
    ],
)
def test_any_other_path_is_unknown(engine: Engine, path: str) -> None:
    assert ask(listener(serving(engine)), path)[0] == "404 Not Found" and engine.asked == []


@pytest.mark.parametrize("name", ["a/b", "..", "a b", "a%2fb", 'a"b', "a?b", "a#b", "\u202ea", "a\nb", "@1", ""])
def test_a_name_that_kubernetes_refuses_has_no_path(engine: Engine, name: str) -> None:
    found = serving(engine)
    for record in (replace(found.record, name=name), replace(found.record, namespace=name)):
        app = listener(replace(found, record=record))
        assert targets(app) == []
        assert ask(app, f"/engines/{record.namespace}/{record.name}/metrics")[0] == "404 Not Found"
    assert engine.asked == []


def test_the_second_engine_of_a_service_has_a_path_of_its_own(engine: Engine) -> None:
    found = serving(engine)
    app = listener(replace(found, record=replace(found.record, ordinal=1)))
    assert [each["labels"]["name"] for each in targets(app)] == ["tiny@1"]
    assert ask(app, "/engines/default/tiny@1/metrics")[2] == GOOD


@pytest.mark.parametrize("host", ["mac-a.local", "192.0.2.10:9091", "[fd00::1]:9091", "localhost:1"])
def test_targets_have_the_address_that_the_list_was_requested_from(engine: Engine, host: str) -> None:
    assert targets(listener(serving(engine)), HTTP_HOST=host)[0]["targets"] == [host]


@pytest.mark.parametrize("host", ["", "a b", "a/b", "a@b", "x:y", "a:123456", "[::1", '"', "-a", "a" * 300])
def test_a_host_header_that_is_no_address_is_refused(engine: Engine, host: str) -> None:
    assert ask(listener(serving(engine)), "/sd", HTTP_HOST=host)[0] == "400 Bad Request"


def test_only_a_few_engines_are_asked_at_once(engine: Engine) -> None:
    asked = threading.Semaphore(0)

    def wait(page: Page) -> None:
        asked.release()
        page.server.over.wait(30)
        page.send(200, GOOD, **TEXT)

    engine.answer = wait
    app = listener(serving(engine))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        waiting = [pool.submit(ask, app) for _ in range(AT_ONCE)]
        assert all(asked.acquire(timeout=10) for _ in waiting)
        status, headers, _ = ask(app)
        assert (status, headers["Retry-After"]) == ("503 Service Unavailable", "1")
        assert ask(app, "/metrics")[0] == ask(app, "/sd")[0] == "200 OK"
        engine.over.set()
        assert {each.result(30)[0] for each in waiting} == {"200 OK"}
    assert ask(app)[0] == "200 OK", "each gives its turn back"
