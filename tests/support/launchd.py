"""A stand-in for launchd, launchctl, sudo and a Mac's disk, because there is none here: it follows launchctl(1).

Jobs are real processes, started as their property list says and by nothing else: its environment, directory and log
files, started again when they end, told to end by TERM and killed with their process group after ExitTimeOut. As on a
Mac, `bootout` may answer before the job is gone, a `bootstrap` that comes too early fails with 5, and what is in other
process groups than the job's own is left alone. Times are shorter. What it does not show is what only a Mac can.
"""

from __future__ import annotations

import contextlib
import os
import plistlib
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metal_supervisor.host import commands, root_file
from metal_supervisor.host.commands import Done

FINE = Done(0, "", "")
THROTTLE_S = 0.3
KEYS: dict[str, type | tuple[type, ...]] = {
    "Label": str,
    "UserName": str,
    "GroupName": str,
    "InitGroups": bool,
    "ProgramArguments": list,
    "WorkingDirectory": str,
    "EnvironmentVariables": dict,
    "RunAtLoad": bool,
    "KeepAlive": bool,
    "ThrottleInterval": int,
    "ExitTimeOut": int,
    "ProcessType": str,
    "SoftResourceLimits": dict,
    "HardResourceLimits": dict,
    "Umask": int,
    "StandardOutPath": str,
    "StandardErrorPath": str,
}
"""The keys of launchd.plist(5) that we use, and their types."""


def problems(content: Any) -> list[str]:
    """What launchd would not take, or a careful reader would not, of a property list."""
    found = [f"{key} is unknown" for key in content.keys() - KEYS.keys()]
    found += [f"{key} is a {type(each).__name__}" for key, each in content.items() if not isinstance(each, KEYS[key])]
    texts = [*content["ProgramArguments"], *content["EnvironmentVariables"].values()]
    texts += [content[key] for key in ("WorkingDirectory", "StandardOutPath", "StandardErrorPath")]
    found += [f"launchd expands nothing: {text}" for text in texts if any(sign in text for sign in "~$@")]
    places = [content["ProgramArguments"][0], *texts[-3:]]
    found += [f"{text} is relative" for text in places if not text.startswith("/")]
    soft, hard = (content[f"{kind}ResourceLimits"]["NumberOfFiles"] for kind in ("Soft", "Hard"))
    if soft > hard:
        found.append("the soft limit of files is above the hard one")
    return found


def _heed_signals() -> None:
    """launchd's jobs do not inherit what an installer ignores."""
    for each in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)


class Job:
    """One loaded job."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.content = plistlib.loads(Path(path).read_bytes())
        self.process: subprocess.Popen[bytes] | None = None
        self.runs = 0
        self.last = "(never exited)"
        self.ending, self.gone = threading.Event(), threading.Event()
        threading.Thread(target=self._mind, daemon=True).start()

    def _mind(self) -> None:
        while not self.ending.is_set():
            if not Path(self.content["StandardOutPath"]).parent.is_dir():
                self.last = "78: EX_CONFIG"
                self.ending.wait()
                break
            self._run_once()
            self.ending.wait(THROTTLE_S)
        self.gone.set()

    def _run_once(self) -> None:
        with Path(self.content["StandardOutPath"]).open("ab") as log:
            self.process = subprocess.Popen(
                self.content["ProgramArguments"],
                env=self.content["EnvironmentVariables"],
                stdout=log,
                stderr=log,
                cwd=self.content["WorkingDirectory"],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                umask=self.content["Umask"],
                preexec_fn=_heed_signals,  # noqa: PLW1509 - a test's
            )
        self.runs += 1
        code = self.process.wait()
        self.last = f"{signal.Signals(-code).name}: {-code}" if code < 0 else str(code)
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Begins to end."""
        if self.ending.is_set():
            return
        self.ending.set()
        threading.Thread(target=self._end, daemon=True).start()

    def _end(self) -> None:
        process = self.process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            if not self.gone.wait(self.content["ExitTimeOut"]):
                process.kill()

    def printed(self, name: str) -> str:
        """`launchctl print`, as recorded."""
        running = self.process is not None and self.process.poll() is None
        pid = f"\tpid = {self.process.pid}\n" if running and self.process else ""
        return (
            f"{name} = {{\n\tactive count = 1\n\tpath = {self.path}\n\ttype = LaunchDaemon\n"
            f"\tstate = {'running' if running else 'spawn scheduled'}\n\n"
            f"\tprogram = {self.content['ProgramArguments'][0]}\n\targuments = {{\n\t\tstate = not this one\n\t}}\n\n"
            f"\tenvironment = {{\n\t\tpid => 1\n\t}}\n\n\texit timeout = {self.content['ExitTimeOut']}\n"
            f"\truns = {self.runs}\n{pid}\tlast exit code = {self.last}\n\tspawn type = interactive (4)\n}}\n"
        )


class Mac:
    """Answers commands as a Mac would; `asked` has those that change something."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.asked: list[str] = []
        self.too_early = 0
        """How many more times a bootstrap fails with an input/output error."""
        self.sudo = True

    def __call__(self, argv: Sequence[str], _timeout_s: float, content: bytes = b"") -> Done:
        words = list(argv)
        if words[0] == "/usr/bin/sudo":
            if not self.sudo:
                return Done(1, "", "sudo: a terminal is required to read the password")
            words = [word for word in words[1:] if word not in ("-n", "-v")]
            if not words:
                return FINE
        if words[:2] != ["/bin/launchctl", "print"]:
            self.asked.append(" ".join("$PLACE" if word == root_file.SCRIPT else word for word in argv))
        if words[0] == root_file.SHELL:
            return commands.run_here(words, 30.0, content)
        tools = {"/bin/rm": _remove, "/bin/launchctl": self._launchctl}
        return tools[words[0]](words[1:])

    def _launchctl(self, words: list[str]) -> Done:
        verb, rest = words[0], words[1:]
        if verb == "bootstrap":
            return self._bootstrap(*rest)
        if verb == "enable":
            return FINE
        name = rest[-1]
        job = self.jobs.get(name)
        if job is not None and job.gone.is_set():
            del self.jobs[name]
            job = None
        if job is None:
            code = 113 if verb == "print" else 3
            return Done(code, "", f'Could not find service "{name.rpartition("/")[2]}"')
        if verb == "print":
            return Done(0, job.printed(name), "")
        if verb == "kill":
            assert rest[0] == "SIGKILL"
            if job.process is not None:
                job.process.kill()
            return FINE
        assert verb == "bootout"
        job.end()
        return FINE if job.gone.wait(0.05) else Done(36, "", "Boot-out failed: 36: Operation now in progress")

    def _bootstrap(self, domain: str, path: str) -> Done:
        if domain.startswith("gui/") and not self.sudo:
            return Done(125, "", "Bootstrap failed: 125: Domain does not support specified action")
        content = plistlib.loads(Path(path).read_bytes())
        assert not problems(content)
        name = f"{domain}/{content['Label']}"
        if self.too_early or (name in self.jobs and self.jobs[name].ending.is_set()):
            self.too_early = max(0, self.too_early - 1)
            return Done(5, "", "Bootstrap failed: 5: Input/output error")
        if name in self.jobs:
            return Done(37, "", "Bootstrap failed: 37: Operation already in progress")
        self.jobs[name] = Job(path)
        return FINE

    def close(self) -> None:
        """Ends every job."""
        for job in self.jobs.values():
            job.end()
        for job in self.jobs.values():
            assert job.gone.wait(60), job.path


def _remove(words: list[str]) -> Done:
    Path(words[-1]).unlink(missing_ok=True)
    return FINE


def no_pause(_seconds: float) -> None:
    """For waits that need not take as long here."""
    time.sleep(0.02)
