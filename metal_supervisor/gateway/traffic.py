"""Counters of the gateway's requests, for its note and through that for /metrics."""

from __future__ import annotations

from collections import Counter

from metal_supervisor.spec import histogram
from metal_supervisor.spec.histogram import Histogram
from metal_supervisor.spec.types import Json, Key

FIRST_BYTE_S = (0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
REQUEST_S = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
NO_SERVICE: Key = ("", "")
"""Of a request that was refused before it had a service."""


class Traffic:
    """Requests since the start of this worker."""

    def __init__(self) -> None:
        self._ended: Counter[tuple[str, Key, int]] = Counter()
        """By key's name, service and status; 499 for a client that left before the answer began."""
        self._first: dict[tuple[str, Key], Histogram] = {}
        """By key's name and service."""
        self._events: Counter[tuple[str, Key]] = Counter()
        self._whole: dict[Key, Histogram] = {}
        self._waits: dict[Key, Histogram] = {}

    def ended(
        self, key: str, service: Key, status: int, first_byte_s: float | None, seconds: float, events: int = 0
    ) -> None:
        """Count a request that has ended. `first_byte_s`: None if no byte of an engine came; `events`: of a stream."""
        self._ended[key, service, status] += 1
        self._events[key, service] += events
        if first_byte_s is not None:
            first = self._first.get((key, service), histogram.empty(FIRST_BYTE_S))
            self._first[key, service] = first.with_value(first_byte_s)
            self._whole[service] = self._whole.get(service, histogram.empty(REQUEST_S)).with_value(seconds)

    def waited(self, service: Key, seconds: float) -> None:
        """Count a request that has waited for the engine of an on-demand service, in vain or not."""
        self._waits[service] = self._waits.get(service, histogram.empty(FIRST_BYTE_S)).with_value(seconds)

    def as_json(self) -> Json:
        """JSON form for the gateway's note."""
        return {
            "requests": [[key, *service, status, count] for (key, service, status), count in self._ended.items()],
            "events": [[key, *service, count] for (key, service), count in self._events.items()],
            "firstByte": [[key, *service, found.as_json()] for (key, service), found in self._first.items()],
            "wait": [[*service, found.as_json()] for service, found in self._waits.items()],
            "whole": [[*service, found.as_json()] for service, found in self._whole.items()],
        }
