"""Services on demand on a real API server: what pods are told, while models come and go."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from tests.cluster.agent import agents
from tests.cluster.server import KubeCluster
from tests.support.gateway import Gateway
from tests.support.macs import Mac
from tests.support.system import eventually, free_ports, service

REQUESTS = 200
WAKES = 10
IDLE_S = 1
LEAVES_S = 0.5
"""The time after which it is unloaded, and that which this takes at most on an idle machine."""
EVENTS = "/apis/events.k8s.io/v1/namespaces/default/events"


def on_demand(**spec: object) -> dict[str, object]:
    made = service("tiny", **spec)
    made["metadata"]["annotations"] = {"metal-supervisor.io/on-demand": "true"}
    return made


def reason(mac: Mac) -> str:
    """Reason of MetalReady, with its status."""
    found = mac.condition("MetalReady")
    return f"{found.get('status')}/{found.get('reason')}"


def answered(mac: Mac) -> bool:
    """True if a chat at the port of its slice is; the address is one that only pods would reach."""
    return Gateway(mac, mac.port()).chat("any name: the port says which model")[0] == 200


def flags(idle_s: int) -> tuple[str, ...]:
    return "--gateway", f"127.0.0.1:{free_ports(1)[0]}", "--idle-ttl", str(idle_s)


def test_it_is_reached_at_its_slice_s_address_while_it_wakes_and_rests(
    cluster: KubeCluster, namespace: str, tmp_path: Path
) -> None:
    with agents(tmp_path, cluster, namespace) as fleet:
        mac = fleet.add("mac-a", *flags(IDLE_S))
        mac.apply(mac.tiny_model(), on_demand())
        eventually(lambda: reason(mac) == "True/Unloaded", 60, mac.said())
        assert mac.status()["phase"] == "Ready" and mac.status()["readyReplicas"] == 1
        woken, front, engines = 0, mac.port(), set()
        for number in range(REQUESTS):
            if number % (REQUESTS // WAKES) == 0:
                eventually(lambda: not mac.pid(), 30, "it to be unloaded")
                woken += 1
            elif number % (REQUESTS // WAKES) == REQUESTS // WAKES // 2:
                time.sleep(IDLE_S + number / REQUESTS * LEAVES_S)  # it is about to end, ends, or has ended
            assert answered(mac), number
            assert mac.port() == front, "no other address is told"
            engines.add(mac.pid())
        assert woken == WAKES and len(engines - {0}) >= WAKES and mac.slice_ready()
        events = mac.kube.request("GET", EVENTS)["items"]  # the API server posts some about Services by itself
        ours = [each for each in events if each["regarding"]["kind"] == "InferenceService"]
        assert not [each for each in ours if each["type"] == "Warning"]


def test_each_mac_wakes_its_own_replica_and_keeps_its_claim(
    cluster: KubeCluster, namespace: str, tmp_path: Path
) -> None:
    with agents(tmp_path, cluster, namespace, "--lease-duration", "5") as fleet:
        macs = [fleet.add(name, *flags(4)) for name in ("mac-a", "mac-b")]
        macs[0].apply(macs[0].tiny_model(), on_demand(replicas=2))
        eventually(lambda: fleet.ready() == ["mac-a", "mac-b"], 60, "both endpoints")
        holders = {slot: fleet.holder(slot=slot) for slot in (0, 1)}
        assert not any(mac.pid() for mac in macs)
        for mac, other in itertools.permutations(macs):
            assert answered(mac)
            assert mac.pid() and not other.pid()
            eventually(lambda mac=mac: not mac.pid(), 30, "it to be unloaded")
        time.sleep(6)  # longer than a Lease lasts: nobody takes over what rests
        assert {slot: fleet.holder(slot=slot) for slot in (0, 1)} == holders and fleet.ready() == ["mac-a", "mac-b"]
