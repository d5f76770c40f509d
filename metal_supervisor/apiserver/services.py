"""Services: defaults, the rules of their ports, and unique, stable addresses.

Nothing routes these addresses here; they exist because clients, `kubectl get` and the promise "the
clusterIP stays while the model is stopped" need them to.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from typing import Any

from .codec import listed, section
from .errors import Json, Problem, duplicate_value, forbidden_value, invalid_value, required
from .metadata import DNS_LABEL, DNS_LABEL_DETAIL, dns_label_problems, label_problems, qualified_problems

CLUSTER_RANGE = ipaddress.ip_network("10.96.0.0/16")
_FIRST_HOST = 10
"""The lowest addresses are left free, as real clusters reserve them."""
NODE_PORTS = range(30000, 32768)
IP_DETAIL = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)"
_EXPOSED = ("NodePort", "LoadBalancer")


def default_service(service: Json, previous: Json | None) -> None:
    """Fills in what users leave out and what was chosen for them before, in place."""
    spec, old = service["spec"], section(previous or {}, "spec")
    if spec["sessionAffinity"] == "ClientIP":
        spec.setdefault("sessionAffinityConfig", {"clientIP": {"timeoutSeconds": 10800}})
    for port in _ports(spec):
        if port.get("targetPort") in (None, "", 0):
            port["targetPort"] = port.get("port", 0)
    if spec["type"] == "ExternalName":
        return
    spec.setdefault("internalTrafficPolicy", "Cluster")
    given = listed(spec.get("clusterIPs"))
    address = spec.pop("clusterIP", "") or (given[0] if given else "") or old.get("clusterIP")
    if address:
        spec["clusterIP"] = address
    ports = _ports(old) if old.get("type") in _EXPOSED else []
    chosen = {(port.get("port"), port.get("protocol")): port["nodePort"] for port in ports if port.get("nodePort")}
    if spec["type"] in _EXPOSED:
        spec.setdefault("externalTrafficPolicy", "Cluster")
        for port in _ports(spec):
            if number := port.get("nodePort") or chosen.get((port.get("port"), port.get("protocol"))):
                port["nodePort"] = number
    else:
        spec.pop("externalTrafficPolicy", None)
        spec.pop("allocateLoadBalancerNodePorts", None)
        for port in _ports(spec):
            if port.get("nodePort") in chosen.values():
                del port["nodePort"]
    if spec["type"] == "LoadBalancer":
        spec.setdefault("allocateLoadBalancerNodePorts", True)


def _ports(spec: Json) -> list[Json]:
    return listed(spec.get("ports"))


def _node_ports(specs: list[Json]) -> set[int]:
    return {port["nodePort"] for spec in specs for port in _ports(spec) if port.get("nodePort")}


def allocate(spec: Json, others: list[Json]) -> None:
    """Choose the addresses and node ports that a Service needs and does not have, in place; no manager owns them."""
    if spec["type"] == "ExternalName":
        return
    if not spec.get("clusterIP"):
        taken = {other.get("clusterIP") for other in others}
        addresses = (str(CLUSTER_RANGE[host]) for host in range(_FIRST_HOST, CLUSTER_RANGE.num_addresses - 1))
        spec["clusterIP"] = next((address for address in addresses if address not in taken), "")
    spec["clusterIPs"] = [spec["clusterIP"]]
    both = spec["clusterIP"] == "None" and not spec.get("selector")
    spec.setdefault("ipFamilies", ["IPv4", "IPv6"] if both else ["IPv4"])
    spec.setdefault("ipFamilyPolicy", "RequireDualStack" if both else "SingleStack")
    if spec["type"] not in _EXPOSED or spec.get("allocateLoadBalancerNodePorts") is False:
        return
    numbers = _node_ports([spec, *others])
    for port in _ports(spec):
        if not port.get("nodePort"):
            port["nodePort"] = next(free for free in NODE_PORTS if free not in numbers)
            numbers.add(port["nodePort"])


def validate_service(service: Json, previous: Json | None, others: list[Json]) -> Iterator[Problem]:
    """Problems of a Service that has its defaults. `others`: the specs of all other Services."""
    spec, name = service["spec"], service["metadata"]["name"]
    ports, kind, headless = _ports(spec), spec["type"], spec.get("clusterIP") == "None"
    if len(name) > 63:
        yield invalid_value("metadata.name", name, "must be no more than 63 characters")
    if "." in name:
        yield invalid_value("metadata.name", name, "must not contain dots")
    elif not DNS_LABEL.fullmatch(name):
        yield invalid_value("metadata.name", name, DNS_LABEL_DETAIL)
    yield from label_problems("spec.selector", section(spec, "selector"))
    # This cluster has IPv4 alone, which is no matter to a headless Service without a selector.
    if not headless or spec.get("selector"):
        for index, family in enumerate(listed(spec.get("ipFamilies"))):
            if family != "IPv4":
                yield invalid_value(f"spec.ipFamilies[{index}]", family, "not configured on this cluster")
        if spec.get("ipFamilyPolicy") == "RequireDualStack":
            detail = "this cluster is not configured for dual-stack services"
            yield invalid_value("spec.ipFamilyPolicy", "RequireDualStack", detail)
    if not ports and not headless and kind != "ExternalName":
        yield required("spec.ports")
    if kind == "ExternalName" and not spec.get("externalName"):
        yield required("spec.externalName")
    if headless and kind in _EXPOSED:
        yield invalid_value("spec.clusterIPs[0]", "None", "may not be set to 'None' for LoadBalancer services")
    names = [port.get("name", "") for port in ports]
    for index, port in enumerate(ports):
        yield from _port_problems(port, f"spec.ports[{index}]", several=len(ports) > 1)
        if port.get("nodePort") and kind not in _EXPOSED:
            yield forbidden_value(f"spec.ports[{index}].nodePort", f"may not be used when `type` is '{kind}'")
        if names[index] and names[index] in names[:index]:
            yield duplicate_value(f"spec.ports[{index}].name", names[index])
    yield from _address_problems(spec, section(previous or {}, "spec"), others)


def _port_problems(port: Json, path: str, *, several: bool) -> Iterator[Problem]:
    name = port.get("name", "")
    if several and not name:
        yield required(f"{path}.name")
    if name:
        yield from dns_label_problems(f"{path}.name", name)
    yield from number_problems(f"{path}.port", port.get("port", 0))
    if port.get("appProtocol"):
        yield from qualified_problems(f"{path}.appProtocol", port["appProtocol"])
    yield from _target_problems(port["targetPort"], f"{path}.targetPort")


def number_problems(path: str, number: int) -> list[Problem]:
    """Problems of the number of a port."""
    return [] if 1 <= number <= 65535 else [invalid_value(path, number, "must be between 1 and 65535, inclusive")]


def _target_problems(target: Any, path: str) -> list[Problem]:
    if isinstance(target, int):
        return number_problems(path, target)
    if len(target) > 15:
        return [invalid_value(path, target, "must be no more than 15 characters")]
    letters = "must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)"
    rules = (
        (not re.fullmatch("[-a-z0-9]*", target), letters),
        (not re.search("[a-z]", target), "must contain at least one letter (a-z)"),
        ("--" in target, "must not contain consecutive hyphens"),
        (target.startswith("-") or target.endswith("-"), "must not begin or end with a hyphen"),
    )
    return [invalid_value(path, target, detail) for broken, detail in rules if broken]


def _address_problems(spec: Json, old: Json, others: list[Json]) -> Iterator[Problem]:
    address, before = spec.get("clusterIP"), old.get("clusterIP")
    if spec["type"] == "ExternalName":
        if address and address != "None":
            yield forbidden_value("spec.clusterIPs", "may not be set for ExternalName services")
        return
    if before and address != before:
        if old.get("type") != "ExternalName":
            yield invalid_value("spec.clusterIPs[0]", [address], "may not change once set")
        return
    if spec["type"] in _EXPOSED:
        yield from _node_port_problems(spec, others)
    if address in (None, "", "None") or address == before:
        return
    try:
        inside = ipaddress.ip_address(address) in CLUSTER_RANGE
    except ValueError:
        yield invalid_value("spec.clusterIPs[0]", address, IP_DETAIL)
        return
    refused = f"failed to allocate IP {address}: "
    if not inside:
        yield invalid_value(
            "spec.clusterIPs", [address], f"{refused}the provided network does not match the current range"
        )
    elif address in {other.get("clusterIP") for other in others}:
        yield invalid_value("spec.clusterIPs", [address], f"{refused}provided IP is already allocated")


def _node_port_problems(spec: Json, others: list[Json]) -> Iterator[Problem]:
    taken = _node_ports(others)
    for index, port in enumerate(_ports(spec)):
        number, path = port.get("nodePort"), f"spec.ports[{index}].nodePort"
        if number is not None and number not in NODE_PORTS:
            detail = "provided port is not in the valid range. The range of valid ports is 30000-32767"
            yield invalid_value(path, number, detail)
        elif number in taken:
            yield invalid_value(path, number, "provided port is already allocated")
