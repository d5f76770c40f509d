"""A backoff for each object whose write the API server fails: it is held back alone, longer each time."""

from __future__ import annotations

import random
import time
from collections.abc import Hashable
from dataclasses import dataclass

from metal_supervisor.cluster.kube import KubeError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0
Object = tuple[str, Hashable]
"""(what is written, of which object)."""


@dataclass(frozen=True)
class _Held:
    """A write that failed, until it is tried again."""

    failures: int
    until: float
    """Monotonic."""
    error: str


class Backoffs:
    """The objects that are held back; truthy while there are any. For one writer, others may only call `over`."""

    def __init__(self) -> None:
        self._held: dict[Object, _Held] = {}
        self._met: set[Object] = set()
        """What was asked for since the last pruning."""

    def __bool__(self) -> bool:
        return bool(self._held)

    def __contains__(self, what: Object) -> bool:
        return what in self._held

    def holds(self, what: Object) -> bool:
        """Whether an object is to be left alone yet."""
        self._met.add(what)
        held = self._held.get(what)
        return held is not None and time.monotonic() < held.until

    def hold(self, what: Object, error: KubeError) -> None:
        """Holds an object back, longer than the last time; as long as the server asks for at least."""
        before = self._held.get(what)
        failures = (before.failures if before else 0) + 1
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failures, 8)) * random.uniform(0.5, 1.0)
        self._held[what] = _Held(failures, time.monotonic() + max(pause_s, error.retry_after_s), str(error))

    def over(self, what: Object) -> None:
        """Forgets an object: it was written, or is to be another."""
        self._held.pop(what, None)

    def prune(self) -> None:
        """Forgets what no pass asks for any more."""
        for what in [each for each in list(self._held) if each not in self._met]:
            self.over(what)
        self._met = set()

    def due_at(self) -> float:
        """Monotonic time at which the first of them is tried again."""
        return min((held.until for held in list(self._held.values())), default=float("inf"))

    def told(self) -> str:
        """The object that has been held back longest, and the server's words."""
        for (what, on), held in list(self._held.items()):
            name = "/".join(map(str, on)) if isinstance(on, tuple) else on
            return f"{what} of {name or 'this Mac'}: {held.error}"
        return ""
