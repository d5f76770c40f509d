"""The first request to an engine: proof that it can answer, which its health endpoint is not.

A chat template that fails, weights that are noise or kernels that cannot be compiled all leave `/health` at 200. So
the smallest request of the service's mode is made once per start, and an engine gets no other before it answers that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

LONGEST_TEXT = 200
HIDDEN = "…"
KEY_VARIABLES = ("LLAMA_API_KEY", "VLLM_API_KEY")
"""Environment variables that set the API key which an engine requires."""

_REQUESTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
    "embedding": ("/v1/embeddings", {"input": "hi"}),
    "rerank": ("/v1/rerank", {"query": "hi", "documents": ["hi"]}),
}


def smallest(mode: str, model: str = "") -> tuple[str, str]:
    """(path, JSON body) of the smallest request of a mode; without `model`, the engine's own name is still to come."""
    path, body = _REQUESTS[mode]
    return path, json.dumps({"model": model, **body} if model else body)


def example(mode: str, model: str) -> tuple[str, str]:
    """(path below the base URL, JSON body) of a request for a user to try."""
    path, body = _REQUESTS.get(mode, _REQUESTS["chat"])
    tried = {"model": model, **{name: value for name, value in body.items() if name != "max_tokens"}}
    return path.removeprefix("/v1"), json.dumps(tried, separators=(",", ":"))


def curl(url: str, mode: str, model: str, variable: str = "") -> str:
    """A request as a user types it. `url`: base URL; `variable`: of the shell, with the key that is wanted, or ""."""
    path, body = example(mode, model)
    key = f' -H "Authorization: Bearer ${variable}"' if variable else ""
    return f"curl {url}{path}{key} -d '{body}'"


def named(body: str, model: str) -> str:
    """The body with the engine's model name added, unless it has one."""
    return json.dumps({"model": model, **json.loads(body)})


def key_of(env: object) -> tuple[str, str]:
    """(variable, key) of the key that an engine with this environment requires, ("", "") if none is known.

    Of several, separated by commas, the first. One that no header can hold does not count.
    """
    variable, keys = keys_of(env)
    return variable, keys[0] if keys else ""


def keys_of(env: object) -> tuple[str, tuple[str, ...]]:
    """As `key_of`, with all keys that the engine takes."""
    for variable in KEY_VARIABLES:
        value = env.get(variable) if isinstance(env, Mapping) else None
        keys = tuple(map(str.strip, value.split(","))) if isinstance(value, str) else ("",)
        if keys[0] and keys[0].isprintable():
            return variable, tuple(filter(None, keys))
    return "", ()


def variable_of(env: Sequence[Mapping[str, Any]]) -> str:
    """Name of the variable with the engine's API key in a service's `spec.env`, "" if it has none."""
    return next((name for name in KEY_VARIABLES if any(each.get("name") == name for each in env)), "")


def fault(path: str, status: int, body: bytes, key: tuple[str, str] = ("", "")) -> str:
    """Reason why an answer does not prove that the engine serves, or "" if it does. `key`: as sent, from `key_of`.

    A 401 or 403 to a request without a key counts as proof: the engine requires a key that is not known here.
    """
    variable, secret = key
    if status in (401, 403) and not secret:
        return ""
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        told = None
    error = told.get("error") if isinstance(told, dict) else None
    if 200 <= status < 300 and isinstance(told, dict) and not error:
        return ""
    text = error.get("message") if isinstance(error, dict) else error
    shown = _shown(text if isinstance(text, str) else body.decode("utf-8", "replace"), secret)
    detail = f" (with the key in spec.env {variable})" if status in (401, 403) else ""
    detail = " without a JSON object" if status < 300 and not isinstance(told, dict) else detail
    return f"{path} answered {status}{detail}: {shown}"


def _shown(text: str, secret: str) -> str:
    """The text without the secret, printable, on one line and cut."""
    for spelling in (secret, json.dumps(secret)[1:-1]):
        text = text.replace(spelling, HIDDEN) if spelling else text
    words = "".join(char if char.isprintable() else " " for char in text).split()
    return " ".join(words)[:LONGEST_TEXT] or "nothing"
