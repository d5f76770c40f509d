"""Field paths: the notation in which managers own parts of an object.

A path is a tuple of elements in the spelling of FieldsV1: `f:spec` for a field, `k:{"type":"Ready"}`
for an item of a list with keys, `v:"x"` for an item of a set. Lists without keys are owned whole.
Objects are turned into {path: value} maps, so that "what changed" and "who owns it" are set algebra.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any, TypeAlias

from .codec import clone, listed
from .errors import Json
from .schema import child_schema, keeps_unknown

Path: TypeAlias = tuple[str, ...]

PRESENT: Any = object()
"""Value of a path that stands for a container, where only its existence can differ."""

_OWNABLE_METADATA = ("labels", "annotations", "generateName", "finalizers", "ownerReferences")
"""The part of `metadata` that can be owned; the rest belongs to the server."""


def list_kind(schema: Json) -> str:
    """`map`, `set` or `atomic`."""
    kind = schema.get("x-kubernetes-list-type")
    return kind if kind in ("map", "set") else "atomic"


def is_atomic_map(schema: Json) -> bool:
    """True if an object is owned as a whole."""
    return schema.get("x-kubernetes-map-type") == "atomic"


def item_key(schema: Json, item: Any) -> str:
    """The element of one list item, e.g. `k:{"port":80,"protocol":"TCP"}`; defaults of keys are filled in."""
    if list_kind(schema) == "set":
        return "v:" + json.dumps(item, separators=(",", ":"))
    properties = (schema.get("items") or {}).get("properties") or {}
    keys: Json = {}
    for name in listed(schema.get("x-kubernetes-list-map-keys")):
        value = item.get(name) if isinstance(item, dict) else None
        keys[name] = (properties.get(name) or {}).get("default") if value is None else value
    return "k:" + json.dumps(keys, sort_keys=True, separators=(",", ":"))


def leaves(schema: Json, obj: Json, *, containers: bool = False) -> dict[Path, Any]:
    """Every ownable path of an object with its value; with `containers` also those of filled objects and lists.

    An apply owns no container with anything in it; an update owns every container that it creates.
    """
    return {
        path: value
        for path, value in _walk(schema, obj, (), containers)
        if path[0] not in ("f:apiVersion", "f:kind")
        and (path[0] != "f:metadata" or (path[1:] and path[1][2:] in _OWNABLE_METADATA))
    }


def _walk(schema: Json, value: Any, path: Path, containers: bool) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict) and not is_atomic_map(schema):
        # Without declared fields, a container is a value of its own.
        undeclared = "type" not in schema and keeps_unknown(schema)
        if path and (not value or containers or undeclared):
            yield path, PRESENT
        for name, item in value.items():
            yield from _walk(child_schema(schema, name) or {}, item, (*path, "f:" + name), containers)
    elif isinstance(value, list) and list_kind(schema) != "atomic":
        items = schema.get("items") or {}
        if containers:
            yield path, PRESENT
        for item in value:
            here = (*path, item_key(schema, item))
            yield here, PRESENT
            if list_kind(schema) == "map":
                yield from _walk(items, item, here, containers)
    else:
        yield path, value


def merge(schema: Json, live: Any, applied: Any) -> Any:
    """`live` with the values of `applied` merged into it, list items matched by their keys."""
    if isinstance(applied, dict) and isinstance(live, dict) and not is_atomic_map(schema):
        inside = {name: merge(child_schema(schema, name) or {}, live.get(name), applied[name]) for name in applied}
        return {**live, **inside}
    if isinstance(applied, list) and list_kind(schema) != "atomic":
        return _merge_list(schema, listed(live), applied)
    return clone(applied)


def _merge_list(schema: Json, live: list[Any], applied: list[Any]) -> list[Any]:
    """Both lists in one: live items in their order, then new ones."""
    items = schema.get("items") or {}
    old = {item_key(schema, item): item for item in live}
    new = {item_key(schema, item): item for item in applied}
    return [merge(items, old.get(key), new[key]) if key in new else old[key] for key in old | new]


def with_containers(*paths: Collection[Path]) -> set[Path]:
    """Paths, and those of all that they are in."""
    return {path[:length] for each in paths for path in each for length in range(1, len(path) + 1)}


def without(schema: Json, value: Any, doomed: Collection[Path], path: Path = ()) -> Any:
    """`value` without what is at `doomed` paths."""
    if isinstance(value, dict) and not is_atomic_map(schema):
        return {
            name: without(child_schema(schema, name) or {}, item, doomed, here)
            for name, item in value.items()
            if (here := (*path, "f:" + name)) not in doomed
        }
    if isinstance(value, list) and list_kind(schema) != "atomic":
        items = schema.get("items") or {}
        places = [((*path, item_key(schema, item)), item) for item in value]
        return [without(items, item, doomed, here) for here, item in places if here not in doomed]
    return value


def show(path: Path) -> str:
    """`.status.conditions[type="Ready"].status`."""
    text = ""
    for element in path:
        mark, body = element[:2], element[2:]
        if mark == "f:":
            text += f".{body}"
        elif mark == "k:":
            pairs = json.loads(body)
            text += "[" + ",".join(f"{name}={json.dumps(value)}" for name, value in pairs.items()) + "]"
        else:
            text += f"[={body}]"
    return text


def encode_set(paths: frozenset[Path]) -> Json:
    """A set of paths as FieldsV1: nested objects, `.` where a container itself is a member."""
    root: Json = {}
    for path in sorted(paths):
        node = root
        for depth, element in enumerate(path):
            if path[:depth] in paths:
                node["."] = {}
            node = node.setdefault(element, {})
    return root


def decode_set(encoded: Any, path: Path = ()) -> frozenset[Path]:
    """FieldsV1 as a set of paths, below `path`; what is malformed is left out."""
    if not isinstance(encoded, dict):
        return frozenset()
    inner = (decode_set(value, (*path, element)) for element, value in encoded.items() if element != ".")
    own = frozenset([path] if path and (not encoded or "." in encoded) else [])
    return own.union(*inner)
