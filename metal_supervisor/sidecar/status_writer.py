"""Writes of a status: an apply as one field manager for all Macs, a merge of single fields, and what comes between."""

from __future__ import annotations

import logging

from metal_supervisor.cluster import manifests
from metal_supervisor.cluster.answers import APPLY_KINDS, KubeError, undeclared
from metal_supervisor.cluster.kube import MERGE, Kube, find
from metal_supervisor.cluster.manifests import api_path
from metal_supervisor.spec.document import mapping
from metal_supervisor.spec.resources import GROUP, VERSION
from metal_supervisor.spec.types import Json, Key

log = logging.getLogger("sidecar")


class StatusWriter:
    """Writes to `status` subresources. All methods may raise KubeError, and are idempotent."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._undeclared: dict[str, set[str]] = {}
        """Kind -> the fields of a status that its definition in this cluster, which may be an older one, lacks."""

    def apply(self, kind: str, key: Key, body: Json, force: bool = False) -> Json:
        """Apply a status, without the fields that its kind does not declare here; returns the object as it is then."""
        try:
            return self._applied(kind, key, body, force)
        except KubeError as error:
            if further := undeclared(error) - self._undeclared.get(kind, set()):
                self._undeclared.setdefault(kind, set()).update(further)
                fields = ", ".join(sorted(further))
                log.warning("an older definition lacks fields of a status", extra={"kind": kind, "fields": fields})
                return self.apply(kind, key, body, force)
            if error.code != 422 or not self._drop_shared(_path(kind, key), body):
                raise
            return self._applied(kind, key, body, force)

    def _applied(self, kind: str, key: Key, body: Json, force: bool) -> Json:
        declared = {name: part for name, part in body.items() if name not in self._undeclared.get(kind, ())}
        whole = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": kind,
            "metadata": {"namespace": key[0], "name": key[1]},
            **({"status": declared} if declared else {}),  # an empty one that leaves nothing becomes null: refused
        }
        try:
            # One field manager for all Macs: there is one writer at a time, and the next must be able to drop fields.
            return self._kube.apply(_path(kind, key) + "/status", whole, manifests.MANAGED_BY, force)
        except KubeError as error:
            if error.code != 404 or find(self._kube, _path(kind, key)) is None:  # it is gone
                raise
            text = f"the definition of {kind} has no status subresource: {APPLY_KINDS}"
            raise KubeError(405, "MethodNotAllowed", text) from None

    def _drop_shared(self, path: str, body: Json) -> bool:
        """Take out the conditions that `body` leaves out, and that LLMKube's operator or agent has written too.

        An apply takes out the fields that are ours alone, and what is left of a condition is refused. True if there
        were any; the operator writes its own again.
        """
        found = self._kube.request("GET", path)
        left = manifests.left_by_others(mapping(found, "status"), body)
        if "conditions" not in left:
            return False
        self.merge(path, {"conditions": left["conditions"]}, found["metadata"]["resourceVersion"])
        return True

    def merge(self, path: str, status: Json, version: str = "") -> None:
        """Merge a patch into a status. `version`: the object's resourceVersion that it has to have; "" for any."""
        body = {"status": status, **({"metadata": {"resourceVersion": version}} if version else {})}
        self._kube.request("PATCH", path + "/status", {"fieldManager": manifests.MANAGED_BY}, body, MERGE)

    def tidy(self, path: str, found: Json, body: Json) -> None:
        """Take out what others left in a status that is ours by now; an apply leaves all that is not its own.

        `found`: the object that the apply of `body` returned.
        """
        if left := manifests.left_by_others(mapping(found, "status"), body):
            self.merge(path, left, found["metadata"]["resourceVersion"])


def _path(kind: str, key: Key) -> str:
    return api_path("inferenceservices" if kind == "InferenceService" else "models", *key)
