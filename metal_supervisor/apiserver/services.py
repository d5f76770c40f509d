"""Services: defaults, the rules of their ports, and unique, stable addresses.

Nothing routes these addresses here; they exist because clients, `kubectl get` and the promise "the
clusterIP stays while the model is stopped" need them to. Node ports and load balancers, which nothing here would
serve, are stored as they are sent.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from typing import Any

from .codec import listed, section
from .errors import Json, Problem, duplicate_value, invalid_value, required
from .metadata import dns_label_problems, label_problems, qualified_problems

CLUSTER_RANGE = ipaddress.ip_network("10.96.0.0/16")
_FIRST_HOST = 10
"""The lowest addresses are left free, as real clusters reserve them."""
_PORT_NAME = re.compile("(?=.*[a-z])[a-z0-9]+(-[a-z0-9]+)*")


def default_service(service: Json, previous: Json | None) -> None:
    """Fills in what users leave out and the address that was chosen before, in place."""
    spec = service["spec"]
    for port in listed(spec.get("ports")):
        if port.get("targetPort") in (None, "", 0):
            port["targetPort"] = port.get("port", 0)
    if spec["type"] == "ExternalName":
        return
    spec.setdefault("internalTrafficPolicy", "Cluster")
    given = listed(spec.get("clusterIPs"))
    address = spec.pop("clusterIP", "") or (given[0] if given else "") or section(previous, "spec").get("clusterIP")
    if address:
        spec["clusterIP"] = address


def allocate(spec: Json, others: list[Json]) -> None:
    """Choose the address that a Service needs and does not have, in place; no manager owns it."""
    if spec["type"] == "ExternalName":
        return
    if not spec.get("clusterIP"):
        taken = {other.get("clusterIP") for other in others}
        addresses = (str(CLUSTER_RANGE[host]) for host in range(_FIRST_HOST, CLUSTER_RANGE.num_addresses - 1))
        spec["clusterIP"] = next((address for address in addresses if address not in taken), "")
    spec["clusterIPs"] = [spec["clusterIP"]]
    spec.setdefault("ipFamilies", ["IPv4"])
    spec.setdefault("ipFamilyPolicy", "SingleStack")


def validate_service(service: Json, previous: Json | None, others: list[Json]) -> Iterator[Problem]:
    """Problems of a Service that has its defaults. `others`: the specs of all other Services."""
    spec = service["spec"]
    ports = listed(spec.get("ports"))
    yield from dns_label_problems("metadata.name", service["metadata"]["name"])
    yield from label_problems("spec.selector", section(spec, "selector"))
    if not ports and spec.get("clusterIP") != "None" and spec["type"] != "ExternalName":
        yield required("spec.ports")
    names = [port.get("name", "") for port in ports]
    for index, port in enumerate(ports):
        yield from _port_problems(port, f"spec.ports[{index}]", several=len(ports) > 1)
        if names[index] and names[index] in names[:index]:
            yield duplicate_value(f"spec.ports[{index}].name", names[index])
    yield from _address_problems(spec, section(previous, "spec"), others)


def _port_problems(port: Json, path: str, *, several: bool) -> Iterator[Problem]:
    name = port.get("name", "")
    if several and not name:
        yield required(f"{path}.name")
    if name:
        yield from dns_label_problems(f"{path}.name", name)
    yield from _target_problems(port.get("port", 0), f"{path}.port")
    if port.get("appProtocol"):
        yield from qualified_problems(f"{path}.appProtocol", port["appProtocol"])
    yield from _target_problems(port["targetPort"], f"{path}.targetPort")


def _target_problems(target: Any, path: str) -> Iterator[Problem]:
    """Problems of a port by its number or its name."""
    if isinstance(target, int):
        if not 1 <= target <= 65535:
            yield invalid_value(path, target, "must be between 1 and 65535, inclusive")
    elif len(target) > 15 or not _PORT_NAME.fullmatch(target):
        detail = "must be at most 15 lower case letters, digits and single hyphens, with at least one letter"
        yield invalid_value(path, target, detail)


def _address_problems(spec: Json, old: Json, others: list[Json]) -> Iterator[Problem]:
    address, before = spec.get("clusterIP"), old.get("clusterIP")
    if before and address != before and "ExternalName" not in (old.get("type"), spec["type"]):
        yield invalid_value("spec.clusterIPs[0]", [address], "may not change once set")
    if before or address in (None, "", "None"):
        return
    try:
        inside = ipaddress.ip_address(address) in CLUSTER_RANGE
    except ValueError:
        yield invalid_value("spec.clusterIPs[0]", address, "must be a valid IP address")
        return
    if not inside:
        yield invalid_value("spec.clusterIPs", [address], f"must be an address in {CLUSTER_RANGE}")
    elif address in {other.get("clusterIP") for other in others}:
        yield invalid_value("spec.clusterIPs", [address], "provided IP is already allocated")
