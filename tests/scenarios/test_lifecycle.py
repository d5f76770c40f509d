"""A service's life: edits, scaling, suspension, deletion, and what must not restart anything."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import pytest

from tests.system import ISVC, MODELS, SERVICES, System, eventually, kill, running, service


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running(tmp_path_factory.mktemp("life")) as up:
        up.apply(up.tiny_model(), service("tiny"), service("other"))
        up.ready("tiny")
        up.ready("other")
        yield up


def cluster_ip(system: System, name: str = "tiny") -> str:
    return str(system.get(f"{SERVICES}/{name}")["spec"]["clusterIP"])


def test_an_edit_that_changes_the_argv_restarts_that_program_only_and_keeps_the_address(system: System) -> None:
    tiny, other, address, port = system.pid(), system.pid("other"), cluster_ip(system), system.port()
    system.apply(service("tiny", contextSize=1024))
    eventually(lambda: system.pid() not in (0, tiny), what="a new process")
    system.ready()
    assert system.pid("other") == other
    assert (cluster_ip(system), system.port()) == (address, port)
    assert system.status()["readyReplicas"] == 1
    specs = system.state / "specs"
    eventually(lambda: len(list(specs.glob("default.tiny.*.json"))) == 1, what="the old spec to be collected")


def test_an_edit_that_does_not_change_the_argv_restarts_nothing(system: System) -> None:
    tiny, other = system.pid(), system.pid("other")
    generation = system.get(f"{ISVC}/tiny")["metadata"]["generation"]
    selector = {"kubernetes.io/os": platform.system().lower()}
    system.apply(service("tiny", contextSize=1024, priority="high", nodeSelector=selector))
    eventually(
        lambda: system.condition("MetalReady").get("observedGeneration", 0) > generation, what="the edit to be observed"
    )
    assert system.status()["effectivePriority"] == 100000
    assert (system.pid(), system.pid("other")) == (tiny, other)


def test_a_node_selector_that_this_mac_does_not_fit_is_named_and_stops_nothing(system: System) -> None:
    pid = system.pid()
    system.apply(service("tiny", contextSize=1024, nodeSelector={"room": "attic"}))
    eventually(lambda: system.condition("Degraded").get("reason") == "NodeSelectorMismatch", what="a condition")
    assert "spec.nodeSelector asks for room=attic" in system.condition("Degraded")["message"]
    assert "--node-labels" in system.condition("Degraded")["message"]
    assert system.pid() == pid


def test_replicas_0_stops_the_process_and_keeps_the_service(system: System) -> None:
    address = cluster_ip(system)
    system.apply(service("tiny", replicas=0))
    eventually(lambda: system.status().get("phase") == "Stopped", what="Stopped")
    available = system.condition("Available")
    assert available["reason"] == "ManuallyScaledToZero"
    assert available["message"] == "spec.replicas=0; workload scaled to zero"
    eventually(lambda: system.slice() is None, what="the slice to be gone")
    assert system.pid() == 0
    assert "default.tiny" not in system.supervisorctl("status")
    system.apply(service("tiny", replicas=1))
    system.ready()
    assert cluster_ip(system) == address


def test_suspend_stops_the_process_with_its_own_words(system: System) -> None:
    address, port = cluster_ip(system), system.port()
    system.apply(service("tiny", suspend=True))
    eventually(lambda: system.status().get("phase") == "Suspended", what="Suspended")
    expected = "spec.suspend=true; workload scaled to zero; spec.replicas preserved"
    assert system.condition("Available")["message"] == expected
    assert system.condition("Suspended")["status"] == "True"
    eventually(lambda: system.slice() is None, what="the slice to be gone")
    system.apply(service("tiny", suspend=False))
    system.ready()
    assert (cluster_ip(system), system.port()) == (address, port)


def test_a_service_deleted_while_the_controller_was_down_is_stopped(system: System) -> None:
    system.apply(service("doomed"))
    system.ready("doomed")
    system.supervisorctl("stop", "controller")
    system.delete("doomed")
    assert system.pid("doomed")
    system.supervisorctl("start", "controller")
    eventually(lambda: "default.doomed" not in system.supervisorctl("status"), what="the program to be gone")
    eventually(lambda: not (system.state / "records" / "default.doomed.json").exists(), what="the record to be gone")


def test_supervisorctl_models_tells_of_the_services_while_everything_of_ours_is_down(system: System) -> None:
    system.ready("other")
    system.supervisorctl("stop", "controller", "sidecar")
    lines = system.supervisorctl("models", "default.other").splitlines()
    system.supervisorctl("start", "controller", "sidecar")
    assert lines[1].split()[:3] == ["default/other", "Ready", "llama-server"]
    assert f"http://127.0.0.1:{system.port('other')}/v1" in lines[1]
    assert system.supervisorctl("models", "default.nobody") == "default.nobody: ERROR (no such service)\n"


def test_a_deleted_service_that_comes_back_at_once_runs_again(system: System) -> None:
    system.apply(service("again"))
    system.ready("again")
    system.delete("again")
    system.apply(service("again"))
    uid = system.get(f"{ISVC}/again")["metadata"]["uid"]
    system.ready("again")
    assert system.get(f"{SERVICES}/again")["metadata"]["ownerReferences"][0]["uid"] == uid
    assert "hello world" in system.chat("again")
    system.delete("again")
    eventually(lambda: "default.again" not in system.supervisorctl("status"), what="the program to be gone")


def test_a_model_that_goes_takes_its_service_down_and_heals_when_it_is_back(system: System) -> None:
    system.apply(system.tiny_model("passing"), service("guest", "passing"))
    system.ready("guest")
    system.delete("passing", MODELS)
    eventually(lambda: system.status("guest").get("phase") == "Failed", what="Failed")
    assert "Model not found" in system.condition("Degraded", "guest")["message"]
    eventually(lambda: system.pid("guest") == 0, what="the process to end")
    system.apply(system.tiny_model("passing"))
    system.ready("guest")
    system.delete("guest")


def test_a_crashed_model_is_withdrawn_and_comes_back_by_itself(system: System) -> None:
    address, before = cluster_ip(system, "other"), system.pid("other")
    eventually(lambda: "RUNNING" in system.supervisorctl("status", "default.other"))
    kill(before)
    eventually(lambda: system.pid("other") not in (0, before), what="a new process")
    system.ready("other")
    assert cluster_ip(system, "other") == address
    eventually(lambda: system.observe("other")["restarts"] == 1, what="the restart to be counted")
    assert "SIGKILL" in system.observe("other")["lastExit"]
    eventually(lambda: "Crashed" in system.kubectl("describe", "isvc", "other"), what="an Event")
