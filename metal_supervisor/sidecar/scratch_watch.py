"""Warns of an engine that fills its scratch directory, which no limit of the operating system bounds.

An engine writes what it likes there: many files, deep directories, directories that cannot be read. So the walk is
iterative, follows no link, and stops as soon as a limit is reached; a part that it cannot see counts as too much. It
runs in a thread of its own, because a file system may block, and seldom. No engine is ended for it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection

from metal_supervisor.cluster.report import Happening
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Key
from metal_supervisor.state.directory import StateDir

SCRATCH_LARGE = "ScratchLarge"
"""Reason of the Event."""
EVERY_S = 300.0
"""Pause between two looks at all scratch directories."""
MOST_BYTES = 256 << 20
"""Size on disk of a scratch directory from which on there is a warning."""
MOST_ENTRIES = 2000
"""Number of files and directories in it from which on there is a warning."""


def excess(path: str, most_bytes: int = MOST_BYTES, most_entries: int = MOST_ENTRIES) -> str:
    """How a directory exceeds the limits, "" if it does not."""
    held_bytes, entries, left = 0, 0, [path]
    while left:
        try:
            with os.scandir(left.pop()) as found:
                for each in found:
                    entries += 1
                    with contextlib.suppress(FileNotFoundError):  # its engine has removed it meanwhile
                        held_bytes += each.stat(follow_symlinks=False).st_blocks * 512
                    if entries >= most_entries:
                        return f"{most_entries} files and directories, or more"
                    if held_bytes >= most_bytes:
                        return f"{most_bytes >> 20} MiB, or more"
                    if each.is_dir(follow_symlinks=False):
                        left.append(each.path)
        except FileNotFoundError:
            continue
        except OSError as error:  # a path too long, or a directory without permissions
            return f"a directory that cannot be read ({error.strerror})"
    return ""


class ScratchWatch(threading.Thread):
    """Looks at the scratch directories of all services until the process ends."""

    def __init__(
        self, state: StateDir, records: Callable[[], Collection[Record]], tell: Callable[[Record, Happening], None]
    ) -> None:
        """`tell`: called once for each excess, by this thread."""
        super().__init__(name="scratch", daemon=True)
        self._state, self._records, self._tell = state, records, tell
        self._warned: set[Key] = set()

    def run(self) -> None:
        while True:
            time.sleep(EVERY_S)
            self.turn()

    def turn(self) -> None:
        """Look at each directory once."""
        before, self._warned = self._warned, set()
        for record in self._records():
            found = excess(str(self._state.scratch_path(record.program)))
            if not found:
                continue
            self._warned.add(record.key)
            if record.key not in before:
                fix = "check what the engine writes there; its next start empties it"
                text = f"the engine's scratch directory holds {found}; {fix}"
                self._tell(record, Happening("Warning", SCRATCH_LARGE, text))
