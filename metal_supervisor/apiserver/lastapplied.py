"""From client-side to server-side apply: what kubectl wrote into its annotation is no conflict for kubectl.

`kubectl apply` keeps what was applied in an annotation, and owns it as `kubectl-client-side-apply`. When the same
user says `--server-side`, which comes as the manager `kubectl`, fields that are still as the annotation has them are
theirs to change; and the annotation follows what is applied, so that there is a way back.
"""

from __future__ import annotations

import json
from typing import Any

from .codec import clone, section
from .errors import ApiError, Json
from .fields import Path, leaves
from .metadata import MAX_ANNOTATIONS_BYTES
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
    """Brings the annotation, where there is one, up to a declaration."""
    annotations = section(merged, "metadata", "annotations")
    if ANNOTATION not in annotations:
        return
    applied = clone(declaration)
    section(applied, "metadata", "annotations").pop(ANNOTATION, None)
    annotations[ANNOTATION] = json.dumps(applied, sort_keys=True, ensure_ascii=False, separators=(",", ":")) + "\n"
    if sum(len(name.encode()) + len(value.encode()) for name, value in annotations.items()) > MAX_ANNOTATIONS_BYTES:
        del annotations[ANNOTATION]
