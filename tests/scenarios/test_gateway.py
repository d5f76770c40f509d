"""The gateway: one URL for all models of this Mac, for clients as users have them."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from metal_supervisor.state import gateway_note
from tests.support.gateway import Gateway, with_gateway
from tests.support.system import Stream, eventually, halted, kill, running, service

if TYPE_CHECKING:
    import openai

ENGINE_KEY = "the-engine-s-own"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with with_gateway(tmp_path_factory.mktemp("gateway")) as up:
        up.system.apply(up.system.tiny_model())
        known = service(contextSize=32768)
        known["metadata"]["annotations"] = {"metal-supervisor.io/aliases": "gpt-4o-mini, other:7b"}
        locked = service("locked", env=[{"name": "LLAMA_API_KEY", "value": ENGINE_KEY}])
        up.system.apply(known, service("vectors", mode="embedding"), service("asleep", replicas=0), locked)
        up.serves("tiny", "vectors", "locked")
        yield up


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none is asked for", max_retries=0) as made:
        yield made


def test_openai_lists_the_models(client: openai.OpenAI) -> None:
    rows = {row.id: row.to_dict() for row in client.models.list()}
    assert set(rows) == {"tiny", "vectors", "asleep", "locked"}
    assert rows["tiny"]["status"]["value"] == "loaded" and rows["asleep"]["status"]["value"] == "unloaded"
    assert rows["tiny"]["context_length"] == 32768 and rows["tiny"]["runtime"] == "llama-server"
    assert client.models.retrieve("tiny").id == "tiny"


@pytest.mark.parametrize("name", ["tiny", "default/tiny", "default.tiny", "gpt-4o-mini"])
def test_openai_chats_by_every_name(client: openai.OpenAI, name: str) -> None:
    answer = client.chat.completions.create(model=name, messages=[{"role": "user", "content": "hi"}], max_tokens=4)
    assert answer.choices[0].message.content and answer.usage and answer.usage.completion_tokens == 4


def test_a_gateway_without_keys_opens_no_engine_that_has_one(gateway: Gateway) -> None:
    for headers in ({}, {"Authorization": "Bearer guessed"}, {"x-api-key": "\xe9"}):
        status, told = gateway.chat("locked", headers)
        assert (status, told["error"]["code"]) == (401, "invalid_api_key")
        assert ENGINE_KEY not in json.dumps(told)
    for headers in ({"Authorization": f"Bearer {ENGINE_KEY}"}, {"x-api-key": ENGINE_KEY}):
        assert gateway.chat("locked", headers)[0] == 200


def test_openai_streams(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=20,
        stream=True,
        extra_body={"ignore_eos": True},
    ) as stream:
        chunks = [chunk for chunk in stream if chunk.choices]
    assert len(chunks) >= 20 and chunks[-1].choices[0].finish_reason == "length"


def test_openai_embeds(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="vectors", input=["one", "two"], encoding_format="float")
    assert [len(row.embedding) > 0 for row in answer.data] == [True, True]


def test_anthropic_asks_and_streams(gateway: Gateway) -> None:
    import anthropic

    with anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as client:
        question: list[anthropic.types.MessageParam] = [{"role": "user", "content": "hi"}]
        assert client.messages.create(model="tiny", messages=question, max_tokens=4).usage.output_tokens == 4
        with client.messages.stream(model="tiny", messages=question, max_tokens=8) as stream:
            assert "".join(stream.text_stream)
        with pytest.raises(anthropic.NotFoundError) as failed:
            client.messages.create(model="tinny", messages=question, max_tokens=4)
    assert failed.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


def test_curl_lists_and_streams(gateway: Gateway) -> None:
    done = subprocess.run(["curl", "-s", f"{gateway.url}/v1/models"], capture_output=True, timeout=30, check=True)
    assert json.loads(done.stdout)["data"]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True}
    command = ["curl", "-sN", f"{gateway.url}/v1/chat/completions", "-d", json.dumps(body)]
    done = subprocess.run(command, capture_output=True, timeout=30, check=True)
    assert done.stdout.rstrip().endswith(b"data: [DONE]")


def test_an_unknown_model_is_answered_with_the_nearest_names(client: openai.OpenAI) -> None:
    import openai

    with pytest.raises(openai.NotFoundError) as failed:
        client.chat.completions.create(model="tinny", messages=[{"role": "user", "content": "hi"}])
    assert failed.value.code == "model_not_found" and "tiny" in failed.value.message
    assert failed.value.response.headers["x-should-retry"] == "false"


def test_a_stopped_model_is_refused_with_its_condition(client: openai.OpenAI) -> None:
    import openai

    with pytest.raises(openai.InternalServerError) as failed:
        client.chat.completions.create(model="asleep", messages=[{"role": "user", "content": "hi"}])
    assert failed.value.status_code == 503 and failed.value.code == "model_stopped"
    assert "spec.replicas=0" in failed.value.message


def test_a_path_names_the_service(gateway: Gateway) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    status, headers, told = gateway.ask("POST", "/services/default/tiny/v1/chat/completions", body)
    assert status == 200 and told["usage"]["completion_tokens"] == 4 and headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/models"),
        ("POST", "/slots/0?action=erase"),
        ("POST", "/props"),
        ("GET", "/metrics"),
        ("GET", "/"),
        ("DELETE", "/v1/models/tiny"),
        ("POST", "/services/default/tiny/../../lora-adapters"),
        ("POST", "/v1/chat/completions/"),
        ("POST", "//v1/chat/completions"),
    ],
)
def test_no_other_path_of_an_engine_is_reached(gateway: Gateway, method: str, path: str) -> None:
    status, _, told = gateway.ask(method, path, {"model": "tiny"} if method == "POST" else None)
    assert status == 404 and told["error"]["code"] == "not_found"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b"{}", "model is missing"),
        (b'{"model": 7}', "must be the name"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_a_bad_body_is_named(gateway: Gateway, body: bytes, told: str) -> None:
    status, _, answer = gateway.ask("POST", "/v1/chat/completions", body)
    assert status == 400 and told in answer["error"]["message"] and answer["error"]["code"] == "invalid_request"


def test_web_pages_are_refused(gateway: Gateway) -> None:
    assert gateway.ask("GET", "/v1/models", headers={"Origin": "https://evil.example"})[0] == 403
    assert gateway.ask("GET", "/v1/models", headers={"Host": "evil.example"})[0] == 421
    assert gateway.ask("GET", "/v1/models", headers={"Host": "host.docker.internal:9100"})[0] == 200


def test_a_long_body_is_refused_before_it_is_read(gateway: Gateway) -> None:
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as connection:
        connection.sendall(head.format(100 << 20).encode())
        assert connection.recv(64).startswith(b"HTTP/1.1 413 ")
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as connection:
        connection.sendall(head.format(2).encode())
        assert connection.recv(64).startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
        connection.sendall(b"{}")
        assert connection.recv(64).startswith(b"HTTP/1.1 400 ")


def test_a_client_that_hangs_up_ends_the_connection_to_the_engine(gateway: Gateway) -> None:
    def busy() -> bool:
        return any(slot["is_processing"] for slot in gateway.system.ask("tiny", "/slots")[1])

    eventually(lambda: not busy(), what="an idle engine")
    worker, port = psutil.Process(gateway.system.own_pid("gateway")), gateway.system.port("tiny")

    def connected() -> bool:
        return any(each.raddr and each.raddr.port == port for each in worker.net_connections("tcp"))

    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
    # llama-server notices a client that left only while it streams: the other answer has to be short.
    for stream, tokens in ((True, 30000), (False, 2000)):
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=20)
        with contextlib.closing(connection):
            wanted = {**body, "stream": stream, "max_tokens": tokens}
            connection.request("POST", "/v1/chat/completions", json.dumps(wanted))
            eventually(connected, what="a connection to the engine")
            eventually(busy, what="the engine to work")
        eventually(lambda: not connected(), 5, "the connection to the engine to be closed")
        eventually(lambda: not busy(), 60, "the engine to stop working")


def test_the_log_has_a_line_for_each_request_and_no_prompt(gateway: Gateway) -> None:
    secret = "the prompt that no log may have"
    body = {"model": "tiny", "messages": [{"role": "user", "content": secret}], "max_tokens": 4}
    number = gateway.ask("POST", "/v1/chat/completions", body)[1]["x-request-id"]
    (last,) = eventually(lambda: [each for each in gateway.log_of("gateway", "request") if each["id"] == number])
    assert (last["service"], last["status"], last["end"]) == ("default/tiny", 200, "complete")
    assert secret not in gateway.system.files.log_path("gateway").read_text("utf-8")


def test_a_supervisord_that_reads_no_log_holds_up_no_request(gateway: Gateway) -> None:
    with halted(gateway.system.supervisord_pid()):
        for _ in range(500):  # their lines are more than a pipe holds
            assert gateway.ask("POST", "/v1/chat/completions", {"model": "unknown"})[0] == 404


def test_the_port_being_taken_stops_no_engine(tmp_path: Path, gateway: Gateway) -> None:
    with with_taken_port(tmp_path) as (other, port):
        other.system.apply(other.system.tiny_model(), service())
        other.system.ready()
        told = eventually(lambda: json.loads((other.system.state / "gateway.json").read_text())["problem"])
        assert str(port) in told and "--gateway" in told and gateway_note.closed(gateway_note.read(other.system.state))
        eventually(lambda: f"127.0.0.1:{port} cannot be listened on" in other.system.said(), what="to tell")
        assert other.system.chat()


def test_a_stop_ends_a_worker_that_outlived_its_supervisord_and_hangs(tmp_path: Path) -> None:
    with with_gateway(tmp_path, "--stop-timeout", "1") as other:
        system, worker = other.system, other.system.own_pid("gateway")
        system.apply(system.tiny_model(), service(contextSize=32768))
        other.serves("tiny")
        Stream(other.port, 20000, "/services/default/tiny/v1/chat/completions").flowing()
        kill(before := system.supervisord_pid())
        eventually(lambda: system.supervisord_pid() not in (0, before), 30, "another supervisord")
        eventually(lambda: system.own_pid("gateway") not in (0, worker), 30, "another worker")
        with halted(worker):
            assert system.stop() == 0
            assert worker not in {each.pid for each in system.processes()}


@contextlib.contextmanager
def with_taken_port(base: Path) -> Iterator[tuple[Gateway, int]]:
    """A system whose gateway finds its port taken."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with running(base, "--gateway", f"127.0.0.1:{port}") as system:
            yield Gateway(system, port), port
