"""`metal-supervisor install`: installs launchd's job on this Mac, or updates it.

No change interrupts a request. When settings change, the controller and the sidecar restart. Only when launchd's own
file changes must the job be replaced, and then supervisord is killed by a signal that it cannot handle by stopping its
engines: they keep running, and the new job runs stand-ins for them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from metal_supervisor import __version__
from metal_supervisor.cluster.kube import BadKubeconfig, Kube, KubeError
from metal_supervisor.controller import boot
from metal_supervisor.host import launchd, root_file
from metal_supervisor.host.launchctl import EX_CONFIG, Launchctl
from metal_supervisor.host.launchd import INCUMBENT
from metal_supervisor.install import upgrade
from metal_supervisor.install.checks import (
    refuse_anothers,
    refuse_kept_place,
    refuse_running,
    refuse_strange,
    refuse_taken_port,
)
from metal_supervisor.install.plan import InstallPaths, InstallPlan, places, read
from metal_supervisor.install.steps import (
    PLACE,
    FileStep,
    InstallError,
    LinkStep,
    Machine,
    Remove,
    Say,
    Step,
    ask_for_sudo,
)
from metal_supervisor.spec.processes import State
from metal_supervisor.state.directory import LAUNCHD_LOG, StateDir
from metal_supervisor.state.kept_files import write_atomic
from metal_supervisor.supervisord.client import Refused, Supervisord, Unavailable

UP_WAIT_S = 60.0
LOOK_S = 0.1
UP = ("controller", "sidecar")
RUNNING = "running.json"
ENDING = (signal.SIGHUP, signal.SIGTERM)


def show(found: InstallPlan, machine: Machine, say: Say) -> None:
    """Print everything that would be done; change nothing."""
    for step in found.due():
        for line in step.lines():
            say(line)
    launchctl = found.places.launchctl(machine)
    for line in _exchange_lines(found, launchctl):
        say(line)
    if any(isinstance(step, FileStep) and step.root for step in found.due()):
        say(f"note   {PLACE} reads the file on standard input; it is")
        for line in root_file.SCRIPT.splitlines():
            say(f"       | {line}")
    for note in found.notes:
        say(f"note   {note}")


def install(found: InstallPlan, machine: Machine, say: Say) -> int:
    """Carry out a plan and wait until all is up. Returns the exit code: 1 if it does not come up.

    Raises InstallError, LaunchdError, StateError, OSError.
    """
    where = found.places
    launchctl = where.launchctl(machine)
    _refuse(found, machine, launchctl)
    for note in found.notes:
        say(f"note      {note}")
    due, loaded = found.due(), launchctl.job(where.label) is not None
    exchanged = not loaded or read(where.loaded) != found.plist
    if where.root and (exchanged or any(getattr(step, "root", False) for step in due)):
        ask_for_sudo(machine, f"the job runs as {machine.user}, but its file and launchd's commands are root's", say)
    _place([step for step in due if not (loaded and exchanged and _is_plist(step, where))], where, machine, say)
    directory = StateDir(where.state)
    directory.create()
    if not loaded:
        boot.link_current(directory)
        (where.state / boot.HANDOVER_FILE).unlink(missing_ok=True)  # of an exchange that was killed halfway
        launchctl.enable(where.label)
        launchctl.load(where.label, where.plist)
        say(f"loaded    {launchctl.domain}/{where.label}")
    elif exchanged:
        _exchange(found, machine, launchctl, say)
    elif _outdated(where):
        if upgrade.upgrade(where.state, say):
            return 1
    else:
        say("nothing to do: all of it is as it should be")
    if not loaded or exchanged:
        write_atomic(where.loaded, found.plist)
    if any(_is_plist(step, where) for step in found.steps):
        write_atomic(where.rendered, found.plist)
    if not _up(found, machine):
        _say_what_failed(found, launchctl, say)
        return 1
    write_atomic(where.launchd / RUNNING, _running(where))
    return 0


def _is_plist(step: Step, where: InstallPaths) -> bool:
    return isinstance(step, FileStep) and step.path == where.plist


def _place(steps: Sequence[Step], where: InstallPaths, machine: Machine, say: Say) -> None:
    for step in steps:
        step.do(machine)
        if isinstance(step, FileStep) and _is_plist(step, where):
            write_atomic(where.rendered, step.content)
        if isinstance(step, FileStep | LinkStep):
            say(f"written   {machine.shown(step.path)}")
        elif isinstance(step, Remove):
            say(f"removed   {machine.shown(step.path)}")


def _running(where: InstallPaths) -> str:
    """Fingerprint of programs started now: this release, its interpreter, and a digest of the current settings."""
    settings = hashlib.sha256(read(where.settings) + read(where.kubeconfig)).hexdigest()
    return json.dumps({"version": __version__, "python": sys.executable, "settings": settings}) + "\n"


def _outdated(where: InstallPaths) -> bool:
    """True if install last started our programs with another fingerprint, or never did."""
    return read(where.launchd / RUNNING).decode("utf-8", "replace") != _running(where)


def _refuse(found: InstallPlan, machine: Machine, launchctl: Launchctl) -> None:
    """Raise InstallError if it must not be installed here, or not now."""
    where = found.places
    for domain in (f"gui/{machine.uid}", "system"):
        if Launchctl(machine.run, domain).job(INCUMBENT) is not None:
            text = f"LLMKube's own agent is loaded ({domain}/{INCUMBENT}), and both would run the same models"
            sudo = "sudo " if domain == "system" else ""
            raise InstallError(f"{text}; end it first: {sudo}launchctl bootout {domain}/{INCUMBENT}")
    other = places(machine, where.state, agent=where.root)
    if other.plist.exists() or other.job(machine) is not None:
        text = f"it is installed as {other.domain}/{other.label} already; `metal-supervisor uninstall` first"
        raise InstallError(f"{text}, or install {'with' if where.root else 'without'} --agent")
    refuse_anothers(where)
    refuse_strange(where.state)
    refuse_kept_place("the state directory", where.state, machine.home)
    refuse_kept_place("the model store", found.settings.store_path, machine.home)
    refuse_kept_place("this installation", Path(sys.prefix), machine.home)
    if launchctl.job(where.label) is None:
        refuse_running(where.state)
        refuse_taken_port(found.settings)


def _exchange_lines(found: InstallPlan, launchctl: Launchctl) -> Iterator[str]:
    """The commands that load the job, or replace it."""
    where = found.places
    name = f"{where.domain}/{where.label}"
    if launchctl.job(where.label) is None:
        yield f"run    {launchctl.line('enable', name)}"
        yield f"run    {launchctl.line('bootstrap', where.domain, str(where.plist))}"
    elif read(where.loaded) != found.plist:
        yield f"run    {launchctl.line('kill', 'SIGKILL', name)}"
        yield f"run    {launchctl.line('bootout', name)}"
        yield f"run    {launchctl.line('bootstrap', where.domain, str(where.plist))}"
    elif found.due() or _outdated(where):
        yield "run    metal-supervisor upgrade"


def _exchange(found: InstallPlan, machine: Machine, launchctl: Launchctl, say: Say) -> None:
    """Load a changed property list without stopping engines: only an orderly shutdown of supervisord would end them."""
    where = found.places
    directory = StateDir(where.state)
    boot.link_current(directory)
    marker = where.state / boot.HANDOVER_FILE
    marker.unlink(missing_ok=True)  # one that was left there is old, and written again it would stay so
    write_atomic(marker, "")
    with _undisturbed():
        try:
            launchctl.kill(where.label, "SIGKILL")
            launchctl.unload(where.label, launchd.exit_timeout_s(found.settings.stop_timeout))
            _place([step for step in found.due() if _is_plist(step, where)], where, machine, say)
        finally:
            marker.unlink(missing_ok=True)
            launchctl.load(where.label, where.plist)
    say(f"reloaded  {launchctl.domain}/{where.label}; the engines go on")


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore HUP and TERM meanwhile: halfway through a replacement there is no job at all."""
    before = [(each, signal.signal(each, signal.SIG_IGN)) for each in ENDING]
    try:
        yield
    finally:
        for each, handler in before:
            signal.signal(each, handler)


def _up(found: InstallPlan, machine: Machine) -> bool:
    """Wait until supervisord runs our own programs."""
    supervisord = Supervisord(StateDir(found.places.state).socket)
    until = time.monotonic() + UP_WAIT_S
    while time.monotonic() < until:
        with contextlib.suppress(Unavailable, Refused):
            table = supervisord.table()
            if all(name in table and table[name].state is State.RUNNING for name in UP) and _answers(found):
                return True
        machine.pause(LOOK_S)
    return False


def _answers(found: InstallPlan) -> bool:
    """True if the embedded API answers, as the user's next command may need it; True where there is none."""
    if not found.settings.embedded:
        return True
    try:
        Kube(found.settings.kubeconfig_path).request("GET", "/version")
    except (BadKubeconfig, KubeError):
        return False
    return True


def _say_what_failed(found: InstallPlan, launchctl: Launchctl, say: Say) -> None:
    job = launchctl.job(found.places.label)
    log = found.places.state / "log" / LAUNCHD_LOG
    told = f"launchd says {job.state or 'nothing'}, last exit {job.last_exit}" if job else "launchd has no such job"
    say(f"it does not come up: {told}")
    if job and job.last_exit.partition(":")[0] == EX_CONFIG:
        say(f"exit code 78 is launchd's own: {log.parent} or its file cannot be written by the job's user")
    for line in read(log).decode("utf-8", "replace").splitlines()[-5:]:
        say(f"  {line}")
    say("see also: metal-supervisor doctor")


def summary(found: InstallPlan, machine: Machine) -> Iterator[str]:
    """Lines for the user about the finished installation."""
    where, settings = found.places, found.settings
    shown = machine.shown
    how = "a LaunchDaemon: it starts at boot, before anybody logs in"
    if not where.root:
        how = f"a LaunchAgent: it runs while {machine.user} is logged in, and may not reach hosts of the local network"
    yield ""
    yield f"  job       {shown(where.plist)}, {how}"
    yield f"  settings  {shown(where.settings)}; after an edit: metal-supervisor upgrade"
    embedded = f"the embedded one, with {shown(where.state / 'kubeconfig')}"
    yield f"  cluster   {embedded if settings.embedded else shown(where.kubeconfig)}"
    yield f"  models    {shown(settings.store_path)}"
    yield f"  logs      {shown(where.state / 'log')}, also in ~/Library/Logs/metal-supervisor"
    yield ""
    yield "  try       supervisorctl status"
    yield "            metal-supervisor doctor"
    if settings.embedded:
        yield f"            kubectl --kubeconfig {shown(where.state / 'kubeconfig')} get isvc"
    yield "  undo      metal-supervisor uninstall"
    yield "  a Mac that sleeps serves nobody; for one that never does:"
    yield "            sudo pmset -a sleep 0 disksleep 0 womp 1 autorestart 1 powernap 0"
