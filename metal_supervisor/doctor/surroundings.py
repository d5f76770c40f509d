"""Inputs of the checks: this machine, its system's settings and files, its programs, and the cluster's API.

All of them are injected, so that tests can replay the recorded answers of a Mac.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from metal_supervisor.cluster.credentials import Chosen, choose
from metal_supervisor.cluster.kube import Kube
from metal_supervisor.host import addresses, commands, darwin_memory, machine
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.processes import ProgramState
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Json
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.reports import controller_report
from metal_supervisor.supervisord.client import Refused, Supervisord, Unavailable

ASK_S = 4.0
"""Time limit of one program or connection: below that of its check, so that the check can report which it was."""


@dataclass
class Link:
    """The connection to the API server, set by the check `api`."""

    kube: Kube | None = None
    problem: str = "the API server does not answer"


@dataclass(frozen=True)
class Surroundings:
    """Everything that the checks read. Callables may raise OSError, unless stated otherwise."""

    settings: Settings
    """Settings of the system that runs, or that would be started."""
    config_file: str = ""
    """Path of their TOML file, "" without one."""
    config_problem: str = ""
    """Error in the settings, or ""."""
    on_mac: bool = sys.platform == "darwin"
    mac: darwin_memory.Mac | None = field(default_factory=darwin_memory.mac)
    """System calls of macOS, None on any other system."""
    run: commands.Runner = commands.run
    uid: int = field(default_factory=os.getuid)
    clock: Callable[[], float] = time.time
    """Unix time."""
    list_directory: Callable[[Path], Sequence[str]] = os.listdir
    free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free
    interfaces: Callable[[], Sequence[machine.Interface]] = machine.interfaces
    advertised: Callable[[str, str, bool], addresses.AddressChoice] = addresses.advertised
    """Does not raise."""
    connect: Callable[[str, int], None] = lambda *where: socket.create_connection(where, timeout=ASK_S / 2).close()
    """Open a TCP connection and close it."""
    login: Callable[[Path, str], Kube] = Kube
    """May raise BadKubeconfig."""
    link: Link = field(default_factory=Link)

    @property
    def directory(self) -> StateDir:
        return StateDir(self.settings.state_path)

    @property
    def supervisord(self) -> Supervisord:
        """A new client: the checks run in parallel."""
        return Supervisord(self.directory.socket)

    def table(self) -> Mapping[str, ProgramState] | None:
        """supervisord's process table, None if it does not answer: see the check `supervisord`."""
        with contextlib.closing(self.supervisord) as supervisord:
            try:
                return supervisord.table()
            except (Unavailable, Refused):
                return None

    def records(self) -> Mapping[str, Record]:
        """The readable records of this Mac, by program."""
        return self.directory.records()[0]

    def chosen(self) -> Chosen:
        """The context of the kubeconfig. Raises BadKubeconfig."""
        return choose(self.settings.kubeconfig_path, self.settings.context)

    def report(self) -> Json:
        """The controller's own report, {} without one."""
        return controller_report(self.settings.state_path)
