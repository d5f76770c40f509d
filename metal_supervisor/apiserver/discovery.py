"""Discovery: how clients learn which resources exist, in the aggregated and in the older form."""

from __future__ import annotations

from typing import Any

from .errors import Json, no_such_path
from .resources import Registry, Resource

AGGREGATED = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
_STATUS_VERBS = ["get", "patch", "update"]

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


def core_versions(server: str) -> Json:
    """`/api`."""
    addresses = [{"clientCIDR": "0.0.0.0/0", "serverAddress": server}]
    return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": addresses}


def group_list(registry: Registry) -> Json:
    """`/apis`."""
    groups = [_group(registry, name) for name in registry.groups()]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


def group(registry: Registry, name: str) -> Json:
    """`/apis/<group>`; 404 when there is none."""
    if not registry.versions(name):
        raise no_such_path()
    return {"kind": "APIGroup", "apiVersion": "v1", **_group(registry, name)}


def _group(registry: Registry, name: str) -> Json:
    versions = [{"groupVersion": f"{name}/{version}", "version": version} for version in registry.versions(name)]
    return {"name": name, "versions": versions, "preferredVersion": versions[0]}


def resource_list(registry: Registry, group_name: str, version: str) -> Json:
    """`/api/v1` and `/apis/<group>/<version>`; 404 when there is none."""
    members = [r for r in registry.all() if (r.group, r.version) == (group_name, version)]
    if not members:
        raise no_such_path()
    entries: list[Json] = []
    for resource in members:
        entries.append(_legacy_entry(resource))
        entries += [_legacy_subresource(resource, name) for name in subresources(resource)]
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": members[0].group_version,
        "resources": entries,
    }


def subresources(resource: Resource) -> list[str]:
    """Names of the subresources a resource has."""
    return [name for name, has in (("status", resource.status), ("scale", resource.scale is not None)) if has]


def _legacy_entry(resource: Resource) -> Json:
    entry: Json = {
        "name": resource.plural,
        "singularName": resource.singular_name,
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": list(resource.verbs),
    }
    if resource.short_names:
        entry["shortNames"] = list(resource.short_names)
    if resource.categories:
        entry["categories"] = list(resource.categories)
    return entry


def _legacy_subresource(resource: Resource, name: str) -> Json:
    entry: Json = {
        "name": f"{resource.plural}/{name}",
        "singularName": "",
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": _STATUS_VERBS,
    }
    if name == "scale":
        entry |= {"group": "autoscaling", "version": "v1", "kind": "Scale"}
    return entry


def aggregated(registry: Registry, *, core: bool) -> Json:
    """`/api` or `/apis` with everything in one document."""
    names = [""] if core else registry.groups()
    items: list[Json] = []
    for name in names:
        versions: list[Json] = []
        for version in registry.versions(name):
            members = [r for r in registry.all() if (r.group, r.version) == (name, version)]
            resources = [_aggregated_entry(resource) for resource in members]
            versions.append({"version": version, "resources": resources, "freshness": "Current"})
        metadata: dict[str, Any] = {"creationTimestamp": None}
        if name:
            metadata["name"] = name
        items.append({"metadata": metadata, "versions": versions})
    return {"kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {}, "items": items}


def _aggregated_entry(resource: Resource) -> Json:
    own = {"group": resource.group, "version": resource.version, "kind": resource.kind}
    scale = {"group": "autoscaling", "version": "v1", "kind": "Scale"}
    entry: Json = {
        "resource": resource.plural,
        "responseKind": own,
        "scope": "Namespaced" if resource.namespaced else "Cluster",
        "singularResource": resource.singular_name,
        "verbs": list(resource.verbs),
    }
    if resource.short_names:
        entry["shortNames"] = list(resource.short_names)
    if resource.categories:
        entry["categories"] = list(resource.categories)
    names = subresources(resource)
    if names:
        entry["subresources"] = [
            {"subresource": name, "responseKind": scale if name == "scale" else own, "verbs": _STATUS_VERBS}
            for name in names
        ]
    return entry
