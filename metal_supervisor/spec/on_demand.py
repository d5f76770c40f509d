"""On-demand services: their engine runs only while somebody uses it, and starts with the first request.

Whether a service is one, and how long it stays loaded without a request, is said by annotations of the
InferenceService, else of its Model, else by this Mac's settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from metal_supervisor.spec import fields
from metal_supervisor.spec.document import Json
from metal_supervisor.spec.fields import Bad

ON_DEMAND_ANNOTATION = "metal-supervisor.io/on-demand"
IDLE_TTL_ANNOTATION = "metal-supervisor.io/idle-ttl"
SHORTEST_IDLE_S = 10
LONGEST_IDLE_S = 7 * 86_400
IDLE_TTL_S = 900.0
NO_GATEWAY = (
    "OnDemandIgnored",
    f"annotation {ON_DEMAND_ANNOTATION} needs the gateway, which is off; the model stays loaded; set --gateway",
)


@dataclass(frozen=True)
class OnDemandPolicy:
    """What this Mac's settings say about on-demand services."""

    gateway: bool = True
    """The gateway runs, which such services need: it starts them."""
    default: bool = False
    """Services that say nothing are on demand."""
    idle_ttl_s: float = IDLE_TTL_S
    """Seconds without a request after which the engine of one that says nothing is unloaded."""


@dataclass(frozen=True)
class Unloading:
    """How long the engine of a service may be without a request."""

    engine_s: int | None
    """Seconds until the engine itself unloads its model; None: never."""
    idle_s: float | None
    """Seconds until an on-demand service's engine is ended; 0: only to make room; None: it is not on demand."""
    not_granted: tuple[tuple[str, str], ...] = ()
    """(reason, message) of what this Mac does not grant."""


def unloading(resource: Json, model: Json, policy: OnDemandPolicy) -> Unloading:
    """What an InferenceService and its Model say about unloading. Raises Bad, which names the annotation."""
    asked = _flag((resource, model))
    if asked is not True and not (asked is None and policy.default):
        said = fields.get(resource, "metadata.annotations", dict, {}).get(IDLE_TTL_ANNOTATION)
        return Unloading(_duration(said, ""), None)
    if not policy.gateway:
        return Unloading(None, None, (NO_GATEWAY,) if asked else ())
    found = _said((resource, model), IDLE_TTL_ANNOTATION)
    ttl_s = policy.idle_ttl_s if found is None else float(_duration(found[0], found[1]) or 0)
    return Unloading(None, ttl_s)


def _duration(said: object, of: str) -> int | None:
    return fields.duration(said, f"annotation {IDLE_TTL_ANNOTATION}{of}", SHORTEST_IDLE_S, LONGEST_IDLE_S)


def _said(resources: Sequence[Json], name: str) -> tuple[object, str] | None:
    """(value of an annotation, which object has it, for a message) from the first of the objects that has it."""
    for resource, of in zip(resources, ("", " of its Model"), strict=True):
        value = fields.get(resource, "metadata.annotations", dict, {}).get(name)
        if value is not None:
            return value, of
    return None


def _flag(resources: Sequence[Json]) -> bool | None:
    found = _said(resources, ON_DEMAND_ANNOTATION)
    if found is None:
        return None
    value, of = found
    if value not in ("true", "false"):
        raise Bad("InvalidSpec", f'annotation {ON_DEMAND_ANNOTATION}{of} must be "true" or "false", not {value!r:.80}')
    return value == "true"
