"""Discovery, and OpenAPI v3: how clients learn which resources exist, and which fields they have.

kubectl asks for one aggregated document, and takes these too. `kubectl explain`, `apply` and `diff` read the documents
of OpenAPI before they act: one per group and version, made of the same schemas that validate objects.
"""

from __future__ import annotations

import hashlib

from .codec import encode
from .errors import Json, no_such_path
from .patch import APPLY, JSON, MERGE, STRATEGIC
from .resources import Registry, Resource

_STATUS_VERBS = ["get", "patch", "update"]
_SCALE = {"group": "autoscaling", "version": "v1", "kind": "Scale"}
_INFO: Json = {"title": "metal-supervisor", "version": "v1.36.0"}
_PATCH_PARAMETERS = ("dryRun", "fieldManager", "fieldValidation", "force")

VERSION: Json = {
    "major": "1",
    "minor": "36",
    "gitVersion": "v1.36.0+metal-supervisor",
    "gitCommit": "",
    "gitTreeState": "clean",
    "buildDate": "1970-01-01T00:00:00Z",
    "goVersion": "",
    "compiler": "",
    "platform": "",
}
"""Answer of `/version`: the Kubernetes release whose behaviour this server follows."""


def group(registry: Registry, name: str) -> Json:
    """`/apis/<group>`, `/apis` for ""; 404 when there is none."""
    if not name:
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(registry, g) for g in registry.groups()]}
    if not registry.versions(name):
        raise no_such_path()
    return {"kind": "APIGroup", "apiVersion": "v1", **_group(registry, name)}


def _group(registry: Registry, name: str) -> Json:
    versions = [{"groupVersion": f"{name}/{version}", "version": version} for version in registry.versions(name)]
    return {"name": name, "versions": versions, "preferredVersion": versions[0]}


def resource_list(registry: Registry, group_name: str, version: str) -> Json:
    """`/api/v1` and `/apis/<group>/<version>`; 404 when there is none."""
    members = registry.members(group_name, version)
    entries: list[Json] = []
    for resource in members:
        common = {"namespaced": resource.namespaced, "kind": resource.kind}
        names = {"name": resource.plural, "singularName": resource.singular or resource.kind.lower()}
        more = {"shortNames": resource.short_names, "categories": resource.categories}
        entries.append({**names, **common, "verbs": resource.verbs, **more})
        for name in resource.subresources:
            entry = {"name": f"{resource.plural}/{name}", "singularName": "", **common, "verbs": _STATUS_VERBS}
            entries.append({**entry, **_SCALE} if name == "scale" else entry)
    head = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": members[0].group_version}
    return {**head, "resources": entries}


# ---- OpenAPI v3 ---------------------------------------------------------------------------------


def openapi_index(registry: Registry) -> Json:
    """`/openapi/v3`: the address of the document of each group and version."""
    places: Json = {}
    for group, version in dict.fromkeys((resource.group, resource.version) for resource in registry.all()):
        place = f"apis/{group}/{version}" if group else f"api/{version}"
        digest = hashlib.sha256(encode(openapi_document(registry, group, version))).hexdigest()[:32]
        places[place] = {"serverRelativeURL": f"/openapi/v3/{place}?hash={digest}"}
    return {"paths": places}


def openapi_document(registry: Registry, group: str, version: str) -> Json:
    """The document of one group and version; 404 when there is none."""
    schemas: Json = {}
    paths: Json = {}
    for resource in registry.members(group, version):
        kind = {"x-kubernetes-group-version-kind": [_kind(resource)]}
        schemas[f"{resource.group or 'core'}.{version}.{resource.kind}"] = {**resource.schema, **kind}
        paths |= _paths(resource)
    return {"openapi": "3.0.0", "info": _INFO, "paths": paths, "components": {"schemas": schemas}}


def _kind(resource: Resource) -> Json:
    return {"group": resource.group, "version": resource.version, "kind": resource.kind}


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
