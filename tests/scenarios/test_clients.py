"""The programs of docs/clients.md, with the real packages, at a gateway with the small model under the page's name."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import parts
from tests.support.gateway import Gateway, with_gateway
from tests.support.system import ROOT, service

from tests.support.finders.find_clients import find  # isort: skip

PAGE = (ROOT / "docs" / "clients.md").read_text("utf-8")
PROGRAMS = dict(re.findall(r"^## (\S+)\n(?:(?!^## ).)*?^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
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
