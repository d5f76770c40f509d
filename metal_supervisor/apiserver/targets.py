"""What a request is about, how a write is to be done, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import Json
from .resources import Resource


@dataclass(frozen=True)
class RequestTarget:
    """What a request is about."""

    resource: Resource
    namespace: str
    """Empty for cluster-scoped resources, and for all namespaces."""
    name: str
    """Empty for a collection."""
    subresource: str = ""
    """`status`, `scale` or empty."""


@dataclass(frozen=True)
class WriteOptions:
    """How a write is to be done."""

    manager: str
    dry_run: bool = False
    field_validation: str = "Warn"
    """`Strict`, `Warn` or `Ignore`: what happens to unknown fields before they are dropped."""
    force: bool = False
    """Whether an apply may take fields from other managers."""


@dataclass(frozen=True)
class Outcome:
    """Result of a write."""

    obj: Json
    """The object in the words of the resource, or its Scale."""
    created: bool = False
    warnings: tuple[str, ...] = ()
