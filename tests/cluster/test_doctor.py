"""The doctor and a real API server: rights as its authorizer sees them, kinds, clock and version as it tells them."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cluster.conftest import Kubectl
from tests.cluster.server import ROOT, KubeCluster
from tests.support.system import eventually, free_ports

RBAC = ROOT / "conf" / "rbac"
Told = dict[str, list[dict[str, str]]]


@pytest.fixture
def login(cluster: KubeCluster, namespace: str, kubectl: Kubectl, tmp_path: Path) -> Path:
    """The kubeconfig of one Mac's account, with the rights that are shipped."""
    for name in ("namespace.yaml", "mac.yaml"):
        text = (RBAC / name).read_text().replace("namespace: llm", f"namespace: {namespace}")
        kubectl("apply", "-f", "-", given=text)
    admin, path = cluster.kubeconfig(tmp_path / "admin", namespace=namespace), tmp_path / "studio"
    command = [
        sys.executable,
        "-m",
        "metal_supervisor",
        "kubeconfig",
        "--service-account",
        "metal-mac-a",
        "--namespace",
        namespace,
        "--from",
        str(admin),
        "--output",
        str(path),
    ]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert made.returncode == 0, made.stdout + made.stderr
    return path


def doctor(login: Path, namespace: str, tmp_path: Path) -> Told:
    command = [
        sys.executable,
        "-m",
        "metal_supervisor",
        "doctor",
        "--json",
        "--state-dir",
        str(tmp_path / "state"),
        "--kubeconfig",
        str(login),
        "--namespace",
        namespace,
        "--port",
        str(free_ports(1)[0]),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    token = login.with_name("studio.token").read_text().strip()
    assert token not in done.stdout + done.stderr
    told: Told = {}
    for each in json.loads(done.stdout)["findings"]:
        told.setdefault(each["check"], []).append(each)
    return told


def denied(told: Told, count: int) -> list[dict[str, str]]:
    """What is missing; none until there is as much as that: the server takes a moment."""
    found = [each for each in told["rights"] if each["status"] != "ok"]
    return found if len(found) >= count else []


def test_the_shipped_rights_are_enough_and_each_that_is_taken_away_is_named(
    login: Path, namespace: str, kubectl: Kubectl, tmp_path: Path
) -> None:
    told = doctor(login, namespace, tmp_path)
    for name in ("kubeconfig", "credential", "api", "rights", "kinds", "clock"):
        assert [each["status"] for each in told[name]] == ["ok"], told[name]
    assert "all 27 rights" in told["rights"][0]["text"], "with the one to renew its own token"
    assert "Kubernetes v1." in told["api"][0]["text"] and "v1alpha1" in told["kinds"][0]["text"]
    assert f"{namespace}/metal-mac-a holds until" in told["credential"][0]["text"]
    assert told["watch"][0]["status"] == "warn", "a single Mac, and no reaper"

    rules = yaml.safe_load((RBAC / "namespace.yaml").read_text())["rules"]
    for rule in rules:
        if rule["resources"] == ["endpointslices"]:
            rule["verbs"].remove("patch")
    kubectl("patch", "role", "metal-supervisor", "--type=merge", "-p", json.dumps({"rules": rules}))
    kubectl("delete", "rolebinding", "metal-mac-a-token")
    main, own = eventually(lambda: denied(doctor(login, namespace, tmp_path), 2), what="both to be in force")
    assert main["status"] == own["status"] == "fail"
    assert main["text"] == f"this Mac may not, in namespace {namespace}: patch endpointslices.discovery.k8s.io"
    assert own["text"] == f"this Mac may not, in namespace {namespace}: create serviceaccounts/token"
    for found in (main, own):  # what it says helps, helps: an administrator's kubectl is the one on PATH here
        sed = shlex.split(found["fix"].removeprefix("as an administrator: ").partition(" | kubectl")[0])
        made = subprocess.run(sed, capture_output=True, text=True, check=True, timeout=60)
        kubectl("apply", "-f", "-", given=made.stdout)
    eventually(lambda: not denied(doctor(login, namespace, tmp_path), 0), what="all to be well again")


def test_an_account_without_any_right_is_told_how_it_is_bound(
    login: Path, namespace: str, kubectl: Kubectl, tmp_path: Path
) -> None:
    kubectl("delete", "rolebinding", "metal-mac-a")
    (found,) = eventually(lambda: denied(doctor(login, namespace, tmp_path), 1), what="it to be in force")
    assert found["status"] == "fail" and "list inferenceservices.inference.llmkube.dev" in found["text"]
    assert "; and, to bind it: sed " in found["fix"] and "mac.yaml" in found["fix"]
