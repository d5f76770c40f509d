"""Rules of the built-in resources that a schema cannot express: defaults, formats, immutable fields."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator

from . import schemas, services
from .codec import section, timestamp
from .errors import Json, Problem, invalid_value
from .metadata import dns_label_problems
from .resources import Resource
from .schema import validate


def complete(resource: Resource, obj: Json, previous: Json | None) -> Iterable[Problem]:
    """Fill in the defaults of an object of a built-in kind, in its stored form and in place; return its problems."""
    match resource.kind:
        case "Service":
            return services.complete_service(obj, previous)
        case "CustomResourceDefinition":
            _default_crd(obj, previous)
            return _crd(obj, previous)
        case "Namespace":
            obj["metadata"].setdefault("labels", {})["kubernetes.io/metadata.name"] = obj["metadata"]["name"]
            return dns_label_problems("metadata.name", obj["metadata"]["name"])
        case "Secret":
            if plain := obj.pop("stringData", None):
                encoded = {name: base64.b64encode(text.encode()).decode() for name, text in plain.items()}
                obj["data"] = {**section(obj, "data"), **encoded}
    return []


# ---- CustomResourceDefinitions -------------------------------------------------------------------

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_SCHEMA: Json = schemas.fields(
    type=schemas.choice("array", "boolean", "integer", "number", "object", "string"),
    **schemas.plain("pattern", "format", "description", "x-kubernetes-list-type", "x-kubernetes-map-type"),
    **{name: {"type": "array"} for name in ("required", "enum", "x-kubernetes-list-map-keys")},
    **{name: {"type": "integer"} for name in _COUNTS},
    **{name: {"type": "number"} for name in ("minimum", "maximum")},
)
"""Schema of schemas, as far as our own walkers rely on it: known types, and keywords of the right form."""
_SCHEMA["properties"] |= {
    "properties": {"type": "object", "additionalProperties": _SCHEMA},
    "additionalProperties": {"properties": _SCHEMA["properties"]},
    "items": _SCHEMA,
}


def _default_crd(crd: Json, previous: Json | None) -> None:
    """Derived names and the status, in place."""
    names = crd["spec"]["names"]
    names.setdefault("singular", names["kind"].lower())
    names.setdefault("listKind", f"{names['kind']}List")
    established = {"type": "Established", "status": "True", "lastTransitionTime": timestamp()}
    crd["status"] = section(previous, "status") or {"conditions": [established]}


def _crd(crd: Json, previous: Json | None) -> Iterator[Problem]:
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
