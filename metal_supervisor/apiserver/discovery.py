"""Discovery: how clients learn which resources exist. kubectl asks for one aggregated document, and takes these too."""

from __future__ import annotations

from .errors import Json, no_such_path
from .resources import Registry

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
        own = {
            "name": resource.plural,
            "singularName": resource.singular or resource.kind.lower(),
            **common,
            "verbs": resource.verbs,
        }
        other_names = {"shortNames": resource.short_names, "categories": resource.categories}
        entries.append(own | {field: names for field, names in other_names.items() if names})
        for name in resource.subresources:
            entry = {"name": f"{resource.plural}/{name}", "singularName": "", **common, "verbs": _STATUS_VERBS}
            entries.append({**entry, **_SCALE} if name == "scale" else entry)
    head = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": members[0].group_version}
    return {**head, "resources": entries}
