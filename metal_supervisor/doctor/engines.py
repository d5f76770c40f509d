"""Checks of the engines: found, working, built for this processor, reachable, and up to date with those that run."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from metal_supervisor.doctor.findings import Check, Finding, Found, fail, ok, unknown, warn
from metal_supervisor.doctor.surroundings import ASK_S, Surroundings
from metal_supervisor.doctor.together import each_of
from metal_supervisor.host import chip, processes
from metal_supervisor.host import machine as host
from metal_supervisor.host.commands import TIMED_OUT
from metal_supervisor.runtimes import RUNTIMES, Executable, builds
from metal_supervisor.runtimes.ollama import NAME as OLLAMA
from metal_supervisor.runtimes.setting_checks import offered
from metal_supervisor.settings.checks import listed
from metal_supervisor.settings.loader import flag_of
from metal_supervisor.spec.hosts import is_loopback
from metal_supervisor.spec.processes import LIVE
from metal_supervisor.state import gateway_note

XATTR = "/usr/bin/xattr"
FILE = "/usr/bin/file"
QUARANTINE = "com.apple.quarantine"
FIREWALL = "/usr/libexec/ApplicationFirewall/socketfilterfw"
OF_THE_APP = "/Contents/MacOS/Python"
_VERSION = re.compile(r"(?<![\w.])v?(\d+\.[\w.+-]{1,40}|(?<=version: )\d[\w.+-]{0,40})")
WHOLE_SECOND_S = 1.0
"""Precision of a start's time: supervisord tells whole seconds, Linux the time of its boot in whole seconds."""


@dataclass(frozen=True)
class FoundEngine:
    """An engine's executable that was found."""

    runtime: str
    executable: Executable
    path: Path

    @property
    def real(self) -> Path:
        """Real path of the executable; for a script that of its interpreter, which is the program that listens."""
        interpreter = builds.interpreter_of(self.path) if self.executable.script else ""
        return Path(interpreter or self.path).resolve()

    @property
    def flag(self) -> str:
        return flag_of(self.executable.setting)


def found(around: Surroundings) -> tuple[list[FoundEngine], dict[str, str]]:
    """(installed engines, missing runtime -> reason)."""
    here, missing = [], {}
    for name in offered(around.settings):
        try:
            executable, path = builds.find(around.settings, RUNTIMES[name].executables)
            here.append(FoundEngine(name, executable, path))
        except host.NoBinary as error:
            missing[name] = str(error)
    return here, missing


# ── whether they are there, and work ─────────────────────────────────────────────────────────────


def _version(around: Surroundings, engine: FoundEngine) -> Finding:
    done = around.run((str(engine.path), "--version"), ASK_S)
    name, path = f"{engine.runtime} ({engine.executable.name})", engine.path
    if done.ok:
        told = _VERSION.search(done.out + done.err)
        return ok(f"{name} {told[1] if told else 'without a version'} at {path}")
    if done.code == TIMED_OUT:
        text = f"{name} at {path} did not tell its version within {ASK_S:g} s"
        return warn(text, "the first start after an installation takes long; ask again")
    how = f"ended by signal {-done.code}" if done.code < 0 else f"exit code {done.code}"
    again = engine.executable.install.replace("install it", "reinstall it")
    text = f"{name} at {path} does not work: {how} {done.last_line[:160]}".rstrip()
    return fail(text, f"{again}, or name another with {engine.flag}")


def _engines(around: Surroundings) -> Found:
    here, missing = found(around)
    # Runtime -> setting or service that needs it.
    demanded = dict.fromkeys(listed(around.settings.runtimes), "--runtimes")
    demanded |= {each.runtime: f"{each.namespace}/{each.name}" for each in around.records().values() if each.runs}
    if "ollama" in demanded and around.settings.ollama_url != "off":
        del demanded["ollama"]  # the user's own is enough
    install = {name: RUNTIMES[name].executables[0].install for name in missing}
    wanted = [name for name in missing if name in demanded]
    bad = [fail(f"{name} is wanted by {demanded[name]}: {missing[name]}", install[name]) for name in wanted]
    if not bad and not here:
        bad.append(fail("no engine is here: no model can run", next(iter(install.values()))))
    told = each_of([partial(_version, around, each) for each in here], ASK_S + 0.5)
    return [*bad, *chain(*told)]


# ── what a Mac makes of them ─────────────────────────────────────────────────────────────────────


def _binaries(around: Surroundings) -> Found:
    """An engine for Intel would run under Rosetta, a tenth as fast; launchd starts none that is quarantined."""
    here, _ = found(around)
    arm = chip.quick(around.mac).name.startswith("Apple")
    bad = []
    for each in here:
        processors = around.run((FILE, "-b", str(each.real)), ASK_S / 8).out  # of a Mach-O file, it names them all
        if arm and "Mach-O" in processors and "arm64" not in processors:
            text = f"{each.real} is built for Intel: it would run translated by Rosetta, many times slower"
            fix = f"install Homebrew for Apple chips (in /opt/homebrew), then {each.executable.install}"
            bad.append(fail(text, fix))
        for path in dict.fromkeys((each.path, each.real)):
            if around.run((XATTR, "-p", QUARANTINE, str(path)), ASK_S / 8).ok:  # it fails without that attribute
                text = f"{path} is quarantined: it came by a browser, and launchd's programs cannot start it"
                bad.append(fail(text, f"if you trust it: {XATTR} -d {QUARANTINE} {shlex.quote(str(path))}"))
    return bad or (ok(f"{len(here)} built for this chip, none quarantined") if here else [])


# ── the application firewall ─────────────────────────────────────────────────────────────────────


def _firewall(around: Surroundings) -> Found:
    state = around.run((FIREWALL, "--getglobalstate"), ASK_S / 2)
    apps = around.run((FIREWALL, "--listapps"), ASK_S / 2)
    programs, loopback = _listening(around)
    if loopback:
        return ok("all that listens does so on loopback only, where no firewall asks")
    told = re.search(r"State = (\d)", state.out)
    if not state.ok or not told:
        return unknown(f"the firewall's state ({state.said:.100})")
    if told[1] == "0":
        return ok("the application firewall is off")
    if told[1] == "2":
        text = "the application firewall blocks all incoming connections: no other machine reaches a model"
        return fail(text, "System Settings > Network > Firewall > Options: do not block all incoming connections")
    if not apps.ok or "number of apps" not in apps.out.lower():  # a list that is not shown knows nobody
        return unknown(f"the programs that the application firewall, which is on, lets in ({apps.said:.100})")
    rows = re.findall(r"(?m)^\s*\d+\s*:\s*(/.*?)\s*\n\s*\(\s*(Allow|Block)", apps.out)
    allowed = {path.removesuffix(OF_THE_APP): word == "Allow" for path, word in rows}
    bad = []
    for path in dict.fromkeys(map(str, programs)):
        quoted = shlex.quote(path)
        fix = f"sudo {FIREWALL} --add {quoted} && sudo {FIREWALL} --unblockapp {quoted}"
        if allowed.get(path) is False:
            bad.append(fail(f"the application firewall blocks {path}: no other machine reaches what it serves", fix))
        elif path not in allowed:
            text = f"the application firewall is on and does not know {path}: it may drop connections without a word"
            bad.append(warn(text, f"{fix}; again after each upgrade of it, as its path changes"))
    return bad or ok(f"the application firewall is on, and lets {len(set(programs))} programs be reached")


def _listening(around: Surroundings) -> tuple[list[Path], bool]:
    """(programs that listen for other machines, as macOS knows them; True if all listen on loopback only)."""
    settings = around.settings
    ours = Path(sys.executable).resolve()
    engines = not is_loopback(settings.bind_address)
    programs = []
    if engines:  # clients reach an Ollama that is started here through its gate, which is our own program
        programs += [ours if each.runtime == OLLAMA else each.real for each in found(around)[0]]
    own = [settings.gateway_address[0]] if settings.gateway_on else []
    # The gateway listens for services on demand where their engines would.
    own += [settings.bind_address] if gateway_note.read(settings.state_path).get("fronts") else []
    own += [settings.metrics_address[0]] if settings.metrics_listen else []
    if not all(map(is_loopback, own)):
        programs.append(ours)
    return list(map(builds.seen_as, programs)), not engines and all(map(is_loopback, own))


# ── what runs ────────────────────────────────────────────────────────────────────────────────────


def _changed_at(path: Path) -> float | None:
    """Unix time at which a file, or the link to it, was created; None if it is gone."""
    try:
        return max(path.lstat().st_ctime, path.stat().st_ctime)
    except OSError:
        return None


def _builds(around: Surroundings) -> Found:
    """Engines whose build on disk has changed since they were started."""
    state, bad, running = around.directory, [], []
    for program, row in sorted((around.table() or {}).items()):
        note = state.run_note(program)
        if note is None or row.state not in LIVE:
            continue
        argv = note.spec.get("argv")
        if not isinstance(argv, list) or not argv:
            continue
        binary = Path(str(argv[0]))
        running.append(program)
        # A stand-in's start is not its engine's.
        started_at = processes.started_at(note.pid) or row.start
        changed_at = _changed_at(binary)
        if changed_at is None:
            text = f"{program} runs {binary}, which is there no more: it could not be started again"
            bad.append(fail(text, f"install the engine again, then: supervisorctl restart {program}"))
        elif changed_at >= started_at + WHOLE_SECOND_S:
            text = f"{program} runs a build of {binary.name} from before its upgrade"
            bad.append(warn(text, f"when an interruption is welcome: supervisorctl restart {program}"))
    return bad or (ok(f"{len(running)} running, each of the build on disk") if running else [])


CHECKS = (
    Check("engines", _engines),
    Check("binaries", _binaries, mac=True),
    Check("firewall", _firewall, mac=True),
    Check("builds", _builds),
)
