"""Bodies of requests: the model they name, whether they ask for a stream, and the engine's own name put in."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from metal_supervisor.gateway.errors import GatewayError

_BOUNDARY = re.compile(r'multipart/form-data\s*;.*?boundary="?([^";,\s]{1,200})"?', re.IGNORECASE)
_FIELD = re.compile(rb'content-disposition:\s*form-data;[^\r\n]*\bname="?model"?(?:;[^\r\n]*)?\r\n', re.IGNORECASE)
LONGEST_MODEL = 512


@dataclass(frozen=True)
class RequestBody:
    """The part of a body that decides where it goes."""

    model: str | None
    """None if the body names none."""
    stream: bool
    document: dict[str, Any] | None = field(default=None, repr=False)
    """The parsed body, None for a form."""


def read(body: bytes, content_type: str) -> RequestBody:
    """Read a body. Raises GatewayError if it is not a JSON object or a form with parts."""
    if form := _BOUNDARY.match(content_type):
        return RequestBody(_form_model(body, form[1].encode()), stream=True)
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise GatewayError(400, "invalid_request", "the body is not valid JSON", final=True) from None
    if not isinstance(document, dict):
        raise GatewayError(400, "invalid_request", "the body must be a JSON object", final=True)
    model = document.get("model")
    if model is not None and not (isinstance(model, str) and 0 < len(model) <= LONGEST_MODEL):
        raise GatewayError(400, "invalid_request", "model must be the name of a model", final=True)
    return RequestBody(model, document.get("stream") is True, document)


def _form_model(body: bytes, boundary: bytes) -> str | None:
    for part in body.split(b"--" + boundary):
        head, blank, value = part.partition(b"\r\n\r\n")
        if blank and _FIELD.search(head + b"\r\n"):
            return value.removesuffix(b"\r\n")[:LONGEST_MODEL].decode("utf-8", "replace").strip()
    return None


def renamed(asked: RequestBody, model: str) -> bytes:
    """The body with the engine's own name as `model`, and no other spelling of that field.

    Engines written in Go take `Model` for `model`, so a leftover could name a model that is not allowed.
    """
    if asked.document is None:
        text = "a form cannot be passed on to this service's runtime, which serves several models"
        raise GatewayError(400, "invalid_request", text, final=True)
    kept = {name: value for name, value in asked.document.items() if name.casefold() != "model"}
    return json.dumps({"model": model, **kept}).encode()
