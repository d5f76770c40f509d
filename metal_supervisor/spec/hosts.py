"""Hosts, IP addresses and URLs of web servers as text."""

from __future__ import annotations

import ipaddress
import urllib.parse
from typing import TypeAlias

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


def parsed_address(text: str) -> Address | None:
    """The address, without a scope, an IPv4-mapped IPv6 address as IPv4; None for any other text."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_loopback(host: str) -> bool:
    """True for `localhost` and for a loopback address."""
    address = parsed_address(host)
    return host == "localhost" if address is None else address.is_loopback


def web_url(text: str) -> urllib.parse.SplitResult | None:
    """Parts of an http(s) URL that names a host; None for any other text."""
    try:
        parts = urllib.parse.urlsplit(text)
        return parts if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 else None
    except ValueError:
        return None


def in_url(host: str) -> str:
    """A host as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host
