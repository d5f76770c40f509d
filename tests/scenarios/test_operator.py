"""Beside LLMKube's operator: each writes its own, and neither makes the other write again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from metal_supervisor.cluster.kube import MERGE, Kube
from tests.support.faults import Figure, fault
from tests.support.macs import Fleet, Mac, embedded_cluster, fleet
from tests.support.operator_sim import WAITING, Operator
from tests.support.system import ISVC, MODELS, eventually, model, service


@pytest.fixture(scope="module")
def managed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Mac, Operator, Fleet]]:
    base = tmp_path_factory.mktemp("managed")
    with embedded_cluster(base) as kubeconfig, fleet(base, kubeconfig) as macs:
        kube = Kube(kubeconfig)
        operator = Operator(kube)
        operator.start()
        try:
            yield macs.add("mac-a"), operator, macs
        finally:
            operator.end()
            kube.close()


@pytest.fixture
def beside(managed: tuple[Mac, Operator, Fleet]) -> Iterator[tuple[Mac, Operator, Fleet]]:
    """One Mac without services, in a cluster whose operator was there first."""
    yield managed
    managed[2].empty()


def writers(mac: Mac, name: str = "tiny") -> dict[str, list[str]]:
    """Manager -> the status fields it has, of the present object."""
    found: dict[str, list[str]] = {}
    for entry in mac.get(f"{ISVC}/{name}")["metadata"]["managedFields"]:
        if entry.get("subresource") == "status":
            fields = entry["fieldsV1"].get("f:status", {})
            found.setdefault(entry["manager"], []).extend(sorted(fields))
    return found


def test_beside_the_operator_only_our_own_condition_is_ours(beside: tuple[Mac, Operator, Fleet]) -> None:
    mac, operator, _ = beside
    mac.apply(mac.tiny_model(), service("tiny", endpoint={"port": 9000}))
    mac.ready()
    eventually(lambda: mac.condition("MetalReady").get("status") == "True", what="our condition")
    status = mac.status()
    assert mac.condition("MetalReady")["reason"] == "Serving"
    assert mac.condition("Available")["message"] == "Inference service is ready and serving requests"
    assert status["endpoint"] == "http://tiny.default.svc.cluster.local:9000/v1/chat/completions"
    assert mac.get("/api/v1/namespaces/default/services/tiny")["spec"]["ports"][0]["port"] == 9000
    eventually(lambda: "f:phase" not in writers(mac).get("metal-supervisor", []), what="the phase to be theirs alone")
    # What the operator leaves behind once it is ready is cleared, and stays so.
    eventually(lambda: not mac.status().get("schedulingStatus"), what="the leftover to be cleared")
    assert mac.status().get("phase") == "Ready"
    assert not mac.get(f"{MODELS}/tiny").get("status"), "the Model's status is the operator's"
    eventually(lambda: "operator" in (mac.state / "log" / "controller.log").read_text(), what="the mode to be logged")

    # Nothing happens: nobody writes.
    def quiet() -> bool:
        before = operator.writes, mac.get(f"{ISVC}/tiny")["metadata"]["resourceVersion"]
        time.sleep(3)
        return (operator.writes, mac.get(f"{ISVC}/tiny")["metadata"]["resourceVersion"]) == before

    eventually(quiet, 12, "both to have said what they have to say")


def test_a_bad_edit_beside_the_operator_is_told_in_our_own_condition(beside: tuple[Mac, Operator, Fleet]) -> None:
    mac, _, _ = beside
    mac.apply(mac.tiny_model(), service("tiny"))
    before = mac.ready()
    mac.delete("tiny", MODELS)
    eventually(lambda: "ModelNotFound" in mac.told("tiny"), what="our condition")
    assert (mac.condition("MetalReady")["status"], mac.pid(), mac.slice_ready()) == ("True", before, True)
    mac.apply(mac.tiny_model())
    eventually(lambda: "ModelNotFound" not in mac.told("tiny"), what="our condition again")
    assert mac.pid() == before


def test_a_verdict_that_the_operator_overwrites_is_not_fought_for(beside: tuple[Mac, Operator, Fleet]) -> None:
    mac, operator, _ = beside
    mac.apply(model("tiny", "file:///nonexistent.gguf"), service("tiny"))
    eventually(lambda: mac.condition("MetalReady").get("reason") == "ModelFileMissing", what="our verdict")
    assert "does not exist on this Mac" in mac.condition("MetalReady")["message"]
    eventually(lambda: mac.status().get("schedulingMessage") == WAITING, what="the operator to overwrite it")
    time.sleep(1)
    before = operator.writes
    time.sleep(8)
    assert operator.writes - before <= 1, "two writers would undo each other for ever"
    ours = [each for each in operator.others if each.get("schedulingStatus") == "ModelFileMissing"]
    assert len(ours) <= 1, "at most one assertion a minute"
    assert mac.condition("MetalReady")["reason"] == "ModelFileMissing", "the truth stays where it is ours"


def test_what_stops_beside_the_operator_leaves_no_reason_behind(beside: tuple[Mac, Operator, Fleet]) -> None:
    """The operator takes nothing back once nothing is wanted, and `kubectl get -o wide` shows it for ever."""
    mac, _, _ = beside

    def settled(name: str, phase: str) -> bool:
        status = mac.status(name)
        return status.get("phase") == phase and not status.get("schedulingStatus")

    mac.apply(mac.tiny_model(), service("tiny"), model("lost", "file:///nonexistent.gguf"), service("lost", "lost"))
    mac.ready()
    eventually(lambda: mac.condition("MetalReady", "lost").get("reason") == "ModelFileMissing", what="its verdict")
    eventually(lambda: settled("tiny", "Ready"), what="what the operator left to be cleared")
    mac.kube.request("PATCH", f"{ISVC}/tiny", None, {"spec": {"replicas": 0}}, MERGE)
    mac.kube.request("PATCH", f"{ISVC}/lost", None, {"spec": {"suspend": True}}, MERGE)
    eventually(lambda: mac.condition("MetalReady").get("reason") == "ManuallyScaledToZero", 30, "it to be off")
    eventually(lambda: settled("tiny", "Stopped"), what=f"nothing to be left: {mac.status()}")
    eventually(lambda: settled("lost", "Suspended"), what=f"nothing to be left: {mac.status('lost')}")


def test_a_dotted_name_reaches_the_operator_and_the_cluster(beside: tuple[Mac, Operator, Fleet]) -> None:
    mac, _, _ = beside
    mac.apply(mac.tiny_model(), service("qwen2.5-7b"))
    mac.ready("qwen2.5-7b")
    found = mac.get("/api/v1/namespaces/default/services/qwen2-5-7b")
    owner = found["metadata"]["ownerReferences"][0]
    assert (owner["name"], owner["controller"]) == ("qwen2.5-7b", True)
    assert found["metadata"]["labels"]["llmkube.ai/inference-service"] == "qwen2.5-7b"
    made = mac.maybe("/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/qwen2-5-7b-mac-a")
    assert made is not None
    assert made["metadata"]["labels"]["kubernetes.io/service-name"] == "qwen2-5-7b"

    def nudged() -> str:
        notes = mac.get("/api/v1/namespaces/default/services/qwen2-5-7b")["metadata"]["annotations"]
        return str(notes.get("metal-supervisor.io/changed", ""))

    # The operator finds the owner of a changed Service, but not that of a slice of such a name.
    first = eventually(nudged, what="the Service to be touched once it is ready")
    mac.supervisorctl("stop", "default.qwen2.5-7b")
    eventually(lambda: nudged() != first, what="the Service to be touched once it is not")


def test_an_operator_that_comes_later_is_given_its_part(tmp_path: Path) -> None:
    with embedded_cluster(tmp_path) as kubeconfig, fleet(tmp_path, kubeconfig) as macs:
        mac = macs.add("mac-a")
        mac.apply(mac.tiny_model(), service("tiny"))
        mac.ready()
        eventually(lambda: mac.get(f"{MODELS}/tiny")["status"]["phase"] == "Ready", what="all of it to be ours")
        assert "f:phase" in writers(mac)["metal-supervisor"]
        # A restart of the controller changes nothing of that: a watcher never sees the phase go.
        version = mac.get(f"{ISVC}/tiny")["metadata"]["resourceVersion"]
        mac.supervisorctl("restart", "controller")
        before = json.loads((mac.state / "controller.json").read_text())["at"]
        eventually(lambda: json.loads((mac.state / "controller.json").read_text())["at"] > before + 1, what="a pass")
        assert mac.get(f"{ISVC}/tiny")["metadata"]["resourceVersion"] == version
        written = mac.status()["lastUpdated"]  # an update within the same second would be none
        eventually(lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()) > written, what="a second to pass")
        operator = Operator(macs.kube)
        operator.start()
        try:
            eventually(lambda: writers(mac).get("metal-supervisor") == ["f:conditions"], what="the rest to be let go")
            mac.ready()
            assert mac.condition("MetalReady")["status"] == "True"
        finally:
            operator.end()


def test_a_mode_that_was_set_is_not_guessed(tmp_path: Path) -> None:
    with embedded_cluster(tmp_path) as kubeconfig, fleet(tmp_path, kubeconfig) as macs:
        mac = macs.add("mac-a", "--status-mode", "operator")
        mac.apply(mac.tiny_model(), service("tiny"))
        eventually(lambda: mac.condition("MetalReady").get("status") == "True", 30, "our condition")
        assert "phase" not in mac.status()
        assert macs.ready() == ["mac-a"]


@fault(
    "U148",
    "LLMKube's own agent serves a service, falls silent, and later takes it back",
    happens="left to it; taken once it is silent; given back when we are stopped",
    sees="who serves it, in /status",
    bound="never two Macs' endpoints at a time that anybody left ready",
)
def test_what_another_agent_serves_is_left_to_it_and_taken_once_it_is_silent(tmp_path: Path, figure: Figure) -> None:
    """LLMKube's own agent on another Mac: known by its slice's name, label and heartbeat."""
    with embedded_cluster(tmp_path) as kubeconfig, fleet(tmp_path, kubeconfig) as macs:
        path = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/tiny"

        def beat(stamp: str) -> None:
            macs.kube.apply(
                path,
                {
                    "apiVersion": "discovery.k8s.io/v1",
                    "kind": "EndpointSlice",
                    "metadata": {
                        "name": "tiny",
                        "namespace": "default",
                        "labels": {
                            "kubernetes.io/service-name": "tiny",
                            "llmkube.ai/managed-by": "metal-agent",
                            "llmkube.ai/inference-service": "tiny",
                        },
                        "annotations": {"llmkube.ai/agent-heartbeat": stamp},
                    },
                    "addressType": "IPv4",
                    "endpoints": [{"addresses": ["192.0.2.77"], "conditions": {"ready": True}}],
                    "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
                },
                "metal-agent",
                force=True,
            )

        beat(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
        mac = macs.add("mac-a")
        mac.apply(mac.tiny_model(), service("tiny"), service("other"))
        mac.ready("other")
        eventually(lambda: "192.0.2.77" in str(mac.fetch("/status")[1]), what="/status to say who serves it")
        assert (macs.holder(), mac.pid()) == ("", 0)
        # It falls silent: its slice would keep a dead address alive, so it goes once ours is there.
        beat("2026-01-01T00:00:00Z")
        with figure.timed("taken"):
            mac.supervisorctl("restart", "controller")  # rather than wait for the minute to pass
            mac.ready("tiny")
        eventually(lambda: mac.maybe(path) is None, what="the dead slice to go")
        assert macs.ready() == ["mac-a"]
        # And back: the other agent writes its slice again, and nothing of ours stands in its way.
        mac.stop()
        beat(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
        assert macs.ready() == ["tiny"], "its slice, named as the Service, and none of ours"


def test_a_model_that_is_not_metal_is_nobodys_business_of_ours(beside: tuple[Mac, Operator, Fleet]) -> None:
    mac, _, macs = beside
    mac.apply({**mac.tiny_model(), "spec": {**mac.tiny_model()["spec"], "hardware": {"accelerator": "cuda"}}})
    mac.apply(service("tiny"), mac.tiny_model("metal"), service("other", "metal"))
    eventually(lambda: macs.ready("other"), 30, "the other to serve")
    assert not mac.condition("MetalReady") and macs.holder() == "" and macs.slices() == {}
    # It becomes metal, and ceases to be.
    mac.apply(mac.tiny_model())
    eventually(lambda: macs.ready() == ["mac-a"], 30, "it to serve")
    eventually(lambda: mac.condition("MetalReady").get("status") == "True", what="our condition")
    mac.kube.request("PATCH", f"{MODELS}/tiny", None, {"spec": {"hardware": {"accelerator": "cuda"}}}, MERGE)
    eventually(lambda: mac.pid() == 0 and macs.slices() == {}, 30, "it to be let go")
    eventually(lambda: macs.holder() == "", what="the claim to be given back")
    eventually(lambda: not mac.condition("MetalReady"), what="our condition to be taken back")
