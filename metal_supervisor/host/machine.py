"""Facts about this machine: its name and addresses, and its engines' binaries."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import socket
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import psutil

from metal_supervisor.host import commands, darwin_memory
from metal_supervisor.host.chip import Chip
from metal_supervisor.spec.hosts import parsed_address
from metal_supervisor.state.kept_files import Edition, edition_of, write_atomic

HOMEBREW = ("/opt/homebrew/bin", "/usr/local/bin")
IOREG = "/usr/sbin/ioreg", "-rd1", "-c", "IOPlatformExpertDevice"
BROADCAST = "255.255.255.255"


class NoBinary(Exception):
    """An engine's executable is not here; the message says how to get it."""


@dataclass(frozen=True)
class Interface:
    """One address of one network interface."""

    name: str
    address: str
    """Without the scope that a link-local one carries."""
    up: bool
    netmask: str = ""
    """As the system tells it, "" if it tells none."""


def node_name(state: Path, setting: str = "") -> str:
    """`<hostname>-<8 hex>`, unique and stable; fits a label. Chosen once, kept in the state directory.

    A name that another machine chose is not kept: state directories get copied.
    """
    if setting:
        return setting
    kept = state / "node"
    machine = _machine_id()
    digest = hashlib.sha256((machine or os.urandom(16).hex()).encode()).hexdigest()[:8]
    with contextlib.suppress(OSError, UnicodeDecodeError):
        found = kept.read_text("utf-8").strip()
        ours = not machine or found.endswith(f"-{digest}")
        if ours and re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", found):
            return found
    host = re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().partition(".")[0].lower()).strip("-")[:40] or "mac"
    name = f"{host}-{digest}"
    write_atomic(kept, name + "\n")
    return name


@lru_cache(maxsize=1)
def _machine_id() -> str:
    """Unique id of this machine, "" if the system has none."""
    if sys.platform == "darwin":
        found = re.search(r'"IOPlatformUUID" = "([^"]+)"', commands.run(IOREG).out)
        if found:
            return found[1]
    with contextlib.suppress(OSError):
        return Path("/etc/machine-id").read_text("utf-8").strip()
    return ""


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Identity of this boot of the machine: another one each time it is started."""
    mac = darwin_memory.mac()
    with contextlib.suppress(OSError):
        if mac:  # not the time of the boot, which follows each correction of the clock
            return mac.text("kern.bootsessionuuid")
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return str(int(psutil.boot_time()))


@lru_cache(maxsize=1)
def performance_cores() -> int | None:
    """Number of performance cores of an Apple chip; None elsewhere, where engines know better.

    Asked once: an answer that came and went would change every engine's arguments.
    """
    mac = darwin_memory.mac()
    if mac is None:
        return None
    try:  # not the first of `Chip.cores`, which leaves out a level that cannot be counted
        return mac.number("hw.perflevel0.physicalcpu") or None
    except OSError:
        return None


@lru_cache(maxsize=4)
def capabilities(found: Chip) -> dict[str, str]:
    """Facts for the node Lease: `chip`, `memory` in bytes, and for a Mac the other facts known."""
    cores = ", ".join(f"{count} {level}" for level, count in found.cores)
    gpu = str(found.gpu_cores or "")
    further = {"model": found.model, "macos": found.macos, "cores": cores, "gpu-cores": gpu, "metal": found.metal}
    told = {name: text for name, text in further.items() if text}
    return {"chip": found.name or platform.machine(), "memory": str(memory_bytes()), **told}


def memory_bytes() -> int:
    mac = darwin_memory.mac()
    return mac.total_bytes() if mac else int(psutil.virtual_memory().total)  # which raises on macOS 27


def address_problem(address: str, allow_loopback: bool) -> str | None:
    """Reason why an address cannot be advertised in a cluster, or None if it can."""
    parsed, remedy = parsed_address(address), "set --host-ip to an address that pods can reach"
    if parsed is None:
        return f"{address!r:.80} is not an IP address; {remedy}"
    if parsed.is_loopback:
        return None if allow_loopback else f"{address} is loopback: no pod can reach it; {remedy}"
    if parsed.is_link_local or parsed.is_unspecified or parsed.is_multicast or str(parsed) == BROADCAST:
        return f"{address} is not routable; {remedy}"
    return None


def interfaces() -> tuple[Interface, ...]:
    """Every IP address of this machine, in the system's order of interfaces. Raises OSError."""
    try:
        states, found = psutil.net_if_stats(), psutil.net_if_addrs()
    except (RuntimeError, SystemError) as error:  # psutil on a Mac, as with too many open files
        raise OSError(f"the interfaces cannot be read: {error}") from None
    return tuple(
        Interface(name, each.address.partition("%")[0], name in states and states[name].isup, each.netmask or "")
        for name, addresses in found.items()
        for each in addresses
        if each.family in (socket.AF_INET, socket.AF_INET6)
    )


def own_addresses(told: str = "") -> frozenset[str]:
    """Every IP address of this machine, and the advertised one, which may be a router's.

    `told`: the advertised one, in any spelling; the result has each address in its canonical form. Raises OSError.
    """
    known, more = {each.address for each in interfaces()}, parsed_address(told)
    return frozenset(known if more is None else known | {str(more)})


def route_to(host: str, port: int) -> str | None:
    """The local address from which this machine reaches `host`, None if it does not; sends nothing.

    One that is of its link alone is told only without another: a Mac finds both for a name in `.local`. One of IPv6 is
    told only without one of IPv4: engines listen on that, and few clusters have the other.
    """
    found: str | None = None
    with contextlib.suppress(UnicodeError, OSError):  # the former for a name that no resolver takes
        places = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        for family, kind, protocol, _, target in sorted(places, key=lambda each: each[0] != socket.AF_INET):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                local = str(probe.getsockname()[0])
                if (address := parsed_address(local)) and not address.is_link_local:
                    return local
                found = found or local
    return found


def executable(setting: str) -> Path | None:
    """The executable file that a setting names; None if that is none, or cannot be looked at."""
    with contextlib.suppress(OSError, RuntimeError):  # a directory that is closed to this user, or `~` of no user
        path = Path(setting).expanduser().absolute()
        if path.is_file() and os.access(path, os.X_OK):
            return path
    return None


def find_binary(setting: str, name: str, install: str, flag: str | None = "") -> Path:
    """An engine's executable: the configured one, else PATH, else Homebrew's prefixes. Raises NoBinary.

    `flag`: of the setting, "" if it is named like the executable, None without one.
    """
    if setting:
        if path := executable(setting):
            return path
        text = f"{flag or f'--{name}'} is {setting!r}, which is not an executable file"
        raise NoBinary(f"{text}; {install}, or correct it")
    places = [place for place in os.environ.get("PATH", "").split(os.pathsep) if place]
    found = shutil.which(name, path=os.pathsep.join([*places, *HOMEBREW]))
    if found:
        return Path(found).absolute()
    more = "" if flag is None else f", or set {flag or f'--{name}'}"
    raise NoBinary(f"{name} was not found on PATH or in Homebrew's prefixes; {install}{more}")


def help_of(path: Path, timeout_s: float = commands.TIMEOUT_S, asking: tuple[str, ...] = ("--help",)) -> str:
    """Output of a binary's `--help`, "" if there is none."""
    return commands.run((str(path), *asking), timeout_s).out


def flags_in(help_text: str) -> frozenset[str]:
    """The `--flags` that a help text names, anywhere in it."""
    return frozenset(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", help_text))


def version_of(path: Path) -> str:
    """The version that a binary reports, "" if it does not; asked once per build of it."""
    build = edition_of(path)
    return _version(path, build) if build else ""


@lru_cache(maxsize=64)
def _version(path: Path, _build: Edition) -> str:
    text = commands.run((str(path), "--version")).text
    found = re.search(r"version(?:\s+is)?:?\s+v?([0-9][\w.+-]{0,60})", text)
    return found[1] if found else ""


def package_version(python: str, package: str, timeout_s: float) -> str:
    """The version of a package that an interpreter finds, "" if it finds none."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    said = commands.run((python, "-E", "-c", code), timeout_s).out
    return said.strip() if re.fullmatch(r"[0-9][\w.+!-]{0,60}\s*", said, re.ASCII) else ""
