"""The three patch formats that are not apply: merge, JSON and strategic merge.

Strategic merge is merge patch plus knowledge of lists: items with a merge key are matched by it, and of the
directives those are understood that kubectl writes: `$setElementOrder/…`, `$deleteFromPrimitiveList/…`, and
`$patch: delete` of an item.
"""

from __future__ import annotations

import logging
from typing import Any

from .codec import MAX_BODY_BYTES, clone, encode, listed, whole_number
from .errors import ApiError, Json, bad_request, unknown_format
from .resources import Resource
from .schema import child_schema

log = logging.getLogger(__name__)

MERGE = "application/merge-patch+json"
JSON = "application/json-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"
_MAX_OPERATIONS = 10_000


def patched(resource: Resource, content_type: str, current: Json, body: Any) -> Json:
    """An object after a patch that is not an apply; 415 for a format this kind does not take."""
    if content_type == JSON:
        return json_patch(current, body)
    if not isinstance(body, dict):
        raise bad_request("error decoding patch: an object is expected")
    if content_type == MERGE:
        return dict(merge_patch(current, body))
    if content_type == STRATEGIC and not resource.custom:
        return dict(strategic_patch(resource.schema, current, body))
    kinds = [JSON, MERGE, APPLY] if resource.custom else [JSON, MERGE, STRATEGIC, APPLY]
    raise unknown_format(kinds)


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7386: null deletes, objects merge, everything else replaces."""
    if not isinstance(patch, dict):
        return clone(patch)
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patch(merged.get(name), value)
    return merged


# ---- RFC 6902 ----------------------------------------------------------------------------------


def json_patch(target: Json, operations: Any) -> Json:
    """RFC 6902. 422 when an operation does not fit the object, 400 when it is malformed."""
    if not isinstance(operations, list):
        raise bad_request("error decoding patch: a JSON patch is a list of operations")
    if len(operations) > _MAX_OPERATIONS:
        message = f"The allowed maximum operations in a JSON patch is {_MAX_OPERATIONS}, got {len(operations)}"
        raise ApiError(413, "RequestEntityTooLarge", message)
    document: Any = clone(target)
    copied_bytes = 0
    for operation in operations:
        if not isinstance(operation, dict) or not isinstance(operation.get("path"), str):
            raise bad_request("error decoding patch: every operation needs a path")
        if operation.get("op") == "copy":
            # Each copy of the whole document doubles it.
            copied_bytes += len(encode(_look(document, _pointer(str(operation.get("from", ""))))))
            if copied_bytes > MAX_BODY_BYTES:
                raise _unfitting(f"its copies are larger than {MAX_BODY_BYTES} bytes")
        document = _operate(document, operation)
    if not isinstance(document, dict):
        raise _unfitting("the result is not an object")
    return document


def _unfitting(why: str) -> ApiError:
    """The error for a JSON patch that does not fit; only the log says why, as a real server's answer does not."""
    log.info("a JSON patch does not fit", extra={"why": why})
    return ApiError(422, "Invalid", "the server rejected our request due to an error in our request", details={})


def _operate(document: Any, operation: Json) -> Any:
    path, source = _pointer(operation["path"]), _pointer(str(operation.get("from", "")))
    match operation:
        # As on the real server, a value that is not there is null.
        case {"op": "add" | "replace" as kind}:
            return _put(document, path, clone(operation.get("value")), adding=kind == "add")
        case {"op": "test"}:
            if _look(document, path) != operation.get("value"):
                raise _unfitting(f"testing value {operation['path']} failed: test failed")
            return document
        case {"op": "remove"}:
            return _take(document, path)
        case {"op": "move" | "copy" as kind}:
            value = clone(_look(document, source))
            return _put(_take(document, source) if kind == "move" else document, path, value, adding=True)
    raise _unfitting(f"unexpected kind: {operation.get('op')}")


def _pointer(text: str) -> list[str]:
    if text and not text.startswith("/"):
        raise bad_request(f"error decoding patch: {text} is not a JSON pointer")
    return [part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:]]


def _key(container: Any, token: str, *, new: bool = False) -> Any:
    """What a token of a pointer is in a container: the name of a field, or an index. `new`: it need not exist yet."""
    if isinstance(container, dict) and (new or token in container):
        return token
    if isinstance(container, list):
        index = len(container) if new and token == "-" else whole_number(token)
        if index is not None and index < len(container) + new:
            return index
    raise _unfitting(f"the path element {token!r} does not exist")


def _look(document: Any, path: list[str]) -> Any:
    for token in path:
        document = document[_key(document, token)]
    return document


def _put(document: Any, path: list[str], value: Any, *, adding: bool) -> Any:
    if not path:
        return value
    parent = _look(document, path[:-1])
    key = _key(parent, path[-1], new=adding or isinstance(parent, dict))
    if adding and isinstance(parent, list):
        parent.insert(key, value)
    else:
        parent[key] = value
    return document


def _take(document: Any, path: list[str]) -> Any:
    if not path:
        raise _unfitting("an object cannot be removed by a patch")
    parent = _look(document, path[:-1])
    del parent[_key(parent, path[-1])]
    return document


# ---- strategic merge ---------------------------------------------------------------------------


def strategic_patch(schema: Json, target: Any, patch: Any) -> Any:
    """Strategic merge patch, with merge keys from the schema."""
    if not isinstance(patch, dict):
        return clone(patch)
    if "$patch" in patch:
        raise bad_request("error decoding patch: $patch may only delete an item of a list; use a merge patch")
    merged = dict(target) if isinstance(target, dict) else {}
    # A directive about a list is `$directive/field`, and may come without the field itself.
    for name in dict.fromkeys(name.partition("/")[2] if name.startswith("$") else name for name in patch):
        inner = child_schema(schema, name) or {}
        value = patch.get(name)
        if name in patch and value is None:
            merged.pop(name, None)
        elif isinstance(value, dict):
            merged[name] = strategic_patch(inner, merged.get(name), value)
        elif isinstance(value, list) or (name not in patch and isinstance(merged.get(name), list)):
            deleted = listed(patch.get(f"$deleteFromPrimitiveList/{name}"))
            current = [item for item in listed(merged.get(name)) if item not in deleted]
            merged[name] = _merge_list(inner, current, value, patch.get(f"$setElementOrder/{name}"))
        elif name in patch:
            merged[name] = value
    return merged


def _merge_list(schema: Json, current: list[Any], patch: list[Any] | None, order: Any) -> list[Any]:
    """A list after a patch, which is None if there are only directives about it. `order`: `$setElementOrder`."""
    key: str | None = schema.get("x-kubernetes-patch-merge-key")
    if not key and schema.get("x-kubernetes-list-type") != "set" and patch is not None:
        return [clone(item) for item in patch]
    merged = list(current)
    for item in patch or ():
        if not key:
            merged += [] if item in merged else [clone(item)]
            continue
        if not isinstance(item, dict) or key not in item:
            raise ApiError(500, "", f"an item of a list does not contain declared merge key: {key}")
        # Two items may share the merge key, as ports of two protocols do; the first of them is meant.
        place = next((n for n, old in enumerate(merged) if _identity(old, key) == item[key]), len(merged))
        found = merged[place] if place < len(merged) else {}
        deleted = item.get("$patch") == "delete"
        merged[place : place + 1] = [] if deleted else [strategic_patch(schema.get("items") or {}, found, item)]
    named = [_identity(item, key) for item in listed(order)]

    def rank(item: Any) -> int:
        identity = _identity(item, key)
        return named.index(identity) if identity in named else len(named)

    return sorted(merged, key=rank)


def _identity(item: Any, key: str | None) -> Any:
    """The value of an item by which a list knows it: that of its merge key, or the item itself."""
    if key is None:
        return item
    return item.get(key) if isinstance(item, dict) else None
