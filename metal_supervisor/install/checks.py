"""Checks that refuse to install or uninstall in this place, or at this time.

A Mac has one job of that name, so loading or ending it would take it from another system; a system that runs in a
terminal must not be ended from elsewhere; and macOS keeps jobs out of some directories, however they are spelled.
"""

from __future__ import annotations

import contextlib
import plistlib
import re
import xml.parsers.expat
from pathlib import Path

from metal_supervisor.host import local_status
from metal_supervisor.install.plan import HEADER, SETTINGS_FILE, InstallPaths, read
from metal_supervisor.install.steps import InstallError
from metal_supervisor.settings.loader import OVERRIDES_FILE, Settings
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.own_processes import run_holds
from metal_supervisor.state.reports import read_object
from metal_supervisor.supervisord.client import Supervisord

KEPT_FROM_JOBS = ("Desktop", "Documents", "Downloads")
ASK_S = 2.0
"""Time limit of a question to a port."""
KEPT = ("log", "hub")
"""Directories that stay for the user."""
OF_A_CLUSTER = "cluster-"
"""Beginning of the names of the state directories for clusters that tools/make_run.py makes below `.run`."""


def refuse_anothers(where: InstallPaths) -> bool:
    """Raise InstallError if the job's file belongs to another state directory; True if it names this one."""
    said = _working_directory(read(where.plist))
    if said and Path(said).resolve() != where.state.resolve():
        text = f"{where.plist} is the job of another state directory, {said}"
        raise InstallError(f"{text}; end that one first, as its user: metal-supervisor uninstall --state-dir {said}")
    return bool(said)


def _working_directory(plist: bytes) -> str:
    """The state directory of a job's file, "" if it does not tell."""
    with contextlib.suppress(plistlib.InvalidFileException, xml.parsers.expat.ExpatError, ValueError):
        content = plistlib.loads(plist)
        return str(content.get("WorkingDirectory", "")) if isinstance(content, dict) else ""
    return ""


def is_state_directory(state: Path) -> bool:
    """True if a system ran in a directory, or was installed into it: by files that nothing else has there.

    A name alone is no proof: `app/`, `log/` and a supervisord.conf are in many a project.
    """
    if {"config", "values"} <= read_object(state / OVERRIDES_FILE).keys():
        return True
    if b"metal_supervisor" in read(state / "supervisord.conf"):
        return True
    if read(state / SETTINGS_FILE).startswith(HEADER.encode().splitlines()[0]):
        return True
    # Of a system that ran with a cluster, uninstall without --purge leaves no other sign.
    named = bool(re.fullmatch(rb"[-a-z0-9]+\n", read(state / "node"))) or (state / SETTINGS_FILE).is_file()
    return named and (state / "log" / "controller.log").is_file()


def refuse_strange(state: Path) -> None:
    """Raise InstallError for a directory with directories that are not ours: an uninstall could not tell which are.

    What was restored from a copy, or left by an uninstall, is ours; hidden ones are the file manager's or the volume's.
    `make run CLUSTER=…` has state directories of its own below that of `make run`.
    """
    if not state.is_dir() or _is_used(state):
        return
    ours = (*KEPT, "models", "lost+found")
    there = [each for each in state.iterdir() if each.is_dir() and not each.name.startswith(".")]
    strange = sorted(
        each.name
        for each in there
        if each.name not in ours and not (each.name.startswith(OF_A_CLUSTER) and _is_used(each))
    )
    if strange:
        text = f"{state} is no state directory of metal-supervisor, and has directories of its own ({strange[0]!r:.80})"
        raise InstallError(f"{text}; choose another with --state-dir, which may be a new one in it")


def _is_used(state: Path) -> bool:
    """True if a directory is a system's, even if that never came to run."""
    return is_state_directory(state) or (state / "models.d").is_dir()


def refuse_running(state: Path) -> None:
    """Raise InstallError if a system that launchd does not know runs on a state directory."""
    if run_holds(state):
        raise InstallError(f"`metal-supervisor run` uses {state}; stop it first with Ctrl-C")
    if state.is_dir() and Supervisord(StateDir(state).socket).answers():
        raise InstallError(f"a supervisord that launchd does not know runs on {state}; end it first")


def refuse_taken_port(settings: Settings) -> None:
    """Raise InstallError if another system runs with the port of these settings: `doctor` looks at that one."""
    if other := local_status.other_system_on(settings.port, settings.state_path, ASK_S):
        text = f"a system runs in {other}, with port {settings.port}; stop it first"
        raise InstallError(f"{text}, or install another beside it with --port, --gateway and --ports of its own")


def refuse_kept_place(name: str, path: Path, home: Path) -> None:
    """Raise InstallError for a path that launchd's jobs cannot read. `name`: what it is, for the message."""
    parts, above = _folded(path), _folded(home)
    for kept in KEPT_FROM_JOBS:
        if parts[: len(above) + 1] == (*above, kept.casefold()):
            text = f"{name}, {path}, is in {kept}, which macOS keeps from launchd's jobs"
            raise InstallError(f"{text}; use a place outside of it")


def _folded(path: Path) -> tuple[str, ...]:
    """The parts of a resolved path, in one case: a Mac's disk does not tell capital letters from small ones."""
    return tuple(part.casefold() for part in path.resolve().parts)
