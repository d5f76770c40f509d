"""What there is to know of a model that a shared daemon serves: what its attendant is to do, and is doing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

JOB = "METAL_SUPERVISOR_JOB"
"""Variable with an attendant's job, as JSON: `daemon`, the served `name`, and what that daemon needs to know."""


class Phase(str, Enum):
    """What an attendant is doing."""

    WAITING = "waiting"
    """The daemon does not answer."""
    ATTACHING = "attaching"
    """The model is being fetched or loaded."""
    ATTACHED = "attached"
    REFUSED = "refused"
    """The daemon will not have it; it is asked again."""


@dataclass(frozen=True)
class Attachment:
    """An attendant's note (`attached/*.json`)."""

    program: str
    pid: int
    """Of the attendant."""
    phase: Phase
    message: str
    at: float
    """Unix time of it."""
    file: str
    """What the daemon runs for it, if another model of the same file shares that; "" if none does."""
