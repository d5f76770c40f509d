"""`metal-supervisor status`: shows what runs, from the sidecar and from this machine, once or continuously.

While nothing answers, it shows the last state of each service from the files instead, and says so.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TextIO, cast

from metal_supervisor.cli.overview import STATES, Beside, Strange, facts, lines, services
from metal_supervisor.cli.render import Line, Screen
from metal_supervisor.host import local_status, processes
from metal_supervisor.runtimes import probing
from metal_supervisor.settings.loader import Settings, start_command
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.terminal_text import escaped
from metal_supervisor.spec.throughput import tokens_per_s
from metal_supervisor.spec.types import Json
from metal_supervisor.spec.user_error import NOT_RUNNING
from metal_supervisor.state.directory import StateDir
from metal_supervisor.supervisord.client import Supervisord
from metal_supervisor.supervisord.ctl_plugin import endpoint, listing

LOOK_EVERY_S = 1.0
ANSWER_S = 5.0
ENGINE_S = 0.5
ASKED_AT_ONCE = 16
COUNTING = frozenset({"llama-server"})
"""Runtimes whose engines count their generation speed."""


class Silent(Exception):
    """No answer from the sidecar; the text says so, and what to do."""


class Status:
    """The command, for one system."""

    def __init__(self, settings: Settings, out: TextIO, say: Callable[[str], None], as_json: bool = False) -> None:
        self._settings, self._say, self._as_json = settings, say, as_json
        self._state = StateDir(settings.state_path)
        self._screen = Screen(out, STATES, raw=as_json)

    def once(self) -> int:
        """Show the status. Returns the exit code: 3 if nothing answers."""
        try:
            document = self._ask()
            self._screen.print([json.dumps(document, indent=2)] if self._as_json else self._lines(document))
        except Silent as silent:
            self._say(str(silent))
            if not self._as_json and (on_file := self._on_file()):
                self._say("this is what its files say:")
                self._screen.print(on_file)
            return NOT_RUNNING
        return 0

    def watch(self) -> int:
        """Show every change until Ctrl-C: redraw the lines on a terminal; elsewhere print everything again.

        Returns the exit code.
        """
        before: object = None
        try:
            while True:
                found, told = self._look()
                if self._screen.possible:
                    self._screen.redraw(found)
                elif told != before:
                    self._screen.print([*([] if before is None or self._as_json else [""]), *found])
                before = told
                time.sleep(LOOK_EVERY_S)
        except KeyboardInterrupt:
            self._screen.clear()
            return 0

    def _look(self) -> tuple[Sequence[Line], object]:
        """(lines, the values whose change is worth printing them again)."""
        try:
            document = self._ask()
            return [json.dumps(document)] if self._as_json else self._lines(document), facts(document)
        except Silent as silent:
            if self._as_json:
                return [json.dumps({"error": str(silent)})], "silent"
            found = self._on_file()
            why = f"{silent}; this is what its files say:" if found else str(silent)
            return [("", escaped(why)), *found], ("silent", *found)

    # ── what there is to show ────────────────────────────────────────────────────────────────────

    def _ask(self) -> Json:
        """The /status document. Raises Silent."""
        port = self._settings.port
        try:
            document = local_status.document(port, ANSWER_S)
            if not isinstance(document, dict):
                raise Strange
            services(document)
        except (OSError, ValueError, RecursionError) as error:
            why = getattr(error, "reason", error)
            advice = f"; is it running? start it with: {start_command(self._settings.state_path)}"
            if Supervisord(self._state.socket).answers():
                conf = shlex.quote(str(self._state.path / "supervisord.conf"))
                advice = f", though supervisord runs; its sidecar answers there: supervisorctl -c {conf} status"
            raise Silent(f"nothing answers on port {port} ({why}){advice}") from None
        except Strange:
            text = f"what answers on port {port} is not metal-supervisor; see --port and --state-dir"
            raise Silent(text) from None
        if other := local_status.other_system(document, self._state.path):
            where = shlex.quote(other)
            text = f"port {port} belongs to another system, not to the one in {self._state.path}; see that one with"
            raise Silent(f"{text}: metal-supervisor status --state-dir {where}")
        return cast(Json, document)

    def _lines(self, document: Json) -> list[Line]:
        return lines(document, self._beside(services(document)), time.time(), self._screen.width)

    def _beside(self, rows: Sequence[Json]) -> dict[str, Beside]:
        """Facts from the records, the processes and the engines, by program."""
        records = self._state.records()[0]
        known = [(records[row["program"]], row) for row in rows if row.get("program") in records]
        with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
            found = list(pool.map(lambda each: self._of(*each), known))
        return {record.program: each for (record, _), each in zip(known, found, strict=True)}

    def _of(self, record: Record, row: Json) -> Beside:
        pid = row.get("pid")
        started = processes.started_at(pid) if isinstance(pid, int) and pid > 0 else None
        rate = self._rate(record) if row.get("ready") is True and started is not None else None
        return Beside("/".join(record.key), endpoint(record, self._settings.bind_address), started, rate)

    def _rate(self, record: Record) -> float | None:
        """Generation speed of an engine, None if unknown. One that may sleep is not asked, as that keeps it awake."""
        if record.runtime not in COUNTING or record.port is None or record.probe.asleep_path:
            return None
        where = local_status.asked_at(record.host or self._settings.bind_address)
        return tokens_per_s(probing.metrics_text(where, record.port, timeout_s=ENGINE_S)[0])

    def _on_file(self) -> list[str]:
        return listing(self._state, (), time.time())[0]
