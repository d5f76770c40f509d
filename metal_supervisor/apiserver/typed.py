"""Check that all of a declaration can be owned: no unknown fields, wrong types, or items with the same key.

The real server turns a declaration into a typed value before anything else, and refuses one that does not fit, with
status 500 and the messages used here. Validation may still refuse one that fits, as in any other write.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .codec import listed
from .errors import ApiError, Json, as_go_prints, json_type
from .fields import Path, is_atomic_map, item_key, list_kind, show
from .schema import TYPES, child_schema, has_type

_NAMES = {"object": "map", "array": "list"}
"""Types that structured-merge-diff calls by other names."""


def check(schema: Json, declaration: Json, group_version: str) -> None:
    """Raise ApiError 500 for a declaration that does not fit a schema."""
    problems = list(_problems(schema, declaration, ()))
    if not problems:
        return
    metadata = declaration.get("metadata") or {}
    kind = f"{group_version if '/' in group_version else '/' + group_version}, Kind={declaration.get('kind', '')}"
    listing = problems[0] if len(problems) == 1 else "errors:\n" + "\n".join(f"  {problem}" for problem in problems)
    subject = f"{metadata.get('namespace') or ''}/{metadata.get('name') or ''}; {kind}"
    raise ApiError(500, "", f"failed to create typed patch object ({subject}): {listing}")


def _problems(schema: Json, value: Any, path: Path) -> Iterator[str]:
    if value is None:
        return
    kind = str(schema.get("type", ""))
    # A map that is owned whole may be anything but a list here: validation judges it.
    judged = kind in TYPES and (isinstance(value, list) or not is_atomic_map(schema))
    if judged and not has_type(value, "number" if kind == "integer" else kind):
        yield _unexpected(kind, value, path)
    elif isinstance(value, list):
        yield from _list_problems(schema, value, path)
    elif isinstance(value, dict):
        for name in sorted(value):
            if not path and name in ("apiVersion", "kind", "metadata"):
                continue
            inner, here = child_schema(schema, name), (*path, "f:" + name)
            if inner is None:
                yield f"{show(here)}: field not declared in schema"
            else:
                yield from _problems(inner, value[name], here)


def _list_problems(schema: Json, items: list[Any], path: Path) -> Iterator[str]:
    kind, seen = list_kind(schema), set()
    keys = listed(schema.get("x-kubernetes-list-map-keys"))
    for index, item in enumerate(items):
        element = f"i:{index}"
        if kind == "map":
            if not isinstance(item, dict) or not any(name in item for name in keys):
                quoted = " ".join(f'"{name}"' for name in keys)
                yield (
                    f"{show(path)}: element {index}: associative list with keys has an element that omits all key "
                    f"fields [{quoted}] (and doesn't have default values for any key fields)"
                )
                continue
            element = item_key(schema, item)
        elif kind == "set":
            element = item_key(schema, item)
        if kind != "atomic":
            if element in seen:
                yield f"{show(path)}: duplicate entries for key {show((element,))}"
            seen.add(element)
        yield from _problems(schema.get("items") or {}, item, (*path, element))


def _unexpected(kind: str, value: Any, path: Path) -> str:
    where, shown, found = show(path), as_go_prints(value), json_type(value)
    if kind in ("integer", "number"):
        return f"{where}: expected numeric (int or float), got {_NAMES.get(found, found)}"
    if kind == "string":
        return f"{where}: expected string, got &value.valueUnstructured{{Value:{shown}}}"
    return f"{where}: expected {_NAMES.get(kind, kind)}, got &{{{shown}}}"
