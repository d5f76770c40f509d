"""What a Model's `spec.source` may name besides a file: a model of Ollama's library."""

from __future__ import annotations

import re

LIBRARY = re.compile(
    r"https?://(?:www\.)?(?:ollama\.com|registry\.ollama\.ai)/"
    r"(?:library/)?([A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?::([\w][\w.-]{0,127}))?/?"
)
DEFAULT_TAG = "latest"


def library_model(source: str) -> str:
    """`NAME:TAG` of a source like `https://ollama.com/library/NAME:TAG`, "" if it is none; no tag means `latest`."""
    found = LIBRARY.fullmatch(source)
    return f"{found[1]}:{found[2] or DEFAULT_TAG}" if found else ""
