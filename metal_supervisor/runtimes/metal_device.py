"""Check for a Metal device, before any model is started.

A process that launchd started in the wrong context may see no GPU, and then some engines silently compute on the CPU.
llama-server lists the devices it sees, and every engine that we start sees the same; so its answer counts for all of
them. MLX exits by itself without a device. Without a llama-server nothing is known, and nothing is refused: only an
answer that lists no Metal device is a reason to.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from metal_supervisor.host import darwin_memory, machine
from metal_supervisor.memory import machine_memory
from metal_supervisor.runtimes import RUNTIMES, builds
from metal_supervisor.runtimes.metal_state import MetalState

AGAIN_S = 60.0
Question = Callable[[], bool | None]
"""Returns True if there is a Metal device, None if that is unknown. May take seconds."""
log = logging.getLogger("controller")


def question_of(settings: object) -> Question | None:
    """The check for this machine, None if it is no Mac. `settings` hold the path of llama-server."""
    if darwin_memory.mac() is None:
        return None

    def ask() -> bool | None:
        try:
            binary = builds.find(settings, RUNTIMES["llama-server"].executables)[1]
        except machine.NoBinary:
            return None
        return machine_memory.metal_there(binary, AGAIN_S)

    return ask


class Metal(threading.Thread):
    """Checks until there is a device: that does not change while a process lives."""

    def __init__(self, question: Question | None, on_change: Callable[[], None]) -> None:
        super().__init__(name="metal", daemon=True)
        self._question, self._on_change = question, on_change
        self._pause = threading.Event()
        self.seen = MetalState(asking=question is not None)
        """Replaced as a whole: read it once per decision."""

    def run(self) -> None:
        while self._question is not None and not self.look():
            self._pause.wait(AGAIN_S)

    def look(self) -> bool:
        """Check once. Returns True if there is a Metal device."""
        found = self._question() if self._question is not None else None
        before = self.seen
        # An unknown result keeps the previous one: a binary that is being replaced just now cannot be asked.
        self.seen = MetalState(word={True: "there", False: "absent", None: before.word}[found])
        if before != self.seen:
            if before.word != self.seen.word:
                (log.error if found is False else log.info)("metal", extra={"there": found})
            self._on_change()
        return found is True
