"""Engines that outlive a killed supervisord stay in rotation, as the watches of a real API server tell it."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.agent import agents
from tests.cluster.server import KubeCluster
from tests.support.system import service
from tests.support.transitions import supervisord_killed, unmoved

NAMES = ["one", "two", "three"]


def test_adopted_engines_stay_published_and_ready(cluster: KubeCluster, namespace: str, tmp_path: Path) -> None:
    with agents(tmp_path, cluster, namespace) as fleet:
        mac = fleet.add("mac-a")
        mac.apply(mac.tiny_model(), *(service(name, "tiny") for name in NAMES))
        for name in NAMES:
            mac.ready(name, 60)
        with unmoved(mac):
            supervisord_killed(mac, NAMES)
