"""The API without HTTP: its options and parts, what a request asks for, and the answer to it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote

from . import discovery, errors, protobuf
from .codec import decode_body, encode, load_yaml_file, section
from .deletes import PERMANENT_NAMESPACES, Collector
from .errors import ApiError, Json
from .patch import APPLY
from .reads import Watcher, as_shown, flag, list_objects, table_of
from .resources import ACCESS_REVIEW, DEFINITIONS, DeleteOptions, Registry, RequestTarget, WriteOptions
from .schema import mistyped, settle
from .schemas import DELETE_OPTIONS
from .storage import ObjectStore
from .writes import Writer, scale_of

_PREFIX = re.compile(r"(/[A-Za-z0-9._-]+)+")
_JSON = "application/json"
_OPENAPI_V2 = b"\n\x032.0"
"""A document of OpenAPI v2, in protobuf, without definitions: kubectl then leaves the check of a List to the server."""
_POLICIES = ("", "Background", "Foreground")
"""The owner goes at once in both, and its dependents in the background."""
_HEALTH = ("/healthz", "/livez", "/readyz")


@dataclass(frozen=True)
class Options:
    """Settings of one API server, which listens on loopback only, for it has no authentication.

    Raises ValueError for a bad prefix.
    """

    data_file: Path
    """SQLite file with all objects; created, 0600, when missing."""
    prefix: str
    """Unguessable first part of every path, e.g. `/k-3f…`; clients that do not know it see only 404."""
    port: int = 0
    """TCP port; 0 lets the system choose one."""
    crd_paths: tuple[Path, ...] = ()
    """YAML files with CRDs, applied at every start."""
    bookmark_s: float = 60.0
    """Pause between bookmarks on a quiet watch."""
    empty_refused: str = ""
    """Why a data file without objects is refused, "" to begin with one."""

    def __post_init__(self) -> None:
        if not _PREFIX.fullmatch(self.prefix):
            raise ValueError("prefix: must be / and then letters, digits, dots, dashes or underscores")


@dataclass(frozen=True)
class Request:
    """One HTTP request, below the prefix."""

    method: str
    path: str
    """Without the query, percent-encoding undone, no slash at the end."""
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes

    @property
    def content_type(self) -> str:
        """Media type of the body, without parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


@dataclass(frozen=True)
class Response:
    """A complete response."""

    code: int
    body: bytes
    content_type: str = _JSON
    headers: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    """Texts for the Warning header."""


@dataclass(frozen=True)
class Stream:
    """A response without an end: a watch."""

    run: Callable[[Callable[[bytes], object]], None]
    """Called with the function that sends lines; returns when the watch is over."""
    close: Callable[[], None]
    """Called when the client has gone, and in any case at the end."""


class Kernel:
    """The API server without HTTP."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.store = ObjectStore(options.data_file, options.empty_refused)
        self.registry = Registry(self.store.wake_all)
        self.watcher = Watcher(self.store, self.registry, options.bookmark_s)
        self.collector = Collector(self.store, self.registry)
        self.writer = Writer(self.store, self.registry, self.collector)

    def start(self) -> None:
        """Serve what the store holds, and create the objects that must exist."""
        for crd in self.store.items(DEFINITIONS):
            self.registry.install(crd)
        kind = {"apiVersion": "v1", "kind": "Namespace"}
        documents: list[Json] = [{**kind, "metadata": {"name": name}} for name in PERMANENT_NAMESPACES]
        documents += [document for path in self.options.crd_paths for document in load_yaml_file(path)]
        for document in documents:
            resource = self.registry.of_kind(document["apiVersion"], document["kind"])
            assert resource is not None
            target = RequestTarget(resource, "", section(document, "metadata").get("name", ""))
            # Nothing changes if it is there already.
            self.writer.patch(target, APPLY, document, WriteOptions("metal-supervisor-apiserver", force=True))
        self.collector.start()

    def stop(self) -> None:
        """Ends the collector, and closes the store."""
        self.collector.stop()
        self.store.close()

    def answer(self, request: Request) -> Response | Stream:
        """The answer to a request. Raises ApiError."""
        path = request.path
        if path in _HEALTH or path.rpartition("/")[0] in _HEALTH:
            return Response(200, b"ok", "text/plain; charset=utf-8")
        target = resource_target(self.registry, path)
        return self._resource(request, target) if target else self._document(request)

    def _document(self, request: Request) -> Response:
        """What clients ask about the API itself."""
        if request.method != "GET":
            raise errors.no_such_path()
        match request.path.strip("/").split("/"):
            case ["version"]:
                body: Json = discovery.VERSION
            case ["api"]:
                body = {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
            case ["apis"]:
                body = discovery.group(self.registry, "")
            case ["apis", group]:
                body = discovery.group(self.registry, group)
            case ["api", version]:
                body = discovery.resource_list(self.registry, "", version)
            case ["apis", group, version]:
                body = discovery.resource_list(self.registry, group, version)
            case ["openapi", "v2"]:
                return Response(200, _OPENAPI_V2, "application/com.github.proto-openapi.spec.v2.v1.0+protobuf")
            case ["openapi", "v3"]:
                body = discovery.openapi_index(self.registry)
            case ["openapi", "v3", "api", version]:
                body = discovery.openapi_document(self.registry, "", version)
            case ["openapi", "v3", "apis", group, version]:
                body = discovery.openapi_document(self.registry, group, version)
            case _:
                raise errors.no_such_path()
        return Response(200, encode(body))

    def _resource(self, request: Request, target: RequestTarget) -> Response | Stream:
        verb, resource = verb_of(request, target), target.resource
        table = table_of(request.headers.get("accept", ""), request.query)
        if verb == "watch":
            subscription = self.watcher.open(target, request.query, table)
            return Stream(subscription.run, partial(self.watcher.close, subscription))
        if resource is ACCESS_REVIEW:  # a client that knows the prefix may do everything
            return Response(201, encode({**_object(request), "status": {"allowed": True}}))
        if verb == "list":
            return Response(200, encode(list_objects(self.store, target, request.query, table)))
        if verb == "get":
            obj = resource.view(target.stored(self.store))
            body = scale_of(resource, obj) if target.subresource == "scale" else as_shown(resource, obj, table)
            return Response(200, encode(body))
        if verb == "delete":
            return self._delete(request, target)
        return self._write(request, target, table)

    def _write(self, request: Request, target: RequestTarget, table: str) -> Response:
        options = write_options(request)
        if request.method == "POST":
            outcome = self.writer.create(target, _object(request), options)
        elif request.method == "PUT":
            outcome = self.writer.update(target, _object(request), options)
        else:
            outcome = self.writer.patch(target, request.content_type, decode_body(request.body), options)
        body = outcome.obj if target.subresource == "scale" else as_shown(target.resource, outcome.obj, table)
        return Response(201 if outcome.created else 200, encode(body), warnings=outcome.warnings)

    def _delete(self, request: Request, target: RequestTarget) -> Response:
        options = delete_options(request, _object(request) if request.body.strip() else {})
        last, gone = self.collector.delete(target, options)
        if not gone:
            return Response(200, encode(last))
        deleted = errors.about(target.resource.group, target.resource.plural, target.name)
        details = {**deleted, "uid": last["metadata"]["uid"]}
        status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}
        return Response(200, encode(status))


def _object(request: Request) -> Json:
    if request.content_type == protobuf.MEDIA_TYPE:
        return protobuf.decode(request.body)
    if request.content_type not in ("", _JSON, "*/*"):
        raise errors.unknown_format([_JSON, protobuf.MEDIA_TYPE])
    value: Json = decode_body(request.body)
    if not isinstance(value, dict):
        raise errors.bad_request("the object provided is unrecognized: an object is expected")
    return value


# ---- what a request asks for --------------------------------------------------------------------

# A path is `/apis/<group>/<version>/namespaces/<ns>/<plural>/<name>/<subresource>`, or less of it.


def split_url(url: str) -> tuple[str, dict[str, str]]:
    """(path, query) of a request line; the first of repeated parameters counts."""
    # Only a path and a query come here: `urlsplit` would take what follows two slashes for a host, and may raise.
    path, _, text = url.partition("?")
    query = dict(reversed(parse_qsl(text, keep_blank_values=True)))
    return unquote(path).rstrip("/") or "/", query


def resource_target(registry: Registry, path: str) -> RequestTarget | None:
    """The target of the path of a resource, None for a path of another form. Raises ApiError 404."""
    group = namespace = ""
    match path.strip("/").split("/"):
        case ["api", version, *rest] if rest:
            pass
        case ["apis", group, version, *rest] if rest:
            pass
        case _:
            return None
    if rest[0] == "namespaces" and len(rest) > 2 and registry.find(group, version, rest[2]):
        namespace, rest = rest[1], rest[2:]
    resource = registry.find(group, version, rest[0])
    if resource is None or len(rest) > 3 or "" in rest:
        raise errors.no_such_path()
    name = rest[1] if len(rest) > 1 else ""
    subresource = rest[2] if len(rest) > 2 else ""
    # Of all namespaces at once there is only the collection.
    misplaced = bool(namespace) != resource.namespaced and (namespace or name)
    if misplaced or subresource not in ("", *resource.subresources):
        raise errors.no_such_path()
    return RequestTarget(resource, namespace, name, subresource)


def verb_of(request: Request, target: RequestTarget) -> str:
    """The Kubernetes verb of a request. Raises ApiError 405 when the resource does not have it."""
    if request.method == "GET":
        watching = request.query.get("watch") in ("true", "1", "True")
        verb = "get" if target.name else "watch" if watching else "list"
    else:
        verb = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}.get(request.method, "")
    misplaced = (verb == "create") == bool(target.name) and verb in ("create", "update", "patch", "delete")
    nowhere = verb == "create" and target.resource.namespaced and not target.namespace
    if misplaced or nowhere or (verb not in target.resource.verbs) or (target.subresource and verb == "delete"):
        message = "the server does not allow this method on the requested resource"
        raise ApiError(405, "MethodNotAllowed", message, details={})
    return verb


def write_options(request: Request) -> WriteOptions:
    """The options in the query of a write; the manager of its fields may be the first word of the User-Agent.

    Raises ApiError 400 for a wrong value.
    """
    manager = request.query.get("fieldManager", "")
    if not manager and request.content_type != APPLY:
        manager = request.headers.get("user-agent", "").partition("/")[0][:128] or "unknown"
    dry_run = _is_dry_run(request)
    validation = request.query.get("fieldValidation") or "Warn"
    if validation not in ("Strict", "Warn", "Ignore"):
        raise _unsupported("fieldValidation", validation, ("Strict", "Warn", "Ignore"))
    return WriteOptions(manager, dry_run, validation, flag(request.query, "force"))


def _is_dry_run(request: Request) -> bool:
    value = request.query.get("dryRun", "")
    if value not in ("", "All"):
        raise _unsupported("dryRun", value, ("All",))
    return value == "All"


def delete_options(request: Request, body: Json) -> DeleteOptions:
    """The options in the body of a DELETE ({} without one), or in its query where the body has none.

    Raises ApiError 400 for a wrong type or value: what cannot be read must not delete.
    """
    settle(DELETE_OPTIONS, body)
    if complaint := mistyped(DELETE_OPTIONS, body):
        raise errors.bad_request(complaint)
    dry_run = body.get("dryRun") or []
    if set(dry_run) - {"All"}:
        raise _unsupported("dryRun", dry_run, ("All",))
    policy = body.get("propagationPolicy") or request.query.get("propagationPolicy") or ""
    if policy not in _POLICIES:
        raise _unsupported("propagationPolicy", policy, _POLICIES)
    if "orphanDependents" in {**request.query, **body}:
        raise errors.bad_request("orphanDependents is not supported: use propagationPolicy")
    return DeleteOptions(body.get("preconditions") or {}, _is_dry_run(request) or bool(dry_run))


def _unsupported(name: str, value: Any, allowed: tuple[str, ...]) -> ApiError:
    return errors.bad_request(str(errors.unsupported_value(name, value, allowed)))
