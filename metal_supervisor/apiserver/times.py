"""Times with microseconds, as Leases and Events have them: exactly six digits, kept in UTC.

A real server cannot decode an object with any other form, and answers with the error text of Go's library.
"""

from __future__ import annotations

import re
from datetime import timezone

from .codec import parse_time, section
from .errors import Json

LAYOUT = "2006-01-02T15:04:05.000000Z07:00"
_PARTS = (
    ("2006", r"\d{4}"), ("-", "-"), ("01", r"0[1-9]|1[0-2]"), ("-", "-"), ("02", r"0[1-9]|[12]\d|3[01]"), ("T", "T"),
    ("15", r"[01]\d|2[0-3]"), (":", ":"), ("04", r"[0-5]\d"), (":", ":"), ("05", r"[0-5]\d"),
    (".000000", r"\.\d{6}"), ("Z07:00", r"Z|[+-]\d\d:\d\d"),
)  # fmt: skip
_FIELDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "Lease": (("spec", "acquireTime"), ("spec", "renewTime")),
    "Event": (("eventTime",), ("series", "lastObservedTime")),
}


def settle(kind: str, obj: Json) -> str:
    """Normalize the times of an object, in place; return the problem of the first that is invalid, "" if none is."""
    for *parents, name in _FIELDS.get(kind, ()):
        holder = section(obj, *parents)
        text = holder.get(name)
        if not isinstance(text, str):
            continue
        problem = parse_problem(text)
        if problem:
            return problem
        if moment := parse_time(text):
            holder[name] = moment.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return ""


def parse_problem(text: str) -> str:
    """Go's error for a text that is no such time, "" if it is one."""
    rest = text
    for element, pattern in _PARTS:
        found = re.match(pattern, rest)
        if found is None:
            return f'parsing time "{text}" as "{LAYOUT}": cannot parse "{rest}" as "{element}"'
        rest = rest[found.end() :]
    if rest:
        return f'parsing time "{text}": extra text: "{rest}"'
    return "" if parse_time(text) else f'parsing time "{text}": day out of range'
