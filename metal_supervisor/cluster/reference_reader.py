"""Reader of the Secrets and ConfigMaps that engines' environments refer to, each with its own GET, in a thread.

No list and no watch: the right to list Secrets gives access to all of a namespace, while the right to get the named
ones is enough. A value is kept until the server reports another; a server that does not answer changes nothing. Values
are held only in memory, and returned only by `look`.
"""

from __future__ import annotations

import base64
import binascii
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from metal_supervisor.cluster.kube import Kube, KubeError
from metal_supervisor.spec.document import mapping
from metal_supervisor.spec.references import HOSTS_ANNOTATION, Holding, Source, read_hosts

AGAIN_S = 30.0
FAILED_AGAIN_S = 5.0
LOOK_WAIT_S = 0.3
SAID = (403, 404)
"""Status codes that are about the object; any other error is about the server."""


@dataclass
class _Entry:
    """State of one source."""

    holding: Holding | None = None
    due: float = 0.0
    """Monotonic time of the next GET."""


class References:
    """Polls the wanted sources. Use it from one thread; `on_change` is called from another."""

    def __init__(self, kube: Kube, on_change: Callable[[], None]) -> None:
        self._kube, self._on_change = kube, on_change
        self._changed = threading.Condition()
        self._entries: dict[Source, _Entry] = {}
        self._soon: frozenset[Source] = frozenset()
        self._thread: threading.Thread | None = None

    def want(self, sources: Collection[Source], soon: Collection[Source] = ()) -> None:
        """Poll exactly these sources from now on; wait briefly for the new ones.

        `soon`: sources to poll more often, because a user is probably correcting them. Raises RuntimeError if the
        system lets no thread be started; the next call tries again.
        """
        with self._changed:
            fresh = [source for source in sources if source not in self._entries]
            if fresh and self._thread is None:
                thread = threading.Thread(target=self._run, name="references", daemon=True)
                thread.start()
                self._thread = thread
            self._entries = {source: self._entries.get(source) or _Entry() for source in sources}
            self._hurry(frozenset(soon))
            if not fresh:
                return
            self._changed.notify_all()
            # Most answers come within milliseconds: a short wait avoids reporting them as missing.
            self._changed.wait_for(lambda: all(self._entries[each].holding for each in fresh), LOOK_WAIT_S)

    def _hurry(self, soon: frozenset[Source]) -> None:
        latest, news = time.monotonic() + FAILED_AGAIN_S, soon - self._soon
        self._soon = soon
        for source in news & self._entries.keys():
            self._entries[source].due = min(self._entries[source].due, latest)
        if news:
            self._changed.notify_all()

    def look(self, source: Source) -> Holding | None:
        """Latest content of a wanted source; None until there is an answer."""
        with self._changed:
            entry = self._entries.get(source)
            return entry.holding if entry else None

    def _run(self) -> None:
        while True:
            with self._changed:
                source = min(self._entries, key=lambda each: self._entries[each].due, default=None)
                wait_s = self._entries[source].due - time.monotonic() if source is not None else None
                if source is None or (wait_s is not None and wait_s > 0):
                    self._changed.wait(wait_s)
                    continue
            found = self._read(source)
            if self._keep(source, found):
                self._on_change()

    def _keep(self, source: Source, found: Holding) -> bool:
        """Record an answer. Returns True if it is new."""
        with self._changed:
            entry = self._entries.get(source)
            if entry is None:
                return False
            usual = found.code == 200 and source not in self._soon
            entry.due = time.monotonic() + (AGAIN_S if usual else FAILED_AGAIN_S)
            before = entry.holding
            if not found.code and before is not None and before.code:
                return False  # the server is down: keep its last answer
            entry.holding = found
            self._changed.notify_all()
            return before != found

    def _read(self, source: Source) -> Holding:
        namespace, plural, name = source
        try:
            item = self._kube.request("GET", f"/api/v1/namespaces/{namespace}/{plural}/{name}")
        except KubeError as error:
            return Holding(error.code if error.code in SAID else 0, text=error.message)
        said = mapping(mapping(item, "metadata"), "annotations")
        found = _holding(item.get("data"), encoded=plural == "secrets")
        return replace(found, hosts=read_hosts(said.get(HOSTS_ANNOTATION)))


def _holding(data: Any, encoded: bool) -> Holding:
    values: dict[str, str] = {}
    binary = set()
    for key, value in data.items() if isinstance(data, Mapping) else ():
        text = _plain(value, encoded)
        if text is None:
            binary.add(str(key))
        else:
            values[str(key)] = text
    return Holding(200, values, frozenset(binary))


def _plain(value: Any, encoded: bool) -> str | None:
    """Decode a value for an environment variable; None if it cannot be one."""
    try:
        text = base64.b64decode(value, validate=True).decode("utf-8") if encoded else str(value)
        text.encode("utf-8")
    except (binascii.Error, ValueError, TypeError):
        return None
    return None if "\0" in text else text
