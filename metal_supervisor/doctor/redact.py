"""Redaction of text and JSON: secrets, the user's name and home directory.

Known secrets are replaced wherever they occur; text that only looks like a secret is replaced as well, because
strangers read a bundle, and a missing word costs less than a leaked token.
"""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Callable, Collection
from typing import Any

from metal_supervisor.cluster.exec_plugin import scrub

HIDDEN = "[redacted]"
SHORTEST_SECRET = 4
PLAIN = frozenset({
    "true", "false", "none", "null", "auto", "default", "info", "debug", "warning", "error", "chat", "metal", "model",
    "tiny", "http", "https", "localhost", "utf-8", "0.0.0.0", "127.0.0.1", "en_US.UTF-8",
})  # fmt: skip
"""Common values that are no secrets: redacting them would make a bundle unreadable."""

_TELLING_END = r"(?:token|secret|passw(?:or)?d|authorization|api[-_]?key|credential|private[-_]?key)"
_TELLING = re.compile(rf"(?i){_TELLING_END}$")
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"-----BEGIN [A-Z ]+-----.*?(-----END [A-Z ]+-----|\Z)", re.DOTALL), HIDDEN),
    (re.compile(r"\A[A-Za-z0-9+/=\s]*-----END [A-Z ]+-----"), HIDDEN),  # truncated at its start
    (re.compile(r"(?m)^[A-Za-z0-9+/=]{40,}$"), HIDDEN),
    (re.compile(r"(?i)\b(authorization|proxy-authorization|x-api-key)([\"']?\s*[:=]\s*).*"), rf"\1\2{HIDDEN}"),
    (re.compile(rf'(?i)("[\w-]*{_TELLING_END}"\s*:\s*")(?:[^"\\\n]|\\.)+'), rf"\1{HIDDEN}"),  # the whole value
    (re.compile(r"(?i)\b(bearer|basic)\s+[^\s\"',;]+"), rf"\1 {HIDDEN}"),
    (re.compile(r"([a-zA-Z][\w+.-]*://)[^/\s\"']*@"), r"\1"),
    (re.compile(r"([a-zA-Z][\w+.-]*://[^\s\"'?#]*)[?#][^\s\"']*"), rf"\1?{HIDDEN}"),
    (re.compile(r"\b(hf_|sk-|ghp_|github_pat_|xox[a-z]-|AKIA|glpat-)[\w-]{6,}"), HIDDEN),
    (re.compile(r"/k-[\w-]{8,}"), f"/{HIDDEN}"),  # secret path of the embedded API
    (re.compile(r"(?i)(--?[\w-]*(?:key|token|secret|password)[\w-]*[= ]+)(?!\[redacted)[^\s\"',\]]+"), rf"\1{HIDDEN}"),
)


def redactor(secrets: Collection[str], home: str, user: str) -> Callable[[str], str]:
    """A function that redacts a text. `secrets`: known ones, replaced wherever they occur; `user`: a login name."""
    known = _dressed({each for each in secrets if len(each) >= SHORTEST_SECRET and each not in PLAIN})
    named = re.compile(rf"(?<![A-Za-z0-9_]){re.escape(user)}(?![A-Za-z0-9_])") if len(user) > 1 else None

    def redact(text: str) -> str:
        for secret in known:
            text = text.replace(secret, HIDDEN)
        for pattern, instead in _PATTERNS:
            text = pattern.sub(instead, text)
        text = scrub(text)
        if len(home) > 1:
            text = text.replace(home, "~")
        return named.sub("[user]", text) if named else text

    return redact


def _dressed(secrets: Collection[str]) -> list[str]:
    """Each secret in the forms that a file may have: plain, its lines, escaped in JSON or in a URL; longest first."""
    found = set(secrets)
    for each in secrets:
        found |= {line for line in each.splitlines() if len(line.strip()) >= SHORTEST_SECRET}
        found |= {json.dumps(each)[1:-1], json.dumps(each, ensure_ascii=False)[1:-1]}
        found |= {urllib.parse.quote(each), urllib.parse.quote(each, safe=""), urllib.parse.quote_plus(each)}
    return sorted(found, key=len, reverse=True)


def redact_json(value: Any, redact: Callable[[str], str], name: str = "") -> Any:
    """A JSON value with all its texts and numbers redacted, those named like a secret as a whole.

    `name`: key of the value. A redacted number becomes text. Booleans and null stay: they are no secrets, and show
    whether one is set.
    """
    if isinstance(value, dict):
        return {redact(str(key)): redact_json(each, redact, str(key)) for key, each in value.items()}
    if isinstance(value, list):
        return [redact_json(each, redact, name) for each in value]
    if isinstance(value, str):
        return HIDDEN if value and _TELLING.search(name) else redact(value)
    if value is None or isinstance(value, bool):
        return value
    return HIDDEN if _TELLING.search(name) or redact(str(value)) != str(value) else value
