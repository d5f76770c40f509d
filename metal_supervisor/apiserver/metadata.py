"""Metadata of every object: the parts that clients may set, and the rules of names, labels and owners."""

from __future__ import annotations

import re
import uuid

from .codec import clone, listed, section, timestamp
from .errors import Json, Problem, forbidden_value, invalid_value, required, too_long

_FROM_CLIENTS = ("generateName", "namespace", "labels", "annotations", "ownerReferences", "finalizers")
_FROM_SERVER = ("uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp",
                "deletionGracePeriodSeconds")  # fmt: skip
_ACCEPTED = {"name", "managedFields", "selfLink", "clusterName", *_FROM_CLIENTS, *_FROM_SERVER}
_OWNER_FIELDS = {"apiVersion", "kind", "name", "uid", "controller", "blockOwnerDeletion"}


def settled(before: Json | None, sent: Json, *, subresource: str) -> tuple[Json, list[str]]:
    """(the metadata of an object after a write, paths of the unknown fields sent).

    Fields of the server stay as they were, or are made for a new object. A write of the status changes no metadata.
    """
    unknown = [f"metadata.{name}" for name in sent if name not in _ACCEPTED]
    if before and subresource == "status":
        kept = clone(before["metadata"])
        kept.pop("managedFields", None)
        return kept, unknown
    result: Json = {"name": sent["name"]}
    for name in _FROM_CLIENTS:
        if sent.get(name) not in (None, "", {}, []):
            result[name] = clone(sent[name])
    for index, owner in enumerate(listed(result.get("ownerReferences"))):
        for name in [name for name in owner if name not in _OWNER_FIELDS]:
            unknown.append(f"metadata.ownerReferences[{index}].{name}")
            del owner[name]
    if before:
        current = before["metadata"]
        result |= {name: current[name] for name in _FROM_SERVER if name in current}
    else:
        result |= {"uid": str(uuid.uuid4()), "creationTimestamp": timestamp()}
    return result, unknown


SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
QUALIFIED = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
MAX_ANNOTATIONS_BYTES = 256 * 1024
"""Limit on all keys and values together."""
SUBDOMAIN_DETAIL = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'example.com', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
LABEL_VALUE_DETAIL = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is "
    "'(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
)
QUALIFIED_DETAIL = (
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric "
    "character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is "
    "'([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
)


def validate(metadata: Json, *, before: Json, named_elsewhere: bool = False) -> list[Problem]:
    """Problems of the name, labels, annotations, finalizers and owners of an object.

    `named_elsewhere`: its kind has its own rules for the name, which are checked elsewhere.
    """
    problems: list[Problem] = []
    name = metadata.get("name") or ""
    if not name:
        problems.append(required("metadata.name", "name or generateName is required"))
    elif named_elsewhere:
        pass
    elif not SUBDOMAIN.fullmatch(name):
        problems.append(invalid_value("metadata.name", name, SUBDOMAIN_DETAIL))
    if len(name) > 253 and not named_elsewhere:
        problems.append(invalid_value("metadata.name", name, "must be no more than 253 characters"))
    problems += label_problems("metadata.labels", section(metadata, "labels"))
    annotations = section(metadata, "annotations")
    for key in annotations:
        problems += qualified_problems("metadata.annotations", key.lower())
    if sum(len(key.encode()) + len(value.encode()) for key, value in annotations.items()) > MAX_ANNOTATIONS_BYTES:
        problems.append(too_long("metadata.annotations", MAX_ANNOTATIONS_BYTES))
    for finalizer in listed(metadata.get("finalizers")):
        problems += qualified_problems("metadata.finalizers", finalizer)
    if before.get("deletionTimestamp"):
        added = [name for name in listed(metadata.get("finalizers")) if name not in listed(before.get("finalizers"))]
        if added:
            detail = "no new finalizers can be added if the object is being deleted, found new finalizers "
            shown_names = ", ".join(f'"{name}"' for name in added)
            problems.append(forbidden_value("metadata.finalizers", f"{detail}[]string{{{shown_names}}}"))
    return problems + _owner_problems(listed(metadata.get("ownerReferences")))


def label_problems(path: str, labels: Json) -> list[Problem]:
    """Problems of labels, or of a selector for them."""
    problems: list[Problem] = []
    for key, value in labels.items():
        problems += qualified_problems(path, key)
        if len(value) > 63:
            problems.append(invalid_value(path, value, "must be no more than 63 characters"))
        if value and not QUALIFIED.fullmatch(value):
            problems.append(invalid_value(path, value, LABEL_VALUE_DETAIL))
    return problems


def qualified_problems(path: str, text: str) -> list[Problem]:
    """Problems of a qualified name: a name that may have a domain as its prefix."""
    prefix, slash, name = text.rpartition("/")
    if slash and (not SUBDOMAIN.fullmatch(prefix) or len(prefix) > 253):
        return [invalid_value(path, text, "prefix part " + SUBDOMAIN_DETAIL)]
    if not name:
        return [invalid_value(path, text, "name part must be non-empty")]
    if len(name) > 63:
        return [invalid_value(path, text, "name part must be no more than 63 characters")]
    return [] if QUALIFIED.fullmatch(name) else [invalid_value(path, text, QUALIFIED_DETAIL)]


def _owner_problems(owners: list[Json]) -> list[Problem]:
    problems: list[Problem] = []
    for owner in owners:
        for name in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(name):
                what = "version must not be empty" if name == "apiVersion" else "must not be empty"
                problems.append(invalid_value(f"metadata.ownerReferences.{name}", owner.get(name, ""), what))
    controllers = [owner for owner in owners if owner.get("controller")]
    if len(controllers) > 1:
        detail = "Only one reference can have Controller set to true"
        problems.append(invalid_value("metadata.ownerReferences", owners, detail))
    return problems


_TYPES: dict[str, tuple[type, str]] = {
    "name": (str, "string"),
    "generateName": (str, "string"),
    "namespace": (str, "string"),
    "labels": (dict, "map[string]string"),
    "annotations": (dict, "map[string]string"),
    "finalizers": (list, "[]string"),
    "ownerReferences": (list, "[]v1.OwnerReference"),
    "managedFields": (list, "[]v1.ManagedFieldsEntry"),
    "resourceVersion": (str, "string"),
    "uid": (str, "string"),
}


def type_problem(metadata: Json) -> str:
    """Go's message about the first field of metadata with a wrong type, "" if there is none."""
    for name, (expected, shown) in _TYPES.items():
        value = metadata.get(name)
        if value is not None and not isinstance(value, expected):
            return _mismatch(value, name, shown)
    for name in ("labels", "annotations"):
        for value in section(metadata, name).values():
            if not isinstance(value, str):
                return _mismatch(value, name, "string")
    for value in listed(metadata.get("finalizers")):
        if not isinstance(value, str):
            return _mismatch(value, "finalizers", "string")
    for owner in listed(metadata.get("ownerReferences")):
        if not isinstance(owner, dict):
            return _mismatch(owner, "ownerReferences", "v1.OwnerReference")
        for name, value in owner.items():
            expected = bool if name in ("controller", "blockOwnerDeletion") else str
            if name in _OWNER_FIELDS and value is not None and not isinstance(value, expected):
                return _mismatch(value, f"ownerReferences.{name}", "bool" if expected is bool else "string")
    return ""


def _mismatch(value: object, name: str, expected: str) -> str:
    return f"json: cannot unmarshal {_go_type(value)} into Go struct field ObjectMeta.{name} of type {expected}"


def _go_type(value: object) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"
