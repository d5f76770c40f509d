"""The gateway before clients as people use them: the SDKs with tools, cancellation and other APIs, and Open WebUI.

The engines are real. The model that calls a tool says the words of a call and nothing else; that it is one,
llama-server finds out by its chat template, as with any model.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import tiny_gguf

from tests.support.gateway import Gateway, with_gateway
from tests.support.system import eventually, model, service

if TYPE_CHECKING:
    import openai

CALL = '<tool_call> {"name": "weather", "arguments": {"city": "Oslo"}} </tool_call>'
TEMPLATE = (
    "{% if tools %}<|im_start|>system {% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }} {{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call> {"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}} </tool_call>'
    "{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}}
QUESTION: Any = [{"role": "user", "content": "hi"}]
ENDLESS = {"ignore_eos": True}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    base = tmp_path_factory.mktemp("clients")
    tiny_gguf.write_tiny_gguf(base / "caller.gguf", reply=CALL)
    with with_gateway(base) as up:
        up.system.apply(up.system.tiny_model(), model("caller", str(base / "caller.gguf")))
        flags = ["--threads", "1", "--chat-template", TEMPLATE]
        caller = service("caller", "caller", contextSize=2048, extraArgs=flags)
        up.system.apply(service(contextSize=32768), caller, service("ranks", mode="rerank"))
        up.serves("tiny", "caller", "ranks")
        yield up


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none is asked for", max_retries=0) as made:
        yield made


def busy(gateway: Gateway, name: str = "tiny") -> bool:
    return any(slot["is_processing"] for slot in gateway.system.ask(name, "/slots")[1])


def test_openai_calls_a_tool_and_gives_its_answer_back(client: openai.OpenAI) -> None:
    told = client.chat.completions.create(model="caller", messages=QUESTION, tools=[TOOL])
    (call,) = told.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    asked = [*QUESTION, told.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    assert client.chat.completions.create(model="caller", messages=asked, tools=[TOOL]).choices[0].message.role


def test_openai_streams_a_tool_call(client: openai.OpenAI) -> None:
    with client.chat.completions.create(model="caller", messages=QUESTION, tools=[TOOL], stream=True) as stream:
        parts = [call for chunk in stream if chunk.choices for call in chunk.choices[0].delta.tool_calls or []]
    functions = [part.function for part in parts if part.function]
    assert "".join(each.name or "" for each in functions) == "weather"
    assert json.loads("".join(each.arguments or "" for each in functions)) == {"city": "Oslo"}


def test_anthropic_calls_a_tool(gateway: Gateway) -> None:
    import anthropic

    tools: Any = [{"name": "weather", "description": "of a city", "input_schema": CITY}]
    with anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as client:
        told = client.messages.create(model="caller", messages=QUESTION, max_tokens=64, tools=tools)
        (use,) = (block for block in told.content if block.type == "tool_use")
        assert (use.name, use.input, told.stop_reason) == ("weather", {"city": "Oslo"}, "tool_use")
        assert client.messages.count_tokens(model="caller", messages=QUESTION).input_tokens > 0


def test_openai_asks_by_its_responses(client: openai.OpenAI) -> None:
    assert "hello world" in client.responses.create(model="tiny", input="hi", max_output_tokens=16).output_text


def test_documents_are_ranked(gateway: Gateway) -> None:
    asked = {"model": "ranks", "query": "a", "documents": ["b", "c"]}
    status, _, told = gateway.ask("POST", "/v1/rerank", asked)
    assert status == 200 and [row["index"] for row in told["results"]] == [0, 1]


def test_a_form_is_routed_by_its_model(client: openai.OpenAI) -> None:
    """A form reaches the engine, which says itself that it cannot hear."""
    import openai

    with pytest.raises(openai.InternalServerError, match="audio"):
        client.audio.transcriptions.create(model="tiny", file=("a.wav", b"RIFF\0\0\0\0WAVE", "audio/wav"))
    with pytest.raises(openai.NotFoundError, match="tinny"):
        client.audio.transcriptions.create(model="tinny", file=("a.wav", b"RIFF\0\0\0\0WAVE", "audio/wav"))


def test_a_stream_that_an_sdk_gives_up_ends_at_the_engine(gateway: Gateway, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=QUESTION, max_tokens=30000, stream=True, extra_body=ENDLESS
    )
    assert next(iter(answer)) and busy(gateway)
    answer.close()
    eventually(lambda: not busy(gateway), 10, "the engine to stop working")


def test_open_webui_lists_and_chats(gateway: Gateway) -> None:
    """The requests of its 0.12.4, as its own source makes them, with the HTTP client that it uses."""
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none", "X-OpenWebUI-User-Name": "A"}

    async def go() -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30), trust_env=True) as session:
            async with session.get(f"{gateway.url}/v1/models", headers=headers) as listed:
                rows = {row["id"]: row for row in (await listed.json())["data"]}
                assert rows["tiny"]["status"]["value"] == "loaded", "it marks what is loaded by that"
            body = {
                "model": "tiny",
                "messages": [{"role": "system", "content": "short"}, *QUESTION],
                "max_tokens": 8,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            sent = json.dumps(body)
            async with session.post(f"{gateway.url}/v1/chat/completions", data=sent, headers=headers) as streamed:
                assert "text/event-stream" in streamed.headers["Content-Type"]
                lines = (await streamed.read()).decode().split("\n\n")
            assert lines[-2:] == ["data: [DONE]", ""] and '"usage":{' in lines[-3]
            sent = json.dumps({"model": "absent", "messages": QUESTION})
            async with session.post(f"{gateway.url}/v1/chat/completions", data=sent, headers=headers) as refused:
                assert refused.status == 404 and "absent" in (await refused.json())["error"]["message"]

    asyncio.run(go())
