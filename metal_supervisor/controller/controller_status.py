"""The controller's report, `controller.json`: its latest steps, and state that the sidecar cannot see itself.

The sidecar writes to the cluster and answers over HTTP, but does not watch. From this report it learns whether
LLMKube's operator is present, which Macs are silent, which Models exist, and the state of their files.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from metal_supervisor.cluster import status_mode
from metal_supervisor.cluster.kube import Kube
from metal_supervisor.cluster.reflector import History, Reflector
from metal_supervisor.controller import reconcile
from metal_supervisor.controller.remembered import Remembered, nothing
from metal_supervisor.controller.snapshot import Snapshot
from metal_supervisor.models.metadata import Reading
from metal_supervisor.models.store import Store
from metal_supervisor.placement import placement
from metal_supervisor.placement.placement import Placed, Placement
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec import histogram, model_resource, resources
from metal_supervisor.spec.document import mapping
from metal_supervisor.spec.fields import Bad
from metal_supervisor.spec.types import MODEL_REFUSED, Json, Key, Model, ModelFile
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.kept_files import write_atomic
from metal_supervisor.state.reports import CONTROLLER_REPORT, controller_report

FORMAT = 1
MOST_NOTICES = 20
COUNTED_S = 1.0
"""Seconds until what only counts on is written again."""
FOR_PEOPLE = frozenset({"did", "reasons"})
"""Parts of the report that the sidecar need not know at once."""
log = logging.getLogger("controller")


class ControllerStatus:
    """Writes the report, and keeps the state that only the report needs."""

    def __init__(self, settings: Settings, directory: StateDir, kube: Kube) -> None:
        self._settings, self._state, self._kube = settings, directory, kube
        self._notices: list[dict[str, str]] = []
        self._signs = status_mode.OperatorEvidence(believed=self._believed_before())
        self._missing = False
        self._told: Json = {}
        """The last report, without what counts on with every pass."""
        self._due_at = 0.0
        self._passes = histogram.empty(histogram.PASS_S)
        self._silence = ""
        self._looked: tuple[object, object] = (None, None)
        """The services and Models of the latest look for the operator."""
        self.operator: bool | None = None
        """Whether LLMKube's operator writes status here; None while that is not known."""

    def quarantined(self, name: str, reason: str) -> None:
        """Add a quarantined file to the report."""
        log.warning("file quarantined", extra={"file": name, "reason": reason})
        self.tell(name, reason)

    def tell(self, name: str, reason: str) -> None:
        """Show a problem in /status, in the place of an earlier one of that name; "" withdraws it."""
        others = [each for each in self._notices if each["name"] != name]
        self._notices = [*others[1 - MOST_NOTICES :], {"name": name, "reason": reason}] if reason else others

    def passed(self, seconds: float) -> None:
        """Note the duration of a pass, for the next report."""
        self._passes = self._passes.with_value(seconds)

    def _believed_before(self) -> bool | None:
        """`operator` of the previous controller, None if unknown: a restart must not change who writes what."""
        told = mapping(controller_report(self._state.path), "cluster").get("operator")
        return told if isinstance(told, bool) else None

    def history_before(self) -> History:
        """The API's history as the previous controller knew it; empty if that used another server."""
        cluster = mapping(controller_report(self._state.path), "cluster")
        newest, restored_at = cluster.get("newest"), cluster.get("restoredAt")
        if cluster.get("server") != self._kube.server_name or not isinstance(newest, str):
            return History()
        return History(newest, float(restored_at) if isinstance(restored_at, (int, float)) else 0.0)

    def look_for_operator(self, services: Mapping[Key, Json] | None, models: Mapping[Key, Json]) -> bool | None:
        """True if LLMKube's operator writes status here: the sidecar leaves it the rest. None while it is not known."""
        if self._settings.embedded and self._settings.status_mode == "auto":
            self.operator = False
            return self.operator
        if services is not None and not (services is self._looked[0] and models is self._looked[1]):
            self._looked = services, models
            items = [*services.values(), *models.values()]
            server_now = time.time() + self._kube.clock_offset_s
            self._signs = status_mode.look(self._signs, items, time.monotonic(), server_now)
        setting, now = self._settings.status_mode, time.monotonic()
        present = status_mode.operator_present(setting, self._signs, now)
        self._silence = status_mode.silence(setting, self._signs, now) if present else ""
        if present is not None and present != self.operator:
            log.info("status", extra={"mode": "operator" if present else "standalone"})
        self.operator = present
        return present

    def _no_namespace(self, watches: Sequence[Reflector]) -> str:
        """Advice for a watched namespace that does not exist, "" if it exists or the cluster does not tell."""
        missing = any(each.no_namespace for each in watches)
        name = self._settings.namespace
        if missing and not self._missing:
            log.warning("the namespace does not exist", extra={"namespace": name})
        self._missing = missing
        text = f"the cluster has no namespace {name!r}, so it has no services: create it, or correct --namespace"
        return text if missing else ""

    def publish(
        self,
        snapshot: Snapshot,
        did: str,
        watches: Sequence[Reflector],
        file_of: Callable[[Json], ModelFile],
        placing: tuple[Placement, Placed],
        memory: Json,
        slots: Sequence[str] = (),
        reasons: Json | None = None,
    ) -> bool:
        """Write the report; True if the sidecar should know at once what is new in it.

        `file_of`: state of a Model's file on this Mac. `slots`: names of the store's slots that are wanted. `reasons`:
        see `controller.reasons`.
        """
        models, (placer, placed) = snapshot.models, placing
        ours = placer.speaks_for(placed, models.keys(), snapshot.services or {})
        body: Json = {
            "format": FORMAT,
            "did": did or "nothing to do",
            "cluster": {
                "server": self._kube.server_name,
                "synced": all(each.seen.synced for each in watches),
                "error": next((each.seen.error for each in watches if each.seen.error), placer.error),
                "doubtful": any(each.seen.doubtful_until for each in watches),
                "restoredAt": snapshot.restored_at,
                "reconnects": sum(each.reconnects for each in watches),
                "operator": self.operator,
                "operatorSilence": self._silence,
                "advice": self._no_namespace(watches) or placer.unwatched,
                "cloned": placement.CLONED if placer.cloned else "",
            },
            "watches": {each.kind: {"reconnects": each.reconnects, "failures": each.failures} for each in watches},
            "namespaces": sorted(placed.namespaces),
            "silent": [list(where) for where in placed.silent],
            "elsewhere": {".".join(key): why for key, why in placer.foreign().items()},
            "models": {
                "/".join(key): _model_row(item, file)
                for key, item in models.items()
                if key in ours
                and resources.is_metal(item)
                # Left out while it is being checked, as after a restart: there is nothing to report yet. A Model that
                # the operator rejected keeps the operator's status, even if the operator is gone.
                and (file := file_of(item)).phase != "Checking"
                and file.reason != MODEL_REFUSED
            },
            "notices": self._notices,
            "memory": memory,
            "metal": snapshot.metal.word,
            "slots": list(slots),
            "reasons": reasons or {},
        }
        newest = next((each.history.newest for each in watches), "")
        counted = {
            "at": snapshot.now,
            "pid": os.getpid(),
            "cluster": {**body["cluster"], "requests": self._kube.requests, "newest": newest},
            "passes": self._passes.as_json(),
        }
        if body == self._told and time.monotonic() < self._due_at:
            return False
        write_atomic(self._state.path / CONTROLLER_REPORT, json.dumps({**body, **counted}), durable=False)
        before, self._told = self._told, body
        self._due_at = time.monotonic() + COUNTED_S
        return any(before.get(name) != body[name] for name in body.keys() - FOR_PEOPLE)


def _model_row(item: Json, file: ModelFile) -> Json:
    """A Model's row in the report: all that the sidecar needs to write its status, if this Mac is the one to do it."""
    metadata = item["metadata"]
    return {
        "uid": metadata.get("uid", ""),
        "generation": metadata.get("generation", 0),
        "source": source_of(item),
        "file": dict(vars(file)),
    }


def source_of(item: Json) -> str:
    """`spec.source` of a Model, "" if it has none that can be read."""
    source = mapping(item, "spec").get("source")
    return source.strip() if isinstance(source, str) else ""


class ModelFiles:
    """States of the files of Models on this Mac; each Model is read once for each of its versions."""

    def __init__(self, store: Store, header_of: Callable[[str], Reading | None]) -> None:
        """`header_of`: metadata of a file by its path; None while it is being read."""
        self._store, self._header_of = store, header_of
        self._read: Remembered[Model | Bad, str, None] = Remembered()

    def state(self, model: Json, used: Collection[Key]) -> ModelFile:
        """State of a Model's file; a file that no record and no other file uses is not looked for.

        `used`: the Models of this Mac's records.
        """
        metadata = model["metadata"]
        key = metadata.get("namespace", ""), metadata["name"]
        read = self._read.of(key, (model,), nothing, lambda _: _read(model))
        if isinstance(read, Bad):  # its services are refused for the same reason
            return ModelFile("Failed", reason=read.reason, message=read.message)
        if (read.namespace, read.name) not in used and not self._store.wants(read.artifact):  # a draft has no record
            return ModelFile("Pending")
        file = reconcile.fitting(self._store.state(read.artifact), read.format)
        if file.phase != "Ready" or file.directory:
            return file
        reading = None
        with contextlib.suppress(RuntimeError):  # the system has no more threads: a later pass asks again
            reading = self._header_of(file.path)
        if reading is None:
            return ModelFile("Checking")
        return file if reading.header is None else replace(file, gguf=reading.header.summary)

    def keep(self, models: Collection[Key]) -> None:
        """Drop what was read of all other Models."""
        self._read.forget_all_but(models)


def _read(model: Json) -> Model | Bad:
    try:
        return model_resource.read_model(model)
    except Bad as bad:
        return bad.with_traceback(None)
    except Exception as error:  # noqa: BLE001 - logged where its services are read; the report is of all Models
        return Bad("InvalidSpec", f"it cannot be read: {type(error).__name__}")
