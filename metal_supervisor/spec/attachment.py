"""A model that a shared daemon serves: the job given to its attacher process, and the note that the attacher keeps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

JOB = "METAL_SUPERVISOR_JOB"
"""Variable with an attacher's job, as JSON: `daemon`, the served `name`, and the parameters of that kind of daemon."""


class Phase(str, Enum):
    """Phase of an attacher."""

    WAITING = "waiting"
    """The daemon does not answer."""
    ATTACHING = "attaching"
    """The model is being fetched or loaded."""
    ATTACHED = "attached"
    REFUSED = "refused"
    """The daemon refuses the model; the attacher retries."""


@dataclass(frozen=True)
class Attachment:
    """An attacher's note (`attached/*.json`)."""

    program: str
    pid: int
    """Process id of the attacher."""
    phase: Phase
    message: str
    at: float
    """Unix time of it."""
    file: str
    """The daemon's model behind it, if services of the same file share one; "" if they do not."""
