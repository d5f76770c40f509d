"""Services whose files are not all here: each is fetched once the headers have shown that its engine can ever fit."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from metal_supervisor.controller.prerequisites.composer import Composer, EngineParts
from metal_supervisor.controller.prerequisites.readings import Readings
from metal_supervisor.controller.reconcile import Outlook
from metal_supervisor.controller.snapshot import Room
from metal_supervisor.memory.refusals import INSUFFICIENT, too_large
from metal_supervisor.models.metadata import Reading
from metal_supervisor.models.store import Store
from metal_supervisor.runtimes import Binary
from metal_supervisor.spec.sources import Artifact
from metal_supervisor.spec.types import ModelFile, PartKey, Service

Files: TypeAlias = dict[PartKey | None, tuple[Artifact, ModelFile]]
"""The file's role in a service, None for its model -> the artifact, and its state on this Mac."""
READING = ModelFile("Checking", message="the header of the model file is being read")


class MissingFiles:
    """Permits downloads, or refuses them."""

    def __init__(self, store: Store, composer: Composer, readings: Readings) -> None:
        self._store, self._composer, self._readings = store, composer, readings

    def outlook(self, service: Service, binary: Binary, files: Files, port: int, room: Room) -> Outlook:
        """Outlook while files are missing. Headers are checked first: 80 GB that can never fit are not downloaded."""
        awaited = {role: each for role, each in files.items() if each[1].phase != "Ready"}
        failed = {role: each for role, each in awaited.items() if each[1].phase == "Failed"}
        asking = [artifact for artifact, _ in awaited.values() if self._store.asks_leave(artifact)]
        if asking and not failed:  # what lacks a part would not run, so nothing of it is fetched
            refusal = self._too_large(service, binary, files, port, room)
            if refusal is None:
                return Outlook(READING, port)
            for artifact in asking:
                if refusal.reason:
                    self._store.refuse(artifact, refusal)
                else:
                    self._store.give_leave(artifact)
            if refusal.reason:
                return Outlook(refusal, port)
        role, (_, file) = next(iter((failed or awaited).items()))
        if role is None:
            return Outlook(file, port)
        field = next(each.field for each in service.companions if each.key == role)
        if file.phase == "Failed":
            return Outlook(ModelFile("Pending"), port, problem=(file.reason, f"{field}: {file.message}"))
        return Outlook(replace(file, message=f"{field}: {file.message or 'its file is being looked at'}"), port)

    def _too_large(self, service: Service, binary: Binary, files: Files, port: int, room: Room) -> ModelFile | None:
        """Refusal to download a service's missing files, without a reason if they may be; None while a header is read.

        The phase is always Pending; `reason` and `message` are set if the service can never fit.
        """
        paths = {role: file.path or each.source for role, (each, file) in files.items()}
        remote = {each.source: each for each, file in files.values() if file.phase != "Ready"}

        def look(path: str) -> Reading | None:
            return self._store.reading(remote[path]) if path in remote else self._readings.look_from_home(path)

        reading, further = look(paths[None]), {role: path for role, path in paths.items() if role is not None}
        if reading is None:
            return None
        if not (reading.header or reading.config):
            return ModelFile("Pending")
        parts = EngineParts(service, binary, paths[None], port, reading, further)
        composed = self._composer.compose(parts, look)
        if composed is None:
            return None
        _, demand = composed
        need, weights, limit = demand.bytes, demand.mapped_bytes, service.model.limit.resolve(room.total)
        message = too_large(need, limit, room.budget, room.left, weights)
        if not message:
            return ModelFile("Pending")
        if advice := self._composer.advice(parts, demand, room.budget, look):
            message += f"; {advice}"
        return ModelFile("Pending", reason=INSUFFICIENT, message=f"{message}; it is not fetched")
