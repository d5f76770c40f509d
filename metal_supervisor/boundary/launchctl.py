"""launchd's word on a job, from `launchctl print`, whose output Apple calls no interface.

So only keys one tab deep are believed, and whatever is missing or odd is left empty.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from metal_supervisor.boundary.commands import TIMEOUT_S, Runner

LAUNCHCTL = "/bin/launchctl"
LABEL, INCUMBENT = "dev.metal-supervisor", "com.llmkube.metal-agent"


@dataclass(frozen=True)
class Job:
    """A loaded job. Texts are "" and numbers 0 where launchd does not say."""

    state: str
    """`running`, `spawn scheduled`, `not running` …"""
    pid: int
    runs: int
    last_exit: str
    """`(never exited)`, `0`, `78: EX_CONFIG` …"""
    exit_timeout_s: int | None
    spawn_type: str
    """`interactive (4)`, `daemon (3)` …"""
    program: str


def job(run: Runner, domain: str, label: str) -> Job | None:
    """The job of that label in a domain (`system`, `gui/501`); None if it is not loaded."""
    done = run((LAUNCHCTL, "print", f"{domain}/{label}"), TIMEOUT_S)
    if not done.ok:
        return None
    said = dict(re.findall(r"(?m)^\t([a-z][a-z ]*) = (.*)$", done.out))
    timeout = said.get("exit timeout", "")
    return Job(
        said.get("state", ""), _number(said.get("pid", "")), _number(said.get("runs", "")),
        said.get("last exit code", ""), int(timeout) if timeout.isdecimal() else None,
        said.get("spawn type", ""), said.get("program", ""),
    )  # fmt: skip


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
