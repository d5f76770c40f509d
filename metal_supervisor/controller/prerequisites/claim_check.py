"""Check of a service before this Mac claims it: whether its ledger would admit the engine now, and how soon."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from metal_supervisor.controller.prerequisites.composer import Composer, EngineParts
from metal_supervisor.controller.prerequisites.daemons import Daemons
from metal_supervisor.controller.prerequisites.readings import Readings
from metal_supervisor.controller.snapshot import Room, Snapshot
from metal_supervisor.models.background import LOOK_WAIT_S, BackgroundLooks
from metal_supervisor.models.headers import LOCAL_AGAIN_S, MISSING
from metal_supervisor.models.metadata import Reading
from metal_supervisor.models.store import Store
from metal_supervisor.runtimes import RUNTIMES, Binary
from metal_supervisor.spec.sources import Artifact
from metal_supervisor.spec.types import Rejected, Service

READY_S = 0.0
FETCH_S = 2.0
NO_RUNTIME = frozenset({"UnsupportedRuntime", "FormatMismatch", "UnsupportedSource"})
"""Reasons of refusals by this Mac's `--runtimes`; those of another one may serve it."""
FindBinary: TypeAlias = Callable[[Service, Snapshot], tuple[Binary | None, tuple[str, str] | None]]
"""-> (a service's engine, its problem); either may be None, and both are while the engine is being probed."""


class ClaimCheck:
    """Checks services against the files, the engines and the memory of this Mac."""

    def __init__(
        self,
        store: Store,
        composer: Composer,
        readings: Readings,
        daemons: Daemons,
        binary: FindBinary,
        wake: Callable[[], None],
    ) -> None:
        self._store, self._composer, self._readings, self._daemons = store, composer, readings, daemons
        self._binary = binary
        self._fetched: BackgroundLooks[str] = BackgroundLooks("fetched", wake)
        """Name of a slot -> path of the model in it, "" for none."""
        self._promised_bytes = 0
        """Memory of the services that passed the check in this pass."""

    def begin(self) -> None:
        """Forget the checks of the last pass."""
        self._promised_bytes = 0
        self._fetched.forget_others()

    def delay_s(self, item: Service | Rejected, snapshot: Snapshot) -> float | None:
        """Seconds to wait before a claim, for Macs that could serve sooner; None if this Mac cannot serve it now."""
        if not item.replicas or item.suspended:
            return READY_S
        if isinstance(item, Rejected):
            return None if item.reason in NO_RUNTIME else READY_S
        parts = item.model.artifact, *(each.artifact for each in item.companions)
        paths = [each.source if each.local else self._path_of(each) for each in parts]
        readings = {
            path: self._readings.judged(each) if each.local else self._readings.headers.look(path)
            for each, path in zip(parts, paths, strict=True)
            if path
        }
        missing = MISSING in readings.values()
        binary, problem = self._binary(item, snapshot)
        if missing or problem or (RUNTIMES[item.runtime].shared is not None and self._daemons.foreign(item)):
            return None
        if not all(paths) or binary is None:
            return FETCH_S
        fits = self._has_room(item, binary, paths, readings, snapshot.room)
        if fits is None:
            return FETCH_S
        return READY_S if fits else None

    def _path_of(self, artifact: Artifact) -> str:
        """Path of a model that has been fetched; "" if it has not been, or until that is known."""
        found = self._fetched.look(
            artifact.slot, lambda _: str(self._store.here(artifact) or ""), LOOK_WAIT_S, LOCAL_AGAIN_S
        )
        return found or ""

    def _has_room(
        self, service: Service, binary: Binary, paths: Sequence[str], readings: Mapping[str, Reading | None], room: Room
    ) -> bool | None:
        """True if a service fits into what the engines of this Mac and the earlier checks of this pass leave.

        One on demand needs the whole budget at most. None while a header is being read; True for a model whose size is
        known only once it runs. `paths`: of its files, the model's first; `readings`: of these.
        """
        path, further = paths[0], {each.key: file for each, file in zip(service.companions, paths[1:], strict=True)}

        def look(named: str) -> Reading | None:
            return readings[named] if named in readings else self._readings.look_from_home(named)

        composed = self._composer.compose(EngineParts(service, binary, path, 0, readings[path], further), look)
        if composed is None:
            return None
        needs = composed[1].bytes or 0
        if service.idle_s is not None:
            return needs <= room.budget
        if self._promised_bytes + needs > max(room.left, 0):
            return False
        self._promised_bytes += needs
        return True
