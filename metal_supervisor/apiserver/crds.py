"""CustomResourceDefinitions: their validation, and the status that tells clients that a kind is served."""

from __future__ import annotations

from typing import Any

from .codec import listed, section, timestamp
from .errors import Json, Problem, invalid_value, required, unsupported_value

KIND = "apiextensions.k8s.io/customresourcedefinitions"
"""Name under which CRDs are stored."""
CLEANUP = "customresourcecleanup.apiextensions.k8s.io"
"""Finalizer that holds a CRD until its objects are gone."""

_TYPES = ("array", "boolean", "integer", "number", "object", "string")
_KEYWORDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("properties", "items", "not"), (dict,)),
    **dict.fromkeys(("required", "enum", "allOf", "anyOf", "oneOf", "x-kubernetes-list-map-keys"), (list,)),
    **dict.fromkeys(("pattern", "format", "description", "x-kubernetes-list-type", "x-kubernetes-map-type"), (str,)),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), (int,)),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), (int, float)),
    "additionalProperties": (dict, bool),
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
        if section(version, "schema", "openAPIV3Schema").get("type") != "object":
            problems.append(invalid_value(f"{where}.type", section(schema).get("type"), "must be object at the root"))
        else:
            problems += _schema_problems(schema, where)
    return problems


def _schema_problems(schema: Any, path: str) -> list[Problem]:
    """Only what our own walkers rely on: known types, and keywords of the right form, all the way down."""
    if not isinstance(schema, dict):
        return [invalid_value(path, schema, "must be an object")]
    problems: list[Problem] = []
    kind = schema.get("type")
    if kind is not None and kind not in _TYPES:
        problems.append(unsupported_value(f"{path}.type", kind, _TYPES))
    for name, forms in _KEYWORDS.items():
        if name in schema and not isinstance(schema[name], forms):
            problems.append(invalid_value(f"{path}.{name}", schema[name], f"must be {forms[0].__name__}"))
    if problems:
        return problems
    if kind == "array" and "items" not in schema:
        problems.append(required(f"{path}.items", "must be specified"))
    for name, inner in (schema.get("properties") or {}).items():
        problems += _schema_problems(inner, f"{path}.properties[{name}]")
    for name in ("allOf", "anyOf", "oneOf"):
        for index, inner in enumerate(schema.get(name, ())):
            problems += _schema_problems(inner, f"{path}.{name}[{index}]")
    for name in ("items", "additionalProperties", "not"):
        if isinstance(schema.get(name), dict):
            problems += _schema_problems(schema[name], f"{path}.{name}")
    return problems
