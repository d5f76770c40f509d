"""This Mac in LLMKube Foreman's list of nodes. Off unless configured.

Foreman assigns tasks to nodes that are Ready, and metal-supervisor runs none. So the phase is `Draining`: this Mac is
listed with its memory and its models, and no task is ever assigned to it.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence

from metal_supervisor import __version__
from metal_supervisor.cluster.answers import KubeError
from metal_supervisor.cluster.kube import Kube
from metal_supervisor.cluster.manifests import MANAGED_BY, field_manager
from metal_supervisor.host import sleep_clock
from metal_supervisor.sidecar.statuses import now_seconds
from metal_supervisor.spec.sizes import GIB
from metal_supervisor.spec.types import Json

EVERY_S = 60.0
API = "foreman.llmkube.dev/v1alpha1"


def fleet_node(node: str, memory_bytes: int, models: Sequence[str], now: str) -> Json:
    """The FleetNode object of this Mac, with its status."""
    return {
        "apiVersion": API,
        "kind": "FleetNode",
        "metadata": {"name": node, "labels": {"app.kubernetes.io/managed-by": MANAGED_BY}},
        "spec": {"nodeName": node},
        "status": {
            "phase": "Draining",
            "agentKind": "metal-agent",
            "agentVersion": __version__,
            "os": platform.system().lower(),
            "arch": platform.machine(),
            "lastHeartbeatTime": now,
            "capability": {
                "accelerator": "metal",
                "totalRAMGB": memory_bytes // GIB,
                "installedModels": sorted(set(models)),
            },
        },
    }


class FleetNode:
    """Heartbeat of the FleetNode. `write` may raise KubeError."""

    def __init__(self, kube: Kube, node: str, memory_bytes: int) -> None:
        self._kube, self._node, self._memory_bytes = kube, node, memory_bytes
        self._clock = sleep_clock.system_clocks().inclusive  # a heartbeat grows old during a sleep too
        self._written_at = float("-inf")

    @property
    def due_at(self) -> float:
        """Monotonic time of the next heartbeat."""
        return self._written_at + EVERY_S - self._clock() + time.monotonic()

    def write(self, models: Sequence[str]) -> None:
        """Write the FleetNode if the heartbeat is due. Raises KubeError."""
        if time.monotonic() < self.due_at:
            return
        whole = fleet_node(self._node, self._memory_bytes, models, now_seconds(self._kube))
        path, manager = f"/apis/{API}/fleetnodes/{self._node}", field_manager(self._node)
        try:
            # By force: what an agent that ran here before has written is about this Mac, and no longer so.
            for place, leaves in ((path, "status"), (f"{path}/status", "spec")):
                part = {key: each for key, each in whole.items() if key != leaves}
                self._kube.apply(place, part, manager, force=True)
        except KubeError as error:
            if error.code != 404:
                raise
            text = "the cluster knows no FleetNodes: install LLMKube's Foreman, or set --fleet-node off"
            raise KubeError(405, "MethodNotAllowed", text) from None
        self._written_at = self._clock()
