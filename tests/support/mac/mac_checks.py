"""The acceptance checks: what each proves, who may run it, and what to do when it fails.

ITEMS is what can only be settled on a Mac; every one of them has a check here, and `--list` and
docs/mac-acceptance.md are made of this table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.support.mac import mac_confinement, mac_host, mac_install, mac_jobs, mac_metal, mac_power, mac_runtimes
from tests.support.mac.mac_kit import Kit
from tests.support.mac.mac_report import Sheet

ITEMS = {
    "a": "property lists and sudoers by Apple's own tools",
    "b": "memory by ctypes against vm_stat, memory_pressure, footprint and ps",
    "c": "footprint of an engine, mapped and not, before and after residency expires",
    "d": "Metal's wired limit against the budget",
    "e": "kqueue on processes that are not our children",
    "f": "Metal and MLX in the context of a daemon, an agent and a shell",
    "g": "launchd: install, change, exchange under a stream, kill -9, ExitTimeOut, ThrottleInterval, bootout",
    "h": "Local Network privacy in the context of a daemon, an agent and a shell",
    "i": "sleep and wake",
    "j": "the assertion that keeps a Mac awake",
    "k": "powermetrics, its keys, and sudo's leave for it",
    "l": "levels of memory pressure",
    "m": "conformance of llama-server, mlx-server, mlx_lm, oMLX, vllm-swift and Ollama",
    "n": "the effect of ProcessType on tokens per second",
    "o": "the doctor, the application firewall and quarantine",
    "p": "confinement by Seatbelt",
}


@dataclass(frozen=True)
class Check:
    """One check."""

    name: str
    item: str
    """Letter in ITEMS."""
    proves: str
    """In one sentence."""
    on_failure: str
    """What to do then."""
    run: Callable[[Kit, Sheet], None]
    """Writes into the sheet. May raise Skip; whatever else it raises is a failure."""
    root: bool = False
    """Whether sudo is used, for all of it or a part."""
    hosted: bool = False
    """Whether a virtual machine without a GPU of its own can show it."""
    minutes: float = 0.5
    """About how long it takes."""


REPORT = "report it with this file"
CHECKS: tuple[Check, ...] = (
    Check(
        "confinement",
        "p",
        "The Seatbelt profile lets llama-server find Metal, load and serve, and keeps it from "
        "foreign files, ports and processes. An oMLX and an Ollama load a model under theirs.",
        "confinement/seatbelt.py: run it with `log stream --predicate 'sender == \"Sandbox\"'` beside it; until it is "
        "mended, engines start unconfined by themselves",
        mac_confinement.confinement,
        hosted=True,
        minutes=2,
    ),
    Check(
        "modules",
        "o",
        "Every module of ours can be imported on this macOS and Python, and servers can be verified.",
        "read the exception; a symbol may only be looked up when it is called",
        mac_host.modules,
        hosted=True,
    ),
    Check(
        "plists",
        "a",
        "plutil takes the daemon's and the agent's property list, visudo the fragment for powermetrics.",
        "launchd/dev.metal-supervisor.plist or host/launchd.py writes something that Apple's readers refuse",
        mac_host.plists,
        hosted=True,
    ),
    Check(
        "sysctls",
        "b",
        "Memory, pressure, swap and footprints that we read through libc are those that macOS's own "
        "tools tell, and cost microseconds.",
        "compare the structures in host/darwin_memory.py with this macOS's headers",
        mac_host.sysctls,
        hosted=True,
    ),
    Check(
        "exits",
        "e",
        "The death of a process that is not our child is told by kqueue, and how fast.",
        "a hardened runtime may forbid it: supervisord then notices after one to two seconds",
        mac_host.exits,
        hosted=True,
    ),
    Check(
        "footprint",
        "c",
        "What a llama-server is charged for is never below its weights, mapped or not, and its "
        "footprint is Activity Monitor's, while it works and once Metal let go of it.",
        "placement/claims.py charges too little for one of these modes",
        mac_metal.footprint,
        minutes=9,
    ),
    Check(
        "wired-limit",
        "d",
        "The budget is no more than what Metal will wire, by sysctl and by the engine's device.",
        "memory/budget.py: compare the figures with its table",
        mac_metal.wired,
    ),
    Check(
        "metal-contexts",
        "f",
        "llama.cpp and MLX find the GPU as a LaunchDaemon with UserName, as a LaunchAgent and in a shell.",
        "install with --agent if only the daemon sees no device, and " + REPORT,
        mac_jobs.metal,
        root=True,
    ),
    Check(
        "launchd-daemon",
        "g",
        "A real LaunchDaemon is installed, installed again without effect, given a setting, "
        "exchanged while an answer streams without losing a token, killed and adopted, restarted by SIGTERM, and "
        "removed while an answer ends, leaving nothing.",
        "the ends of its logs are in the evidence; " + REPORT,
        mac_install.daemon,
        root=True,
        hosted=True,
        minutes=6,
    ),
    Check(
        "launchd-agent",
        "g",
        "The same as a LaunchAgent, which needs no root but somebody who is logged in.",
        "as for launchd-daemon",
        mac_install.agent,
        hosted=True,
        minutes=6,
    ),
    Check(
        "local-network",
        "h",
        "A host of the local network can be reached by a LaunchDaemon with UserName and by a "
        "shell; whether an agent may is measured.",
        "the API server must then be reached by a tailnet address or through a tunnel of ssh's",
        mac_jobs.lan,
        root=True,
    ),
    Check(
        "sleep",
        "i",
        "The pair of clocks shows a sleep, and this Mac is ready within seconds after it.",
        "until then keep it awake: sudo pmset -a sleep 0",
        mac_power.sleep,
        root=True,
        minutes=4,
    ),
    Check(
        "caffeinate",
        "j",
        "While a model is wanted an assertion keeps this Mac awake, the display is left alone, and "
        "without a model it may sleep.",
        "see `pmset -g assertions` and the setting caffeinate",
        mac_host.caffeinate,
        minutes=1,
    ),
    Check(
        "powermetrics",
        "k",
        "powermetrics gives frames that we can read on this chip, and sudo allows that one command line and no other.",
        "host/powermetrics.py: compare the names of the keys",
        mac_power.powermetrics,
        root=True,
        minutes=2,
    ),
    Check(
        "pressure",
        "l",
        "The kernel's levels of memory pressure, simulated, are read as what they are and go again.",
        "the watchdog would act too late: " + REPORT,
        mac_host.pressure,
        root=True,
        minutes=3,
    ),
    *(
        Check(
            f"runtime-{each.title}",
            "m",
            f"{each.title} comes up through an InferenceService under its name, answers, "
            "streams, comes back after kill -9 and ends when it is not wanted.",
            f"runtimes/: what this build of {each.program} does otherwise is in the evidence",
            mac_runtimes.check(each),
            minutes=3,
        )
        for each in mac_runtimes.ENGINES
    ),
    Check(
        "process-type",
        "n",
        "An engine under ProcessType Interactive is no slower than without any, or in the background.",
        "launchd/dev.metal-supervisor.plist sets the wrong one",
        mac_jobs.process_type,
        root=True,
        minutes=4,
    ),
    Check(
        "doctor",
        "o",
        "The doctor runs here, and what it finds, the firewall and quarantine among it, is recorded.",
        "read its findings; each says what to do",
        mac_host.doctor,
        hosted=True,
    ),
)


def listing() -> list[str]:
    """What `--list` prints: every item, and its checks below it."""
    lines = []
    for letter, item in ITEMS.items():
        lines.append(f"{letter}  {item}")
        for each in (check for check in CHECKS if check.item == letter):
            marks = ", ".join(word for word, on in (("root", each.root), ("hosted", each.hosted)) if on)
            lines.append(f"     {each.name:<22} {f'[{marks}] ' if marks else ''}{each.proves}")
    return lines


def table() -> str:
    """The table of docs/mac-acceptance.md."""
    rows = ["| check | what it proves | root | hosted | minutes |", "| --- | --- | --- | --- | --- |"]
    rows += [
        f"| `{each.name}` | {each.proves} | {'yes' if each.root else ''} | {'yes' if each.hosted else ''} "
        f"| {each.minutes:g} |"
        for each in CHECKS
    ]
    return "\n".join(rows) + "\n"
