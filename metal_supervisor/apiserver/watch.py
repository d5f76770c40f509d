"""Watches: the changes of a collection, as they happen, from a given version on.

One thread per watch waits on the condition of its kind, so a change is sent within a millisecond and a
quiet watch costs nothing. A client can fetch changes that it missed by resourceVersion, as far as history goes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from .codec import encode
from .errors import ApiError, Json, forbidden_value, invalid_options
from .reads import Form, Test, flag, number, selected, selection
from .resources import Registry, RequestTarget
from .storage import ObjectStore, StoredChange
from .views import view

_DEFAULT_TIMEOUT_S = 1800.0
_LONGEST_TIMEOUT_S = 365 * 86400.0
"""Bound of `timeoutSeconds`: a thread cannot wait for just any number of seconds."""
_LAST_BOOKMARK_S = 2.0


@dataclass(eq=False)
class Subscription:
    """One open watch."""

    target: RequestTarget
    test: Test
    form: Form
    version: int
    """The latest one that the client has seen; 0 before it has been sent the present state."""
    ends_s: float
    """Time of the monotonic clock."""
    bookmarks: bool
    initial: bool
    """Send the present state first, if there is no version to start from."""
    marked: bool
    """Mark the end of the present state with a bookmark."""
    closed: bool = False
    """Set it to end the watch, then wake the condition of its kind."""
    _header: bool = True
    """Name the columns in the next line, if it is a table."""

    def lines(self, changes: Iterable[StoredChange]) -> Iterator[bytes]:
        """Lines for the changes that concern this client."""
        for change in changes:
            namespace = change.obj["metadata"].get("namespace", "")
            if self.target.namespace in ("", namespace):
                obj = view(self.target.resource, change.obj)
                if kind := self._type(change, obj):
                    yield self.line(kind, obj)

    def _type(self, change: StoredChange, obj: Json) -> str | None:
        """Type of the change within the selection, which an object may enter or leave; None if it stays outside."""
        before = change.previous is not None and self.test(view(self.target.resource, change.previous))
        after = change.type != "DELETED" and self.test(obj)
        return {(False, True): "ADDED", (True, True): "MODIFIED", (True, False): "DELETED"}.get((before, after))

    def line(self, kind: str, obj: Json) -> bytes:
        """One event."""
        shaped = self.form.one(self.target.resource, obj, header=self._header)
        self._header = False
        return encode({"type": kind, "object": shaped}) + b"\n"

    def bookmark(self, *, initial_end: bool = False) -> bytes:
        """A BOOKMARK event, which carries nothing but the version that the client has reached."""
        metadata: Json = {"resourceVersion": str(self.version)}
        if initial_end:
            metadata["annotations"] = {"k8s.io/initial-events-end": "true"}
        resource = self.target.resource
        obj = {"kind": resource.kind, "apiVersion": resource.group_version, "metadata": metadata}
        if self.form.kind == "table":
            obj = {"kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": metadata, "rows": []}
        return encode({"type": "BOOKMARK", "object": obj}) + b"\n"


class Watcher:
    """Produces the lines of watch streams."""

    def __init__(self, store: ObjectStore, registry: Registry, bookmark_s: float) -> None:
        self._store = store
        self._registry = registry
        self._bookmark_s = bookmark_s
        self._open: set[Subscription] = set()

    def open(self, target: RequestTarget, query: Mapping[str, str], form: Form) -> Subscription:
        """A new watch, which is open until `close`. Raises ApiError for bad parameters."""
        asked, bookmarks = flag(query, "sendInitialEvents"), flag(query, "allowWatchBookmarks")
        if asked and query.get("resourceVersionMatch") != "NotOlderThan":
            detail = "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"
            raise invalid_options("ListOptions", forbidden_value("resourceVersionMatch", detail))
        timeout_s = min(number(query, "timeoutSeconds") or _DEFAULT_TIMEOUT_S, _LONGEST_TIMEOUT_S)
        subscription = Subscription(
            target,
            selection(target.resource, query),
            form,
            version=number(query, "resourceVersion") if not asked else 0,
            ends_s=time.monotonic() + timeout_s,
            bookmarks=bookmarks,
            initial=query.get("sendInitialEvents") != "false",
            # A client that gets the present state and accepts bookmarks gets one at the end of it, even unasked.
            marked=asked or ("sendInitialEvents" not in query and bookmarks),
        )
        with self._store.lock:
            self._open.add(subscription)
        return subscription

    def subscriptions(self) -> list[Subscription]:
        """The open watches."""
        with self._store.lock:
            return list(self._open)

    def close(self, subscription: Subscription) -> None:
        """Ends and forgets a watch: its client has gone, or it is over."""
        subscription.closed = True
        condition = self._store.condition(subscription.target.resource.storage_key)
        with condition:
            self._open.discard(subscription)
            condition.notify_all()

    def close_all(self) -> None:
        """Ends all watches properly, as a server does at their timeout."""
        for subscription in self.subscriptions():
            subscription.closed = True
        self._store.wake_all()

    def run(self, subscription: Subscription, send: Callable[[bytes], None]) -> None:
        """Calls `send` with one or more lines at a time until the watch ends."""
        try:
            if lines := self._present(subscription):
                send(b"".join(lines))
            bookmark_due_s = self._next_bookmark(subscription)
            over = False
            while not over:
                lines = list(subscription.lines(self._changes(subscription, bookmark_due_s)))
                if time.monotonic() >= bookmark_due_s:
                    lines.append(subscription.bookmark())
                    bookmark_due_s = self._next_bookmark(subscription)
                if lines:
                    send(b"".join(lines))
                over = self._over(subscription, subscription.ends_s)
        except ApiError as problem:
            send(encode({"type": "ERROR", "object": problem.status()}) + b"\n")

    def _next_bookmark(self, subscription: Subscription) -> float:
        """Time of the next bookmark: after a pause, and once more just before the end, for clients that resume."""
        if not subscription.bookmarks:
            return math.inf
        now_s, last_s = time.monotonic(), subscription.ends_s - _LAST_BOOKMARK_S
        return min(now_s + self._bookmark_s, last_s) if now_s < last_s else now_s + self._bookmark_s

    def _present(self, subscription: Subscription) -> list[bytes]:
        """The first lines, for a client that has no version to start from."""
        if subscription.version:
            return []
        with self._store.lock:
            found = selected(self._store, subscription.target, subscription.test) if subscription.initial else []
            subscription.version = self._store.version
        lines = [subscription.line("ADDED", obj) for obj in found]
        return [*lines, subscription.bookmark(initial_end=True)] if subscription.marked else lines

    def _changes(self, subscription: Subscription, bookmark_due_s: float) -> list[StoredChange]:
        """Wait for changes that have not been sent, until the end of the watch or the time of a bookmark."""
        kind, due_s = subscription.target.resource.storage_key, min(subscription.ends_s, bookmark_due_s)
        condition = self._store.condition(kind)
        with condition:
            while True:
                changes = self._store.changes_since(kind, subscription.version)
                if changes or self._over(subscription, due_s):
                    # A version from the future (the cluster was rebuilt) stays there, silently, as on a real server.
                    subscription.version = max(subscription.version, self._store.version)
                    return changes
                condition.wait(due_s - time.monotonic())

    def _over(self, subscription: Subscription, due_s: float) -> bool:
        """True if a watch is closed, its kind is gone, or it is past a time of the monotonic clock."""
        resource = subscription.target.resource
        served = self._registry.find(resource.group, resource.version, resource.plural)
        return subscription.closed or served is None or time.monotonic() >= due_s
