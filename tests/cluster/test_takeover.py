"""What LLMKube's own agent left in a real cluster, taken over by ours on the same Mac."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.agent import agents
from tests.cluster.server import KubeCluster
from tests.support.incumbent import PORT, WRITER, endpoints_of_theirs, own_address, service_of_theirs, slice_of_theirs
from tests.support.system import SERVICES, SLICES, eventually, service

ENDPOINTS = "/api/v1/namespaces/default/endpoints"


@pytest.mark.parametrize("wanted", [8080, 9000], ids=["its port", "another port"])
def test_the_service_stays_the_same_object_and_all_that_led_to_the_dead_engine_goes(
    cluster: KubeCluster, namespace: str, tmp_path: Path, wanted: int
) -> None:
    address = own_address()
    with agents(tmp_path, cluster, namespace) as fleet:
        before = fleet.kube.request("POST", SERVICES, WRITER, service_of_theirs())
        fleet.kube.request("POST", SLICES, WRITER, slice_of_theirs(address))
        fleet.kube.request("POST", ENDPOINTS, WRITER, endpoints_of_theirs(address))
        mac = fleet.add("mac-a", "--host-ip", address)
        mac.apply(mac.tiny_model(), service("tiny", endpoint={"port": wanted}))
        mac.ready("tiny", 60)
        eventually(lambda: mac.maybe(f"{SLICES}/tiny") is None, 30, "their slice to go")
        eventually(lambda: mac.maybe(f"{ENDPOINTS}/tiny") is None, 30, "their Endpoints to go")
        eventually(lambda: fleet.ready() == ["mac-a"], 30, "the only endpoint to be ours")
        after = mac.get(f"{SERVICES}/tiny")
        assert after["metadata"]["uid"] == before["metadata"]["uid"]
        assert after["spec"]["clusterIP"] == before["spec"]["clusterIP"]
        (port,) = after["spec"]["ports"]
        assert (port["port"], port["targetPort"]) == (wanted, "http")
        found = mac.slice()
        assert found and found["endpoints"][0]["addresses"] == [address] and found["ports"][0]["port"] != PORT
