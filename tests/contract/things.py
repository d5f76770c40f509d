"""The objects that the contract is about, as small as they can be, and a kind whose schema declares everything."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def widget(name: str = "w", **spec: Any) -> Json:
    """A Widget of size 1."""
    return {"apiVersion": "example.test/v1", "kind": "Widget", "metadata": {"name": name}, "spec": {"size": 1, **spec}}


def widget_status(*conditions: tuple[str, str], **more: Any) -> Json:
    """A Widget `w` with nothing but a status; for apply."""
    body = {"apiVersion": "example.test/v1", "kind": "Widget", "metadata": {"name": "w"}}
    listed = [{"type": kind, "status": status} for kind, status in conditions]
    return {**body, "status": {"conditions": listed, **more}}


def isvc(name: str = "phi", **spec: Any) -> Json:
    """An InferenceService."""
    kind = {"apiVersion": "inference.llmkube.dev/v1alpha1", "kind": "InferenceService"}
    return {**kind, "metadata": {"name": name}, "spec": {"modelRef": "phi", **spec}}


def model(name: str = "phi", **spec: Any) -> Json:
    """A Model."""
    kind = {"apiVersion": "inference.llmkube.dev/v1alpha1", "kind": "Model"}
    return {**kind, "metadata": {"name": name}, "spec": {"source": "file:///models/phi.gguf", **spec}}


def config_map(name: str = "c", **data: str) -> Json:
    """A ConfigMap."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def lease(name: str = "l", **spec: Any) -> Json:
    """A Lease."""
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}, "spec": spec}


def service(name: str = "s", **spec: Any) -> Json:
    """A Service with one port."""
    wanted = {"ports": [{"port": 80}], **spec}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": wanted}


def endpoint_slice(address: str = "10.1.2.3", kind: str = "IPv4", **more: Any) -> Json:
    """An EndpointSlice with one endpoint and one port."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "e"},
        "addressType": kind,
        "endpoints": [{"addresses": [address]}],
        "ports": [{"port": 80}],
        **more,
    }


def event(space: str, **more: Any) -> Json:
    """An Event of the newer group about a Pod."""
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": "e"},
        "regarding": {"apiVersion": "v1", "kind": "Pod", "name": "p", "namespace": space, "uid": "u"},
        "reason": "R",
        "action": "A",
        "type": "Normal",
        "note": "n",
        "reportingController": "example.test/c",
        "reportingInstance": "i",
        "eventTime": "2026-01-01T00:00:00.000000Z",
        **more,
    }


CRD_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
WIDGET_CRD: Json = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "widgets.example.test"},
    "spec": {
        "group": "example.test",
        "scope": "Namespaced",
        "names": {"plural": "widgets", "singular": "widget", "kind": "Widget", "listKind": "WidgetList"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "required": ["spec"],
                        "properties": {
                            "spec": {
                                "type": "object",
                                "required": ["size"],
                                "properties": {
                                    "size": {"type": "integer", "format": "int32", "minimum": 1, "maximum": 100},
                                    "share": {"type": "number"},
                                    "on": {"type": "boolean"},
                                    "colour": {"type": "string", "enum": ["red", "blue"], "default": "red"},
                                    "name": {"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 5},
                                    "tags": {
                                        "type": "array",
                                        "maxItems": 3,
                                        "items": {"type": "string"},
                                        "x-kubernetes-list-type": "set",
                                    },
                                    "args": {"type": "array", "items": {"type": "string"}},
                                    "extra": {"type": "object", "additionalProperties": {"type": "string"}},
                                    "inner": {
                                        "type": "object",
                                        "properties": {"a": {"type": "string", "default": "x"}},
                                    },
                                    "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                                    "port": {"x-kubernetes-int-or-string": True},
                                },
                            },
                            "status": {
                                "type": "object",
                                "properties": {
                                    "phase": {"type": "string"},
                                    "conditions": {
                                        "type": "array",
                                        "x-kubernetes-list-type": "map",
                                        "x-kubernetes-list-map-keys": ["type"],
                                        "items": {
                                            "type": "object",
                                            "required": ["type", "status"],
                                            "properties": {"type": {"type": "string"}, "status": {"type": "string"}},
                                        },
                                    },
                                },
                            },
                        },
                    }
                },
            }
        ],
    },
}
"""A CRD whose schema declares everything, so that unknown fields are unknown."""
