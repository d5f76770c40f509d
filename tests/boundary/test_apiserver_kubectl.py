"""The unmodified kubectl works against the embedded API, and its messages are the ones users know."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from pathlib import Path

from apiserver_support import ISVCS, TIMEOUT_S, WIDGETS, Client, Kubectl, condition, isvc, lease, widget

from metal_supervisor.apiserver import ApiServer

MANIFEST = json.dumps(isvc(replicas=1))
SERVICE = """
apiVersion: v1
kind: Service
metadata: {name: phi}
spec: {ports: [{name: http, port: 8080, targetPort: http}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: phi-mac, labels: {kubernetes.io/service-name: phi}}
addressType: IPv4
endpoints: [{addresses: ["10.1.2.3"], conditions: {ready: true}}]
ports: [{name: http, port: 18101}]
"""


def test_apply_creates_then_leaves_alone_then_configures(kubectl: Kubectl) -> None:
    assert "created" in kubectl("apply", "-f", "-", given=MANIFEST).stdout
    assert "unchanged" in kubectl("apply", "-f", "-", given=MANIFEST).stdout
    assert kubectl("diff", "-f", "-", given=MANIFEST).stdout == ""
    changed = json.dumps(isvc(replicas=2))
    assert "+  replicas: 2" in kubectl("diff", "-f", "-", given=changed, code=1).stdout
    assert "configured" in kubectl("apply", "-f", "-", given=changed).stdout
    assert kubectl("get", "isvc", "phi", "-o", "jsonpath={.spec.replicas}").stdout == "2"


def test_get_prints_the_columns_of_the_crd_and_ages_like_kubectl(kubectl: Kubectl) -> None:
    kubectl("apply", "-f", "-", given=MANIFEST)
    lines = kubectl("get", "isvc").stdout.splitlines()
    assert lines[0].split()[0] == "NAME" and lines[0].split()[-1] == "AGE"
    assert re.search(r"^phi\s.*\sphi\s.*\d+s$", lines[1])
    assert kubectl("get", "isvc", "-o", "name").stdout.strip() == "inferenceservice.inference.llmkube.dev/phi"
    assert kubectl("get", "isvc", "-l", "a notin (b)", "-A", "-o", "name").stdout
    assert kubectl("get", "isvc", "-l", "a in (b)", "-o", "name").stdout == ""
    assert "not found" in kubectl("get", "isvc", "nope", code=1).stderr
    assert "field label not supported" in kubectl("get", "isvc", "--field-selector=spec.x=1", code=1).stderr


def test_wait_returns_when_the_status_is_written(kubectl: Kubectl, client: Client) -> None:
    kubectl("apply", "-f", "-", given=MANIFEST)
    assert client.merge(f"{ISVCS}/phi/status", {"status": {"phase": "Ready"}}).code == 200
    wait = ("wait", "isvc/phi", "--for=jsonpath={.status.phase}=Ready", "--timeout=5s")
    assert "condition met" in kubectl(*wait).stdout
    crd = "crd/inferenceservices.inference.llmkube.dev"
    assert "condition met" in kubectl("wait", crd, "--for=condition=Established", "--timeout=5s").stdout


def test_get_watch_prints_a_line_for_every_change(api: ApiServer, kubectl: Kubectl, tmp_path: Path) -> None:
    kubectl("apply", "-f", "-", given=MANIFEST)
    command = ["kubectl", "--kubeconfig", str(tmp_path / "kubeconfig"), "--cache-dir", str(tmp_path / "cache")]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    with subprocess.Popen(
        [*command, "get", "isvc", "-w", "-L", "shown"], stdout=subprocess.PIPE, text=True, env=environment
    ) as watching:
        assert watching.stdout
        assert watching.stdout.readline().startswith("NAME")
        assert watching.stdout.readline().startswith("phi")
        kubectl("label", "isvc", "phi", "shown=yes")
        assert watching.stdout.readline().rstrip().endswith("yes")
        api.kernel.watcher.close_all()
        watching.terminate()


def test_describe_shows_events_of_the_newer_group(kubectl: Kubectl) -> None:
    kubectl("apply", "-f", "-", given=MANIFEST)
    uid = kubectl("get", "isvc", "phi", "-o", "jsonpath={.metadata.uid}").stdout
    event = {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": "phi.1", "namespace": "default"},
        "regarding": {
            "apiVersion": "inference.llmkube.dev/v1alpha1",
            "kind": "InferenceService",
            "namespace": "default",
            "name": "phi",
            "uid": uid,
        },
        "reason": "Started",
        "action": "Start",
        "type": "Normal",
        "note": "It runs now.",
        "reportingController": "metal",
        "reportingInstance": "mac",
        "eventTime": "2026-01-01T00:00:00.000000Z",
        "series": {"count": 2, "lastObservedTime": "2026-01-01T00:01:00.000000Z"},
    }
    kubectl("create", "-f", "-", given=json.dumps(event))
    assert re.search(r"Normal\s+Started\s+.*x2 over.*It runs now\.", kubectl("describe", "isvc", "phi").stdout)
    assert "inferenceservice/phi" in kubectl("get", "events").stdout
    assert "It runs now." in kubectl("events", "--for", "inferenceservice/phi").stdout


def test_service_and_slice_appear_as_users_know_them(kubectl: Kubectl) -> None:
    kubectl("apply", "-f", "-", given=SERVICE)
    assert re.search(r"phi\s+ClusterIP\s+10\.96\.\d+\.\d+\s+<none>\s+8080/TCP", kubectl("get", "svc").stdout)
    assert re.search(r"phi-mac\s+IPv4\s+18101\s+10\.1\.2\.3", kubectl("get", "endpointslices").stdout)
    assert re.search(r"Endpoints:\s+10\.1\.2\.3:18101", kubectl("describe", "svc", "phi").stdout)
    assert "phi" in kubectl("get", "all").stdout
    kubectl("patch", "svc", "phi", "-p", '{"spec":{"ports":[{"port":8080,"targetPort":99}]}}')
    ports = json.loads(kubectl("get", "svc", "phi", "-o", "jsonpath={.spec.ports}").stdout)
    assert ports == [{"name": "http", "port": 8080, "protocol": "TCP", "targetPort": 99}]


def test_explain_knows_the_fields(kubectl: Kubectl) -> None:
    text = kubectl("explain", "isvc.spec").stdout
    assert "KIND:       InferenceService" in text and "modelRef\t<string>" in text
    assert "labels\t<map[string]string>" in kubectl("explain", "svc.metadata").stdout


def test_scale_reaches_the_spec(kubectl: Kubectl) -> None:
    kubectl("apply", "-f", "-", given=MANIFEST)
    assert "scaled" in kubectl("scale", "isvc", "phi", "--replicas=0").stdout
    assert kubectl("get", "isvc", "phi", "-o", "jsonpath={.spec.replicas} {.metadata.generation}").stdout == "0 2"
    assert "scaled" in kubectl("scale", "isvc/phi", "--current-replicas=0", "--replicas=3").stdout


def test_server_side_apply_takes_over_from_client_side_apply(kubectl: Kubectl) -> None:
    kubectl("apply", "-f", "-", given=MANIFEST)
    kubectl("apply", "--server-side", "-f", "-", given=MANIFEST)
    shown = kubectl("get", "isvc", "phi", "--show-managed-fields", "-o", "json").stdout
    managers = {(entry["manager"], entry["operation"]) for entry in json.loads(shown)["metadata"]["managedFields"]}
    assert ("kubectl", "Apply") in managers
    assert not any(manager == "kubectl-client-side-apply" for manager, _ in managers)


def test_server_side_apply_reports_whose_field_it_is(kubectl: Kubectl) -> None:
    kubectl("apply", "--server-side", "-f", "-", given=MANIFEST)
    kubectl("scale", "isvc", "phi", "--replicas=0")
    refused = kubectl("apply", "--server-side", "-f", "-", given=MANIFEST, code=1).stderr
    assert 'conflict with "kubectl" with subresource "scale"' in refused and ".spec.replicas" in refused
    kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", given=MANIFEST)
    assert kubectl("get", "isvc", "phi", "-o", "jsonpath={.spec.replicas}").stdout == "1"


def test_label_annotate_patch_edit_and_replace(kubectl: Kubectl) -> None:
    kubectl("apply", "-f", "-", given=MANIFEST)
    kubectl("label", "isvc", "phi", "a=b")
    kubectl("annotate", "isvc", "phi", "note=yes")
    kubectl("patch", "isvc", "phi", "--type=json", "-p", '[{"op":"replace","path":"/spec/replicas","value":5}]')
    kubectl("edit", "isvc", "phi", KUBE_EDITOR="sed -i.bak -e 's/replicas: 5/replicas: 6/'")
    found = json.loads(kubectl("get", "isvc", "phi", "-o", "json").stdout)
    assert found["spec"]["replicas"] == 6 and found["metadata"]["labels"] == {"a": "b"}
    assert found["metadata"]["annotations"]["note"] == "yes"
    assert "replaced" in kubectl("replace", "-f", "-", given=MANIFEST).stdout


def test_mistakes_are_named(kubectl: Kubectl, widgets: Client) -> None:
    unknown = json.dumps(widget(foo=1))
    refused = kubectl("apply", "-f", "-", given=unknown, code=1).stderr
    assert 'strict decoding error: unknown field "spec.foo"' in refused
    assert 'unknown field "spec.foo"' in kubectl("apply", "--validate=warn", "-f", "-", given=unknown).stderr
    assert ".spec.foo: field not declared" in kubectl("apply", "--server-side", "-f", "-", given=unknown, code=1).stderr
    wrong = kubectl("apply", "-f", "-", given=json.dumps(widget(colour="foo")), code=1).stderr
    expected = 'spec.colour: Unsupported value: "foo": supported values: "red", "blue"'
    assert f'The Widget "w" is invalid: {expected}' in wrong
    lonely = kubectl("apply", "-n", "nowhere", "-f", "-", given=MANIFEST, code=1).stderr
    assert 'namespaces "nowhere" not found' in lonely


def test_a_kind_installed_at_run_time_is_known_at_once(kubectl: Kubectl, widgets: Client) -> None:
    kubectl("create", "-f", "-", given=json.dumps(widget()))
    widgets.apply(f"{WIDGETS}/w/status", condition("Loaded", "True"), "a", force="true")
    assert re.search(r"LOADED\s+AGE\nw\s+True\s+\d+s", kubectl("get", "wd").stdout)
    assert "widget.example.test/w" in kubectl("get", "all", "-o", "name").stdout
    assert "What the widget is to be." in kubectl("explain", "widget.spec").stdout
    kubectl("delete", "crd", "widgets.example.test", "--timeout=5s")
    assert "the server could not find the requested resource" in kubectl("get", "widgets", code=1).stderr


def test_typed_kubectl_commands_that_speak_protobuf(kubectl: Kubectl) -> None:
    kubectl("create", "namespace", "llm")
    kubectl("-n", "llm", "create", "configmap", "c", "--from-literal=a=b")
    kubectl("-n", "llm", "create", "secret", "generic", "s", "--from-literal=token=x")
    kubectl("-n", "llm", "create", "service", "nodeport", "s", "--tcp=80:8080", "--node-port=30080")
    assert kubectl("-n", "llm", "get", "cm", "c", "-o", "jsonpath={.data.a}").stdout == "b"
    assert kubectl("-n", "llm", "get", "secret", "s", "-o", "jsonpath={.data.token}").stdout == "eA=="
    assert re.search(r"80:30080/TCP", kubectl("-n", "llm", "get", "svc").stdout)
    kubectl("delete", "namespace", "llm", f"--timeout={TIMEOUT_S:.0f}s")
    assert "llm" not in kubectl("get", "ns").stdout


def test_a_directory_of_kustomize_is_applied_and_deleted(kubectl: Kubectl, tmp_path: Path) -> None:
    (tmp_path / "isvc.json").write_text(MANIFEST)
    generator = "configMapGenerator: [{name: c, literals: [a=b]}]\n"
    (tmp_path / "kustomization.yaml").write_text("resources: [isvc.json]\nnamePrefix: our-\n" + generator)
    assert kubectl("apply", "-k", str(tmp_path)).stdout.count("created") == 2
    assert kubectl("diff", "-k", str(tmp_path)).stdout == ""
    assert re.search(r"^our-phi\s", kubectl("get", "isvc").stdout, re.MULTILINE)
    assert kubectl("delete", "-k", str(tmp_path)).stdout.count("deleted") == 2


def test_events_and_leases_of_the_older_kind_are_listed(kubectl: Kubectl) -> None:
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": "e", "namespace": "default"},
        "involvedObject": {"kind": "InferenceService", "name": "phi", "namespace": "default"},
        "reason": "Started",
        "message": "It runs.",
        "type": "Normal",
        "count": 1,
        "source": {"component": "x"},
        "firstTimestamp": "2026-01-01T00:00:00Z",
        "lastTimestamp": "2026-01-01T00:00:00Z",
    }
    kubectl("create", "-f", "-", given=json.dumps(event))
    for command in ("get events", "events", "get events -A --sort-by=.lastTimestamp", "get events.events.k8s.io"):
        assert re.search(r"Normal\s+Started\s+(?i:inferenceservice)/phi\s+It runs", kubectl(*command.split()).stdout)
    kubectl("create", "-f", "-", given=json.dumps(lease("l", holderIdentity="me")))
    assert re.search(r"^l\s+me\s", kubectl("get", "leases").stdout, re.MULTILINE)


def test_wait_for_delete_sees_it_go(kubectl: Kubectl, client: Client) -> None:
    for pause_s in (0.5, 2.0, 8.0):  # a kubectl that starts slowly finds nothing to wait for any more
        kubectl("apply", "-f", "-", given=MANIFEST)
        timer = threading.Timer(pause_s, lambda: Client(client.port).delete(f"{ISVCS}/phi"))
        timer.start()
        said = kubectl("wait", "--for=delete", "isvc/phi", "--timeout=20s").stdout
        timer.join()
        if said:
            break
    assert "condition met" in said
    assert "timed out" in kubectl("wait", "--for=create", "isvc/phi", "--timeout=1s", code=1).stderr


def test_what_is_not_there_is_said_not_to_be(kubectl: Kubectl) -> None:
    kubectl("apply", "-f", "-", given=MANIFEST)
    assert 'doesn\'t have a resource type "pods"' in kubectl("get", "pods", code=1).stderr
    assert "Metrics API not available" in kubectl("top", "pods", code=1).stderr
    assert "no kind" in kubectl("rollout", "status", "isvc/phi", code=1).stderr


def test_delete_waits_until_the_object_is_gone(kubectl: Kubectl) -> None:
    kubectl("apply", "-f", "-", given=MANIFEST)
    assert "deleted" in kubectl("delete", "isvc", "phi", "--timeout=5s").stdout
    kubectl("apply", "-f", "-", given=MANIFEST)
    assert "deleted" in kubectl("delete", "isvc", "--all", "--cascade=foreground", "--timeout=5s").stdout
    assert "No resources found" in kubectl("get", "isvc").stderr


def test_version_and_resources(kubectl: Kubectl) -> None:
    assert "v1.36.0+metal-supervisor" in kubectl("version").stdout
    assert re.search(r"inferenceservices\s+isvc", kubectl("api-resources").stdout)
