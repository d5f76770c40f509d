"""The condition Ready, written through the embedded API: ours, unless another field manager has it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from metal_supervisor.cluster.kube import Kube
from metal_supervisor.cluster.report import report
from metal_supervisor.sidecar.statuses import MESSAGES_PER_S, NEVER, Statuses, WantedModel, WantedStatus
from metal_supervisor.spec.processes import Observed
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Endpoint, ModelFile, Standing
from tests.support.macs import embedded_cluster
from tests.support.records import a_record
from tests.support.system import ISVC, MODELS, model, service

UP = Observed("default.tiny", 7, True, 1.0, "RUNNING")
THEIRS = {
    "type": "Ready",
    "status": "False",
    "reason": "Theirs",
    "message": "not ours",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}


class Cluster:
    """An InferenceService, and its status as this program writes it."""

    def __init__(self, kube: Kube) -> None:
        self.kube = kube
        uid = kube.apply(f"{ISVC}/tiny", service(), "user")["metadata"]["uid"]
        self.record = a_record(uid=uid, endpoint=Endpoint("tiny", 8080, "/v1", "ClusterIP", None), port=18100)
        self.statuses = Statuses(kube)
        self.statuses.operator = False

    def write(self, observed: Observed | None, **more: Any) -> None:
        record: Record = replace(self.record, **more)
        self.statuses.service(WantedStatus(record, report(record, observed), "192.0.2.1", ""))

    def theirs(self) -> None:
        """Another field manager takes the condition."""
        body = {**service(), "status": {"conditions": [THEIRS]}}
        self.kube.apply(f"{ISVC}/tiny/status", {k: v for k, v in body.items() if k != "spec"}, "theirs", force=True)

    def shown(self, kind: str) -> tuple[str, str, str]:
        found = self.kube.request("GET", f"{ISVC}/tiny")["status"]["conditions"]
        return next((each["status"], each["reason"], each["message"]) for each in found if each["type"] == kind)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with embedded_cluster(tmp_path) as kubeconfig:
        kube = Kube(kubeconfig)
        yield Cluster(kube)
        kube.close()


def test_it_repeats_metal_ready(cluster: Cluster) -> None:
    cluster.write(None)
    assert cluster.shown("Ready") == ("False", "Loading", "see MetalReady")
    cluster.write(UP)
    assert cluster.shown("Ready") == ("True", "Serving", "see MetalReady")


def test_a_service_that_another_mac_serves_is_ready(cluster: Cluster) -> None:
    cluster.write(None, replicas=2, peers_ready=1)
    assert cluster.shown("MetalReady")[:2] == ("False", "Loading")
    assert cluster.shown("Ready")[:2] == ("True", "Serving")


@pytest.mark.parametrize("before", [True, False], ids=["before ours", "after ours"])
def test_that_of_another_field_manager_is_left_alone(cluster: Cluster, before: bool) -> None:
    if not before:
        cluster.write(None)
    cluster.theirs()
    cluster.write(UP)
    assert cluster.shown("Ready") == ("False", "Theirs", "not ours")
    assert cluster.shown("MetalReady")[:2] == ("True", "Serving")
    cluster.write(None)
    assert cluster.shown("Ready") == ("False", "Theirs", "not ours")
    assert cluster.shown("MetalReady")[:2] == ("False", "Loading")


def looking(cluster: Cluster, message: str, state: str = "RUNNING") -> WantedStatus:
    """The status of an engine that loads, with a message."""
    seen = Observed("default.tiny", 7, False, 1.0, state, message)
    return WantedStatus(cluster.record, report(cluster.record, seen), "192.0.2.1", "")


def test_a_message_soon_after_a_write_waits_and_a_reason_does_not(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses, first, second = cluster.statuses, looking(cluster, "it does not listen"), looking(cluster, "it loads")
    monkeypatch.setattr("metal_supervisor.sidecar.statuses.PROGRESS_S", 3600.0)
    statuses.service(first)
    assert statuses.rests(first) and statuses.held_until() == NEVER
    assert statuses.rests(second) and statuses.held_until() < time.monotonic() + 3600
    assert not statuses.rests(looking(cluster, "", "STOPPING")), "for another reason"
    monkeypatch.setattr("metal_supervisor.sidecar.statuses.PROGRESS_S", 0.0)
    assert not statuses.rests(second)
    statuses.service(second)
    assert cluster.shown("MetalReady") == ("False", "Loading", "it loads")
    assert statuses.rests(second) and statuses.held_until() == NEVER


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The only item is the monotonic time of statuses."""
    found = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: found[0], time=time.time)
    monkeypatch.setattr("metal_supervisor.sidecar.statuses.time", clock)
    return found


def test_a_message_that_a_reason_follows_within_a_second_is_never_written(cluster: Cluster, now: list[float]) -> None:
    statuses = cluster.statuses
    statuses.service(looking(cluster, "its turn comes"))
    now[0] += 100.0
    assert statuses.rests(looking(cluster, "it does not listen")) and statuses.held_until() == 1101.0
    now[0] += 0.5
    assert statuses.rests(looking(cluster, "it loads")) and statuses.held_until() == 1101.0, "put off again and again"
    assert not statuses.rests(looking(cluster, "", "STOPPING"))
    now[0] += 0.5
    last = looking(cluster, "it loads")
    assert not statuses.rests(last)
    statuses.service(last)
    now[0] += 100.0
    assert statuses.rests(looking(cluster, "it does not listen")) and statuses.held_until() == 1202.0


def test_a_number_of_replicas_and_the_last_message_of_all_do_not_wait(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(observed: Observed, peers: int, leaving: bool = False) -> WantedStatus:
        record = replace(cluster.record, replicas=3, peers_ready=peers)
        return WantedStatus(record, report(record, observed, leaving=leaving), "192.0.2.1", "")

    monkeypatch.setattr("metal_supervisor.sidecar.statuses.PROGRESS_S", 3600.0)
    cluster.statuses.service(told(UP, 0))
    assert not cluster.statuses.rests(told(UP, 1)), "status.readyReplicas is no message"
    ends = replace(UP, ready=False, state="STOPPING")
    cluster.statuses.service(told(ends, 0))
    assert not cluster.statuses.rests(told(ends, 0, leaving=True)), "no later pass would write it"


def test_many_services_change_no_more_messages_a_second_than_a_few(cluster: Cluster, now: list[float]) -> None:
    statuses = cluster.statuses
    statuses.service(looking(cluster, "it does not listen"))
    for number in range(1, 10 * MESSAGES_PER_S):
        statuses._services["default", f"other-{number}"] = statuses._services[cluster.record.key]
    now[0] += 9.0
    assert statuses.rests(looking(cluster, "it loads"))
    assert statuses.held_until() == 1010.0
    now[0] += 1.5
    assert not statuses.rests(looking(cluster, "it loads"))


@pytest.mark.parametrize("operator", [True, None, False])
def test_a_message_that_waits_is_forgotten_once_all_is_compared_anew(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, operator: bool | None
) -> None:
    monkeypatch.setattr("metal_supervisor.sidecar.statuses.PROGRESS_S", 3600.0)
    statuses, second = cluster.statuses, looking(cluster, "it loads")
    statuses.service(looking(cluster, "it does not listen"))
    assert statuses.rests(second) and statuses.held_until() < NEVER
    statuses.operator = operator
    statuses.look_anew()
    assert not statuses.rests(second) and statuses.held_until() == NEVER, "or the registrar would never rest"


def test_a_mac_that_gets_its_slot_back_before_its_engine_ended_says_so_again(cluster: Cluster) -> None:
    cluster.write(UP)
    moved = replace(cluster.record.verdict, standing=Standing.REMOVING, reason="Moved")
    cluster.write(UP, verdict=moved, claimed=False)
    peer = Statuses(cluster.kube)
    peer.operator = False
    peer.service(WantedStatus(cluster.record, report(cluster.record, None), "192.0.2.2", ""))
    assert cluster.shown("MetalReady")[:2] == ("False", "Loading")
    cluster.write(UP)
    assert cluster.shown("MetalReady")[:2] == ("True", "Serving")


def theirs_of(kind: str, status: str = "True") -> dict[str, str]:
    return {**THEIRS, "type": kind, "status": status}


def test_what_an_operator_that_is_gone_left_in_a_status_goes(cluster: Cluster) -> None:
    """An apply alone leaves it for ever, as it was another's: a served service would seem to wait for its agent."""
    item = cluster.kube.request("GET", f"{ISVC}/tiny")
    kept = [THEIRS, theirs_of("SLODataSourceAvailable", "False")]
    item["status"] = {
        "phase": "Creating",
        "schedulingStatus": "WaitingForMetalAgent",
        "schedulingMessage": "…",
        "queuePosition": 3,
        "waitingFor": "memory",
        "gateway": {"routeReady": True},
        "conditions": [*kept, theirs_of("Progressing"), theirs_of("GPUAvailable"), theirs_of("Available", "False")],
    }
    cluster.kube.request("PUT", f"{ISVC}/tiny/status", {"fieldManager": "manager"}, item)
    cluster.write(UP)
    status = cluster.kube.request("GET", f"{ISVC}/tiny")["status"]
    assert status["gateway"] == {"routeReady": True}
    assert not {"schedulingStatus", "schedulingMessage", "queuePosition", "waitingFor"} & status.keys()
    shown = {each["type"]: each["status"] for each in status["conditions"]}
    assert shown == {
        "Available": "True",
        "Confined": "Unknown",
        "MetalReady": "True",
        "Ready": "False",
        "SLODataSourceAvailable": "False",
        "Suspended": "False",
    }
    before = cluster.kube.requests
    cluster.write(UP)
    assert cluster.kube.requests == before


@pytest.mark.parametrize("operator", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_what_an_engine_runs_on_is_in_the_status_until_it_does_not_say_so(
    cluster: Cluster, operator: bool, known: bool
) -> None:
    found = {"device": "MTL0 (Apple M4)", "layersOffloaded": 33, "layersTotal": 33}
    item = cluster.kube.request("GET", f"{ISVC}/tiny")
    item["status"] = {"acceleration": {"device": "CUDA0 (NVIDIA GB200)", "layersOffloaded": 3, "layersTotal": 3}}
    cluster.kube.request("PUT", f"{ISVC}/tiny/status", {"fieldManager": "manager"}, item)

    def shown() -> object:
        return cluster.kube.request("GET", f"{ISVC}/tiny")["status"].get("acceleration")

    cluster.statuses.operator = operator
    for expected in (found, {}) if known else ({},):
        cluster.write(replace(UP, acceleration=expected))
        assert shown() == (expected or None)
        before = cluster.kube.requests
        cluster.write(replace(UP, acceleration=expected))
        assert cluster.kube.requests == before


def test_what_it_left_in_the_status_of_a_model_goes(cluster: Cluster) -> None:
    made = cluster.kube.apply(f"{MODELS}/tiny", model("tiny", "hf://o/r/m.gguf"), "user")
    made["status"] = {"phase": "Ready", "gguf": {"architecture": "llama"}, "conditions": [theirs_of("Available")]}
    made = cluster.kube.request("PUT", f"{MODELS}/tiny/status", {"fieldManager": "manager"}, made)
    wanted = WantedModel(made["metadata"]["uid"], 1, "hf://o/r/m.gguf", ModelFile("Downloading"))
    cluster.statuses.model(("default", "tiny"), wanted)
    status = cluster.kube.request("GET", f"{MODELS}/tiny")["status"]
    assert [each["type"] for each in status["conditions"]] == ["Progressing"], "it is not here, whatever was said"
    assert (status["phase"], status["gguf"]) == ("Downloading", {"architecture": "llama"})


def test_what_a_header_says_is_told_where_no_operator_has_told_it(cluster: Cluster) -> None:
    """The column ARCH of `kubectl get models -o wide`."""

    def written(name: str, theirs: dict[str, Any]) -> dict[str, Any]:
        made = cluster.kube.apply(f"{MODELS}/{name}", model(name, "/m.gguf"), "user")
        if theirs:
            made["status"] = {"phase": "Ready", "gguf": theirs}
            made = cluster.kube.request("PUT", f"{MODELS}/{name}/status", {"fieldManager": "manager"}, made)
        for architecture in ("llama", "qwen3"):
            file = ModelFile("Ready", "/m.gguf", 10, gguf={"architecture": architecture, "layerCount": 2})
            wanted = WantedModel(made["metadata"]["uid"], 1, "/m.gguf", file)
            cluster.statuses.model(("default", name), wanted)
            cluster.statuses.look_anew()
        found: dict[str, Any] = cluster.kube.request("GET", f"{MODELS}/{name}")["status"]
        assert found["path"] == "/m.gguf"
        return dict(found["gguf"])

    assert written("ours", {}) == {"architecture": "qwen3", "layerCount": 2}
    theirs = {"architecture": "gemma3", "quantization": "Q4_K_M"}
    assert written("theirs", theirs) == theirs


def test_a_condition_that_an_operator_had_too_can_be_dropped(cluster: Cluster) -> None:
    """An apply takes out our fields of it alone: what is left of the condition no server accepts."""
    item = cluster.kube.request("GET", f"{ISVC}/tiny")
    item["status"] = {"phase": "Creating", "conditions": [THEIRS, theirs_of("Progressing")]}
    cluster.kube.request("PUT", f"{ISVC}/tiny/status", {"fieldManager": "manager"}, item)
    cluster.write(None)
    assert cluster.shown("Progressing")[0] == "True"
    cluster.write(UP)
    status = cluster.kube.request("GET", f"{ISVC}/tiny")["status"]
    assert status["phase"] == "Ready" and "Progressing" not in {each["type"] for each in status["conditions"]}
    assert cluster.shown("Ready") == ("False", "Theirs", "not ours")


def test_an_operator_that_comes_back_and_words_a_condition_otherwise_does_not_stop_ours(cluster: Cluster) -> None:
    cluster.write(UP)
    item = cluster.kube.request("GET", f"{ISVC}/tiny")
    for each in item["status"]["conditions"]:
        if each["type"] == "Suspended":
            each["message"] = "workload is not suspended"
    cluster.kube.request("PUT", f"{ISVC}/tiny/status", {"fieldManager": "manager"}, item)
    cluster.statuses.operator = True
    cluster.write(None)
    assert cluster.shown("MetalReady")[:2] == ("False", "Loading")
