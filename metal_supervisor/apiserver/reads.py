"""List and watch: the selection of objects, the form of the answer, and changes as they happen."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

from . import errors, tables
from .codec import dig, encode, section, whole_number
from .errors import ApiError, Json
from .metadata import label_problems
from .resources import Registry, RequestTarget, Resource
from .storage import ObjectStore, StoredChange

Test: TypeAlias = Callable[[Json], bool]

_BETWEEN_TERMS = re.compile(r",(?![^()]*\))")
"""A comma that is not inside parentheses."""
_SET_TERM = re.compile(r"(\S+)\s+(in|notin)\s*\(([^()]*)\)")
_EQUALITY_TERM = re.compile(r"([^=!\s]+)\s*(==|=|!=)\s*(.*)")


# A client has objects as they are, or as a table: then `table` is how much of each object its row has (`Metadata` or
# `Object`), and otherwise "".


def table_of(accept: str, query: Mapping[str, str]) -> str:
    """The `table` that the first supported offer of an Accept header means; JSON without one (protobuf is not)."""
    for offer in accept.split(","):
        media, *parameters = [part.strip() for part in offer.split(";")]
        if media in ("application/json", "*/*", "application/*"):
            return query.get("includeObject", "Metadata") if "as=Table" in parameters else ""
    return ""


def as_shown(resource: Resource, obj: Json, table: str, *, header: bool = True) -> Json:
    """A single object as a client wants it."""
    if not table:
        return obj
    metadata = {"resourceVersion": obj["metadata"].get("resourceVersion", "")}
    return tables.table(resource, [obj], metadata, include=table, header=header)


def flag(query: Mapping[str, str], name: str) -> bool:
    """A boolean query parameter; 400 for anything but a boolean."""
    text = query.get(name, "")
    if text not in ("", "false", "0", "False", "true", "1", "True"):
        raise errors.bad_request(f'invalid value "{text}" for {name}: must be a boolean')
    return text in ("true", "1", "True")


def number(query: Mapping[str, str], name: str) -> int:
    """A whole number in the query, 0 when absent; 400 for anything else."""
    text = query.get(name) or "0"
    value = whole_number(text)
    if value is None:
        raise errors.bad_request(f'{name}: Invalid value: "{text}": must be a non-negative whole number')
    return value


def selected(store: ObjectStore, target: RequestTarget, test: Test) -> list[Json]:
    """All objects of a collection that pass a test."""
    objects = store.items(target.resource.storage_key, target.namespace or None)
    return [obj for obj in (target.resource.view(stored) for stored in objects) if test(obj)]


def list_objects(store: ObjectStore, target: RequestTarget, query: Mapping[str, str], table: str) -> Json:
    """A collection as it is now, whole: `limit` is only a wish, and clients take the answer for the last chunk."""
    resource = target.resource
    test = selection(resource, query)
    with store.lock:
        metadata: Json = {"resourceVersion": str(store.version)}
        objects = selected(store, target, test)
    if table:
        return tables.table(resource, objects, metadata, include=table, header=True)
    kind = resource.list_kind or f"{resource.kind}List"
    return {"kind": kind, "apiVersion": resource.group_version, "metadata": metadata, "items": objects}


# ---- selectors -----------------------------------------------------------------------------------


def selection(resource: Resource, query: Mapping[str, str]) -> Test:
    """The test for labelSelector and fieldSelector; 400 for one that cannot be read."""
    labels, fields = (query.get(name, "").strip() for name in ("labelSelector", "fieldSelector"))
    tests = [_label_test(term.strip()) for term in _BETWEEN_TERMS.split(labels)] if labels else []
    tests += [_field_test(resource, term.strip()) for term in _BETWEEN_TERMS.split(fields) if term.strip()]
    return lambda obj: all(test(obj) for test in tests)


def _label_test(term: str) -> Test:
    if found := _SET_TERM.fullmatch(term):
        key, operator, values = found[1], found[2], [value.strip() for value in found[3].split(",")]
    elif found := _EQUALITY_TERM.fullmatch(term):
        key, operator, values = found[1], "notin" if found[2] == "!=" else "in", [found[3].strip()]
    else:
        key, operator, values = term.removeprefix("!").strip(), "absent" if term.startswith("!") else "present", []
    for problem in (problem for value in values or [""] for problem in label_problems(key, {key: value})):
        raise errors.bad_request(f"unable to parse requirement: {problem}")

    def test(obj: Json) -> bool:
        labels = section(obj, "metadata", "labels")
        if operator in ("present", "absent"):
            return (key in labels) is (operator == "present")
        return (labels.get(key) in values) is (operator == "in")

    return test


def _field_test(resource: Resource, term: str) -> Test:
    equality = _EQUALITY_TERM.fullmatch(term)
    if not equality:
        raise errors.bad_request(f"fieldSelector: {errors.shown(term)} must be a comparison, such as metadata.name=a")
    name, wanted, negated = equality[1], equality[3].strip(), equality[2] == "!="
    known = {"metadata.name", *resource.selectable}
    if resource.namespaced:
        known.add("metadata.namespace")
    if name not in known:
        raise errors.bad_request(f"field label not supported: {name}")

    def test(obj: Json) -> bool:
        value = dig(obj, *name.split("."))
        text = value if isinstance(value, str) else "" if value is None else encode(value).decode()
        return (wanted == text) is not negated

    return test


# ---- watches -------------------------------------------------------------------------------------

# One thread per watch waits on the condition of its kind, so a change is sent within a millisecond and a quiet watch
# costs nothing. A client can fetch changes that it missed by resourceVersion, as far as history goes.

_DEFAULT_TIMEOUT_S = 1800.0
_LONGEST_TIMEOUT_S = 365 * 86400.0
"""Bound of `timeoutSeconds`: a thread cannot wait for just any number of seconds."""
_LAST_BOOKMARK_S = 2.0
_WITHIN_SELECTION = {(False, True): "ADDED", (True, True): "MODIFIED", (True, False): "DELETED"}
"""Type of a change by whether the object was in the selection, and whether it is now."""


class Subscription:
    """One open watch."""

    def __init__(self, watcher: Watcher, target: RequestTarget, query: Mapping[str, str], table: str) -> None:
        """Raises ApiError for bad parameters."""
        timeout_s = min(number(query, "timeoutSeconds") or _DEFAULT_TIMEOUT_S, _LONGEST_TIMEOUT_S)
        self.target = target
        self.closed = False
        """Set it to end the watch, then wake the condition of its kind."""
        self._watcher, self._table = watcher, table
        self._test = selection(target.resource, query)
        self._version = 0 if flag(query, "sendInitialEvents") else number(query, "resourceVersion")
        """The latest one that the client has seen; 0 before it has been sent the present state."""
        self._bookmarks = flag(query, "allowWatchBookmarks")
        self._header = True
        """Name the columns in the next line, if it is a table."""
        self._ends_s = time.monotonic() + timeout_s

    def run(self, send: Callable[[bytes], object]) -> None:
        """Calls `send` with one or more lines at a time until the watch ends."""
        try:
            if lines := self._present():
                send(b"".join(lines))
            bookmark_due_s = self._next_bookmark_s()
            over = False
            while not over:
                changes, over = self._changes(bookmark_due_s)
                lines = list(self._lines(changes))
                if time.monotonic() >= bookmark_due_s:
                    lines.append(self._bookmark())
                    bookmark_due_s = self._next_bookmark_s()
                if lines:
                    send(b"".join(lines))
        except ApiError as problem:
            send(encode({"type": "ERROR", "object": problem.status()}) + b"\n")

    def _next_bookmark_s(self) -> float:
        """Time of the next bookmark: after a pause, and once more just before the end, for clients that resume."""
        if not self._bookmarks:
            return math.inf
        now_s, last_s = time.monotonic(), self._ends_s - _LAST_BOOKMARK_S
        next_s = now_s + self._watcher.bookmark_s
        return min(next_s, last_s) if now_s < last_s else next_s

    def _present(self) -> list[bytes]:
        """The first lines, for a client that has no version to start from."""
        if self._version:
            return []
        store = self._watcher.store
        with store.lock:
            found = selected(store, self.target, self._test)
            self._version = store.version
        lines = [self._line("ADDED", obj) for obj in found]
        return [*lines, self._bookmark(initial_end=True)] if self._bookmarks else lines

    def _changes(self, bookmark_due_s: float) -> tuple[list[StoredChange], bool]:
        """Wait for changes, an end or the time of a bookmark: (changes not yet sent, whether the watch is over)."""
        store, kind = self._watcher.store, self.target.resource.storage_key
        due_s = min(self._ends_s, bookmark_due_s)
        condition = store.condition(kind)
        with condition:
            while True:
                changes = store.changes_since(kind, self._version)
                if changes or self._over(due_s):
                    self._version = store.version
                    return changes, self._over(self._ends_s)
                condition.wait(due_s - time.monotonic())

    def _over(self, due_s: float) -> bool:
        """True if the watch is closed, its kind is gone, or it is past a time of the monotonic clock."""
        resource = self.target.resource
        served = self._watcher.registry.find(resource.group, resource.version, resource.plural)
        return self.closed or served is None or time.monotonic() >= due_s

    def _lines(self, changes: Iterable[StoredChange]) -> Iterator[bytes]:
        """Lines for the changes that concern this client."""
        resource = self.target.resource
        for change in changes:
            if self.target.namespace not in ("", change.obj["metadata"].get("namespace", "")):
                continue
            obj = resource.view(change.obj)
            before = change.previous is not None and self._test(resource.view(change.previous))
            after = change.type != "DELETED" and self._test(obj)
            if before or after:
                if change.previous and not after:  # as it last was in the selection
                    metadata = {**change.previous["metadata"], "resourceVersion": str(change.version)}
                    obj = {**resource.view(change.previous), "metadata": metadata}
                yield self._line(_WITHIN_SELECTION[before, after], obj)

    def _line(self, kind: str, obj: Json) -> bytes:
        """One event."""
        shaped = as_shown(self.target.resource, obj, self._table, header=self._header)
        self._header = False
        return encode({"type": kind, "object": shaped}) + b"\n"

    def _bookmark(self, *, initial_end: bool = False) -> bytes:
        """A BOOKMARK event, which carries nothing but the version that the client has reached."""
        metadata: Json = {"resourceVersion": str(self._version)}
        if initial_end:
            metadata["annotations"] = {"k8s.io/initial-events-end": "true"}
        resource = self.target.resource
        obj = {"kind": resource.kind, "apiVersion": resource.group_version, "metadata": metadata}
        if self._table:
            obj = {"kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": metadata, "rows": []}
        return encode({"type": "BOOKMARK", "object": obj}) + b"\n"


class Watcher:
    """The open watches."""

    def __init__(self, store: ObjectStore, registry: Registry, bookmark_s: float) -> None:
        self.store = store
        self.registry = registry
        self.bookmark_s = bookmark_s
        self._open: set[Subscription] = set()

    def open(self, target: RequestTarget, query: Mapping[str, str], table: str) -> Subscription:
        """A new watch, which is open until `close`. Raises ApiError for bad parameters."""
        subscription = Subscription(self, target, query, table)
        with self.store.lock:
            self._open.add(subscription)
        return subscription

    def subscriptions(self) -> list[Subscription]:
        """The open watches."""
        with self.store.lock:
            return list(self._open)

    def close(self, subscription: Subscription) -> None:
        """Ends and forgets a watch: its client has gone, or it is over."""
        subscription.closed = True
        condition = self.store.condition(subscription.target.resource.storage_key)
        with condition:
            self._open.discard(subscription)
            condition.notify_all()

    def close_all(self) -> None:
        """Ends all watches properly, as a server does at their timeout."""
        for subscription in self.subscriptions():
            subscription.closed = True
        self.store.wake_all()
