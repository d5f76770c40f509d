"""Deletion and garbage collection.

A delete request removes an object at once, or marks it while finalizers hold it. The collector then works in the
background as clusters do: it deletes dependents of a vanished owner, the content of a deleted namespace, the objects
of a deleted CRD, and Events after an hour. It sleeps until there is work.
"""

from __future__ import annotations

import logging
import threading
import time

from .codec import clone, listed, timestamp
from .errors import ApiError, Json, forbidden
from .resources import DEFINITIONS, EVENTS, NAMESPACES, DeleteOptions, Registry, RequestTarget
from .storage import Name, ObjectStore

log = logging.getLogger(__name__)

EVENT_LIFETIME_S = 3600.0
_CONTENTS = {DEFINITIONS: "customresourcecleanup.apiextensions.k8s.io", NAMESPACES: "kubernetes"}
"""Finalizers that hold objects of these kinds until what is in them is gone."""
PERMANENT_NAMESPACES = ("default", "kube-system", "kube-public")
_LOOK_AT_EVENTS_S = 300.0


class Collector:
    """Performs delete requests, and finishes deletions in a background thread."""

    def __init__(self, store: ObjectStore, registry: Registry) -> None:
        self._store = store
        self._registry = registry
        self._work = threading.Event()
        self._stopping = False
        self._problem = ""
        """Of the last sweep: it is told once."""
        self._thread = threading.Thread(target=self._run, name="apiserver-collector", daemon=True)

    def start(self) -> None:
        """Starts the thread, which first finishes the deletions of an earlier server."""
        self.wake()
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; waits for a sweep under way."""
        self._stopping = True
        self._work.set()
        self._thread.join()

    def wake(self) -> None:
        """Notify the collector that an owner, a dependent or a deletion mark has changed."""
        self._work.set()

    def delete(self, target: RequestTarget, options: DeleteOptions) -> tuple[Json, bool]:
        """Deletes one object. Returns it as it was last, and whether it is gone already."""
        resource = target.resource
        with self._store.lock:
            stored = target.stored(self._store)
            target.check_unchanged(stored, options.preconditions)
            if resource.storage_key == NAMESPACES and target.name in PERMANENT_NAMESPACES:
                raise forbidden("", "namespaces", target.name, "this namespace may not be deleted")
            if options.dry_run:
                return resource.view(stored), True
            last, gone = self._begin(*target.place)
            return resource.view(last), gone

    def _begin(self, kind: str, name: Name) -> tuple[Json, bool]:
        """Removes an object, or marks it as being deleted. (last state, gone?)"""
        stored = self._store.get(kind, name)
        assert stored is not None
        if stored["metadata"].get("deletionTimestamp"):
            return stored, False
        finalizers = list(listed(stored["metadata"].get("finalizers")))
        if kind in _CONTENTS and _CONTENTS[kind] not in finalizers:
            finalizers.append(_CONTENTS[kind])
        if not finalizers:
            return self.remove(kind, name), True
        marked = clone(stored)
        own = marked["metadata"]
        own |= {"deletionTimestamp": timestamp(), "deletionGracePeriodSeconds": 0, "finalizers": finalizers}
        if kind == NAMESPACES:
            marked.setdefault("status", {})["phase"] = "Terminating"
        elif "generation" in own:
            own["generation"] += 1
        written = self._store.put(kind, name, marked)
        self.wake()
        return written, False

    def remove(self, kind: str, name: Name) -> Json:
        """Removes an object that nothing holds; returns its last state."""
        removed = self._store.remove(kind, name)
        self.wake()
        if kind == DEFINITIONS:
            self._registry.install(removed, gone=True)
        return removed

    # ---- in the background ------------------------------------------------------------------------

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
            before, problem = self._store.version, ""
            for kind, name, obj in self._store.everything():
                try:
                    if self._store.get(kind, name) is obj:
                        self._collect(kind, name, obj, now_s)
                except ApiError as error:  # as on a full disk; the others are collected all the same
                    problem = error.message
            if problem and problem != self._problem:
                log.error("objects cannot be collected; they are looked at again", extra={"error": problem})
            self._problem = problem
            return self._store.version != before

    def _collect(self, kind: str, name: Name, obj: Json, now_s: float) -> None:
        own = obj["metadata"]
        deleted, owners = bool(own.get("deletionTimestamp")), listed(own.get("ownerReferences"))
        expired = kind == EVENTS and now_s - self._store.written_s(kind, name) > EVENT_LIFETIME_S
        orphaned = owners and not any(self._exists(name[0], owner) for owner in owners)
        if not deleted and (expired or orphaned):
            self._begin(kind, name)
        elif deleted and _CONTENTS.get(kind) in listed(own.get("finalizers")):
            self._finish_contents(kind, name, obj)

    def _exists(self, namespace: str, reference: Json) -> bool:
        """True unless the owner that a reference names is gone; an owner of an unknown kind is taken to exist."""
        resource = self._registry.of_kind(reference["apiVersion"], reference["kind"])
        if resource is None:
            return True
        found = self._store.get(resource.storage_key, (namespace if resource.namespaced else "", reference["name"]))
        return found is not None and found["metadata"]["uid"] == reference["uid"]

    def _finish_contents(self, kind: str, name: Name, obj: Json) -> None:
        """Delete what a namespace or a CRD has in it, and release the object itself once nothing is left."""
        plural = f"{obj['spec']['group']}/{obj['spec']['names']['plural']}" if kind == DEFINITIONS else ""
        left = False
        for inner_kind, inner_name, inner in self._store.everything():
            if inner_kind == plural or (not plural and inner_name[0] == name[1]):
                left = inner["metadata"].get("deletionTimestamp") or not self._begin(inner_kind, inner_name)[1] or left
        if left:
            return
        freed = clone(obj)
        freed["metadata"]["finalizers"].remove(_CONTENTS[kind])
        if freed["metadata"]["finalizers"]:
            self._store.put(kind, name, freed)
        else:
            self.remove(kind, name)
