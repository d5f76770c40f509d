"""Checks of the values of settings: each gets a value of the setting's type, and returns what it must be, or None."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from metal_supervisor.spec.hosts import web_url

SettingCheck: TypeAlias = Callable[[Any], str | None]


def one_of(*words: str) -> SettingCheck:
    return lambda value: None if value in words else f"must be one of {', '.join(words)}"


def between(low: float, high: float) -> SettingCheck:
    return lambda value: None if low <= value <= high else f"must be between {low} and {high}"


def address(value: str) -> str | None:
    """Check of an IP address, or nothing."""
    try:
        ipaddress.ip_address(value or "127.0.0.1")
    except ValueError:
        return "must be an IP address"
    return None


def like(pattern: str, wanted: str) -> SettingCheck:
    """Check of a text that has to match a pattern as a whole."""
    return lambda value: None if re.fullmatch(pattern, value, re.ASCII) else f"must {wanted}"


def each_of(check: Callable[[str], str | None]) -> SettingCheck:
    """Check of each part of a comma-separated text."""
    return lambda value: next(filter(None, map(check, listed(value))), None)


def web(pattern: str, wanted: str) -> SettingCheck:
    """As `like`, of a text that may be a URL: its port must be one that there is."""

    def check(value: str) -> str | None:
        problem = like(pattern, wanted)(value)
        if problem is None and value.startswith("http") and web_url(value) is None:
            return "must have a port between 1 and 65535"
        return problem

    return check


def address_and_port(value: str) -> str | None:
    """Check of an IP address and a port, or nothing."""
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[0-9.]+):([0-9]{1,5})", value, re.ASCII)
    if value and (found is None or address(found[1].strip("[]")) or not 1 <= int(found[2]) <= 65535):
        return "must look like 192.168.1.20:9091, or [fd00::1]:9091: an IP address of this Mac and a port"
    return None


def gateway_address(value: str) -> str | None:
    if value == "off" or address_and_port(value) is None:
        return None
    return "must be off, or look like 127.0.0.1:9100, or [::1]:9100: an IP address of this Mac and a port"


def path(value: str) -> str | None:
    """Check of a path, or of nothing: it must not begin at a home directory that is not known, nor lead in a circle."""
    if not value:
        return None
    try:
        found = Path(value).expanduser()
    except RuntimeError:
        return "must not begin with the ~ of a user whose home directory is not known"
    try:
        found.resolve()
    except RuntimeError:  # not of every version of Python
        return "must not lead in a circle by its links"
    except OSError:
        return "must be absolute, as the current directory was removed"
    return None


def node_name(value: str) -> str | None:
    """Check of a Mac's name in the cluster, or nothing."""
    if value == "reaper":
        return "must not be the name of the cluster's reaper"
    return like(
        r"([a-z0-9]([-a-z0-9]{0,48}[a-z0-9])?)?", "be a name of lower-case letters, digits and dashes, at most 50"
    )(value)


def port_range(value: str) -> str | None:
    found = re.fullmatch(r"(\d{4,5})-(\d{4,5})", value, re.ASCII)
    good = found is not None and 1024 <= int(found[1]) <= int(found[2]) <= 65535
    return None if good else "must look like 18100-18999, within 1024-65535"


def host(value: str) -> str | None:
    if value and address(value) is None:
        return None
    return like(
        r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", "name hosts, without scheme or port, separated by commas"
    )(value)


def host_or_network(value: str) -> str | None:
    with suppress(ValueError):
        ipaddress.ip_network(value, strict=False)
        return None
    return "must name hosts, without scheme or port, or networks, separated by commas" if host(value) else None


_DNS = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,252}[A-Za-z0-9])?"
_URL = r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?"
namespace = like(r"([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?", "be the name of a namespace, or empty for all of them")
namespaced = like(f"({_DNS}/{_DNS})?", "look like llm/gateway-keys: a namespace and a name in it")
label_list = each_of(like(f"{_LABEL}=({_LABEL})?", "look like name=value,name=value"))
_ORIGIN_HOST = r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?|\[[0-9a-f:]+\])"
origin = web(
    rf"http://{_ORIGIN_HOST}(:(?!80\Z)[1-9][0-9]*)?|https://{_ORIGIN_HOST}(:(?!443\Z)[1-9][0-9]*)?"
    r"|app://obsidian\.md|chrome-extension://[a-p]{32}",
    "name origins as browsers send them, separated by commas: http://localhost:3000 (lower case, no path, no pattern, "
    "the port unless it is the scheme's own), app://obsidian.md, or chrome-extension:// and the extension's ID",
)
origins = each_of(origin)
daemon_url = web(
    r"off|http://(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?/?",
    "be off, or look like http://127.0.0.1:11434: only a daemon of this machine",
)
proxy = like(
    r"(off|[/~].*|(https?|socks5h?)://[A-Za-z0-9.-]+(:[0-9]{1,5})?/?)?",
    "be off, look like http://proxy.example.com:3128, or be the absolute path of a file with the proxy's URL, "
    "where a password belongs",
)
mirror = web(f"({_URL}/?)?", "look like https://registry.example.com")
hub = web(rf"(/.*|{_URL}(/[\w./-]*)?)?", "look like https://mirror.example.com, or be an absolute directory")
directory_list = each_of(like("[/~].*", "be absolute directories, separated by commas"))


def kubeconfigs(value: str) -> list[Path]:
    """Files of a list such as $KUBECONFIG, separated by colons; one file if that is what the whole text names."""
    whole = Path(value).expanduser()
    if os.pathsep not in value or os.access(whole, os.F_OK):
        return [whole]
    return [Path(each).expanduser() for each in value.split(os.pathsep) if each]


def listed(value: str) -> tuple[str, ...]:
    """Parts of a comma-separated setting."""
    return tuple(each.strip() for each in value.split(",") if each.strip())


RUNTIME_CHECKS: dict[str, Callable[[str], str | None]] = {}
"""Setting -> check of the runtimes, flags or variables that it names; `runtimes.setting_checks` fills it in."""
load_runtime_checks: Callable[[], None] | None = None
"""Fills it in, when the first of them is needed; `cli.main` sets it."""


def by_runtimes(name: str) -> Callable[[str], str | None]:
    def check(value: str) -> str | None:
        if not RUNTIME_CHECKS and load_runtime_checks is not None:
            load_runtime_checks()
        return RUNTIME_CHECKS[name](value)

    return check
