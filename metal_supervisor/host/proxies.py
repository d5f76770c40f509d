"""Choice of the forward proxy for a URL, for the Kubernetes API and for downloads.

A table of proxies has the keys of `urllib.request.getproxies`: a proxy for each scheme, `all` for the other schemes,
and `no` for the hosts that are reached directly.
"""

from __future__ import annotations

import ipaddress
import urllib.parse
from collections.abc import Mapping

import urllib3

from metal_supervisor.spec.hosts import parsed_address

SCHEMES = ("http", "https", "socks5", "socks5h")


def is_proxy(url: str) -> bool:
    """Return True for the URL of a proxy that requests can be sent through."""
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme in SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def proxy_for(url: str, proxies: Mapping[str, str]) -> str:
    """Return the URL of the proxy for a request, "" to connect directly."""
    parts = urllib.parse.urlsplit(url)
    proxy = proxies.get(parts.scheme) or proxies.get("all", "")
    direct = (each.strip().lower().lstrip(".") for each in proxies.get("no", "").split(","))
    if not proxy or any(_matches(parts, each) for each in direct if each):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def _matches(parts: urllib.parse.SplitResult, rule: str) -> bool:
    """Return True if a rule of NO_PROXY covers a URL: `*`, a domain, HOST:PORT, an address or a network."""
    host = parts.hostname or ""
    if rule == "*" or f".{host}".endswith(f".{rule}") or f".{host}:{parts.port}".endswith(f".{rule}"):
        return True
    address = parsed_address(host)
    try:
        return address is not None and address in ipaddress.ip_network(rule, strict=False)
    except ValueError:
        return False


def reached(proxy: str) -> str:
    """Return a proxy's URL for urllib3, which resolves names itself for `socks5`: kubectl leaves that to the proxy."""
    return proxy.replace("socks5://", "socks5h://", 1)


def login_headers(proxy: str) -> dict[str, str]:
    """Return the headers that log in to a proxy by its URL's user and password, {} for SOCKS, where urllib3 does that.

    Raises ValueError for credentials that no header can hold.
    """
    login = urllib.parse.urlsplit(proxy).netloc.rpartition("@")[0]
    plain = proxy.startswith("http") and login
    return urllib3.make_headers(proxy_basic_auth=urllib.parse.unquote(login)) if plain else {}


def without_login(url: str) -> str:
    """Return scheme, host and port of a URL, without the password and without the path, which may be a secret."""
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
