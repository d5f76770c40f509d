"""Per-object backoff of failed writes to the API server: exponential, and other objects are not delayed."""

from __future__ import annotations

import random
import time
from collections.abc import Hashable
from dataclasses import dataclass

from metal_supervisor.cluster.kube import KubeError

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0
LONGEST_REFUSED_S = 30.0
"""Longest pause after a refusal (4xx), which lasts until a policy, a quota or a right is changed."""
REFUSED_AHEAD = 3
"""Doublings that the first pause after a refusal is ahead of others."""
Object = tuple[str, Hashable]
"""(kind of write, object)."""


def pause_s(failures: int, longest_s: float) -> float:
    """Seconds before the next try after so many failures: twice as long each time, in part at random."""
    return min(longest_s, FIRST_PAUSE_S * 2.0 ** min(failures, 8)) * random.uniform(0.5, 1.0)


@dataclass(frozen=True)
class _Held:
    """A write that failed, until it is tried again."""

    failures: int
    until: float
    """Monotonic."""
    error: str
    refused: bool
    """By a policy, a quota or a missing right: no shutdown waits for it."""


class Backoffs:
    """The objects held back; truthy while there are any. For one thread."""

    def __init__(self) -> None:
        self._held: dict[Object, _Held] = {}
        self._met: set[Object] = set()
        """Objects asked about since the last `prune`."""

    def __bool__(self) -> bool:
        return bool(self._held)

    def __contains__(self, what: Object) -> bool:
        return what in self._held

    @property
    def is_awaited(self) -> bool:
        """True if any is held back that the server did not refuse, so that its next try may succeed."""
        return any(not held.refused for held in self._held.values())

    def holds(self, what: Object) -> bool:
        """True if the backoff of an object has not expired. Also marks it as used, for `prune`."""
        self._met.add(what)
        held = self._held.get(what)
        return held is not None and time.monotonic() < held.until

    def hold(self, what: Object, error: KubeError) -> bool:
        """Back off an object: longer than last time, and at least as long as the server's Retry-After.

        True if it was not held back for this error before.
        """
        before, refused = self._held.get(what), error.is_refusal
        failures = (before.failures if before else 0) + 1
        longest_s = LONGEST_REFUSED_S if refused and what[0] != "lease" else LONGEST_PAUSE_S  # a Lease expires
        held_s = max(pause_s(failures + REFUSED_AHEAD * refused, longest_s), error.retry_after_s)
        self._held[what] = _Held(failures, time.monotonic() + held_s, str(error), refused)
        return before is None or before.error != str(error)

    def over(self, what: Object) -> None:
        """Forget an object: it was written, or its desired content has changed."""
        self._held.pop(what, None)

    def prune(self) -> None:
        """Forget the objects that `holds` was not called for since the last `prune`."""
        for what in [each for each in self._held if each not in self._met]:
            self.over(what)
        self._met = set()

    def due_at(self) -> float:
        """Monotonic time of the earliest retry, infinity if nothing is held back."""
        return min((held.until for held in self._held.values()), default=float("inf"))

    def told(self) -> str:
        """The object that has been held back longest, with the server's error; "" if there is none."""
        for (what, on), held in self._held.items():
            name = "/".join(map(str, on)) if isinstance(on, tuple) else on
            return f"{what} of {name or 'this Mac'}: {held.error}"
        return ""
