"""Services: defaults, and unique, stable addresses.

Nothing routes these addresses here; they exist because clients, `kubectl get` and the promise "the
clusterIP stays while the model is stopped" need them to. Node ports and load balancers, which nothing here would
serve, are stored as they are sent.
"""

from __future__ import annotations

import ipaddress

from .codec import listed, section
from .errors import Json, Problem, invalid_value

CLUSTER_RANGE = ipaddress.ip_network("10.96.0.0/16")
_FIRST_HOST = 10
"""The lowest addresses are left free, as real clusters reserve them."""


def complete_service(service: Json, previous: Json | None) -> list[Problem]:
    """Fill in what users leave out and the address that was chosen before, in place. Report a changed address."""
    spec, old = service["spec"], section(previous, "spec")
    for port in listed(spec.get("ports")):
        if port.get("targetPort") in (None, "", 0):
            port["targetPort"] = port.get("port", 0)
    before = old.get("clusterIP")
    if "ExternalName" in (spec["type"], old.get("type")):
        return []
    address = spec.pop("clusterIP", "") or before
    if address:
        spec["clusterIP"] = address
    if before in (None, address):
        return []
    return [invalid_value("spec.clusterIPs[0]", [address], "may not change once set")]


def allocate(spec: Json, services: list[Json]) -> None:
    """Choose the address that a Service needs and does not have, in place; no manager owns it.

    `services`: all that are stored.
    """
    if spec["type"] == "ExternalName":
        return
    if not spec.get("clusterIP"):
        taken = {section(other, "spec").get("clusterIP") for other in services}
        addresses = (str(CLUSTER_RANGE[host]) for host in range(_FIRST_HOST, CLUSTER_RANGE.num_addresses - 1))
        spec["clusterIP"] = next((address for address in addresses if address not in taken), "")
    spec["clusterIPs"] = [spec["clusterIP"]]
