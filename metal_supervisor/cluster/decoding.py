"""Decoding of the API server's JSON, whatever an object in it holds.

One list has the objects of all users, and a server takes objects that are nested far deeper than Python's parser can
follow, in any field that keeps unknown content. What is nested deeper than any real object is left out here: it would
cost all users the list, or the thread that compares or quotes it.
"""

from __future__ import annotations

import json
import re
from typing import Any

MOST_LEVELS = 100
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[][{}]', re.DOTALL)


def decode(content: bytes) -> Any:
    """The value, with objects and lists below MOST_LEVELS empty. Raises ValueError, RecursionError."""
    try:
        found = json.loads(content)
    except RecursionError:
        found = json.loads(_emptied(content))
    level = [found] if isinstance(found, (dict, list)) else []
    for _ in range(MOST_LEVELS):
        values = (value for each in level for value in (each.values() if isinstance(each, dict) else each))
        level = [value for value in values if isinstance(value, (dict, list))]
        if not level:
            break
    for each in level:
        each.clear()
    return found


def _emptied(content: bytes) -> bytes:
    """The text of the same value."""
    kept, begin, level = [], 0, 0
    for found in _TOKEN.finditer(content):
        if found[0] in (b"[", b"{"):
            if level == MOST_LEVELS:
                kept.append(content[begin : found.end()])
            level += 1
        elif found[0] in (b"]", b"}"):
            level -= 1
            if level == MOST_LEVELS:
                begin = found.start()
    return b"".join(kept) + (content[begin:] if level <= MOST_LEVELS else b"")
