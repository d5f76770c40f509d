"""Next to LLMKube's operator 0.10 on a real API server; `tests.support.operator_sim` stands in for the operator."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.agent import AgentFleet, AgentMac, OwnKube, agents
from tests.cluster.server import OURS, KubeCluster, crd_directory
from tests.support.operator_sim import Operator
from tests.support.system import MODELS, eventually, model, service

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
        eventually(lambda name=name: mac.condition("MetalReady", name).get("reason") == "ModelSourceNotAllowed",
                   what=f"the refusal of {name}")  # fmt: skip
        assert "ModelAttestationRejected" in mac.condition("MetalReady", name)["message"]
        eventually(lambda name=name: mac.status(name).get("schedulingStatus") == "ModelSourceNotAllowed",
                   what=f"the word of {name}")  # fmt: skip
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
