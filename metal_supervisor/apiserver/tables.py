"""Tables: the columns that `kubectl get` prints.

The server makes them, so that a client needs to know nothing about a kind: from the printer columns of
its CRD, or from the list below for the built-in kinds, with the columns kubectl users know.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from .codec import encode, listed, now, parse_time, section, whole_number
from .errors import Json
from .resources import Resource, partial_metadata, to_core_event

_FILTER = re.compile(r"""\?\(\s*@\.([\w.\-\\/]+)\s*==\s*["']([^"']*)["']\s*\)""")
_TOKEN = re.compile(r"""\.?\[(\?\(.*?\)|'[^']*'|"[^"]*"|\d+|\*)\]|\.((?:\\.|[^.\[\\])+)""")


@dataclass(frozen=True)
class Column:
    """One column and how to fill its cell."""

    name: str
    cell: Callable[[Json], Any]
    type: str = "string"
    format: str = ""
    priority: int = 0
    """0 is always shown, more only by `-o wide`."""
    description: str = ""

    def definition(self) -> Json:
        """The column definition for the client."""
        return {name: getattr(self, name) for name in ("name", "type", "format", "description", "priority")}


def table(resource: Resource, objects: Iterable[Json], metadata: Json, *, include: str, header: bool) -> Json:
    """A `Table` of objects. `include`: how much of each object is included, Metadata, Object or None."""
    columns = [_NAME, *(map(_crd_column, resource.columns) if resource.columns else [_AGE])]
    if not resource.custom:
        columns = _BUILT_IN.get(resource.kind, columns)
    rows: list[Json] = []
    for obj in objects:
        told = to_core_event(obj) if resource.is_event else obj
        row: Json = {"cells": [column.cell(told) for column in columns]}
        if include == "Object":
            row["object"] = obj
        elif include != "None":
            row["object"] = partial_metadata(obj)
        rows.append(row)
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata,
        "columnDefinitions": [column.definition() for column in columns] if header else None,
        "rows": rows,
    }


# ---- ages --------------------------------------------------------------------------------------


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "y": 365 * 86400}
_AGES = (
    (120, "s", ""), (600, "m", "s"), (3 * 3600, "m", ""), (8 * 3600, "h", "m"), (48 * 3600, "h", ""),
    (8 * 86400, "d", "h"), (2 * 365 * 86400, "d", ""), (8 * 365 * 86400, "y", "d"), (float("inf"), "y", ""),
)  # fmt: skip
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
        found = [inner for outer in found for inner in _step(outer, bracket, name.replace("\\", ""))]
    return found


def _step(value: Any, bracket: str, name: str) -> list[Any]:
    """The values that one step of a path leads to."""
    members = list(value.values()) if isinstance(value, dict) else listed(value)
    if "*" in (bracket, name):
        return members
    if condition := _FILTER.fullmatch(bracket):
        return [member for member in members if find(member, "." + condition[1]) == [condition[2]]]
    if (index := whole_number(bracket)) is not None:
        return listed(value)[index : index + 1]
    field = name or bracket.strip("'\"")
    return [value[field]] if isinstance(value, dict) and field in value else []


def _crd_column(declared: Json) -> Column:
    path, kind = declared["jsonPath"], declared["type"]

    def cell(obj: Json) -> Any:
        values = find(obj, path)
        if not values:
            return None
        if kind == "date":
            return age_of(values[0])
        if kind == "string":
            return ",".join(value if isinstance(value, str) else encode(value).decode() for value in values)
        return values[0]

    more = {name: declared[name] for name in ("format", "priority", "description") if name in declared}
    return Column(declared["name"], cell, kind, **more)


# ---- columns of built-in kinds -----------------------------------------------------------------


def _at(*paths: str, missing: Any = "<none>") -> Callable[[Json], Any]:
    """The first value at any of these paths that is not empty."""
    return lambda obj: next((value for path in paths for value in find(obj, path) if value), missing)


def _age_at(*paths: str) -> Callable[[Json], str]:
    moment = _at(*paths, missing=None)
    return lambda obj: age_of(moment(obj))


def _service_ports(obj: Json) -> str:
    shown = []
    for port in listed(section(obj, "spec").get("ports")):
        number = f"{port.get('port')}:{port['nodePort']}" if port.get("nodePort") else f"{port.get('port')}"
        shown.append(f"{number}/{port.get('protocol', 'TCP')}")
    return ",".join(shown) or "<none>"


def _external_address(obj: Json) -> str:
    spec = section(obj, "spec")
    kind, given = spec.get("type"), ",".join(listed(spec.get("externalIPs")))
    if kind == "ExternalName":
        return str(spec.get("externalName", ""))
    # There is no load balancer here that would give an address.
    return given or ("<pending>" if kind == "LoadBalancer" else "<none>")


def _selector(obj: Json) -> str:
    labels = section(obj, "spec", "selector")
    return ",".join(f"{name}={value}" for name, value in sorted(labels.items())) or "<none>"


def _shortened(values: list[str]) -> str:
    extra = f" + {len(values) - 3} more..." if len(values) > 3 else ""
    return ",".join(values[:3]) + extra or "<unset>"


def _event_object(event: Json) -> str:
    about = section(event, "involvedObject")
    return f"{str(about.get('kind', '')).lower()}/{about.get('name', '')}"


def _event_source(event: Json) -> str:
    parts = [section(event, "source").get(name) for name in ("component", "host")]
    if not parts[0]:
        parts = [event.get(name) for name in ("reportingComponent", "reportingInstance")]
    return ", ".join(str(part) for part in parts if part)


_NAME = Column("Name", _at(".metadata.name"), format="name")
_DATA = Column("Data", lambda obj: len(section(obj, "data")) + len(section(obj, "binaryData")))
_AGE = Column("Age", _age_at(".metadata.creationTimestamp"))
_BUILT_IN: dict[str, list[Column]] = {
    "Service": [
        _NAME,
        Column("Type", _at(".spec.type")),
        Column("Cluster-IP", _at(".spec.clusterIP")),
        Column("External-IP", _external_address),
        Column("Port(s)", _service_ports),
        _AGE,
        Column("Selector", _selector, priority=1),
    ],
    "EndpointSlice": [
        _NAME,
        Column("AddressType", _at(".addressType")),
        Column("Ports", lambda obj: _shortened([str(port.get("port", "*")) for port in find(obj, ".ports[*]")])),
        Column("Endpoints", lambda obj: _shortened(find(obj, ".endpoints[*].addresses[*]"))),
        _AGE,
    ],
    "Event": [
        Column("Last Seen", _age_at(".series.lastObservedTime", ".lastTimestamp", ".eventTime")),
        Column("Type", _at(".type", missing="")),
        Column("Reason", _at(".reason", missing="")),
        Column("Object", _event_object),
        Column("Subobject", _at(".involvedObject.fieldPath", missing=""), priority=1),
        Column("Source", _event_source, priority=1),
        Column("Message", lambda event: str(event.get("message") or "").strip()),
        Column("First Seen", _age_at(".firstTimestamp", ".eventTime"), priority=1),
        Column("Count", _at(".series.count", ".count", missing=1), priority=1),
        replace(_NAME, priority=1),
    ],
    "Lease": [_NAME, Column("Holder", _at(".spec.holderIdentity", missing="")), _AGE],
    "Namespace": [_NAME, Column("Status", _at(".status.phase", missing="")), _AGE],
    "CustomResourceDefinition": [_NAME, Column("Created At", _at(".metadata.creationTimestamp", missing=""))],
    "ConfigMap": [_NAME, _DATA, _AGE],
    "Secret": [_NAME, Column("Type", _at(".type", missing="")), _DATA, _AGE],
}
