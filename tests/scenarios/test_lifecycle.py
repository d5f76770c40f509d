"""A service's life: edits, scaling, suspension, deletion, and what must not restart anything."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest

from metal_supervisor.spec.processes import State
from tests.support.macs import embedded_cluster, fleet
from tests.support.own_command import typed
from tests.support.system import ISVC, MODELS, SERVICES, System, eventually, kill, model, running, service


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running(tmp_path_factory.mktemp("life"), "--replicas-per-mac", "3") as up:
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
    eventually(lambda: "default.tiny" not in system.rpc.table(), what="the program to be gone")
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
    eventually(lambda: "default.doomed" not in system.rpc.table(), what="the program to be gone")
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
    eventually(lambda: "default.again" not in system.rpc.table(), what="the program to be gone")


def test_the_embedded_api_runs_several_replicas_on_the_one_mac_there_is(system: System) -> None:
    before = len(system.engines())
    system.apply(service("several", replicas=3))
    system.ready("several")
    assert system.status("several")["readyReplicas"] == 3
    assert len(system.engines()) == before + 3
    system.supervisorctl("stop", "default.several@2")
    eventually(lambda: system.status("several").get("readyReplicas") == 2, what="the count")
    assert system.status("several")["phase"] == "Progressing"
    system.delete("several")
    eventually(lambda: len(system.engines()) == before, what="all three to end")


def charged(system: System) -> int:
    """Bytes that the memory ledger counts for all engines."""
    return int(json.loads((system.state / "controller.json").read_text())["memory"]["charged"])


def told(system: System, *arguments: str) -> str:
    """Output of one of our commands about this system."""
    code, out, err = typed(*arguments, "--state-dir", str(system.state))
    assert code == 0, err
    return out


def test_a_model_that_goes_stops_nothing_and_its_return_restarts_nothing(system: System) -> None:
    system.apply(system.tiny_model("passing"), service("guest", "passing"))
    before, counted = system.ready("guest"), charged(system)
    system.delete("passing", MODELS)
    eventually(lambda: system.condition("Degraded", "guest").get("reason") == "ModelNotFound", what="Degraded")
    message = system.condition("Degraded", "guest")["message"]
    assert 'spec.modelRef names "passing"' in message and "keeps running" in message
    assert (system.status("guest")["phase"], system.slice_ready("guest")) == ("Ready", True)
    assert system.pid("guest") == before
    assert charged(system) == counted, "its memory is still its own"
    assert "ModelNotFound" in told(system, "status") and "ModelNotFound" in told(system, "explain", "guest")
    assert "hello world" in system.chat("guest")

    kill(system.own_pid("controller"))  # what is known from the record alone is enough
    kill(before)
    eventually(lambda: system.pid("guest") not in (0, before), what="the engine to be back")
    again = system.ready("guest")
    eventually(lambda: system.condition("Degraded", "guest").get("reason") == "ModelNotFound", what="Degraded again")

    system.apply(system.tiny_model("passing"))
    eventually(lambda: not system.condition("Degraded", "guest"), what="Degraded to be gone")
    system.ready("guest")
    assert system.pid("guest") == again
    system.delete("guest")


def test_a_reference_to_a_model_that_is_not_there_is_reported_until_the_service_is_switched_off(system: System) -> None:
    system.apply(service("astray"))
    before = system.ready("astray")
    system.kubectl("patch", "isvc", "astray", "--type=merge", "-p", '{"spec": {"modelRef": "nope"}}')
    eventually(lambda: system.condition("Degraded", "astray").get("reason") == "ModelNotFound", what="Degraded")
    assert (system.status("astray")["phase"], system.pid("astray")) == ("Ready", before)
    system.kubectl("scale", "isvc", "astray", "--replicas=0")
    eventually(lambda: system.pid("astray") == 0, what="the process to end")
    eventually(lambda: system.status("astray").get("phase") == "Stopped", what="Stopped")
    system.kubectl("scale", "isvc", "astray", "--replicas=1")
    eventually(lambda: system.condition("MetalReady", "astray").get("reason") == "ModelNotFound", what="Failed")
    assert system.pid("astray") == 0
    system.delete("astray")


def test_only_a_model_that_is_no_longer_for_a_mac_takes_its_engine_down(system: System) -> None:
    system.apply(system.tiny_model("moving"), service("mover", "moving"))
    system.ready("mover")
    system.apply(model("moving", system.tiny.as_uri(), accelerator="cuda"))
    eventually(lambda: system.condition("MetalReady", "mover").get("reason") == "NotMetal", what="NotMetal")
    eventually(lambda: system.pid("mover") == 0 and not system.slice_ready("mover"), what="the engine to be gone")
    system.delete("mover")


def test_a_model_that_was_deleted_while_the_mac_was_off_stops_nothing(tmp_path: Path) -> None:
    with embedded_cluster(tmp_path) as kubeconfig, fleet(tmp_path, kubeconfig, "--status-mode", "standalone") as macs:
        mac = macs.add("mac-a")
        mac.apply(mac.tiny_model("other"), mac.tiny_model(), service("guest"))
        mac.ready("guest")
        mac.stop()
        assert mac.told("guest").startswith("Stopping: metal-supervisor has stopped on this Mac"), "until it is back"
        mac.delete("tiny", MODELS)
        mac.start()
        eventually(lambda: mac.condition("Degraded", "guest").get("reason") == "ModelNotFound", 60, "Degraded")
        before = mac.ready("guest", 60)
        mac.apply(mac.tiny_model())
        eventually(lambda: not mac.condition("Degraded", "guest"), what="Degraded to be gone")
        assert mac.ready("guest") == before


def test_a_crashed_model_is_withdrawn_and_comes_back_by_itself(system: System) -> None:
    address, before = cluster_ip(system, "other"), system.pid("other")
    eventually(lambda: system.rpc.table()["default.other"].state is State.RUNNING, what="RUNNING")
    kill(before)
    eventually(lambda: system.pid("other") not in (0, before), what="a new process")
    system.ready("other")
    assert cluster_ip(system, "other") == address
    eventually(lambda: system.observe("other")["restarts"] == 1, what="the restart to be counted")
    assert "SIGKILL" in system.observe("other")["lastExit"]
    eventually(lambda: "Crashed" in system.kubectl("describe", "isvc", "other"), what="an Event")
