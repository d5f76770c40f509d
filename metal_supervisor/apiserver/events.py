"""Events: one store, served under two API groups.

`v1` and `events.k8s.io/v1` name the same fields differently. They are stored as `v1`. Except for its
series, an Event of the newer group never changes, and it must say who reports and what was done.
"""

from __future__ import annotations

from collections.abc import Iterator

from .codec import section
from .errors import Json, Problem, invalid_value, required
from .metadata import qualified_problems
from .resources import Resource
from .schemas import EVENT_NAMES

_BACK = {new: old for old, new in EVENT_NAMES.items()}
_IMMUTABLE = ("involvedObject", "reason", "message", "action", "related", "type", "eventTime",
              "reportingComponent", "reportingInstance")  # fmt: skip
NOTE_BYTES = 1024
_WORD_BYTES = 128


def is_event(resource: Resource) -> bool:
    """True if the objects of a resource are Events, in either group."""
    return resource.storage == "/events"


def to_newer(event: Json) -> Json:
    """A stored Event in the form of `events.k8s.io/v1`."""
    return {EVENT_NAMES.get(name, name): value for name, value in event.items()}


def to_core(event: Json) -> Json:
    """An Event of `events.k8s.io/v1` in the form of `v1`."""
    return {_BACK.get(name, name): value for name, value in event.items()}


def with_absent(event: Json, *, newer: bool) -> Json:
    """An Event for an answer, with the fields of its form that are present even if empty."""
    absent: Json = {"source": {}, "firstTimestamp": None, "lastTimestamp": None, "eventTime": None}
    if newer:
        return {**to_newer(absent), **event}
    return {**absent, "reportingComponent": "", "reportingInstance": "", **event}


def validate_event(event: Json, previous: Json | None, *, newer: bool) -> Iterator[Problem]:
    """Problems of an Event in its stored form, whose field names the real server uses for both forms."""
    namespace = section(event, "metadata").get("namespace", "")
    about = section(event, "involvedObject").get("namespace", "")
    # With an eventTime, only an Event about an object without a namespace must be in a well-known one.
    fitting = about or namespace in ("default", "kube-system") if event.get("eventTime") else about == namespace
    if not fitting and (about or "default") != namespace:
        yield invalid_value("involvedObject.namespace", about, "does not match event.namespace")
    if newer and not event.get("eventTime"):
        yield required("eventTime")
    elif newer:
        yield from _newer_problems(event, previous)


def _newer_problems(event: Json, previous: Json | None) -> Iterator[Problem]:
    reporter = event.get("reportingComponent") or ""
    if not reporter:
        yield required("reportingController")
    yield from qualified_problems("reportingController", reporter)
    for name in ("reportingInstance", "action", "reason"):
        if not event.get(name):
            yield required(name)
    for name, most in (("action", _WORD_BYTES), ("reason", _WORD_BYTES), ("message", NOTE_BYTES)):
        if len((event.get(name) or "").encode()) > most:
            yield invalid_value(name, "", f"can have at most {most} characters")
    kind = event.get("type", "")
    if kind not in ("Normal", "Warning"):
        yield invalid_value("type", "", f"has invalid value: {kind}")
    for name in ("source", "firstTimestamp", "lastTimestamp", "count"):
        if event.get(name) and not (previous and previous.get(name) == event.get(name)):
            yield invalid_value(name, "", "needs to be unset")
    for name in _IMMUTABLE:
        if previous and previous.get(name) != event.get(name):
            yield invalid_value(name, event.get(name), "field is immutable")
    series = section(event, "series")
    if series and int(series.get("count") or 0) < 2:
        yield invalid_value("series.count", "", "should be at least 2")
    if series and not series.get("lastObservedTime"):
        yield required("series.lastObservedTime")
