"""Last exits of programs, as supervisord's log tells them: its table does not."""

from __future__ import annotations

import os
import re
from pathlib import Path

from metal_supervisor import launch

NOT_NOW = f"exit status {launch.EXIT_NOT_NOW}"
UNSEEN = f"exit status {launch.EXIT_UNSEEN}"
UNKNOWN = "exit status unknown"


ENDED = re.compile(r"(?:exited|stopped): (\S+) \(([^;()\n]*[^;()\n ])")


class Exits:
    """Last exits of programs, from supervisord's log, of which each line is read once."""

    def __init__(self, log: Path, most_bytes: int = 65536) -> None:
        self._log, self._most_bytes = log, most_bytes
        self._inode, self._read_bytes = 0, 0
        """The log that was read, and how much of it: up to the end of a line."""
        self._known: dict[str, str] = {}

    def last(self, program: str) -> str:
        """The program's last exit in the log's words: `exit status 1`, `terminated by SIGKILL`; "" if there is none.

        The launcher's exit code for "not now" does not count as an exit of the engine; that of a stand-in says nothing
        of its engine, whose exit is UNKNOWN.
        """
        try:
            found = os.stat(self._log)
            if (found.st_ino, found.st_size) != (self._inode, self._read_bytes):
                self._read_on(found)
        except OSError:
            return ""
        return self._known.get(program, "")

    def _read_on(self, found: os.stat_result) -> None:
        """Read what the log has more than before; its end, if it is another one, was emptied, or grew by much."""
        if found.st_ino != self._inode or found.st_size < self._read_bytes:
            self._inode, self._read_bytes, self._known = found.st_ino, 0, {}
        with self._log.open("rb") as file:
            start = file.seek(max(self._read_bytes, found.st_size - self._most_bytes))
            lines, newline, _ = file.read().rpartition(b"\n")
        self._read_bytes = start + len(lines) + len(newline)
        for name, how in ENDED.findall(lines.decode("utf-8", "replace")):
            if how != NOT_NOW:
                self._known[name] = UNKNOWN if how == UNSEEN else how
