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
from metal_supervisor.install.plan import InstallPlan, places, read
from metal_supervisor.install.steps import PLACE, InstallError, Machine, Say, ask_for_sudo
from metal_supervisor.spec.processes import State
from metal_supervisor.state.directory import LAUNCHD_LOG, StateDir
from metal_supervisor.state.kept_files import write_atomic
from metal_supervisor.state.reports import read_object
from metal_supervisor.supervisord.client import Refused, Supervisord

UP_WAIT_S = 60.0
UP = ("controller", "sidecar")
ENDING = (signal.SIGHUP, signal.SIGTERM)


def show(found: InstallPlan, machine: Machine, say: Say) -> None:
    """Print everything that would be done; change nothing."""
    where = found.places
    for step in found.due():
        for line in step.lines():
            say(line)
    launchctl = where.launchctl(machine)
    name = f"{where.domain}/{where.label}"
    arguments = {"bootstrap": (where.domain, str(where.plist)), "kill": ("SIGKILL", name)}
    verbs = _verbs(found, launchctl)
    for verb in verbs:
        say(f"run    {launchctl.line(verb, *arguments.get(verb, (name,)))}")
    if not verbs and (found.due() or read_object(where.note) != _note(found)):
        say("run    metal-supervisor upgrade")
    if any(step.root for step in found.due()):
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
    verbs = _verbs(found, launchctl)
    if where.root and (verbs or any(step.root for step in found.due())):
        ask_for_sudo(machine, f"the job runs as {machine.user}, but its file and launchd's commands are root's", say)
    directory = StateDir(where.state)
    directory.create()
    if verbs:
        boot.link_current(directory)  # first, as a Mac may restart between any two steps
    for step in found.due():
        step.do(machine)
        say(f"{'removed' if step.content is None else 'written'}   {machine.shown(step.path)}")
    if verbs:
        _load(found, launchctl, verbs)
        job = f"{where.domain}/{where.label}"
        say(f"loaded    {job}" if "enable" in verbs else f"reloaded  {job}; engines keep running")
        write_atomic(where.note, json.dumps({"plist": _note(found)["plist"]}))
    elif read_object(where.note) == _note(found):
        say("nothing to do: all of it is as it should be")
    elif upgrade.upgrade(where.state, say):
        return 1
    if not upgrade.waited(lambda: _is_up(found), UP_WAIT_S):
        _say_what_failed(found, launchctl, say)
        return 1
    write_atomic(where.note, json.dumps(_note(found)))
    return 0


def _verbs(found: InstallPlan, launchctl: Launchctl) -> tuple[str, ...]:
    """The verbs of launchctl that make launchd run the job as planned; none if it does."""
    if launchctl.job(found.places.label) is None:
        return ("enable", "bootstrap")
    loaded = read_object(found.places.note).get("plist")
    return () if loaded == _note(found)["plist"] else ("kill", "bootout", "bootstrap")


def _note(found: InstallPlan) -> dict[str, str]:
    """Fingerprint of a job loaded now, and of programs started now with the settings on file."""
    settings = read(found.places.settings) + read(found.places.kubeconfig)
    return {
        "plist": hashlib.sha256(found.plist).hexdigest(),
        "settings": hashlib.sha256(settings).hexdigest(),
        "version": __version__,
        "python": sys.executable,
    }


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


def _load(found: InstallPlan, launchctl: Launchctl, verbs: Sequence[str]) -> None:
    """Load the job, or exchange it without stopping engines: only an orderly shutdown of supervisord would end them."""
    where = found.places
    marker = where.state / boot.HANDOVER_FILE
    marker.unlink(missing_ok=True)  # of an exchange that was killed halfway, and written again it would keep its age
    if "enable" in verbs:
        launchctl.enable(where.label)
    with contextlib.ExitStack() as undo:
        for each in ENDING:  # ignored meanwhile: halfway through an exchange there is no job at all
            undo.callback(signal.signal, each, signal.signal(each, signal.SIG_IGN))
        undo.callback(launchctl.load, where.label, where.plist)
        if "kill" in verbs:
            undo.callback(marker.unlink, missing_ok=True)
            write_atomic(marker, "")
            launchctl.kill(where.label, "SIGKILL")
            launchctl.unload(where.label, launchd.exit_timeout_s(found.settings.stop_timeout))


def _is_up(found: InstallPlan) -> bool:
    """True if supervisord runs the controller and the sidecar, and the embedded API answers, if there is one."""
    with contextlib.suppress(Refused, BadKubeconfig, KubeError):
        table = Supervisord(StateDir(found.places.state).socket).table()
        if all(name in table and table[name].state is State.RUNNING for name in UP):
            if found.settings.embedded:
                Kube(found.settings.kubeconfig_path).request("GET", "/version")
            return True
    return False


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
