"""Outcome of the checks for a Metal device, and its messages."""

from __future__ import annotations

from dataclasses import dataclass

from metal_supervisor.cluster.report import NO_METAL

ASKED = "it is being found out whether there is a Metal device"
WHY = (
    "this process sees no Metal device: `llama-server --list-devices` lists none, and nothing is served by the CPU "
    "instead; run `metal-supervisor doctor`: either that llama-server was built without Metal (brew reinstall "
    "llama.cpp), or launchd started this where there is no GPU (metal-supervisor install --agent); it starts by "
    "itself once Metal is there"
)


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
