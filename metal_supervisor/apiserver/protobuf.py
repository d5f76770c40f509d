"""Decoder of the few protobuf bodies that kubectl insists on sending.

`kubectl create namespace`, `create configmap|secret|service` and `auth can-i` send protobuf whatever
the server prefers. Those kinds are read here, by a table of their field numbers; answers are JSON, which
the same clients accept.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any, TypeAlias

from .errors import ApiError, Json, bad_request

MEDIA_TYPE = "application/vnd.kubernetes.protobuf"
_MAGIC = b"k8s\x00"
_VARINT, _BYTES = 0, 2
"""Types of fields."""

Shape: TypeAlias = "dict[int, tuple[str, Any]]"
"""Field number → (name, how to read it): one of the words below, or the shape of a message.

`text`, `number`, `flag`, `map`, `bytesmap`, `port`; a list holds how to read its items.
"""

_OWNER: Shape = {
    1: ("kind", "text"), 3: ("name", "text"), 4: ("uid", "text"), 5: ("apiVersion", "text"),
    6: ("controller", "flag"), 7: ("blockOwnerDeletion", "flag"),
}  # fmt: skip
_METADATA: Shape = {
    1: ("name", "text"), 2: ("generateName", "text"), 3: ("namespace", "text"), 5: ("uid", "text"),
    6: ("resourceVersion", "text"), 11: ("labels", "map"), 12: ("annotations", "map"),
    13: ("ownerReferences", [_OWNER]), 14: ("finalizers", ["text"]),
}  # fmt: skip
_SERVICE_PORT: Shape = {
    1: ("name", "text"), 2: ("protocol", "text"), 3: ("port", "number"), 4: ("targetPort", "port"),
    5: ("nodePort", "number"), 6: ("appProtocol", "text"),
}  # fmt: skip
_SERVICE_SPEC: Shape = {
    1: ("ports", [_SERVICE_PORT]), 2: ("selector", "map"), 3: ("clusterIP", "text"), 4: ("type", "text"),
    5: ("externalIPs", ["text"]), 7: ("sessionAffinity", "text"), 8: ("loadBalancerIP", "text"),
    10: ("externalName", "text"), 11: ("externalTrafficPolicy", "text"), 17: ("ipFamilyPolicy", "text"),
    18: ("clusterIPs", ["text"]), 19: ("ipFamilies", ["text"]), 22: ("internalTrafficPolicy", "text"),
}  # fmt: skip
_RESOURCE_ATTRIBUTES: Shape = {
    1: ("namespace", "text"), 2: ("verb", "text"), 3: ("group", "text"), 4: ("version", "text"),
    5: ("resource", "text"), 6: ("subresource", "text"), 7: ("name", "text"),
}  # fmt: skip

_KINDS: dict[tuple[str, str], Shape] = {
    ("v1", "Namespace"): {1: ("metadata", _METADATA), 2: ("spec", {1: ("finalizers", ["text"])})},
    ("v1", "ConfigMap"): {
        1: ("metadata", _METADATA), 2: ("data", "map"), 3: ("binaryData", "bytesmap"), 4: ("immutable", "flag"),
    },
    ("v1", "Secret"): {
        1: ("metadata", _METADATA), 2: ("data", "bytesmap"), 3: ("type", "text"), 4: ("stringData", "map"),
        5: ("immutable", "flag"),
    },
    ("v1", "Service"): {1: ("metadata", _METADATA), 2: ("spec", _SERVICE_SPEC)},
    ("v1", "DeleteOptions"): {
        1: ("gracePeriodSeconds", "number"),
        2: ("preconditions", {1: ("uid", "text"), 2: ("resourceVersion", "text")}),
        3: ("orphanDependents", "flag"), 4: ("propagationPolicy", "text"), 5: ("dryRun", ["text"]),
    },
    ("authorization.k8s.io/v1", "SelfSubjectAccessReview"): {
        1: ("metadata", _METADATA), 2: ("spec", {1: ("resourceAttributes", _RESOURCE_ATTRIBUTES)}),
    },
    ("authorization.k8s.io/v1", "SelfSubjectRulesReview"): {
        1: ("metadata", _METADATA), 2: ("spec", {1: ("namespace", "text")}),
    },
}  # fmt: skip


def decode(body: bytes) -> Json:
    """The object in a protobuf body; 400 when it is damaged, 415 for a kind not in the table."""
    try:
        envelope = dict(_fields(body[len(_MAGIC) :])) if body.startswith(_MAGIC) else {}
        types = dict(_fields(envelope[1]))
        api_version, kind = types[1].decode(), types.get(2, b"").decode()
        shape = _KINDS.get((api_version, kind))
        if shape is None:
            message = f"{api_version} {kind} is understood only as JSON or YAML here"
            raise ApiError(415, "UnsupportedMediaType", message)
        return {"apiVersion": api_version, "kind": kind, **_message(envelope.get(2, b""), shape)}
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
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
        if shift > 63:
            raise ValueError("number too long")


def _message(data: bytes, shape: Shape) -> Json:
    result: Json = {}
    for number, raw in _fields(data):
        if number not in shape:
            continue
        name, how = shape[number]
        if isinstance(how, list):
            result.setdefault(name, []).append(_scalar(raw, how[0]))
        elif how in ("map", "bytesmap"):
            entry = dict(_fields(raw))
            value = entry.get(2, b"")
            text = base64.b64encode(value) if how == "bytesmap" else value
            result.setdefault(name, {})[entry.get(1, b"").decode()] = text.decode()
        else:
            value = _scalar(raw, how)
            # Go's protobuf writes unset texts and numbers as empty ones; JSON leaves them out.
            if value not in ("", 0, None) or value is False:
                result[name] = value
    return result


def _scalar(raw: Any, how: Any) -> Any:
    if isinstance(how, dict):
        return _message(raw, how)
    if how == "text":
        return raw.decode()
    if how == "flag":
        return bool(raw)
    if how == "port":
        parts = dict(_fields(raw))
        return parts.get(3, b"").decode() if parts.get(1) else _signed(parts.get(2, 0))
    return _signed(raw)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
