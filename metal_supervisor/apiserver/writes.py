"""Create, update, patch and apply: one path for every write.

A write is a candidate object and the object it replaces. Whatever made the candidate, the same steps
follow: is it meant for this object, what may this request change, is it well-formed, who owns what,
did anything change at all. Only then is it stored, or not, for a dry run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from . import builtins, crds, metadata
from .apply import (
    Entries,
    Manager,
    apply,
    managed_copy,
    read_entries,
    same_apart_from_bookkeeping,
    track_update,
    write_entries,
)
from .codec import clone, section
from .errors import Json, already_exists, bad_request, forbidden, invalid, not_found, required
from .patch import APPLY
from .resources import Registry, Resource, from_crd
from .schema import apply_defaults, validate
from .steps import (
    check_preconditions,
    count_generation,
    decoded,
    held_by_kind,
    isolated,
    patched,
    preconditions,
    same_owners,
    unknown_fields,
    unreadable,
)
from .storage import Store
from .targets import Outcome, Target, WriteOptions
from .views import scale_of, stored_form, view, with_scale

_SUFFIX_LETTERS = "bcdfghjklmnpqrstvwxz2456789"


class Writer:
    """Performs writes. Every method takes the store's lock itself."""

    def __init__(
        self, store: Store, registry: Registry, *, allow_loopback: bool, on_owners_changed: Callable[[], None]
    ) -> None:
        self._store = store
        self._registry = registry
        self._allow_loopback = allow_loopback
        self._on_owners_changed = on_owners_changed

    def create(self, target: Target, body: Json, options: WriteOptions) -> Outcome:
        """POST to a collection."""
        resource = target.resource
        candidate = self._addressed(target, body)
        with self._store.lock:
            name = candidate["metadata"]["name"]
            self._check_namespace(resource, target.namespace, name)
            if name and self._store.get(resource.storage_key, (target.namespace, name)):
                raise already_exists(resource.group, resource.plural, name)
            return self._write(replace(target, name=name), None, candidate, None, options)

    def update(self, target: Target, body: Json, options: WriteOptions) -> Outcome:
        """PUT of an object, its status or its scale."""
        with self._store.lock:
            previous = self._existing(target)
            if target.subresource == "scale":
                current = view(target.resource, previous)
                return self._write_scale(target, previous, with_scale(target.resource, current, body), options)
            return self._write(target, previous, self._addressed(target, body), None, options)

    def patch(self, target: Target, content_type: str, body: Any, options: WriteOptions) -> Outcome:
        """PATCH in any of the four formats."""
        if content_type == APPLY:
            return self._apply(target, body, options)
        with self._store.lock:
            previous = self._existing(target)
            current = view(target.resource, previous)
            if target.subresource == "scale":
                scale = patched(target.resource, content_type, scale_of(target.resource, current), body)
                section(scale, "metadata").pop("resourceVersion", None)
                return self._write_scale(target, previous, with_scale(target.resource, current, scale), options)
            candidate = self._addressed(target, patched(target.resource, content_type, current, body))
            return self._write(target, previous, candidate, None, options)

    def _apply(self, target: Target, body: Any, options: WriteOptions) -> Outcome:
        resource = target.resource
        if not options.manager:
            problem = required("fieldManager", "is required for apply patch")
            raise invalid("meta.k8s.io", "PatchOptions", "", [problem])
        if not isinstance(body, dict) or target.subresource == "scale":
            raise bad_request("an apply patch is an object, and not meant for scale")
        declaration = self._addressed(target, body)
        with self._store.lock:
            key = (target.namespace, target.name)
            previous = self._store.get(resource.storage_key, key)
            if previous is None and target.subresource:
                raise not_found(resource.group, resource.plural, target.name)
            if previous is None:
                self._check_namespace(resource, target.namespace, target.name)
            kind = {"apiVersion": resource.group_version, "kind": resource.kind}
            live = view(resource, previous) if previous else {**kind, "metadata": {"name": target.name}}
            manager = Manager(options.manager, "Apply", target.subresource, resource.group_version)
            merged, entries = apply(
                resource.schema, live, declaration, manager, force=options.force, has_status=resource.status
            )
            merged["metadata"] = {**merged.get("metadata", {}), **preconditions(declaration)}
            return self._write(target, previous, clone(merged), entries, options)

    # ---- the steps -----------------------------------------------------------------------------

    def _existing(self, target: Target) -> Json:
        found = self._store.get(target.resource.storage_key, (target.namespace, target.name))
        if found is None:
            raise not_found(target.resource.group, target.resource.plural, target.name)
        return found

    def _check_namespace(self, resource: Resource, namespace: str, name: str) -> None:
        if not resource.namespaced:
            return
        found = self._store.get("/namespaces", ("", namespace))
        if found is None:
            raise not_found("", "namespaces", namespace)
        if found["metadata"].get("deletionTimestamp"):
            why = f"unable to create new content in namespace {namespace} because it is being terminated"
            cause = {"reason": "NamespaceTerminating", "message": f"namespace {namespace} is being terminated"}
            raise forbidden(resource.group, resource.plural, name, why, [{**cause, "field": "metadata.namespace"}])

    def _addressed(self, target: Target, body: Json) -> Json:
        """A body checked against the address it was sent to, with a complete address of its own."""
        resource = target.resource
        for field, expected in (("apiVersion", resource.group_version), ("kind", resource.kind)):
            found = body.get(field, expected)
            if found != expected:
                shown = "API version" if field == "apiVersion" else "kind"
                why = f"the {shown} in the data ({found}) does not match the expected {shown} ({expected})"
                raise bad_request(why)
        raw = body.get("metadata")
        if raw is not None and not isinstance(raw, dict):
            raise bad_request(unreadable(resource, "json: cannot unmarshal metadata into an object"))
        own = dict(raw or {})
        problem = metadata.type_problem(own)
        if problem:
            raise bad_request(unreadable(resource, problem))
        if own.get("namespace") not in (None, "", target.namespace) and resource.namespaced:
            message = "the namespace of the provided object does not match the namespace sent on the request"
            raise bad_request(message)
        if target.name and own.get("name") not in (None, "", target.name):
            message = f"the name of the object ({own['name']}) does not match the name on the URL ({target.name})"
            raise bad_request(message)
        name = target.name or own.get("name") or ""
        if not name and own.get("generateName"):
            name = own["generateName"][:248] + "".join(random.choices(_SUFFIX_LETTERS, k=5))
        own["name"] = name
        if resource.namespaced:
            own["namespace"] = target.namespace
        rest = {field: value for field, value in body.items() if field not in ("apiVersion", "kind", "metadata")}
        return {"apiVersion": resource.group_version, "kind": resource.kind, "metadata": own, **clone(rest)}

    def _write_scale(self, target: Target, previous: Json, candidate: Json, options: WriteOptions) -> Outcome:
        outcome = self._write(target, previous, candidate, None, options)
        return replace(outcome, obj=scale_of(target.resource, outcome.obj))

    def _write(
        self, target: Target, previous: Json | None, candidate: Json, entries: Entries | None, options: WriteOptions
    ) -> Outcome:
        resource = target.resource
        before = view(resource, previous) if previous else None
        sent = candidate["metadata"]
        if before:
            check_preconditions(target, before, sent)
        new = isolated(target, before, candidate)
        new["metadata"], unknown = metadata.settled(before, sent, subresource=target.subresource)
        unknown += decoded(resource, new)
        warnings = unknown_fields(resource, unknown, options, complain=entries is None)
        self._complete_and_check(target, previous, new)
        if entries is None:
            given = managed_copy(candidate)
            base = read_entries(candidate if given else before)
            manager = Manager(options.manager, "Update", target.subresource, resource.group_version)
            entries = track_update(resource.schema, before, new, base, manager, resource.status)
        write_entries(new, entries)
        if resource.generation:
            count_generation(resource, before, new)
        if before and same_apart_from_bookkeeping(before, new) and same_owners(before, new):
            return Outcome(before, warnings=warnings)
        if options.dry_run:
            new["metadata"].setdefault("resourceVersion", "")
            return Outcome(new, before is None, warnings)
        return Outcome(self._commit(target, before, new), before is None, warnings)

    def _complete_and_check(self, target: Target, previous: Json | None, new: Json) -> None:
        resource = target.resource
        apply_defaults(resource.schema, new)
        stored = stored_form(resource, new)
        others = self._others(resource, new) if resource.kind == "Service" else []
        is_crd = resource.storage_key == crds.KIND
        problems = metadata.validate(new["metadata"], before=section(previous or {}, "metadata"))
        problems += validate(resource.schema, new)
        if not problems and is_crd:
            crds.default_crd(stored, previous)
            problems += crds.validate_crd(stored, previous)
        elif not problems and not resource.custom:
            builtins.set_defaults(resource, stored, previous, others)
            problems += builtins.validate_builtin(
                resource, stored, previous, others, allow_loopback=self._allow_loopback
            )
        if problems:
            raise invalid(resource.group, resource.kind, new["metadata"]["name"], problems)

    def _others(self, resource: Resource, obj: Json) -> list[Json]:
        """The other objects of the same kind."""
        uid = obj["metadata"]["uid"]
        return [other for other in self._store.items(resource.storage_key) if other["metadata"]["uid"] != uid]

    def _commit(self, target: Target, before: Json | None, new: Json) -> Json:
        resource, key = target.resource, (target.namespace, target.name)
        own = new["metadata"]
        if own.get("deletionTimestamp") and not own.get("finalizers") and not held_by_kind(resource, new):
            removed = self._store.remove(resource.storage_key, key)
            self._on_owners_changed()
            return view(resource, removed)
        stored = self._store.put(resource.storage_key, key, stored_form(resource, new))
        if resource.storage_key == crds.KIND:
            self.install(stored)
        old_owners = section(before or {}, "metadata").get("ownerReferences")
        if own.get("ownerReferences") != old_owners or own.get("deletionTimestamp"):
            self._on_owners_changed()
        return view(resource, stored)

    def install(self, crd: Json) -> None:
        """Serves what a stored CRD defines."""
        spec = crd["spec"]
        self._registry.install(spec["group"], spec["names"]["plural"], from_crd(crd))
        self._store.wake_all()
