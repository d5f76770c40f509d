"""CustomResourceDefinitions: their validation, and the status that tells clients that a kind is served."""

from __future__ import annotations

from collections.abc import Iterator

from . import schemas
from .codec import listed, section, timestamp
from .errors import Json, Problem, invalid_value, unsupported_value
from .schema import validate

KIND = "apiextensions.k8s.io/customresourcedefinitions"
"""Name under which CRDs are stored."""
CLEANUP = "customresourcecleanup.apiextensions.k8s.io"
"""Finalizer that holds a CRD until its objects are gone."""

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_SCHEMA: Json = schemas.fields(
    type=schemas.choice(["array", "boolean", "integer", "number", "object", "string"]),
    **schemas.plain("pattern", "format", "description", "x-kubernetes-list-type", "x-kubernetes-map-type"),
    **{name: {"type": "array"} for name in ("required", "enum", "x-kubernetes-list-map-keys")},
    **{name: {"type": "integer"} for name in _COUNTS},
    **{name: {"type": "number"} for name in ("minimum", "maximum", "multipleOf")},
) | {"anyOf": [{"required": ["items"]}, {"properties": {"type": {"not": {"enum": ["array"]}}}}]}
"""Schema of schemas, as far as our own walkers rely on it: known types, and keywords of the right form."""
_SCHEMA["properties"] |= {
    "properties": {"type": "object", "additionalProperties": _SCHEMA},
    "additionalProperties": {"anyOf": [_SCHEMA, schemas.flag()]},
    "items": _SCHEMA,
    "not": _SCHEMA,
    **{name: {"type": "array", "items": _SCHEMA} for name in ("allOf", "anyOf", "oneOf")},
}


def default_crd(crd: Json, previous: Json | None) -> None:
    """Derived names and the status, in place."""
    spec, names = crd["spec"], crd["spec"]["names"]
    names.setdefault("singular", names["kind"].lower())
    names.setdefault("listKind", f"{names['kind']}List")
    old = section(previous or {}, "status")
    stored = [version["name"] for version in spec["versions"] if version["storage"]]
    kept = [name for name in listed(old.get("storedVersions")) if name not in stored]
    conditions = listed(old.get("conditions")) or [
        _condition("NamesAccepted", "NoConflicts", "no conflicts found"),
        _condition("Established", "InitialNamesAccepted", "the initial names have been accepted"),
    ]
    crd["status"] = {"acceptedNames": dict(names), "conditions": conditions, "storedVersions": kept + stored}


def _condition(kind: str, reason: str, message: str) -> Json:
    return {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": timestamp()}


def validate_crd(crd: Json, previous: Json | None) -> Iterator[Problem]:
    """Problems of a CRD that has its defaults."""
    spec, name = crd["spec"], crd["metadata"]["name"]
    if name != f"{spec['names']['plural']}.{spec['group']}":
        yield invalid_value("metadata.name", name, 'must be spec.names.plural+"."+spec.group')
    if sum(version["storage"] for version in spec["versions"]) != 1:
        detail = "must have exactly one version marked as storage version"
        yield invalid_value("spec.versions", [version["name"] for version in spec["versions"]], detail)
    for index, version in enumerate(spec["versions"]):
        schema, where = version["schema"]["openAPIV3Schema"], f"spec.versions[{index}].schema.openAPIV3Schema"
        if section(schema).get("type") != "object":
            yield invalid_value(f"{where}.type", section(schema).get("type"), "must be object at the root")
        else:
            yield from validate(_SCHEMA, schema, where)
    if previous and previous["spec"]["scope"] != spec["scope"]:
        yield invalid_value("spec.scope", spec["scope"], "field is immutable")
    if section(spec, "conversion").get("strategy") == "Webhook":
        yield unsupported_value("spec.conversion.strategy", "Webhook", ["None"])
