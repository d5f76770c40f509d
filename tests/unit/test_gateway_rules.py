"""Decisions of the gateway: names, keys, limits, bodies, errors."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metal_supervisor.gateway import access, bodies, routing
from metal_supervisor.gateway.access import ANYONE, AccessKey, BadKeys, Doorman
from metal_supervisor.gateway.backends import context_of, first_id
from metal_supervisor.gateway.body_reader import MOST_BODY_BYTES, MOST_OF_ONE_BYTES, BodyReader
from metal_supervisor.gateway.errors import GatewayError
from metal_supervisor.gateway.routing import Backend, ServiceTable
from metal_supervisor.settings import checks
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.nearest import nearest

ALL = ANYONE.allows


def backend(
    name: str,
    namespace: str = "default",
    ready: bool = True,
    phase: str = "Ready",
    reason: str = "Serving",
    ordinal: int = 0,
    **more: object,
) -> Backend:
    program = f"{namespace}.{name}{f'@{ordinal}' if ordinal else ''}"
    return Backend(program, namespace, name, "llama-server", ready, phase, reason, "words", "127.0.0.1", 1, **more)  # type: ignore[arg-type]


SERVICES = ServiceTable(
    (
        backend("a"),
        backend("b"),
        backend("b", "team"),
        backend("gemma-3-270m"),
        backend("gemma-3-270m", ordinal=1),
        backend("c", aliases=("gpt-4",)),
    )
)


# ── names ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("model", "programs"),
    [
        ("a", ["default.a"]),
        ("default/a", ["default.a"]),
        ("default.a", ["default.a"]),
        ("team/b", ["team.b"]),
        ("gpt-4", ["default.c"]),
        ("gemma-3-270m", ["default.gemma-3-270m", "default.gemma-3-270m@1"]),
    ],
)
def test_a_name_means_a_service(model: str, programs: list[str]) -> None:
    assert [each.program for each in SERVICES.find(model, ALL)] == programs


def test_an_ambiguous_name_is_answered_with_both() -> None:
    with pytest.raises(GatewayError) as refused:
        SERVICES.find("b", ALL)
    assert refused.value.status == 404 and "default/b or team/b" in refused.value.message
    assert SERVICES.find("b", AccessKey("k", "", ("team/*",)).allows)[0].program == "team.b"


def test_a_dotted_name_that_another_namespace_s_service_has_too_is_ambiguous() -> None:
    """The list had `team.b` for the one, and a request for that went to the other."""
    there = ServiceTable((backend("b", "team"), backend("team.b")))
    with pytest.raises(GatewayError) as refused:
        there.find("team.b", ALL)
    assert "default/team.b or team/b" in refused.value.message
    for row, program in zip(routing.listing(there, ALL), ("team.b", "default.team.b"), strict=True):
        assert [each.program for each in there.find(str(row["id"]), ALL)] == [program]


def test_the_nearest_names_are_those_that_the_caller_may_use() -> None:
    with pytest.raises(GatewayError) as refused:
        SERVICES.find("gemma-3-270", ALL)
    assert "gemma-3-270m" in refused.value.message
    with pytest.raises(GatewayError) as refused:
        SERVICES.find("gemma-3-270", AccessKey("k", "", ("a",)).allows)
    assert "gemma-3-270m" not in refused.value.message and refused.value.message.endswith("there are: a")


@given(st.text(max_size=300))
def test_any_name_is_found_or_refused_printably(model: str) -> None:
    try:
        SERVICES.find(model, ALL)
    except GatewayError as refused:
        assert refused.message.isprintable() and len(refused.message) < 600


def test_a_request_goes_to_the_ready_engine_with_the_fewest() -> None:
    first, second = SERVICES.find("gemma-3-270m", ALL)
    assert routing.choose([first, second], {first.program: 2, second.program: 1}) is second
    assert routing.choose([first, backend("x", ready=False)], {first.program: 9}) is first


@pytest.mark.parametrize(
    ("phase", "reason", "code", "final"),
    [
        ("Stopped", "StoppedByHand", "model_stopped", True),
        ("Suspended", "Suspended", "model_stopped", True),
        ("Creating", "Loading", "model_loading", False),
        ("Pending", "InsufficientMemory", "insufficient_memory", False),
        ("Failed", "CrashLoopBackOff", "model_failed", False),
        ("Failed", "InvalidSpec", "model_failed", True),
    ],
)
def test_a_service_that_is_not_ready_is_refused(phase: str, reason: str, code: str, final: bool) -> None:
    refused = routing.unavailable(backend("a", ready=False, phase=phase, reason=reason))
    assert (refused.status, refused.code, refused.final) == (503, code, final)
    assert (refused.retry_after_s is None) == final


def test_a_message_that_may_hold_a_path_is_not_shown() -> None:
    hidden = backend("a", ready=False, phase="Failed", reason="ModelFileNotFound")
    assert "words" not in routing.unavailable(hidden).message
    assert "words" in routing.unavailable(backend("a", ready=False, phase="Creating", reason="Loading")).message


def test_a_path_names_its_service_and_never_another_one_s_alias() -> None:
    there = ServiceTable((backend("bait", "evil", aliases=("team/big", "team.big")),))
    with pytest.raises(GatewayError) as refused:
        there.at_path("team", "big", ALL)
    assert refused.value.status == 404
    with pytest.raises(GatewayError):
        SERVICES.at_path("team", "b", AccessKey("k", "", ("a",)).allows)
    assert [each.program for each in SERVICES.at_path("team", "b", ALL)] == ["team.b"]


def test_the_list_has_each_service_once() -> None:
    rows = routing.listing(SERVICES, ALL)
    assert [row["id"] for row in rows] == ["a", "default/b", "team/b", "c", "gemma-3-270m"]
    some = AccessKey("k", "", ("team/b", "c")).allows
    assert [row["id"] for row in routing.listing(SERVICES, some)] == ["team/b", "c"]


def test_a_path_may_name_the_service() -> None:
    assert routing.target("/services/team/b/v1/embeddings") == routing.Target("/v1/embeddings", ("team", "b"))
    assert routing.target("/v1/embeddings") == routing.Target("/v1/embeddings", None)
    assert routing.target("/services/a%2e/b/v1/x").service is None


def test_the_page_lists_the_paths_that_are_passed_on() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "gateway.md").read_text("utf-8")
    section = page.partition("## What is passed on")[2].partition("\n## ")[0]
    groups = [set(re.findall(r"`(/[^`]+)`", each)) for each in section.split("\n- ")[1:]]
    # "the first group without `/v1`"
    groups[-1] = (groups[-1] - {"/v1"}) | {path.removeprefix("/v1") for path in groups[0]}
    assert set.union(*groups) == routing.PATHS


def test_the_context_is_that_of_one_request() -> None:
    assert context_of("llama-server", ("x", "--ctx-size", "4096", "--parallel", "2")) == 2048
    assert context_of("mlx-server", ("x", "--context", "100", "--context", "200")) == 200
    assert context_of("ollama", ("x",)) == 0
    assert context_of("vllm-swift", ("x", "--max-model-len", "1" * 5000)) == 0, "as of a spec that is damaged"
    assert first_id({"data": [{"id": "m"}]}) == "m" and first_id({"data": []}) == "" == first_id([])  # type: ignore[arg-type]


# ── bodies ───────────────────────────────────────────────────────────────────────────────────────


def test_a_form_names_its_model() -> None:
    form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="model"\r\n\r\nname="model"\r\n\r\nno\r\n'
    form += b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--x--\r\n'
    assert bodies.read(form, "multipart/form-data; boundary=x").model == "whisper"
    assert bodies.read(b"--x--", 'multipart/form-data; boundary="x"').model is None


def test_a_form_is_read_whatever_bytes_its_boundary_has() -> None:
    part = b'--\xff\xfe\r\nContent-Disposition: form-data; name="model"\r\n\r\nb\r\n--\xff\xfe--'
    boundary = b"\xff\xfe".decode("utf-8", "surrogateescape")  # as aiohttp reads a header
    assert bodies.read(part, f"multipart/form-data; boundary={boundary}").model == "b"


def test_only_one_model_is_left_for_an_engine_that_has_several() -> None:
    body = b'{"model": "a", "Model": "b", "MODEL": 1, "n": 1e2}'
    asked = bodies.read(body, "application/json")
    assert json.loads(bodies.renamed(body, asked, "own")) == {"model": "own", "n": 100.0}
    with pytest.raises(GatewayError):
        bodies.renamed(b"--x--", bodies.read(b"--x--", "multipart/form-data; boundary=x"), "own")


def test_a_form_of_one_long_line_takes_no_longer_than_its_length() -> None:
    """In a process of its own: a search at each place of the line would take days."""
    lines = (
        "from metal_supervisor.gateway import bodies",
        "form = b'--x\\r\\n' + b'content-disposition:form-data;' * 500_000 + b'\\r\\n\\r\\nv'",
        "assert bodies.read(form, 'multipart/form-data; boundary=x').model is None",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, timeout=60)


def test_what_takes_much_more_memory_than_room_is_refused() -> None:
    with pytest.raises(GatewayError) as refused:
        bodies.read(b'{"model": "a", "input": [' + b"{}," * 1_000_000 + b"{}]}", "application/json")
    assert refused.value.status == 413
    tokens = b'{"model": "a", "input": [' + b"1," * 900_000 + b"1]}"
    assert bodies.read(tokens, "application/json").model == "a"


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity"])
def test_what_only_python_takes_for_json_is_refused(number: bytes) -> None:
    with pytest.raises(GatewayError):
        bodies.read(b'{"model": "a", "temperature": ' + number + b"}", "application/json")


def test_no_number_becomes_another_word_on_its_way() -> None:
    body = b'{"model": "a", "temperature": 1e999}'
    with pytest.raises(GatewayError) as refused:
        bodies.renamed(body, bodies.read(body, "application/json"), "own")
    assert refused.value.status == 400


class Arriving:
    """A request whose body comes in pieces."""

    content_length, transport = None, None

    def __init__(self, *pieces: bytes) -> None:
        self.headers: dict[str, str] = {}
        self.content, self._pieces = self, [*pieces, b""]

    def is_eof(self) -> bool:
        return False

    async def readany(self) -> bytes:
        return self._pieces.pop(0)


def test_one_client_cannot_take_the_room_of_all_bodies() -> None:
    async def go() -> None:
        reader = BodyReader()
        piece: Any = bytes(MOST_BODY_BYTES)
        for _ in range(MOST_OF_ONE_BYTES // MOST_BODY_BYTES):
            slow: Any = Arriving(piece)
            await reader.read(slow, "mallory")
        more: Any = Arriving(b"x")
        with pytest.raises(GatewayError) as refused:
            await reader.read(more, "mallory")
        assert refused.value.code == "queue_full" and reader.held_bytes == MOST_OF_ONE_BYTES
        another: Any = Arriving(b"x")
        assert await reader.read(another, "alice") == b"x"
        reader.release("mallory", MOST_OF_ONE_BYTES)
        assert reader.held_bytes == 1

    asyncio.run(go())


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────

HASH = access.digest_of("secret")


def test_a_line_of_the_file_says_what_was_written() -> None:
    key = AccessKey("laptop", HASH, ("tiny", "team/*"), 60, 4)
    assert access.parse(f"# a comment\n\n{access.line_of(key)}\n") == (key,)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("laptop", "sha256:"),
        (f"lap/top {HASH}", "must be a name"),
        (f"a {HASH}\na {HASH}", "line 2: a second key"),
        (f"a {HASH} rpm=3", "'rpm'"),
        (f"a {HASH} at-once=0", "at-once"),
        (f"a {HASH} services=", "services must"),
        (f"a {HASH} per-minute=1 per-minute=2", "each once"),
        ("a secret-in-clear", "sha256:"),
    ],
)
def test_a_mistake_in_the_file_is_named_by_its_line(text: str, told: str) -> None:
    with pytest.raises(BadKeys, match="line ") as bad:
        access.parse(text)
    assert told in str(bad.value) and "secret-in-clear" not in str(bad.value)


def test_a_key_lets_in_and_no_other_does() -> None:
    doorman = Doorman()
    assert doorman.known("").name == ""
    doorman.admit_only([AccessKey("laptop", HASH)])
    assert doorman.known("secret").name == "laptop"
    for wrong in ("", "other", HASH):
        with pytest.raises(GatewayError) as refused:
            doorman.known(wrong)
        assert refused.value.status == 401 and "WWW-Authenticate" in refused.value.headers()


def test_limits_count_each_key_by_itself() -> None:
    doorman = Doorman()
    doorman.admit_only([AccessKey("a", HASH, (), 2, 1), AccessKey("b", access.digest_of("b"))])
    a, b = doorman.known("secret"), doorman.known("b")
    doorman.enter(a, 0.0)
    with pytest.raises(GatewayError, match="requests under way"):
        doorman.enter(a, 0.5)
    doorman.enter(b, 0.5)
    doorman.leave(a)
    doorman.enter(a, 1.0)
    doorman.leave(a)
    with pytest.raises(GatewayError, match="a minute") as refused:
        doorman.enter(a, 2.0)
    assert refused.value.retry_after_s == 59
    doorman.enter(a, 60.1)


def test_names_of_the_last_minute_do_not_pile_up() -> None:
    recent = access.LastMinute()
    for number in range(3 * access.MOST_NAMES):
        assert recent.enter(f"client {number}", 1, number / 100) == 0
    assert len(recent._times) <= access.MOST_NAMES + 1
    assert recent.enter("client 29999", 1, 300.0) > 0


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%en0", "fe80::/64"),
        ("", "unknown"),
    ],
)
def test_a_client_without_a_key_is_told_by_its_address(address: str, client: str) -> None:
    assert access.network_of(address) == client


def test_a_mistake_that_a_client_repeats_costs_one_search_for_names_like_it() -> None:
    services = ServiceTable(tuple(backend(f"model-{number}") for number in range(20)))
    nearest.cache_clear()
    for _ in range(3):
        with pytest.raises(GatewayError, match="nearest"):
            services.find("mode-1", lambda _: True)
    assert (nearest.cache_info().misses, nearest.cache_info().hits) == (1, 2)


def test_sent_keys_are_those_of_both_apis() -> None:
    assert access.sent_key({"Authorization": "Bearer one"}) == "one" == access.sent_key({"x-api-key": "one"})
    assert access.sent_key({"Authorization": "Basic one", "x-api-key": "two"}) == "two"


# ── errors ───────────────────────────────────────────────────────────────────────────────────────


def test_errors_have_the_shape_of_the_api_that_was_asked() -> None:
    error = GatewayError(404, "model_not_found", "no", final=True)
    openai, anthropic = (json.loads(error.body(path, "id")) for path in ("/v1/chat/completions", "/v1/messages"))
    kind = "invalid_request_error"
    assert openai == {"error": {"message": "no", "type": kind, "param": None, "code": "model_not_found"}}
    assert anthropic == {"type": "error", "error": {"type": "not_found_error", "message": "no"}, "request_id": "id"}
    assert error.event("/v1/messages", "id").startswith(b"\n\nevent: error\ndata: {")


# ── settings ─────────────────────────────────────────────────────────────────────────────────────


def test_it_is_on_with_the_embedded_api_only_unless_asked() -> None:
    assert Settings().gateway_on and Settings().gateway_url == "http://127.0.0.1:9100/v1"
    assert not Settings(kubeconfig="/k").gateway_on and not Settings(gateway="off").gateway_on
    assert Settings(kubeconfig="/k", gateway="[::1]:9101").gateway_url == "http://[::1]:9101/v1"


def test_beyond_loopback_it_wants_keys_or_to_be_told() -> None:
    assert Settings().gateway_problem == ""
    assert "change one" in Settings(port=9191, gateway="127.0.0.1:9191").gateway_problem
    assert "--gateway-insecure" in Settings(gateway="0.0.0.0:9100").gateway_problem
    assert Settings(gateway="0.0.0.0:9100", gateway_keys="/k").gateway_problem == ""
    assert Settings(gateway="0.0.0.0:9100", gateway_insecure=True).gateway_problem == ""
    assert "gateway_tls_key" in Settings(gateway_tls_cert="/c").gateway_problem


@pytest.mark.parametrize(
    "value",
    [
        "",
        "http://localhost:3000",
        "https://chat.example.com",
        "https://a.example:80",
        "http://[::1]:8080",
        "app://obsidian.md, http://10.0.0.5:3000",
        f"chrome-extension://{'a' * 32}",
    ],
)
def test_an_exact_origin_may_be_let_in(value: str) -> None:
    assert checks.origins(value) is None


@pytest.mark.parametrize(
    "value",
    [
        "*",
        "null",
        "http://*",
        "http://*.example.com",
        "*://localhost",
        "localhost:3000",
        "http://localhost:3000/",
        "http://localhost:80",
        "https://a.example:443",
        "http://localhost:0",
        "http://localhost:65536",
        "http://Localhost",
        "http://a@localhost",
        "file://",
        "app://evil",
        "app://obsidian.md.evil",
        "chrome-extension://*",
        f"chrome-extension://{'z' * 32}",
        "http://localhost:3000,*",
        "http://a.example\n/",
        "^http://localhost$",
    ],
)
def test_what_is_no_exact_origin_is_refused_with_the_form_it_has(value: str) -> None:
    assert re.search(r"http://localhost:3000|port between 1 and 65535", str(checks.origins(value)))
