"""A Mac whose Go agent was booted out a moment ago: what it left in the cluster is taken over, not made anew."""

from __future__ import annotations

import time
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor.boundary import host
from tests.macs import embedded_cluster, fleet
from tests.system import SLICES, eventually, service

SERVICES = "/api/v1/namespaces/default/services"
AGENT = {"fieldManager": "llmkube-metal-agent"}
LABELS = {"app": "tiny", "llmkube.ai/managed-by": "metal-agent", "llmkube.ai/inference-service": "tiny"}
ENGINE_PORT = 52011


@pytest.fixture
def address() -> str:
    """An address of this machine that a slice may hold."""
    good = [each for each in host.own_addresses() if each.count(".") == 3]
    usable = [each for each in good if not ip_address(each).is_loopback and not ip_address(each).is_link_local]
    if not usable:
        pytest.skip("this machine has no IPv4 address but loopback; connect it to a network")
    return min(usable)


def their_service() -> dict[str, Any]:
    """As the agent creates it: no owner, no selector, the engine's port as a number."""
    return {
        "apiVersion": "v1", "kind": "Service",
        "metadata": {
            "name": "tiny", "labels": LABELS,
            "annotations": {"llmkube.ai/metal-accelerated": "true", "llmkube.ai/native-process": "true"},
        },
        "spec": {
            "type": "ClusterIP",
            "ports": [{"name": "http", "port": 8080, "targetPort": ENGINE_PORT, "protocol": "TCP"}],
        },
    }  # fmt: skip


def their_slice(address: str) -> dict[str, Any]:
    """As the agent creates it: named as the Service, and beating a moment ago."""
    beat = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "name": "tiny", "labels": {"kubernetes.io/service-name": "tiny", **LABELS},
            "annotations": {"llmkube.ai/agent-heartbeat": beat, "llmkube.ai/agent-version": "0.9.19"},
        },
        "addressType": "IPv4",
        "endpoints": [{
            "addresses": [address], "conditions": {"ready": True},
            "targetRef": {"kind": "Pod", "name": "tiny-metal", "namespace": "default"},
        }],
        "ports": [{"name": "http", "port": ENGINE_PORT, "protocol": "TCP"}],
    }  # fmt: skip


def test_what_the_agent_left_on_this_mac_is_taken_over_and_the_cluster_ip_stays(tmp_path: Path, address: str) -> None:
    with embedded_cluster(tmp_path) as kubeconfig, fleet(tmp_path, kubeconfig) as macs:
        before = macs.kube.request("POST", SERVICES, AGENT, their_service())
        macs.kube.request("POST", SLICES, AGENT, their_slice(address))
        mac = macs.add("mac-a", "--host-ip", address)
        mac.apply(mac.tiny_model(), service("tiny"))
        mac.ready("tiny")
        ours = eventually(mac.slice, what="our slice")
        eventually(lambda: mac.maybe(f"{SLICES}/tiny") is None, what="their slice to go")
        assert macs.ready() == ["mac-a"], "the only endpoint is ours"
        assert ours["endpoints"][0]["addresses"] == [address] and ours["ports"][0]["port"] != ENGINE_PORT
        after = mac.get(f"{SERVICES}/tiny")
        assert after["metadata"]["uid"] == before["metadata"]["uid"], "the same object"
        assert after["spec"]["clusterIP"] == before["spec"]["clusterIP"], "whoever resolved its name goes on"
        assert [(each["port"], each["targetPort"]) for each in after["spec"]["ports"]] == [(8080, "http")]
        assert after["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "metal-supervisor"
        (owner,) = after["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"]) == ("InferenceService", "tiny"), "so that it goes with its service"


def test_a_service_of_the_agents_for_another_inference_service_is_left_alone(tmp_path: Path, address: str) -> None:
    with embedded_cluster(tmp_path) as kubeconfig, fleet(tmp_path, kubeconfig) as macs:
        other = their_service()
        other["metadata"]["labels"] = {**LABELS, "llmkube.ai/inference-service": "ti.ny"}
        before = macs.kube.request("POST", SERVICES, AGENT, other)
        mac = macs.add("mac-a", "--host-ip", address)
        mac.apply(mac.tiny_model(), service("tiny"))
        eventually(lambda: mac.condition("MetalReady").get("reason") == "EndpointNameConflict", what="the conflict")
        assert mac.get(f"{SERVICES}/tiny")["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
        assert mac.slice() is None
