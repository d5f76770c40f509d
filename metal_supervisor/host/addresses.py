"""Choice of the address that this Mac advertises to pods: one that they can reach, or the reason why there is none.

The address from which this Mac reaches the API server is the best guess: nodes that answer it can usually call it
back. It tells nothing where the API server is forwarded to this Mac's own loopback, as minikube, kind, Docker Desktop
and colima do: their pods sit behind a NAT and reach any address of this Mac, so one that lasts is chosen. An address
that no pod can reach is refused here, because the API server refuses it too, or worse, accepts it, and every request
is lost.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from metal_supervisor.host import machine
from metal_supervisor.host.machine import Interface
from metal_supervisor.spec.hosts import Address, Network, parsed_address

REASON = "NoRoutableAddress"
TAILNETS = tuple(map(ipaddress.ip_network, ("100.64.0.0/10", "fd7a:115c:a1e0::/48")))
PRIVATE = tuple(map(ipaddress.ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")))
VIRTUAL = tuple(map(ipaddress.ip_network, ("172.17.0.0/16", "192.168.64.0/24", "192.168.65.0/24")))
"""Docker's bridge, and the networks of virtual machines on this Mac: no other host has a route to them."""
OF_MACHINES = re.compile(r"bridge[1-9]\d\d|vmenet|vmnet|docker|veth|virbr|br-")
"""Interfaces of containers and virtual machines. A VPN's, or bridge0 of Thunderbolt, may lead to pods."""
VIRTUAL_NAMES = ("bridge", "utun", "vmenet", "vmnet", "docker", "veth", "virbr", "br-", "awdl", "llw", "anpi")
HOST_NAMES = ("host.minikube.internal", "host.docker.internal")
HTTPS = 443
SHORTEST_PREFIX = 32
"""Shortest prefix of an IPv6 network that counts as on-link; a tunnel may claim that all of the internet is."""
Resolver = Callable[[str], Sequence[str]]
"""Name -> its addresses, none if it has none."""


@dataclass(frozen=True)
class NetworkView:
    """Input of the choice: the API server and this machine's network."""

    server: str
    """Host name or address of the API server."""
    route: str | None
    """Source address of the route to it; None if there is no route."""
    interfaces: Sequence[Interface]
    resolve: Resolver = field(repr=False)


@dataclass(frozen=True)
class AddressChoice:
    """The address to advertise, or why there is none."""

    address: str
    """"" if there is a problem."""
    origin: str
    """Origin of the address, for logs and `doctor`: "--host-ip", "the route to api.example" …"""
    problem: str = ""
    """`NoRoutableAddress: …` with what to do, "" if all is well."""
    note: str = ""
    """Advice that does not prevent the use of the address."""


def _within(address: Address, networks: Sequence[Network]) -> bool:
    return any(address in each for each in networks)


def _refused(origin: str, text: str) -> AddressChoice:
    return AddressChoice("", origin, f"{REASON}: {text}")


def _checked(text: str, origin: str) -> AddressChoice:
    """The address, in the form that the API server accepts, or the problem if it cannot be advertised."""
    problem = machine.address_problem(text, allow_loopback=False)
    return _refused(origin, f"{origin}: {problem}") if problem else AddressChoice(str(parsed_address(text)), origin)


def choose(asked: str, around: NetworkView) -> AddressChoice:
    """The address to advertise. `asked`: the setting --host-ip, which always wins, and is checked all the same."""
    if asked:
        choice = _checked(asked, "--host-ip")
        return choice if choice.problem else replace(choice, note=doubt(choice.address, around.interfaces))
    route = parsed_address(around.route) if around.route else None
    if route is None:
        text = f"this Mac has no route to the API server {around.server}; check the network, or set --host-ip"
        return _refused("the route", text)
    if not route.is_loopback:
        return _checked(str(route), f"the route to {around.server}")
    return _beside_the_cluster(around)


def doubt(address: str, interfaces: Sequence[Interface]) -> str:
    """Reason why pods may not reach an address set with --host-ip, or "" if none is known."""
    parsed = parsed_address(address)
    names = [each.name for each in interfaces if parsed_address(each.address) == parsed]
    if parsed is None or _within(parsed, VIRTUAL) or any(OF_MACHINES.match(name) for name in names):
        where = f" ({names[0]})" if names else ""
        text = f"{address} (--host-ip) is of a network{where} that containers or virtual machines on this Mac use"
        return f"{text}: pods elsewhere do not reach it; leave --host-ip away, or set an address of the LAN or tailnet"
    return "" if names else f"{address} (--host-ip) is no address of this machine now"


def _beside_the_cluster(around: NetworkView) -> AddressChoice:
    """For an API server on this machine's loopback: an address of this Mac that the cluster's pods reach by NAT."""
    best = _best(around.interfaces)
    if best is not None:
        return best
    for name in HOST_NAMES:
        for text in around.resolve(name):
            choice = _checked(text, name)
            if not choice.problem:
                return choice
    text = (
        f"the API server {around.server} is on this Mac's loopback, and no interface that is up has an address "
        "that pods could reach; connect to a network, or set --host-ip to what the cluster calls this Mac "
        "(in a pod: `getent hosts host.docker.internal` or `host.minikube.internal`)"
    )
    return _refused("this Mac's interfaces", text)


def _best(interfaces: Sequence[Interface]) -> AddressChoice | None:
    """The tailnet, else the LAN, else any other; an interface that may belong to virtual machines comes last."""
    ranked: list[tuple[int, int, AddressChoice]] = []
    for position, each in enumerate(interfaces):
        address = parsed_address(each.address)
        if address is None or not each.up or machine.address_problem(each.address, allow_loopback=False):
            continue
        if _within(address, VIRTUAL):
            continue
        rank, kind = _rank(address, each.name)
        ranked.append((rank, position, AddressChoice(str(address), f"{kind} ({each.name})")))
    return min(ranked, key=lambda found: found[:2])[2] if ranked else None


def _rank(address: Address, interface: str) -> tuple[int, str]:
    later = 2 if address.version == 6 else 0  # most clusters have only IPv4
    if _within(address, TAILNETS):
        return later, "tailnet"
    if interface.startswith(VIRTUAL_NAMES):
        return 5 + later, "virtual interface"
    if address.version == 4 and _within(address, PRIVATE):
        return 1, "LAN"
    return 3 + (later > 0), "network"


def networks_near(interfaces: Sequence[Interface]) -> tuple[Network, ...]:
    """The addresses of this machine, and the IPv6 networks that it is on: a server of the internet is on none."""
    found: set[Network] = set()
    for each in interfaces:
        address = parsed_address(each.address)
        if address is None:
            continue
        found.add(ipaddress.ip_network(address))
        if address.version == 6 and (length := _prefix(each.netmask)) >= SHORTEST_PREFIX:
            found.add(ipaddress.ip_network((address, length), strict=False))
    return tuple(found)


def _prefix(netmask: str) -> int:
    """Length of the prefix that an IPv6 netmask stands for; 0 if it is none."""
    try:
        bits = f"{int(ipaddress.IPv6Address(netmask.partition('/')[0])):0128b}"
    except ValueError:
        return 0
    return len(bits.rstrip("0")) if "01" not in bits else 0


# ── the real surroundings ────────────────────────────────────────────────────────────────────────


def look_up(name: str) -> Sequence[str]:
    """The addresses of a name, IPv4 first; none if it has none. May take seconds: not for the loop."""
    try:
        found = [str(each[4][0]) for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        return ()
    return sorted(dict.fromkeys(found), key=lambda address: ":" in address)


def advertised(asked: str, server: str, embedded: bool) -> AddressChoice:
    """The address to advertise to the cluster of that URL. Raises nothing; may wait for a name to be looked up.

    `server`: the API server, or the proxy that leads to it.
    `embedded`: the API server is our own, whose clients are all on this machine; then it is loopback.
    """
    if not embedded:
        parts = urllib.parse.urlsplit(server)
        name = parts.hostname or ""
        route = machine.route_to(name, parts.port or HTTPS)
        return choose(asked, NetworkView(name, route, machine.interfaces(), look_up))
    origin = "--host-ip" if asked else "the embedded API"
    problem = machine.address_problem(asked, allow_loopback=True) if asked else None
    return _refused(origin, problem) if problem else AddressChoice(asked or "127.0.0.1", origin)
