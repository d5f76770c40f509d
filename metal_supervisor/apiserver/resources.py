"""Registry of resources: a table of built-in ones, and those that CRDs add and remove; and what a request asks of one.

A `Resource` is one kind in one version under one address. Several may share storage: versions of a CRD, and the two
groups of Events. Between a stored object and the one that a client sees, only the apiVersion and such names differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from . import schemas
from .codec import listed, section
from .errors import Json, conflict, no_such_path, not_found
from .storage import Name, ObjectStore

ALL_VERBS = ("create", "delete", "get", "list", "patch", "update", "watch")
NAMESPACES = "/namespaces"
SERVICES = "/services"
EVENTS = "/events"
DEFINITIONS = "apiextensions.k8s.io/customresourcedefinitions"
"""Names under which objects of these kinds are stored."""


@dataclass(frozen=True, eq=False)
class Resource:
    """One kind under one address."""

    group: str
    """Empty for the core group."""
    version: str
    plural: str
    kind: str
    schema: Json
    """Structural schema of the whole object."""
    namespaced: bool = True
    singular: str = ""
    """Name of one; empty if it is the kind in lower case."""
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    list_kind: str = ""
    """Kind of a list; empty if it is the kind and `List`."""
    status: bool = False
    """`/status` is a subresource of its own."""
    scale: Json | None = None
    """`subresources.scale` of a CRD: the paths of the replica counts, and of the selector as text."""
    columns: tuple[Json, ...] = ()
    """`additionalPrinterColumns` of a CRD."""
    custom: bool = False
    """A CRD defines it."""
    storage: str = ""
    """Name under which its objects are stored; shared by resources that are views of the same objects."""
    verbs: tuple[str, ...] = ALL_VERBS
    selectable: tuple[str, ...] = ()
    """Fields that a fieldSelector may name, beyond name and namespace."""
    generation: bool = False
    """`metadata.generation` counts changes of the spec."""
    field_names: dict[str, str] = field(default_factory=dict)
    """Names here of the fields that are stored under other ones."""

    @property
    def group_version(self) -> str:
        """`v1` or `discovery.k8s.io/v1`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def storage_key(self) -> str:
        """Name of the storage of its objects."""
        return self.storage or f"{self.group}/{self.plural}"

    @property
    def is_event(self) -> bool:
        """True if its objects are Events, in either group."""
        return self.storage_key == EVENTS

    @property
    def subresources(self) -> list[str]:
        """Names of its subresources."""
        return [name for name, has in (("status", self.status), ("scale", self.scale is not None)) if has]

    def view(self, stored: Json) -> Json:
        """A stored object in the form of this resource; it may share structure with the stored one."""
        obj = _renamed(stored, self.field_names) if self.field_names else stored
        if obj.get("apiVersion") == self.group_version and obj.get("kind") == self.kind:
            return obj
        return {**obj, "apiVersion": self.group_version, "kind": self.kind}

    def stored_form(self, obj: Json) -> Json:
        """The reverse of `view`."""
        return {**to_core_event(obj), "apiVersion": "v1"} if self.field_names else obj


_CORE_NAMES = {new: old for old, new in schemas.EVENT_NAMES.items()}


def _renamed(event: Json, names: dict[str, str]) -> Json:
    return {names.get(name, name): value for name, value in event.items()}


def to_core_event(event: Json) -> Json:
    """An Event of either group in the form of `v1`, as which they are stored."""
    return _renamed(event, _CORE_NAMES)


def partial_metadata(obj: Json) -> Json:
    """The metadata of an object, as `PartialObjectMetadata`."""
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": obj["metadata"]}


EVENT_FIELDS = tuple(f"involvedObject.{name}" for name in schemas.REFERENCE_FIELDS)
REGARDING_FIELDS = tuple(f"regarding.{name}" for name in schemas.REFERENCE_FIELDS)

ACCESS_REVIEW = Resource(
    "authorization.k8s.io",
    "v1",
    "selfsubjectaccessreviews",
    "SelfSubjectAccessReview",
    schemas.ANYTHING,
    namespaced=False,
    verbs=("create",),
)

BUILT_IN = (
    Resource(
        "",
        "v1",
        "namespaces",
        "Namespace",
        schemas.NAMESPACE,
        namespaced=False,
        short_names=("ns",),
        status=True,
    ),
    Resource(
        "",
        "v1",
        "services",
        "Service",
        schemas.SERVICE,
        short_names=("svc",),
        categories=("all",),
        status=True,
    ),
    Resource(
        "",
        "v1",
        "events",
        "Event",
        schemas.EVENT_CORE,
        short_names=("ev",),
        storage=EVENTS,
        selectable=(*EVENT_FIELDS, "reason", "reportingComponent", "type"),
    ),
    Resource("", "v1", "configmaps", "ConfigMap", schemas.CONFIG_MAP, short_names=("cm",)),
    Resource("", "v1", "secrets", "Secret", schemas.SECRET),
    Resource("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice", schemas.ENDPOINT_SLICE, generation=True),
    Resource("coordination.k8s.io", "v1", "leases", "Lease", schemas.LEASE),
    Resource(
        "events.k8s.io",
        "v1",
        "events",
        "Event",
        schemas.EVENT,
        short_names=("ev",),
        storage=EVENTS,
        selectable=(*REGARDING_FIELDS, "reason", "reportingController", "type"),
        field_names=schemas.EVENT_NAMES,
    ),
    Resource(
        "apiextensions.k8s.io",
        "v1",
        "customresourcedefinitions",
        "CustomResourceDefinition",
        schemas.CRD,
        namespaced=False,
        short_names=("crd", "crds"),
        categories=("api-extensions",),
        status=True,
        generation=True,
    ),
    ACCESS_REVIEW,
)


def _of_version(spec: Json, version: Json) -> Resource:
    names, subresources = spec["names"], section(version, "subresources")
    return Resource(
        group=spec["group"],
        version=version["name"],
        plural=names["plural"],
        kind=names["kind"],
        schema=schemas.with_root(version["schema"]["openAPIV3Schema"]),
        namespaced=spec["scope"] == "Namespaced",
        singular=names["singular"],
        short_names=tuple(listed(names.get("shortNames"))),
        categories=tuple(listed(names.get("categories"))),
        list_kind=names["listKind"],
        status="status" in subresources,
        scale=subresources.get("scale"),
        columns=tuple(listed(version.get("additionalPrinterColumns"))),
        custom=True,
        generation=True,
    )


class Registry:
    """The resources that exist now. Replaced as a whole on change, so readers need no lock."""

    def __init__(self, changed: Callable[[], None]) -> None:
        """`changed` is called after each change: a watch ends when its resource is gone."""
        self._changed = changed
        self._by_address = {(r.group, r.version, r.plural): r for r in BUILT_IN}

    def find(self, group: str, version: str, plural: str) -> Resource | None:
        """The resource under an address, None when there is none."""
        return self._by_address.get((group, version, plural))

    def all(self) -> list[Resource]:
        """Every resource, in the order of installation."""
        return list(self._by_address.values())

    def members(self, group: str, version: str) -> list[Resource]:
        """The resources of a group in one version. Raises ApiError 404 when there are none."""
        found = [resource for resource in self.all() if (resource.group, resource.version) == (group, version)]
        if not found:
            raise no_such_path()
        return found

    def of_kind(self, api_version: str, kind: str) -> Resource | None:
        """The resource that an object reference names; any version of its group will do."""
        group = api_version.partition("/")[0] if "/" in api_version else ""
        return next((r for r in self.all() if r.group == group and r.kind == kind), None)

    def versions(self, group: str) -> list[str]:
        """Versions of a group, preferred one first; empty when the group does not exist."""
        return list(dict.fromkeys(r.version for r in self.all() if r.group == group))

    def groups(self) -> list[str]:
        """Named groups, in the order of installation."""
        return list(dict.fromkeys(r.group for r in self.all() if r.group))

    def install(self, crd: Json, *, gone: bool = False) -> None:
        """Replace the resources that a CRD defines by those of its present versions, by none if it is `gone`."""
        group, plural = crd["spec"]["group"], crd["spec"]["names"]["plural"]
        kept = {a: r for a, r in self._by_address.items() if not (r.custom and (r.group, r.plural) == (group, plural))}
        # The version that is stored is the preferred one.
        for version in () if gone else sorted(crd["spec"]["versions"], key=lambda version: not version["storage"]):
            if version["served"]:
                kept.setdefault((group, version["name"], plural), _of_version(crd["spec"], version))
        self._by_address = kept
        self._changed()


# ---- values of a request -------------------------------------------------------------------------


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

    def check_unchanged(self, current: Json, wanted: Json) -> None:
        """Raise ApiError 409 if `wanted`, preconditions or metadata, has another version or uid than the object."""
        for name in ("resourceVersion", "uid"):
            if wanted.get(name) not in (None, "", current["metadata"][name]):
                why = "the object has been modified; please apply your changes to the latest version and try again"
                raise conflict(self.resource.group, self.resource.plural, self.name, why)


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
