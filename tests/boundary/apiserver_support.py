"""What the tests of the embedded API share: a plain HTTP client, kubectl, and small objects."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from metal_supervisor.apiserver import Options

PREFIX = "/k-0123456789abcdef"
CRDS = tuple(sorted((Path(__file__).parents[2] / "conf" / "crds").glob("*.yaml")))
TIMEOUT_S = 10.0

ISVCS = "/apis/inference.llmkube.dev/v1alpha1/namespaces/default/inferenceservices"
SERVICES = "/api/v1/namespaces/default/services"
CONFIG_MAPS = "/api/v1/namespaces/default/configmaps"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
EVENTS = "/apis/events.k8s.io/v1/namespaces/default/events"

MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"
JSON_PATCH = "application/json-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"


@dataclass(frozen=True)
class Reply:
    """An answer of the API."""

    code: int
    body: Any
    """Parsed JSON, or the text when it is none."""
    headers: dict[str, str]


class Watch:
    """The events of an open watch, one by one."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response

    def next(self) -> tuple[str, Any]:
        """(type, object); fails with TimeoutError when none comes."""
        line = self._response.readline()
        if not line:
            raise EOFError("the watch has ended")
        event = json.loads(line)
        return event["type"], event["object"]

    def ended(self) -> bool:
        """Waits for the end of the stream."""
        return self._response.readline() == b""


class Client:
    """A small HTTP client with one kept connection."""

    def __init__(self, port: int, prefix: str = PREFIX) -> None:
        self.port, self.prefix = port, prefix
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        kind: str = "application/json",
        headers: dict[str, str] | None = None,
        **query: Any,
    ) -> Reply:
        """One request; the path is below the prefix."""
        url = self.prefix + path + ("?" + urlencode(query) if query else "")
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        sent = {"User-Agent": "tests/1", **({"Content-Type": kind} if data is not None else {}), **(headers or {})}
        self._connection.request(method, url, data, sent)
        response = self._connection.getresponse()
        text = response.read()
        try:
            parsed = json.loads(text)
        except ValueError:
            parsed = text.decode("utf-8", "replace")
        return Reply(response.status, parsed, {name.lower(): value for name, value in response.getheaders()})

    def get(self, path: str, **query: Any) -> Reply:
        return self.request("GET", path, **query)

    def post(self, path: str, body: Any, **query: Any) -> Reply:
        return self.request("POST", path, body, **query)

    def put(self, path: str, body: Any, **query: Any) -> Reply:
        return self.request("PUT", path, body, **query)

    def merge(self, path: str, body: Any, **query: Any) -> Reply:
        return self.request("PATCH", path, body, kind=MERGE, **query)

    def apply(self, path: str, body: Any, manager: str, **query: Any) -> Reply:
        return self.request("PATCH", path, body, kind=APPLY, fieldManager=manager, **query)

    def delete(self, path: str, body: Any = None, **query: Any) -> Reply:
        return self.request("DELETE", path, body, **query)

    def version(self) -> str:
        """The current resourceVersion."""
        return str(self.get("/api/v1/namespaces").body["metadata"]["resourceVersion"])

    @contextmanager
    def watch(self, path: str, headers: dict[str, str] | None = None, **query: Any) -> Iterator[Watch]:
        """An open watch on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        url = f"{self.prefix}{path}?{urlencode({'watch': 'true', **query})}"
        connection.request("GET", url, headers=headers or {})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        try:
            yield Watch(response)
        finally:
            if connection.sock:
                connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()
            response.close()


def options(directory: Path, **more: Any) -> Options:
    """Settings of a server in a directory, with our CRDs."""
    settings: dict[str, Any] = {"prefix": PREFIX, "crd_paths": CRDS, **more}
    return Options(data_file=directory / "api.db", **settings)


Kubectl = Callable[..., "subprocess.CompletedProcess[str]"]


def kubectl_for(url: str, directory: Path) -> Kubectl:
    """A function that runs kubectl against a server, with nothing of the user's own configuration."""
    config = directory / "kubeconfig"
    config.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "test", "cluster": {"server": url}}],
                "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
                "users": [{"name": "test", "user": {}}],
                "current-context": "test",
            }
        )
    )
    base = ["kubectl", "--kubeconfig", str(config), "--cache-dir", str(directory / "cache")]
    environment = {"PATH": os.environ["PATH"], "HOME": str(directory)}

    def run(*arguments: str, given: str = "", code: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*base, *arguments], input=given, capture_output=True, text=True, timeout=30, env={**environment, **more}
        )
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


def isvc(name: str = "phi", **spec: Any) -> dict[str, Any]:
    """A small InferenceService."""
    return {
        "apiVersion": "inference.llmkube.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {"modelRef": "phi", **spec},
    }


def config_map(name: str, **data: str) -> dict[str, Any]:
    """A small ConfigMap."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def lease(name: str, **spec: Any) -> dict[str, Any]:
    """A Lease."""
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}, "spec": spec}


WIDGETS = "/apis/example.test/v1/namespaces/default/widgets"
CRD_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
WIDGET_CRD: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "widgets.example.test"},
    "spec": {
        "group": "example.test",
        "scope": "Namespaced",
        "names": {"plural": "widgets", "kind": "Widget", "shortNames": ["wd"], "categories": ["all"]},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "additionalPrinterColumns": [
                    {
                        "name": "Loaded",
                        "type": "string",
                        "jsonPath": '.status.conditions[?(@.type=="Loaded")].status',
                    },
                    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
                ],
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "required": ["spec"],
                        "properties": {
                            "spec": {
                                "type": "object",
                                "description": "What the widget is to be.",
                                "required": ["size"],
                                "properties": {
                                    "size": {"type": "integer", "minimum": 1, "description": "How large."},
                                    "colour": {"type": "string", "enum": ["red", "blue"], "default": "red"},
                                    "tags": {
                                        "type": "array",
                                        "items": {"type": "string"},
                                        "x-kubernetes-list-type": "set",
                                    },
                                    "extra": {"type": "object", "additionalProperties": {"type": "string"}},
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


def widget(name: str = "w", **spec: Any) -> dict[str, Any]:
    """A Widget of size 1."""
    return {"apiVersion": "example.test/v1", "kind": "Widget", "metadata": {"name": name}, "spec": {"size": 1, **spec}}


def condition(kind: str, status: str) -> dict[str, Any]:
    """A Widget whose status has one condition; for apply."""
    body = {"apiVersion": "example.test/v1", "kind": "Widget", "metadata": {"name": "w"}}
    return {**body, "status": {"conditions": [{"type": kind, "status": status}]}}
