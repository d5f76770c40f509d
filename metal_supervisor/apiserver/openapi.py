"""OpenAPI v3 documents, which `kubectl explain`, `apply` and `diff` read before they act.

One index and one document per group and version, generated from the same schemas that validate objects.
"""

from __future__ import annotations

import hashlib

from .codec import clone, encode
from .errors import Json
from .patch import APPLY, JSON, MERGE, STRATEGIC
from .resources import Registry, Resource
from .schemas import METADATA, text

_OBJECT_META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
_INFO: Json = {"title": "metal-supervisor", "version": "v1.36.0"}
_PATCH_PARAMETERS = ("dryRun", "fieldManager", "fieldValidation", "force")


def index(registry: Registry) -> Json:
    """`/openapi/v3`: the address of the document of each group and version."""
    places: Json = {}
    for group, version in dict.fromkeys((resource.group, resource.version) for resource in registry.all()):
        place = f"apis/{group}/{version}" if group else f"api/{version}"
        digest = hashlib.sha256(encode(document(registry, group, version))).hexdigest()[:32]
        places[place] = {"serverRelativeURL": f"/openapi/v3/{place}?hash={digest}"}
    return {"paths": places}


def document(registry: Registry, group: str, version: str) -> Json:
    """The document of one group and version; 404 when there is none."""
    members = registry.members(group, version)
    schemas: Json = {_OBJECT_META: METADATA}
    paths: Json = {}
    for resource in members:
        schemas[f"{resource.group or 'core'}.{version}.{resource.kind}"] = _object_schema(resource)
        paths |= _paths(resource)
    return {"openapi": "3.0.0", "info": _INFO, "paths": paths, "components": {"schemas": schemas}}


def _kind(resource: Resource) -> Json:
    return {"group": resource.group, "version": resource.version, "kind": resource.kind}


def _object_schema(resource: Resource) -> Json:
    schema: Json = clone(resource.schema)
    schema.setdefault("type", "object")
    metadata = {"allOf": [{"$ref": f"#/components/schemas/{_OBJECT_META}"}], "default": {}}
    schema["properties"] = schema.get("properties", {}) | {
        "apiVersion": text("Group and version of this representation."),
        "kind": text("What this object is."),
        "metadata": {**metadata, "description": "Name, labels, owners and versions."},
    }
    schema["x-kubernetes-group-version-kind"] = [_kind(resource)]
    return schema


def _paths(resource: Resource) -> Json:
    """The operations that kubectl looks for: the kind at an address (explain), and what a PATCH takes (apply, diff)."""
    root = f"/apis/{resource.group}/{resource.version}" if resource.group else f"/api/{resource.version}"
    base = root + ("/namespaces/{namespace}" if resource.namespaced else "") + f"/{resource.plural}"
    kind = {"x-kubernetes-group-version-kind": _kind(resource)}
    found: Json = {base: {"post": kind}}
    if "patch" in resource.verbs:
        parameters = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in _PATCH_PARAMETERS]
        forms = [APPLY, JSON, MERGE] if resource.custom else [APPLY, JSON, MERGE, STRATEGIC]
        body = {"content": {form: {"schema": {"type": "object"}} for form in forms}}
        found[base + "/{name}"] = {"patch": {**kind, "parameters": parameters, "requestBody": body}}
    return found
