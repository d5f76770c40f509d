"""Metadata of every object: the parts that clients may set, and the rules of names, labels and owners."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator

from .codec import clone, listed, section, timestamp
from .errors import Json, Problem, invalid_value, required
from .schema import settle
from .schemas import METADATA

_FROM_CLIENTS = ("generateName", "namespace", "labels", "annotations", "ownerReferences", "finalizers")
_FROM_SERVER = (
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
)


def settled(before: Json | None, sent: Json, *, subresource: str) -> tuple[Json, list[str]]:
    """(the metadata of an object after a write, paths of the unknown fields sent).

    Fields of the server stay as they were, or are made for a new object. A write of the status changes no metadata.
    """
    sent, unknown = readable(sent)
    if before and subresource == "status":
        kept = clone(before["metadata"])
        kept.pop("managedFields", None)
        return kept, unknown
    given = {name: sent[name] for name in _FROM_CLIENTS if sent.get(name) not in (None, "", {}, [])}
    result: Json = {"name": sent["name"], **given}
    if before:
        current = before["metadata"]
        result |= {name: current[name] for name in _FROM_SERVER if name in current}
    else:
        result |= {"uid": str(uuid.uuid4()), "creationTimestamp": timestamp()}
    return result, unknown


def readable(sent: Json) -> tuple[Json, list[str]]:
    """(a copy of what clients may set of metadata, paths of the unknown fields)."""
    # Ownership is long, and has a reader of its own.
    own = clone({name: value for name, value in sent.items() if name != "managedFields" or not isinstance(value, list)})
    return own, settle(METADATA, own, "metadata")


_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
SUBDOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*")
DNS_LABEL = re.compile(_LABEL)
QUALIFIED = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_ENDS = ", and must start and end with an alphanumeric character"
SUBDOMAIN_DETAIL = "a lowercase RFC 1123 subdomain must consist of lower case letters, digits, '-' or '.'" + _ENDS
LABEL_VALUE_DETAIL = "a valid label must be an empty string or consist of letters, digits, '-', '_' or '.'" + _ENDS
DNS_LABEL_DETAIL = "a lowercase RFC 1123 label must consist of lower case letters, digits or '-'" + _ENDS
QUALIFIED_DETAIL = "name part must consist of letters, digits, '-', '_' or '.'" + _ENDS


def validate(metadata: Json) -> Iterator[Problem]:
    """Problems of the name, labels, annotations and finalizers of an object."""
    name = metadata.get("name") or ""
    if not name:
        yield required("metadata.name", "name or generateName is required")
    elif not SUBDOMAIN.fullmatch(name):
        yield invalid_value("metadata.name", name, SUBDOMAIN_DETAIL)
    elif len(name) > 253:
        yield invalid_value("metadata.name", name, "must be no more than 253 characters")
    yield from label_problems("metadata.labels", section(metadata, "labels"))
    for key in section(metadata, "annotations"):
        yield from qualified_problems("metadata.annotations", key.lower())
    for finalizer in listed(metadata.get("finalizers")):
        yield from qualified_problems("metadata.finalizers", finalizer)


def dns_label_problems(path: str, text: str) -> list[Problem]:
    """Problems of a name that is one part of a domain."""
    return [] if len(text) <= 63 and DNS_LABEL.fullmatch(text) else [invalid_value(path, text, DNS_LABEL_DETAIL)]


def label_problems(path: str, labels: Json) -> Iterator[Problem]:
    """Problems of labels, or of a selector for them."""
    for key, value in labels.items():
        yield from qualified_problems(path, key)
        if len(value) > 63:
            yield invalid_value(path, value, "must be no more than 63 characters")
        if value and not QUALIFIED.fullmatch(value):
            yield invalid_value(path, value, LABEL_VALUE_DETAIL)


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
