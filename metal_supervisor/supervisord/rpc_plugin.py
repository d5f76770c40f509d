"""Calls that supervisord lacks: what has changed of its process table, and sections read again one by one.

Its own calls for these cost it time for each program, 3 ms each with all that it marshals and parses, and while it
works on one it serves nobody and reaps nothing. supervisord.conf does not name this: a supervisord of an earlier
release, which runs on, reads that file too, and could not import it.
"""

from __future__ import annotations

import json
import os
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

from supervisor import events
from supervisor.options import UnhosedConfigParser
from supervisor.states import SupervisorStates, getProcessStateDescription
from supervisor.xmlrpc import Faults, RPCError

SECTIONS = "models.d"
"""The included directory, beside supervisord.conf."""
MOST_GONE = 1000
"""Programs that are gone and remembered, besides as many as there are."""


def add_to(options: Any) -> None:
    """Have supervisord offer these calls, once its ServerOptions have been read, and before it listens."""
    sections = Path(options.configfile).parent / SECTIONS
    ours: tuple[str, Any, dict[str, str]] = ("metal", lambda supervisord: Programs(supervisord, sections), {})
    options.rpcinterface_factories = [*options.rpcinterface_factories, ours]


class Programs:
    """The methods of the namespace `metal`."""

    def __init__(self, supervisord: Any, sections: Path) -> None:
        self._supervisord, self._sections = supervisord, sections
        self._own = f"{os.getpid()}.{time.time_ns()}"
        """Sign of this supervisord in editions: those of another say nothing here."""
        self._latest = self._whole_since = 0
        self._changed: dict[str, int] = {}
        """Program -> number of its latest change, in their order; that of one which is gone stays for a while."""
        events.subscribe(events.ProcessStateEvent, lambda event: self._note(event.process.group.config.name))
        events.subscribe(events.ProcessGroupEvent, lambda event: self._note(event.group))

    def _note(self, program: str) -> None:
        self._latest += 1
        self._changed.pop(program, None)
        self._changed[program] = self._latest
        groups = self._supervisord.process_groups
        if len(self._changed) > 2 * len(groups) + MOST_GONE:
            self._changed = {name: number for name, number in self._changed.items() if name in groups}
            self._whole_since = self._latest

    def changes(self, edition: str) -> str:
        """The rows of the process table that changed since an edition of it; all rows for "", or if that is too old.

        @param string edition  of an earlier answer
        @return string result  JSON: [edition, is whole, [[program, state, pid, start, stop], ...], [gone program, ...]]
        """
        self._check()
        groups, (own, _, number) = self._supervisord.process_groups, edition.partition("/")
        known = int(number) if own == self._own and number.isdecimal() else -1
        whole = known < self._whole_since
        since = takewhile(lambda each: each[1] > known, reversed(self._changed.items()))
        names = list(groups) if whole else [name for name, _ in since]
        rows = [
            (name, getProcessStateDescription(each.get_state()), each.pid, int(each.laststart), int(each.laststop))
            for name in names
            if name in groups
            for each in groups[name].processes.values()
        ]
        gone = [name for name in names if name not in groups]
        return json.dumps([f"{self._own}/{self._latest}", whole, rows, gone])

    def reread(self, names: list[str]) -> list[list[list[str]]]:
        """Read the sections of some programs again, as `supervisor.reloadConfig` does with all.

        Each must be the only one of a file by its name, or have none.

        @param array names  of programs
        @return array result  [[added, changed, removed]]
        """
        self._check()
        options, active = self._supervisord.options, self._supervisord.process_groups
        read = {name: self._read(name) for name in names}
        options.process_group_configs = [
            *(each for each in options.process_group_configs if each.name not in read),
            *(config for config in read.values() if config is not None),
        ]
        added = [name for name, config in read.items() if config is not None and name not in active]
        changed = [
            name
            for name, config in read.items()
            if config is not None and name in active and config != active[name].config
        ]
        removed = [name for name, config in read.items() if config is None and name in active]
        return [[added, changed, removed]]

    def _check(self) -> None:
        if self._supervisord.get_state() == SupervisorStates.SHUTDOWN:
            raise RPCError(Faults.SHUTDOWN_STATE)

    def _read(self, name: str) -> Any:
        """Configuration of a program's group from its file, None without one. Raises RPCError."""
        options, path = self._supervisord.options, self._sections / f"{name}.conf"
        parser = UnhosedConfigParser()
        parser.expansions = options.environ_expansions
        try:
            if not parser.read(str(path)):
                return None
            if parser.sections() != [f"program:{name}"]:
                raise ValueError(f"{path.name} has other sections than [program:{name}]")
            parser.expand_here(str(self._sections))
            (group,) = options.process_groups_from_parser(parser)
        except Exception as error:  # noqa: BLE001 - whatever the parser raises, it must not end supervisord's answer
            raise RPCError(Faults.CANT_REREAD, f"{error} (file: {str(path)!r})") from None
        for process in group.process_configs:
            process.environment = {**options.configroot.supervisord.environment, **process.environment}
        return group
