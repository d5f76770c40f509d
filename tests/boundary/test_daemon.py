"""What a shared daemon may answer: away and refused are told apart, and nothing it says is taken for what it is not."""

from __future__ import annotations

import io
import json
import socket
import threading
from collections.abc import Iterator

import pytest
from daemon_support import Answer, Stand, said, standing

from metal_supervisor.runtimes import daemon_client
from metal_supervisor.runtimes.daemon_client import Away, Daemon, DaemonRefused
from tests.support.system import free_ports

AT = "GET", "/at"
STEPS = b'{"status":"one"}\n\n{"status":"two"}\n'


@pytest.fixture
def stand() -> Iterator[Stand]:
    with standing() as made:
        yield made


def called(stand: Stand, answer: Answer, timeout_s: float = 5.0) -> object:
    stand.answers[AT] = answer
    return Daemon("127.0.0.1", stand.port).call(*AT, timeout_s=timeout_s)


def told(stand: Stand, answer: Answer, stall_s: float = 5.0) -> list[object]:
    stand.answers[AT] = answer
    return list(Daemon("127.0.0.1", stand.port).lines(*AT, None, stall_s))


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (said(200, {"models": []}), {"models": []}),
        (Answer(200), {}),
        (Answer(204), {}),
        (Answer(200, b"Ollama is running"), {"text": "Ollama is running"}),
        (Answer(200, b"<html>hello</html>"), {"text": "<html>hello</html>"}),
        (said(200, ["a"]), {"text": ["a"]}),
        (said(200, None), {"text": None}),
        (Answer(200, b"[" * 100_000), {"text": "[" * 100_000}),
        (Answer(200, b"\xff{"), {"text": "\N{REPLACEMENT CHARACTER}{"}),
    ],
)
def test_an_answer_is_an_object_whatever_it_was(stand: Stand, answer: Answer, found: object) -> None:
    assert called(stand, answer) == found


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (said(404, {"error": "model 'x' not found"}), "/at answered 404: model 'x' not found"),
        (said(404, {"error": {"message": "no such model", "type": "api_error"}}), "/at answered 404: no such model"),
        (said(422, {"detail": "field required"}), "/at answered 422: field required"),
        (said(200, {"error": "digest mismatch"}), "/at answered 200: digest mismatch"),
        (said(200, {"status": "success", "error": {"code": 1}}), "/at answered 200: nothing"),
        (Answer(500, b"<html>oops</html>"), "/at answered 500: <html>oops</html>"),
        (Answer(401), "/at answered 401: nothing"),
        (said(400, {"error": "a\x1b[31mred\nline\x00"}), "/at answered 400: a[31mredline"),
        (said(400, {"error": ["x" * 10_000]}), "/at answered 400: ['" + "x" * (daemon_client.LONGEST_TEXT - 2)),
    ],
)
def test_a_refusal_says_why_in_one_short_line_also_with_status_200(stand: Stand, answer: Answer, words: str) -> None:
    with pytest.raises(DaemonRefused) as refused:
        called(stand, answer)
    assert str(refused.value) == words and refused.value.status == answer.status


def test_one_that_is_not_up_yet_is_away(stand: Stand) -> None:
    with pytest.raises(Away, match=r"^/at answered 503: loading$"):
        called(stand, said(503, {"error": {"message": "loading"}}))
    (nobody,) = free_ports(1)
    with pytest.raises(Away, match=r"^/at: ConnectionRefusedError$"):
        Daemon("127.0.0.1", nobody).call(*AT)


def test_one_that_stalls_is_away(stand: Stand) -> None:
    with pytest.raises(Away, match=r"^/at: TimeoutError$"):
        called(stand, Answer(200, b"{", promised_bytes=10, stalls=True), timeout_s=0.2)

    def never() -> Answer:
        stand.hold.wait()
        return Answer(200)

    stand.answers[AT] = never
    with pytest.raises(Away, match=r"^/at: no answer in time$"):
        Daemon("127.0.0.1", stand.port).call(*AT, timeout_s=0.2)


def test_an_answer_that_is_cut_off_is_no_answer(stand: Stand) -> None:
    with pytest.raises(Away, match=r"^/at: IncompleteRead$"):
        called(stand, Answer(200, b'{"data": [', promised_bytes=100))
    with pytest.raises(Away, match=r"^/at: IncompleteRead$"):
        called(stand, Answer(200, b"", promised_bytes=100))


def test_an_answer_that_is_vast_is_not_read_to_its_end(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_client, "MOST_BYTES", 1000)
    with pytest.raises(Away):
        called(stand, Answer(200, b'{"models": ["' + b"x" * 2000 + b'"]}'))


def test_steps_come_one_by_one_and_an_error_among_them_ends_them(stand: Stand) -> None:
    assert told(stand, Answer(200, STEPS)) == [{"status": "one"}, {"status": "two"}]
    got = []
    stand.answers[AT] = Answer(200, STEPS + b'{"error":"max retries exceeded"}\n{"status":"success"}\n')
    with pytest.raises(DaemonRefused, match="max retries exceeded"):
        for line in Daemon("127.0.0.1", stand.port).lines(*AT, None, 5.0):
            got.append(line)
    assert got == [{"status": "one"}, {"status": "two"}]
    with pytest.raises(DaemonRefused, match="400: invalid model name"):
        told(stand, said(400, {"error": "invalid model name"}))


def test_steps_that_stall_are_away(stand: Stand) -> None:
    with pytest.raises(Away, match=r"nothing has come for 0\.2 s"):
        told(stand, Answer(200, STEPS, promised_bytes=1000, stalls=True), stall_s=0.2)


def test_the_key_goes_with_every_request_and_a_file_as_it_is(stand: Stand) -> None:
    stand.answers["POST", "/at"] = stand.answers["PUT", "/at"] = Answer(200)
    keyed = Daemon("127.0.0.1", stand.port, "secret")
    keyed.call("PUT", "/at", {"path": "/m"})
    file = io.BytesIO(b"GGUF" * 3)
    file.read(5)
    Daemon("127.0.0.1", stand.port).call("POST", "/at", file)
    assert stand.asked == [
        ("PUT", "/at", json.dumps({"path": "/m"}).encode(), "Bearer secret"),
        ("POST", "/at", b"GGUF" * 3, ""),
    ]


@pytest.mark.parametrize("size", ["F" * 20, "-5"])
def test_a_chunk_that_no_machine_can_count_is_a_daemon_that_is_away(size: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            for _ in range(2):
                with server.accept()[0] as client:
                    client.recv(65536)
                    client.sendall(f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{size}\r\nx\r\n".encode())

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(Away):
            Daemon("127.0.0.1", port).call(*AT)
        with pytest.raises(Away):
            list(Daemon("127.0.0.1", port).lines(*AT, None, 5.0))
        thread.join(30)
