"""Values of a request: its target, the options of a write, and the outcome."""

from __future__ import annotations

from dataclasses import dataclass, field

from .errors import Json, not_found
from .resources import Resource
from .storage import Name, ObjectStore


@dataclass(frozen=True)
class RequestTarget:
    """Target of a request: a collection, an object or a subresource."""

    resource: Resource
    namespace: str
    """Empty for cluster-scoped resources, and for all namespaces."""
    name: str
    """Empty for a collection."""
    subresource: str = ""
    """`status`, `scale` or empty."""

    @property
    def place(self) -> tuple[str, Name]:
        """(kind, name) under which the object is stored."""
        return self.resource.storage_key, (self.namespace, self.name)

    def stored(self, store: ObjectStore) -> Json:
        """The object in the store. Raises ApiError 404."""
        found = store.get(*self.place)
        if found is None:
            raise not_found(self.resource.group, self.resource.plural, self.name)
        return found


@dataclass(frozen=True)
class WriteOptions:
    """Options of a write."""

    manager: str
    dry_run: bool = False
    field_validation: str = "Warn"
    """`Strict`, `Warn` or `Ignore`: treatment of unknown fields before they are dropped."""
    force: bool = False
    """Let an apply take fields from other managers."""


@dataclass(frozen=True)
class DeleteOptions:
    """Options of a deletion."""

    policy: str = ""
    """`Foreground`, `Background` or `Orphan`; empty to leave it to the finalizers that the object has."""
    preconditions: Json = field(default_factory=dict)
    """`uid` and `resourceVersion` that the object must have, where given."""
    dry_run: bool = False


@dataclass(frozen=True)
class Outcome:
    """Result of a write."""

    obj: Json
    """The object in the form of the resource, or its Scale."""
    created: bool = False
    warnings: tuple[str, ...] = ()
