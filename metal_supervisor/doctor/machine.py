"""Checks of the machine: chip, Metal, memory, sleep and power, and leftover engines."""

from __future__ import annotations

import re
from pathlib import Path

from metal_supervisor import launch
from metal_supervisor.doctor.findings import Check, Finding, Found, fail, ok, unknown, warn
from metal_supervisor.doctor.surroundings import ASK_S, Surroundings
from metal_supervisor.host import chip, machine, processes
from metal_supervisor.host.commands import Done
from metal_supervisor.memory.machine_memory import device_mib
from metal_supervisor.runtimes import RUNTIMES, builds
from metal_supervisor.spec.sizes import MIB, amount
from metal_supervisor.spec.types import Json
from metal_supervisor.state import own_processes

PMSET, FDESETUP = "/usr/bin/pmset", "/usr/bin/fdesetup"
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


def _memory(around: Surroundings) -> Found:
    sample, found = around.sample(), around.own_budget(around.settings)
    wired_mib = None if around.mac is None else around.mac.wired_limit_mib()  # 0 if it is not set
    available = "unknown" if sample.available_bytes is None else amount(sample.available_bytes, "down")
    limit = "" if wired_mib is None else f", wired limit {f'{wired_mib} MiB' if wired_mib else 'not set'}"
    text = f"{amount(sample.total_bytes)}, {available} available{limit}; models may have {found.explain()}"
    if not sample.total_bytes:
        return fail("the size of the memory cannot be read", f"told: {'; '.join(sample.problems) or 'nothing'}")
    if sample.problems:
        return warn(f"{text}; not readable: {'; '.join(sample.problems)}", "nothing is evicted on such readings")
    if found.bytes > sample.total_bytes * 15 // 16:
        return warn(f"{text}: that leaves next to nothing to macOS", "lower --memory-fraction")
    return ok(text)


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


def _battery(around: Surroundings) -> Found:
    """Battery and lid: an internal battery means a laptop."""
    done = around.run((PMSET, "-g", "batt"), ASK_S)
    if not done.ok:
        return unknown(f"pmset: {done.err.strip()[:100]}")
    if "InternalBattery" not in done.out:
        return ok("no battery, no lid")
    if "Battery Power" in done.out.partition("\n")[0]:
        return warn("it runs on its battery: it is slower, and sleeps when it is empty", "connect it to power")
    text = "a laptop: with its lid shut it sleeps, whatever its settings say"
    return warn(text, "leave the lid open, or connect power and a display")


def _filevault(around: Surroundings) -> Found:
    done = around.run((FDESETUP, "status"), ASK_S)
    if "FileVault is Off" in done.out:
        return ok("FileVault is off: it starts without anybody")
    if "FileVault is On" in done.out:
        text = "FileVault is on: after a power cut nothing starts until the disk is unlocked"
        return warn(text, f"before a planned restart: sudo {FDESETUP} authrestart")
    return unknown(f"fdesetup says {done.said[:100]!r}")


def _orphans(around: Surroundings) -> Found:
    """Engines without a supervisord."""
    directory = around.directory
    # In this order: an engine that starts meanwhile is noted before it is missed, and known before its note is doubted.
    marked = {pid for pid in processes.marked(directory.path) if launch.start_time(pid)}
    alive = {
        name: note
        for name, note in directory.run_notes().items()
        if own_processes.is_own(launch.read_note(str(directory.note_path(name))), directory.path)
    }
    table = around.table()
    known = {row.pid for row in (table or {}).values()}  # an engine whose note was lost is no stranger
    strangers = [f"pid {pid}" for pid in sorted(marked - {note.pid for note in alive.values()} - known)]
    if table is None:
        outlived = [f"{name} (pid {note.pid})" for name, note in sorted(alive.items())] + strangers
        text = f"left over from a supervisord that was killed: {', '.join(outlived)}"
        fix = "start the system again: what is still wanted serves on, the rest is ended"
        return warn(text, fix) if outlived else ok("nothing was left running")
    loose = [
        f"{name} (pid {note.pid})"
        for name, note in sorted(alive.items())
        if name not in table or not table[name].pid or table[name].pid not in (note.pid, note.launcher_pid)
    ]
    if loose or strangers:
        text = f"engines that supervisord does not know: {', '.join(loose + strangers)}; they hold memory and ports"
        return warn(text, "look again in a minute, it may just be starting; then end them by pid")
    return ok(f"none; {len(alive)} engines, all of them supervisord's")


CHECKS = (
    Check("chip", _chip, mac=True),
    Check("metal", _metal, mac=True),
    Check("memory", _memory),
    Check("sleep", _sleep, mac=True),
    Check("battery", _battery, mac=True),
    Check("filevault", _filevault, mac=True),
    Check("orphans", _orphans),
)
