"""Structural schemas: removal of unknown fields, defaults, and validation.

CRDs bring their own schema; the built-in resources have one in `schemas.py`. One walker settles an object and one
validates it; the messages are those of a real server, because people search for them. Rules written in CEL
(`x-kubernetes-validations`) are evaluated in `cel.py`.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from . import errors
from .codec import clone, listed, parse_time
from .errors import Json, Problem, json_type

_ROOT_FIELDS = frozenset({"apiVersion", "kind", "metadata"})


def join(path: str, name: str) -> str:
    """`spec` + `ports` = `spec.ports`."""
    return f"{path}.{name}" if path else name


def keeps_unknown(schema: Json) -> bool:
    """True if objects under this schema may have undeclared fields."""
    return bool(schema.get("x-kubernetes-preserve-unknown-fields")) or not schema


def child_schema(schema: Json, name: str) -> Json | None:
    """Schema of one field, None when it is not declared."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        found = properties[name]
        return found if isinstance(found, dict) else {}
    extra = schema.get("additionalProperties")
    if isinstance(extra, dict):
        return extra
    if extra is True or keeps_unknown(schema):
        return {"x-kubernetes-preserve-unknown-fields": True}
    return None


def children(schema: Json, value: Any, path: str) -> Iterator[tuple[Json, Any, str]]:
    """(schema, value, path) of the declared fields or items in a value, but for the metadata of an object."""
    if isinstance(value, dict):
        for name in sorted(value):
            inner = child_schema(schema, name)
            if inner and not (path == "" and name == "metadata"):
                yield inner, value[name], join(path, name)
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        for index, item in enumerate(value):
            yield schema["items"], item, f"{path}[{index}]"


def settle(schema: Json, value: Any, path: str = "") -> list[str]:
    """Remove undeclared fields and meaningless nulls and fill in defaults, in place.

    Returns the paths of the unknown fields.
    """
    if isinstance(value, list):
        items = schema.get("items")
        if not isinstance(items, dict):
            return []
        return [name for index, item in enumerate(value) for name in settle(items, item, f"{path}[{index}]")]
    if not isinstance(value, dict):
        return []
    unknown: list[str] = []
    declared = schema.get("properties") or {}
    missing = [name for name, inner in declared.items() if "default" in inner and name not in value]
    for name in [*value, *missing]:
        if path == "" and name in _ROOT_FIELDS:
            continue
        inner = child_schema(schema, name)
        if inner is None:
            unknown.append(join(path, name))
            del value[name]
            continue
        if value.get(name) is None and "default" in inner:
            value[name] = clone(inner["default"])
        if inner.get("type") == "integer" and isinstance(value[name], float) and value[name].is_integer():
            value[name] = int(value[name])
        elif value[name] is None and inner.get("type"):
            del value[name]
        else:
            unknown += settle(inner, value[name], join(path, name))
    return unknown


def validate(schema: Json, value: Any, path: str = "") -> list[Problem]:
    """Everything wrong with a value that has been pruned and defaulted."""
    return list(_problems(schema, value, path))


def _problems(schema: Json, value: Any, path: str) -> Iterator[Problem]:
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            yield errors.wrong_type(path, value, "integer,string")
            return
    elif (kind := schema.get("type")) and not _has_type(value, kind):
        yield errors.wrong_type(path, value, kind)
        return
    if "enum" in schema and value not in schema["enum"]:
        yield errors.unsupported_value(path, value, schema["enum"])
    if isinstance(value, str):
        yield from _text_problems(schema, value, path)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield from _number_problems(schema, value, path)
    elif isinstance(value, (dict, list)):
        if isinstance(value, dict):
            yield from (errors.required(join(path, name)) for name in schema.get("required") or () if name not in value)
        yield from _size_problems(schema, value, path)
        for inner, item, place in children(schema, value, path):
            yield from _problems(inner, item, place)
        if isinstance(value, list):
            yield from _duplicates(schema, value, path)


def mistyped(schema: Json, value: Json) -> str:
    """Message about the first field of a wrong type, "" if all are right."""
    return next((str(each) for each in validate(schema, value) if each.reason == "FieldValueTypeInvalid"), "")


def _has_type(value: Any, kind: str) -> bool:
    found = json_type(value)
    if found == "number" and kind == "integer":
        return bool(value.is_integer())
    return found == kind or (found, kind) == ("integer", "number")


def _text_problems(schema: Json, value: str, path: str) -> Iterator[Problem]:
    pattern = schema.get("pattern")
    # The first of these is all that the real server mentions.
    if "maxLength" in schema and len(value) > schema["maxLength"]:
        yield errors.too_long(path, schema["maxLength"])
    elif "minLength" in schema and len(value) < schema["minLength"]:
        yield errors.invalid_value(path, value, f"{path} in body should be at least {schema['minLength']} chars long")
    elif pattern and not _compiled(pattern).search(value):
        yield errors.invalid_value(path, value, f"{path} in body should match '{pattern}'")
    if schema.get("format") == "date-time" and parse_time(value) is None:
        yield errors.invalid_value(path, value, f'{path} in body must be of type date-time: "{value}"')
    if schema.get("format") == "byte":
        try:
            base64.b64decode("".join(value.split()), validate=True)
        except ValueError:
            yield errors.invalid_value(path, value, "illegal base64 data: encode it, or use stringData in a Secret")


@lru_cache(maxsize=512)
def _compiled(pattern: str) -> re.Pattern[str]:
    """The pattern, or one that matches all: a pattern only Go understands must not refuse objects."""
    try:
        return re.compile(pattern.replace(r"\z", r"\Z"))
    except re.error:
        return re.compile("")


def _number_problems(schema: Json, value: float, path: str) -> Iterator[Problem]:
    least, most = schema.get("minimum", value), schema.get("maximum", value)
    if value < least:
        yield errors.invalid_value(path, value, f"{path} in body should be greater than or equal to {least}")
    if value > most:
        yield errors.invalid_value(path, value, f"{path} in body should be less than or equal to {most}")


def _size_problems(schema: Json, value: Json | list[Any], path: str) -> Iterator[Problem]:
    parts = "Items" if isinstance(value, list) else "Properties"
    least, most = schema.get(f"min{parts}", 0), schema.get(f"max{parts}", len(value))
    if len(value) < least:
        yield errors.invalid_value(path, len(value), f"{path} in body should have at least {least} {parts.lower()}")
    if len(value) > most:
        yield Problem(path, "FieldValueTooMany", f"Too many: {len(value)}: must have at most {most} items")


def _duplicates(schema: Json, value: list[Any], path: str) -> Iterator[Problem]:
    kind, seen = schema.get("x-kubernetes-list-type"), []
    for index, item in enumerate(value if kind in ("map", "set") else ()):
        identity = item
        if kind == "map" and isinstance(item, dict):
            identity = {key: item.get(key) for key in listed(schema.get("x-kubernetes-list-map-keys"))}
        if identity in seen:
            yield errors.duplicate_value(f"{path}[{index}]", identity)
        seen.append(identity)
