"""A watch on the API that remembers when what was seen."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any

from metal_supervisor.cluster.kube import Kube
from tests.support.system import System, eventually


class Watch:
    """A watch that remembers when each object first looked a certain way."""

    def __init__(self, system: System, path: str, word: Callable[[dict[str, Any]], str]) -> None:
        self._lock = threading.Lock()
        self._slices: dict[str, str] = {}
        """Service -> name of its slice."""
        self._seen: dict[tuple[str, str], list[float]] = {}
        version = system.get(path)["metadata"]["resourceVersion"]
        self._kube = Kube(system.kubeconfig)
        # Without bookmarks a watch that sees nothing for a while is taken for a dead one, and ends.
        asked = {"watch": "true", "resourceVersion": version, "timeoutSeconds": 3000, "allowWatchBookmarks": "true"}
        self._stream = self._kube.stream(path, asked)
        self._word = word
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        buffer = b""
        with contextlib.suppress(Exception):
            for chunk in self._stream.stream(amt=None, decode_content=False):
                buffer += chunk
                *lines, buffer = buffer.split(b"\n")
                now = time.monotonic()
                for line in filter(None, lines):
                    event = json.loads(line)
                    name, word = event["object"]["metadata"].get("name", ""), self._word(event)
                    labels = event["object"]["metadata"].get("labels") or {}
                    with self._lock:
                        self._slices[labels.get("kubernetes.io/service-name", "")] = name
                        self._seen.setdefault((name, word), []).append(now)

    def seen_for(self, service: str, word: str) -> bool:
        """True if a slice of a service was seen like that."""
        with self._lock:
            return (self._slices.get(service, ""), word) in self._seen

    def after_for(self, service: str, word: str, since: float, within_s: float = 60) -> float:
        """Seconds from `since` until a service's slice was first seen like that."""
        eventually(lambda: service in self._slices, within_s, f"a slice of {service}")
        return self.after(self._slices[service], word, since, within_s)

    def after(self, name: str, word: str, since: float, within_s: float = 60) -> float:
        """Seconds from `since` until the object was first seen like that."""

        def look() -> float | None:
            with self._lock:
                times = [at for at in self._seen.get((name, word), []) if at >= since]
            return times[0] - since if times else None

        return eventually(look, within_s, f"{name} to be {word}")


def readiness(event: dict[str, Any]) -> str:
    endpoints = event["object"].get("endpoints") or [{}]
    return f"ready={(endpoints[0].get('conditions') or {}).get('ready')}" if event["type"] != "DELETED" else "deleted"
