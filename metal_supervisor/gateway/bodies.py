"""Bodies of requests: the model they name, whether they ask for a stream, and the engine's own name put in."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from metal_supervisor.gateway.errors import GatewayError

_BOUNDARY = re.compile(r'multipart/form-data\s*;.*?boundary="?([^";,\s]{1,200})"?', re.IGNORECASE)
_MODEL_FIELD = re.compile(rb';[ \t]*name="?model"?[ \t]*(?:;|$)', re.IGNORECASE)
LONGEST_MODEL = 512
MOST_VALUES = 1_000_000
"""Values of a JSON body, roughly: each takes up to 70 bytes of memory, whatever it takes in the body."""
MOST_PARTS = 64
"""Most parts of a form that are searched for the model."""
LONGEST_PART_HEAD = 8192
"""Longest headers of such a part, in bytes."""


@dataclass(frozen=True)
class RequestBody:
    """The part of a body that decides where it goes."""

    model: str | None
    """None if the body names none."""
    stream: bool
    is_form: bool = False


def read(body: bytes, content_type: str) -> RequestBody:
    """Read a body. Raises GatewayError if it is not a JSON object or a form with parts."""
    if form := _BOUNDARY.match(content_type):
        return RequestBody(_form_model(body, form[1].encode("utf-8", "surrogateescape")), stream=True, is_form=True)
    document = _document(body)
    model = document.get("model")
    if model is not None and not (isinstance(model, str) and 0 < len(model) <= LONGEST_MODEL):
        raise GatewayError(400, "invalid_request", "model must be the name of a model", final=True)
    return RequestBody(model, document.get("stream") is True)


def _document(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises GatewayError."""
    if sum(map(body.count, (b",", b"[", b"{"))) > MOST_VALUES:
        text = f"the body has more than {MOST_VALUES:,} values"
        raise GatewayError(413, "request_too_large", text, final=True)
    try:
        document = json.loads(body, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise GatewayError(400, "invalid_request", "the body is not valid JSON", final=True) from None
    if not isinstance(document, dict):
        raise GatewayError(400, "invalid_request", "the body must be a JSON object", final=True)
    return document


def _refuse(name: str) -> None:
    """NaN and Infinity are no JSON, whatever Python takes for it."""
    raise ValueError(name)


def _form_model(body: bytes, boundary: bytes) -> str | None:
    for part in body.split(b"--" + boundary, MOST_PARTS)[:MOST_PARTS]:
        head, blank, value = part.partition(b"\r\n\r\n")
        if blank and any(map(_names_model, head[:LONGEST_PART_HEAD].split(b"\r\n"))):
            return value.removesuffix(b"\r\n")[:LONGEST_MODEL].decode("utf-8", "replace").strip()
    return None


def _names_model(line: bytes) -> bool:
    """True for the header of the field `model`. No pattern is looked for at each place of a long line: that is slow."""
    return line.lower().startswith(b"content-disposition:") and bool(_MODEL_FIELD.search(line))


def renamed(body: bytes, asked: RequestBody, model: str) -> bytes:
    """The body with the engine's own name as `model`, and no other spelling of that field.

    Engines written in Go take `Model` for `model`, so a leftover could name a model that is not allowed.
    """
    if asked.is_form:
        text = "a form cannot be passed on to this service's runtime, which serves several models"
        raise GatewayError(400, "invalid_request", text, final=True)
    kept = {name: value for name, value in _document(body).items() if name.casefold() != "model"}
    try:
        return json.dumps({"model": model, **kept}, allow_nan=False).encode()
    except ValueError:
        raise GatewayError(400, "invalid_request", "the body has a number that is too large", final=True) from None
