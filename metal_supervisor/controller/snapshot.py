"""Snapshot of the observed state: read once at the beginning of a controller pass, and not changed by it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from metal_supervisor.controller.plan import live_note
from metal_supervisor.runtimes.metal_state import MetalState
from metal_supervisor.spec.processes import EngineUse, Observed, ProgramState, RunNote
from metal_supervisor.spec.types import Json, Key


@dataclass(frozen=True)
class Room:
    """Memory of this Mac, in bytes."""

    total: int
    """Of the machine."""
    budget: int
    left: int
    """Of the budget."""
    blocked: Collection[Key] = ()
    """Engines that wait for memory, and for which no other is ending."""


@dataclass(frozen=True)
class Snapshot:
    """All input of a pass except the records, which are its output too."""

    now: float
    """Unix time, in seconds."""
    services: Mapping[Key, Json] | None
    """As of their latest news, their status apart; None while the cluster's services are not known."""
    complete: bool
    """True if absence from `services` means that the service is gone."""
    models: Mapping[Key, Json]
    """As of their latest news."""
    table: Mapping[str, ProgramState]
    """supervisord's process table, by program."""
    notes: Mapping[str, RunNote]
    """Notes of launchers, by program."""
    observed: Mapping[str, Observed]
    """The sidecar's observations, by program."""
    uses: Mapping[str, EngineUse] = field(default_factory=dict)
    """Use of on-demand engines through the gateway, by program."""
    taken: frozenset[int] = frozenset()
    """Ports of on-demand services that other programs have: the gateway cannot listen there."""
    operator: bool | None = False
    """Whether LLMKube's operator writes status here; None while that is not known."""
    metal: MetalState = field(default_factory=MetalState)
    room: Room = field(default_factory=lambda: Room(0, 0, 0))
    """Memory as the last pass left it."""
    news: object = None
    """Another one once anything else has changed: model files, builds, trials, references, the budget."""
    restored_at: float = 0.0
    """Unix time at which the API's data went back, as after a restored backup; 0 for never."""

    def live_note(self, program: str) -> RunNote | None:
        """The launcher's note of a program, as `plan.live_note`."""
        return live_note(self.notes.get(program), self.table.get(program))
