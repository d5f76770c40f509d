"""Processes of this machine: whose they are, what they hold, where they listen, and signs of their work."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import psutil

from metal_supervisor import launch
from metal_supervisor.host.liveness import LivenessSigns
from metal_supervisor.spec.document import string
from metal_supervisor.spec.terminal_text import printable
from metal_supervisor.spec.types import Json

LONGEST_NAME = 40
"""Characters of a process's name in a message."""
UNSEEN = psutil.AccessDenied, OSError, RuntimeError, SystemError
"""What psutil raises for a process that it cannot see; the last two on a Mac, where a call fails without an errno."""


def command_line(pid: int) -> list[str] | None:
    """argv of a process, None if it is gone or cannot be seen."""
    try:
        return psutil.Process(pid).cmdline()
    except (psutil.Error, *UNSEEN):
        return None


def marked(state: Path) -> dict[int, str]:
    """pid -> path of its spec, for each leader of a process group with the mark of an engine of this directory."""
    found, here = {}, launch.identity(str(state))
    for process in _processes():
        with contextlib.suppress(Exception):  # as below
            spec = process.environ()[launch.MARK]
            if launch.identity(str(Path(spec).parent.parent)) == here and os.getpgid(process.pid) == process.pid:
                found[process.pid] = spec
    return found


def supervisord_of(state: Path) -> int:
    """Pid of a supervisord of any release that was started on this state directory, 0 without one."""
    here = launch.identity(str(state))
    return next((each.pid for each, directory in _supervisords() if launch.identity(str(directory)) == here), 0)


def systems() -> list[Path]:
    """State directories in which a supervisord of this user runs, of any release, by the process table.

    One with another home directory has other defaults, and is left out.
    """
    found, home = [], os.environ.get("HOME")
    for process, directory in _supervisords():
        with contextlib.suppress(Exception):  # as below
            own = process.uids().real == os.getuid() and process.environ().get("HOME", home) == home
            if own and (directory / "supervisord.pid").read_text("utf-8").strip() == str(process.pid):
                found.append(directory.resolve())
    return sorted(found)


def _supervisords() -> Iterator[tuple[psutil.Process, Path]]:
    """Each supervisord of metal-supervisor, with its state directory."""
    for process in _processes():
        with contextlib.suppress(Exception):  # as below
            argv = process.cmdline()
            conf = Path(argv[-1])
            if conf.name == "supervisord.conf" and any(word.startswith("metal_supervisor.") for word in argv):
                yield process, conf.parent


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


def has_written(note: Json) -> bool:
    """True if the process that wrote its `pid`, and the Unix time `at`, into a note lives; another may have its pid."""
    pid, at = note.get("pid"), note.get("at")
    if not isinstance(pid, int) or not isinstance(at, (int, float)):
        return False
    began = started_at(pid)
    return began is not None and began <= at


def problem_told(note: Json) -> str:
    """The `problem` in a process's note; "" if that process has ended, as one of an earlier run."""
    problem = string(note, "problem")
    return problem if problem and has_written(note) else ""


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
    except (psutil.Error, *UNSEEN):
        return None
    cpu_s, io_bytes, clients = 0.0, 0, False
    for each in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            cpu_s += _cpu_s(each)
            io_bytes += _io_bytes(each)
            clients = clients or _has_clients(each, port)
    return LivenessSigns(cpu_s, io_bytes, clients, halted, blind=sys.platform == "darwin")


def _family(pid: int) -> list[psutil.Process]:
    """A process and those of its descendants that can be seen; none if it is gone."""
    found = list[psutil.Process]()
    with contextlib.suppress(psutil.Error, *UNSEEN):
        found.append(psutil.Process(pid))
        found += found[0].children(recursive=True)
    return found


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except UNSEEN:
        return 0.0
    return times.user + times.system


def _io_bytes(process: psutil.Process) -> int:
    """Bytes read and written by any means; macOS does not tell."""
    try:
        found = process.io_counters()  # type: ignore[attr-defined, unused-ignore]
    except (AttributeError, *UNSEEN):
        return 0
    return int(getattr(found, "read_chars", found.read_bytes) + getattr(found, "write_chars", found.write_bytes))


def _has_clients(process: psutil.Process, port: int) -> bool:
    """True if a connection to the port is established, or where that cannot be seen."""
    try:
        found = process.net_connections("tcp")
    except UNSEEN:
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
    except (psutil.Error, *UNSEEN):
        return None


def _listening(process: psutil.Process, port: int) -> frozenset[str]:
    found = process.net_connections("tcp")
    ours = [each for each in found if each.status == psutil.CONN_LISTEN and each.laddr.port == port]
    return frozenset(str(each.laddr.ip) for each in ours)


def listener(port: int) -> psutil.Process | None:
    """The process that listens on a port of this machine, None if there is none that can be seen."""
    for process in _processes():  # the list of all connections needs root on a Mac; one's own do not
        with contextlib.suppress(Exception):  # as above
            if _listening(process, port):
                return process
    return None


def port_holder(port: int) -> str:
    """Process that listens on a port of this machine: `nginx (pid 123)`, "another process" if that cannot be seen."""
    found = listener(port)
    return "another process" if found is None else described(found)


def keeper_of(port: int, host: str, engines: Collection[int]) -> str:
    """Description of the process that holds the port of an ended engine; "" if it is free, or a new engine has it."""
    if port_free(port, host):
        return ""
    found = listener(port)
    if found is None:
        return "another process"
    return "" if found.pid in engines else described(found)


def described(process: psutil.Process) -> str:
    """Name and pid of a process, for a message. A process chooses its own name."""
    with contextlib.suppress(psutil.Error, *UNSEEN):
        return f"{printable(process.name())[:LONGEST_NAME]} (pid {process.pid})"
    return f"pid {process.pid}"


def port_free(port: int, host: str) -> bool:
    """True if a server could listen there now, by the launcher's own rule."""
    return launch.holder_of(port, host) is None
