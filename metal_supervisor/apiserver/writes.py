"""Create, update, patch and apply: one path for every write.

A write is a candidate object and the object it replaces. Whatever made the candidate, the same steps
follow: preconditions, the part that this request may change, validation, field ownership, and a check
that anything has changed at all. Only then is it stored, unless it is a dry run.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from . import apply, builtins, cel, errors, metadata, services
from .apply import Entries, Manager, read_entries
from .codec import clone, dig, section
from .deletes import Collector
from .errors import ApiError, Json
from .patch import APPLY, merge_patch, patched
from .resources import DEFINITIONS, NAMESPACES, SERVICES, Outcome, Registry, RequestTarget, Resource, WriteOptions
from .schema import child_schema, settle, validate
from .schemas import METADATA
from .storage import ObjectStore


class Writer:
    """Performs writes. Every method takes the store's lock itself."""

    def __init__(self, store: ObjectStore, registry: Registry, collector: Collector) -> None:
        self._store = store
        self._registry = registry
        self._collector = collector

    def create(self, target: RequestTarget, body: Json, options: WriteOptions) -> Outcome:
        """POST to a collection."""
        resource = target.resource
        candidate = self._addressed(target, body)
        with self._store.lock:
            name = candidate["metadata"]["name"]
            target = replace(target, name=name)
            self._check_creatable(resource, target.namespace, name)
            if name and self._store.get(*target.place):
                raise errors.already_exists(resource.group, resource.plural, name)
            return self._write(target, None, candidate, None, options)

    def update(self, target: RequestTarget, body: Json, options: WriteOptions) -> Outcome:
        """PUT of an object, its status or its scale."""
        with self._store.lock:
            previous = target.stored(self._store)
            if target.subresource == "scale":
                return self._write_scale(target, previous, body, options)
            return self._write(target, previous, self._addressed(target, body), None, options)

    def patch(self, target: RequestTarget, content_type: str, body: Any, options: WriteOptions) -> Outcome:
        """PATCH in any of the four formats."""
        if content_type == APPLY:
            return self._apply(target, body, options)
        with self._store.lock:
            previous = target.stored(self._store)
            current = target.resource.view(previous)
            if target.subresource == "scale":
                scale = patched(target.resource, content_type, scale_of(target.resource, current), body)
                return self._write_scale(target, previous, scale, options)
            candidate = self._addressed(target, patched(target.resource, content_type, current, body))
            return self._write(target, previous, candidate, None, options)

    def _apply(self, target: RequestTarget, body: Any, options: WriteOptions) -> Outcome:
        resource = target.resource
        if not options.manager:
            raise errors.bad_request("fieldManager is required for an apply patch")
        if not isinstance(body, dict) or target.subresource == "scale":
            raise errors.bad_request("an apply patch is an object, and not meant for scale")
        declaration = self._addressed(target, body, target.name if self._store.get(*target.place) else "")
        if declaration["metadata"].get("managedFields"):
            raise errors.bad_request("metadata.managedFields must be nil")
        apply.check_declaration(resource.schema, body)
        with self._store.lock:
            previous = target.stored(self._store) if target.subresource else self._store.get(*target.place)
            if previous is None:
                self._check_creatable(resource, target.namespace, target.name)
                if uid := declaration["metadata"].get("uid"):
                    why = f"uid mismatch: the provided object specified uid {uid}, and no existing object was found"
                    raise errors.conflict(resource.group, resource.plural, target.name, why)
            kind = {"apiVersion": resource.group_version, "kind": resource.kind}
            live = resource.view(previous) if previous else {**kind, "metadata": {"name": target.name}}
            manager = Manager(options.manager, "Apply", target.subresource, resource.group_version)
            merged, entries = apply.apply(
                resource.schema,
                live,
                declaration,
                manager,
                force=options.force,
                has_status=resource.status,
            )
            if target.subresource:
                # Of the metadata that is declared with a status, only the preconditions count.
                merged["metadata"] = {**merged["metadata"], **declaration["metadata"]}
            return self._write(target, previous, merged, entries, options)

    def _check_creatable(self, resource: Resource, namespace: str, name: str) -> None:
        """Raise ApiError if the definition or the namespace of a new object is gone, or is being deleted.

        Under the store's lock: the definition was there when the request was routed, and may be another by now.
        """
        if resource.custom:
            crd = self._store.get(DEFINITIONS, ("", f"{resource.plural}.{resource.group}"))
            if crd is None or (crd["spec"]["scope"] == "Namespaced") != resource.namespaced:
                raise errors.no_such_path()
            if crd["metadata"].get("deletionTimestamp"):
                raise ApiError(
                    405, "MethodNotAllowed", "create not allowed while custom resource definition is terminating"
                )
        if not resource.namespaced:
            return
        found = self._store.get(NAMESPACES, ("", namespace))
        if found is None:
            raise errors.not_found("", "namespaces", namespace)
        if found["metadata"].get("deletionTimestamp"):
            why = f"unable to create new content in namespace {namespace} because it is being terminated"
            raise errors.forbidden(resource.group, resource.plural, name, why)

    def _addressed(self, target: RequestTarget, body: Json, known: str = "") -> Json:
        """A body with its namespace and name, which have to fit its path. `known`: name of a body that has none."""
        resource = target.resource
        _check_type(resource, body)
        own = _readable_metadata(resource, body.get("metadata"))
        if own.get("namespace") not in (None, "", target.namespace) and resource.namespaced:
            message = "the namespace of the provided object does not match the namespace sent on the request"
            raise errors.bad_request(message)
        name = own.get("name", known) or ""
        if target.name and name != target.name:
            raise errors.bad_request(f"metadata.name must be {target.name}, as in the URL (is {errors.shown(name)})")
        if not name and own.get("generateName"):
            name = own["generateName"][:248] + "".join(random.choices("bcdfghjklmnpqrstvwxz2456789", k=5))
        own["name"] = name
        own["namespace"] = target.namespace
        if not resource.namespaced:
            del own["namespace"]
        rest = {field: value for field, value in body.items() if field not in ("apiVersion", "kind", "metadata")}
        return {"apiVersion": resource.group_version, "kind": resource.kind, "metadata": own, **rest}

    def _write_scale(self, target: RequestTarget, previous: Json, scale: Json, options: WriteOptions) -> Outcome:
        candidate = with_scale(target.resource, target.resource.view(previous), scale)
        outcome = self._write(target, previous, candidate, None, options)
        return replace(outcome, obj=scale_of(target.resource, outcome.obj))

    def _write(
        self, target: RequestTarget, previous: Json | None, wanted: Json, entries: Entries | None, options: WriteOptions
    ) -> Outcome:
        """The steps of every write. `entries`: ownership after an apply, None for a write that owns what it changes."""
        resource = target.resource
        before = resource.view(previous) if previous else None
        sent = wanted["metadata"]
        if before:
            target.check_unchanged(before, sent)
        new = _isolated(target, before, wanted)
        new["metadata"], unknown = metadata.settled(before, sent, subresource=target.subresource)
        unknown += settle(resource.schema, new)
        # The unknown fields of a declaration have been refused already; those found here are the live object's.
        warnings = _warnings(resource, unknown, options) if entries is None else ()
        self._complete_and_check(target, previous, new)
        held = read_entries(before)
        if entries is None:
            base = read_entries(wanted) if sent.get("managedFields") else held
            manager = Manager(options.manager, "Update", target.subresource, resource.group_version)
            entries = apply.track_update(resource.schema, before or {}, new, base, manager, resource.status)
        apply.write_entries(new, entries)
        if resource.storage_key == SERVICES:
            services.allocate(new["spec"], self._store.items(SERVICES))
        if resource.generation:
            _count_generation(resource, before, new)
        if before and apply.is_unchanged(before, new, held, entries):
            return Outcome(before, warnings=warnings)
        if options.dry_run:
            return Outcome(new, before is None, warnings)
        return Outcome(self._commit(target, before, new), before is None, warnings)

    def _complete_and_check(self, target: RequestTarget, previous: Json | None, new: Json) -> None:
        resource = target.resource
        stored = resource.stored_form(new)
        problems = list(metadata.validate(new["metadata"]))
        schema: Json = resource.schema
        value: Any = new
        path = "status" if target.subresource == "status" else ""
        if path:
            schema, value = child_schema(schema, path) or {}, new.get(path)
        # A definition that has become stricter is not for an object whose labels alone are edited.
        if value is not None and (previous is None or _content(previous) != _content(stored)):
            problems += validate(schema, value, path) or cel.problems(schema, value, path)
        if not problems and not resource.custom:
            problems += builtins.complete(resource, stored, previous)
        if problems:
            # Events are judged in their old form, whichever they came in.
            group = "" if resource.is_event else resource.group
            raise errors.invalid(group, resource.kind, new["metadata"]["name"], problems)

    def _commit(self, target: RequestTarget, before: Json | None, new: Json) -> Json:
        resource, own = target.resource, new["metadata"]
        if own.get("deletionTimestamp") and not own.get("finalizers"):
            # The answer has the version before the removal, so that a watch from there tells of it.
            self._collector.remove(*target.place)
            return new
        stored = self._store.put(*target.place, resource.stored_form(new))
        if resource.storage_key == DEFINITIONS:
            self._registry.install(stored)
        old_owners = section(before or {}, "metadata").get("ownerReferences")
        if own.get("ownerReferences") != old_owners or own.get("deletionTimestamp"):
            self._collector.wake()
        return resource.view(stored)


# ---- single steps --------------------------------------------------------------------------------


def _content(obj: Json) -> Json:
    return {name: part for name, part in obj.items() if name not in ("apiVersion", "metadata")}


def _check_type(resource: Resource, body: Json) -> None:
    """Raise ApiError 400 when a body names another kind or version than its path."""
    for field, wanted in (("apiVersion", resource.group_version), ("kind", resource.kind)):
        if body.get(field) not in (None, "", wanted):
            raise errors.bad_request(f"{field} must be {wanted} at this path (is {errors.shown(body[field])})")


def _isolated(target: RequestTarget, before: Json | None, candidate: Json) -> Json:
    """A copy of an object with only those changes that this request may make: all but the status, or only that."""
    new, of_status = candidate, candidate
    if target.resource.status:
        new, of_status = (before or {}, candidate) if target.subresource == "status" else (candidate, before or {})
    new = {name: value for name, value in new.items() if name != "status"}
    if "status" in of_status:
        new["status"] = of_status["status"]
    return dict(clone(new))


def _readable_metadata(resource: Resource, raw: Any) -> Json:
    """The metadata of a body. Raises ApiError 422 if it does not fit the schema."""
    own = {} if raw is None else raw
    if problems := validate(METADATA, metadata.readable(own)[0] if isinstance(own, dict) else own, "metadata"):
        raise errors.invalid(resource.group, resource.kind, dig(own, "name") or "", problems)
    return dict(own)


def _warnings(resource: Resource, unknown: list[str], options: WriteOptions) -> tuple[str, ...]:
    """Warnings for unknown fields, or 400 when the client wants to be strict."""
    if not unknown or options.field_validation == "Ignore":
        return ()
    texts = [f'unknown field "{path}"' for path in sorted(unknown)]
    if options.field_validation == "Strict":
        kind, why = resource.kind, "strict decoding error: " + ", ".join(texts)
        raise errors.bad_request(f'{kind} in version "{resource.version}" cannot be handled as a {kind}: {why}')
    return tuple(texts)


def _count_generation(resource: Resource, before: Json | None, new: Json) -> None:
    """Sets `metadata.generation`, which moves only when something other than metadata and status does."""
    if before is None:
        new["metadata"]["generation"] = 1
        return
    ignored = {"metadata", "apiVersion", "kind"} | ({"status"} if resource.status else set())
    changed = any(before.get(name) != new.get(name) for name in (before.keys() | new.keys()) - ignored)
    new["metadata"]["generation"] = before["metadata"].get("generation", 1) + changed


# ---- scale -------------------------------------------------------------------------------------


def scale_of(resource: Resource, obj: Json) -> Json:
    """An object as `autoscaling/v1` Scale."""
    own = obj["metadata"]
    names = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    status: Json = {"replicas": dig(obj, *_place(resource, "statusReplicasPath")) or 0}
    if selector := _place(resource, "labelSelectorPath"):
        status["selector"] = dig(obj, *selector) or ""
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {name: own[name] for name in names if name in own},
        "spec": {"replicas": dig(obj, *_place(resource, "specReplicasPath")) or 0},
        "status": status,
    }


def with_scale(resource: Resource, obj: Json, scale: Json) -> Json:
    """An object with the replica count of a Scale, and its version as a precondition if it has one."""
    patch: Any = section(scale, "spec").get("replicas", 0)
    for name in reversed(_place(resource, "specReplicasPath")):
        patch = {name: patch}
    version = section(scale, "metadata").get("resourceVersion")
    return dict(merge_patch(obj, {**patch, "metadata": {"resourceVersion": version}}))


def _place(resource: Resource, path: str) -> list[str]:
    """The names that lead to what a path in the definition of the scale is about; none if there is no such path."""
    return [name for name in (resource.scale or {}).get(path, "").split(".") if name]
