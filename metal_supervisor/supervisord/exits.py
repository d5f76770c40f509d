"""Last exits of programs, as supervisord's log tells them: its table does not."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from metal_supervisor import launch

NOT_NOW, UNSEEN = f"exit status {launch.EXIT_NOT_NOW}", f"exit status {launch.EXIT_UNSEEN}"
UNKNOWN = "exit status unknown"


class Exits:
    """Last exits of programs, from supervisord's log, which is read again only when it has changed."""

    def __init__(self, log: Path, most_bytes: int = 65536) -> None:
        self._log, self._most_bytes = log, most_bytes
        self._edition: tuple[int, int, int] | None = None
        self._known: Mapping[str, str] = {}

    def last(self, program: str) -> str:
        """The program's last exit in the log's words: `exit status 1`, `terminated by SIGKILL`; "" if there is none.

        The launcher's exit code for "not now" does not count as an exit of the engine; that of a stand-in says nothing
        of its engine, whose exit is UNKNOWN.
        """
        try:
            found = os.stat(self._log)
            edition = found.st_ino, found.st_size, found.st_mtime_ns
            if edition != self._edition:
                with self._log.open("rb") as file:
                    file.seek(max(0, os.fstat(file.fileno()).st_size - self._most_bytes))
                    tail = file.read().decode("utf-8", "replace")
                ends = re.findall(r"(?:exited|stopped): (\S+) \(([^;()]*[^;() ])", tail)
                self._edition, self._known = edition, {
                    name: UNKNOWN if how == UNSEEN else how for name, how in ends if how != NOT_NOW
                }
        except OSError:
            return ""
        return self._known.get(program, "")
