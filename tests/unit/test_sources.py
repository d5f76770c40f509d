"""Which sources are models of Ollama's library, and under what name; anything else is a file as before."""

from __future__ import annotations

import pytest

from metal_supervisor.core.sources import library_model


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("https://ollama.com/library/phi4-mini:3.8b", "phi4-mini:3.8b"),
        ("https://ollama.com/library/phi4-mini", "phi4-mini:latest"),
        ("https://ollama.com/library/phi4-mini/", "phi4-mini:latest"),
        ("http://www.ollama.com/library/llama3.2:1b-instruct-q4_K_M", "llama3.2:1b-instruct-q4_K_M"),
        ("https://registry.ollama.ai/library/tiny:1b", "tiny:1b"),
        ("https://ollama.com/someone/model_x.y:Q4", "someone/model_x.y:Q4"),
        ("https://ollama.com/phi4-mini", "phi4-mini:latest"),
    ],
)
def test_a_page_of_the_library_is_a_model(source: str, name: str) -> None:
    assert library_model(source) == name


@pytest.mark.parametrize(
    "source",
    [
        "",
        "phi4-mini",
        "ollama.com/library/phi4-mini",
        "https://ollama.com/",
        "https://ollama.com/library/phi4-mini:",
        "https://ollama.com/library/../phi4-mini",
        "https://ollama.com/a/b/c",
        "https://ollama.com/library/phi4?tag=1b",
        "https://ollama.com/library/phi4#1b",
        "https://ollama.com/library/phi 4",
        "https://ollama.com/library/phi4\n",
        "https://ollama.com/library/-phi4",
        "https://ollama.com/library/phi4:-1",
        "https://ollama.com.evil.example/library/phi4",
        "https://evil.example/ollama.com/library/phi4",
        "https://user@ollama.com/library/phi4",
        "https://ollama.com:8443/library/phi4",
        "https://ollama.com/library/phi4:" + "x" * 129,
        "ftp://ollama.com/library/phi4",
    ],
)
def test_anything_else_is_none(source: str) -> None:
    assert library_model(source) == ""
