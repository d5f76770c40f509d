"""A real API server takes our definitions, examples and objects, from the kubectl that people have."""

from __future__ import annotations

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


def test_a_quota_bounds_the_services_of_a_namespace(cluster: KubeCluster, kubectl: Kubectl, namespace: str) -> None:
    (shown,) = next(each for each in blocks(ROOT / "docs/operations.md") if HERE in each.run_by).shown
    words = shlex.split(shown.command.replace("team-a", namespace))
    kubectl(*words[1:])
    name, _, most = words[words.index("--hard") + 1].partition("=")
    path = f"/api/v1/namespaces/{namespace}/resourcequotas/services"
    eventually(lambda: cluster.request("GET", path)[1].get("status", {}).get("used") == {name: "0"}, 60)
    made = f"/apis/inference.llmkube.dev/v1alpha1/namespaces/{namespace}/inferenceservices"
    specs = [service(f"s{number}") for number in range(int(most) + 1)]
    for each in specs:
        del each["metadata"]["namespace"]
    answers = [cluster.request("POST", made, each) for each in specs]
    assert [code for code, _ in answers] == [*[201] * int(most), 403]
    assert "exceeded quota: services" in answers[-1][1]["message"]


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
