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
from dataclasses import dataclass

from metal_supervisor.cluster.report import NO_METAL
from metal_supervisor.host import darwin_memory, machine
from metal_supervisor.memory import machine_memory
from metal_supervisor.runtimes import RUNTIMES, builds

AGAIN_S = 60.0
ASKED = "it is being found out whether there is a Metal device"
WHY = (
    "this process sees no Metal device: `llama-server --list-devices` lists none, and nothing is served by the CPU "
    "instead; run `metal-supervisor doctor`: either that llama-server was built without Metal (brew reinstall "
    "llama.cpp), or launchd started this where there is no GPU (metal-supervisor install --agent); it starts by "
    "itself once Metal is there"
)
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


@dataclass(frozen=True)
class MetalState:
    """The outcome of the checks so far."""

    asking: bool = False
    """True until the first check is over, whatever its outcome."""
    word: str = ""
    """`there`, `absent`, or "" if it is unknown or does not apply."""

    @property
    def problem(self) -> tuple[str, str] | None:
        """(reason, message) if no engine may be started here, else None."""
        return (NO_METAL, WHY) if self.word == "absent" else None

    @property
    def held(self) -> str:
        """Reason why nothing may be started right now, or "" if it may."""
        return ASKED if self.asking else NO_METAL if self.word == "absent" else ""


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
