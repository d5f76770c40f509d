"""Events: one store, served under two API groups.

`v1` and `events.k8s.io/v1` name the same fields differently. They are stored as `v1`. Except for its
series, an Event of the newer group never changes, and it must say who reports and what was done.
"""

from __future__ import annotations

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


def validate_event(event: Json, previous: Json | None, *, newer: bool) -> list[Problem]:
    """Problems of an Event in its stored form, whose field names the real server uses for both forms."""
    problems: list[Problem] = []
    namespace = section(event, "metadata").get("namespace", "")
    about = section(event, "involvedObject").get("namespace", "")
    # With an eventTime, only an Event about an object without a namespace must be in a well-known one.
    fitting = about or namespace in ("default", "kube-system") if event.get("eventTime") else about == namespace
    if not fitting and (about or "default") != namespace:
        problems.append(invalid_value("involvedObject.namespace", about, "does not match event.namespace"))
    if not newer:
        return problems
    if not event.get("eventTime"):
        return [*problems, required("eventTime")]
    problems += _reporter_problems(event)
    for name in ("action", "reason"):
        text = event.get(name) or ""
        if not text:
            problems.append(required(name))
        if len(text.encode()) > _WORD_BYTES:
            problems.append(invalid_value(name, "", f"can have at most {_WORD_BYTES} characters"))
    if len(str(event.get("message", "")).encode()) > NOTE_BYTES:
        problems.append(invalid_value("message", "", f"can have at most {NOTE_BYTES} characters"))
    kind = event.get("type", "")
    if kind not in ("Normal", "Warning"):
        problems.append(invalid_value("type", "", f"has invalid value: {kind}"))
    for name in ("source", "firstTimestamp", "lastTimestamp", "count"):
        if event.get(name) and not (previous and previous.get(name) == event.get(name)):
            problems.append(invalid_value(name, "", "needs to be unset"))
    for name in _IMMUTABLE if previous else ():
        if previous and previous.get(name) != event.get(name):
            problems.append(invalid_value(name, event.get(name), "field is immutable"))
    return problems + _series_problems(event.get("series"))


def _reporter_problems(event: Json) -> list[Problem]:
    reporter = event.get("reportingComponent") or ""
    problems = [] if reporter else [required("reportingController")]
    problems += qualified_problems("reportingController", reporter)
    if not event.get("reportingInstance"):
        problems.append(required("reportingInstance"))
    return problems


def _series_problems(series: object) -> list[Problem]:
    if not isinstance(series, dict):
        return []
    problems: list[Problem] = []
    if int(series.get("count") or 0) < 2:
        problems.append(invalid_value("series.count", "", "should be at least 2"))
    if not series.get("lastObservedTime"):
        problems.append(required("series.lastObservedTime"))
    return problems
