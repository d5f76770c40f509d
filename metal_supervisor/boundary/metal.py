"""Whether this process has a Metal device, asked before any model is started.

A process that launchd started in the wrong context may see no GPU, and then some engines compute on the CPU without a
word. llama-server tells which devices it sees, and what it sees in our context every engine does that we start; so it
answers for all of them. MLX ends by itself without a device. Where nobody can be asked, nothing is known, and nothing
is refused: only an answer that lists no Metal device counts against it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from metal_supervisor.boundary import builds, darwin_memory, host, memory
from metal_supervisor.runtimes import RUNTIMES

AGAIN_S = 60.0
UNAVAILABLE = "MetalUnavailable"
WHY = (
    "this process sees no Metal device: `llama-server --list-devices` lists none, and nothing is served by the CPU "
    "instead; run `metal-supervisor doctor`; where launchd started this as a LaunchDaemon, try the LaunchAgent; "
    "it starts by itself once Metal is there"
)
Question = Callable[[], bool | None]
"""Whether Metal is there; None if that is not known. May take seconds."""
log = logging.getLogger("controller")


def question_of(settings: object) -> Question | None:
    """What is asked on this machine: nothing, off a Mac. `settings` hold the path of llama-server."""
    if darwin_memory.mac() is None:
        return None

    def ask() -> bool | None:
        try:
            binary = builds.find(settings, RUNTIMES["llama-server"].executables)[1]
        except host.NoBinary:
            return None
        return memory.metal_there(binary, AGAIN_S)

    return ask


class Metal(threading.Thread):
    """Asks until the answer is yes, as that does not change while a process lives."""

    def __init__(self, question: Question | None, on_change: Callable[[], None]) -> None:
        super().__init__(name="metal", daemon=True)
        self._question, self._on_change = question, on_change
        self._pause = threading.Event()
        self.asking = question is not None
        """True until there was an answer, or none could be had."""
        self.absent = False
        self.word = ""
        """For the report: `there`, `absent`, or "" while it is not known or nobody's question."""

    @property
    def problem(self) -> tuple[str, str] | None:
        """(reason, message) of why no engine is to be started here; None if one may."""
        return (UNAVAILABLE, WHY) if self.absent else None

    def run(self) -> None:
        while self._question is not None and not self.look():
            self._pause.wait(AGAIN_S)

    def look(self) -> bool:
        """Asks once; whether Metal is there."""
        found = self._question() if self._question is not None else None
        before = self.asking, self.absent
        # Not knowing takes nothing back: an engine that is being replaced just now cannot be asked.
        self.asking, self.absent = False, self.absent if found is None else not found
        self.word = {True: "there", False: "absent", None: self.word}[found]
        if before != (self.asking, self.absent):
            if before[1] != self.absent:
                (log.error if self.absent else log.info)("metal", extra={"there": not self.absent})
            self._on_change()
        return found is True
