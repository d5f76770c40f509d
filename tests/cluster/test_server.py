"""A real API server takes our definitions, examples and objects, from the kubectl that people have."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.conftest import Kubectl
from tests.cluster.server import FIELD, OURS, ROOT, KubeCluster, crd_directory
from tests.support.doc_commands import blocks
from tests.support.system import eventually, service

HERE = "tests/cluster/test_server.py"
EXAMPLES = sorted([ROOT / "tools" / "tiny.yaml", *(ROOT / "conf" / "examples").rglob("*.yaml")])
SETS = [OURS, FIELD] if FIELD.is_dir() else [OURS]


@pytest.fixture(params=SETS, ids=lambda path: "ours" if path == OURS else "field")
def definitions(request: pytest.FixtureRequest, cluster: KubeCluster) -> Any:
    """The server with one of the two sets of definitions; afterwards it has what it had."""
    yield cluster.apply_crds(request.param)
    cluster.apply_crds(crd_directory())


def test_both_sets_of_definitions_are_established(cluster: KubeCluster, definitions: list[str]) -> None:
    assert {"inferenceservices.inference.llmkube.dev", "models.inference.llmkube.dev"} <= set(definitions)
    for name in definitions:
        crd = cluster.request("GET", f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}")[1]
        conditions = {c["type"]: c["status"] for c in crd["status"]["conditions"]}
        assert conditions["Established"] == "True" and conditions["NamesAccepted"] == "True"
        assert "NonStructuralSchema" not in conditions


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_valid_and_does_not_change_by_itself(
    cluster: KubeCluster, definitions: list[str], kubectl: Kubectl, namespace: str, example: Path
) -> None:
    text = example.read_text("utf-8").replace("namespace: default", f"namespace: {namespace}")
    kinds = [document["kind"] for document in yaml.safe_load_all(text) if document]
    strict = ("apply", "--validate=strict", "-f", "-")
    served = cluster.request("GET", "/apis/inference.llmkube.dev/v1alpha1")[1]["resources"]
    unknown = set(kinds) - {resource["kind"] for resource in served}
    if unknown:
        assert f'no matches for kind "{unknown.pop()}"' in kubectl(*strict, given=text, code=1).stderr
        return
    assert "created" in kubectl(*strict, given=text).stdout

    def versions() -> str:
        return kubectl("get", "-f", "-", "-o", "jsonpath={.items[*].metadata.resourceVersion}", given=text).stdout

    # Not "unchanged": kubectl says "configured" wherever a list has got defaults in its items.
    before = versions()
    kubectl(*strict, given=text)
    assert versions() == before and len(before.split()) == len(kinds)
    assert kubectl("diff", "-f", "-", given=text).stdout == ""
    kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", given=text)
    assert kubectl("delete", "-f", "-", given=text).stdout.count("deleted") == len(kinds)


def limited(kubectl: Kubectl, namespace: str) -> dict[str, Any]:
    """The example limits of docs/operations.md, applied to a namespace; its objects by kind."""
    (shown,) = next(each for each in blocks(ROOT / "docs/operations.md") if HERE in each.run_by).shown
    *command, path = shlex.split(shown.command)
    assert command == ["kubectl", "apply", "-f"]
    text = (ROOT / path).read_text("utf-8").replace("team-a", namespace)
    kubectl("apply", "-f", "-", given=text)
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def created(cluster: KubeCluster, namespace: str, name: str, **spec: Any) -> tuple[int, Any]:
    """The answer to a new InferenceService."""
    body = service(name, **spec)
    del body["metadata"]["namespace"]
    return cluster.request(
        "POST", f"/apis/inference.llmkube.dev/v1alpha1/namespaces/{namespace}/inferenceservices", body
    )


def test_a_quota_bounds_the_services_of_a_namespace(cluster: KubeCluster, kubectl: Kubectl, namespace: str) -> None:
    hard = limited(kubectl, namespace)["ResourceQuota"]["spec"]["hard"]
    path = f"/api/v1/namespaces/{namespace}/resourcequotas/metal-supervisor"
    eventually(lambda: cluster.request("GET", path)[1].get("status", {}).get("used") == dict.fromkeys(hard, "0"), 60)
    most = int(hard["count/inferenceservices.inference.llmkube.dev"])
    answers = [created(cluster, namespace, f"s{number}") for number in range(most + 1)]
    assert [code for code, _ in answers] == [*[201] * most, 403]
    assert "exceeded quota: metal-supervisor" in answers[-1][1]["message"]


def test_a_policy_bounds_the_priority_of_a_namespace(cluster: KubeCluster, kubectl: Kubectl, namespace: str) -> None:
    assert created(cluster, namespace, "old", priority="critical")[0] == 201
    (rule,) = limited(kubectl, namespace)["ValidatingAdmissionPolicy"]["spec"]["validations"]
    numbers = itertools.count()

    def refused() -> str:
        code, answer = created(cluster, namespace, f"s{next(numbers)}", priority="high")
        return str(answer["message"]) if code == 422 else ""

    assert rule["message"] in eventually(refused, 60, "the policy to be in force")
    for spec in ({}, {"priority": "normal"}, {"priority": "batch"}):
        assert created(cluster, namespace, f"s{next(numbers)}", **spec)[0] == 201
    kubectl("label", "isvc", "old", "team=a")
    patch = json.dumps({"spec": {"priority": "high"}})
    assert rule["message"] in kubectl("patch", "isvc", "old", "--type=merge", "-p", patch, code=1).stderr
    assert created(cluster, "default", f"of-{namespace}", priority="critical")[0] == 201, "another namespace"
    kubectl("delete", "-n", "default", "isvc", f"of-{namespace}")


def test_kubectl_shows_and_explains_our_kinds(definitions: list[str], kubectl: Kubectl, namespace: str) -> None:
    text = (ROOT / "tools" / "tiny.yaml").read_text("utf-8").replace("namespace: default", f"namespace: {namespace}")
    kubectl("apply", "-f", "-", given=text)
    header, row = kubectl("get", "isvc", "tiny").stdout.splitlines()
    assert header.split()[:3] == ["NAME", "PHASE", "MODEL"] and row.split()[0] == "tiny"
    described = kubectl("describe", "isvc", "tiny").stdout
    assert "Model Ref:" in described and "Events:" in described
    assert "modelRef\t<string>" in kubectl("explain", "isvc.spec").stdout
    changed = text.replace("contextSize: 512", "contextSize: 1024")
    assert "+  contextSize: 1024" in kubectl("diff", "-f", "-", given=changed, code=1).stdout
    assert "scaled" in kubectl("scale", "isvc", "tiny", "--replicas=0").stdout


def test_a_service_account_may_do_what_a_role_says(cluster: KubeCluster, namespace: str, tmp_path: Path) -> None:
    token = cluster.service_account_token(namespace, "mac")
    config = cluster.kubeconfig(tmp_path / "mac", token=token, namespace=namespace)
    command = ["kubectl", "--kubeconfig", str(config), "--cache-dir", str(tmp_path / "cache"), "get", "leases"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert f"system:serviceaccount:{namespace}:mac" in refused.stderr and refused.returncode == 1
    roles = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    rules = [{"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["list"]}]
    assert cluster.request("POST", f"{roles}/roles", {"metadata": {"name": "mac"}, "rules": rules})[0] == 201
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "mac"}
    subject = {"kind": "ServiceAccount", "name": "mac", "namespace": namespace}
    binding = {"metadata": {"name": "mac"}, "roleRef": reference, "subjects": [subject]}
    assert cluster.request("POST", f"{roles}/rolebindings", binding)[0] == 201

    def allowed() -> bool:
        return subprocess.run(command, capture_output=True, timeout=30).returncode == 0

    eventually(allowed, 10, "the role is in force")


def test_a_restart_keeps_the_data(cluster: KubeCluster, namespace: str) -> None:
    cluster.stop_apiserver()
    with pytest.raises(ConnectionRefusedError):
        cluster.request("GET", "/readyz")
    cluster.start_apiserver()
    code, found = cluster.request("GET", f"/api/v1/namespaces/{namespace}")
    assert code == 200, found


def test_a_killed_starter_leaves_no_server(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.kube.kube_cluster", "run"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as run:
        assert run.stdout
        config = json.loads(Path(run.stdout.readline().strip()).read_text())
        port = int(config["clusters"][0]["cluster"]["server"].rpartition(":")[2])
        socket.create_connection(("127.0.0.1", port), 5).close()
        run.kill()

    def refused() -> bool:
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", port)) != 0

    eventually(refused, 10, "the server has gone")
