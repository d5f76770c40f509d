"""The single steps of a write, each a function of the objects involved."""

from __future__ import annotations

from typing import Any

from .apply import read_entries
from .codec import clone, listed, section
from .errors import ApiError, Json, bad_request, conflict, invalid, invalid_value
from .patch import APPLY, JSON, MERGE, STRATEGIC, json_patch, merge_patch, strategic_patch
from .resources import Resource
from .schema import prune, validate
from .targets import Target, WriteOptions


def held_by_kind(resource: Resource, obj: Json) -> bool:
    """A namespace has a finalizer of its own, in its spec."""
    return resource.storage_key == "/namespaces" and bool(listed(section(obj, "spec").get("finalizers")))


def patched(resource: Resource, content_type: str, current: Json, body: Any) -> Json:
    """An object after a patch that is not an apply; 415 for a format this kind does not take."""
    if content_type == JSON:
        return json_patch(current, body)
    if not isinstance(body, dict):
        raise bad_request("error decoding patch: an object is expected")
    if content_type == MERGE:
        return dict(merge_patch(current, body))
    if content_type == STRATEGIC and not resource.custom:
        return dict(strategic_patch(resource.schema, current, body))
    kinds = [JSON, MERGE, APPLY] if resource.custom else [JSON, MERGE, STRATEGIC, APPLY]
    message = "the body of the request was in an unknown format - accepted media types include: " + ", ".join(kinds)
    raise ApiError(415, "UnsupportedMediaType", message)


def preconditions(declaration: Json) -> Json:
    """What a declaration says about the object it expects to find."""
    sent = declaration["metadata"]
    return {name: sent[name] for name in ("resourceVersion", "uid", "name", "namespace") if name in sent}


def check_preconditions(target: Target, before: Json, sent: Json) -> None:
    """409 when the object has changed since the client saw it, 422 when it is another one."""
    resource, current = target.resource, before["metadata"]
    if sent.get("resourceVersion") not in (None, "", current["resourceVersion"]):
        why = "the object has been modified; please apply your changes to the latest version and try again"
        raise conflict(resource.group, resource.plural, target.name, why)
    if sent.get("uid") not in (None, "", current["uid"]) and not target.subresource:
        problem = invalid_value("metadata.uid", sent["uid"], "field is immutable")
        raise invalid(resource.group, resource.kind, target.name, [problem])


def isolated(target: Target, before: Json | None, candidate: Json) -> Json:
    """What of a candidate this request may change: all but the status, or nothing but the status."""
    new = dict(candidate)
    if target.subresource == "status" and before:
        new = clone(before)
        new.pop("status", None)
        if "status" in candidate:
            new["status"] = candidate["status"]
    elif target.resource.status:
        new.pop("status", None)
        if before and "status" in before:
            new["status"] = clone(before["status"])
    return new


def decoded(resource: Resource, new: Json) -> list[str]:
    """Drops unknown fields and returns their paths; for built-in kinds a wrong type is not even an object."""
    unknown = prune(resource.schema, new)
    if not resource.custom:
        for problem in validate(resource.schema, new):
            if problem.reason == "FieldValueTypeInvalid":
                found, _, expected = problem.body.partition("must be of type ")
                detail = f"json: cannot unmarshal {found.split(chr(34))[1]} into Go struct field "
                where = f"{resource.kind}.{problem.field} of type {expected.partition(':')[0]}"
                raise bad_request(unreadable(resource, detail + where))
    return unknown


def unreadable(resource: Resource, why: str) -> str:
    """Message for a body that is not an object of this kind."""
    return f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}: {why}'


def unknown_fields(resource: Resource, unknown: list[str], options: WriteOptions, *, complain: bool) -> tuple[str, ...]:
    """Warnings for unknown fields, or 400 when the client wants to be strict."""
    if not unknown or not complain or options.field_validation == "Ignore":
        return ()
    texts = [f'unknown field "{path}"' for path in sorted(unknown)]
    if options.field_validation == "Strict":
        raise bad_request(unreadable(resource, "strict decoding error: " + ", ".join(texts)))
    return tuple(texts)


def count_generation(resource: Resource, before: Json | None, new: Json) -> None:
    """Sets `metadata.generation`, which moves only when something other than metadata and status does."""
    if before is None:
        new["metadata"]["generation"] = 1
        return
    ignored = {"metadata", "apiVersion", "kind"} | ({"status"} if resource.status else set())
    generation = before["metadata"].get("generation", 1)
    old_spec = {name: value for name, value in before.items() if name not in ignored}
    new_spec = {name: value for name, value in new.items() if name not in ignored}
    new["metadata"]["generation"] = generation if old_spec == new_spec else generation + 1


def same_owners(before: Json, new: Json) -> bool:
    """Whether ownership is unchanged; times alone are no reason for a new version."""
    old, fresh = read_entries(before), read_entries(new)
    return {i: e.paths for i, e in old.items()} == {i: e.paths for i, e in fresh.items()}
