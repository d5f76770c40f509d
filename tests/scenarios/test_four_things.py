"""The four things a user does, with unmodified tools, on one running system."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from metal_supervisor.state.reports import CONTROLLER_REPORT
from tests.support.faults import Figure, fault
from tests.support.system import ISVC, System, eventually, kill, running, service


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running(tmp_path_factory.mktemp("four")) as up:
        up.apply(up.tiny_model(), service())
        up.ready()
        yield up


def test_supervisorctl_shows_the_model_beside_our_own_programs(system: System) -> None:
    eventually(lambda: system.supervisorctl("status").count("RUNNING") >= 4, what="all programs RUNNING")
    rows = dict(line.split(None, 2)[:2] for line in system.supervisorctl_program("status").splitlines())
    assert rows == dict.fromkeys(("apiserver", "controller", "default.tiny", "sidecar"), "RUNNING")


def test_status_tells_which_engines_there_are_and_what_they_serve(system: System) -> None:
    offers = eventually(lambda: json.loads(system.fetch("/status")[1])["engines"], what="the engines to be known")
    (llama,) = (each for each in offers if each["runtime"] == "llama-server")
    assert (llama["program"], llama["formats"]) == ("llama-server", ["gguf"]) and llama["version"]


def test_supervisorctl_tail_stop_start_and_restart_work_on_a_model(system: System) -> None:
    assert "listening on" in system.supervisorctl_program("tail", "-4000", "default.tiny")
    system.supervisorctl_program("stop", "default.tiny")
    eventually(lambda: system.condition("MetalReady").get("reason") == "StoppedByHand", what="the stop to be reported")
    assert system.slice_ready() is False
    assert system.pid() == 0
    system.supervisorctl_program("start", "default.tiny")
    first = system.ready()
    for _ in range(2):  # twice in a row: no crash loop
        before = system.pid()
        system.supervisorctl_program("restart", "default.tiny")
        eventually(lambda before=before: system.pid() not in (0, before), what="a new process")
        system.ready()
    assert system.pid() != first


@fault(
    "S57",
    "somebody runs `supervisorctl stop` on a model, and the controller is killed afterwards",
    happens="the stop is honoured until he starts it, or the spec changes",
    sees="StoppedByHand, and no endpoint",
    bound="told within 20 s, Ready within 30 s of a new spec",
)
def test_a_stop_by_hand_survives_a_restart_of_the_controller_and_ends_with_a_new_spec(
    system: System, figure: Figure
) -> None:
    system.apply(system.tiny_model("hand"), service("hand", "hand"))
    other = system.ready()
    system.ready("hand")
    with figure.timed("told"):
        system.supervisorctl("stop", "default.hand")
        eventually(lambda: system.condition("MetalReady", "hand").get("reason") == "StoppedByHand")
    eventually(lambda: system.slice_ready("hand") is False, what="the endpoint to be out")
    eventually(lambda: not passes_within(system, 2.0), what="the controller to rest: the engine's note has a dead pid")
    kill(system.own_pid("controller"))
    eventually(lambda: "RUNNING" in system.supervisorctl("status", "controller"))
    assert "STOPPED" in system.supervisorctl("status", "default.hand")
    with figure.timed("Ready with a new spec"):
        system.apply(service("hand", "hand", contextSize=1024))
        system.ready("hand")
    assert system.pid() == other
    system.delete("hand")
    eventually(lambda: "default.hand" not in system.rpc.table(), what="the program to be gone")


def passes_within(system: System, seconds: float) -> int:
    """Passes that the controller makes in that time."""
    before = passes(system)
    time.sleep(seconds)
    return passes(system) - before


def passes(system: System) -> int:
    return sum(json.loads((system.state / CONTROLLER_REPORT).read_text())["passes"]["counts"])


def test_kubectl_apply_get_describe_wait_explain_diff_scale_and_delete(system: System, tmp_path: Path) -> None:
    manifest = tmp_path / "second.yaml"
    manifest.write_text(yaml.safe_dump_all([system.tiny_model("second"), service("second", "second")]))
    assert "inferenceservice.inference.llmkube.dev/second created" in system.kubectl("apply", "-f", str(manifest))
    system.kubectl("wait", "--for=jsonpath={.status.phase}=Ready", "isvc/second", "--timeout=30s")
    for condition in ("Available", "Ready"):
        system.kubectl("wait", f"--for=condition={condition}", "isvc/second", "--timeout=10s")
    table = system.kubectl("get", "isvc,models")
    assert "PHASE" in table and "REPLICAS" in table and "ACCELERATOR" in table
    row = next(line for line in table.splitlines() if line.startswith("inferenceservice.inference.llmkube.dev/second"))
    assert row.split()[1:5] == ["Ready", "second", "1", "Serving"]
    assert "ARCH" in (wide := system.kubectl("get", "models", "second", "-o", "wide")) and "llama" in wide
    told = system.kubectl("describe", "isvc", "second")
    assert "InferenceReady" in told and "Serving" in told
    assert "contextSize" in system.kubectl("explain", "isvc.spec")
    shown = system.kubectl("get", "svc,endpointslices")
    assert "service/second" in shown and "127.0.0.1" in shown
    manifest.write_text(manifest.read_text().replace("contextSize: 512", "contextSize: 768"))
    assert "+  contextSize: 768" in system.kubectl("diff", "-f", str(manifest), check=False)
    system.kubectl("scale", "isvc/second", "--replicas=0")
    system.kubectl("wait", "--for=jsonpath={.status.phase}=Stopped", "isvc/second", "--timeout=20s")
    system.kubectl("delete", "-f", str(manifest), "--timeout=20s")
    eventually(lambda: "default.second" not in system.rpc.table(), what="the program to be gone")
    assert "second" not in system.kubectl("get", "isvc,models,svc,endpointslices")


def test_health_readiness_liveness_metrics_and_status_answer(system: System) -> None:
    system.ready()
    status, body = system.health()
    assert (status, body) == (200, {"status": "ok"})
    assert system.fetch("/livez")[0] == 200
    eventually(lambda: system.fetch("/readyz")[0] == 200, what="readyz")
    assert "[+]models ok" in system.fetch("/readyz?verbose")[1]
    healthy = 'llmkube_metal_agent_process_healthy{name="tiny",namespace="default"} 1.0'
    eventually(lambda: healthy in system.fetch("/metrics")[1], what="its metric")
    families = {family.name: family for family in text_string_to_metric_families(system.fetch("/metrics")[1])}
    assert len(families["llmkube_metal_agent_process_healthy"].samples) == 1
    assert system.observe()["pid"] == system.pid()
    assert system.fetch("/healthz", "HEAD")[0] == 200
    for method in ("POST", "PUT", "DELETE"):
        assert system.fetch("/healthz", method)[0] == 405
    assert system.fetch("/nothing")[0] == 404


def test_a_chat_request_to_the_registered_address_is_answered_by_llama_server_itself(system: System) -> None:
    system.ready()
    assert "hello world from tiny" in system.chat()
    found = system.slice()
    assert found is not None
    assert found["endpoints"][0]["addresses"] == ["127.0.0.1"]
    serving = system.get("/api/v1/namespaces/default/services/tiny")
    assert serving["spec"]["ports"][0]["port"] == 8080
    assert serving["metadata"]["ownerReferences"][0]["uid"] == system.get(f"{ISVC}/tiny")["metadata"]["uid"]


def test_no_byte_of_a_chat_passes_through_our_processes(system: System) -> None:
    """By the kernel's own count: what our processes read and write does not grow with what is streamed."""
    if not hasattr(psutil.Process, "io_counters"):
        pytest.skip("this system does not count the bytes of a process; see make bench on Linux")
    system.ready()
    ours = [system.own_pid(name) for name in ("controller", "sidecar", "apiserver")] + [system.supervisord_pid()]

    def moved() -> int:
        return sum(
            counters.read_chars + counters.write_chars
            for counters in (psutil.Process(pid).io_counters() for pid in ours)
        )

    stream = system.stream(slow=False)
    before, chunks = moved(), stream.chunks
    # 1.2 MB: our processes read and write some 10 KiB in each pass, whatever is streamed.
    eventually(lambda: stream.chunks > chunks + 6000, 120, "fifteen answers to stream")
    assert stream.completed()
    streamed = (stream.chunks - chunks) * 200  # an event of llama-server has more than 200 bytes
    assert moved() - before < streamed / 4
