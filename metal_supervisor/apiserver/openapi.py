"""OpenAPI v3 documents, which `kubectl explain`, `apply` and `diff` read before they act.

One index and one document per group and version, generated from the same schemas that validate objects.
"""

from __future__ import annotations

import hashlib
from typing import Any

from .codec import clone, encode
from .errors import Json
from .resources import Registry, Resource
from .schemas import METADATA, fields, text

_OBJECT_META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
_LIST_META = "io.k8s.apimachinery.pkg.apis.meta.v1.ListMeta"
_REF = "#/components/schemas/"

INFO: Json = {"title": "metal-supervisor", "version": "v1.36.0"}

_META_SCHEMAS: Json = {
    _OBJECT_META: METADATA,
    _LIST_META: fields(
        {
            **{name: text() for name in ("continue", "resourceVersion", "selfLink")},
            "remainingItemCount": {"type": "integer", "format": "int64"},
        }
    ),
}


def index(registry: Registry) -> Json:
    """`/openapi/v3`: the address of the document of each group and version."""
    places: Json = {}
    for group, version in _group_versions(registry):
        place = f"apis/{group}/{version}" if group else f"api/{version}"
        digest = hashlib.sha256(encode(document(registry, group, version))).hexdigest()[:32]
        places[place] = {"serverRelativeURL": f"/openapi/v3/{place}?hash={digest}"}
    return {"paths": places}


def _group_versions(registry: Registry) -> list[tuple[str, str]]:
    return list(dict.fromkeys((resource.group, resource.version) for resource in registry.all()))


def document(registry: Registry, group: str, version: str) -> Json:
    """The document of one group and version; 404 when there is none."""
    members = registry.members(group, version)
    schemas: Json = clone(_META_SCHEMAS)
    found: Json = {}
    for resource in members:
        name = _schema_name(resource)
        schemas[name] = _object_schema(resource)
        schemas[name + "List"] = _list_schema(resource, name)
        found |= paths(resource)
    return {"openapi": "3.0.0", "info": INFO, "paths": found, "components": {"schemas": schemas}}


def _schema_name(resource: Resource) -> str:
    """`io.k8s.api.core.v1.Service`; kubectl recognises nothing by it, people do."""
    if not resource.custom:
        group = resource.group.partition(".")[0] or "core"
        return f"io.k8s.api.{group}.{resource.version}.{resource.kind}"
    domain = ".".join(reversed(resource.group.split(".")))
    return f"{domain}.{resource.version}.{resource.kind}"


def _kind(resource: Resource, suffix: str = "") -> list[Json]:
    return [{"group": resource.group, "version": resource.version, "kind": resource.kind + suffix}]


def _object_schema(resource: Resource) -> Json:
    schema: Json = clone(resource.schema)
    schema.setdefault("type", "object")
    properties = schema.setdefault("properties", {})
    properties["apiVersion"] = {"type": "string", "description": "Group and version of this representation."}
    properties["kind"] = {"type": "string", "description": "What this object is."}
    properties["metadata"] = {
        "allOf": [{"$ref": _REF + _OBJECT_META}],
        "default": {},
        "description": "Name, labels, owners and versions.",
    }
    schema["x-kubernetes-group-version-kind"] = _kind(resource)
    return schema


def _list_schema(resource: Resource, name: str) -> Json:
    return {
        "type": "object",
        "required": ["items"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"allOf": [{"$ref": _REF + _LIST_META}], "default": {}},
            "items": {"type": "array", "items": {"allOf": [{"$ref": _REF + name}], "default": {}}},
        },
        "x-kubernetes-group-version-kind": _kind(resource, "List"),
    }


def paths(resource: Resource) -> Json:
    """The paths of a resource, with their operations."""
    name = _schema_name(resource)
    root = f"/apis/{resource.group}/{resource.version}" if resource.group else f"/api/{resource.version}"
    base = root + ("/namespaces/{namespace}" if resource.namespaced else "") + f"/{resource.plural}"
    write = [_query(parameter) for parameter in ("dryRun", "fieldManager", "fieldValidation")]
    found: Json = {base: {"post": _operation(resource, name, "post", write)}}
    if "list" in resource.verbs:
        found[base]["get"] = _operation(resource, name + "List", "list", [])
    if "get" in resource.verbs:
        found[base + "/{name}"] = {
            "get": _operation(resource, name, "get", []),
            "put": _operation(resource, name, "put", write),
            "patch": _operation(resource, name, "patch", [*write, _query("force", "boolean")]),
            "delete": _operation(resource, name, "delete", []),
        }
    return found


def _query(name: str, kind: str = "string") -> Json:
    return {"name": name, "in": "query", "schema": {"type": kind, "uniqueItems": True}}


def _operation(resource: Resource, name: str, action: str, parameters: list[Json]) -> Json:
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": _REF + name}}}
    operation: Json = {
        "x-kubernetes-action": action,
        "x-kubernetes-group-version-kind": _kind(resource)[0],
        "responses": {"200": {"description": "OK", "content": content}},
    }
    if parameters:
        operation["parameters"] = parameters
    if action in ("post", "put"):
        operation["requestBody"] = {"content": {"*/*": {"schema": {"$ref": _REF + name}}}}
    elif action == "patch":
        media = ["application/apply-patch+yaml", "application/json-patch+json", "application/merge-patch+json"]
        if not resource.custom:
            media.append("application/strategic-merge-patch+json")
        operation["requestBody"] = {"content": {kind: {"schema": {"type": "object"}} for kind in media}}
    return operation
