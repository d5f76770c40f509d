"""Rules of the built-in resources that a schema cannot express: defaults, formats, immutable fields."""

from __future__ import annotations

import base64
import ipaddress
import re
from collections.abc import Iterable, Iterator
from datetime import timezone

from . import schemas, services
from .codec import listed, parse_time, section, timestamp
from .errors import Json, Problem, duplicate_value, forbidden_value, invalid_value, required, unsupported_value
from .metadata import SUBDOMAIN, SUBDOMAIN_DETAIL, dns_label_problems, qualified_problems
from .resources import Resource
from .schema import validate

_NEWLINES = {ord("\r"): None, ord("\n"): None}
"""Base64 may be wrapped into lines."""
_LINK_MULTICAST = (ipaddress.ip_network("224.0.0.0/24"), ipaddress.ip_network("ff02::/16"))
_EMPTY: dict[str, Json] = {"Service": {"spec": {}, "status": {"loadBalancer": {}}}, "Lease": {"spec": {}}}


def empty(resource: Resource) -> Json:
    """Fields that an object of a kind always has, so that creating one makes no manager their owner."""
    return {} if resource.custom else _EMPTY.get(resource.kind, {})


def complete(
    resource: Resource, obj: Json, previous: Json | None, others: list[Json], *, allow_loopback: bool
) -> Iterable[Problem]:
    """Fill in the defaults of an object of a built-in kind, in its stored form and in place; return its problems.

    `others`: for a Service, the specs of all other ones.
    """
    match resource.kind:
        case "Service":
            services.default_service(obj, previous)
            return services.validate_service(obj, previous, others)
        case "CustomResourceDefinition":
            _default_crd(obj, previous)
            return _crd(obj, previous)
        case "EndpointSlice":
            if previous is None:
                obj.setdefault("endpoints", [])
            return _endpoint_slice(obj, previous, allow_loopback)
        case "Event":
            return _event(obj, previous, newer=bool(resource.group))
        case "Namespace":
            obj["metadata"].setdefault("labels", {})["kubernetes.io/metadata.name"] = obj["metadata"]["name"]
            return dns_label_problems("metadata.name", obj["metadata"]["name"])
        case "ConfigMap" | "Secret":
            if plain := obj.pop("stringData", None):
                encoded = {name: base64.b64encode(text.encode()).decode() for name, text in plain.items()}
                obj["data"] = {**section(obj, "data"), **encoded}
            if previous and previous.get("type") != obj.get("type"):
                return [invalid_value("type", obj.get("type"), "field is immutable")]
            if previous and previous.get("immutable"):
                changed = [name for name in ("immutable", "data", "binaryData") if obj.get(name) != previous.get(name)]
                return [forbidden_value(name, "field is immutable when `immutable` is set") for name in changed]
    return []


# ---- EndpointSlice -----------------------------------------------------------------------------


def _endpoint_slice(obj: Json, previous: Json | None, allow_loopback: bool) -> Iterator[Problem]:
    kind = obj["addressType"]
    if previous and previous.get("addressType") != kind:
        yield invalid_value("addressType", kind, "field is immutable")
    for index, endpoint in enumerate(listed(obj.get("endpoints"))):
        addresses = listed(endpoint.get("addresses"))
        path = f"endpoints[{index}].addresses"
        if not addresses:
            yield required(path, "must contain at least 1 address")
        if hostname := endpoint.get("hostname"):
            yield from dns_label_problems(f"endpoints[{index}].hostname", hostname)
        for place, address in enumerate(addresses):
            yield from _address_problems(f"{path}[{place}]", address, kind, allow_loopback)
    names: list[str] = []
    for index, port in enumerate(listed(obj.get("ports"))):
        name, path = port.get("name", ""), f"ports[{index}]"
        if name:
            yield from dns_label_problems(f"{path}.name", name)
        if name in names:
            yield duplicate_value(f"{path}.name", name)
        names.append(name)
        if "port" in port:
            yield from services.number_problems(f"{path}.port", port["port"])


def _address_problems(path: str, address: str, kind: str, allow_loopback: bool) -> list[Problem]:
    if kind == "FQDN":
        return [] if SUBDOMAIN.fullmatch(address) else [invalid_value(path, address, SUBDOMAIN_DETAIL)]
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        zeros = re.fullmatch(r"\d+(\.\d+){3}", address) and re.search(r"\b0\d", address)
        return [invalid_value(path, address, "must not have leading 0s" if zeros else services.IP_DETAIL)]
    multicast = any(parsed in network for network in _LINK_MULTICAST)
    slice_path = path.rpartition("[")[0]
    rules = (
        (getattr(parsed, "ipv4_mapped", None), path, "must not be an IPv4-mapped IPv6 address"),
        (f"IPv{parsed.version}" != kind, slice_path, f"must be an {kind} address"),
        (str(parsed) != address, path, f'must be in canonical form ("{parsed}")'),
        (parsed.is_unspecified, path, f"may not be unspecified ({address})"),
        (parsed.is_loopback and not allow_loopback, path, "may not be in the loopback range (127.0.0.0/8, ::1/128)"),
        (parsed.is_link_local, path, "may not be in the link-local range (169.254.0.0/16, fe80::/10)"),
        (multicast, path, "may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)"),
    )
    # The first of these is all that the real server mentions.
    return [invalid_value(where, address, detail) for barred, where, detail in rules if barred][:1]


# ---- Events --------------------------------------------------------------------------------------

# The two groups name the same fields differently: `Resource.field_names`. Except for its series, an Event of the newer
# one never changes, and it must say who reports and what was done.

_IMMUTABLE = ("involvedObject", "reason", "message", "action", "related", "type", "eventTime",
              "reportingComponent", "reportingInstance")  # fmt: skip
_MOST_BYTES = {"action": 128, "reason": 128, "message": 1024}


def _event(event: Json, previous: Json | None, *, newer: bool) -> Iterator[Problem]:
    """Problems of an Event in its stored form, whose field names the real server uses for both forms."""
    namespace = section(event, "metadata").get("namespace", "")
    about = section(event, "involvedObject").get("namespace", "")
    # With an eventTime, only an Event about an object without a namespace must be in a well-known one.
    fitting = about or namespace in ("default", "kube-system") if event.get("eventTime") else about == namespace
    if not fitting and (about or "default") != namespace:
        yield invalid_value("involvedObject.namespace", about, "does not match event.namespace")
    if not newer:
        return
    if not event.get("eventTime"):
        yield required("eventTime")
        return
    reporter, kind = event.get("reportingComponent") or "", event.get("type", "")
    if not reporter:
        yield required("reportingController")
    yield from qualified_problems("reportingController", reporter)
    yield from (required(name) for name in ("reportingInstance", "action", "reason") if not event.get(name))
    for name, most in _MOST_BYTES.items():
        if len((event.get(name) or "").encode()) > most:
            yield invalid_value(name, "", f"can have at most {most} characters")
    if kind not in ("Normal", "Warning"):
        yield invalid_value("type", "", f"has invalid value: {kind}")
    for name in ("source", "firstTimestamp", "lastTimestamp", "count"):
        if event.get(name) and not (previous and previous.get(name) == event.get(name)):
            yield invalid_value(name, "", "needs to be unset")
    for name in _IMMUTABLE:
        if previous and previous.get(name) != event.get(name):
            yield invalid_value(name, event.get(name), "field is immutable")
    series = section(event, "series")
    if series and int(series.get("count") or 0) < 2:
        yield invalid_value("series.count", "", "should be at least 2")
    if series and not series.get("lastObservedTime"):
        yield required("series.lastObservedTime")


# ---- CustomResourceDefinitions -------------------------------------------------------------------

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


def _default_crd(crd: Json, previous: Json | None) -> None:
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
    if section(spec, "conversion").get("strategy") == "Webhook":
        yield unsupported_value("spec.conversion.strategy", "Webhook", ["None"])


# ---- texts that are times or bytes -------------------------------------------------------------

_BYTES = {"ConfigMap": "binaryData", "Secret": "data"}
"""Fields of bytes by name, which JSON has as base64."""
_TIMES: dict[str, tuple[tuple[str, ...], ...]] = {
    "Lease": (("spec", "acquireTime"), ("spec", "renewTime")),
    "Event": (("eventTime",), ("series", "lastObservedTime")),
}
"""Times with microseconds: exactly six digits, kept in UTC."""
_MICRO_TIME = "2006-01-02T15:04:05.000000Z07:00"
_PARTS = (
    ("2006", r"\d{4}"), ("-", "-"), ("01", r"0[1-9]|1[0-2]"), ("-", "-"), ("02", r"0[1-9]|[12]\d|3[01]"), ("T", "T"),
    ("15", r"[01]\d|2[0-3]"), (":", ":"), ("04", r"[0-5]\d"), (":", ":"), ("05", r"[0-5]\d"),
    (".000000", r"\.\d{6}"), ("Z07:00", r"Z|[+-]\d\d:\d\d"),
)  # fmt: skip


def undecodable(kind: str, obj: Json) -> str:
    """Go's problem with the first text of an object that should be a time or bytes and is not, "" if there is none.

    Normalizes the times, in place.
    """
    for *parents, name in _TIMES.get(kind, ()):
        holder = section(obj, *parents)
        text = holder.get(name)
        if not isinstance(text, str):
            continue
        moment = parse_time(text)
        if problem := _time_problem(text):
            return problem
        if moment is None:
            return f'parsing time "{text}": day out of range'
        holder[name] = moment.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    field = _BYTES.get(kind, "")
    for name, value in section(obj, field).items():
        try:
            base64.b64decode(str(value).translate(_NEWLINES), validate=True)
        except ValueError:
            return f"{field}.{name}: illegal base64 data: encode it, or use stringData in a Secret"
    return ""


def _time_problem(text: str) -> str:
    """Go's error for a text that is no such time, "" if it is one."""
    rest = text
    for element, pattern in _PARTS:
        found = re.match(pattern, rest)
        if found is None:
            return f'parsing time "{text}" as "{_MICRO_TIME}": cannot parse "{rest}" as "{element}"'
        rest = rest[found.end() :]
    return f'parsing time "{text}": extra text: "{rest}"' if rest else ""
