"""Schemas of the built-in resources, in the same form as those of CRDs.

One form for all means that pruning, defaults, type checks, field ownership, list keys and `kubectl
explain` need no second mechanism. Only rules that such schemas cannot express are code, in `builtins.py`.
"""

from __future__ import annotations

from typing import Any

from .errors import Json

TEXT: Json = {"type": "string"}
WHOLE: Json = {"type": "integer", "format": "int32"}
FLAG: Json = {"type": "boolean"}
TEXTS: Json = {"type": "array", "items": TEXT}
"""A list of strings, owned whole."""
MAPPING: Json = {"type": "object", "additionalProperties": TEXT}
"""Strings by name."""
ANYTHING: Json = {"x-kubernetes-preserve-unknown-fields": True}
"""A field without a declared type."""


def plain(*names: str) -> Json:
    """String fields by name."""
    return dict.fromkeys(names, TEXT)


def choice(*values: str, **more: Any) -> Json:
    """A string field with a fixed list of values."""
    return {**TEXT, "enum": list(values), **more}


def fields(**properties: Json) -> Json:
    """An object with declared fields."""
    return {"type": "object", "properties": properties}


def items(item: Json, *keys: str, merge_key: str = "", **more: Any) -> Json:
    """A list of objects; owned item by item when it has keys."""
    schema: Json = {"type": "array", "items": item, **more}
    if keys:
        schema |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}
        schema |= {"x-kubernetes-patch-merge-key": merge_key, "x-kubernetes-patch-strategy": "merge"}
    return schema


TIME: Json = {"type": "string", "format": "date-time"}
_LONG: Json = {"type": "integer", "format": "int64"}
_WHOLE_MAP: Json = {"x-kubernetes-map-type": "atomic"}
"""Of an object that is owned whole."""
_OWNER_NAMES = ("apiVersion", "kind", "name", "uid")
_NONEMPTY: Json = {**TEXT, "minLength": 1}
_OWNER = fields(**dict.fromkeys(_OWNER_NAMES, _NONEMPTY), controller=FLAG, blockOwnerDeletion=FLAG)
_OWNER |= {"required": list(_OWNER_NAMES)}
METADATA = fields(
    **plain("name", "generateName", "namespace", "uid", "resourceVersion", "selfLink"),
    **dict.fromkeys(("labels", "annotations"), MAPPING),
    **dict.fromkeys(("creationTimestamp", "deletionTimestamp"), TIME),
    **dict.fromkeys(("generation", "deletionGracePeriodSeconds"), _LONG),
    finalizers={**TEXTS, "x-kubernetes-list-type": "set", "x-kubernetes-patch-strategy": "merge"},
    ownerReferences=items(_OWNER | _WHOLE_MAP, "uid", merge_key="uid"),
    managedFields=items(ANYTHING),
)
_ROOT = {**plain("apiVersion", "kind"), "metadata": METADATA}


def with_root(schema: Json) -> Json:
    """The schema of a kind with the fields that all objects have, which are the same for all."""
    return {**schema, "properties": {**schema.get("properties", {}), **_ROOT}}


def _kind(**properties: Json) -> Json:
    return with_root(fields(**properties))


_CONDITION = fields(
    **plain("type", "reason", "message", "lastTransitionTime", "lastHeartbeatTime"),
    status=choice("True", "False", "Unknown"),
    observedGeneration={"type": "integer"},
)
CONDITIONS = items(_CONDITION, "type", merge_key="type")
REFERENCE_FIELDS = ("apiVersion", "fieldPath", "kind", "name", "namespace", "resourceVersion", "uid")
REFERENCE = fields(**plain(*REFERENCE_FIELDS)) | _WHOLE_MAP

NAMESPACE = _kind(
    spec=fields(finalizers={**TEXTS, "default": ["kubernetes"]}) | {"default": {}},
    status=fields(phase={**TEXT, "default": "Active"}, conditions=CONDITIONS) | {"default": {}},
)

_PROTOCOL = choice("SCTP", "TCP", "UDP", default="TCP")
_SERVICE_PORT = fields(
    **plain("name", "appProtocol"),
    port={**WHOLE, "minimum": 1, "maximum": 65535},
    targetPort={"x-kubernetes-int-or-string": True},
    protocol=_PROTOCOL,
    nodePort=WHOLE,
) | {"required": ["port"]}
_SERVICE_SPEC = fields(
    **plain("clusterIP", "externalName", "loadBalancerIP", "loadBalancerClass", "trafficDistribution"),
    **dict.fromkeys(("clusterIPs", "ipFamilies", "externalIPs", "loadBalancerSourceRanges"), TEXTS),
    **dict.fromkeys(("allocateLoadBalancerNodePorts", "publishNotReadyAddresses"), FLAG),
    **dict.fromkeys(("externalTrafficPolicy", "internalTrafficPolicy"), choice("Cluster", "Local")),
    type=choice("ClusterIP", "ExternalName", "LoadBalancer", "NodePort", default="ClusterIP"),
    ports=items(_SERVICE_PORT, "port", "protocol", merge_key="port"),
    selector=MAPPING | _WHOLE_MAP,
    ipFamilyPolicy=choice("PreferDualStack", "RequireDualStack", "SingleStack"),
    sessionAffinity=choice("ClientIP", "None", default="None"),
    sessionAffinityConfig=ANYTHING,
    healthCheckNodePort=WHOLE,
)
SERVICE = _kind(
    spec=_SERVICE_SPEC | {"default": {}},
    status=fields(loadBalancer={**ANYTHING, "default": {}}, conditions=CONDITIONS) | {"default": {}},
)

_ENDPOINT = fields(
    **plain("hostname", "nodeName", "zone"),
    addresses={**TEXTS, "maxItems": 100},
    conditions=fields(ready=FLAG, serving=FLAG, terminating=FLAG) | {"default": {}},
    targetRef=REFERENCE,
    deprecatedTopology=MAPPING,
    hints=ANYTHING,
)
_ENDPOINT_PORT = fields(name={**TEXT, "default": ""}, protocol=_PROTOCOL, port=WHOLE, appProtocol=TEXT)
ENDPOINT_SLICE = _kind(
    addressType=choice("FQDN", "IPv4", "IPv6"),
    # Owned whole: a slice has one writer.
    endpoints=items(_ENDPOINT, maxItems=1000),
    ports=items(_ENDPOINT_PORT, maxItems=20_000),
) | {"required": ["addressType"]}

LEASE = _kind(
    spec=fields(
        **plain("holderIdentity", "preferredHolder", "strategy"),
        **dict.fromkeys(("acquireTime", "renewTime"), TIME),
        leaseDurationSeconds={**WHOLE, "minimum": 1},
        leaseTransitions={**WHOLE, "minimum": 0},
    ),
)

EVENT_CORE = _kind(
    **plain("reason", "message", "type", "action", "reportingComponent", "reportingInstance"),
    **dict.fromkeys(("involvedObject", "related"), REFERENCE),
    **dict.fromkeys(("eventTime", "firstTimestamp", "lastTimestamp"), TIME),
    source=fields(**plain("component", "host")),
    count=WHOLE,
    series=fields(count=WHOLE, lastObservedTime=TIME),
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
CONFIG_MAP = _kind(data=MAPPING, binaryData=_BYTES, immutable=FLAG)
SECRET = _kind(data=_BYTES, stringData=MAPPING, type={**TEXT, "default": "Opaque"}, immutable=FLAG)

_LABEL: Json = {**TEXT, "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"}
_SCALE = fields(
    specReplicasPath={**TEXT, "pattern": r"^\.spec\."},
    statusReplicasPath={**TEXT, "pattern": r"^\.status\."},
    labelSelectorPath=TEXT,
)
_COLUMN = fields(**plain("name", "type", "format", "description", "jsonPath"), priority=WHOLE)
_VERSION = fields(
    name=_LABEL,
    served={**FLAG, "default": True},
    storage={**FLAG, "default": False},
    deprecated=FLAG,
    deprecationWarning=TEXT,
    schema=fields(openAPIV3Schema=ANYTHING) | {"required": ["openAPIV3Schema"]},
    subresources=fields(status=ANYTHING, scale=_SCALE | {"required": ["specReplicasPath", "statusReplicasPath"]}),
    additionalPrinterColumns=items(_COLUMN | {"required": ["name", "type", "jsonPath"]}),
    selectableFields=items(fields(jsonPath=TEXT)),
) | {"required": ["name", "schema"]}
_NAMES = fields(
    **plain("kind", "listKind"),
    **dict.fromkeys(("plural", "singular"), _LABEL),
    **dict.fromkeys(("shortNames", "categories"), TEXTS),
) | {"required": ["kind", "plural"]}
_CRD_SPEC = fields(
    group={**TEXT, "pattern": "^.+[.].+$"},
    names=_NAMES,
    scope=choice("Cluster", "Namespaced"),
    versions=items(_VERSION),
    conversion=fields(strategy=choice("None"), webhook=ANYTHING),
    preserveUnknownFields=FLAG,
) | {"required": ["group", "names", "scope", "versions"]}
CRD = _kind(
    spec=_CRD_SPEC,
    status=fields(conditions=CONDITIONS),
) | {"required": ["spec"]}

DELETE_OPTIONS = fields(
    **plain("propagationPolicy"),
    dryRun=TEXTS,
    gracePeriodSeconds={"type": "integer"},
    orphanDependents=FLAG,
    preconditions=fields(**plain("resourceVersion", "uid")),
)
