"""Counters of the gateway's requests, for its note and through that for /metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from metal_supervisor.spec import histogram
from metal_supervisor.spec.histogram import Histogram
from metal_supervisor.spec.types import Json, Key

FIRST_BYTE_S = (0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
REQUEST_S = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
NO_SERVICE: Key = ("", "")
"""Of a request that was refused before it had a service."""


@dataclass
class _Counted:
    """What was counted of one service."""

    ended: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By key's name and status; 499 for a client that left before the answer began."""
    first: dict[str, Histogram] = field(default_factory=dict)
    """By key's name."""
    events: Counter[str] = field(default_factory=Counter)
    """By key's name."""
    whole: Histogram | None = None
    waits: Histogram | None = None


class Traffic:
    """Requests since the start of this worker."""

    def __init__(self) -> None:
        self._of: dict[Key, _Counted] = {}

    def ended(
        self, key: str, service: Key, status: int, first_byte_s: float | None, seconds: float, events: int = 0
    ) -> None:
        """Count a request that has ended. `first_byte_s`: None if no byte of an engine came; `events`: of a stream."""
        known = self._of.setdefault(service, _Counted())
        known.ended[key, status] += 1
        known.events[key] += events
        if first_byte_s is not None:
            known.first[key] = known.first.get(key, histogram.empty(FIRST_BYTE_S)).with_value(first_byte_s)
            known.whole = (known.whole or histogram.empty(REQUEST_S)).with_value(seconds)

    def waited(self, service: Key, seconds: float) -> None:
        """Count a request that has waited for the engine of an on-demand service, in vain or not."""
        known = self._of.setdefault(service, _Counted())
        known.waits = (known.waits or histogram.empty(FIRST_BYTE_S)).with_value(seconds)

    def forget_all_but(self, services: Collection[Key]) -> None:
        """Drop what was counted of services that are gone: a worker may serve for months."""
        for each in self._of.keys() - {NO_SERVICE, *services}:
            del self._of[each]

    def as_json(self) -> Json:
        """JSON form for the gateway's note."""
        found = self._of.items()
        return {
            "requests": [[key, *of, status, n] for of, each in found for (key, status), n in each.ended.items()],
            "events": [[key, *of, count] for of, each in found for key, count in each.events.items()],
            "firstByte": [[key, *of, first.as_json()] for of, each in found for key, first in each.first.items()],
            "wait": [[*of, each.waits.as_json()] for of, each in found if each.waits],
            "whole": [[*of, each.whole.as_json()] for of, each in found if each.whole],
        }
