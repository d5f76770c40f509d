"""Discovery: how clients learn which resources exist, in the aggregated and in the older form."""

from __future__ import annotations

from .errors import Json, no_such_path
from .resources import Registry, Resource

AGGREGATED = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
_STATUS_VERBS = ["get", "patch", "update"]
_SCALE = {"group": "autoscaling", "version": "v1", "kind": "Scale"}

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
    members = registry.members(group_name, version)
    entries: list[Json] = []
    for resource in members:
        common = {"namespaced": resource.namespaced, "kind": resource.kind}
        own = {"name": resource.plural, "singularName": resource.singular_name, **common}
        entries.append({**own, "verbs": list(resource.verbs), **_other_names(resource)})
        for name in resource.subresources:
            entry = {"name": f"{resource.plural}/{name}", "singularName": "", **common, "verbs": _STATUS_VERBS}
            entries.append({**entry, **_SCALE} if name == "scale" else entry)
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": members[0].group_version,
        "resources": entries,
    }


def _other_names(resource: Resource) -> Json:
    names = {"shortNames": list(resource.short_names), "categories": list(resource.categories)}
    return {field: found for field, found in names.items() if found}


def aggregated(registry: Registry, *, core: bool) -> Json:
    """`/api` or `/apis` with everything in one document."""
    items: list[Json] = []
    for name in [""] if core else registry.groups():
        versions = [
            {
                "version": version,
                "resources": [_aggregated_entry(resource) for resource in registry.members(name, version)],
                "freshness": "Current",
            }
            for version in registry.versions(name)
        ]
        metadata = {"creationTimestamp": None, **({"name": name} if name else {})}
        items.append({"metadata": metadata, "versions": versions})
    return {"kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {}, "items": items}


def _aggregated_entry(resource: Resource) -> Json:
    own = {"group": resource.group, "version": resource.version, "kind": resource.kind}
    entry: Json = {
        "resource": resource.plural,
        "responseKind": own,
        "scope": "Namespaced" if resource.namespaced else "Cluster",
        "singularResource": resource.singular_name,
        "verbs": list(resource.verbs),
        **_other_names(resource),
    }
    if resource.subresources:
        entry["subresources"] = [
            {"subresource": name, "responseKind": _SCALE if name == "scale" else own, "verbs": _STATUS_VERBS}
            for name in resource.subresources
        ]
    return entry
