"""The whole agent beside a real API server: what kubectl shows of it, and what outages do to it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor.cluster.kube import KubeError
from tests.cluster.agent import AgentFleet, AgentMac, Sampler, agents
from tests.cluster.server import FIELD, OURS, KubeCluster, crd_directory
from tests.support.macs import LEASES, lose
from tests.support.system import ISVC, MODELS, SERVICES, SLICES, eventually, kill, service

TTL_S = 4.0
WRITES = 1000
"""Distance of an older copy in versions: more than a restarted API server writes by itself."""
SETS = [OURS, FIELD] if FIELD.is_dir() else [OURS]
TINY = """
apiVersion: inference.llmkube.dev/v1alpha1
kind: Model
metadata: {{name: {name}}}
spec: {{source: "file://{path}", format: gguf, hardware: {{accelerator: metal}}}}
---
apiVersion: inference.llmkube.dev/v1alpha1
kind: InferenceService
metadata: {{name: {name}}}
spec: {{modelRef: {name}, contextSize: 512, extraArgs: ["--threads", "1"], endpoint: {{port: 9000}}}}
"""
Object = dict[str, Any]


@pytest.fixture(scope="module")
def mac(cluster: KubeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentMac]:
    """One Mac in a namespace of its own; each test has a service of its own."""
    name = "agent"
    assert cluster.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})[0] == 201
    with agents(tmp_path_factory.mktemp("agent"), cluster, name, "--lease-duration", "10") as fleet:
        found = fleet.add("mac-a")
        found.apply(found.tiny_model())
        yield found


@pytest.fixture(params=SETS, ids=lambda path: "ours" if path == OURS else "field")
def definitions(request: pytest.FixtureRequest, cluster: KubeCluster) -> Iterator[Path]:
    """The server with one of the two sets of definitions, exchanged while the agent watches."""
    cluster.apply_crds(request.param)
    yield request.param
    cluster.apply_crds(crd_directory())


def endpoint(item: Object) -> Object:
    return dict(item["endpoints"][0])


def test_an_applied_model_is_ready_for_kubectl_and_its_objects_are_as_designed(
    mac: AgentMac, definitions: Path
) -> None:
    name = f"shown-{'ours' if definitions == OURS else 'field'}"
    mac.kubectl("apply", "--validate=strict", "-f", "-", stdin=TINY.format(name=name, path=mac.tiny))
    mac.kubectl("wait", "isvc", name, "--for=jsonpath={.status.phase}=Ready", "--timeout=50s")
    mac.kubectl("wait", "isvc", name, "--for=condition=Available", "--timeout=20s")
    mac.kubectl("wait", "isvc", name, "--for=condition=Ready", "--timeout=20s")
    mac.kubectl("wait", "model", name, "--for=jsonpath={.status.phase}=Ready", "--timeout=20s")
    row = mac.kubectl("get", "isvc", name, "--no-headers").split()
    assert row[:3] == [name, "Ready", name]

    owned = mac.get(f"{ISVC}/{name}")
    uid = owned["metadata"]["uid"]
    url = f"http://{name}.{mac.namespace}.svc.cluster.local:9000/v1/chat/completions"
    made = mac.get(f"{SERVICES}/{name}")
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"], owner["controller"]) == ("InferenceService", name, uid, True)
    assert not made["spec"].get("selector") and made["spec"]["clusterIP"] and made["spec"]["type"] == "ClusterIP"
    (port,) = made["spec"]["ports"]
    assert (port["name"], port["port"], port["targetPort"], port["protocol"]) == ("http", 9000, "http", "TCP")

    piece = mac.get(f"{SLICES}/{name}-mac-a")
    assert (
        piece["metadata"]["labels"].items()
        >= {
            "kubernetes.io/service-name": name,
            "endpointslice.kubernetes.io/managed-by": "metal-supervisor",
            "metal-supervisor.io/node": "mac-a",
            "llmkube.dev/accelerator": "metal",
            "llmkube.ai/inference-service": name,
            "llmkube.ai/managed-by": "metal-agent",
            "app.kubernetes.io/managed-by": "metal-supervisor",
        }.items()
    )
    (owner,) = piece["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("InferenceService", uid)
    assert len(piece["endpoints"]) == 1 and endpoint(piece)["addresses"] == ["192.0.2.11"]
    assert endpoint(piece)["conditions"] == {"ready": True, "serving": True, "terminating": False}
    assert "targetRef" not in endpoint(piece) and "nodeName" not in endpoint(piece)
    (port,) = piece["ports"]
    assert (port["name"], port["protocol"]) == ("http", "TCP") and mac.get_engine(port["port"]) == 200
    assert piece["metadata"]["annotations"]["llmkube.ai/agent-heartbeat"]

    # Nothing of what we write was pruned, and what is there is valid.
    status = owned["status"]
    assert status.keys() == {
        "phase",
        "mode",
        "modelReady",
        "readyReplicas",
        "replicas",
        "desiredReplicas",
        "effectivePriority",
        "conditions",
        "lastUpdated",
        "endpoint",
    }
    assert status["endpoint"] == url and (status["readyReplicas"], status["desiredReplicas"]) == (1, 1)
    types = {"Available", "Confined", "MetalReady", "Ready", "Suspended"}
    assert {each["type"] for each in status["conditions"]} == types
    for each in status["conditions"]:
        assert each.keys() == {"type", "status", "reason", "message", "observedGeneration", "lastTransitionTime"}
    assert mac.get(f"{MODELS}/{name}")["status"].keys() == {
        "phase",
        "acceleratorReady",
        "cacheKey",
        "conditions",
        "lastUpdated",
        "path",
        "size",
        "gguf",
    }
    for path in (f"{ISVC}/{name}", f"{MODELS}/{name}"):
        query = {"dryRun": "All", "fieldValidation": "Strict"}
        mac.kube.request("PUT", f"{path}/status", query, mac.get(path))

    eventually(lambda: "Serving" in mac.kubectl("describe", "isvc", name), what="the Event")
    mac.kubectl("delete", "isvc,model", name)
    eventually(lambda: mac.pid(name) == 0, 30, "the engine to end")


def test_the_node_lease_is_renewed_and_the_claim_is_this_macs(mac: AgentMac) -> None:
    mac.apply(service("leased", "tiny"))
    mac.ready("leased", 60)
    lease = mac.get(f"{LEASES}/metal-mac-a")
    assert (lease["spec"]["holderIdentity"], lease["spec"]["leaseDurationSeconds"]) == ("mac-a", 10)
    assert lease["metadata"]["labels"]["metal-supervisor.io/kind"] == "node"
    assert lease["metadata"]["annotations"]["metal-supervisor.io/address"] == "192.0.2.11"
    renewed = lease["spec"]["renewTime"]
    eventually(lambda: mac.get(f"{LEASES}/metal-mac-a")["spec"]["renewTime"] > renewed, 30, "a renewal")
    claim = mac.get(f"{LEASES}/isvc-leased-0")
    assert claim["spec"]["holderIdentity"] == "mac-a"
    assert claim["metadata"]["ownerReferences"][0]["uid"] == mac.get(f"{ISVC}/leased")["metadata"]["uid"]


def test_a_crash_takes_the_endpoint_out_and_puts_it_back_and_a_deletion_leaves_nothing(mac: AgentMac) -> None:
    mac.apply(service("crashed", "tiny"))
    pid = mac.ready("crashed", 60)
    eventually(lambda: mac.slice_ready("crashed"), what="the endpoint")
    before = mac.get(SLICES)["metadata"]["resourceVersion"]
    kill(pid)
    eventually(lambda: mac.pid("crashed") not in (0, pid), 60, "a new engine")

    def told() -> list[bool]:
        found = mac.kube.changes(SLICES, "crashed-mac-a", before)
        states = [endpoint(each)["conditions"]["ready"] for each in found]
        return states if states and states[-1] else []

    states = eventually(told, 60, "the endpoint to be back")
    assert states[0] is False and states[-1] is True
    text = eventually(
        lambda: found if "Crashed" in (found := mac.kubectl("describe", "isvc", "crashed")) else "", what="the Event"
    )
    assert re.search(r"Warning +Crashed +", text) and "SIGKILL" in text
    mac.ready("crashed", 60)

    pid = mac.pid("crashed")
    mac.kubectl("delete", "isvc", "crashed")
    eventually(lambda: mac.pid("crashed") == 0, 30, "the engine to end")
    assert pid not in mac.engines()
    for path in (f"{SLICES}/crashed-mac-a", f"{SERVICES}/crashed", f"{LEASES}/isvc-crashed-0"):
        eventually(lambda path=path: mac.maybe(path) is None, 60, f"{path} to be collected")


def test_an_engine_outlives_its_model_and_its_return(mac: AgentMac) -> None:
    mac.apply(mac.tiny_model("passing"), service("guest", "passing"))
    before = mac.ready("guest", 60)
    eventually(lambda: mac.slice_ready("guest"), what="the endpoint")
    mac.kubectl("delete", "model", "passing")
    mac.kubectl("wait", "isvc", "guest", "--for=condition=Degraded", "--timeout=50s")
    assert mac.condition("Degraded", "guest")["reason"] == "ModelNotFound"
    assert (mac.status("guest")["phase"], mac.slice_ready("guest"), mac.pid("guest")) == ("Ready", True, before)
    mac.apply(mac.tiny_model("passing"))
    eventually(lambda: not mac.condition("Degraded", "guest"), 50, "Degraded to be gone")
    assert mac.ready("guest") == before
    mac.kubectl("patch", "isvc", "guest", "--type=merge", "-p", '{"spec": {"modelRef": "nope"}}')
    mac.kubectl("wait", "isvc", "guest", "--for=condition=Degraded", "--timeout=50s")
    mac.kubectl("delete", "isvc", "guest")
    eventually(lambda: mac.pid("guest") == 0, 30, "the engine to end")


def test_what_a_spec_says_of_its_endpoint_is_honoured_and_may_change(mac: AgentMac) -> None:
    mac.apply(service("ported", "tiny", endpoint={"port": 9001, "type": "NodePort", "nodePort": 31234}))
    pid = mac.ready("ported", 60)
    made = mac.get(f"{SERVICES}/ported")["spec"]
    assert (made["type"], made["ports"][0]["port"], made["ports"][0]["nodePort"]) == ("NodePort", 9001, 31234)
    mac.apply(service("ported", "tiny", endpoint={"port": 9002}))

    def changed() -> bool:
        now = mac.get(f"{SERVICES}/ported")["spec"]
        port = now["ports"][0]
        return (now["type"], port["port"], port.get("nodePort")) == ("ClusterIP", 9002, None)

    eventually(changed, 30, f"the Service to follow; {mac.report()['services']}")
    assert mac.get(f"{SERVICES}/ported")["spec"]["clusterIP"] == made["clusterIP"]
    eventually(lambda: ":9002/" in mac.status("ported")["endpoint"], what="the status to follow")
    assert mac.pid("ported") == pid, "an endpoint's port is no reason to load a model again"


def test_a_service_of_somebody_else_is_reported_and_not_touched(mac: AgentMac) -> None:
    theirs = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "theirs", "namespace": "default"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80}]},
    }
    mac.apply(theirs)
    before = mac.get(f"{SERVICES}/theirs")
    mac.apply(service("theirs", "tiny"))
    eventually(lambda: mac.condition("MetalReady", "theirs").get("reason") == "EndpointNameConflict", 60, "the refusal")
    eventually(lambda: "EndpointNameConflict" in mac.kubectl("describe", "isvc", "theirs"), what="the Event")
    assert mac.get(f"{SERVICES}/theirs") == before
    assert mac.maybe(f"{SLICES}/theirs-mac-a") is None
    mac.delete("theirs")
    eventually(lambda: mac.pid("theirs") == 0, 30, "the engine to end")
    assert mac.get(f"{SERVICES}/theirs") == before


def test_a_restart_of_the_api_server_changes_no_pid_and_loses_no_change(mac: AgentMac, cluster: KubeCluster) -> None:
    mac.apply(service("steady", "tiny"))
    pid = mac.ready("steady", 60)
    cluster.stop_apiserver()
    try:
        eventually(lambda: mac.report()["cluster"]["error"], 60, "the outage to be noticed")
        assert mac.health()[0] == 200 and mac.pid("steady") == pid
    finally:
        cluster.start_apiserver()
    mac.kube.close()
    mac.apply(service("after", "tiny"))
    mac.ready("after", 60)
    assert mac.pid("steady") == pid
    eventually(lambda: not mac.report()["cluster"]["error"], 60, "the outage to be over")
    mac.delete("after")
    eventually(lambda: mac.pid("after") == 0, 30, "the engine to end")


def test_history_that_is_forgotten_loses_nothing(mac: AgentMac, cluster: KubeCluster) -> None:
    """The agent is away while one service goes and another comes, and what it missed cannot be told any more."""
    mac.apply(service("steady", "tiny"), service("goes", "tiny"))
    pid = mac.ready("steady", 60)
    mac.ready("goes", 60)
    version = mac.get(ISVC)["metadata"]["resourceVersion"]
    controller = mac.own_pid("controller")
    os.kill(controller, signal.SIGSTOP)
    try:
        mac.delete("goes")
        mac.apply(service("comes", "tiny"))
        cluster.compact_etcd()
        cluster.stop_apiserver()
        cluster.start_apiserver()  # whose watch cache begins now
        mac.kube.close()
        # At first it may have no answer at all; but what it once forgot it does not remember.
        eventually(lambda: gone(mac, version), 60, "the server not to know what was")
    finally:
        os.kill(controller, signal.SIGCONT)
    mac.ready("comes", 60)
    eventually(lambda: mac.pid("goes") == 0, 60, "what was deleted meanwhile to end")
    assert (mac.pid("steady"), mac.own_pid("controller")) == (pid, controller)


def test_an_etcd_restored_from_an_older_copy_ends_no_engine_and_is_followed(
    mac: AgentMac, cluster: KubeCluster, tmp_path: Path
) -> None:
    mac.apply(service("kept", "tiny"))
    mac.ready("kept", 60)
    with cluster.stopped() as data:
        older = shutil.copytree(data, tmp_path / "older")
    mac.kube.close()
    mac.apply(service("newer", "tiny"))
    pids = {name: mac.ready(name, 60) for name in ("kept", "newer")}
    for number in range(WRITES):
        body = {"metadata": {"annotations": {"number": str(number)}}}
        assert cluster.request("PATCH", "/api/v1/namespaces/default", body, "application/merge-patch+json")[0] == 200
    mac.kubectl("annotate", "isvc", "kept", "seen=last")
    last = mac.get(f"{ISVC}/kept")["metadata"]["resourceVersion"]
    report = mac.state / "controller.json"
    eventually(lambda: int(json.loads(report.read_text())["cluster"]["newest"]) >= int(last), 60, "the annotation")
    streams = [mac.stream(name).last() for name in pids]
    with cluster.stopped() as data:
        shutil.rmtree(data)
        older.rename(data)
    mac.kube.close()
    mac.apply(service("fresh", "tiny"))
    mac.ready("fresh", 60)
    assert mac.maybe(f"{ISVC}/newer") is None
    record = mac.state / "records" / f"{mac.namespace}.newer.json"
    eventually(lambda: "MissingAfterRestore" in record.read_text("utf-8"), 60, "the warning")
    mac.apply(service("newer", "tiny"))
    mac.ready("newer", 60)
    eventually(lambda: "MissingAfterRestore" not in record.read_text("utf-8"), 60, "the end of the warning")
    assert {name: mac.pid(name) for name in pids} == pids
    assert all(each.completed() for each in streams), [each.error for each in streams]
    for name in ("kept", "newer", "fresh"):
        mac.delete(name)
        eventually(lambda name=name: mac.pid(name) == 0, 60, f"{name} to end")


def gone(mac: AgentMac, version: str) -> bool:
    """Whether a watch from a version is answered with 410."""
    query = {"watch": "true", "resourceVersion": version, "timeoutSeconds": 2}
    try:
        answer = mac.kube.stream(mac.kube.own(ISVC), query)
    except KubeError as error:
        return error.code == 410
    try:
        return b'"code":410' in answer.data
    finally:
        answer.close()


# ── several Macs ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def macs(cluster: KubeCluster, namespace: str, tmp_path: Path) -> Iterator[AgentFleet]:
    """Three Macs that notice a silent one within seconds."""
    with agents(tmp_path, cluster, namespace, "--lease-duration", str(TTL_S)) as found:
        for name in ("mac-a", "mac-b", "mac-c"):
            found.add(name)
        yield found


def test_the_slots_of_a_mac_that_loses_power_move_and_are_not_served_twice(macs: AgentFleet) -> None:
    first, names = macs.macs[0], ("tiny", "other", "third")
    sampler = Sampler(macs.kube)
    first.apply(first.tiny_model(), *(service(name) for name in names))
    eventually(lambda: all(macs.ready(name) == [macs.holder(name)] for name in names), 60, "all to serve")
    victim = macs.holder()
    theirs = [name for name in names if macs.holder(name) == victim]
    others = {name: macs.holder(name) for name in names if name not in theirs}
    gone_at = lose(macs.mac(victim))
    for name in theirs:
        eventually(lambda name=name: macs.holder(name) not in ("", victim), 60, f"{name} to move")
    moved_s = time.monotonic() - gone_at
    for name in theirs:
        eventually(lambda name=name: macs.ready(name) == [macs.holder(name)], 60, f"{name} to serve elsewhere only")
    served_s = time.monotonic() - gone_at
    assert {name: macs.holder(name) for name in others} == others
    macs.mac(victim).start()
    for name in names:
        eventually(lambda name=name: macs.ready(name) == [macs.holder(name)], 60, "one endpoint")
    for name in theirs:
        assert macs.holder(name) != victim
        eventually(lambda name=name: macs.mac(victim).pid(name) == 0, 60, "no second engine")
    overlap_s = sampler.end()
    print(
        f"slots moved after {moved_s:.1f} s, served elsewhere only after {served_s:.1f} s (term {TTL_S} s); "
        f"longest time with two ready endpoints {overlap_s:.2f} s in {sampler.samples} looks"
    )
    assert sampler.samples > 20 and overlap_s <= TTL_S + 10
