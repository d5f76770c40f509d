"""Migration from client-side to server-side apply: fields in kubectl's annotation are no conflict for kubectl.

`kubectl apply` keeps the applied configuration in an annotation, and owns it as `kubectl-client-side-apply`. When the
same user switches to `--server-side`, which comes as the manager `kubectl`, they may change fields that still have
the annotation's values; and the annotation is updated to what is applied, so that there is a way back.
"""

from __future__ import annotations

import json
from typing import Any

from .codec import clone, section
from .errors import ApiError, Json
from .fields import Path, leaves
from .metadata import annotations_too_long
from .resources import Resource
from .typed import check

ANNOTATION = "kubectl.kubernetes.io/last-applied-configuration"
MANAGER = "kubectl"


def still_as_applied(resource: Resource, live: Json) -> frozenset[Path]:
    """The fields whose value is the one in the annotation; none if that isn't readable."""
    schema, group_version = resource.schema, resource.group_version
    try:
        applied: Any = json.loads(section(live, "metadata", "annotations").get(ANNOTATION) or "")
        if not isinstance(applied, dict) or applied.get("apiVersion") != group_version:
            return frozenset()
        check(schema, applied, group_version)
    except (ValueError, TypeError, RecursionError, ApiError):
        return frozenset()
    present = leaves(schema, live)
    return frozenset(
        path
        for path, value in leaves(schema, applied).items()
        if path in present and present[path] == value and type(present[path]) is type(value)
    )


def follow(merged: Json, declaration: Json) -> None:
    """Update the annotation, if there is one, to a declaration."""
    annotations = section(merged, "metadata", "annotations")
    if ANNOTATION not in annotations:
        return
    applied = clone(declaration)
    section(applied, "metadata", "annotations").pop(ANNOTATION, None)
    annotations[ANNOTATION] = json.dumps(applied, sort_keys=True, ensure_ascii=False, separators=(",", ":")) + "\n"
    if annotations_too_long(annotations):
        del annotations[ANNOTATION]
