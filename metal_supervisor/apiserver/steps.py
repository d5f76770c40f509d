"""The single steps of a write, each a function of the objects involved."""

from __future__ import annotations

import json
from typing import Any

from .builtins import undecodable
from .codec import clone, section
from .errors import ApiError, Json, bad_request, conflict, invalid, invalid_value, unknown_format
from .metadata import readable
from .patch import APPLY, JSON, MERGE, STRATEGIC, json_patch, merge_patch, strategic_patch
from .resources import RequestTarget, Resource, WriteOptions
from .schema import settle, validate
from .schemas import METADATA

_GO_NAMES = {"integer": "number", "boolean": "bool"}


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
    raise unknown_format(kinds)


def check_preconditions(target: RequestTarget, before: Json, sent: Json) -> None:
    """Raise ApiError 409 if the object has changed since the client saw it, 422 if it is another one."""
    resource, current = target.resource, before["metadata"]
    if sent.get("resourceVersion") not in (None, "", current["resourceVersion"]):
        why = "the object has been modified; please apply your changes to the latest version and try again"
        raise conflict(resource.group, resource.plural, target.name, why)
    if sent.get("uid") not in (None, "", current["uid"]) and not target.subresource:
        problem = invalid_value("metadata.uid", sent["uid"], "field is immutable")
        raise invalid(resource.group, resource.kind, target.name, [problem])


def check_kind(resource: Resource, declaration: Json) -> None:
    """400 when a declaration says that it is something else, or does not say what it is."""
    version, kind = str(declaration.get("apiVersion") or ""), str(declaration.get("kind") or "")
    if (version, kind) != (resource.group_version, resource.kind):
        shown_version = version if "/" in version else f"/{version}"
        raise bad_request(f"invalid object type: {shown_version}, Kind={kind}")


def check_type(resource: Resource, body: Json) -> None:
    """400 or 422 when a body says that it is something else; one of a custom kind must say what it is."""
    version, kind = body.get("apiVersion"), body.get("kind")
    if resource.custom and not kind:
        text = json.dumps(body)
        why = f"Object 'Kind' is missing in '{text}' ({text if len(text) <= 30 else text[:30] + ' ...'})"
        raise bad_request(f"the object provided is unrecognized (must be of type {resource.kind}): {why}")
    if resource.custom or not kind:
        if (version or ("" if resource.custom else resource.group_version)) != resource.group_version:
            found, wanted = f"({version or ''})", f"({resource.group_version})"
            raise bad_request(f"the API version in the data {found} does not match the expected API version {wanted}")
        if resource.custom and kind != resource.kind:
            name = section(body, "metadata").get("name", "")
            raise invalid(resource.group, str(kind), name, [invalid_value("kind", kind, f"must be {resource.kind}")])
    elif (version, kind) not in ((resource.group_version, resource.kind), (None, resource.kind)):
        unknown = f'no kind "{kind}" is registered for version "{version}"'
        said = str(version or "").rpartition("/")[2]
        raise bad_request(f'{kind} in version "{said}" cannot be handled as a {resource.kind}: {unknown}')


def check_unconditional(target: RequestTarget, candidate: Json) -> None:
    """422 for a PUT that does not say which version it replaces, where that is needed."""
    resource = target.resource
    conditional = resource.custom or resource.group in ("coordination.k8s.io", "apiextensions.k8s.io")
    if conditional and not candidate["metadata"].get("resourceVersion"):
        problem = invalid_value("metadata.resourceVersion", 0, "must be specified for an update")
        raise invalid(resource.group, resource.plural, target.name, [problem])


def isolated(target: RequestTarget, before: Json | None, candidate: Json) -> Json:
    """The object with only those changes that this request may make: all but the status, or only the status."""
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
    """Settle an object; return the paths of its unknown fields. A built-in kind with a wrong type is no object."""
    unknown = settle(resource.schema, new)
    if resource.custom:
        return unknown
    if complaint := mistyped(resource.schema, new, resource.kind) or undecodable(resource.kind, new):
        raise Undecodable(resource, complaint)
    return unknown


def mistyped(schema: Json, value: Json, struct: str) -> str:
    """Go's message about the first field of a wrong type, "" if there is none."""
    for problem in validate(schema, value):
        if problem.reason == "FieldValueTypeInvalid":
            found, _, expected = problem.body.partition("must be of type ")
            name = found.split('"')[1]
            where = f"{struct}.{problem.field} of type {expected.partition(':')[0]}"
            return f"json: cannot unmarshal {_GO_NAMES.get(name, name)} into Go struct field {where}"
    return ""


def readable_metadata(resource: Resource, raw: Any) -> Json:
    """The metadata of a body; 400 for what Go could not read."""
    if raw is not None and not isinstance(raw, dict):
        raise Undecodable(resource, "json: cannot unmarshal metadata into an object")
    complaint = mistyped(METADATA, readable(raw or {})[0], "ObjectMeta")
    if complaint:
        raise Undecodable(resource, complaint)
    return dict(raw or {})


def unconvertible(resource: Resource, declaration: Json, why: str) -> ApiError:
    """500 for a declaration that fits its schema and is yet no object of this kind."""
    kind = f"{resource.group_version}, Kind={resource.kind}"
    subject = f"{declaration['metadata'].get('namespace') or ''}/{declaration['metadata']['name']}; {kind}"
    converting = f"unable to convert unstructured object to {kind}: {why}"
    return ApiError(500, "", f"failed to convert new object ({subject}) to proper version: {converting}")


class Undecodable(ApiError):
    """400 for what is not an object of this kind."""

    def __init__(self, resource: Resource, why: str) -> None:
        kind = resource.kind
        super().__init__(
            400, "BadRequest", f'{kind} in version "{resource.version}" cannot be handled as a {kind}: {why}'
        )
        self.why = why


def unknown_fields(resource: Resource, unknown: list[str], options: WriteOptions, *, complain: bool) -> tuple[str, ...]:
    """Warnings for unknown fields, or 400 when the client wants to be strict."""
    if not unknown or not complain or options.field_validation == "Ignore":
        return ()
    texts = [f'unknown field "{path}"' for path in sorted(unknown)]
    if options.field_validation == "Strict":
        raise Undecodable(resource, "strict decoding error: " + ", ".join(texts))
    return tuple(texts)


def count_generation(resource: Resource, before: Json | None, new: Json) -> None:
    """Sets `metadata.generation`, which moves only when something other than metadata and status does."""
    if before is None:
        new["metadata"]["generation"] = 1
        return
    ignored = {"metadata", "apiVersion", "kind"} | ({"status"} if resource.status else set())
    changed = any(before.get(name) != new.get(name) for name in (before.keys() | new.keys()) - ignored)
    new["metadata"]["generation"] = before["metadata"].get("generation", 1) + changed
