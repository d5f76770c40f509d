"""The API without HTTP: its options, its parts, and the answer to each request."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from . import discovery, protobuf, routes
from .codec import decode_body, encode, load_yaml_file, section
from .deletes import PERMANENT_NAMESPACES, Collector
from .errors import Json, about, bad_request, no_such_path, unknown_format
from .patch import APPLY
from .reads import Form, Watcher, form_of, list_objects, selected, selection
from .resources import DEFINITIONS, SERVICES, Registry, RequestTarget, WriteOptions
from .routes import Request
from .storage import ObjectStore
from .writes import Writer, scale_of

_MANAGER = "metal-supervisor-apiserver"
_PREFIX = re.compile(r"(/[A-Za-z0-9._-]+)+")
_JSON = "application/json"
_OPENAPI_V2 = b"\n\x032.0"
"""A document of OpenAPI v2, in protobuf, without paths and definitions.

kubectl reads one before it applies a `v1` List; finding no definitions, it leaves the check of the items to the server.
"""
_HEALTH = ("/healthz", "/livez", "/readyz")
_REVIEWS: dict[str, Json] = {
    "SelfSubjectAccessReview": {"allowed": True},
    "SelfSubjectRulesReview": {
        "resourceRules": [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}],
        "nonResourceRules": [{"verbs": ["*"], "nonResourceURLs": ["*"]}],
        "incomplete": False,
    },
}
"""Status of these kinds. There is no authorisation here: a client that knows the prefix may do everything."""


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
    allow_loopback_endpoints: bool = False
    """Accept loopback addresses in EndpointSlices, which a real server refuses."""
    bookmark_s: float = 60.0
    """Pause between bookmarks on a quiet watch."""

    def __post_init__(self) -> None:
        if not _PREFIX.fullmatch(self.prefix):
            raise ValueError("prefix: must be / and then letters, digits, dots, dashes or underscores")


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

    run: Callable[[Callable[[bytes], None]], None]
    """Called with the function that sends lines; returns when the watch is over."""
    close: Callable[[], None]
    """Called when the client has gone, and in any case at the end."""


class Kernel:
    """The API server without HTTP."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.store = ObjectStore(options.data_file)
        self.registry = Registry(self.store.wake_all)
        self.watcher = Watcher(self.store, self.registry, options.bookmark_s)
        self.collector = Collector(self.store, self.registry)
        self.writer = Writer(self.store, self.registry, self.collector, allow_loopback=options.allow_loopback_endpoints)

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
            self.writer.patch(target, APPLY, document, WriteOptions(_MANAGER, force=True))
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
        target = routes.resource_target(self.registry, path)
        return self._resource(request, target) if target else self._document(request)

    def _document(self, request: Request) -> Response:
        """What clients ask about the API itself."""
        if request.method not in ("GET", "HEAD"):
            raise no_such_path()
        match request.path.strip("/").split("/"):
            case [""]:
                body: Json = {"paths": ["/api", "/apis", *_HEALTH, "/openapi/v2", "/openapi/v3", "/version"]}
            case ["version"]:
                body = discovery.VERSION
            case ["api"]:
                body = {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
            case ["apis"]:
                body = discovery.group_list(self.registry)
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
                raise no_such_path()
        return Response(200, encode(body))

    def _resource(self, request: Request, target: RequestTarget) -> Response | Stream:
        verb, resource = routes.verb_of(request, target), target.resource
        form = form_of(request.headers.get("accept", ""), request.query)
        if verb == "watch":
            subscription = self.watcher.open(target, request.query, form)
            return Stream(subscription.run, partial(self.watcher.close, subscription))
        if resource.kind in _REVIEWS and not resource.custom:
            return Response(201, encode({**_object(request), "status": _REVIEWS[resource.kind]}))
        if verb == "list":
            return Response(200, encode(list_objects(self.store, target, request.query, form)))
        if verb == "get":
            obj = resource.view(target.stored(self.store))
            shown = scale_of(resource, obj) if target.subresource == "scale" else form.one(resource, obj)
            return Response(200, encode(shown))
        if verb in ("delete", "deletecollection"):
            return self._delete(request, target)
        return self._write(request, target, form)

    def _write(self, request: Request, target: RequestTarget, form: Form) -> Response:
        options = routes.write_options(request)
        if request.method == "POST":
            outcome = self.writer.create(target, _object(request), options)
        elif request.method == "PUT":
            outcome = self.writer.update(target, _object(request), options)
        else:
            outcome = self.writer.patch(target, request.content_type, decode_body(request.body), options)
        body = outcome.obj if target.subresource == "scale" else form.one(target.resource, outcome.obj)
        return Response(201 if outcome.created else 200, encode(body), warnings=outcome.warnings)

    def _delete(self, request: Request, target: RequestTarget) -> Response:
        options = routes.delete_options(request, _object(request) if request.body.strip() else {})
        if target.name:
            last, gone = self.collector.delete(target, options)
            # The real server answers with the object itself for some kinds; of those we have Services.
            if not gone or target.resource.storage_key == SERVICES:
                return Response(200, encode(Form().one(target.resource, last)))
            deleted = about(target.resource.group, target.resource.plural, target.name)
            details = {**deleted, "uid": last["metadata"]["uid"]}
            status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}
            return Response(200, encode(status))
        with self.store.lock:
            chosen = selected(self.store, target, selection(target.resource, request.query))
            # All are tried first: none is deleted if one does not meet the preconditions.
            for each in (replace(options, dry_run=True), options):
                for obj in chosen:
                    own = obj["metadata"]
                    one = RequestTarget(target.resource, own.get("namespace", ""), own["name"])
                    self.collector.delete(one, each)
            metadata = {"resourceVersion": str(self.store.version)}
        return Response(200, encode(Form().many(target.resource, chosen, metadata)))


def _object(request: Request) -> Json:
    if request.content_type == protobuf.MEDIA_TYPE:
        return protobuf.decode(request.body)
    if request.content_type not in ("", _JSON, "application/yaml", "*/*"):
        raise unknown_format([_JSON, "application/yaml", protobuf.MEDIA_TYPE])
    value: Json = decode_body(request.body)
    if not isinstance(value, dict):
        raise bad_request("the object provided is unrecognized: an object is expected")
    return value
