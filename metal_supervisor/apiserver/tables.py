"""Tables: the columns that `kubectl get` prints.

The server makes them, so that a client needs to know nothing about a kind: from the printer columns of
its CRD, or from the list below for the built-in kinds, with the columns kubectl users know.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

from .codec import encode, listed, now, parse_time, section
from .errors import Json
from .resources import Resource, partial_metadata, to_core_event

_FILTER = re.compile(r"""\?\(\s*@\.([\w.\-\\/]+)\s*==\s*["']([^"']*)["']\s*\)""")
_TOKEN = re.compile(r"\[(\?\(.*?\)|\*)\]|\.([^.\[]+)")


Column: TypeAlias = "tuple[Json, Callable[[Json], Any]]"
"""Definition of a column as in a CRD, and the function that fills its cell."""

_DEFAULTS: Json = {"type": "string", "format": "", "description": "", "priority": 0}
"""Parts of a definition that a column may leave out."""


def table(resource: Resource, objects: Iterable[Json], metadata: Json, *, include: str, header: bool) -> Json:
    """A `Table` of objects. `include`: `Object` puts each whole object into its row, anything else its metadata."""
    columns: list[Column] = [_NAME, *((declared, partial(_declared_cell, declared)) for declared in resource.columns)]
    if not resource.columns:
        columns = [_NAME, *(() if resource.custom else _BUILT_IN.get(resource.kind, ())), _AGE]
    if resource.is_event:
        columns = _EVENT
    rows: list[Json] = []
    for obj in objects:
        shown = to_core_event(obj) if resource.is_event else obj
        included = obj if include == "Object" else partial_metadata(obj)
        rows.append({"cells": [cell(shown) for _, cell in columns], "object": included})
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata,
        "columnDefinitions": [_definition(declared) for declared, _ in columns] if header else None,
        "rows": rows,
    }


def _definition(declared: Json) -> Json:
    return {**_DEFAULTS, **{name: part for name, part in declared.items() if name != "jsonPath"}}


# ---- ages --------------------------------------------------------------------------------------


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "y": 365 * 86400}
_AGES = (
    (120, "s", ""),
    (600, "m", "s"),
    (3 * 3600, "m", ""),
    (8 * 3600, "h", "m"),
    (48 * 3600, "h", ""),
    (8 * 86400, "d", "h"),
    (2 * 365 * 86400, "d", ""),
    (8 * 365 * 86400, "y", "d"),
    (float("inf"), "y", ""),
)
"""(below so many seconds, unit, unit of the rest, which is left out if empty)."""


def human_age(seconds: float) -> str:
    """A duration as kubectl prints it: 119s, 2m, 9m59s, 179m, 7h59m, 47h, 7d23h, 729d, 2y, 8y."""
    total = max(int(seconds), 0)
    if int(seconds) < -1:
        return "<invalid>"
    unit, small_unit = next((unit, small_unit) for below, unit, small_unit in _AGES if total < below)
    small = total % _SECONDS[unit] // _SECONDS[small_unit] if small_unit else 0
    return f"{total // _SECONDS[unit]}{unit}" + (f"{small}{small_unit}" if small else "")


def age_of(text: Any) -> str:
    """Time since an RFC 3339 text."""
    moment = parse_time(text)
    return human_age((now() - moment).total_seconds()) if moment else "<unknown>"


# ---- columns of CRDs ---------------------------------------------------------------------------


def find(obj: Any, json_path: str) -> list[Any]:
    """Everything a printer column's path finds, e.g. `.status.conditions[?(@.type=="Ready")].status`."""
    found = [obj]
    for bracket, name in _TOKEN.findall(json_path if json_path.startswith((".", "[")) else "." + json_path):
        found = [inner for outer in found for inner in _step(outer, bracket, name)]
    return found


def _step(value: Any, bracket: str, name: str) -> list[Any]:
    """The values that one step of a path leads to."""
    members = list(value.values()) if isinstance(value, dict) else listed(value)
    if bracket == "*":
        return members
    if condition := _FILTER.fullmatch(bracket):
        return [member for member in members if find(member, "." + condition[1]) == [condition[2]]]
    return [value[name]] if isinstance(value, dict) and name in value else []


def _declared_cell(declared: Json, obj: Json) -> Any:
    values = find(obj, declared["jsonPath"])
    if not values:
        return None
    if declared["type"] == "date":
        return age_of(values[0])
    if declared["type"] == "string":
        return ",".join(value if isinstance(value, str) else encode(value).decode() for value in values)
    return values[0]


# ---- columns of built-in kinds -----------------------------------------------------------------


def _first(obj: Json, *paths: str) -> Any:
    """The first value at any of these paths that is not empty."""
    return next((value for path in paths for value in find(obj, path) if value), None)


def _at(name: str, path: str, missing: str = "", **more: Any) -> Column:
    return {"name": name, **more}, lambda obj: _first(obj, path) or missing


def _service_ports(obj: Json) -> str:
    shown = []
    for port in listed(section(obj, "spec").get("ports")):
        number = f"{port.get('port')}:{port['nodePort']}" if port.get("nodePort") else f"{port.get('port')}"
        shown.append(f"{number}/{port.get('protocol', 'TCP')}")
    return ",".join(shown) or "<none>"


def _shortened(values: list[str]) -> str:
    extra = f" + {len(values) - 3} more..." if len(values) > 3 else ""
    return ",".join(values[:3]) + extra or "<unset>"


def _event_object(event: Json) -> str:
    about = section(event, "involvedObject")
    return f"{str(about.get('kind', '')).lower()}/{about.get('name', '')}"


def _last_seen(event: Json) -> str:
    return age_of(_first(event, ".series.lastObservedTime", ".lastTimestamp", ".eventTime"))


_NAME = _at("Name", ".metadata.name", format="name")
_AGE: Column = ({"name": "Age"}, lambda obj: age_of(_first(obj, ".metadata.creationTimestamp")))
_DATA: Column = ({"name": "Data"}, lambda obj: len(section(obj, "data")) + len(section(obj, "binaryData")))
_BUILT_IN: dict[str, list[Column]] = {
    "Service": [
        _at("Type", ".spec.type"),
        _at("Cluster-IP", ".spec.clusterIP", "<none>"),
        ({"name": "External-IP"}, lambda obj: ",".join(find(obj, ".spec.externalIPs[*]")) or "<none>"),
        ({"name": "Port(s)"}, _service_ports),
    ],
    "EndpointSlice": [
        _at("AddressType", ".addressType"),
        ({"name": "Ports"}, lambda obj: _shortened([str(port.get("port", "*")) for port in find(obj, ".ports[*]")])),
        ({"name": "Endpoints"}, lambda obj: _shortened(find(obj, ".endpoints[*].addresses[*]"))),
    ],
    "Lease": [_at("Holder", ".spec.holderIdentity")],
    "Namespace": [_at("Status", ".status.phase")],
    "ConfigMap": [_DATA],
    "Secret": [_at("Type", ".type"), _DATA],
}
"""Columns between the name and the age."""
_EVENT: list[Column] = [
    ({"name": "Last Seen"}, _last_seen),
    _at("Type", ".type"),
    _at("Reason", ".reason"),
    ({"name": "Object"}, _event_object),
    ({"name": "Message"}, lambda event: str(event.get("message") or "").strip()),
]
