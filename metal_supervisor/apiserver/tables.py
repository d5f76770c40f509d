"""Tables: the columns that `kubectl get` prints.

The server makes them, so that a client needs to know nothing about a kind: from the printer columns of
its CRD, or from the list below for the built-in kinds, with the columns kubectl users know.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from . import events
from .codec import listed, now, parse_time, section, whole_number
from .errors import Json
from .resources import Resource
from .views import partial

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
        shown = "string" if self.type == "date" else self.type
        return {
            "name": self.name,
            "type": shown,
            "format": self.format,
            "description": self.description,
            "priority": self.priority,
        }


def table(resource: Resource, objects: Iterable[Json], metadata: Json, *, include: str, header: bool) -> Json:
    """A `Table` of objects. `include`: how much of each object is included, Metadata, Object or None."""
    columns = columns_of(resource)
    rows: list[Json] = []
    for obj in objects:
        told = events.to_core(obj) if events.is_event(resource) else obj
        row: Json = {"cells": [column.cell(told) for column in columns]}
        if include == "Object":
            row["object"] = obj
        elif include != "None":
            row["object"] = partial(obj)
        rows.append(row)
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata,
        "columnDefinitions": [column.definition() for column in columns] if header else None,
        "rows": rows,
    }


def columns_of(resource: Resource) -> list[Column]:
    """Name first, then the kind's own columns."""
    if resource.custom:
        own = [_crd_column(declared) for declared in resource.columns]
        return [_NAME, *(own or [_age(".metadata.creationTimestamp")])]
    return _BUILT_IN.get(resource.kind, [_NAME, _AGE])


# ---- ages --------------------------------------------------------------------------------------


def human_age(seconds: float) -> str:
    """A duration as kubectl prints it: 119s, 2m, 9m59s, 179m, 7h59m, 47h, 7d23h, 729d, 2y, 8y."""
    total = int(seconds)
    if total < -1:
        return "<invalid>"
    if total < 120:
        return f"{max(total, 0)}s"
    minutes, hours = total // 60, total // 3600
    if minutes < 10:
        return _two(minutes, "m", total % 60, "s")
    if minutes < 180:
        return f"{minutes}m"
    if hours < 8:
        return _two(hours, "h", minutes % 60, "m")
    if hours < 48:
        return f"{hours}h"
    if hours < 192:
        return _two(hours // 24, "d", hours % 24, "h")
    if hours < 24 * 365 * 2:
        return f"{hours // 24}d"
    if hours < 24 * 365 * 8:
        return _two(hours // 24 // 365, "y", hours // 24 % 365, "d")
    return f"{hours // 24 // 365}y"


def _two(large: int, large_unit: str, small: int, small_unit: str) -> str:
    return f"{large}{large_unit}{small}{small_unit}" if small else f"{large}{large_unit}"


def age_of(text: Any) -> str:
    """Time since an RFC 3339 text."""
    moment = parse_time(text)
    return human_age((now() - moment).total_seconds()) if moment else "<unknown>"


# ---- columns of CRDs ---------------------------------------------------------------------------

_Step: TypeAlias = tuple[str, str, str]
"""(`field` | `index` | `all` | `filter`, name, value)."""


@lru_cache(maxsize=512)
def _steps(json_path: str) -> tuple[_Step, ...]:
    steps: list[_Step] = []
    text = json_path if json_path.startswith((".", "[")) else "." + json_path
    for bracket, name in _TOKEN.findall(text):
        condition = _FILTER.fullmatch(bracket)
        if name:
            steps.append(("all", "", "") if name == "*" else ("field", name.replace("\\", ""), ""))
        elif condition:
            steps.append(("filter", condition[1].replace("\\", ""), condition[2]))
        elif bracket == "*":
            steps.append(("all", "", ""))
        elif whole_number(bracket) is not None:
            steps.append(("index", bracket, ""))
        else:
            steps.append(("field", bracket.strip("'\""), ""))
    return tuple(steps)


def find(obj: Any, json_path: str) -> list[Any]:
    """Everything a printer column's path finds, e.g. `.status.conditions[?(@.type=="Ready")].status`."""
    found = [obj]
    for kind, name, value in _steps(json_path):
        found = [inner for outer in found for inner in _take(outer, kind, name, value)]
    return found


def _take(value: Any, kind: str, name: str, wanted: str) -> list[Any]:
    if kind == "field":
        return [value[name]] if isinstance(value, dict) and name in value else []
    if kind == "index":
        return [value[int(name)]] if isinstance(value, list) and int(name) < len(value) else []
    members = list(value.values()) if isinstance(value, dict) else listed(value)
    if kind == "all":
        return members
    return [member for member in members if find(member, "." + name) == [wanted]]


def _crd_column(declared: Json) -> Column:
    path, kind = str(declared.get("jsonPath", "")), str(declared.get("type", "string"))

    def cell(obj: Json) -> Any:
        values = find(obj, path)
        if not values:
            return None
        if kind == "date":
            return age_of(values[0])
        if kind == "string":
            return ",".join(_text(value) for value in values)
        return values[0]

    return Column(
        str(declared.get("name", "")),
        cell,
        kind,
        str(declared.get("format", "")),
        int(declared.get("priority", 0)),
        str(declared.get("description", "")),
    )


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (dict, list)):
        return re.sub(r"\s+", "", str(value)) if not isinstance(value, dict) else str(value).replace("'", '"')
    return str(value)


def _age(path: str) -> Column:
    return Column("Age", lambda obj: age_of(next(iter(find(obj, path)), None)))


# ---- columns of built-in kinds -----------------------------------------------------------------

_NAME = Column("Name", lambda obj: obj["metadata"]["name"], format="name")
_AGE = _age(".metadata.creationTimestamp")


def _at(path: str, missing: Any = "<none>") -> Callable[[Json], Any]:
    return lambda obj: next((value for value in find(obj, path) if value not in ("", None)), missing)


def _service_ports(obj: Json) -> str:
    shown = []
    for port in listed(section(obj, "spec").get("ports")):
        number = f"{port.get('port')}:{port['nodePort']}" if port.get("nodePort") else f"{port.get('port')}"
        shown.append(f"{number}/{port.get('protocol', 'TCP')}")
    return ",".join(shown) or "<none>"


def _external_address(obj: Json) -> str:
    spec = section(obj, "spec")
    given = [str(address) for address in listed(spec.get("externalIPs"))]
    if spec.get("type") == "ExternalName":
        return str(spec.get("externalName", ""))
    if spec.get("type") == "LoadBalancer":
        entries = listed(section(obj, "status", "loadBalancer").get("ingress"))
        given = [str(entry.get("ip") or entry.get("hostname")) for entry in entries] + given
        return ",".join(given) or "<pending>"
    return ",".join(given) or "<none>"


def _labels_text(labels: Json) -> str:
    return ",".join(f"{name}={value}" for name, value in sorted(labels.items())) or "<none>"


def _shortened(values: list[str], most: int = 3) -> str:
    if not values:
        return "<unset>"
    extra = len(values) - most
    return ",".join(values[:most]) + (f" + {extra} more..." if extra > 0 else "")


def _slice_ports(obj: Json) -> str:
    return _shortened([str(port.get("port", "*")) for port in listed(obj.get("ports"))])


def _slice_addresses(obj: Json) -> str:
    return _shortened([a for endpoint in listed(obj.get("endpoints")) for a in listed(endpoint.get("addresses"))])


def _event_object(event: Json) -> str:
    about = section(event, "involvedObject")
    return f"{str(about.get('kind', '')).lower()}/{about.get('name', '')}"


def _event_last_seen(event: Json) -> str:
    last = section(event, "series").get("lastObservedTime") or event.get("lastTimestamp")
    return age_of(last or event.get("eventTime"))


def _event_source(event: Json) -> str:
    parts = [section(event, "source").get(name) for name in ("component", "host")]
    if not parts[0]:
        parts = [event.get(name) for name in ("reportingComponent", "reportingInstance")]
    return ", ".join(str(part) for part in parts if part)


def _event_count(event: Json) -> int:
    return int(section(event, "series").get("count") or event.get("count") or 1)


def _node_status(obj: Json) -> str:
    ready = find(obj, '.status.conditions[?(@.type=="Ready")].status')
    return ("Ready" if ready[0] == "True" else "NotReady") if ready else "Unknown"


_BUILT_IN: dict[str, list[Column]] = {
    "Service": [
        _NAME,
        Column("Type", _at(".spec.type")),
        Column("Cluster-IP", _at(".spec.clusterIP")),
        Column("External-IP", _external_address),
        Column("Port(s)", _service_ports),
        _AGE,
        Column("Selector", lambda obj: _labels_text(section(obj, "spec", "selector")), priority=1),
    ],
    "EndpointSlice": [
        _NAME,
        Column("AddressType", _at(".addressType")),
        Column("Ports", _slice_ports),
        Column("Endpoints", _slice_addresses),
        _AGE,
    ],
    "Event": [
        Column("Last Seen", _event_last_seen),
        Column("Type", _at(".type", "")),
        Column("Reason", _at(".reason", "")),
        Column("Object", _event_object),
        Column("Subobject", _at(".involvedObject.fieldPath", ""), priority=1),
        Column("Source", _event_source, priority=1),
        Column("Message", lambda event: str(event.get("message") or "").strip()),
        Column("First Seen", lambda obj: age_of(obj.get("firstTimestamp") or obj.get("eventTime")), priority=1),
        Column("Count", _event_count, "integer", priority=1),
        Column("Name", lambda obj: obj["metadata"]["name"], format="name", priority=1),
    ],
    "Lease": [_NAME, Column("Holder", _at(".spec.holderIdentity", "")), _AGE],
    "Namespace": [_NAME, Column("Status", _at(".status.phase", "")), _AGE],
    "CustomResourceDefinition": [_NAME, Column("Created At", _at(".metadata.creationTimestamp", ""))],
    "ConfigMap": [
        _NAME,
        Column("Data", lambda obj: len(section(obj, "data")) + len(section(obj, "binaryData")), "integer"),
        _AGE,
    ],
    "Secret": [
        _NAME,
        Column("Type", _at(".type", "")),
        Column("Data", lambda obj: len(section(obj, "data")), "integer"),
        _AGE,
    ],
    "Node": [_NAME, Column("Status", _node_status), _AGE],
}
