"""Which hosts, and which of their addresses, models may be fetched from.

Whoever may write a Model makes this Mac connect to a host of his choice, with whatever that host's name resolves to:
the router's admin page, a neighbour's disk, the metadata of a cloud. So only addresses of the internet will do, unless
whoever runs the Mac says otherwise.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
NAT64 = ipaddress.ip_network("64:ff9b::/96")
UNICAST = ipaddress.ip_network("2000::/3")
"""What IPv6 gives to the internet; the rest is special in one way or another, and no list of that is complete."""


@dataclass(frozen=True)
class SourcePolicy:
    """Where models may be fetched from."""

    hosts: tuple[str, ...] = ()
    """Names of hosts, their subdomains included; empty: any."""
    private: tuple[str, ...] = ()
    """Names and networks (CIDR) for which an address may be one that is not public."""
    mirror: tuple[str, int] | None = None
    """(host, port) of the mirror of the Hub that whoever runs this Mac has set; its address may be any."""
    lax: bool = False
    """Whoever asks sits at this Mac: any address will do."""

    def allows_host(self, host: str) -> bool:
        """Whether a name may be asked at all."""
        return not self.hosts or _among(host, self.hosts)

    def allows_address(
        self, host: str, address: Address, port: int = 0, near: Collection[Network] = ()
    ) -> bool:
        """Whether a name may be what it resolves to. `near`: see `is_public`."""
        return is_public(address, near) or self.is_named(host, address, port)

    def is_named(self, host: str, address: Address, port: int = 0) -> bool:
        """Whether whoever runs this Mac has named a host, or the network that it is in."""
        if self.lax or _among(host, self.private):
            return True
        if (host.rstrip(".").lower(), port) == self.mirror:
            return True
        networks = [network for network in map(_network, self.private) if network is not None]
        return any(address in network for network in networks if network.version == address.version)


def _among(host: str, names: tuple[str, ...]) -> bool:
    plain = host.rstrip(".").lower()
    return any(plain == name or plain.endswith(f".{name}") for name in (each.lower() for each in names))


def _network(text: str) -> Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def is_public(address: Address, near: Collection[Network] = ()) -> bool:
    """Whether an address is one of the internet's, and so is the IPv4 one that may be wrapped in it.

    `near`: networks of this Mac's own. IPv6 gives every device of a home an address of the internet's, so that by its
    number alone a neighbour's disk cannot be told from a server.
    """
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner, near)
        if address not in UNICAST:
            return False
    if any(address in network for network in near if network.version == address.version):
        return False
    return address.is_global and not address.is_multicast
