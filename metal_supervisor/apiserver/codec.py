"""Encoding and decoding of bodies, and helpers for plain JSON values.

Bodies are JSON, which kubectl makes of YAML itself. JSON can spell halves of characters, which cannot be encoded: they
become U+FFFD, as on a real server. It can spell numbers that are infinite once read, and that no client could read
back: they are refused.
"""

from __future__ import annotations

import json
import math
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml

from .errors import Json, bad_request

MAX_BODY_BYTES = 3 * 1024 * 1024
"""Largest request body, as on a real server."""
_HALVES = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Where a body may spell half of a character."""
_LOADER: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The parser in Python is slow on a large CRD."""


def encode(value: Any) -> bytes:
    """Compact JSON. Raises ValueError for an infinite number, which JSON cannot say."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def decode_body(body: bytes) -> Any:
    """The value of a JSON body. Raises ApiError 400 for anything else."""
    try:
        value = json.loads(body, parse_constant=_number, parse_float=_number, parse_int=_number)
    except (ValueError, RecursionError) as problem:
        raise bad_request(f"the body of the request must be JSON: {problem}") from None
    if not _HALVES.search(body):
        return value
    text = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass")
    return json.loads(text.decode("utf-16", "replace"))


def load_yaml_file(path: Path) -> list[Json]:
    """All objects of a YAML file with `---` between them."""
    documents = list(yaml.load_all(path.read_bytes(), _LOADER))
    return [document for document in documents if isinstance(document, dict)]


def _number(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text[:40]} is out of range: a number must fit into 64 bits")
    return int(text) if text.lstrip("-").isdigit() else float(text)


def clone(value: Any) -> Any:
    """A deep copy of a JSON value."""
    if isinstance(value, dict):
        return {key: clone(item) for key, item in value.items()}
    return [clone(item) for item in value] if isinstance(value, list) else value


def dig(value: Any, *names: str) -> Any:
    """`value[name][name]…`, None where there is no such field."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def section(value: Any, *names: str) -> Json:
    """`value[name][name]…` if that is an object, else an empty object."""
    found = dig(value, *names)
    return found if isinstance(found, dict) else {}


def listed(value: Any) -> list[Any]:
    """The value when it is a list, else an empty list."""
    return value if isinstance(value, list) else []


def whole_number(text: str) -> int | None:
    """The number that a text of plain digits is; None for any other text, and for one that 64 bits do not hold."""
    # Superscripts are digits to Python too, and yet no number to `int`, which also refuses thousands of digits.
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        return None
    return int(text)


def now() -> datetime:
    """The present, in UTC."""
    return datetime.now(timezone.utc)


def timestamp() -> str:
    """The present as `2006-01-02T15:04:05Z`, the form of `metav1.Time`."""
    return now().strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: Any) -> datetime | None:
    """An RFC 3339 time, None when it is not one."""
    if not isinstance(text, str):
        return None
    shaped = re.sub("[zZ]$", "+00:00", text)
    shaped = re.sub(r"\.(\d*)", lambda fraction: f".{fraction[1][:6]:0<6}", shaped, count=1)
    try:
        moment = datetime.fromisoformat(shaped)
    except ValueError:
        return None
    return moment if moment.tzinfo else None
