"""CustomResourceDefinitions: their validation, and the status that tells clients that a kind is served."""

from __future__ import annotations

from typing import Any

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
    {
        "type": schemas.choice(["array", "boolean", "integer", "number", "object", "string"]),
        **schemas.plain("pattern", "format", "description", "x-kubernetes-list-type", "x-kubernetes-map-type"),
        **{name: {"type": "array"} for name in ("required", "enum", "x-kubernetes-list-map-keys")},
        **{name: {"type": "integer"} for name in _COUNTS},
        **{name: {"type": "number"} for name in ("minimum", "maximum", "multipleOf")},
    },
    anyOf=[{"required": ["items"]}, {"properties": {"type": {"not": {"enum": ["array"]}}}}],
)
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
    spec = section(crd, "spec")
    names = section(spec, "names")
    if names.get("kind"):
        names.setdefault("singular", str(names["kind"]).lower())
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


def validate_crd(crd: Json, previous: Json | None) -> list[Problem]:
    """Problems of a CRD that has its defaults."""
    spec, names = section(crd, "spec"), section(crd, "spec", "names")
    problems: list[Problem] = []
    name, wanted = section(crd, "metadata").get("name"), f"{names.get('plural')}.{spec.get('group')}"
    if name != wanted:
        detail = 'must be spec.names.plural+"."+spec.group'
        problems.append(invalid_value("metadata.name", name, detail))
    problems += _version_problems(spec["versions"])
    old = section(previous or {}, "spec")
    if old and old.get("scope") != spec.get("scope"):
        problems.append(invalid_value("spec.scope", spec.get("scope"), "field is immutable"))
    if section(spec, "conversion").get("strategy") == "Webhook":
        problems.append(unsupported_value("spec.conversion.strategy", "Webhook", ["None"]))
    return problems


def _version_problems(versions: list[Any]) -> list[Problem]:
    problems: list[Problem] = []
    if sum(version["storage"] for version in versions) != 1:
        detail = "must have exactly one version marked as storage version"
        problems.append(invalid_value("spec.versions", [version["name"] for version in versions], detail))
    for index, version in enumerate(versions):
        schema, where = version["schema"]["openAPIV3Schema"], f"spec.versions[{index}].schema.openAPIV3Schema"
        if section(schema).get("type") != "object":
            problems.append(invalid_value(f"{where}.type", section(schema).get("type"), "must be object at the root"))
        else:
            problems += validate(_SCHEMA, schema, where)
    return problems
