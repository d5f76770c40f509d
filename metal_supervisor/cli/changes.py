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

from metal_supervisor.cli.keys import engine_keys
from metal_supervisor.cli.render import DownloadBars
from metal_supervisor.cluster.manifests import direct_url
from metal_supervisor.cluster.report import UNLOADED, WAKING, report
from metal_supervisor.host import local_status, processes
from metal_supervisor.settings.loader import KEY_VARIABLE, Settings, local_state_dir
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

    def __init__(self, out: TextIO, served: Key | None = None) -> None:
        """`served`: the service that the system was started for, None for none."""
        self._served = served
        self._started_at = time.monotonic()
        self._phases: dict[Key, tuple[str, str, str]] = {}
        self._hinted: set[str] = set()
        self._written: list[int] = []
        self._advised: dict[str, str] = {}
        self._bars = DownloadBars(out)
        self.say = self._bars.say

    def tell(self, who: str, phase: str, text: str) -> None:
        """Print one state change."""
        line = f"{time.monotonic() - self._started_at:7.1f}s  {who:<24} {phase:<11} {text}"
        self.say(printable(line).rstrip())

    def show(self, directory: StateDir, settings: Settings) -> None:
        """Print what has changed since the last call, and once what to try."""
        self.print_states(directory, settings)
        self.print_advice(directory)
        self._bars.follow(directory)
        ready = any(phase in READY for phase, _, _ in self._phases.values())
        if ready or time.monotonic() - self._started_at > HINT_AFTER_S:
            self.print_hint(directory, settings)

    def print_states(self, directory: StateDir, settings: Settings) -> None:
        """Print the services whose state is another than at the last call."""
        # Files are replaced, never edited in place: each change shows in the time of their directory.
        decided = self._has_decided(directory)
        written = [decided, *((directory.path / name).stat().st_mtime_ns for name in ("records", "observed"))]
        if written == self._written:
            return
        # Two changes within a tick of the file system's clock have one time, so a time just past is not relied upon.
        self._written = written if time.time_ns() - max(written) > TICK_NS else []
        records, _ = directory.records()
        observed = directory.observations()
        seen = set()
        for program, record in records.items():
            seen.add(record.key)
            if not decided and record.verdict.standing in (Standing.WAIT, Standing.FAILED):
                continue  # decided in an earlier run, perhaps by other settings
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
                if not self._bars.possible or told.reason not in COMING or before is None or before[:2] != state[:2]:
                    self.tell(program, phase, text)
        for key in self._phases.keys() - seen:
            del self._phases[key]
            self.tell(".".join(key), "Gone", "")

    def _has_decided(self, directory: StateDir) -> bool:
        """True once the controller of this run has decided on all services, or takes long to."""
        told = directory.report(CONTROLLER_REPORT)
        synced = mapping(told, "cluster").get("synced") is True and processes.has_written(told)
        return synced or time.monotonic() - self._started_at > HINT_AFTER_S

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
        ready = [each for each in ready if self._served in (None, each[0])]
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
            lines += commands_for(settings, key[1], url, mode, tool["metal-supervisor"])
        if "system" in new and settings.embedded:
            lines.append(f"{tool['metal-supervisor']} serve OWNER/REPO:Q4_K_M{state_flag(directory.path)}")
        stops = "Ctrl-C stops everything."
        if self._served:
            install = f"{tool['metal-supervisor']} install{state_flag(directory.path)}"
            stops = f"The system stays in this terminal: {stops} Make it permanent with: {install}"
        self.say("\n  try   " + "\n        ".join(lines) + f"\n  {stops}\n")


def _advice(told: Json) -> str:
    return string(mapping(told, "cluster"), "advice")


def shown(path: Path) -> str:
    """A path as a user would type it here."""
    with contextlib.suppress(ValueError, OSError):  # the current directory may have been removed
        path = path.relative_to(Path.cwd())
    return shlex.quote(str(path))


def commands_for(settings: Settings, name: str, base: str, mode: str, tool: str = "metal-supervisor") -> list[str]:
    """Commands that send a first request to a service: curl, and chat if it chats, each with the key that it needs.

    `base`: base URL for curl, "" for none. No key is in them: they name the variable or the command that has it.
    """
    path, body = first_request.example(mode, name)
    flag = state_flag(settings.state_path)
    own = f"$({tool} key show {name}{flag})" if engine_keys(StateDir(settings.state_path), name) else ""
    gateway = settings.gateway_url if settings.gateway_on else ""
    at_gateway = f"${KEY_VARIABLE}" if gateway and settings.gateway_keys_path else own
    lines = []
    if base:
        key = at_gateway if base == gateway else own
        header = f'-H "Authorization: Bearer {key}" ' if key else ""
        lines.append(f"curl {base}{path} {header}-d '{body}'")
    if mode == "chat":
        variable = f'{KEY_VARIABLE}="{own}" ' if own and at_gateway == own else ""
        lines.append(f"{variable}{tool} chat {name}{flag}")
    if at_gateway != own and settings.gateway_keys and KEY_VARIABLE not in os.environ:
        lines.insert(0, f"export {KEY_VARIABLE}=$({tool} key add me{flag})")
    return lines


def export_line(kubeconfig: Path, programs: Path | str) -> str:
    """The line for a shell (sh, bash, zsh, fish) after which kubectl, and the programs there, need no path."""
    line = f"export KUBECONFIG={shlex.quote(str(kubeconfig))}"
    return f'{line} PATH={shlex.quote(str(programs))}:"$PATH"' if programs else line


def state_flag(state: Path) -> str:
    """The flag by which a command typed here finds a system, with a space before it; "" if it needs none."""
    found = Path(local_state_dir(os.environ)).expanduser().absolute()
    return "" if found == state else f" --state-dir {shown(state)}"
