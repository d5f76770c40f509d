"""A Mac whose Go agent was booted out a moment ago: what it left in the cluster is taken over, not made anew."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from metal_supervisor.cluster.kube import MERGE
from tests.support.incumbent import LABELS, PORT, WRITER, own_address, service_of_theirs, slice_of_theirs
from tests.support.macs import Fleet, embedded_cluster, fleet
from tests.support.system import ISVC, SERVICES, SLICES, eventually, service


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    base, address = tmp_path_factory.mktemp("takeover"), own_address()
    with embedded_cluster(base) as kubeconfig, fleet(base, kubeconfig) as macs:
        mac = macs.add("mac-a", "--host-ip", address)
        mac.apply(mac.tiny_model())
        yield macs


@pytest.fixture
def macs(cluster: Fleet) -> Iterator[Fleet]:
    """A Mac that has seen nothing of a service yet."""
    yield cluster
    cluster.empty()
    if cluster.macs[0].maybe(f"{SERVICES}/tiny"):
        cluster.macs[0].delete("tiny", SERVICES)


def test_what_the_agent_left_on_this_mac_is_taken_over_and_the_cluster_ip_stays(macs: Fleet) -> None:
    (mac,), address = macs.macs, own_address()
    before = macs.kube.request("POST", SERVICES, WRITER, service_of_theirs())
    macs.kube.request("POST", SLICES, WRITER, slice_of_theirs(address))
    mac.apply(service("tiny"))
    mac.ready("tiny")
    ours = eventually(mac.slice, what="our slice")
    eventually(lambda: mac.maybe(f"{SLICES}/tiny") is None, what="their slice to go")
    assert macs.ready() == ["mac-a"], "the only endpoint is ours"
    assert ours["endpoints"][0]["addresses"] == [address] and ours["ports"][0]["port"] != PORT
    after = mac.get(f"{SERVICES}/tiny")
    assert after["metadata"]["uid"] == before["metadata"]["uid"], "the same object"
    assert after["spec"]["clusterIP"] == before["spec"]["clusterIP"], "whoever resolved its name goes on"
    assert [(each["port"], each["targetPort"]) for each in after["spec"]["ports"]] == [(8080, "http")]
    assert after["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "metal-supervisor"
    (owner,) = after["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("InferenceService", "tiny"), "so that it goes with its service"


def test_a_port_that_the_agent_never_had_takes_the_place_of_its_own(macs: Fleet) -> None:
    """Its Services have 8080, whatever spec.endpoint.port says; two of one name no server accepts."""
    (mac,) = macs.macs
    before = macs.kube.request("POST", SERVICES, WRITER, service_of_theirs())
    mac.apply(service("tiny", endpoint={"port": 9000}))
    mac.ready("tiny")
    after = mac.get(f"{SERVICES}/tiny")
    assert after["spec"]["clusterIP"] == before["spec"]["clusterIP"]
    assert [(each["port"], each["targetPort"]) for each in after["spec"]["ports"]] == [(9000, "http")]
    mac.kube.request("PATCH", f"{ISVC}/tiny", None, {"spec": {"endpoint": {"port": 9100}}}, MERGE)

    def ports() -> list[int]:
        return [each["port"] for each in mac.get(f"{SERVICES}/tiny")["spec"]["ports"]]

    eventually(lambda: ports() == [9100], what="the Service to follow an edit")
    assert "PublishFailed" not in mac.told("tiny")


def test_a_service_of_the_agents_for_another_inference_service_is_left_alone(macs: Fleet) -> None:
    (mac,), other = macs.macs, service_of_theirs()
    other["metadata"]["labels"] = {**LABELS, "llmkube.ai/inference-service": "ti.ny"}
    before = macs.kube.request("POST", SERVICES, WRITER, other)
    mac.apply(service("tiny"))
    eventually(lambda: mac.condition("MetalReady").get("reason") == "EndpointNameConflict", what="the conflict")
    assert mac.get(f"{SERVICES}/tiny")["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
    assert mac.slice() is None
