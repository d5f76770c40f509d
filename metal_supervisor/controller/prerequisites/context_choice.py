"""The context of an engine whose spec names none: chosen for its first start, recorded, and kept from then on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from metal_supervisor.models.metadata import Demand
from metal_supervisor.spec.record import Record, same_request
from metal_supervisor.spec.types import Engine, Service

OPEN = -1
"""Tokens of a slot that are still to be chosen."""
DEFAULT = 0
"""Stands for the runtime's own number of tokens of a slot."""


@dataclass(frozen=True)
class Composition:
    """An engine as it would be started with one context."""

    slot_context: int
    """Tokens of a slot; DEFAULT if the spec says it, or the runtime."""
    engine: Engine
    demand: Demand


def known(service: Service, record: Record | None) -> int:
    """Tokens of a slot that were chosen before; OPEN if they are still to be chosen."""
    if record is None or not record.admitted_at:
        return OPEN
    if record.slot_context:
        return record.slot_context
    # An engine of a release that chose none keeps the context it has until it is edited.
    return DEFAULT if same_request(record.asked, service.asked) else OPEN


def to_try(known_tokens: int, offered: Sequence[int]) -> tuple[int, ...]:
    """Tokens of a slot to compose an engine with, the most first. `offered`: those that its runtime has to offer."""
    if not offered or known_tokens == DEFAULT:
        return (DEFAULT,)
    if known_tokens == OPEN:
        return tuple(offered)
    return (min(known_tokens, offered[0]),)  # an edit may name a model that was trained for less


def with_context(service: Service, slot_tokens: int) -> Service:
    """The service with that context, as if its spec had named it."""
    if slot_tokens == DEFAULT:
        return service
    slots = int(service.options.get("parallelSlots", 1))
    return replace(service, options={**service.options, "contextSize": slot_tokens * slots})


def choose(compositions: Sequence[Composition], free_bytes: int, budget_bytes: int) -> Composition:
    """The composition with the most tokens that fits now; or else that ever could, or the one with the fewest."""
    for room in (free_bytes, budget_bytes):
        for each in compositions:
            if each.demand.bytes is not None and each.demand.bytes <= room:
                return each
    return compositions[-1]
