"""Schemas of the built-in resources, in the same form as those of CRDs.

One form for all means that pruning, defaults, type checks, field ownership, list keys and `kubectl
explain` need no second mechanism. Only rules that such schemas cannot express are code, in `builtins.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import Json


def _builder(form: Json) -> Callable[..., Json]:
    """A function that makes fields of one form: `build(description, **further keywords of the schema)`."""

    def build(description: str = "", **more: Any) -> Json:
        return {**form, **more, **({"description": description} if description else {})}

    return build


text = _builder({"type": "string"})
whole = _builder({"type": "integer", "format": "int32"})
flag = _builder({"type": "boolean"})
texts = _builder({"type": "array", "items": {"type": "string"}})
"""A list of strings, owned whole."""
mapping = _builder({"type": "object", "additionalProperties": {"type": "string"}})
"""Strings by name."""
anything = _builder({"x-kubernetes-preserve-unknown-fields": True})
"""A field without a declared type."""


def plain(*names: str) -> Json:
    """String fields by name."""
    return {name: text() for name in names}


def choice(values: list[str], description: str = "", **more: Any) -> Json:
    """A string field with a fixed list of values."""
    return text(description, enum=values, **more)


def fields(description: str = "", /, **properties: Json) -> Json:
    """An object with declared fields."""
    return _builder({"type": "object", "properties": properties})(description)


def items(item: Json, description: str = "", keys: list[str] | None = None, merge_key: str = "") -> Json:
    """A list of objects; owned item by item when it has keys."""
    schema: Json = {"type": "array", "items": item}
    if keys:
        schema |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": keys}
    if merge_key:
        schema |= {"x-kubernetes-patch-merge-key": merge_key, "x-kubernetes-patch-strategy": "merge"}
    return _builder(schema)(description)


TIME: Json = {"type": "string", "format": "date-time"}
_LONG: Json = {"type": "integer", "format": "int64"}
_WHOLE_MAP: Json = {"x-kubernetes-map-type": "atomic"}
"""Of an object that is owned whole."""
_OWNER = fields(**plain("apiVersion", "kind", "name", "uid"), controller=flag(), blockOwnerDeletion=flag())
METADATA = fields(
    "ObjectMeta is what every stored object has: its name, labels, owners and versions.",
    name=text("Name, unique in its namespace. Cannot be changed."),
    generateName=text("Prefix of a name the server completes."),
    namespace=text("The scope of the name."),
    labels=mapping("Keys and values by which objects are selected."),
    annotations=mapping("Keys and values that tools keep with an object."),
    finalizers=texts("Who must let go before a deleted object vanishes.")
    | {"x-kubernetes-list-type": "set", "x-kubernetes-patch-strategy": "merge"},
    ownerReferences=items(
        _OWNER | _WHOLE_MAP | {"required": ["apiVersion", "kind", "name", "uid"]},
        "Objects with which this one is deleted.",
        keys=["uid"],
        merge_key="uid",
    ),
    uid=text("Identity of this object in time and space."),
    resourceVersion=text("Changes with every write."),
    generation=_LONG | {"description": "Counts changes of the spec."},
    creationTimestamp=TIME,
    deletionTimestamp=TIME,
    deletionGracePeriodSeconds=_LONG,
    selfLink=text(),
    managedFields=items(anything()),
)
_ROOT = {
    "apiVersion": text("Group and version of this representation."),
    "kind": text("What this object is."),
    "metadata": METADATA,
}


def with_root(schema: Json) -> Json:
    """The schema of a kind with the fields that all objects have, which are the same for all."""
    return {**schema, "properties": {**schema.get("properties", {}), **_ROOT}}


def _kind(description: str, /, **properties: Json) -> Json:
    return with_root(fields(description, **properties))


_CONDITION = fields(
    **plain("type", "reason", "message", "lastTransitionTime", "lastHeartbeatTime"),
    status=choice(["True", "False", "Unknown"]),
    observedGeneration={"type": "integer"},
)
CONDITIONS = items(_CONDITION, keys=["type"], merge_key="type")
REFERENCE_FIELDS = ("apiVersion", "fieldPath", "kind", "name", "namespace", "resourceVersion", "uid")
REFERENCE = fields(**plain(*REFERENCE_FIELDS)) | _WHOLE_MAP

NAMESPACE = _kind(
    "A scope for names.",
    spec=fields(finalizers=texts(default=["kubernetes"])) | {"default": {}},
    status=fields(phase=text(default="Active"), conditions=CONDITIONS) | {"default": {}},
)

_SERVICE_PORT = fields(
    name=text("Name of the port; needed when there are several."),
    port=whole("Port of the Service."),
    targetPort={"x-kubernetes-int-or-string": True, "description": "Number or name of the endpoints' port."},
    protocol=choice(["SCTP", "TCP", "UDP"], default="TCP"),
    appProtocol=text("Application protocol, e.g. http."),
    nodePort=whole("Port on every node, for NodePort and LoadBalancer."),
)
_SERVICE_SPEC = fields(
    "What is wanted.",
    type=choice(
        ["ClusterIP", "ExternalName", "LoadBalancer", "NodePort"], "How the Service is exposed.", default="ClusterIP"
    ),
    ports=items(_SERVICE_PORT, "The ports of the Service.", keys=["port", "protocol"], merge_key="port"),
    selector=mapping("Labels of the Pods behind it; none when endpoints are written by another client.") | _WHOLE_MAP,
    clusterIP=text("Virtual address; chosen when unset, None for a headless Service. Immutable."),
    clusterIPs=texts("All virtual addresses."),
    ipFamilies=texts(),
    ipFamilyPolicy=choice(["PreferDualStack", "RequireDualStack", "SingleStack"]),
    externalIPs=texts(),
    externalTrafficPolicy=choice(["Cluster", "Local"]),
    internalTrafficPolicy=choice(["Cluster", "Local"]),
    sessionAffinity=choice(["ClientIP", "None"], default="None"),
    sessionAffinityConfig=anything(),
    **plain("externalName", "loadBalancerIP", "loadBalancerClass", "trafficDistribution"),
    loadBalancerSourceRanges=texts(),
    allocateLoadBalancerNodePorts=flag(),
    healthCheckNodePort=whole(),
    publishNotReadyAddresses=flag(),
)
SERVICE = _kind(
    "A name and an address under which a set of endpoints is reached.",
    spec=_SERVICE_SPEC | {"default": {}},
    status=fields("What is.", loadBalancer=anything(default={}), conditions=CONDITIONS) | {"default": {}},
)

_ENDPOINT = fields(
    addresses=texts("Addresses of one endpoint; consumers use the first.", maxItems=100),
    conditions=fields(ready=flag(), serving=flag(), terminating=flag()) | {"default": {}},
    **plain("hostname", "nodeName", "zone"),
    targetRef=REFERENCE,
    deprecatedTopology=mapping(),
    hints=anything(),
)
_ENDPOINT_PORT = fields(
    name=text("Must equal the name of the Service's port.", default=""),
    protocol=choice(["SCTP", "TCP", "UDP"], default="TCP"),
    port=whole(),
    appProtocol=text(),
)
ENDPOINT_SLICE = _kind(
    "A part of the endpoints of a Service.",
    addressType=choice(["FQDN", "IPv4", "IPv6"], "Kind of all addresses in this slice. Immutable."),
    endpoints=items(_ENDPOINT, "The endpoints, owned whole: one slice has one writer.") | {"maxItems": 1000},
    ports=items(_ENDPOINT_PORT, "The ports every endpoint listens on.") | {"maxItems": 20_000},
) | {"required": ["addressType"]}

LEASE = _kind(
    "A claim on something, or a sign of life.",
    spec=fields(
        holderIdentity=text("Who holds it."),
        acquireTime=text("When the holder took it, with microseconds."),
        renewTime=text("When the holder last renewed it, with microseconds."),
        leaseDurationSeconds=whole("How long others wait after the last renewal.", minimum=1),
        leaseTransitions=whole(minimum=0),
        **plain("preferredHolder", "strategy"),
    ),
)

EVENT_CORE = _kind(
    "A report that something happened.",
    involvedObject=REFERENCE,
    reason=text("Why, one word for machines."),
    message=text("What, one sentence for people."),
    source=fields(component=text(), host=text()),
    count=whole(),
    type=text("Normal or Warning."),
    eventTime=text("When it was first seen, with microseconds."),
    series=fields(count=whole(), lastObservedTime=text()),
    action=text("What the reporter did."),
    related=REFERENCE,
    **dict.fromkeys(("firstTimestamp", "lastTimestamp"), TIME),
    **plain("reportingComponent", "reportingInstance"),
)
EVENT_NAMES = {
    "involvedObject": "regarding",
    "message": "note",
    "source": "deprecatedSource",
    "firstTimestamp": "deprecatedFirstTimestamp",
    "lastTimestamp": "deprecatedLastTimestamp",
    "count": "deprecatedCount",
    "reportingComponent": "reportingController",
}
"""Names of the fields of `v1` in `events.k8s.io/v1`, where they differ."""
EVENT = {**EVENT_CORE, "properties": {EVENT_NAMES.get(name, name): f for name, f in EVENT_CORE["properties"].items()}}

_BYTES: Json = {"type": "object", "additionalProperties": {"type": "string", "format": "byte"}}
CONFIG_MAP = _kind("Settings as text.", data=mapping(), binaryData=_BYTES, immutable=flag())
SECRET = _kind(
    "Settings not to be shown.", data=_BYTES, stringData=mapping(), type=text(default="Opaque"), immutable=flag()
)

_LABEL = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
_SCALE = fields(
    specReplicasPath=text(pattern=r"^\.spec\."),
    statusReplicasPath=text(pattern=r"^\.status\."),
    labelSelectorPath=text(),
)
_COLUMN = fields(**plain("name", "type", "format", "description", "jsonPath"), priority=whole())
_VERSION = fields(
    name=text(pattern=_LABEL),
    served=flag(default=True),
    storage=flag(default=False),
    deprecated=flag(),
    deprecationWarning=text(),
    schema=fields(openAPIV3Schema=anything()) | {"required": ["openAPIV3Schema"]},
    subresources=fields(status=anything(), scale=_SCALE | {"required": ["specReplicasPath", "statusReplicasPath"]}),
    additionalPrinterColumns=items(_COLUMN | {"required": ["name", "type", "jsonPath"]}),
    selectableFields=items(fields(jsonPath=text())),
) | {"required": ["name", "schema"]}
_NAMES = fields(
    plural=text(pattern=_LABEL),
    singular=text(pattern=_LABEL),
    **plain("kind", "listKind"),
    shortNames=texts(),
    categories=texts(),
) | {"required": ["kind", "plural"]}
_CONVERSION = fields(strategy=choice(["None", "Webhook"]), webhook=anything())
_CRD_SPEC = fields(
    group=text(pattern="^.+[.].+$"),
    names=_NAMES,
    scope=choice(["Cluster", "Namespaced"]),
    versions=items(_VERSION, "All versions, owned whole."),
    conversion=_CONVERSION | {"default": {"strategy": "None"}},
    preserveUnknownFields=flag(),
) | {"required": ["group", "names", "scope", "versions"]}
CRD = _kind(
    "A kind of object that is added to this API.",
    spec=_CRD_SPEC,
    status=fields(acceptedNames=anything(), conditions=CONDITIONS, storedVersions=texts()),
) | {"required": ["spec"]}

REVIEW = _kind("Asks what I may do.", spec=anything(), status=anything())
DELETE_OPTIONS = fields(
    dryRun=texts(),
    gracePeriodSeconds={"type": "integer"},
    orphanDependents=flag(),
    preconditions=fields(**plain("resourceVersion", "uid")),
    propagationPolicy=text(),
)
