"""Watches: the changes of a collection, as they happen, from a given version on.

One thread per watch waits on the condition of its kind, so a change is sent within a millisecond and a
quiet watch costs nothing. A client can fetch changes that it missed by resourceVersion, as far as history goes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from .codec import encode
from .errors import ApiError, Json, expired, forbidden_value, invalid_options
from .reads import Form, ObjectReader, flag, number, selection
from .resources import Registry
from .selectors import Test
from .storage import ObjectStore, StoredChange, TooOld
from .targets import RequestTarget
from .views import view

_DEFAULT_TIMEOUT_S = 1800.0
_LONGEST_TIMEOUT_S = 365 * 86400.0
"""Bound of `timeoutSeconds`: a thread cannot wait for just any number of seconds."""
_LAST_BOOKMARK_S = 2.0


@dataclass(eq=False)
class Subscription:
    """One open watch."""

    target: RequestTarget
    closed: bool = field(default=False)
    """Set it to end the watch, then wake the condition of its kind."""


def check_query(target: RequestTarget, query: Mapping[str, str]) -> None:
    """Raise ApiError 400 for bad parameters, while the status line can still be sent."""
    selection(target, query)
    for name in ("resourceVersion", "timeoutSeconds"):
        number(query, name)
    flag(query, "allowWatchBookmarks")
    if flag(query, "sendInitialEvents") and query.get("resourceVersionMatch") != "NotOlderThan":
        detail = "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"
        raise invalid_options("ListOptions", forbidden_value("resourceVersionMatch", detail))


class Watcher:
    """Produces the lines of watch streams."""

    def __init__(self, store: ObjectStore, registry: Registry, reader: ObjectReader, bookmark_s: float) -> None:
        self._store = store
        self._registry = registry
        self._reader = reader
        self._bookmark_s = bookmark_s
        self._open: set[Subscription] = set()

    def open(self, target: RequestTarget) -> Subscription:
        """A new watch, which can be closed from now on."""
        subscription = Subscription(target)
        with self._store.lock:
            self._open.add(subscription)
        return subscription

    def subscriptions(self) -> list[Subscription]:
        """The open watches."""
        with self._store.lock:
            return list(self._open)

    def close(self, subscription: Subscription) -> None:
        """Ends a watch whose client has gone."""
        subscription.closed = True
        condition = self._store.condition(subscription.target.resource.storage_key)
        with condition:
            condition.notify_all()

    def close_all(self) -> None:
        """Ends all watches properly, as a server does at their timeout."""
        for subscription in self.subscriptions():
            subscription.closed = True
        self._store.wake_all()

    def run(
        self, subscription: Subscription, query: Mapping[str, str], form: Form, send: Callable[[bytes], None]
    ) -> None:
        """Calls `send` with one or more lines at a time until the watch ends."""
        try:
            self._run(subscription, query, form, send)
        finally:
            with self._store.lock:
                self._open.discard(subscription)

    def _run(
        self, subscription: Subscription, query: Mapping[str, str], form: Form, send: Callable[[bytes], None]
    ) -> None:
        stream = _Stream(subscription.target, selection(subscription.target, query), form)
        timeout_s = min(number(query, "timeoutSeconds") or _DEFAULT_TIMEOUT_S, _LONGEST_TIMEOUT_S)
        ends_s = time.monotonic() + timeout_s
        bookmarks = flag(query, "allowWatchBookmarks")
        version, lines = self._begin(subscription.target, query, stream)
        if lines:
            send(b"".join(lines))
        if version is None:
            return
        bookmark_due_s = self._next_bookmark(ends_s)
        while True:
            due_s = min(ends_s, bookmark_due_s) if bookmarks else ends_s
            try:
                changes, version_now = self._next(subscription, version, due_s)
            except TooOld as problem:
                send(stream.error(_too_old(version, problem.floor)))
                return
            lines = list(stream.changes(changes))
            version = version_now
            if bookmarks and time.monotonic() >= bookmark_due_s:
                lines.append(stream.bookmark(version))
                bookmark_due_s = self._next_bookmark(ends_s)
            if lines:
                send(b"".join(lines))
            if subscription.closed or time.monotonic() >= ends_s or not self._served(subscription.target):
                return

    def _next_bookmark(self, ends_s: float) -> float:
        """Time of the next bookmark: after a pause, and once more just before the end, for clients that resume."""
        now_s, last_s = time.monotonic(), ends_s - _LAST_BOOKMARK_S
        return min(now_s + self._bookmark_s, last_s) if now_s < last_s else now_s + self._bookmark_s

    def _begin(
        self, target: RequestTarget, query: Mapping[str, str], stream: _Stream
    ) -> tuple[int | None, list[bytes]]:
        """First lines and the version they bring the client to; None when the watch ends here."""
        wanted, initial = number(query, "resourceVersion"), flag(query, "sendInitialEvents")
        # A client that gets the present state and accepts bookmarks gets one at the end of it, even unasked.
        told = initial or ("sendInitialEvents" not in query and flag(query, "allowWatchBookmarks"))
        with self._store.lock:
            floor = self._store.floor(target.resource.storage_key)
            if wanted and not initial:
                return (wanted, []) if wanted >= floor else (None, [stream.error(_too_old(wanted, floor))])
            objects = self._reader.selected(target, stream.test) if query.get("sendInitialEvents") != "false" else []
            version = self._store.version
        lines = [stream.line("ADDED", obj) for obj in objects]
        if told:
            lines.append(stream.bookmark(version, initial_end=True))
        return version, lines

    def _next(self, subscription: Subscription, version: int, due_s: float) -> tuple[list[StoredChange], int]:
        """Waits for changes after a version, until a time of the monotonic clock."""
        kind = subscription.target.resource.storage_key
        condition = self._store.condition(kind)
        with condition:
            while True:
                changes = self._store.changes_since(kind, version)
                left_s = due_s - time.monotonic()
                if changes or subscription.closed or left_s <= 0 or not self._served(subscription.target):
                    # A version from the future (the cluster was rebuilt) stays there, silently, as on a real server.
                    return changes, max(version, self._store.version)
                condition.wait(left_s)

    def _served(self, target: RequestTarget) -> bool:
        resource = target.resource
        return self._registry.find(resource.group, resource.version, resource.plural) is not None


def _too_old(version: int, floor: int) -> ApiError:
    return expired(f"too old resource version: {version} ({floor})")


class _Stream:
    """Turns changes into lines for one client."""

    def __init__(self, target: RequestTarget, test: Test, form: Form) -> None:
        self._target = target
        self.test = test
        self._form = form
        self._header = True

    def changes(self, changes: Iterable[StoredChange]) -> Iterator[bytes]:
        """Lines for the changes that concern this client."""
        for change in changes:
            namespace = change.obj["metadata"].get("namespace", "")
            if self._target.namespace and namespace != self._target.namespace:
                continue
            obj = view(self._target.resource, change.obj)
            kind = self._type(change, obj)
            if kind:
                yield self.line(kind, obj)

    def _type(self, change: StoredChange, obj: Json) -> str | None:
        """Type of the change within the selection, which an object may enter or leave; None if it stays outside."""
        before = change.previous is not None and self.test(view(self._target.resource, change.previous))
        after = change.type != "DELETED" and self.test(obj)
        return {(False, True): "ADDED", (True, True): "MODIFIED", (True, False): "DELETED"}.get((before, after))

    def line(self, kind: str, obj: Json) -> bytes:
        """One event."""
        shaped = self._form.one(self._target.resource, obj, header=self._header)
        self._header = False
        return encode({"type": kind, "object": shaped}) + b"\n"

    def bookmark(self, version: int, *, initial_end: bool = False) -> bytes:
        """A BOOKMARK event, which carries nothing but a version."""
        metadata: Json = {"resourceVersion": str(version)}
        if initial_end:
            metadata["annotations"] = {"k8s.io/initial-events-end": "true"}
        resource = self._target.resource
        obj = {"kind": resource.kind, "apiVersion": resource.group_version, "metadata": metadata}
        if self._form.kind == "table":
            obj = {"kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": metadata, "rows": []}
        return encode({"type": "BOOKMARK", "object": obj}) + b"\n"

    def error(self, problem: ApiError) -> bytes:
        """The ERROR event that ends a watch which cannot continue."""
        return encode({"type": "ERROR", "object": problem.status()}) + b"\n"
