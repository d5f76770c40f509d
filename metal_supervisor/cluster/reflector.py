"""Reflector: list and watch of one collection, for weeks on end.

A watch reads with a timeout that the server's bookmarks keep from firing, so a half-open connection is detected; it
resumes where it stopped, lists again now and then, and backs off with jitter. An object is never considered deleted
because of an error, only after a DELETED event or a successful list, and a list that lost everything must be confirmed
by a second one. `on_change` is called only for news, because a server may send an event twice or late.

A server whose data was restored from a backup has lower versions than before, and keeps a watch from a later one open
without events. So after a watch that ended early the server's version is compared with the newest one seen.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import urllib3

from metal_supervisor.cluster import status_mode
from metal_supervisor.cluster.answers import retry_after_s
from metal_supervisor.cluster.decoding import decode
from metal_supervisor.cluster.kube import Kube, KubeError
from metal_supervisor.spec.document import mapping
from metal_supervisor.spec.types import Json, Key

WATCH_S = 300.0
RELIST_S = 1800.0
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 60.0
FORBIDDEN_PAUSE_S = 30.0
MISSING_PAUSE_S = 2.0
UNREACHABLE_PAUSE_S = LIST_AGAIN_S = 1.0
SETTLED_S = 5.0
NO_NAMESPACE_AGAIN_S = 30.0
LONGEST_LINE_BYTES = 32 << 20
LOST_HISTORY = "too large resource version"
"""Message of the embedded API to a watch from a version that its data, which was restored, lacks."""
PAGE = 500
"""Items of one page of a list."""
EARLY_S = 2.0
"""A watch that ends this many seconds before its timeout was interrupted by the server."""
log = logging.getLogger(__name__)


@dataclass
class Watched:
    """Local copy of one kind of resource. Replaced as a whole when its items change; read without a lock."""

    items: Mapping[Key, Json] = field(default_factory=dict)
    synced: bool = False
    """True once a list has succeeded."""
    error: str = ""
    """Error of the last attempt, "" while connected."""
    doubtful_until: float = 0.0
    """Monotonic time until which a list that lost everything is not trusted; 0 if there is no doubt."""
    as_of_news: Mapping[Key, Json] = field(default_factory=dict)
    """The items, but each as of its latest news (`is_news`): the very same mapping until there is some."""
    went_back_at: float = 0.0
    """Unix time of the latest list whose version was older than the newest seen before; 0 for never."""


@dataclass(frozen=True)
class History:
    """Progress of a server's resourceVersions, as far as it was seen."""

    newest: str = ""
    """Newest resourceVersion; "" for none."""
    went_back_at: float = 0.0
    """As `Watched.went_back_at`."""


def key_of(item: Json) -> Key:
    metadata = item["metadata"]
    key = metadata.get("namespace", ""), metadata["name"]
    if not all(isinstance(part, str) for part in (*key, metadata.get("uid", ""))):
        raise TypeError("a name and a uid must be strings")
    return key


def _slim(item: Json, kind: str) -> Json:
    """Drop an object's managedFields; keep the time of the operator's latest write, as `operatorWrote`.

    A Model also gets `operatorFailed`, see `status_mode.operator_failure`: outside the status, so a change is news.
    """
    entries, updated = item["metadata"].pop("managedFields", None), mapping(item, "status").get("lastUpdated")
    item["metadata"]["operatorWrote"] = status_mode.operator_wrote(entries, updated)
    if kind == "models":
        item["metadata"]["operatorFailed"] = status_mode.operator_failure(item)
    return item


def precedes(version: str, known: str) -> bool:
    """True if a resourceVersion is not later than another; if they are not numbers, only if they are equal."""
    if version.isdecimal() and known.isdecimal():  # and without leading zeros; Python makes no int of 5000 digits
        return (len(version), version) <= (len(known), known)
    return version == known


def is_older(version: str, known: str) -> bool:
    """True if both resourceVersions are numbers and the first is less."""
    return version.isdecimal() and known.isdecimal() and not precedes(known, version)


def _edition(item: Json) -> tuple[object, object]:
    return item["metadata"].get("uid"), item["metadata"].get("resourceVersion")


def is_edited(before: Json, now: Json) -> bool:
    """False if only the status changed: most statuses are written by this Mac itself, and need no pass."""
    if before.get("status") == now.get("status"):
        return True
    old, new = ({**each["metadata"], "resourceVersion": "", "operatorWrote": ""} for each in (before, now))
    return old != new or {**before, "metadata": 0, "status": 0} != {**now, "metadata": 0, "status": 0}


def _with(items: Mapping[Key, Json], key: Key, item: Json | None) -> dict[Key, Json]:
    """The items with one replaced, added, or removed if it is None."""
    result = dict(items)
    if item is None:
        result.pop(key, None)
    else:
        result[key] = item
    return result


class Reflector(threading.Thread):
    """Thread that keeps a copy of one collection current, and calls `on_change` when it changes."""

    CONFIRM_S = 30.0

    def __init__(
        self,
        kube: Kube,
        path: str,
        on_change: Callable[[], None],
        known: frozenset[str] = frozenset(),
        selector: str = "",
        namespace: str = "",
        is_news: Callable[[Json, Json], bool] = is_edited,
        history: History = History(),
    ) -> None:
        """`known`: uids from before a restart; a list without any of them must be confirmed by a second one.

        `selector`: label selector of the wanted objects, "" for all. `namespace`: its existence is checked whenever a
        list is empty, "" for no check. `is_news`: called with an object before and after each change of it, by this
        thread; `on_change` is only called if it returns True. `history`: as known before a restart.
        """
        super().__init__(name=f"watch {path.rpartition('/')[2]}", daemon=True)
        self._kube, self._path, self._on_change = kube, path, on_change
        self.kind = path.rpartition("/")[2]
        """Plural name of the watched resource."""
        self._known, self._is_news = known, is_news
        self._namespace, self._lacks_namespace = namespace, False
        self._selected = {"labelSelector": selector} if selector else {}
        self._version = ""
        self._newest = history.newest
        """Newest resourceVersion seen."""
        self._ahead = False
        """The embedded API has answered that its data lacks the version last seen."""
        self._interrupted = False
        """The server ended the last watch early, or failed: its data may have been restored since."""
        self._broken = True
        self.connected_at = 0.0
        """Monotonic time since which events have come without a break; a watch that ends normally is no break."""
        self._relist_at = self._listed_at = 0.0
        self._kick = threading.Event()
        self._kicks = kube.kicks
        self._gone: dict[Key, str] = {}
        """resourceVersion of each deletion since the last list."""
        self.seen = Watched(went_back_at=history.went_back_at)
        self.reconnects = 0
        """Number of times that a watch was reopened, also after a normal end."""
        self._failures = 0
        kube.when_kicked(self.kick)

    @property
    def failures(self) -> int:
        """Failed attempts since the last successful one, which is an open watch."""
        return self._failures if self._broken else 0

    @property
    def history(self) -> History:
        """The server's versions so far; give it to the next Reflector."""
        return History(self._newest, self.seen.went_back_at)

    def kick(self) -> None:
        """Try again now, instead of after the current pause."""
        self._kick.set()

    def run(self) -> None:
        while True:
            started = time.monotonic()
            if self._kicks != self._kube.kicks:  # events may have been missed: list again
                self._kicks, self._relist_at = self._kube.kicks, 0.0
            try:
                if self._interrupted and self._version and self._has_gone_back():
                    self._version = ""
                if not self._version or started >= self._relist_at:
                    self._list()
                self._watch()
                pause_s = 0.0 if time.monotonic() - started > 1.0 else 1.0
                self._failures = 0
            except KubeError as error:
                self._broken = self._interrupted = True
                # A watch that lasted for a while was a success.
                self._failures = self._failures + 1 if time.monotonic() - started < SETTLED_S else 1
                # A kick cuts connections, which is not an error of the cluster.
                pause_s = self._failed(error, self._failures) if self._kicks == self._kube.kicks else 0.0
            self.reconnects += 1
            self._kick.wait(pause_s)
            self._kick.clear()

    def _failed(self, error: KubeError, failures: int) -> float:
        """Record an error, and return the seconds to wait before the next attempt."""
        if error.code == 410:
            self._version = ""
            self._ahead = self._ahead or LOST_HISTORY in error.message
            return max(0.0, self._listed_at + LIST_AGAIN_S - time.monotonic())
        text = f"{self._path}: {error}"
        if error.code == 404:
            self._version = ""  # a CRD that is installed again starts with new versions
            text = f"{self._path.rpartition('/')[2]} are not served: the CRD is not installed; apply conf/crds"
        elif error.code == 403:
            text = f"forbidden: {error.message}"
        if text != self.seen.error:
            log.warning("cluster trouble", extra={"error": text})
            self.seen.error = text
            self._on_change()
        if error.code in (403, 404):
            # A CRD may be installed at any moment, by a user who waits for it; a refusal lasts longer.
            return MISSING_PAUSE_S if error.code == 404 else FORBIDDEN_PAUSE_S
        # An embedded server that restarts is back within seconds; one that answers with errors gets a longer back-off.
        longest = UNREACHABLE_PAUSE_S if error.reason == "Unreachable" else LONGEST_PAUSE_S
        pause_s: float = min(longest, FIRST_PAUSE_S * 2 ** min(failures, 16)) * random.uniform(0.5, 1.0)
        return max(error.retry_after_s, pause_s)

    def _page(self, limit: int, more: str = "") -> tuple[dict[Key, Json], str, str]:
        """One page of a list: (items, resourceVersion, token of the next page). Raises KubeError."""
        query = {"limit": limit, **self._selected, **({"continue": more} if more else {})}
        page = self._kube.request("GET", self._path, query)
        with contextlib.suppress(KeyError, TypeError, AttributeError):
            items = {key_of(item): _slim(item, self.kind) for item in page["items"]}
            version = page["metadata"]["resourceVersion"]
            if isinstance(version, str):
                return items, version, page["metadata"].get("continue", "")
        raise KubeError(0, "BadAnswer", "a list came back without items")

    def _has_gone_back(self) -> bool:
        """True if the server's version is older than the newest one seen."""
        _, version, _ = self._page(1)
        self._interrupted = False
        return is_older(version, self._newest)

    def _list(self) -> None:
        self._listed_at = time.monotonic()
        items, version, more = self._page(PAGE)
        while more:
            page, version, more = self._page(PAGE, more)
            items |= page
        went_back_at = self.seen.went_back_at
        if self._ahead or is_older(version, self._newest):
            text = {"kind": self.kind, "version": version, "before": self._newest}
            log.warning("the server's data is older than before", extra=text)
            went_back_at = time.time()
        self._interrupted = self._ahead = False
        self._version = self._newest = version
        self._gone.clear()
        self._relist_at = time.monotonic() + RELIST_S * random.uniform(0.9, 1.1)
        lacked, self._lacks_namespace = self._lacks_namespace, not items and self._look_for_namespace()
        if self._lacks_namespace:
            self._relist_at = time.monotonic() + NO_NAMESPACE_AGAIN_S
        self._believe(items, went_back_at)
        if self._lacks_namespace != lacked:
            self._on_change()

    def _look_for_namespace(self) -> bool:
        """True if the namespace does not exist; a server answers lists of a missing namespace too."""
        if not self._namespace:
            return False
        try:
            self._kube.request("GET", f"/api/v1/namespaces/{self._namespace}")
        except KubeError as error:
            return error.code == 404  # any other error, such as a refusal, proves nothing
        return False

    @property
    def no_namespace(self) -> bool:
        """True if the last list was empty because the namespace does not exist."""
        return self._lacks_namespace and not self.seen.items

    def _believe(self, items: Mapping[Key, Json], went_back_at: float) -> None:
        """Accept a list, unless it lost everything that was known: then a second list must confirm it."""
        now = time.monotonic()
        uids = frozenset(item["metadata"].get("uid", "") for item in items.values())
        known = self._known | frozenset(item["metadata"].get("uid", "") for item in self.seen.items.values())
        if known and not known & uids:
            until = self.seen.doubtful_until or now + self.CONFIRM_S
            if now < until:
                if not self.seen.doubtful_until:
                    log.warning("a list lost everything; nothing is stopped before it says so again")
                self._relist_at = until
                self._replace({**self.seen.items, **items}, until, went_back_at)
                return
        self._known = frozenset()
        self._replace(items, 0.0, went_back_at)

    def _replace(self, items: Mapping[Key, Json], doubtful_until: float, went_back_at: float) -> None:
        """Replace the items. An error is kept until a watch is open as well."""
        before, old = self.seen, self.seen.items
        changed = {key for key, item in items.items() if key not in old or _edition(item) != _edition(old[key])}
        news = bool(changed) or len(items) != len(old)
        as_of_news = {key: item if key in changed else before.as_of_news[key] for key, item in items.items()}
        self.seen = Watched(
            items, True, before.error, doubtful_until, as_of_news if news else before.as_of_news, went_back_at
        )
        known = before.synced, before.doubtful_until, before.went_back_at
        if news or known != (True, doubtful_until, went_back_at):
            self._on_change()

    def _watch(self) -> None:
        # A stream that stays silent, e.g. one from a future resourceVersion, must not outlast the next list.
        lasts_s = max(1.0, min(WATCH_S * random.uniform(0.8, 1.0), self._relist_at - time.monotonic()))
        query = {
            "watch": "true",
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": int(lasts_s) or 1,
            **self._selected,
        }
        ends_at = time.monotonic() + lasts_s
        with contextlib.closing(self._kube.stream(self._path, query)) as answer:
            if self._kicks != self._kube.kicks:
                return  # a connection that was being opened may be as dead as the others
            if self._broken:
                self._broken, self.connected_at = False, time.monotonic()
            if self.seen.error:
                self.seen.error = ""
                self._on_change()
            try:
                for line in self._lines(answer):
                    if line.strip():
                        self._event(line)
                    if time.monotonic() >= self._relist_at:
                        return
                self._interrupted = time.monotonic() < ends_at - EARLY_S
            except KubeError as error:
                if self._failures and error.reason != "Unreachable":
                    self._version = ""  # each watch from this version may meet it, and a list passes it
                raise

    def _lines(self, answer: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
        """Yield the complete lines of a stream. Raises KubeError if it breaks, or a line is too long."""
        buffer, broken = bytearray(), ""
        try:
            for chunk in answer.stream(amt=None, decode_content=False):
                buffer += chunk
                while (end := buffer.find(b"\n")) >= 0:
                    line = bytes(buffer[:end])
                    del buffer[: end + 1]
                    yield line
                if len(buffer) > LONGEST_LINE_BYTES:
                    break
        except (urllib3.exceptions.HTTPError, OSError) as error:
            broken = type(error).__name__
        if broken:
            raise KubeError(0, "Unreachable", f"watch broke off: {broken}")
        if len(buffer) > LONGEST_LINE_BYTES:
            raise KubeError(0, "TooLarge", "a watch event exceeds 32 MiB")

    def _event(self, line: bytes) -> None:
        kind = ""
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
            event = decode(line)
            item = event["object"]
            if event["type"] == "ERROR":
                reason, message = (self._kube.scrub(str(item.get(name))) for name in ("reason", "message"))
                failure = KubeError(int(item.get("code") or 0), reason, message, retry_after_s({}, item))
                kind = "ERROR"
            else:
                version = item["metadata"]["resourceVersion"]
                key = None if event["type"] == "BOOKMARK" else key_of(item)
                kind = event["type"] if isinstance(version, str) else ""
        if kind == "ERROR":
            raise failure
        if not isinstance(kind, str) or not kind:
            raise KubeError(0, "BadAnswer", "a watch sent something that is not an event")
        if not precedes(version, self._version):
            self._version = self._newest = version
        if key is None:
            return
        known = self.seen.items.get(key)
        if kind not in ("ADDED", "MODIFIED", "DELETED") or self._is_old(kind, key, item, known):
            return
        present = None if kind == "DELETED" else _slim(item, self.kind)
        if present is None:
            self._gone[key] = version
        news = present is None or known is None or self._is_news(known, present)
        as_of_news = _with(self.seen.as_of_news, key, present) if news else self.seen.as_of_news
        items = _with(self.seen.items, key, present)
        self.seen = replace(self.seen, items=items, synced=True, error="", as_of_news=as_of_news)
        if news:
            self._on_change()

    def _is_old(self, kind: str, key: Key, item: Json, known: Json | None) -> bool:
        """True if an event is no news about its object, or is about an earlier object of the same name."""
        (uid, version), gone = _edition(item), self._gone.get(key, "")
        if known is None:
            return kind == "DELETED" or bool(gone and precedes(str(version), gone))
        known_uid, known_version = _edition(known)
        if uid != known_uid and self.seen.doubtful_until:
            return kind == "DELETED"  # versions of two clusters cannot be compared
        if kind == "DELETED" and (uid, version) == (known_uid, known_version):
            return False
        return precedes(str(version), str(known_version))
