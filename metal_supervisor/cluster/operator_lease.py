"""Reader of the Lease of LLMKube's operator, in the background, while the operator is silent.

The Lease shows within a minute that an operator is gone; without the right to read it, only the silence does.
"""

from __future__ import annotations

import threading
import time

from metal_supervisor.cluster import status_mode as mode
from metal_supervisor.cluster.kube import Kube, KubeError
from metal_supervisor.cluster.manifests import api_path

AGAIN_S, REFUSED_AGAIN_S = 10.0, 300.0


class OperatorLease:
    """Reads the Lease in a thread, so that `look` never blocks."""

    def __init__(self, kube: Kube, namespace: str = "") -> None:
        """`namespace`: the only one in which Leases may be read, "" for all."""
        self._kube = kube
        self._path = api_path("leases", namespace)
        self._reader: threading.Thread | None = None
        self._due_at = 0.0
        self.seen: mode.Lease | None = None
        """The Lease as last read, None if none was found. Replaced as a whole."""

    def look(self) -> None:
        """Start to read the Lease, unless a read is running, or it is too soon."""
        if time.monotonic() < self._due_at or (self._reader is not None and self._reader.is_alive()):
            return
        self._reader = threading.Thread(target=self.read, name="operator lease", daemon=True)
        self._reader.start()

    def read(self) -> None:
        """Read the Lease once; on an error keep the last one."""
        pause_s = REFUSED_AGAIN_S
        try:
            query = {"fieldSelector": f"metadata.name={mode.LEASE_NAME}"}
            self.seen = mode.read_lease(self.seen, self._kube.request("GET", self._path, query), time.monotonic())
            pause_s = AGAIN_S if self.seen is not None else REFUSED_AGAIN_S
        except KubeError as error:
            pause_s = REFUSED_AGAIN_S if error.code in (403, 404) else AGAIN_S
        self._due_at = time.monotonic() + pause_s
