"""`supervisorctl models`: status of this Mac's InferenceServices, without a cluster or any process of our own.

supervisorctl knows programs and their processes; the reason why a model is not Ready is in our files. Text in them that
a user wrote or an engine printed is shown on one line and escaped.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from supervisor.supervisorctl import ControllerPluginBase

from metal_supervisor import launch
from metal_supervisor.cluster.report import CRASH_LOOP, last_known, report
from metal_supervisor.host.local_status import asked_at
from metal_supervisor.spec.hosts import in_url
from metal_supervisor.spec.names import aliases
from metal_supervisor.spec.processes import Observed, RunNote, State
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.sizes import amount
from metal_supervisor.spec.terminal_text import escaped, table
from metal_supervisor.state.directory import StateDir
from metal_supervisor.supervisord.client import Supervisord

COLUMNS = ("NAME", "PHASE", "RUNTIME", "PORT", "MEMORY", "RESTARTS", "ENDPOINT", "WHY")
LONGEST_WHY = 300
NOT_FOUND = 4
"""Exit status for an unknown name, the same as that of `supervisorctl status`."""
HELP = (
    "models\t\t\tWhat the InferenceServices of this Mac do",
    "models <name>...\tThe same of some: default.phi or default/phi",
)


def endpoint(record: Record, spec_host: str) -> str:
    """URL at which a service is reached on this Mac, "" without a port. On demand that is the gateway's."""
    port = report(record, None).port
    if not port:
        return ""
    return f"http://{in_url(asked_at(record.host or spec_host or '127.0.0.1'))}:{port}/v1"


def cut(why: str, due: float | None, now: float) -> str:
    """A reason at its longest, escaped, with the time of the next attempt if that is known."""
    why = escaped(why)
    why = f"{why[:LONGEST_WHY]}…" if len(why) > LONGEST_WHY else why
    if due is not None:
        why += f"; next attempt {'is due' if due <= now else f'in {due - now:.0f} s'}"
    return why


def row(record: Record, observed: Observed | None, reached: str, now: float, up: bool = True) -> tuple[str, ...]:
    """Columns of one service. `now`: Unix time; `up`: a supervisord runs."""
    told = report(record, observed) if up else last_known(record, observed)
    why = ": ".join(record.warning) if record.warning else ""
    if told.phase != "Ready":
        why = f"{told.reason}: {told.message}"
    why = cut(why, record.retry_at if told.reason == CRASH_LOOP else None, now)
    memory = observed.memory_bytes if observed is not None and observed.pid else 0
    return (
        "/".join(record.key),
        told.phase,
        record.runtime,
        str(record.port or ""),
        amount(memory) if memory else "",
        str(observed.restarts if observed is not None else 0),
        reached if told.ready else "",
        why,
    )


def meant(record: Record, names: Iterable[str]) -> set[str]:
    """Which of these names mean the service."""
    engine, service, *_ = aliases(record)
    return {*engine, *service}.intersection(names)


def still_so(observed: Observed | None, note: RunNote | None) -> Observed | None:
    """The sidecar's observation, corrected if the process has exited since: the sidecar may be down.

    `note`: its launcher's, which tells the engine from another process that has its pid by now, as after a reboot.
    """
    if observed is None or not observed.pid:
        return observed
    started = launch.start_time(observed.pid)
    if started and (note is None or note.pid != observed.pid or note.started == started):
        return observed
    state = "" if observed.state == State.STOPPING.value else observed.state  # the last word before all of it stopped
    return replace(observed, pid=0, ready=False, served=False, hung="", state=state, message="the engine has ended")


def listing(state: StateDir, names: Sequence[str], now: float) -> tuple[list[str], list[str]]:
    """(lines, those of the names that match no service here). Without names, all services."""
    records, unreadable = state.records()
    seen, notes = state.observations(), state.run_notes()
    up = not records or Supervisord(state.socket).answers()
    rows: list[tuple[str, ...]] = [COLUMNS]
    found: set[str] = set()
    for program, record in sorted(records.items()):
        if record.is_daemon:
            continue  # a daemon: its models are listed, and `status` shows the daemon itself
        which = meant(record, names)
        found |= which
        if which or not names:
            host = state.spec_of(program).get("host")
            reached = endpoint(record, host if isinstance(host, str) else "")
            rows.append(row(record, still_so(seen.get(program), notes.get(program)), reached, now, up))
    lines = table(rows) if len(rows) > 1 else []
    for program, why in sorted(unreadable.items()):
        if not names or program in names:
            found.add(program)
            lines.append(escaped(f"{program}: its record cannot be read: {why}")[:LONGEST_WHY])
    return lines, [name for name in names if name not in found]


class ModelsPlugin(ControllerPluginBase):  # type: ignore[misc]  # supervisor has no types
    """The plugin, as supervisorctl makes it from `[ctlplugin:models]`."""

    def __init__(self, controller: Any, state: str) -> None:
        super().__init__(controller)
        self._state = state
        for plugin in controller.options.plugins:
            plugin.help_models = self.help_models  # supervisorctl asks every plugin, and others would report no help

    def do_models(self, arg: str) -> None:
        """Print all services, or those that are named; the exit status is NOT_FOUND if a name is unknown."""
        lines, missing = listing(StateDir(Path(self._state)), arg.split(), time.time())
        if not lines and not missing:
            lines = ["no InferenceService is this Mac's"]
        for line in [*lines, *(f"{escaped(name)}: ERROR (no such service)" for name in missing)]:
            self._say(line)
        if missing:
            self.ctl.exitstatus = NOT_FOUND

    def do_help(self, arg: str) -> None:
        """List the command; help on a topic has been printed by the first plugin."""
        if not arg:
            super().do_help(arg)

    def help_models(self) -> None:
        for line in HELP:
            self._say(line)

    def _say(self, line: str) -> None:
        encoding = getattr(self.ctl.stdout, "encoding", None) or "utf-8"
        self.ctl.output(line.encode(encoding, "backslashreplace").decode(encoding))


def make(controller: Any, state: str) -> ModelsPlugin:
    """The factory that supervisord.conf names; `state` is the state directory."""
    return ModelsPlugin(controller, state)
