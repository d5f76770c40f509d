"""Values of a JSON document that another version may have written: a value of the wrong type counts as missing."""

from __future__ import annotations

from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]


class UnreadableRecord(Exception):
    """A file of the state directory is corrupt, or of a newer format; the message names the problem."""


def mapping(item: Any, key: str) -> Json:
    """The object under a key, {} without one."""
    found = item.get(key) if isinstance(item, dict) else None
    return found if isinstance(found, dict) else {}


def items(item: Json, key: str) -> list[Any]:
    """The list under a key, [] without one."""
    found = item.get(key)
    return found if isinstance(found, list) else []


def objects(item: Json, key: str) -> list[Json]:
    """The objects in the list under a key, [] without one."""
    return [each for each in items(item, key) if isinstance(each, dict)]


def string(item: Json, key: str) -> str:
    """The value under a key as text, "" without one."""
    found = item.get(key)
    return "" if found is None else str(found)


def whole(item: Json, key: str) -> int:
    """The positive integer of 64 bits under a key, 0 without one."""
    found = item.get(key)
    return found if isinstance(found, int) and not isinstance(found, bool) and 0 < found < 1 << 63 else 0
