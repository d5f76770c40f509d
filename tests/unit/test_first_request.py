"""What proves that an engine serves, and what may be told of what does not."""

from __future__ import annotations

import json

import pytest

from metal_supervisor.spec.first_request import LONGEST_TEXT, fault, key_of, named, smallest

CHAT = "/v1/chat/completions"
KEY = ("LLAMA_API_KEY", 's3cr"et\\key')


def test_a_request_without_a_name_is_given_the_engines_own() -> None:
    _, body = smallest("chat")
    assert "model" not in json.loads(body)
    assert named(body, "Qwen") == smallest("chat", "Qwen")[1]


@pytest.mark.parametrize("body", [b"{}", b'{"choices": []}', b'{"error": null}'])
def test_an_answer_is_proof(body: bytes) -> None:
    assert fault(CHAT, 200, body) == ""


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (500, b'{"error": {"message": "no\\n\\u001b[31mway"}}', f"{CHAT} answered 500: no [31mway"),
        (400, b'{"error": "too long"}', f"{CHAT} answered 400: too long"),
        (400, b'{"error": {"message": 7}}', f'{CHAT} answered 400: {{"error": {{"message": 7}}}}'),
        (404, b"", f"{CHAT} answered 404: nothing"),
        (302, b"{}", f"{CHAT} answered 302: {{}}"),
        (200, b"<html>hi</html>", f"{CHAT} answered 200 without a JSON object: <html>hi</html>"),
        (200, b"[1]", f"{CHAT} answered 200 without a JSON object: [1]"),
        (200, b"[" * 100_000, f"{CHAT} answered 200 without a JSON object: {'[' * LONGEST_TEXT}"),
        (200, b'{"error": {"message": "out of memory"}}', f"{CHAT} answered 200: out of memory"),
        (500, b"\xff\x00\r\n\xc2\x85x", f"{CHAT} answered 500: \ufffd x"),
    ],
)
def test_anything_else_is_none_and_is_told_in_one_printable_line(status: int, body: bytes, told: str) -> None:
    assert fault(CHAT, status, body) == told


def test_a_long_error_is_cut() -> None:
    told = fault(CHAT, 500, json.dumps({"error": {"message": "x" * 10_000}}).encode())
    assert len(told) == len(f"{CHAT} answered 500: ") + LONGEST_TEXT


@pytest.mark.parametrize("status", [401, 403])
def test_one_that_somebody_guards_is_not_judged_unless_we_know_the_key(status: int) -> None:
    assert fault(CHAT, status, b"go away") == ""
    told = fault(CHAT, status, b'{"error": {"message": "Invalid API Key"}}', KEY)
    assert told == f"{CHAT} answered {status} (with the key in spec.env LLAMA_API_KEY): Invalid API Key"


@pytest.mark.parametrize(
    "quoted",
    [
        lambda key: json.dumps({"error": {"message": f"{key} is wrong"}}),
        lambda key: json.dumps({"error": {"detail": key}}),
        lambda key: f"<b>{key}</b>",
    ],
)
def test_a_key_is_never_told(quoted: object) -> None:
    told = fault(CHAT, 500, quoted(KEY[1]).encode(), KEY)  # type: ignore[operator]
    assert "s3cr" not in told and "…" in told


@pytest.mark.parametrize(
    ("env", "key"),
    [
        ({}, ("", "")),
        (None, ("", "")),
        ({"LLAMA_API_KEY": 7}, ("", "")),
        ({"LLAMA_API_KEY": " a , b"}, ("LLAMA_API_KEY", "a")),
        ({"LLAMA_API_KEY": ",b"}, ("", "")),
        ({"VLLM_API_KEY": "v"}, ("VLLM_API_KEY", "v")),
        ({"VLLM_API_KEY": "v\r\nX-Evil: 1"}, ("", "")),
    ],
)
def test_the_key_of_an_engine_is_the_first_of_its_environment(env: object, key: tuple[str, str]) -> None:
    assert key_of(env) == key
