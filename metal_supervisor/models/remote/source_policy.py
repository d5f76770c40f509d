"""Policy for the hosts, and their addresses, that models may be fetched from.

A user who may write a Model makes this Mac connect to any host, and to whatever address its name resolves to: the
router's admin page, a neighbour's disk, a cloud's metadata service. So only public addresses are allowed, unless this
Mac's settings allow others.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from metal_supervisor.spec.hosts import Address, Network

NAT64 = ipaddress.ip_network("64:ff9b::/96")
HUB_HOSTS = ("huggingface.co", "hf.co")
"""Hugging Face and its CDN, whose hosts are subdomains of both."""
UNICAST = ipaddress.ip_network("2000::/3")
"""Global unicast addresses of IPv6; the rest is special in one way or another, and no list of that is complete."""


@dataclass(frozen=True)
class SourcePolicy:
    """Hosts and addresses that models may be fetched from."""

    hosts: tuple[str, ...] = ()
    """Allowed host names, their subdomains included; empty: any."""
    private: tuple[str, ...] = ()
    """Names and networks (CIDR) whose addresses need not be public."""
    mirror: tuple[str, int] | None = None
    """(host, port) of the Hub's mirror in this Mac's settings, whose address need not be public."""
    lax: bool = False
    """True for requests of a user at this Mac: any address is allowed."""
    proxies: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Forward proxies, as `host.proxies` describes them; their URLs may hold a password."""
    proxied: tuple[str, ...] = ()
    """Further host names that may be requested through a proxy while `hosts` is empty."""
    ca_file: str = ""
    """File or directory of the trusted authorities, "" for those of this machine."""

    def allows_host(self, host: str) -> bool:
        """True if requests to a host name are allowed, whatever its address."""
        return not self.hosts or _among(host, self.hosts)

    def allows_address(self, host: str, address: Address, port: int = 0, near: Collection[Network] = ()) -> bool:
        """True if a host may be connected to at an address that it resolves to. `near`: see `is_public`."""
        return is_public(address, near) or self.is_named(host, address, port)

    def allows_through_proxy(
        self, host: str, address: Address | None, port: int, near: Collection[Network] = ()
    ) -> bool:
        """Return True if a host may be requested through a proxy, which resolves names itself.

        `address`: the one that the host spells, None for a name.
        """
        if self.is_named(host, address, port):
            return True
        if address is not None and not is_public(address, near):
            return False
        return bool(self.hosts) or _among(host, (*HUB_HOSTS, *self.proxied))

    def is_named(self, host: str, address: Address | None, port: int = 0) -> bool:
        """True if this Mac's settings name a host, or the network of its address."""
        if self.lax or _among(host, self.private):
            return True
        if (host.rstrip(".").lower(), port) == self.mirror:
            return True
        networks = [network for network in map(_network, self.private) if network is not None]
        return address is not None and any(address in each for each in networks if each.version == address.version)


def _among(host: str, names: tuple[str, ...]) -> bool:
    plain = host.rstrip(".").lower()
    return any(plain == name or plain.endswith(f".{name}") for name in (each.lower() for each in names))


def _network(text: str) -> Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def is_public(address: Address, near: Collection[Network] = ()) -> bool:
    """True if an address is public; of one that wraps an IPv4 address, if that is public.

    `near`: networks that this Mac is in, which do not count as public. IPv6 gives every device at home a public
    address, so a neighbour's disk cannot be told from a server by its number alone.
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
