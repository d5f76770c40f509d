"""Next to LLMKube's operator 0.10 on a real API server; `tests.support.operator_sim` stands in for the operator."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor.cluster.kube import MERGE
from tests.cluster.agent import AgentFleet, AgentMac, Object, OwnKube, agents
from tests.cluster.server import OURS, KubeCluster, crd_directory
from tests.support.incumbent import WRITER, ingress_of_theirs, own_address
from tests.support.operator_sim import DEPLOYMENTS, RELAY_ADDRESS, Operator
from tests.support.system import ISVC, MODELS, SERVICES, SLICES, eventually, kill, model, service

REJECTED = "ModelAttestationRejected", "no trusted signature covers spec.sha256"


@pytest.fixture
def beside(cluster: KubeCluster, namespace: str, tmp_path: Path) -> Iterator[tuple[AgentMac, Operator]]:
    """A Mac in a namespace with the stand-in operator."""
    with agents(tmp_path, cluster, namespace) as fleet:
        operator = started(fleet)
        try:
            yield fleet.add("mac-a"), operator
        finally:
            operator.end()


def started(fleet: AgentFleet) -> Operator:
    operator = Operator(OwnKube(fleet.kubeconfig, fleet.namespace))
    operator.start()
    return operator


def test_a_rejected_model_is_neither_started_nor_fetched_until_it_is_accepted(
    beside: tuple[AgentMac, Operator],
) -> None:
    mac, operator = beside
    operator.failures = {"tiny": REJECTED, "far": REJECTED}
    mac.apply(mac.tiny_model(), model("far", "https://192.0.2.1/far.gguf"))
    eventually(lambda: mac.get(f"{MODELS}/far").get("status"), what="the operator's verdict")
    mac.apply(service("tiny"), service("far"))
    for name in ("tiny", "far"):
        eventually(
            lambda name=name: mac.condition("MetalReady", name).get("reason") == "ModelSourceNotAllowed",
            what=f"the refusal of {name}",
        )
        assert "ModelAttestationRejected" in mac.condition("MetalReady", name)["message"]
        eventually(
            lambda name=name: mac.status(name).get("schedulingStatus") == "ModelSourceNotAllowed",
            what=f"the word of {name}",
        )
    assert not mac.pid()
    operator.failures["tiny"] = None
    mac.ready("tiny", 60)


def test_a_running_engine_outlives_the_rejection_of_its_model_and_its_next_start_is_refused(
    beside: tuple[AgentMac, Operator],
) -> None:
    mac, operator = beside
    mac.apply(mac.tiny_model(), service("tiny"))
    pid = mac.ready("tiny", 60)
    operator.failures = {"tiny": REJECTED}
    eventually(lambda: "its next start is refused" in mac.told("tiny"), what="the condition")
    assert mac.condition("MetalReady")["status"] == "True" and mac.pid() == pid
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: mac.condition("MetalReady").get("reason") == "ModelSourceNotAllowed", 30, "the refused start")
    assert not mac.pid()
    operator.failures = {"tiny": None}
    assert mac.ready("tiny", 60) != pid


@pytest.mark.parametrize("reason", ["SourceNotAllowed", "DownloadFailed", "InvalidFileSet"])
def test_a_model_that_only_the_operator_cannot_obtain_is_served_and_the_failure_is_named(
    beside: tuple[AgentMac, Operator], reason: str
) -> None:
    mac, operator = beside
    operator.failures = {"tiny": (reason, "not below allowedHostPathRoots")}
    mac.apply(mac.tiny_model(), service("tiny"))
    mac.ready("tiny", 60)
    eventually(lambda: f"{reason}: not below allowedHostPathRoots" in mac.told("tiny"), what="the failure to be named")


def test_what_the_engine_runs_on_is_in_the_status_beside_the_operator(beside: tuple[AgentMac, Operator]) -> None:
    mac, operator = beside
    mac.apply(mac.tiny_model(), service("tiny", extraArgs=["--threads", "1", "--log-verbosity", "4"]))
    mac.ready("tiny", 60)
    # The engine at hand finds no GPU, and its log counts the layers as offloaded all the same.
    found = eventually(lambda: mac.status("tiny").get("acceleration"), what="what it runs on")
    assert (found["device"], found["layersOffloaded"]) == ("CPU", 0) and found["layersTotal"] > 0
    writes = operator.writes
    mac.apply(service("tiny", extraArgs=["--threads", "1"]))
    eventually(lambda: "acceleration" not in mac.status("tiny"), 60, "a log without it to leave nothing in the status")
    assert operator.writes > writes


# ── the relay of 0.10 ────────────────────────────────────────────────────────────────────────────


class DeadEndpoints(threading.Thread):
    """Samples how long a ready endpoint of a service leads nowhere, by what the test knows to answer."""

    def __init__(self, fleet: AgentFleet, answers: Callable[[], set[str]]) -> None:
        """`answers`: addresses behind which something answers."""
        super().__init__(daemon=True)
        self._kube, self._answers, self._over = OwnKube(fleet.kubeconfig, fleet.namespace), answers, threading.Event()
        self.longest_s = 0.0

    def run(self) -> None:
        since: dict[str, float] = {}
        query = {"labelSelector": "kubernetes.io/service-name=tiny"}
        while not self._over.wait(0.05):
            slices = self._kube.request("GET", SLICES, query)["items"]
            answers, now = self._answers(), time.monotonic()
            dead = {
                address
                for item in slices
                for each in item["endpoints"] or []
                for address in each["addresses"]
                if each["conditions"]["ready"] and address not in answers
            }
            since = {address: since.get(address, now) for address in dead}
            self.longest_s = max([self.longest_s, *(now - at for at in since.values())])

    def end(self) -> float:
        self._over.set()
        self.join(30)
        return self.longest_s


def go_agent_serves(fleet: AgentFleet, operator: Operator, address: str) -> Object:
    """An agent of 0.10 serves through a relay; returns the Service that the operator has adopted."""
    made, found = ingress_of_theirs(address)
    operator.alive.add("tiny")
    fleet.kube.request("POST", SERVICES, WRITER, made)
    fleet.kube.request("POST", SLICES, WRITER, found)
    eventually(lambda: RELAY_ADDRESS in ready(fleet), 30, "the relay to serve")
    return fleet.kube.request("GET", f"{SERVICES}/tiny")


def ready(fleet: AgentFleet) -> set[str]:
    items = fleet.kube.request("GET", SLICES, {"labelSelector": "kubernetes.io/service-name=tiny"})["items"]
    return {
        address
        for item in items
        for each in item["endpoints"] or []
        if each["conditions"]["ready"]
        for address in each["addresses"]
    }


@pytest.mark.parametrize("killed", [False, True], ids=["once", "killed in the middle"])
def test_changing_over_from_a_go_agent_and_back_keeps_the_service(
    cluster: KubeCluster, namespace: str, tmp_path: Path, killed: bool
) -> None:
    address = own_address()
    with agents(tmp_path, cluster, namespace) as fleet:
        operator = started(fleet)
        operator.relays = True
        fleet.kube.request("POST", MODELS, None, model("tiny", "hf://o/r"))
        fleet.kube.request("POST", ISVC, None, service("tiny"))
        before = go_agent_serves(fleet, operator, address)
        answers: set[str] = {RELAY_ADDRESS}
        samples = DeadEndpoints(fleet, lambda: answers)
        samples.start()
        # The Go agent ends without a word, and this Mac takes its place at the same address.
        operator.alive.clear()
        answers = {address}
        mac = fleet.add("mac-a", "--host-ip", address)
        mac.apply(mac.tiny_model())
        if killed:
            eventually(lambda: mac.maybe(f"{SLICES}/tiny-mac-a"), 60, "the slice, before the Service is claimed")
            kill(mac.rpc.table()["sidecar"].pid)
        eventually(lambda: ready(fleet) == {address}, 60, "the only endpoint to be ours")
        eventually(lambda: not mac.get(f"{SERVICES}/tiny")["spec"].get("selector"), 60, "the selector to be cleared")
        mac.ready("tiny", 60)
        for left in (f"{DEPLOYMENTS}/tiny-relay", f"{SLICES}/tiny-agent", f"{SLICES}/tiny-relay0"):
            eventually(lambda left=left: mac.maybe(left) is None, 30, f"{left} to be gone")
        after = mac.get(f"{SERVICES}/tiny")
        # And back: ours ends, a Go agent starts, and its operator adopts the Service again.
        mac.stop()
        answers = {RELAY_ADDRESS}
        fleet.kube.request("DELETE", f"{SERVICES}/tiny-agent")
        again = go_agent_serves(fleet, operator, address)
        eventually(lambda: ready(fleet) == {RELAY_ADDRESS}, 30, "the relay alone to serve")
        longest_s = samples.end()
        operator.end()
        for each in (after, again):
            assert each["metadata"]["uid"] == before["metadata"]["uid"]
            assert each["spec"]["clusterIP"] == before["spec"]["clusterIP"]
        assert longest_s < 10


def test_a_relay_of_an_agent_on_another_mac_is_left_alone_until_that_falls_silent(
    cluster: KubeCluster, namespace: str, tmp_path: Path
) -> None:
    with agents(tmp_path, cluster, namespace) as fleet:
        operator = started(fleet)
        operator.relays = True
        mac = fleet.add("mac-a")
        fleet.kube.request("POST", ISVC, None, service("tiny"))
        go_agent_serves(fleet, operator, "192.0.2.99")
        mac.apply(mac.tiny_model())
        eventually(lambda: "tiny" in str(mac.report()["controller"]["elsewhere"]), 30, "the other Mac to be noticed")
        assert ready(fleet) == {RELAY_ADDRESS} and mac.get(f"{SERVICES}/tiny")["spec"]["selector"]
        operator.alive.clear()
        silent = {"metadata": {"annotations": {"llmkube.ai/agent-heartbeat": "2026-01-01T00:00:00Z"}}}
        fleet.kube.request("PATCH", f"{SLICES}/tiny-agent", None, silent, MERGE)
        eventually(lambda: mac.pid("tiny"), 90, "this Mac to take it over: until then its phase is the other's")
        eventually(lambda: not mac.get(f"{SERVICES}/tiny")["spec"].get("selector"), 30, "the selector to be cleared")
        eventually(lambda: mac.maybe(f"{SLICES}/tiny-agent") is None, 30, "the stale slice to be gone")
        operator.end()


@pytest.fixture
def our_schemas(cluster: KubeCluster) -> Iterator[None]:
    """Our definitions, whichever the rest of the run has."""
    cluster.apply_crds(OURS)
    wrong = model("tiny", "hf://o/r", fileSha256={"m.gguf": "a"})
    eventually(lambda: cluster.request("POST", f"{MODELS}?dryRun=All", wrong)[0] == 422, what="our rules to count")
    yield
    cluster.apply_crds(crd_directory())


@pytest.mark.usefixtures("our_schemas")
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"sha256": "a" * 64, "files": ["m.gguf"]}, "with files or mmproj, give fileSha256"),
        ({"sha256": "a" * 64, "mmproj": "p.gguf"}, "with files or mmproj, give fileSha256"),
        ({"fileSha256": {"m.gguf": "a" * 64}}, "fileSha256 needs files"),
        ({"files": ["m.gguf"], "fileSha256": {"n.gguf": "a" * 64}}, "has to be one of files, or mmproj"),
        ({"files": ["m.gguf"], "fileSha256": {"m.gguf": "a" * 63}}, "64 hexadecimal digits"),
        ({"files": ["m.gguf"], "mmproj": "p.gguf", "fileSha256": {"m.gguf": "a" * 64, "p.gguf": "A" * 64}}, ""),
    ],
    ids=str,
)
def test_our_schema_rejects_the_digests_that_llmkubes_rejects(
    cluster: KubeCluster, namespace: str, spec: dict[str, Any], message: str
) -> None:
    body = model("tiny", "hf://o/r", **spec)
    body["metadata"]["namespace"] = namespace
    code, answer = cluster.request("POST", MODELS.replace("default", namespace), body)
    assert code == (422 if message else 201) and message in str(answer), answer
