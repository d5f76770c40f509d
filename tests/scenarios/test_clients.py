"""The programs of docs/clients.md, with the real packages, at a gateway with the small model under the page's name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from tests.support import parts
from tests.support.gateway import Gateway, with_gateway
from tests.support.system import ROOT, service

from tests.support.finders.find_clients import find  # isort: skip

PAGE = (ROOT / "docs" / "clients.md").read_text("utf-8")
PROGRAMS = dict(re.findall(r"^## (\S+)\n(?:(?!^## ).)*?^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
CODEX = tomllib.loads(re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0])
CLAUDE = json.loads(re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0])["env"]
OURS = ("openai", "anthropic")
"""Packages that the tests' own environment has."""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with with_gateway(tmp_path_factory.mktemp("clients")) as up:
        up.system.apply(up.system.tiny_model(), service("qwen3-8b", contextSize=4096))
        up.serves("qwen3-8b")
        yield up


def test_there_are_programs_for_four_clients_and_no_other_page_has_one() -> None:
    assert set(PROGRAMS) == {*OURS, "LangChain", "LiteLLM"}
    assert sum(path.read_text("utf-8").count("```python") for path in (ROOT / "docs").glob("*.md")) == len(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_the_page_prints_an_answer(name: str, gateway: Gateway, tmp_path: Path) -> None:
    python = Path(sys.executable) if name in OURS else parts.found(find)
    text = PROGRAMS[name].replace("http://127.0.0.1:9100", gateway.url)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [python, "-I", "-c", text]
    ran = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "hello world" in ran.stdout


def asked(gateway: Gateway, base_url: str, path: str, body: dict[str, Any]) -> str:
    """The streamed answer at a base URL of the page."""
    assert base_url.startswith("http://127.0.0.1:9100")
    url = base_url.replace("http://127.0.0.1:9100", gateway.url) + path
    headers = {"Authorization": "Bearer none", "Content-Type": "application/json"}
    with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        text = answer.read().decode()
        assert isinstance(text, str)
        return text


def test_what_codex_sends_with_the_settings_of_the_page_is_answered(gateway: Gateway) -> None:
    """The request of its 0.171.0, with shorter texts and fewer tools."""
    provider = CODEX["model_providers"][CODEX["model_provider"]]
    assert (provider["wire_api"], set(provider)) == ("responses", {"name", "base_url", "wire_api", "env_key"})
    texts = {"developer": "You are a coding agent.", "user": "Say hello"}
    parameters = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
    tool = {"type": "function", "name": "exec_command", "description": "", "strict": False, "parameters": parameters}
    body = {
        "model": CODEX["model"],
        "stream": True,
        "store": False,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "input": [
            {"type": "message", "id": f"msg_{role}", "role": role, "content": [{"type": "input_text", "text": text}]}
            for role, text in texts.items()
        ],
        "tools": [
            tool,
            {"type": "namespace", "name": "agents", "description": "", "tools": [tool]},
            {"type": "web_search", "external_web_access": False},
        ],
        "reasoning": {"summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"thread_id": "t"},
    }
    answer = asked(gateway, provider["base_url"], "/responses", body)
    assert "event: response.completed" in answer and "hello world" in answer


def test_what_claude_code_sends_with_the_settings_of_the_page_is_answered(gateway: Gateway) -> None:
    """The request of its 2.1.197, with shorter texts and fewer tools."""
    schema = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    cached = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": CLAUDE["ANTHROPIC_MODEL"],
        "stream": True,
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "system": [{"type": "text", "text": "You are an agent.", **cached}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Say hello", **cached}]},
            {"role": "system", "content": "Available agent types"},
        ],
        "tools": [{"name": "Bash", "description": "", "input_schema": schema}],
        "metadata": {"user_id": "u"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    assert CLAUDE["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == CLAUDE["ANTHROPIC_MODEL"]
    answer = asked(gateway, CLAUDE["ANTHROPIC_BASE_URL"], "/v1/messages?beta=true", body)
    assert "event: message_stop" in answer and '"text":" hello"' in answer
