"""Checks of our own software: settings, state directory, supervisord and our programs under it."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat

from metal_supervisor.doctor.findings import Check, Finding, Found, fail, ok, warn
from metal_supervisor.doctor.surroundings import ASK_S, Surroundings
from metal_supervisor.host import processes
from metal_supervisor.settings.loader import start_command
from metal_supervisor.spec.processes import State
from metal_supervisor.state import gateway_note
from metal_supervisor.state.directory import LAUNCHD_LOG
from metal_supervisor.state.home import DIRECTORIES
from metal_supervisor.state.own_processes import OWN_PROGRAMS
from metal_supervisor.supervisord.client import Refused, Unavailable

ENDED_S = 60.0
"""Seconds after which one of our programs that ended, and was started again, is taken to have come up for good."""
FOR_GOOD = "or for good with `metal-supervisor install`"


def _settings(around: Surroundings) -> Found:
    settings, file = around.settings, around.config_file
    if around.config_problem:
        text = "correct it; a system that runs goes on with the last settings that were in order"
        return fail(around.config_problem, text)
    if settings.gateway_on and settings.gateway_problem:  # though each of them is valid
        text = f"the gateway does not listen: {settings.gateway_problem}"
        return fail(text, "correct it, then metal-supervisor upgrade")
    return ok(f"{file} is in order" if file else "no file; defaults, environment and flags are in order")


def _directory(around: Surroundings) -> Found:
    path = around.settings.state_path
    if not path.exists():
        return ok(f"{path} is made at the first start")
    found = path.stat()
    if not stat.S_ISDIR(found.st_mode):
        return fail(f"{path} is no directory", "choose another with --state-dir")
    if found.st_uid != around.uid:
        who = f"it belongs to user id {found.st_uid}, and you are {around.uid}"
        return fail(f"{path}: {who}", "run doctor, and everything else, as the user that the system runs as")
    if found.st_mode & 0o077:
        mode = oct(found.st_mode & 0o777)[2:]
        text = f"{path} is open to others (mode {mode}), and holds secrets of models"
        return fail(text, f"chmod 700 {shlex.quote(str(path))}")
    return _parts(around) or ok(f"{path}, yours alone")


def _parts(around: Surroundings) -> Finding | None:
    """A failure if something in the state directory cannot be used: one command with sudo may leave files of root."""
    path = around.settings.state_path
    folders = [path, *(path / name for name in DIRECTORIES if os.path.lexists(path / name))]
    for folder in folders:
        if not folder.is_dir():
            return fail(f"{folder} is no directory", "stop the system, move that away, and start it again")
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            return fail(f"{folder} cannot be read and written", f"chmod 700 {shlex.quote(str(folder))}")
        for each in (each for each in folder.iterdir() if each.name != LAUNCHD_LOG):
            with contextlib.suppress(FileNotFoundError):  # it is gone by now
                if (owner := each.lstat().st_uid) != around.uid:
                    fix = f"sudo chown -R {around.uid} {shlex.quote(str(path))}, and no sudo from then on"
                    return fail(f"{each} belongs to user id {owner}, and you are {around.uid}", fix)
    return None


def _supervisord(around: Surroundings) -> Found:
    path = around.directory.socket
    if not os.path.lexists(path):
        start = start_command(around.settings.state_path)
        return warn(f"nothing runs: there is no socket {path}", f"start it with `{start}`, {FOR_GOOD}")
    with contextlib.closing(around.supervisord) as supervisord:
        try:
            version = supervisord.call("supervisor.getSupervisorVersion", timeout_s=ASK_S)
        except (Unavailable, Refused) as error:
            text = f"{path} is there, but does not answer: {str(error).partition(': ')[2] or error}"
            return fail(text, "it was killed, or hangs; start the system again: what its engines do is taken over")
    return ok(f"{version} answers at {path}")


def _programs(around: Surroundings) -> Found:
    """Our own programs under supervisord; one worker of the gateway may stand by."""
    table, state = around.table(), around.settings.state_path
    if table is None:
        return []
    needed = {"controller", "sidecar", *(["apiserver"] if around.settings.embedded else [])}
    good = State.RUNNING, State.STARTING
    serving = [each for each in gateway_note.WORKERS if each in table and table[each].state in good]
    standby = set(gateway_note.WORKERS if serving else gateway_note.WORKERS[1:]) - set(serving)
    wanted = [each for each in OWN_PROGRAMS if (each in needed or each in table) and each not in standby]
    wrong = [
        f"{name} {table[name].state.value if name in table else 'is missing'}"
        for name in wanted
        if name not in table or table[name].state not in good
    ]
    if wrong:
        return fail("; ".join(wrong), f"see the logs in {state / 'log'}; `metal-supervisor upgrade` starts them anew")
    if gateway := processes.problem_told(gateway_note.read(state)):
        return fail(f"the gateway's problem: {gateway}", "correct it; the gateway tries again every few seconds")
    now = around.clock()
    if ended := [f"{name} {now - table[name].stop:.0f} s" for name in wanted if 0 <= now - table[name].stop < ENDED_S]:
        # One that ends after some seconds is RUNNING or STARTING whenever it is looked at.
        text = f"they run, but ended not long ago and were started again: {', '.join(ended)} ago"
        return warn(text, f"unless that was `metal-supervisor upgrade`: see the logs in {state / 'log'}")
    return ok(f"{', '.join(wanted)} run")


CHECKS = (
    Check("settings", _settings),
    Check("state", _directory),
    Check("supervisord", _supervisord),
    Check("programs", _programs),
)
