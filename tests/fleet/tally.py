"""Requests of a Mac, counted where they leave it: by second, verb and resource, and whether they were answered."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from metal_supervisor.cluster.kube import Kube

_PATH = re.compile(r"/(?:api|apis/[^/]+)/[^/]+(?:/namespaces/[^/]+)?/([a-z]+)(?:/([^/]+))?(?:/([^/]+))?")
VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
Sent = tuple[int, str, int]
"""(second of the monotonic clock, "verb resource", HTTP status or 0 if there was no answer)."""


def what(method: str, url: str) -> str:
    """Verb and resource of a request, as RBAC names them."""
    parts = urlsplit(url)
    found = _PATH.match(parts.path)
    if not found:
        return f"{method} {parts.path}"
    resource, name, sub = found.groups()
    watch = "watch" in parse_qs(parts.query)
    verb = VERBS.get(method) or ("watch" if watch else "get" if name else "list")
    return f"{verb} {resource}{'/' + sub if sub else ''}"


class Tally:
    """Counter of one Mac's requests. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: Counter[Sent] = Counter()

    def note(self, which: str, code: int) -> None:
        """Count a request that has just ended."""
        with self._lock:
            self._sent[int(time.monotonic()), which, code] += 1

    def taken(self) -> list[tuple[Sent, int]]:
        """All that was counted since the last call."""
        with self._lock:
            found, self._sent = self._sent, Counter()
        return list(found.items())


class CountedKube(Kube):
    """A client whose requests are counted as they leave, retries of the login included."""

    def __init__(self, kubeconfig: Path, tally: Tally) -> None:
        self._tally = tally
        super().__init__(kubeconfig)

    def _once(self, method: str, url: str, *rest: Any) -> Any:
        code = 0
        try:
            used, answer = super()._once(method, url, *rest)
            code = answer.status
            return used, answer
        finally:
            self._tally.note(what(method, url), code)


class Requests:
    """The requests of all Macs, for questions about a span of time."""

    def __init__(self) -> None:
        self._of: dict[str, Counter[Sent]] = {}

    def add(self, found: Mapping[str, Iterable[tuple[Sent, int]]]) -> None:
        """Add what Macs have counted."""
        for mac, sent in found.items():
            mine = self._of.setdefault(mac, Counter())
            for key, count in sent:
                mine[tuple(key)] += count  # type: ignore[index]

    def between(self, since: float, until: float, answered: bool = True) -> dict[str, Counter[str]]:
        """Mac -> requests by verb and resource. `answered`: only those that the server answered."""
        found: dict[str, Counter[str]] = {}
        for mac, sent in self._of.items():
            of = found.setdefault(mac, Counter())
            for (second, which, code), count in sent.items():
                if int(since) <= second < until and (code or not answered):
                    of[which] += count
        return found

    def total(self, since: float, until: float) -> Counter[str]:
        """Answered requests of all Macs by verb and resource."""
        return sum(self.between(since, until).values(), Counter())

    def refusals(self, since: float, until: float) -> int:
        """Number of answers that say 409: another was first."""
        spans = (sent for of in self._of.values() for sent in of.items())
        return sum(count for (second, _, code), count in spans if int(since) <= second < until and code == 409)

    def worst_second(self, since: float, until: float) -> tuple[int, int]:
        """(most answered requests of one Mac in a second, most of all Macs together in one)."""
        single, together = 0, Counter[int]()
        for sent in self._of.values():
            mine = Counter[int]()
            for (second, _, code), count in sent.items():
                if int(since) <= second < until and code:
                    mine[second] += count
            single = max(single, max(mine.values(), default=0))
            together.update(mine)
        return single, max(together.values(), default=0)
