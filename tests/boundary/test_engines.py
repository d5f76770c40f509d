"""Probes against a real HTTP server that behaves as engines and strangers do."""

from __future__ import annotations

import http.server
import json
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from metal_supervisor.runtimes.probing import FirstRequest, ProbeAnswer, busy, metrics_text, probe, works
from metal_supervisor.spec.first_request import smallest
from metal_supervisor.spec.types import Probe
from tests.support.pace import within
from tests.support.system import free_ports

ASKED = Probe(identity="tiny")
MODELS = json.dumps({"data": [{"id": "file.gguf", "aliases": ["tiny"]}]}).encode()


class Engine(http.server.ThreadingHTTPServer):
    """Answers (status, body) by path; None hangs, "drip" never ends, any other text is sent as it stands."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Page)
        self.answers: dict[str, tuple[int, bytes] | str | None] = {"/health": (200, b""), "/v1/models": (200, MODELS)}
        self.asked: list[str] = []
        self.sent: list[tuple[str, str]] = []
        """(Authorization, body) of each POST."""
        self.end = threading.Event()
        self.port = int(self.server_address[1])

    def handle_error(self, request: object, client_address: object) -> None:
        """A prober that left."""


class Page(http.server.BaseHTTPRequestHandler):
    """One answer."""

    server: Engine

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.sent.append((self.headers.get("Authorization", ""), body))
        self.do_GET()

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        answer = self.server.answers.get(self.path, (404, b""))
        if answer is None:
            self.server.end.wait(5)
        elif isinstance(answer, str) and answer != "drip":
            self.wfile.write(answer.encode("latin-1"))
        elif isinstance(answer, str):
            self.send_response(200)
            self.end_headers()
            while not self.server.end.wait(0.05):
                self.wfile.write(b"x")
        else:
            self.send_response(answer[0])
            self.end_headers()
            self.wfile.write(answer[1])


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.end.set()
        server.shutdown()
        thread.join()


def test_an_engine_that_serves_our_model_is_ready(engine: Engine) -> None:
    assert probe(engine.port, ASKED, identify=True) == ProbeAnswer(True, "")
    assert engine.asked == ["/health", "/v1/models"]


@pytest.mark.skipif(sys.platform == "darwin", reason="lists the sockets of others, which needs root on a Mac")
def test_a_probe_leaves_no_port_waiting(engine: Engine) -> None:
    for _ in range(5):
        assert probe(engine.port, ASKED, identify=True).ready
    left = [each.status for each in psutil.net_connections("tcp") if each.laddr.port == engine.port]
    assert psutil.CONN_LISTEN in left and psutil.CONN_TIME_WAIT not in left


def test_without_identify_or_identity_only_health_is_asked(engine: Engine) -> None:
    assert probe(engine.port, ASKED, identify=False).ready
    assert probe(engine.port, Probe(), identify=True).ready
    assert engine.asked == ["/health", "/health"]


@pytest.mark.parametrize(("status", "text"), [(503, "loading its model"), (500, "500"), (404, "404"), (302, "302")])
def test_an_engine_that_does_not_answer_200_is_not_ready(engine: Engine, status: int, text: str) -> None:
    engine.answers["/health"] = (status, b"")
    found = probe(engine.port, ASKED, identify=True)
    assert (found.ready, text in found.message) == (False, True)


def test_nobody_listening_is_said() -> None:
    assert probe(free_ports(1)[0], ASKED, identify=True) == ProbeAnswer(
        False, "the engine does not listen yet", refused=True
    )


@pytest.mark.parametrize(
    "body",
    [
        b"<!doctype html>",
        b"",
        b"7",
        b"null",
        b"[]",
        b"{}",
        b'{"data": null}',
        b'{"data": [null]}',
        b"\xff",
        b'{"data": [{"id": {}}]}',
        b'{"data": [{"id": "a", "aliases": 7}]}',
        b"[" * 100_000,
    ],
)
def test_an_identity_that_is_no_list_of_models_is_not_ready(engine: Engine, body: bytes) -> None:
    engine.answers["/v1/models"] = (200, body)
    found = probe(engine.port, ASKED, identify=True)
    assert (found.ready, "without a list of models" in found.message) == (False, True)


def test_a_stranger_on_the_port_is_named_by_what_it_serves(engine: Engine) -> None:
    engine.answers["/v1/models"] = (200, b'{"data": [{"id": "other"}, {"id": "tinyer"}]}')
    found = probe(engine.port, ASKED, identify=True)
    assert not found.ready
    assert "other, tinyer" in found.message and "not tiny" in found.message


def test_an_engine_that_lists_no_model_is_no_other_server(engine: Engine) -> None:
    engine.answers["/v1/models"] = (200, b'{"data": []}')
    assert probe(engine.port, ASKED, identify=True) == ProbeAnswer(False, "/v1/models lists no model")


@pytest.mark.parametrize(
    ("answer", "why"), [(None, " has not answered within 0.3 s"), ("HTTP/1.1 x", ": BadStatusLine")]
)
def test_a_failure_names_the_path_that_failed(engine: Engine, answer: str | None, why: str) -> None:
    engine.answers["/v1/models"] = answer
    found = probe(engine.port, ASKED, identify=True, timeout_s=0.3)
    assert (found.ready, found.message) == (False, f"/v1/models{why}")


def test_a_model_list_that_is_an_error_is_not_an_identity(engine: Engine) -> None:
    engine.answers["/v1/models"] = (500, MODELS)
    assert not probe(engine.port, ASKED, identify=True).ready


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
@pytest.mark.parametrize("kind", [None, "drip"])
def test_an_engine_that_hangs_or_drips_is_given_up(engine: Engine, path: str, kind: str | None) -> None:
    hanging = threading.Timer(20, engine.end.set)
    hanging.start()
    engine.answers[path] = kind
    started = time.monotonic()
    assert not probe(engine.port, ASKED, identify=True, timeout_s=0.2).ready
    assert within(time.monotonic() - started, 1.0)
    hanging.cancel()
    engine.end.set()


def test_a_page_of_another_server_is_no_health(engine: Engine) -> None:
    asked = Probe(expects='"status"', identity="tiny")
    engine.answers["/health"] = (200, b"<html>It works!\x1b[31m</html>")
    assert probe(engine.port, asked, identify=False) == ProbeAnswer(
        False, "/health answered something else: <html>It works![31m</html>"
    )
    engine.answers["/health"] = (200, b'{"status":"ok"}')
    assert probe(engine.port, asked, identify=False).ready


def test_a_work_loop_is_stuck_only_if_its_slots_do_not_answer_at_all(engine: Engine) -> None:
    assert works(engine.port, ASKED) is None  # 404: a build without them
    engine.answers["/slots"] = (501, b"")
    assert works(engine.port, ASKED) is None
    engine.answers["/slots"] = (200, IDLE)
    assert works(engine.port, ASKED) is True
    engine.answers["/slots"] = None
    assert works(engine.port, ASKED, timeout_s=0.2) is False
    assert works(engine.port, Probe(busy_path="")) is None
    assert works(free_ports(1)[0], ASKED) is None  # nobody listens: that is for the health check to say


# ── engines that fall asleep ─────────────────────────────────────────────────────────────────────

DOZY = Probe(identity="tiny", asleep_path="/props")
BUSY = b'[{"is_processing": true}]'
IDLE = b'[{"is_processing": false}]'


def test_one_that_may_fall_asleep_is_not_kept_awake_by_asking_whether_it_works(engine: Engine) -> None:
    engine.answers["/slots"] = None
    assert works(engine.port, DOZY, timeout_s=0.2) is None
    assert engine.asked == []


def test_a_sleeper_is_not_busy_and_not_woken(engine: Engine) -> None:
    engine.answers |= {"/props": (200, b'{"is_sleeping": true}'), "/slots": (200, BUSY)}
    assert busy(engine.port, DOZY) is False
    assert engine.asked == ["/props"]


@pytest.mark.parametrize(
    "told",
    [
        (200, b'{"is_sleeping": false}'),
        (200, b"{}"),
        (200, b"[]"),
        (200, b"<html>"),
        (200, b"[" * 100_000),
        (404, b""),
        (401, b'{"error": {}}'),
        (200, b'{"is_sleeping": "true"}'),
    ],
)
def test_one_that_does_not_say_that_it_sleeps_is_asked_what_it_does(engine: Engine, told: tuple[int, bytes]) -> None:
    engine.answers |= {"/props": told, "/slots": (200, BUSY)}
    assert busy(engine.port, DOZY) is True
    engine.answers["/slots"] = (200, IDLE)
    assert busy(engine.port, DOZY) is False
    engine.answers["/slots"] = (401, b"")
    assert busy(engine.port, DOZY) is None
    assert engine.asked == ["/props", "/slots"] * 3


def test_one_that_cannot_even_say_whether_it_sleeps_is_busy(engine: Engine) -> None:
    engine.answers["/props"] = None
    assert busy(engine.port, DOZY, timeout_s=0.2) is True
    assert busy(free_ports(1)[0], DOZY) is False


def test_one_that_never_sleeps_is_not_asked_whether_it_does(engine: Engine) -> None:
    engine.answers["/slots"] = (200, BUSY)
    assert busy(engine.port, ASKED) is True
    assert engine.asked == ["/slots"]


# ── answers that are none ────────────────────────────────────────────────────────────────────────

CHUNKED = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
WILD = {
    "length": f"HTTP/1.1 200 OK\r\nContent-Length: {'9' * 20}\r\n\r\nx",
    "chunk": f"{CHUNKED}{'F' * 20}\r\nx",
    "negative chunk": f"{CHUNKED}-5\r\nabc\r\n0\r\n\r\n",
    "long chunk": f"{CHUNKED}{'9' * 60_000}\r\nx",
    "chunk without a number": f"{CHUNKED}\xff\r\nx",
    "status": f"HTTP/1.1 {'9' * 5000}\r\n\r\n",
    "headers": "HTTP/1.1 200 OK\r\n" + "a: b\r\n" * 200 + "\r\n",
}
"""Answers of which HTTP can make nothing, and of whose lengths Python cannot either."""


@pytest.mark.parametrize("answer", WILD.values(), ids=WILD)
def test_an_answer_that_cannot_be_read_is_a_cut_one_whoever_asks(engine: Engine, answer: str) -> None:
    """What else is raised ends the asking thread, and the process with it."""
    asked = Probe(identity="tiny", busy_path="/slots", first_path=CHAT, first_body=FIRST.first_body)
    engine.answers |= dict.fromkeys(("/health", "/slots", "/metrics", CHAT), answer)
    found = probe(engine.port, asked, identify=True)
    assert not found.ready and found.message.startswith("/health: ") and "999" not in found.message
    assert works(engine.port, asked) is None
    assert busy(engine.port, asked) is False
    text, error = metrics_text("127.0.0.1", engine.port)
    assert text == "" and error.startswith("the engine's answer could not be read: ")
    assert first(engine, asked).message.startswith(f"{CHAT} was not answered to the end: ")
    engine.answers |= {"/health": (200, b""), "/v1/models": answer, "/sleeping": answer, "/slots": (200, b"[]")}
    assert not probe(engine.port, asked, identify=True).ready
    assert busy(engine.port, Probe(busy_path="/slots", asleep_path="/sleeping")) is False
    assert not first(engine, Probe(names_itself=True, first_path=CHAT, first_body=FIRST.first_body)).ready


# ── the first request ────────────────────────────────────────────────────────────────────────────

CHAT = "/v1/chat/completions"
FIRST = Probe(identity="tiny", first_path=CHAT, first_body=smallest("chat", "tiny")[1])
KEY = ("LLAMA_API_KEY", "s3cret")


def first(
    engine: Engine, asked: Probe = FIRST, key: tuple[str, str] = ("", ""), timeout_s: float = 10.0
) -> ProbeAnswer:
    """What comes of a first request."""
    request = FirstRequest(engine.port, asked, key, timeout_s)
    try:
        while (answer := request.wait(0.05)) is None:
            pass
        return answer
    finally:
        request.close()


def test_a_first_request_that_is_answered_is_proof(engine: Engine) -> None:
    engine.answers[CHAT] = (200, b'{"choices": []}')
    assert first(engine) == ProbeAnswer(True, "")
    assert engine.asked == [CHAT]
    ((authorization, body),) = engine.sent
    assert (authorization, body) == ("", FIRST.first_body)


def test_an_engine_with_a_name_of_its_own_is_asked_for_it(engine: Engine) -> None:
    engine.answers[CHAT] = (200, b'{"choices": []}')
    asked = Probe(names_itself=True, first_path=CHAT, first_body=smallest("chat")[1])
    assert first(engine, asked).ready
    assert engine.asked == ["/v1/models", CHAT]
    assert engine.sent == [("", smallest("chat", "file.gguf")[1])]
    engine.answers["/v1/models"] = (200, b"{}")
    assert first(engine, asked).ready, "what it says to a request without a name is its own affair"


@pytest.mark.parametrize(("name", "shown"), [("org/Phi-4 mini", "org/Phi-4 mini"), ("a\nb", ""), ("x" * 201, "")])
def test_the_name_that_an_engine_has_of_its_own_is_kept_if_it_can_be_shown(
    engine: Engine, name: str, shown: str
) -> None:
    engine.answers[CHAT] = (200, b'{"choices": []}')
    engine.answers["/v1/models"] = (200, json.dumps({"data": [{"id": name}]}).encode())
    body = smallest("chat")[1]
    request = FirstRequest(engine.port, Probe(names_itself=True, first_path=CHAT, first_body=body), ("", ""), 10)
    assert request.wait(10) == ProbeAnswer(True, "") and request.model_name == shown
    request.close()


def test_a_key_that_is_known_is_sent_and_not_told(engine: Engine) -> None:
    engine.answers[CHAT] = (401, b'{"error": {"message": "Invalid API Key s3cret"}}')
    assert first(engine) == ProbeAnswer(True, ""), "somebody guards it"
    told = first(engine, key=KEY)
    assert told == ProbeAnswer(
        False, f"{CHAT} answered 401 (with the key in spec.env LLAMA_API_KEY): Invalid API Key …"
    )
    assert [authorization for authorization, _ in engine.sent] == ["", "Bearer s3cret"]


def test_an_answer_that_is_cut_is_none(engine: Engine) -> None:
    engine.answers[CHAT] = (200, b'{"choices": [')
    assert first(engine).message == f'{CHAT} answered 200 without a JSON object: {{"choices": ['


def test_an_engine_that_ends_instead_of_answering_is_not_ready(engine: Engine) -> None:
    engine.answers[CHAT] = None
    request = FirstRequest(engine.port, FIRST, ("", ""), 10)
    assert request.wait(0.05) is None
    engine.end.set()  # the connection is closed without a word
    told = None
    while told is None:
        told = request.wait(0.05)
    assert told == ProbeAnswer(False, f"{CHAT} was not answered to the end: RemoteDisconnected")
    request.close()


def test_nobody_who_listens_answers_nothing() -> None:
    request = FirstRequest(free_ports(1)[0], FIRST, ("", ""), 10)
    assert request.wait(1.0) == ProbeAnswer(False, f"{CHAT} was not answered to the end: ConnectionRefusedError")
    request.close()


@pytest.mark.parametrize("kind", [None, "drip"])
def test_a_first_answer_has_its_time_and_no_more(engine: Engine, kind: str | None) -> None:
    engine.answers[CHAT] = kind
    assert first(engine, timeout_s=0.3) == ProbeAnswer(False, f"{CHAT} has not answered within 0.3 s")
