"""What LLMKube's own agent, the Go one, leaves in a cluster: its objects as they are documented."""

from __future__ import annotations

import time
from ipaddress import ip_address
from typing import Any

import pytest

from metal_supervisor.host import machine

WRITER = {"fieldManager": "llmkube-metal-agent"}
LABELS = {"app": "tiny", "llmkube.ai/managed-by": "metal-agent", "llmkube.ai/inference-service": "tiny"}
PORT = 52011
"""Of an engine that ended with its agent."""


def own_address() -> str:
    """An IPv4 address of this machine that a slice may hold; skips the test where there is none."""
    found = [ip_address(each) for each in machine.own_addresses() if ":" not in each]
    usable = sorted(each for each in found if not each.is_loopback and not each.is_link_local)
    if not usable:
        pytest.skip("this machine has no IPv4 address but loopback; connect it to a network")
    return str(usable[0])


def service_of_theirs() -> dict[str, Any]:
    """No owner, no selector, the engine's port as a number."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": "tiny",
            "labels": LABELS,
            "annotations": {"llmkube.ai/metal-accelerated": "true", "llmkube.ai/native-process": "true"},
        },
        "spec": {
            "type": "ClusterIP",
            "ports": [{"name": "http", "port": 8080, "targetPort": PORT, "protocol": "TCP"}],
        },
    }


def slice_of_theirs(address: str) -> dict[str, Any]:
    """Named as the Service, and beating a moment ago."""
    beat = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "tiny",
            "labels": {"kubernetes.io/service-name": "tiny", **LABELS},
            "annotations": {"llmkube.ai/agent-heartbeat": beat, "llmkube.ai/agent-version": "0.9.19"},
        },
        "addressType": "IPv4",
        "endpoints": [
            {
                "addresses": [address],
                "conditions": {"ready": True},
                "targetRef": {"kind": "Pod", "name": "tiny-metal", "namespace": "default"},
            }
        ],
        "ports": [{"name": "http", "port": PORT, "protocol": "TCP"}],
    }


def ingress_of_theirs(address: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(Service, slice) by which an agent of 0.10 says where its TLS ingress is; the engine is on loopback."""
    name, port = "tiny-agent", {"name": "https", "port": 9443, "protocol": "TCP"}
    made, found = service_of_theirs(), slice_of_theirs(address)
    made["metadata"]["name"] = found["metadata"]["name"] = name
    made["spec"]["ports"] = [{**port, "port": 8443, "targetPort": 9443}]
    found["metadata"]["labels"]["kubernetes.io/service-name"] = name
    found["metadata"]["annotations"] |= {
        "llmkube.ai/agent-version": "0.10.1",
        "llmkube.ai/agent-ingress-spki": "a" * 64,
        "llmkube.ai/agent-engine-port": str(PORT),
    }
    found["ports"] = [port]
    return made, found


def endpoints_of_theirs(address: str) -> dict[str, Any]:
    """What old releases left besides."""
    subset = {"addresses": [{"ip": address}], "ports": [{"name": "http", "port": PORT, "protocol": "TCP"}]}
    metadata = {"name": "tiny", "labels": LABELS}
    return {"apiVersion": "v1", "kind": "Endpoints", "metadata": metadata, "subsets": [subset]}
