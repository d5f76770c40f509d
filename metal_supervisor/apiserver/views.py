"""Conversion between stored objects and the form that clients see.

A stored object belongs to a kind; a request belongs to one version of it. Between the two only the
apiVersion changes, and for Events the names of some fields. Also here: the Scale of a resource.
"""

from __future__ import annotations

from typing import Any

from .codec import clone, dig, section
from .errors import ApiError, Json, invalid_value
from .errors import invalid as invalid_object
from .resources import Resource
from .schemas import EVENT_NAMES

_CORE_NAMES = {new: old for old, new in EVENT_NAMES.items()}


def view(resource: Resource, stored: Json) -> Json:
    """A stored object in the form of a resource. Shares structure with the stored one."""
    obj = _to_newer(stored) if resource.is_event and resource.group else stored
    if obj.get("apiVersion") == resource.group_version and obj.get("kind") == resource.kind:
        return obj
    rest = {name: value for name, value in obj.items() if name not in ("apiVersion", "kind")}
    return {"apiVersion": resource.group_version, "kind": resource.kind, **rest}


def outgoing(resource: Resource, obj: Json) -> Json:
    """A view for an answer: fields that typed clients leave empty are null, absent or an empty object, by kind."""
    if resource.custom:
        return obj
    shown = dict(obj)
    if resource.kind == "EndpointSlice":
        shown |= {name: obj.get(name) or None for name in ("endpoints", "ports")}
    elif resource.is_event:
        return _with_absent(shown, newer=bool(resource.group))
    elif resource.kind == "Lease":
        shown.setdefault("spec", {})
    elif resource.kind == "ConfigMap" and not obj.get("data"):
        shown.pop("data", None)
    elif resource.kind == "Service" and not section(obj, "spec").get("ports"):
        shown["spec"] = {name: value for name, value in section(obj, "spec").items() if name != "ports"}
    return shown


def stored_form(resource: Resource, obj: Json) -> Json:
    """The reverse of `view`."""
    if resource.is_event and resource.group:
        return {**to_core_event(obj), "apiVersion": "v1"}
    return obj


def partial(obj: Json) -> Json:
    """The metadata of an object, as `PartialObjectMetadata`."""
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": obj["metadata"]}


# ---- Events --------------------------------------------------------------------------------------


def _to_newer(event: Json) -> Json:
    """An Event of `v1`, as they are stored, in the form of `events.k8s.io/v1`."""
    return {EVENT_NAMES.get(name, name): value for name, value in event.items()}


def to_core_event(event: Json) -> Json:
    """An Event of `events.k8s.io/v1` in the form of `v1`."""
    return {_CORE_NAMES.get(name, name): value for name, value in event.items()}


def _with_absent(event: Json, *, newer: bool) -> Json:
    """An Event for an answer, with the fields of its form that are present even if empty."""
    absent: Json = {"source": {}, "firstTimestamp": None, "lastTimestamp": None, "eventTime": None}
    if newer:
        return {**_to_newer(absent), **event}
    return {**absent, "reportingComponent": "", "reportingInstance": "", **event}


# ---- scale -------------------------------------------------------------------------------------


def scale_of(resource: Resource, obj: Json) -> Json:
    """An object as `autoscaling/v1` Scale. 422 when its replica count is no whole number."""
    own = obj["metadata"]
    names = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    status: Json = {"replicas": _count(resource, obj, "statusReplicasPath")}
    if selector := _place(resource, "labelSelectorPath"):
        status["selector"] = dig(obj, *selector) or ""
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {name: own[name] for name in names if name in own},
        "spec": {"replicas": _count(resource, obj, "specReplicasPath")},
        "status": status,
    }


def with_scale(resource: Resource, obj: Json, scale: Json) -> Json:
    """An object with the replica count of a Scale. 422 when the count makes no sense, or has no place in the object."""
    replicas = section(scale, "spec").get("replicas", 0)
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 0:
        problem = invalid_value("spec.replicas", replicas, "should be a non-negative integer")
        raise invalid_object("autoscaling", "Scale", obj["metadata"]["name"], [problem])
    # The answer to the write has this count too, and must not fail once the object is stored.
    _count(resource, obj, "statusReplicasPath")
    changed: Json = clone(obj)
    node: Any = changed
    *parents, last = place = _place(resource, "specReplicasPath")
    for name in parents:
        node = node.setdefault(name, {}) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        raise _unscalable(resource, obj, place, replicas, "is not within an object")
    node[last] = replicas
    if wanted := section(scale, "metadata").get("resourceVersion"):
        changed["metadata"]["resourceVersion"] = wanted
    return changed


def _place(resource: Resource, path: str) -> list[str]:
    """The names that lead to what a path in the definition of the scale is about; none if there is no such path."""
    return [name for name in (resource.scale or {}).get(path, "").split(".") if name]


def _count(resource: Resource, obj: Json, path: str) -> int:
    place = _place(resource, path)
    value = dig(obj, *place) or 0
    if isinstance(value, int):
        return int(value)
    raise _unscalable(resource, obj, place, value, "must be a whole number")


def _unscalable(resource: Resource, obj: Json, place: list[str], value: Any, why: str) -> ApiError:
    problem = invalid_value(".".join(place), value, why)
    return invalid_object(resource.group, resource.kind, obj["metadata"]["name"], [problem])
