"""The Lease of LLMKube's operator, read in the background while the operator is silent.

An operator that is gone is known by its Lease within a minute; without the right to read it, only by its silence.
"""

from __future__ import annotations

import threading
import time

from metal_supervisor.cluster import status_mode as mode
from metal_supervisor.cluster.kube import Kube, KubeError

AGAIN_S, REFUSED_AGAIN_S = 10.0, 300.0


class OperatorLease:
    """Reads it when asked to, and never holds up who asks."""

    def __init__(self, kube: Kube, namespace: str = "") -> None:
        """`namespace`: the only one in which Leases may be read, "" for all."""
        self._kube = kube
        scope = f"/namespaces/{namespace}" if namespace else ""
        self._path = f"/apis/coordination.k8s.io/v1{scope}/leases"
        self._reader: threading.Thread | None = None
        self._due_at = 0.0
        self.seen: mode.Lease | None = None
        """As it was last read. Replaced as a whole."""

    def look(self) -> None:
        """Starts to read it, unless that is under way, or too soon."""
        if time.monotonic() < self._due_at or (self._reader is not None and self._reader.is_alive()):
            return
        self._reader = threading.Thread(target=self.read, name="operator lease", daemon=True)
        self._reader.start()

    def read(self) -> None:
        """Reads it once; one that cannot be read stays as it was."""
        pause_s = REFUSED_AGAIN_S
        try:
            query = {"fieldSelector": f"metadata.name={mode.LEASE_NAME}"}
            self.seen = mode.read_lease(self.seen, self._kube.request("GET", self._path, query), time.monotonic())
            pause_s = AGAIN_S if self.seen is not None else REFUSED_AGAIN_S
        except KubeError as error:
            pause_s = REFUSED_AGAIN_S if error.code in (403, 404) else AGAIN_S
        self._due_at = time.monotonic() + pause_s
