"""Facts about this machine: its name, addresses and processes, and its engines' binaries."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import psutil

from metal_supervisor import launch
from metal_supervisor.host import commands, darwin_memory
from metal_supervisor.host.chip import Chip
from metal_supervisor.host.left_engines import Process
from metal_supervisor.host.liveness import LivenessSigns

HOMEBREW = ("/opt/homebrew/bin", "/usr/local/bin")
IOREG = "ioreg", "-rd1", "-c", "IOPlatformExpertDevice"
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
    kept.write_text(name + "\n", "utf-8")
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
    with contextlib.suppress(OSError):
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
    try:
        return mac.number("hw.perflevel0.physicalcpu") or None
    except OSError:
        return None


@lru_cache(maxsize=4)
def capabilities(chip: Chip) -> dict[str, str]:
    """Facts for the node Lease: `chip`, `memory` in bytes, and for a Mac the other facts known."""
    cores = ", ".join(f"{count} {level}" for level, count in chip.cores)
    gpu = str(chip.gpu_cores or "")
    further = {"model": chip.model, "macos": chip.macos, "cores": cores, "gpu-cores": gpu, "metal": chip.metal}
    told = {name: text for name, text in further.items() if text}
    return {"chip": chip.name or platform.machine(), "memory": str(memory_bytes()), **told}


def memory_bytes() -> int:
    """Size of this machine's memory."""
    mac = darwin_memory.mac()
    return mac.total_bytes() if mac else int(psutil.virtual_memory().total)  # which raises on macOS 27


def parsed_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address, without a scope, an IPv4-mapped IPv6 address as IPv4; None for any other text."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def address_problem(address: str, allow_loopback: bool) -> str | None:
    """Reason why an address cannot be advertised in a cluster, or None if it can. Raises ValueError for no address."""
    parsed = ipaddress.ip_address(address)
    parsed = getattr(parsed, "ipv4_mapped", None) or parsed
    remedy = "set --host-ip to an address that pods can reach"
    if parsed.is_loopback:
        return None if allow_loopback else f"{address} is loopback: no pod can reach it; {remedy}"
    if parsed.is_link_local or parsed.is_unspecified or parsed.is_multicast or str(parsed) == BROADCAST:
        return f"{address} is not routable; {remedy}"
    return None


def interfaces() -> tuple[Interface, ...]:
    """Every IP address of this machine, in the system's order of interfaces."""
    states = psutil.net_if_stats()
    return tuple(
        Interface(name, each.address.partition("%")[0], name in states and states[name].isup, each.netmask or "")
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family in (socket.AF_INET, socket.AF_INET6)
    )


def own_addresses(told: str = "") -> frozenset[str]:
    """Every IP address of this machine, and the advertised one, which may be a router's.

    `told`: the advertised one, in any spelling; the result has each address in its canonical form.
    """
    known, more = {each.address for each in interfaces()}, parsed_address(told)
    return frozenset(known if more is None else known | {str(more)})


def route_to(host: str, port: int) -> str | None:
    """The local address from which this machine reaches `host`; sends nothing."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def find_binary(setting: str, name: str, install: str, flag: str | None = "") -> Path:
    """An engine's executable: the configured one, else PATH, else Homebrew's prefixes. Raises NoBinary.

    `flag`: of the setting, "" if it is named like the executable, None without one.
    """
    if setting:
        path = Path(setting).expanduser().absolute()
        if path.is_file() and os.access(path, os.X_OK):
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


_known_versions: dict[tuple[Path, float], str] = {}


def version_of(path: Path) -> str:
    """The version that a binary reports, "" if it does not; asked once per build of it."""
    try:
        build = path, path.stat().st_mtime
    except OSError:
        return ""
    if build not in _known_versions:
        text = commands.run((str(path), "--version")).text
        found = re.search(r"version(?:\s+is)?:?\s+v?([0-9][\w.+-]{0,60})", text)
        _known_versions[build] = found[1] if found else ""
    return _known_versions[build]


def package_version(python: str, package: str, timeout_s: float) -> str:
    """The version of a package that an interpreter finds, "" if it finds none."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    said = commands.run((python, "-E", "-c", code), timeout_s).out
    return said.strip() if re.fullmatch(r"[0-9][\w.+!-]{0,60}\s*", said, re.ASCII) else ""


def command_line(pid: int) -> list[str] | None:
    """argv of a process, None if it is gone."""
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return None


def marked(name: str, prefix: str) -> dict[int, str]:
    """pid -> value of a variable, for each leader of a process group whose value begins with `prefix`."""
    found = {}
    for process in _processes():
        with contextlib.suppress(Exception):  # as below
            value = process.environ().get(name, "")
            if value.startswith(prefix) and os.getpgid(process.pid) == process.pid:
                found[process.pid] = value
    return found


def abandoned() -> list[Process]:
    """Processes of this user whose parent has ended, and that init or launchd has adopted."""
    found = []
    for process in _processes():
        with contextlib.suppress(Exception):  # as below
            if process.ppid() == 1 and process.uids().real == os.getuid():
                argv, environ = process.cmdline(), process.environ()
                found.append(Process(process.pid, argv, environ, resident_bytes(process.pid) or 0))
    return found


def _processes() -> Iterator[psutil.Process]:
    # Not `psutil.process_iter`: what it raises for one process (on a Mac also SystemError, RuntimeError) ends the look.
    pids: list[int] = []
    with contextlib.suppress(Exception):
        pids = psutil.pids()
    for pid in pids:
        try:
            process = psutil.Process(pid)
        except Exception:  # noqa: BLE001 - the reason for this function
            continue
        yield process


def started_at(pid: int) -> float | None:
    """Unix time at which a process was started, None if there is none."""
    try:
        return float(psutil.Process(pid).create_time())
    except Exception:  # noqa: BLE001 - as below
        return None


def has_written(pid: object, at: object) -> bool:
    """True if the process that wrote a pid and the Unix time into a note lives; a later one may have its pid."""
    if not isinstance(pid, int) or not isinstance(at, (int, float)):
        return False
    began = started_at(pid)
    return began is not None and began <= at


def resident_bytes(pid: int) -> int | None:
    """Resident memory of a process, None if it is gone or cannot be asked."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except Exception:  # noqa: BLE001 - on a Mac psutil lets out SystemError and RuntimeError as well
        return None


def children(pid: int) -> list[int]:
    """Pids of a process's children, without a look at any other process; none where that cannot be seen."""
    if sys.platform == "darwin":
        return launch.listed_pids(launch.PROC_PPID_ONLY, pid)
    found, threads = list[int](), list[Path]()
    with contextlib.suppress(OSError):  # it has ended
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    for each in threads:
        with contextlib.suppress(OSError):  # the thread that began them has ended: they are another's now
            found += map(int, (each / "children").read_text("ascii").split())
    return found


def descendants(pid: int) -> list[tuple[int, str]]:
    """(pid, launch.start_time) of all descendants of a process; none where that cannot be seen."""
    found, left = [], [pid]
    while left:
        for child in children(left.pop()):
            if born := launch.start_time(child):
                found.append((child, born))
                left.append(child)
    return found


def signs(pid: int, port: int) -> LivenessSigns | None:
    """Signs of work of an engine that does not answer, with its children; None if it is gone."""
    family = _family(pid)
    if not family:
        return None
    try:
        halted = family[0].status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return None
    cpu_s, io_bytes, clients = 0.0, 0, False
    for each in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            cpu_s += _cpu_s(each)
            io_bytes += _io_bytes(each)
            clients = clients or _has_clients(each, port)
    return LivenessSigns(cpu_s, io_bytes, clients, halted, blind=sys.platform == "darwin")


def _family(pid: int) -> list[psutil.Process]:
    """A process and its descendants; none if it is gone."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.AccessDenied:
        return 0.0
    return times.user + times.system


def _io_bytes(process: psutil.Process) -> int:
    """Bytes read and written by any means; macOS does not tell."""
    try:
        found = process.io_counters()  # type: ignore[attr-defined, unused-ignore]
    except (AttributeError, psutil.AccessDenied):
        return 0
    return int(getattr(found, "read_chars", found.read_bytes) + getattr(found, "write_chars", found.write_bytes))


def _has_clients(process: psutil.Process, port: int) -> bool:
    """True if a connection to the port is established, or where that cannot be seen."""
    try:
        found = process.net_connections("tcp")
    except (psutil.AccessDenied, OSError):
        return True
    return any(each.status == psutil.CONN_ESTABLISHED and each.laddr.port == port for each in found)


def has_clients(pid: int, port: int) -> bool:
    """True if an engine has clients, or where that cannot be seen; False if it is gone."""
    for each in _family(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            if _has_clients(each, port):
                return True
    return False


def listens(pid: int, port: int) -> frozenset[str] | None:
    """Addresses on which a process, or else its children, listen at a port; None where that cannot be seen."""
    try:
        process = psutil.Process(pid)
        found = _listening(process, port)
        return found or frozenset().union(*(_listening(each, port) for each in process.children(recursive=True)))
    except (psutil.Error, OSError):
        return None


def _listening(process: psutil.Process, port: int) -> frozenset[str]:
    found = process.net_connections("tcp")
    ours = [each for each in found if each.status == psutil.CONN_LISTEN and each.laddr.port == port]
    return frozenset(str(each.laddr.ip) for each in ours)


def port_holder(port: int) -> str:
    """Process that listens on a port of this machine: `nginx (pid 123)`, "another process" if that cannot be seen."""
    for process in _processes():  # the list of all connections needs root on a Mac; one's own do not
        with contextlib.suppress(Exception):  # as above
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    return f"{process.name()} (pid {process.pid})"
    return "another process"


def port_free(port: int, host: str) -> bool:
    """True if a server could listen there now, by the launcher's own rule."""
    return launch.holder_of(port, host) is None
