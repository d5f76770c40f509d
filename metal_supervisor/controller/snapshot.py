"""What a pass of the controller decides from: read once, at its beginning, and not changed by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from metal_supervisor.spec.types import Json, Key, Observed, ProgramState, RunNote


@dataclass(frozen=True)
class Snapshot:
    """Everything a pass decides from, but for the records, which are its outcome too."""

    now: float
    """Unix time, in seconds."""
    services: Mapping[Key, Json] | None
    """None while the cluster has not said what exists."""
    complete: bool
    """Whether absence from `services` means that the service is gone."""
    models: Mapping[Key, Json]
    table: Mapping[str, ProgramState]
    """What supervisord says, by program."""
    notes: Mapping[str, RunNote]
    """What launchers noted, by program."""
    observed: Mapping[str, Observed]
    """What the sidecar saw, by program."""
