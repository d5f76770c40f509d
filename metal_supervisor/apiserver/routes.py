"""Parsing of requests: `/apis/<group>/<version>/namespaces/<ns>/<plural>/<name>/<subresource>`, and their options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote

from . import errors
from .errors import ApiError, Json, Problem
from .patch import APPLY
from .reads import flag
from .resources import DeleteOptions, Registry, RequestTarget, WriteOptions
from .schema import mistyped, settle
from .schemas import DELETE_OPTIONS

_POLICIES = ("Foreground", "Background", "Orphan")


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
    if request.method in ("GET", "HEAD"):
        watching = request.query.get("watch") in ("true", "1", "True")
        verb = "get" if target.name else "watch" if watching else "list"
    elif request.method == "DELETE":
        verb = "delete" if target.name else "deletecollection"
    else:
        verb = {"POST": "create", "PUT": "update", "PATCH": "patch"}.get(request.method, "")
    misplaced = (verb == "create") == bool(target.name) and verb in ("create", "update", "patch")
    nowhere = verb == "create" and target.resource.namespaced and not target.namespace
    if misplaced and target.resource.custom and not target.name:
        raise errors.bad_request("name must be provided")
    if misplaced or nowhere or (verb not in target.resource.verbs) or (target.subresource and verb == "delete"):
        message = "the server does not allow this method on the requested resource"
        raise ApiError(405, "MethodNotAllowed", message, details={})
    return verb


def write_options(request: Request) -> WriteOptions:
    """The options in the query of a write. 422 for a wrong value, and for force if the request is no apply."""
    manager, dry_run = _manager(request), _is_dry_run(request)
    validation = request.query.get("fieldValidation") or "Warn"
    if validation not in ("Strict", "Warn", "Ignore"):
        known = ["", "Ignore", "Strict", "Warn"]
        raise _refused(request, errors.unsupported_value("fieldValidation", validation, known))
    forced = flag(request.query, "force")
    if forced and request.method == "PATCH" and request.content_type != APPLY:
        raise _refused(request, errors.forbidden_value("force", "may not be specified for non-apply patch"))
    return WriteOptions(manager, dry_run, validation, forced)


def _manager(request: Request) -> str:
    """The field manager: the fieldManager parameter, else the first word of the User-Agent."""
    given = request.query.get("fieldManager", "")
    if len(given) > 128:
        raise _refused(request, errors.too_long("fieldManager", 128))
    if given or request.content_type == APPLY:
        return given
    return request.headers.get("user-agent", "").partition("/")[0][:128] or "unknown"


def _is_dry_run(request: Request) -> bool:
    value = request.query.get("dryRun", "")
    if value not in ("", "All"):
        raise _refused(request, errors.unsupported_value("dryRun", [value], ["All"]))
    return value == "All"


def delete_options(request: Request, body: Json) -> DeleteOptions:
    """The options in the body of a DELETE ({} without one), or in its query where the body has none.

    Raises ApiError 400 for a wrong type and 422 for a wrong value: what cannot be read must not delete.
    """
    settle(DELETE_OPTIONS, body)
    if complaint := mistyped(DELETE_OPTIONS, body, "DeleteOptions"):
        raise errors.bad_request(complaint)
    dry_run = body.get("dryRun") or []
    if set(dry_run) - {"All"}:
        raise _refused(request, errors.unsupported_value("dryRun", dry_run, ["All"]))
    policy = body.get("propagationPolicy") or request.query.get("propagationPolicy") or ""
    if policy not in ("", *_POLICIES):
        raise _refused(request, errors.unsupported_value("propagationPolicy", policy, [*_POLICIES, "nil"]))
    orphan = body.get("orphanDependents")
    if orphan is None and "orphanDependents" in request.query:
        orphan = flag(request.query, "orphanDependents")
    if orphan is not None and policy:
        detail = "orphanDependents and deletionPropagation cannot be both set"
        raise _refused(request, errors.invalid_value("propagationPolicy", policy, detail))
    if orphan is not None:
        policy = "Orphan" if orphan else "Background"
    return DeleteOptions(policy, body.get("preconditions") or {}, _is_dry_run(request) or bool(dry_run))


def _refused(request: Request, problem: Problem) -> ApiError:
    kinds = {"POST": "CreateOptions", "PUT": "UpdateOptions", "PATCH": "PatchOptions", "DELETE": "DeleteOptions"}
    return errors.invalid_options(kinds.get(request.method, "ListOptions"), problem)
