"""Decoder of the few protobuf bodies that kubectl insists on sending.

`kubectl create namespace` and `create configmap|secret|service` send protobuf whatever the server prefers. Those kinds
are read here: their schemas have the types of the fields, and a table has their numbers. Answers are JSON, which the
same clients accept.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any, TypeAlias

from . import schemas
from .errors import ApiError, Json, bad_request

MEDIA_TYPE = "application/vnd.kubernetes.protobuf"
_MAGIC = b"k8s\x00"
_VARINT = 0
"""Wire type of a number."""
_BYTES = 2
"""Wire type of a text, of bytes, and of a message."""

Numbers: TypeAlias = "dict[int, str | tuple[str, Numbers]]"
"""Names of the fields of a message by their numbers; with the numbers of its own where a field is a message."""

_PORT: Numbers = {1: "name", 2: "protocol", 3: "port", 4: "targetPort", 5: "nodePort"}
_SERVICE: Numbers = {1: ("ports", _PORT), 2: "selector", 3: "clusterIP", 4: "type", 10: "externalName"}
_OBJECT: Numbers = {1: ("metadata", {1: "name", 3: "namespace", 11: "labels", 12: "annotations"})}
_KINDS: dict[tuple[str, str], tuple[Json, Numbers]] = {
    ("v1", "Namespace"): (schemas.NAMESPACE, _OBJECT),
    ("v1", "ConfigMap"): (schemas.CONFIG_MAP, {**_OBJECT, 2: "data", 3: "binaryData", 4: "immutable"}),
    ("v1", "Secret"): (schemas.SECRET, {**_OBJECT, 2: "data", 3: "type", 5: "immutable"}),
    ("v1", "Service"): (schemas.SERVICE, {**_OBJECT, 2: ("spec", _SERVICE)}),
}


def decode(body: bytes) -> Json:
    """The object in a protobuf body; 400 when it is damaged, 415 for a kind not in the table."""
    try:
        envelope = dict(_fields(body[len(_MAGIC) :])) if body.startswith(_MAGIC) else {}
        types = dict(_fields(envelope[1]))
        api_version, kind = types[1].decode(), types.get(2, b"").decode()
        if (api_version, kind) not in _KINDS:
            message = f"{api_version} {kind} is understood only as JSON or YAML here"
            raise ApiError(415, "UnsupportedMediaType", message)
        return {"apiVersion": api_version, "kind": kind, **_message(envelope.get(2, b""), *_KINDS[api_version, kind])}
    except (KeyError, IndexError, ValueError, AttributeError, TypeError):
        raise bad_request("the object provided is not valid protobuf") from None


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of every field: an int, or the bytes of a text or message."""
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, place = _varint(data, place)
            yield number, value
        elif wire == _BYTES:
            size, place = _varint(data, place)
            if place + size > len(data):
                raise ValueError("truncated")
            yield number, data[place : place + size]
            place += size
        else:
            raise ValueError("no field of these kinds has another type")


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise ValueError("number too long")


def _message(data: bytes, schema: Json, numbers: Numbers) -> Json:
    result: Json = {}
    for number, raw in _fields(data):
        named = numbers.get(number)
        if named is None:
            continue
        name, inner = named if isinstance(named, tuple) else (named, {})
        field: Json = schema["properties"][name]
        if field.get("type") == "array":
            result.setdefault(name, []).append(_value(raw, field["items"], inner))
        elif values := field.get("additionalProperties"):
            entry = dict(_fields(raw))
            result.setdefault(name, {})[entry.get(1, b"").decode()] = _value(entry.get(2, b""), values, {})
        else:
            value = _value(raw, field, inner)
            # Go's protobuf writes unset texts and numbers as empty ones; JSON leaves them out.
            if value not in ("", 0, None) or value is False:
                result[name] = value
    return result


def _value(raw: Any, schema: Json, numbers: Numbers) -> Any:
    match schema:
        case {"type": "object"}:
            return _message(raw, schema, numbers)
        case {"type": "string", "format": "byte"}:
            return base64.b64encode(raw).decode()
        case {"type": "string"}:
            return raw.decode()
        case {"type": "boolean"}:
            return bool(raw)
        case {"x-kubernetes-int-or-string": True}:
            parts = dict(_fields(raw))
            return parts.get(3, b"").decode() if parts.get(1) else _signed(parts.get(2, 0))
    return _signed(raw)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
