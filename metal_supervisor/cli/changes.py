"""A line in a terminal for each change of a running system, live lines of its downloads, and what to type next.

All of it is read from the state directory, where the other programs wrote it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import TextIO

from metal_supervisor.cli.incoming import Incoming
from metal_supervisor.cli.terminal import Live
from metal_supervisor.cluster.manifests import direct_url
from metal_supervisor.cluster.report import UNLOADED, WAKING, report
from metal_supervisor.host import local_status, processes
from metal_supervisor.settings.loader import Settings, local_state_dir
from metal_supervisor.spec import first_request
from metal_supervisor.spec.document import mapping, string
from metal_supervisor.spec.terminal_text import printable
from metal_supervisor.spec.types import Json, Key, Standing
from metal_supervisor.state import gateway_note
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.reports import CONTROLLER_REPORT

TICK_NS = 50_000_000
HINT_AFTER_S = 30.0
READY = frozenset({"Ready", UNLOADED})
"""Phases in which a request is answered."""
COMING = ("Downloading",)


class ChangePrinter:
    """Prints what changes in a state directory."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._started_at = time.monotonic()
        self._phases: dict[Key, tuple[str, str, str]] = {}
        self._hinted: set[str] = set()
        self._written: list[int] = []
        self._advised: dict[str, str] = {}
        self._live = Live(out)
        self._incoming = Incoming()

    def say(self, text: str) -> None:
        """Print one plain line."""
        self._live.clear()
        with contextlib.suppress(OSError, ValueError):  # a full disk below stdout must not end the system
            self._out.write(text + "\n")
            self._out.flush()

    def tell(self, who: str, phase: str, text: str) -> None:
        """Print one state change."""
        line = f"{time.monotonic() - self._started_at:7.1f}s  {who:<24} {phase:<11} {text}"
        self.say(printable(line).rstrip())

    def show(self, directory: StateDir, settings: Settings) -> None:
        """Print what has changed since the last call, and once what to try."""
        self.print_states(directory, settings)
        self.print_advice(directory)
        if self._live.possible:
            self._live.draw(self._incoming.lines(directory, time.monotonic(), self._live.size().columns))
        ready = any(phase in READY for phase, _, _ in self._phases.values())
        if ready or time.monotonic() - self._started_at > HINT_AFTER_S:
            self.print_hint(directory, settings)

    def print_states(self, directory: StateDir, settings: Settings) -> None:
        """Print the services whose state is another than at the last call."""
        # Files are replaced, never edited in place: each change shows in the time of their directory.
        written = [(directory.path / name).stat().st_mtime_ns for name in ("records", "observed")]
        if written == self._written:
            return
        # Two changes within a tick of the file system's clock have one time, so a time just past is not relied upon.
        self._written = written if time.time_ns() - max(written) > TICK_NS else []
        records, _ = directory.records()
        observed = directory.observations()
        seen = set()
        for program, record in records.items():
            seen.add(record.key)
            told = report(record, observed.get(program))
            gone = record.verdict.standing is Standing.REMOVING
            phase, text = ("Stopping", "deleted") if gone else (told.phase, told.message)
            if told.reason in (UNLOADED, WAKING):
                phase = told.reason
            if told.phase == "Ready" and phase != WAKING:
                where = local_status.asked_at(record.host or settings.bind_address)
                text = direct_url(where, told.port or 0, "/v1")
            if record.warning:
                text += f" [{record.warning[0]}: {record.warning[1]}]"
            state = phase, told.reason, text
            before = self._phases.get(record.key)
            if before is None and told.reason == "Stopping":
                continue  # what the run before left behind
            if before != state:
                self._phases[record.key] = state
                # How far a download is the line below says, where there is one.
                if not self._live.possible or told.reason not in COMING or before is None or before[:2] != state[:2]:
                    self.tell(program, phase, text)
        for key in self._phases.keys() - seen:
            del self._phases[key]
            self.tell(".".join(key), "Gone", "")

    def print_advice(self, directory: StateDir) -> None:
        """Print the controller's advice about the cluster, and the gateway's problem, whenever they change."""
        told_by = ("cluster", CONTROLLER_REPORT, _advice), ("gateway", gateway_note.FILE, processes.problem_told)
        for who, file, said in told_by:
            text = said(directory.report(file))
            if text and text != self._advised.get(file):
                self.tell(who, "", text)
            self._advised[file] = text

    def print_hint(self, directory: StateDir, settings: Settings) -> None:
        """Print the commands to try next, as a user would type them here: once of the system, once of a Ready model."""
        ready = [(key, text) for key, (phase, _, text) in self._phases.items() if phase in READY]
        new = {"system", *(["model"] if ready else [])} - self._hinted
        if not new:
            return
        self._hinted |= new
        conf, kubeconfig = (shown(directory.path / name) for name in ("supervisord.conf", "kubeconfig"))
        beside = Path(sys.executable).parent
        # What the reader's own shell finds; make puts our environment first on its PATH.
        theirs = [place for place in os.environ.get("PATH", "").split(os.pathsep) if Path(place) != beside]
        tool = {}
        for name in ("supervisorctl", "kubectl", "metal-supervisor"):
            found = shutil.which(name, path=os.pathsep.join(theirs)) or not (beside / name).exists()
            tool[name] = name if found else shown(beside / name)
        lines = []
        if "system" in new:
            if settings.embedded:
                here = "" if all(name == each for name, each in tool.items()) else beside
                lines.append(export_line(directory.path / "kubeconfig", here))
            lines.append(f"{tool['supervisorctl']} -c {conf} status")
            if settings.embedded:
                lines.append(f"{tool['kubectl']} --kubeconfig {kubeconfig} get isvc,models,svc,endpointslices")
            lines.append(f"curl localhost:{settings.port}/healthz")
        if "model" in new:
            key, url = ready[0][0], ready[0][1].partition(" ")[0]
            mode = next((each.mode for each in directory.records()[0].values() if each.key == key), "chat")
            path, body = first_request.example(mode, key[1])
            lines.append(f"curl {url}{path} -d '{body}'")
            if mode == "chat":
                lines.append(f"{tool['metal-supervisor']} chat {key[1]}{state_flag(directory.path)}")
        if "system" in new and settings.embedded:
            lines.append(f"{tool['metal-supervisor']} serve OWNER/REPO:Q4_K_M{state_flag(directory.path)}")
        self.say("\n  try   " + "\n        ".join(lines) + "\n  Ctrl-C stops everything.\n")


def _advice(told: Json) -> str:
    return string(mapping(told, "cluster"), "advice")


def shown(path: Path) -> str:
    """A path as a user would type it here."""
    with contextlib.suppress(ValueError, OSError):  # the current directory may have been removed
        path = path.relative_to(Path.cwd())
    return shlex.quote(str(path))


def export_line(kubeconfig: Path, programs: Path | str) -> str:
    """The line for a shell (sh, bash, zsh, fish) after which kubectl, and the programs there, need no path."""
    line = f"export KUBECONFIG={shlex.quote(str(kubeconfig))}"
    return f'{line} PATH={shlex.quote(str(programs))}:"$PATH"' if programs else line


def state_flag(state: Path) -> str:
    """The flag by which a command typed here finds a system, with a space before it; "" if it needs none."""
    found = Path(local_state_dir(os.environ)).expanduser().absolute()
    return "" if found == state else f" --state-dir {shown(state)}"
