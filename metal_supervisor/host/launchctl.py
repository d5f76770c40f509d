"""Client of launchd, through launchctl: look up, load and unload a job, and wait until that has taken effect.

Its answers are codes of errno and text that Apple calls no interface, so only keys one level deep are read and unknown
ones are ignored. Both verbs return before they are done: a job that is being unloaded exists until its processes have
ended, and loading it in the meantime fails with a misleading input/output error.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from metal_supervisor.host.commands import NOT_FOUND as NO_PROGRAM
from metal_supervisor.host.commands import TIMEOUT_S, Done, Runner
from metal_supervisor.spec.user_error import UserError

LAUNCHCTL = "/bin/launchctl"
NOT_FOUND = 113
NO_SUCH_PROCESS = 3
IN_PROGRESS = 36
ALREADY = 37
IO_ERROR = 5
NO_DOMAIN = 125
NO_SUCH_DOMAIN = 112
"""For a user who is not logged in at the screen, as NO_DOMAIN."""
NOT_LOADED = frozenset({NOT_FOUND, NO_SUCH_PROCESS, NO_DOMAIN, NO_SUCH_DOMAIN, NO_PROGRAM})
"""Exit codes that mean there is no such job; any other failure tells nothing about it."""
EX_CONFIG = "78"
"""Exit code with which launchd itself reports a job that it cannot start."""
AGAIN_S = 0.5
LOAD_WAIT_S = 60.0


class LaunchdError(UserError):
    """Refusal by launchd; the message says what it refused and what to do."""


@dataclass(frozen=True)
class LoadedJob:
    """State of a loaded job according to launchd; "", 0 or None where it does not tell."""

    state: str
    """`running`, `spawn scheduled`, …"""
    pid: int
    runs: int
    last_exit: str
    """`(never exited)`, `0`, `78: EX_CONFIG`, or `Killed: 9` of a signal."""
    exit_timeout_s: int | None
    spawn_type: str
    """`interactive (4)` as it should be."""
    program: str


def _keys(text: str) -> dict[str, str]:
    """The `key = value` lines one level deep; the first of each."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, mark, value = line.partition(" = ")
        if mark and key.startswith("\t") and not key.startswith("\t\t") and not value.startswith("{"):
            found.setdefault(key.strip(), value.strip())
    return found


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and text.isascii() else None


class Launchctl:
    """One domain of launchd: `system`, or `gui/UID` of a user who is logged in."""

    def __init__(
        self, run: Runner, domain: str, prefix: Sequence[str] = (), pause: Callable[[float], None] = time.sleep
    ) -> None:
        """`prefix`: words before a command that changes something, such as sudo for `system`."""
        self._run, self.domain, self._prefix, self._pause = run, domain, tuple(prefix), pause

    def argv(self, verb: str, *arguments: str) -> list[str]:
        """The command line of a verb that changes something."""
        return [*self._prefix, LAUNCHCTL, verb, *arguments]

    def line(self, verb: str, *arguments: str) -> str:
        """The same as a user would type it."""
        return " ".join(Path(word).name if word.endswith("/sudo") else word for word in self.argv(verb, *arguments))

    def job(self, label: str) -> LoadedJob | None:
        """The job of that label; None if none is loaded. Raises LaunchdError if launchd cannot tell."""
        done = self._run([LAUNCHCTL, "print", f"{self.domain}/{label}"], TIMEOUT_S)
        if done.code in NOT_LOADED:
            return None
        if not done.ok:
            raise LaunchdError(f"launchctl print {self.domain}/{label} failed with {done.code}: {done.said}")
        found = _keys(done.out)
        return LoadedJob(
            state=found.get("state", ""),
            pid=_number(found.get("pid")) or 0,
            runs=_number(found.get("runs")) or 0,
            last_exit=found.get("last terminating signal", "") or found.get("last exit code", ""),
            exit_timeout_s=_number(found.get("exit timeout")),
            spawn_type=found.get("spawn type", ""),
            program=found.get("program", ""),
        )

    def enable(self, label: str) -> None:
        """Enable a job that was disabled, so that it can be loaded. Raises LaunchdError."""
        self._check(self._run(self.argv("enable", f"{self.domain}/{label}"), LOAD_WAIT_S), "enable")

    def kill(self, label: str, signal: str) -> None:
        """Send a signal to the job's first process, if there is one. Raises LaunchdError."""
        done = self._run(self.argv("kill", signal, f"{self.domain}/{label}"), LOAD_WAIT_S)
        if done.code not in (NO_SUCH_PROCESS, NOT_FOUND):
            self._check(done, "kill")

    def load(self, label: str, plist: Path) -> None:
        """Load a job, and retry while launchd is not ready for it. Raises LaunchdError."""
        done = self._until(
            lambda: self._run(self.argv("bootstrap", self.domain, str(plist)), LOAD_WAIT_S),
            lambda done: done.code not in (IO_ERROR, ALREADY, IN_PROGRESS) or self.job(label) is not None,
            LOAD_WAIT_S,
        )
        if self.job(label) is None:
            self._check(done, "bootstrap")
            raise LaunchdError(f"launchctl bootstrap said yes, and {self.domain} has no {label}")

    def unload(self, label: str, wait_s: float) -> None:
        """Unload a job and wait until it is gone with its processes. Raises LaunchdError."""
        done = self._until(
            lambda: self._run(self.argv("bootout", f"{self.domain}/{label}"), wait_s),
            lambda done: self.job(label) is None or done.code not in (0, IN_PROGRESS),
            wait_s,
        )
        if self.job(label) is not None:
            self._check(done, "bootout")
            raise LaunchdError(f"{label} is not gone after {wait_s:.0f} s; see: launchctl print {self.domain}/{label}")

    def _until(self, ask: Callable[[], Done], settled: Callable[[Done], bool], wait_s: float) -> Done:
        """Ask again until the answer is settled or the time is over; return the last answer."""
        for _ in range(max(1, int(wait_s / AGAIN_S))):
            done = ask()
            with contextlib.suppress(LaunchdError):  # a busy launchd does not always tell; it is asked again
                if settled(done):
                    break
            self._pause(AGAIN_S)
        return done

    def _check(self, done: Done, verb: str) -> None:
        if done.ok:
            return
        hint = ""
        if done.code == NO_DOMAIN:
            hint = "; no user is logged in at the screen: log in there, or install without --agent"
        raise LaunchdError(f"launchctl {verb} failed with {done.code}: {done.said}{hint}")
