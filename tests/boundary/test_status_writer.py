"""Statuses for definitions that are not ours: older ones of LLMKube, and one without a status."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from metal_supervisor.apiserver import ApiServer, Options
from metal_supervisor.cluster.kube import Kube, KubeError
from metal_supervisor.cluster.manifests import api_path
from metal_supervisor.controller import boot
from metal_supervisor.settings.loader import conf_dir
from metal_supervisor.sidecar.fleetnode import FleetNode
from metal_supervisor.sidecar.status_writer import StatusWriter
from metal_supervisor.spec.types import Json

SERVICE = "default", "tiny"
STATUS: Json = {"phase": "Ready", "mode": "chat", "replicas": 1, "effectivePriority": 5}
DEFINITION: Json = yaml.safe_load((conf_dir() / "crds" / "inferenceservices.yaml").read_text("utf-8"))
Cluster = Callable[[Callable[[Json], object]], Kube]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Starts an API whose InferenceService, of which there is one, is defined as it says."""
    started: list[Any] = []

    def start(change: Callable[[Json], object]) -> Kube:
        definition = copy.deepcopy(DEFINITION)
        change(definition["spec"]["versions"][0])
        path = tmp_path / "crd.yaml"
        path.write_text(yaml.safe_dump(definition))
        api = ApiServer(Options(data_file=tmp_path / "api.db", prefix="/k-test", crd_paths=(path,))).start()
        (tmp_path / "kubeconfig").write_text(boot.kubeconfig(api.url))
        kube = Kube(tmp_path / "kubeconfig")
        started.extend((kube.close, api.stop))
        service = {"metadata": {"name": SERVICE[1]}, "spec": {"modelRef": "m"}}
        whole = {"apiVersion": "inference.llmkube.dev/v1alpha1", "kind": "InferenceService", **service}
        kube.request("POST", api_path("inferenceservices", SERVICE[0]), None, whole)
        return kube

    yield start
    for end in started:
        end()


def test_what_an_older_definition_lacks_is_left_out_and_remembered(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    def older(version: Json) -> None:
        status = version["schema"]["openAPIV3Schema"]["properties"]["status"]
        status.pop("x-kubernetes-preserve-unknown-fields", None)
        for name in ("mode", "effectivePriority"):
            status["properties"].pop(name, None)

    kube = cluster(older)
    writer = StatusWriter(kube)
    found = writer.apply("InferenceService", SERVICE, STATUS)
    assert found["status"] == {"phase": "Ready", "replicas": 1}
    told = [vars(each)["fields"] for each in caplog.records if "older definition" in each.message]
    assert sorted(", ".join(told).split(", ")) == ["effectivePriority", "mode"]
    before = kube.requests
    writer.apply("InferenceService", SERVICE, {**STATUS, "phase": "Failed"})
    assert kube.requests == before + 1


def test_a_definition_without_a_status_is_told_where_a_service_that_is_gone_is_not(cluster: Cluster) -> None:
    kube = cluster(lambda version: version["subresources"].pop("status"))
    with pytest.raises(KubeError, match="InferenceService has no status subresource: kubectl apply") as told:
        StatusWriter(kube).apply("InferenceService", SERVICE, STATUS)
    assert told.value.is_refusal
    kube.request("DELETE", api_path("inferenceservices", *SERVICE))
    with pytest.raises(KubeError) as gone:
        StatusWriter(kube).apply("InferenceService", SERVICE, STATUS)
    assert gone.value.code == 404


def test_a_cluster_without_foreman_is_told_so(cluster: Cluster) -> None:
    with pytest.raises(KubeError, match="knows no FleetNodes") as told:
        FleetNode(cluster(lambda _: None), "mac-a", 64 << 30).write([])
    assert told.value.is_refusal
