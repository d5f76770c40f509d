"""A plain HTTP client for either server, so that statuses, reasons, causes and headers can be compared.

Nothing here knows which server it talks to, but for the two ways of making a resourceVersion too old.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

TIMEOUT_S = 20.0
MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"
JSON_PATCH = "application/json-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"

GROUPS = {
    "configmaps": "",
    "events": "events.k8s.io",
    "services": "",
    "leases": "coordination.k8s.io",
    "endpointslices": "discovery.k8s.io",
    "secrets": "",
    "widgets": "example.test",
    "models": "inference.llmkube.dev",
    "inferenceservices": "inference.llmkube.dev",
}
VERSIONS = {"inference.llmkube.dev": "v1alpha1"}
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Reply:
    """An answer."""

    code: int
    body: Any
    """Parsed JSON, or the text when it is none."""
    headers: dict[str, str]
    """Names in lower case; several of one name are joined by commas."""

    @property
    def message(self) -> str:
        """What a `Status` says."""
        return str(self.body.get("message", ""))

    @property
    def outline(self) -> tuple[int, str]:
        """(code, reason) of a failure."""
        return (self.code, self.body.get("reason", ""))

    @property
    def causes(self) -> dict[str, str]:
        """Field → reason of every cause."""
        return {cause.get("field", ""): cause["reason"] for cause in self.body["details"]["causes"]}

    @property
    def version(self) -> str:
        """The resourceVersion of what was answered."""
        return str(self.body["metadata"]["resourceVersion"])


class Watch:
    """The events of an open watch, one by one."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response

    def next(self) -> tuple[str, Any]:
        """(type, object); fails with TimeoutError when none comes, EOFError at the end."""
        line = self._response.readline()
        if not line:
            raise EOFError("the watch has ended")
        event = json.loads(line)
        return event["type"], event["object"]

    def rest(self) -> list[tuple[str, Any]]:
        """All events until the server ends the watch."""
        found = []
        with contextlib.suppress(EOFError):
            while True:
                found.append(self.next())
        return found


class Api:
    """One client of one server, with a connection that is kept."""

    def __init__(
        self,
        name: str,
        port: int,
        *,
        prefix: str = "",
        token: str = "",
        ca_file: str = "",
        expire: Callable[[], None] = lambda: None,
        collects: bool = True,
    ) -> None:
        self.name = name
        """`real` or `embedded`."""
        self.expire = expire
        """Makes every resourceVersion before now too old."""
        self.collects = collects
        """Whether anybody collects garbage."""
        self._port, self._prefix, self._token, self._ca_file = port, prefix, token, ca_file
        self._context = ssl.create_default_context(cafile=ca_file) if ca_file else None
        self._connection = self._connect()

    def another(self) -> Api:
        """A client with a connection of its own."""
        return Api(
            self.name,
            self._port,
            prefix=self._prefix,
            token=self._token,
            ca_file=self._ca_file,
            expire=self.expire,
            collects=self.collects,
        )

    def close(self) -> None:
        self._connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        if self._context:
            return http.client.HTTPSConnection("127.0.0.1", self._port, timeout=TIMEOUT_S, context=self._context)
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)

    def _headers(self, more: dict[str, str]) -> dict[str, str]:
        return {
            "User-Agent": "contract/1",
            **({"Authorization": f"Bearer {self._token}"} if self._token else {}),
            **more,
        }

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
        """One request; bytes are sent as they are, anything else as JSON."""
        url = self._prefix + path + ("?" + urlencode(query) if query else "")
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        sent = {**({"Content-Type": kind} if data is not None else {}), **(headers or {})}
        try:
            self._connection.request(method, url, data, self._headers(sent))
            response = self._connection.getresponse()
        except (ConnectionError, ssl.SSLEOFError):  # it was restarted in between, or has closed what was idle for long
            self._connection.close()
            self._connection.request(method, url, data, self._headers(sent))
            response = self._connection.getresponse()
        text = response.read()
        try:
            parsed = json.loads(text)
        except ValueError:
            parsed = text.decode("utf-8", "replace")
        found: dict[str, str] = {}
        for name, value in response.getheaders():
            found[name.lower()] = f"{found[name.lower()]}, {value}" if name.lower() in found else value
        return Reply(response.status, parsed, found)

    @contextlib.contextmanager
    def watch(self, path: str, **query: Any) -> Iterator[Watch]:
        """An open watch on a connection of its own."""
        connection = self._connect()
        url = f"{self._prefix}{path}?{urlencode({'watch': 'true', **query})}"
        connection.request("GET", url, headers=self._headers({}))
        response = connection.getresponse()
        assert response.status == 200, response.read()
        try:
            yield Watch(response)
        finally:
            if connection.sock:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()
            response.close()

    def kubeconfig(self, path: Path, namespace: str) -> Path:
        """Writes the file by which kubectl finds this server, as the administrator."""
        scheme = "https" if self._ca_file else "http"
        cluster = {"server": f"{scheme}://127.0.0.1:{self._port}{self._prefix}"}
        cluster |= {"certificate-authority": self._ca_file} if self._ca_file else {}
        context = {"cluster": "test", "user": "test", "namespace": namespace}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "contexts": [{"name": "test", "context": context}],
            "users": [{"name": "test", "user": {"token": self._token} if self._token else {}}],
        }
        path.write_text(json.dumps(config))
        return path

    def space(self) -> Space:
        """A fresh namespace."""
        name = f"contract-{next(_numbers)}"
        made = self.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        assert made.code == 201, made
        return Space(self, name)


@dataclass(frozen=True)
class Space:
    """One namespace; every method takes the plural name of a kind."""

    api: Api
    name: str

    def path(self, plural: str, name: str = "", subresource: str = "") -> str:
        group = GROUPS[plural]
        root = f"/apis/{group}/{VERSIONS.get(group, 'v1')}" if group else "/api/v1"
        parts = [root, "namespaces", self.name, plural, name, subresource]
        return "/".join(part for part in parts if part)

    def get(self, plural: str, name: str = "", **query: Any) -> Reply:
        return self.api.request("GET", self.path(plural, name), **query)

    def post(self, plural: str, body: Any, **query: Any) -> Reply:
        return self.api.request("POST", self.path(plural), body, **query)

    def put(self, plural: str, name: str, body: Any, sub: str = "", **query: Any) -> Reply:
        return self.api.request("PUT", self.path(plural, name, sub), body, **query)

    def patch(self, plural: str, name: str, body: Any, kind: str = MERGE, sub: str = "", **query: Any) -> Reply:
        return self.api.request("PATCH", self.path(plural, name, sub), body, kind=kind, **query)

    def apply(self, plural: str, body: Any, manager: str, sub: str = "", **query: Any) -> Reply:
        """Server-side apply of an object under its own name."""
        name = body["metadata"]["name"]
        return self.patch(plural, name, body, APPLY, sub, **({"fieldManager": manager} if manager else {}), **query)

    def delete(self, plural: str, name: str = "", body: Any = None, **query: Any) -> Reply:
        return self.api.request("DELETE", self.path(plural, name), body, **query)

    def watch(self, plural: str, **query: Any) -> contextlib.AbstractContextManager[Watch]:
        return self.api.watch(self.path(plural), **query)


def managers(obj: dict[str, Any]) -> dict[tuple[str, str, str], Any]:
    """(manager, operation, subresource) → fieldsV1 of an object's managedFields."""
    entries = obj["metadata"].get("managedFields") or []
    return {(e["manager"], e["operation"], e.get("subresource", "")): e["fieldsV1"] for e in entries}
