"""Engines asked for what they count, against real servers that answer as engines, strangers and enemies do."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from metal_supervisor.runtimes import probing
from metal_supervisor.runtimes.engine_metrics import REASONS
from metal_supervisor.sidecar.board import Row
from metal_supervisor.sidecar.engine_scraper import EVERY_S, HOLDS_S, EngineScraper, source_of
from metal_supervisor.spec.processes import RunNote
from metal_supervisor.spec.types import Probe
from tests.support.boards import row
from tests.support.system import eventually, free_ports

GOOD = b"# TYPE a_total counter\na_total 1\n"
KEY = "secret-key"


class Engine(http.server.ThreadingHTTPServer):
    """Answers what `answer` does with a request; each request is written down."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Page)
        self.answer: Callable[[Page], None] = lambda page: page.send(200, GOOD)
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
    "hang": (lambda page: page.server.over.wait(30), "timeout"),
    "drip": (drip, "timeout"),
    "flood": (flood, "size"),
    "large": (lambda page: page.send(200, b"a 1\n" * (1 << 18)), "size"),
    "long": (lambda page: page.send(200, b"# " + b"x" * (1 << 20) + b"\na 1\n"), "size"),
    "redirect": (lambda page: page.send(302, Location=f"http://127.0.0.1:{page.server.port}/elsewhere"), "redirect"),
    "moved": (lambda page: page.send(308, GOOD, Location="http://192.0.2.1/metrics"), "redirect"),
    "key": (lambda page: page.send(401, b'{"error": {"code": 401}}'), "key"),
    "forbidden": (lambda page: page.send(403), "key"),
    "none": (lambda page: page.send(501, b"{}"), "status"),
    "error": (lambda page: page.send(500, GOOD), "status"),
    "html": (lambda page: page.send(200, b"<!doctype html><html>a 1</html>"), "format"),
    "json": (lambda page: page.send(200, b'{"a": 1}'), "format"),
    "binary": (lambda page: page.send(200, bytes(range(256)) * 16), "format"),
    "gzip": (lambda page: page.send(200, b"\x1f\x8b\x08\x00abc", **{"Content-Encoding": "gzip"}), "format"),
    "empty": (lambda page: page.send(200), "format"),
    "cut": (lambda page: page.send(200, GOOD, **{"Content-Length": "1000"}), "format"),
    "no HTTP": (lambda page: page.wfile.write(b"a 1\n"), "format"),
    "many headers": (lambda page: page.send(200, GOOD, **{f"X-{n}": "1" for n in range(200)}), "format"),
    "bad chunks": (lambda page: page.send(200, b"zz\r\n" + GOOD, **{"Transfer-Encoding": "chunked"}), "format"),
    "many": (lambda page: page.send(200, b"".join(b"a%d 1\n" % number for number in range(3000))), "series"),
}
"""What an engine may do, and the reason that is counted."""


def serving(engine: Engine, runtime: str = "llama-server", **observed: Any) -> Row:
    found = row(**observed)
    return replace(found, record=replace(found.record, runtime=runtime, port=engine.port, host="127.0.0.1"))


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def follower(*rows: Row, key: str = "", timeout_s: float = 5.0, clock: Clock | None = None) -> EngineScraper:
    """One that follows these; not started: a test says when it asks."""
    made = EngineScraper("127.0.0.1", lambda _program: ("LLAMA_API_KEY", key), clock or Clock(), timeout_s)
    made.follow(rows, {})
    return made


def ask(made: EngineScraper) -> str:
    """Asks who is due, and returns the page."""
    made.turn()
    return made.told().text(False)


TINY = ("default", "tiny")
LINE = 'a_total{namespace="default",name="tiny"} 1\n'


@pytest.mark.parametrize("kind", ANSWERS)
def test_an_answer_that_cannot_be_served_is_counted_by_its_reason(engine: Engine, kind: str) -> None:
    engine.answer, reason = ANSWERS[kind]
    made = follower(serving(engine), timeout_s=0.3 if reason == "timeout" else 5.0)
    assert ask(made) == ""
    told = made.told()
    assert told.up == {TINY: False} and told.dropped == {TINY: {reason: 1}} and reason in REASONS
    assert len(engine.asked) == 1, "nobody followed it elsewhere"


def test_nobody_at_the_port_is_unreachable(engine: Engine) -> None:
    found = serving(engine)
    (port,) = free_ports(1)
    made = follower(replace(found, record=replace(found.record, port=port)))
    assert ask(made) == "" and made.told().dropped == {TINY: {"unreachable": 1}}


def test_bytes_that_are_no_text_are_replaced(engine: Engine) -> None:
    engine.answer = lambda page: page.send(200, b'a{b="\xff\xfe"} 1\n')
    assert ask(follower(serving(engine))).endswith('b="\ufffd\ufffd"} 1\n')


def test_bytes_that_come_fast_and_never_end_are_given_up_as_well() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        over = threading.Event()

        def trickle() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                while not over.is_set():
                    connection.sendall(b"x")

        thread = threading.Thread(target=trickle, daemon=True)
        thread.start()
        found = probing.counted("127.0.0.1", server.getsockname()[1], "/metrics", timeout_s=0.2)
        over.set()
        thread.join(30)
    assert found == ("", "timeout") and not thread.is_alive()


def test_a_key_of_the_engines_environment_is_sent_as_with_the_first_request(engine: Engine) -> None:
    assert LINE in ask(follower(serving(engine), key=KEY))
    assert engine.asked == [("/metrics", f"Bearer {KEY}")]
    engine.asked.clear()
    ask(follower(serving(engine)))
    assert engine.asked == [("/metrics", "")]


# ── who is asked ─────────────────────────────────────────────────────────────────────────────────


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
def test_who_does_not_serve_sleeps_or_has_none_is_not_asked(engine: Engine, changed: dict[str, Any]) -> None:
    found = serving(engine)
    record = replace(found.record, **changed.pop("record", {}))
    found = replace(found, record=record, observed=replace(found.observed, **changed))
    made = follower(found)
    assert ask(made) == "" and engine.asked == []
    assert made.told().up == {} == made.told().dropped


@pytest.mark.parametrize("runtime", ["llama-server", "vllm-swift"])
def test_an_engine_of_its_own_is_asked_where_its_runtime_says(engine: Engine, runtime: str) -> None:
    assert LINE in ask(follower(serving(engine, runtime)))
    assert [path for path, _ in engine.asked] == ["/metrics"]


def test_an_engine_is_asked_again_after_15_s_and_later_if_it_is_silent(engine: Engine) -> None:
    clock = Clock()
    made = follower(serving(engine), clock=clock, timeout_s=0.2)
    made.turn()

    def pause() -> float:
        """Seconds until it is asked again."""
        engine.asked.clear()
        began = clock.now
        while not engine.asked:
            clock.now += 1.0
            made.turn()
        return clock.now - began

    assert [pause() for _ in range(2)] == [15.0, 15.0]
    engine.answer = ANSWERS["hang"][0]
    assert [pause() for _ in range(5)] == [15.0, 30.0, 60.0, 120.0, 120.0]
    engine.over.set()
    engine.answer = lambda page: page.send(200, GOOD)
    assert [pause() for _ in range(2)] == [120.0, 15.0]


# ── how long it is served ────────────────────────────────────────────────────────────────────────


def test_what_was_said_is_served_for_a_minute_while_the_engine_is_silent(engine: Engine) -> None:
    clock = Clock()
    made = follower(serving(engine), clock=clock, timeout_s=0.2)
    assert LINE in ask(made)
    engine.answer = ANSWERS["hang"][0]
    clock.now += HOLDS_S
    assert LINE in ask(made) and made.told().up == {TINY: False}
    clock.now += 1.0
    assert made.told().text(False) == ""


def test_an_answer_that_is_none_ends_what_was_said_before(engine: Engine) -> None:
    clock = Clock()
    made = follower(serving(engine), clock=clock)
    assert LINE in ask(made)
    clock.now += EVERY_S
    engine.answer = ANSWERS["html"][0]
    assert ask(made) == ""


@pytest.mark.parametrize(("pid", "started"), [(0, ""), (8, "then"), (7, "later")])
def test_series_go_with_their_process_whatever_has_its_name_or_its_pid(engine: Engine, pid: int, started: str) -> None:
    made = follower()
    made.follow([serving(engine)], {"default.tiny": note(7, "then")})
    assert LINE in ask(made)
    made.follow([serving(engine, pid=pid, ready=False)], {"default.tiny": note(pid, started)})
    assert made.told().text(False) == "" and made.told().up == {}


def test_series_stay_while_their_process_ends_what_it_does(engine: Engine) -> None:
    made = follower(serving(engine))
    ask(made)
    found = serving(engine)
    made.follow([replace(found, record=replace(found.record, withdraw="1.0"))], {})
    assert LINE in made.told().text(False) and made.told().up == {}


def test_an_answer_of_a_process_that_has_ended_meanwhile_is_nobodys(engine: Engine) -> None:
    made = follower(serving(engine))

    def end_first(page: Page) -> None:
        made.follow([], {})
        page.send(200, GOOD + b"up 1\n")

    engine.answer = end_first
    assert ask(made) == "" and engine.asked and made.told().dropped == {}


def test_what_was_counted_goes_with_the_service_and_not_with_its_process(engine: Engine) -> None:
    engine.answer = ANSWERS["html"][0]
    made = follower(serving(engine))
    ask(made)
    made.follow([serving(engine, pid=0)], {})
    assert made.told().dropped == {TINY: {"format": 1}}
    made.follow([], {})
    assert made.told().dropped == {}


def note(pid: int, started: str) -> RunNote:
    """A launcher's note of a process."""
    return RunNote(pid, pid, started, {}, (), 0.0, "", "")


def test_the_thread_asks_who_comes_and_lets_nobody_wait_for_a_hung_one(engine: Engine) -> None:
    with served() as hung:
        hung.answer = ANSWERS["hang"][0]
        bad = serving(hung)
        bad = replace(bad, record=replace(bad.record, name="bad", program="default.bad"))
        made = EngineScraper("127.0.0.1", lambda _program: ("", ""))
        made.start()
        made.follow([bad, serving(engine)], {})
        eventually(lambda: LINE in made.told().text(False), 10, "the answer of the good one")
        eventually(lambda: made.told().dropped == {("default", "bad"): {"timeout": 1}}, 10, "the other to be given up")
        made.follow([], {})
        assert made.told().text(False) == "" and made.is_alive()


def test_a_process_is_told_by_its_pid_and_its_start(engine: Engine) -> None:
    found = serving(engine)
    assert source_of(found, note(7, "then"), "0.0.0.0") != source_of(found, note(7, "later"), "0.0.0.0")
    assert source_of(found, note(8, "then"), "0.0.0.0") == source_of(found, None, "0.0.0.0"), "another process's note"
