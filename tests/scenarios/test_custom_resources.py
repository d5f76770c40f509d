"""Custom resources that nobody checked: a cluster whose definitions let anything in, and one Mac that has to cope.

What the field's definitions, ours or old ones refuse is refused here by the Mac itself, by name and without
stopping anything; what is merely unusual works; and nobody can make the Mac write or restart in a loop.
"""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from metal_supervisor.apiserver import ApiServer, Options
from metal_supervisor.cluster.kube import MERGE
from metal_supervisor.controller import boot
from metal_supervisor.settings.loader import conf_dir
from tests.support.macs import Mac, fleet
from tests.support.system import ISVC, SERVICES, System, eventually, service

WITHIN_S = 30.0
CHANGES = re.compile(r"\b(?:add|replace|stop|start|remove|term) default\.")


def lax_definitions(directory: Path) -> tuple[Path, ...]:
    """Our definitions without their rules, as an old cluster may have them."""
    made = []
    for path in (conf_dir() / "crds").glob("*.yaml"):
        definition = yaml.safe_load(path.read_text())
        for version in definition["spec"]["versions"]:
            version["schema"]["openAPIV3Schema"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        made.append(directory / path.name)
        made[-1].write_text(json.dumps(definition))
    return tuple(made)


@pytest.fixture(scope="module")
def mac(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mac]:
    base = tmp_path_factory.mktemp("lax")
    options = Options(data_file=base / "api.db", prefix="/k-test", crd_paths=lax_definitions(base))
    with ApiServer(options) as api:
        kubeconfig = base / "cluster-kubeconfig"
        kubeconfig.write_text(boot.kubeconfig(api.url))
        with fleet(base, kubeconfig, "--status-mode", "standalone") as macs:
            up = macs.add("mac-a")
            up.apply(up.tiny_model(), service("witness"))
            up.ready("witness")
            yield up


@pytest.fixture(autouse=True)
def witness_is_untouched(mac: Mac) -> Iterator[None]:
    """Whatever a test does to its own service, another one never notices."""
    before = mac.pid("witness")
    yield
    assert mac.pid("witness") == before != 0
    assert "hello world" in answer(mac, "witness")


def answer(mac: System, name: str) -> str:
    """One chat answer of an engine, asked where it listens: what is advertised leads nowhere."""
    connection = http.client.HTTPConnection("127.0.0.1", mac.port(name), timeout=30)
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
    try:
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        return str(json.load(connection.getresponse())["choices"][0]["message"]["content"])
    finally:
        connection.close()


def failed(mac: System, name: str, reason: str) -> str:
    """Waits until a service is reported as failed for the reason; returns the message."""
    eventually(lambda: mac.condition("MetalReady", name).get("reason") == reason, WITHIN_S, f"{name}: {reason}")
    assert mac.status(name)["phase"] == "Failed"
    return str(mac.condition("MetalReady", name)["message"])


def gone(mac: System, *names: str) -> None:
    for name in names:
        mac.delete(name)
    eventually(lambda: not any(mac.observe(name) for name in names), WITHIN_S, "the services to be gone")
    programs = {f"default.{name}" for name in names}
    eventually(lambda: not programs & mac.rpc.table().keys(), WITHIN_S, "their programs to be gone")


def changes(mac: System) -> int:
    """How often the controller has changed a program."""
    return len(CHANGES.findall((mac.state / "log" / "controller.log").read_text()))


def requests(mac: System) -> int:
    """Requests to the API: the sidecar's and the controller's."""
    told = json.loads((mac.state / "controller.json").read_text())["cluster"]["requests"]
    found = re.search(r"^metal_supervisor_api_requests_total (\S+)", mac.fetch("/metrics")[1], re.M)
    assert found
    return int(told) + int(float(found[1]))


# ── C 21–23, 30, 40–43: what no cluster should let in ────────────────────────────────────────────


BAD: dict[str, tuple[Any, str, str]] = {
    "21-null": (None, "InvalidSpec", "spec.modelRef"),
    "21-list": ([], "InvalidSpec", "spec"),
    "22-runtime": ({"runtime": "nonsense"}, "UnsupportedRuntime", "spec.runtime is 'nonsense'"),
    "30-context-0": ({"contextSize": 0}, "InvalidSpec", "spec.contextSize must be between 128 and 2097152, not 0"),
    "30-context-minus": ({"contextSize": -1}, "InvalidSpec", "spec.contextSize"),
    "30-context-2-31": ({"contextSize": 2**31}, "InvalidSpec", "spec.contextSize"),
    "33-nul": ({"extraArgs": ["--ok", "a\0b"]}, "InvalidSpec", "spec.extraArgs[1]"),
    "38-model-flag": ({"extraArgs": ["--model", "/etc/passwd"]}, "InvalidSpec", "spec.extraArgs[0]"),
    "40-secret-ref": (
        {"env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]},
        "SecretNotFound",
        'spec.env[0].valueFrom.secretKeyRef: the Secret "s"',
    ),
    "40-field-ref": (
        {"env": [{"name": "HF_TOKEN", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]},
        "UnsupportedField",
        "spec.env[0].valueFrom.fieldRef",
    ),
    "40-env-name": ({"env": [{"name": "A=B", "value": "x"}]}, "InvalidSpec", "spec.env[0].name"),
    "41-string-for-int": ({"contextSize": "512"}, "InvalidSpec", "spec.contextSize must be a whole number"),
    "41-int-for-string": ({"modelRef": 5}, "InvalidSpec", "spec.modelRef"),
    "41-string-for-list": ({"extraArgs": "--verbose"}, "InvalidSpec", "spec.extraArgs must be a list"),
    "41-list-for-object": ({"endpoint": ["x"]}, "InvalidSpec", "spec.endpoint"),
    "43-priority": ({"priority": "urgent"}, "InvalidSpec", "spec.priority must be one of"),
}


@pytest.mark.parametrize(("spec", "reason", "named"), BAD.values(), ids=BAD)
def test_what_no_definition_refused_is_refused_by_name_and_can_be_put_right(
    mac: Mac, spec: Any, reason: str, named: str
) -> None:
    good = service("bad")
    written = {**good["spec"], **spec} if isinstance(spec, dict) else spec
    mac.kube.request("POST", ISVC, None, {**good, "spec": written})
    assert named in failed(mac, "bad", reason)
    assert mac.pid("bad") == 0
    mac.kube.request("PATCH", f"{ISVC}/bad", None, {"spec": None}, MERGE)
    mac.kube.request("PATCH", f"{ISVC}/bad", None, {"spec": {**good["spec"], "replicas": 0}}, MERGE)
    eventually(lambda: mac.status("bad").get("phase") == "Stopped", WITHIN_S, "the mended one to be understood")
    gone(mac, "bad")


def test_23_a_format_that_the_runtime_does_not_serve_is_named_and_heals(mac: Mac) -> None:
    odd = mac.tiny_model("odd")
    mac.apply({**odd, "spec": {**odd["spec"], "format": "pytorch"}}, service("unfit", "odd"))
    assert "spec.format is 'pytorch', which no runtime of this Mac serves" in failed(mac, "unfit", "FormatMismatch")
    mac.apply(odd)
    mac.ready("unfit")
    gone(mac, "unfit")


def test_a_spec_that_turns_bad_under_a_running_engine_stops_nothing(mac: Mac) -> None:
    mac.apply(service("turned"))
    before = mac.ready("turned")
    mac.kube.request("PATCH", f"{ISVC}/turned", None, {"spec": {"contextSize": "much"}}, MERGE)
    eventually(lambda: mac.condition("Degraded", "turned").get("reason") == "InvalidSpec", WITHIN_S, "Degraded")
    assert "spec.contextSize" in mac.condition("Degraded", "turned")["message"]
    mac.kube.request("PATCH", f"{ISVC}/turned", None, {"spec": None}, MERGE)
    eventually(
        lambda: "spec.modelRef" in mac.condition("Degraded", "turned").get("message", ""), WITHIN_S, "another reason"
    )
    assert (mac.pid("turned"), mac.status("turned")["phase"]) == (before, "Ready")
    mac.kube.request("PATCH", f"{ISVC}/turned", None, {"spec": service("turned")["spec"]}, MERGE)
    eventually(lambda: not mac.condition("Degraded", "turned"), WITHIN_S, "Degraded to be gone")
    assert mac.pid("turned") == before
    gone(mac, "turned")


@pytest.mark.parametrize("budget", [-1, "NaN", 1e300, "16Gi", "16G", "much", []], ids=str)
def test_42_a_memory_budget_of_any_kind_stops_nothing(mac: Mac, budget: Any) -> None:
    """It has no effect yet, and so must not have any."""
    before = mac.pid("witness")
    mac.kube.request("PATCH", f"{ISVC}/witness", None, {"spec": {"memoryBudget": budget}}, MERGE)
    generation = mac.get(f"{ISVC}/witness")["metadata"]["generation"]
    eventually(
        lambda: mac.condition("MetalReady", "witness").get("observedGeneration", 0) >= generation, WITHIN_S, "a look"
    )
    assert (mac.pid("witness"), mac.condition("Degraded", "witness")) == (before, {})


# ── C 26, 29, 36: unusual ────────────────────────────────────────────────────────────────────────


def test_26_two_services_of_one_model_are_two_engines_of_one_file(mac: Mac) -> None:
    mac.apply(service("first"), service("second"))
    pids = {mac.ready("first"), mac.ready("second"), mac.pid("witness")}
    assert len(pids) == 3
    assert len({mac.port("first"), mac.port("second"), mac.port("witness")}) == 3
    files = [
        json.loads((mac.state / "records" / f"default.{each}.json").read_text())["files"]
        for each in ("first", "second")
    ]
    assert files[0] == files[1] == [str(mac.tiny)]
    mac.delete("first")
    eventually(lambda: mac.pid("first") == 0, WITHIN_S, "the first to end")
    assert "hello world" in answer(mac, "second")
    gone(mac, "second")


def test_29_three_replicas_on_one_mac_are_one_that_serves_and_say_why(mac: Mac) -> None:
    mac.apply(service("three", replicas=3))
    eventually(lambda: mac.status("three").get("readyReplicas") == 1, WITHIN_S, "one replica")
    status = mac.status("three")
    assert (status["phase"], status["readyReplicas"], status["replicas"]) == ("Progressing", 1, 3)
    assert "1/3 replicas ready" in mac.condition("Progressing", "three")["message"]
    assert mac.condition("MetalReady", "three")["status"] == "True"
    why = "; 1 of 3 replicas are ready: each takes a Mac of its own, or see --replicas-per-mac"
    assert why in mac.condition("MetalReady", "three")["message"]
    assert mac.condition("Available", "three")["status"] == "True"
    before = mac.pid("three")
    assert "hello world" in answer(mac, "three")
    mac.apply(service("three", replicas=1))
    mac.ready("three")
    assert mac.pid("three") == before
    gone(mac, "three")


def test_36_ten_thousand_arguments_reach_the_engine(mac: Mac) -> None:
    mac.apply(service("many", extraArgs=["--threads", "1"] * 5000))
    mac.ready("many", within_s=60)
    assert "hello world" in answer(mac, "many")
    gone(mac, "many")


def test_36_a_spec_too_large_for_any_process_is_named_and_heals(mac: Mac) -> None:
    mac.apply(service("large", env=[{"name": "HF_TOKEN", "value": "x" * (1 << 20)}]))
    eventually(lambda: mac.condition("MetalReady", "large").get("status") == "False", WITHIN_S, "a condition")
    eventually(
        lambda: "argument list too long" in mac.condition("MetalReady", "large").get("message", "").lower(),
        WITHIN_S,
        "a condition that says so",
    )
    assert len(json.dumps(mac.status("large"))) < 20_000
    mac.apply(service("large"))
    mac.ready("large", within_s=60)
    gone(mac, "large")


# ── C 19, 27, 46: quickly ────────────────────────────────────────────────────────────────────────


def test_27_off_and_on_again_within_a_second_ends_serving(mac: Mac) -> None:
    mac.apply(service("blink"))
    mac.ready("blink")
    for replicas in (0, 1, 0, 1):
        mac.apply(service("blink", replicas=replicas))
    generation = mac.get(f"{ISVC}/blink")["metadata"]["generation"]
    eventually(
        lambda: (
            mac.condition("MetalReady", "blink").get("observedGeneration") == generation
            and mac.status("blink").get("phase") == "Ready"
        ),
        WITHIN_S,
        "it to serve",
    )
    assert "hello world" in answer(mac, "blink")
    assert mac.engines().count(mac.pid("blink")) == 1 and len(mac.engines()) == 2
    gone(mac, "blink")


def test_19_a_namesake_made_at_once_is_another_object_with_its_own_spec(mac: Mac) -> None:
    mac.apply(service("twin"))
    mac.ready("twin")
    mac.delete("twin")
    mac.apply(service("twin", contextSize=1024))
    uid = mac.get(f"{ISVC}/twin")["metadata"]["uid"]
    eventually(lambda: mac.status("twin").get("phase") == "Ready", WITHIN_S, "the second to serve")
    eventually(lambda: mac.maybe(f"{SERVICES}/twin"), WITHIN_S, "its Service")
    assert mac.get(f"{SERVICES}/twin")["metadata"]["ownerReferences"][0]["uid"] == uid
    record = json.loads((mac.state / "records" / "default.twin.json").read_text())
    assert record["uid"] == uid
    assert "1024" in (mac.state / "specs" / "default.twin.json").read_text()
    gone(mac, "twin")


def test_46_a_hundred_updates_within_a_second_are_two_restarts(mac: Mac) -> None:
    """The first at once, and then at most one a second: a busy machine may need more than one for them all."""
    mac.apply(service("busy"))
    mac.ready("busy")
    log = mac.state / "log" / "controller.log"
    said, began = len(log.read_text()), time.monotonic()
    for size in range(100):
        mac.kube.request("PATCH", f"{ISVC}/busy", None, {"spec": {"contextSize": 600 + size}}, MERGE)
        time.sleep(0.004)
    took_s = time.monotonic() - began
    generation = mac.get(f"{ISVC}/busy")["metadata"]["generation"]
    eventually(
        lambda: (
            mac.condition("MetalReady", "busy").get("observedGeneration") == generation
            and mac.status("busy").get("phase") == "Ready"
        ),
        WITHIN_S,
        "the last update to serve",
    )
    assert '"699"' in (mac.state / "specs" / "default.busy.json").read_text()
    eventually(lambda: "hello world" in answer(mac, "busy"), WITHIN_S, "an answer")
    log_text = log.read_text()[said:]
    for word in ("stop", "replace"):
        assert log_text.count(f"{word} default.busy") <= 2 + int(took_s), log_text
    gone(mac, "busy")


# ── C 44, 45: others ─────────────────────────────────────────────────────────────────────────────


def test_44_a_status_that_somebody_writes_all_the_time_is_not_fought_over(mac: Mac) -> None:
    before_pid, before_changes = mac.pid("witness"), changes(mac)
    over = threading.Event()
    written = [0]

    def write() -> None:
        while not over.wait(0.1):
            status = {"status": {"phase": "Pending", "schedulingMessage": f"write {written[0]}"}}
            mac.kube.request("PATCH", f"{ISVC}/witness/status", {"fieldManager": "other"}, status, MERGE)
            written[0] += 1

    # Nothing else of ours is due for a while.
    eventually(lambda: quiet(mac), WITHIN_S, "the Mac to have said what it has to say")
    asked = requests(mac)
    other = threading.Thread(target=write)
    other.start()
    try:
        eventually(lambda: written[0] >= 30, WITHIN_S, "thirty writes of the other one")
    finally:
        over.set()
        other.join()
    spent = requests(mac) - asked
    ours = [
        each
        for each in mac.get(f"{ISVC}/witness")["metadata"]["managedFields"]
        if each["manager"] == "metal-supervisor" and each.get("subresource") == "status"
    ]
    assert ours, "our fields are still ours"
    # Some seconds hold some renewals of the Lease, and no more of us.
    assert spent <= 10, f"{spent} requests while another one wrote {written[0]} times"
    assert (mac.pid("witness"), changes(mac)) == (before_pid, before_changes)
    # What we have to say is still said: the phase comes back with the next thing that happens.
    mac.apply(service("witness", priority="high"))
    eventually(lambda: mac.status("witness").get("phase") == "Ready", WITHIN_S, "the truth to be back")
    assert mac.pid("witness") == before_pid


def quiet(mac: Mac) -> bool:
    before = requests(mac)
    time.sleep(1.5)
    return requests(mac) - before <= 2


def test_45_one_that_waits_for_a_finalizer_is_stopped_and_says_what_it_waits_for(mac: Mac) -> None:
    held = service("held")
    held["metadata"]["finalizers"] = ["example.com/never"]
    mac.apply(held)
    mac.ready("held")
    mac.delete("held")
    assert mac.get(f"{ISVC}/held")["metadata"]["deletionTimestamp"]
    eventually(lambda: mac.pid("held") == 0, WITHIN_S, "the engine to end")
    eventually(lambda: mac.condition("MetalReady", "held").get("reason") == "Deleting", WITHIN_S, "a condition")
    assert "example.com/never" in mac.condition("MetalReady", "held")["message"]
    assert mac.condition("MetalReady", "held")["status"] == "False"
    eventually(lambda: mac.slice("held") is None, WITHIN_S, "its endpoint to go")
    eventually(lambda: "default.held" not in mac.rpc.table(), WITHIN_S, "its program to go")
    # It stays so, and nobody is busy with it.
    eventually(lambda: quiet(mac), WITHIN_S, "the Mac to have said what it has to say")
    version, done = mac.get(f"{ISVC}/held")["metadata"]["resourceVersion"], changes(mac)
    mac.supervisorctl("restart", "controller")
    at = json.loads((mac.state / "controller.json").read_text())["at"]
    eventually(lambda: json.loads((mac.state / "controller.json").read_text())["at"] > at, WITHIN_S, "a pass")
    assert (mac.pid("held"), changes(mac)) == (0, done)
    assert mac.get(f"{ISVC}/held")["metadata"]["resourceVersion"] == version
    # The finalizer goes, and the object with it; the name is free again.
    mac.kube.request("PATCH", f"{ISVC}/held", None, {"metadata": {"finalizers": None}}, MERGE)
    eventually(lambda: mac.maybe(f"{ISVC}/held") is None, WITHIN_S, "the object to go")
    eventually(lambda: mac.observe("held") == {}, WITHIN_S, "the record to go")
    mac.apply(service("held"))
    mac.ready("held")
    gone(mac, "held")
