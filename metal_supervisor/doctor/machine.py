"""Checks of the machine: chip, Metal and sleep."""

from __future__ import annotations

import re
from pathlib import Path

from metal_supervisor.doctor.findings import Check, Finding, Found, fail, ok, unknown, warn
from metal_supervisor.doctor.surroundings import ASK_S, Surroundings
from metal_supervisor.host import chip, machine
from metal_supervisor.host.commands import Done
from metal_supervisor.memory.machine_memory import device_mib
from metal_supervisor.runtimes import RUNTIMES, builds
from metal_supervisor.spec.sizes import MIB, amount
from metal_supervisor.spec.types import Json

PMSET = "/usr/bin/pmset"
NEVER_SLEEP = f"sudo {PMSET} -a sleep 0 disksleep 0 womp 1 autorestart 1 powernap 0"
OLDEST_MACOS = 13


def _chip(around: Surroundings) -> Found:
    found = chip.quick(around.mac)
    shown = f"{found.name or 'unknown chip'}, macOS {found.macos or 'of unknown version'}"
    if found.rosetta:
        text = f"{shown}; this Python is built for Intel and runs under Rosetta, and so would what it starts"
        return fail(text, "make the environment anew with a Python for Apple chips (/opt/homebrew/bin/python3)")
    if not found.name.startswith("Apple"):
        return fail(f"{shown}: without an Apple chip there is no unified memory", "use a Mac with Apple Silicon")
    major = re.match(r"\d+", found.macos)
    if major and int(major[0]) < OLDEST_MACOS:
        return warn(f"{shown} is older than anything this was made for", f"update to macOS {OLDEST_MACOS} or newer")
    return ok(shown)


def _metal(around: Surroundings) -> Found:
    try:
        _, path = builds.find(around.settings, RUNTIMES["llama-server"].executables)
    except machine.NoBinary:
        return []  # reported by the check `engines`
    listed = around.run((str(path), "--list-devices"), ASK_S)
    return [_metal_here(listed), _metal_of_daemon(around.report())]


def _metal_here(listed: Done) -> Finding:
    """Finding about Metal in this very context. `listed`: of `llama-server --list-devices`."""
    if not listed.ok:
        return unknown(f"llama-server does not list its devices ({listed.last_line[:120] or listed.code})")
    device = re.search(r"(?m)^\s*((?:MTL|Metal)\d*: .*?) \(", listed.out + listed.err)
    mib = device_mib(listed.out + listed.err)
    if not device or not mib:
        text = "llama-server sees no Metal device from here: it would run on the CPU"
        return fail(text, "ask from a session on the Mac itself; reinstall llama.cpp if it stays so (brew reinstall)")
    return ok(f"{device[1]}, {amount(mib * MIB)}")


def _metal_of_daemon(report: Json) -> Finding:
    """Finding about Metal in the controller's context, which may differ from this one. `report`: the controller's."""
    word = report.get("metal")
    if word == "there":
        return ok("in the controller's context, where engines are started, it is there, too")
    if word == "absent":
        text = "in the controller's context there is no Metal device: it starts no model (MetalUnavailable)"
        fix = "see metal; if it is there and only the daemon lacks it: metal-supervisor uninstall, then install --agent"
        return fail(text, fix)
    why = "has not told yet" if report else "does not run"
    return warn(f"Metal in the controller's context is not known: the controller {why}", "ask again when it runs")


def _sleep(around: Surroundings) -> Found:
    minutes, source, caffeinate = dict[str, int](), "", around.settings.caffeinate
    for line in around.run((PMSET, "-g", "custom"), ASK_S).out.splitlines():
        if line and not line[0].isspace():
            source = line.strip().rstrip(":")
        elif told := re.match(r"\s+sleep\s+(\d+)", line):
            minutes[source] = int(told[1])  # 0 for never
    if not minutes:
        return unknown("pmset names no settings of sleep")
    sleepy = [f"{each} min on {source}" for source, each in minutes.items() if each]
    if not sleepy:
        return ok("it never sleeps by itself")
    kept = f"; {Path(caffeinate).name} keeps it awake while a model is wanted" if caffeinate else ""
    return warn(f"it sleeps after {', '.join(sleepy)}{kept}; a Mac asleep is a dead endpoint", NEVER_SLEEP)


CHECKS = (
    Check("chip", _chip, mac=True),
    Check("metal", _metal, mac=True),
    Check("sleep", _sleep, mac=True),
)
