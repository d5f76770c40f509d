"""Snapshot of the observed state: read once at the beginning of a controller pass, and not changed by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from metal_supervisor.spec.types import Json, Key, Observed, ProgramState, RunNote


@dataclass(frozen=True)
class Snapshot:
    """All input of a pass except the records, which are its output too."""

    now: float
    """Unix time, in seconds."""
    services: Mapping[Key, Json] | None
    """None while the cluster's services are not known."""
    complete: bool
    """True if absence from `services` means that the service is gone."""
    models: Mapping[Key, Json]
    table: Mapping[str, ProgramState]
    """supervisord's process table, by program."""
    notes: Mapping[str, RunNote]
    """Notes of launchers, by program."""
    observed: Mapping[str, Observed]
    """The sidecar's observations, by program."""
