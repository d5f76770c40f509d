"""Events: one store, two faces.

`v1` and `events.k8s.io/v1` name the same fields differently. They are stored as `v1`. Except for its
series, an Event of the newer group never changes, and it must say who reports and what was done.
"""

from __future__ import annotations

import re

from .codec import section
from .errors import Json, Problem, forbidden_value, invalid_value, required, too_long
from .resources import Resource

_RENAMED = {
    "involvedObject": "regarding",
    "message": "note",
    "source": "deprecatedSource",
    "firstTimestamp": "deprecatedFirstTimestamp",
    "lastTimestamp": "deprecatedLastTimestamp",
    "count": "deprecatedCount",
    "reportingComponent": "reportingController",
}
_BACK = {new: old for old, new in _RENAMED.items()}
_MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}(Z|[+-]\d\d:\d\d)")
_IMMUTABLE = ("involvedObject", "reason", "message", "action", "related", "type", "eventTime",
              "reportingComponent", "reportingInstance")  # fmt: skip
NOTE_BYTES = 1024


def is_micro_time(text: object) -> bool:
    """Whether a text has exactly the form of `metav1.MicroTime`."""
    return isinstance(text, str) and _MICRO_TIME.fullmatch(text) is not None


def is_event(resource: Resource) -> bool:
    """Whether objects of a resource are Events, under either name."""
    return resource.storage == "/events"


def to_newer(event: Json) -> Json:
    """A stored Event in the words of `events.k8s.io/v1`."""
    return {_RENAMED.get(name, name): value for name, value in event.items()}


def to_core(event: Json) -> Json:
    """An Event of `events.k8s.io/v1` in the words of `v1`."""
    return {_BACK.get(name, name): value for name, value in event.items()}


def validate_event(event: Json, previous: Json | None, *, newer: bool) -> list[Problem]:
    """What is wrong with an Event in its stored form, named in the words of the version it came in."""

    def called(name: str) -> str:
        return _RENAMED.get(name, name) if newer else name

    problems: list[Problem] = []
    namespace = section(event, "metadata").get("namespace", "")
    regarding = section(event, "involvedObject").get("namespace") or "default"
    if regarding != namespace:
        detail = "does not match event.namespace"
        problems.append(invalid_value(f"{called('involvedObject')}.namespace", regarding, detail))
    for path, text in _times(event):
        if text is not None and not is_micro_time(text):
            detail = f'parsing time "{text}" as "2006-01-02T15:04:05.000000Z07:00"'
            problems.append(invalid_value(path, text, detail))
    if not newer:
        return problems
    for name in ("reportingComponent", "reportingInstance", "action", "reason"):
        if not event.get(name):
            problems.append(required(called(name)))
    if not event.get("eventTime"):
        problems.append(required("eventTime"))
    if event.get("type") not in ("Normal", "Warning"):
        problems.append(invalid_value("type", event.get("type", ""), "has invalid value: "))
    if len(str(event.get("message", "")).encode()) > NOTE_BYTES:
        problems.append(too_long(called("message"), NOTE_BYTES))
    for name in ("source", "firstTimestamp", "lastTimestamp", "count"):
        if event.get(name) and not (previous and previous.get(name) == event.get(name)):
            problems.append(forbidden_value(called(name), "needs to be unset"))
    if previous:
        for name in _IMMUTABLE:
            if previous.get(name) != event.get(name):
                problems.append(invalid_value(called(name), event.get(name), "field is immutable"))
    series = event.get("series")
    if isinstance(series, dict):
        if int(series.get("count") or 0) < 2:
            problems.append(invalid_value("series.count", series.get("count"), "should be at least 2"))
        if not series.get("lastObservedTime"):
            problems.append(required("series.lastObservedTime"))
    return problems


def _times(event: Json) -> list[tuple[str, object]]:
    return [
        ("eventTime", event.get("eventTime")),
        ("series.lastObservedTime", section(event, "series").get("lastObservedTime")),
    ]
