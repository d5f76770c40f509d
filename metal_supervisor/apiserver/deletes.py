"""Deletion and garbage collection.

A delete request removes an object at once, or marks it while finalizers hold it. The collector then works in the
background as clusters do: it deletes dependents of a vanished owner, the content of a deleted namespace, the objects
of a deleted CRD, and Events after an hour. It sleeps until there is work.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from . import crds
from .codec import clone, listed, section, timestamp
from .errors import ApiError, Json, conflict, forbidden, not_found
from .resources import Registry, Resource
from .storage import Name, ObjectStore
from .targets import DeleteOptions, RequestTarget
from .views import view

log = logging.getLogger(__name__)

EVENT_LIFETIME_S = 3600.0
_FOREGROUND, _ORPHAN = "foregroundDeletion", "orphan"
_PERMANENT_NAMESPACES = ("default", "kube-system", "kube-public")
_LOOK_AT_EVENTS_S = 300.0


class Deleter:
    """Performs delete requests. Hold the store's lock around none of them; it is taken here."""

    def __init__(self, store: ObjectStore, registry: Registry, on_removed: Callable[[], None]) -> None:
        self._store = store
        self._registry = registry
        self._on_removed = on_removed

    def delete(self, target: RequestTarget, options: DeleteOptions) -> tuple[Json, bool]:
        """Deletes one object. Returns it as it was last, and whether it is gone already."""
        resource = target.resource
        with self._store.lock:
            stored = self._store.get(resource.storage_key, (target.namespace, target.name))
            if stored is None:
                raise not_found(resource.group, resource.plural, target.name)
            _check_preconditions(resource, stored, options.preconditions)
            if resource.storage_key == "/namespaces" and target.name in _PERMANENT_NAMESPACES:
                raise forbidden("", "namespaces", target.name, "this namespace may not be deleted")
            if options.dry_run:
                return view(resource, stored), True
            last, gone = self.begin(resource.storage_key, (target.namespace, target.name), options.policy)
            return view(resource, last), gone

    def begin(self, kind: str, name: Name, policy: str = "") -> tuple[Json, bool]:
        """Removes an object, or marks it as being deleted. (last state, gone?)

        A policy replaces an earlier one; without one, the finalizers that the object has say it.
        """
        stored = self._store.get(kind, name)
        assert stored is not None
        before = listed(stored["metadata"].get("finalizers"))
        added = {"Foreground": [_FOREGROUND], "Orphan": [_ORPHAN]}.get(policy, [])
        if kind == crds.KIND:
            added = [crds.CLEANUP]
        dropped = {_FOREGROUND, _ORPHAN}.difference(added) if policy else ()
        finalizers = [finalizer for finalizer in before if finalizer not in dropped]
        finalizers += [finalizer for finalizer in added if finalizer not in finalizers]
        if not finalizers and kind != "/namespaces":
            return self._remove(kind, name), True
        if stored["metadata"].get("deletionTimestamp") and finalizers == before:
            return stored, False
        marked = clone(stored)
        own = marked["metadata"]
        own.setdefault("deletionTimestamp", timestamp())
        own.setdefault("deletionGracePeriodSeconds", 0)
        own["finalizers"] = finalizers
        if not finalizers:
            del own["finalizers"]
        if kind == "/namespaces":
            marked.setdefault("status", {})["phase"] = "Terminating"
        elif "generation" in own:
            own["generation"] += 1
        written = self._store.put(kind, name, marked)
        self._on_removed()
        return written, False

    def _remove(self, kind: str, name: Name) -> Json:
        removed = self._store.remove(kind, name)
        self._on_removed()
        if kind == crds.KIND:
            self._registry.install(removed["spec"]["group"], removed["spec"]["names"]["plural"], ())
            self._store.wake_all()
        return removed

    def release(self, kind: str, name: Name, finalizer: str) -> None:
        """Takes one finalizer off an object that is being deleted, and removes it if nothing else holds it."""
        stored = self._store.get(kind, name)
        assert stored is not None
        kept = [item for item in listed(stored["metadata"].get("finalizers")) if item != finalizer]
        held = kind == "/namespaces" and listed(section(stored, "spec").get("finalizers"))
        if not kept and not held:
            self._remove(kind, name)
            return
        freed = clone(stored)
        freed["metadata"]["finalizers"] = kept
        self._store.put(kind, name, freed)


def _check_preconditions(resource: Resource, stored: Json, wanted: Json) -> None:
    own = stored["metadata"]
    for field, label, happened in (
        ("uid", "UID", "deleted and then recreated"),
        ("resourceVersion", "ResourceVersion", "modified"),
    ):
        if wanted.get(field) not in (None, own[field]):
            why = (
                f"the {label} in the precondition ({wanted[field]}) does not match the {label} in record "
                f"({own[field]}). The object might have been {happened}"
            )
            raise conflict(resource.group, resource.kind, own["name"], why)


class Collector:
    """The background thread that finishes deletions."""

    def __init__(self, store: ObjectStore, registry: Registry) -> None:
        self._store = store
        self._registry = registry
        self._work = threading.Event()
        self._stopping = False
        self._problem = ""
        """Of the last sweep: it is told once."""
        self._thread = threading.Thread(target=self._run, name="apiserver-collector", daemon=True)
        self.deleter = Deleter(store, registry, self.wake)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; waits for a sweep under way."""
        self._stopping = True
        self._work.set()
        self._thread.join()

    def wake(self) -> None:
        """Notify the collector that an owner, a dependent or a deletion mark has changed."""
        self._work.set()

    def _run(self) -> None:
        while not self._stopping:
            self._work.wait(_LOOK_AT_EVENTS_S)
            self._work.clear()
            try:
                while not self._stopping and self.sweep(time.time()):
                    pass
            except Exception:
                log.exception("collection failed")

    def sweep(self, now_s: float) -> bool:
        """One pass over everything. True when it changed something, so another may find more."""
        with self._store.lock:
            changed, problem = False, ""
            for kind, name, obj in self._store.everything():
                try:
                    if self._store.get(kind, name) is obj and self._collect(kind, name, obj, now_s):
                        changed = True
                except ApiError as error:  # as on a full disk; the others are collected all the same
                    problem = error.message
            if problem and problem != self._problem:
                log.error("objects cannot be collected; they are looked at again", extra={"error": problem})
            self._problem = problem
            return changed

    def _collect(self, kind: str, name: Name, obj: Json, now_s: float) -> bool:
        own = obj["metadata"]
        expired = kind == "/events" and now_s - self._store.written_s(kind, name) > EVENT_LIFETIME_S
        if expired and not own.get("deletionTimestamp"):
            self.deleter.begin(kind, name)
            return True
        owners = listed(own.get("ownerReferences"))
        if owners and self._lost_owners(kind, name, obj, owners):
            return True
        if not own.get("deletionTimestamp"):
            return False
        finalizers = listed(own.get("finalizers"))
        if _ORPHAN in finalizers:
            self._orphan_dependents(own["uid"])
            self.deleter.release(kind, name, _ORPHAN)
            return True
        if _FOREGROUND in finalizers and self._finish_foreground(kind, name, own["uid"]):
            return True
        if kind == crds.KIND:
            return self._finish_crd(name, obj)
        return kind == "/namespaces" and self._finish_namespace(name, obj)

    def _lost_owners(self, kind: str, name: Name, obj: Json, owners: list[Json]) -> bool:
        alive = [owner for owner in owners if self._owner_lives(name[0], owner)]
        if len(alive) == len(owners) or (not alive and obj["metadata"].get("deletionTimestamp")):
            return False
        if not alive:
            self.deleter.begin(kind, name)
            return True
        self._keep_owners(kind, name, obj, alive)
        return True

    def _keep_owners(self, kind: str, name: Name, obj: Json, owners: list[Json]) -> None:
        freed = clone(obj)
        freed["metadata"]["ownerReferences"] = owners
        if not owners:
            del freed["metadata"]["ownerReferences"]
        self._store.put(kind, name, freed)

    def _owner_lives(self, namespace: str, owner: Json) -> bool:
        """True if an owner exists, or is of a kind that this server does not know."""
        if self._registry.of_kind(str(owner.get("apiVersion", "")), str(owner.get("kind", ""))) is None:
            return True
        found = self._store.by_uid(str(owner.get("uid", "")))
        if found is None:
            return False
        own = found[1]["metadata"]
        return own["name"] == owner.get("name") and own.get("namespace", "") in ("", namespace)

    def _owner_stays(self, namespace: str, owner: Json) -> bool:
        """True if an owner lives, and is not itself waiting for its dependents to go."""
        if not self._owner_lives(namespace, owner):
            return False
        found = self._store.by_uid(str(owner.get("uid", "")))
        own = section(found[1] if found else {}, "metadata")
        return not (own.get("deletionTimestamp") and _FOREGROUND in listed(own.get("finalizers")))

    def _dependents(self, uid: str) -> list[tuple[str, Name, Json]]:
        def depends(obj: Json) -> bool:
            return any(owner.get("uid") == uid for owner in listed(obj["metadata"].get("ownerReferences")))

        return [(kind, name, obj) for kind, name, obj in self._store.everything() if depends(obj)]

    def _orphan_dependents(self, uid: str) -> None:
        for kind, name, obj in self._dependents(uid):
            owners = [owner for owner in obj["metadata"]["ownerReferences"] if owner.get("uid") != uid]
            self._keep_owners(kind, name, obj, owners)

    def _finish_foreground(self, kind: str, name: Name, uid: str) -> bool:
        dependents = self._dependents(uid)
        changed = False
        for inner_kind, inner_name, obj in dependents:
            if obj["metadata"].get("deletionTimestamp"):
                continue
            owners = obj["metadata"]["ownerReferences"]
            if staying := [owner for owner in owners if self._owner_stays(inner_name[0], owner)]:
                self._keep_owners(inner_kind, inner_name, obj, staying)
            else:
                self.deleter.begin(inner_kind, inner_name)
            changed = True
        if not self._dependents(uid):
            self.deleter.release(kind, name, _FOREGROUND)
            return True
        return changed

    def _finish_namespace(self, name: Name, obj: Json) -> bool:
        changed, left = self._delete_all(lambda _kind, inner: inner[0] == name[1])
        if left:
            return changed
        if listed(section(obj, "spec").get("finalizers")):
            emptied = clone(obj)
            emptied["spec"]["finalizers"] = []
            self._store.put("/namespaces", name, emptied)
        if not listed(obj["metadata"].get("finalizers")):
            self.deleter.release("/namespaces", name, "")
            return True
        return changed

    def _finish_crd(self, name: Name, obj: Json) -> bool:
        plural, group = obj["spec"]["names"]["plural"], obj["spec"]["group"]
        changed, left = self._delete_all(lambda kind, _inner: kind == f"{group}/{plural}")
        if left or crds.CLEANUP not in listed(obj["metadata"].get("finalizers")):
            return changed
        self.deleter.release(crds.KIND, name, crds.CLEANUP)
        return True

    def _delete_all(self, chosen: Callable[[str, Name], Any]) -> tuple[bool, bool]:
        """Deletes the chosen objects. (anything done?, anything left?)"""
        changed = left = False
        for kind, name, obj in self._store.everything():
            if not chosen(kind, name):
                continue
            if obj["metadata"].get("deletionTimestamp"):
                left = True
                continue
            gone = self.deleter.begin(kind, name)[1]
            changed = True
            left = left or not gone
        return changed, left
