"""Offers of this Mac for free slots of services: how long it leaves them to Macs that could serve them sooner."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from metal_supervisor.controller.prerequisites.composer import Composer, EngineParts
from metal_supervisor.controller.prerequisites.daemons import Daemons
from metal_supervisor.controller.prerequisites.readings import Readings
from metal_supervisor.controller.snapshot import Room, Snapshot
from metal_supervisor.models.metadata import Reading
from metal_supervisor.models.store import Store
from metal_supervisor.runtimes import RUNTIMES, Binary
from metal_supervisor.spec.types import Rejected, Service

READY_S, FETCH_S, CANNOT_S = 0.0, 2.0, 8.0
NO_RUNTIME = frozenset({"UnsupportedRuntime", "FormatMismatch", "UnsupportedSource"})
"""Reasons of refusals by this Mac's `--runtimes`; those of another one may serve it."""
FindBinary: TypeAlias = Callable[[Service, Snapshot], tuple[Binary | None, tuple[str, str] | None]]
"""-> (a service's engine, its problem); either may be None, and both are while the engine is being probed."""


class Offers:
    """Judges services by the files, the engines and the memory that are here."""

    def __init__(
        self, store: Store, composer: Composer, readings: Readings, daemons: Daemons, binary: FindBinary
    ) -> None:
        self._store, self._composer, self._readings, self._daemons = store, composer, readings, daemons
        self._binary = binary
        self._offered_bytes = 0
        """Memory of the services that this Mac has offered to run in this pass."""

    def begin(self) -> None:
        """Forget the offers of the last pass."""
        self._offered_bytes = 0

    def delay_s(self, item: Service | Rejected, snapshot: Snapshot) -> float:
        """Seconds to leave a free slot to Macs that could serve it sooner."""
        if not item.replicas or item.suspended:
            return READY_S
        if isinstance(item, Rejected):
            return CANNOT_S if item.reason in NO_RUNTIME else READY_S
        parts = item.model.artifact, *(each.artifact for each in item.companions)
        nears = [self._store.near(artifact) for artifact in parts]
        binary, problem = self._binary(item, snapshot)
        if None in nears or problem or (RUNTIMES[item.runtime].shared is not None and self._daemons.foreign(item)):
            return CANNOT_S
        if not all(nears):
            return FETCH_S
        fits = self._has_room(item, binary, snapshot.room) if binary is not None else None
        if fits is None:
            return FETCH_S
        return READY_S if fits else CANNOT_S

    def _has_room(self, service: Service, binary: Binary, room: Room) -> bool | None:
        """True if a service fits beside the engines of this Mac and the earlier offers of this pass.

        None while the header of its model is being read; True for a model whose size is known only once it runs.
        """
        path = str(self._store.here(service.model.artifact) or "")
        further = {each.key: str(self._store.here(each.artifact) or "") for each in service.companions}
        files = {path, *further.values()} - {""}

        def look(named: str) -> Reading | None:
            return self._readings.look(named) if named in files else self._readings.look_from_home(named)

        reading = self._readings.look(path) if path else None
        composed = self._composer.compose(EngineParts(service, binary, path, 0, reading, further), look)
        if composed is None and path:
            return None
        needs = composed[1].bytes or 0 if composed else 0
        if self._offered_bytes + needs > max(room.left_for(service.namespace), 0):
            return False
        self._offered_bytes += needs
        return True
