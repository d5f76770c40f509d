"""A real llama-server with an idle time: our own questions neither keep it awake nor wake it, a user's request does.

The engine is asked by the sidecar's own prober, far more often than in service.
"""

from __future__ import annotations

import http.client
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor.host import machine
from metal_supervisor.host.liveness import HangLimits
from metal_supervisor.runtimes import RUNTIMES, Binary, Place, probing
from metal_supervisor.sidecar import probes
from metal_supervisor.sidecar.probes import ProbeFinding, Prober, ProbeTarget
from metal_supervisor.spec.types import Endpoint, Model, Probe, Service
from tests.support.system import engine_path, eventually, free_ports, tiny_gguf

TTL_S = 1
LOOKS = 30
"""So many looks of ours follow while it sleeps; they take longer than the idle time."""


def ask(port: int, path: str, body: Any = None) -> Any:
    """The JSON that an engine answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProbeTarget]:
    """An engine as the runtime composes it, which serves."""
    path = engine_path()
    binary = Binary(str(path), machine.flags_in(machine.help_of(path)))
    if "--sleep-idle-seconds" not in binary.flags:
        pytest.skip("this build of llama-server does not know how to sleep")
    base, (port,) = tmp_path_factory.mktemp("sleeper"), free_ports(1)
    file = base / "tiny.gguf"
    tiny_gguf.write_tiny_gguf(file)
    model = Model("default", "tiny", "m", 1, str(file), "gguf", None, None)
    asked = Service(
        "default",
        "tiny",
        "u",
        1,
        model,
        "llama-server",
        1,
        False,
        Endpoint("tiny", 8080, "/", "ClusterIP", None),
        "chat",
        "normal",
        None,
        {"contextSize": 512, "idleTtlS": TTL_S},
        ("--threads", "1"),
    )
    made = RUNTIMES["llama-server"].engine(asked, binary, Place(str(file), "127.0.0.1", port, None, str(base)))
    with Path(base / "log").open("wb") as log:
        process = subprocess.Popen(made.argv, cwd=base, stdout=log, stderr=subprocess.STDOUT)
        try:
            eventually(lambda: probing.probe(port, made.probe, identify=True).ready, 30, "the engine to serve")
            yield ProbeTarget(process.pid, "127.0.0.1", port, made.probe)
            process.terminate()
            assert process.wait(30) == 0, "it ends as it should, asleep or not"
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What each look of the prober found, as it goes on."""
    found: list[bool] = []
    really = probing.probe

    def probe(*arguments: Any) -> probing.ProbeAnswer:
        answer = really(*arguments)
        found.append(answer.ready)
        return answer

    monkeypatch.setattr(probing, "probe", probe)
    monkeypatch.setattr(probes, "READY_EVERY_S", 0.05)
    return found


def sleeps(target: ProbeTarget) -> bool:
    return bool(ask(target.port, "/props")["is_sleeping"])


def test_it_falls_asleep_while_we_probe_and_stays_so_and_a_request_wakes_it(
    target: ProbeTarget, looks: list[bool]
) -> None:
    prober = Prober(lambda: None, lambda: None, HangLimits(60, 60))
    try:
        prober.ask_only({"tiny": (target, ProbeFinding(False, ""))})
        for _ in range(2):
            eventually(lambda: sleeps(target), 20, "it to fall asleep under our probing")
            looks.clear()
            eventually(lambda: len(looks) >= LOOKS, 20, "more looks")
            assert sleeps(target) and all(looks)
            assert prober.finding("tiny") == ProbeFinding(True, "", served=True), "it is ready all the while"
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 16}
            answer = ask(target.port, "/v1/chat/completions", body)
            assert answer["choices"][0]["message"]["content"].strip() == tiny_gguf.REPLY
    finally:
        prober.ask_only({})


def test_a_drain_of_a_sleeper_ends_at_once_and_does_not_wake_it(target: ProbeTarget) -> None:
    eventually(lambda: sleeps(target), 20, "it to fall asleep")
    prober = Prober(lambda: None, lambda: None, HangLimits(60, 60))
    eventually(lambda: prober.busy("tiny", "token", target) is False, 20, "it to be idle")
    assert probing.busy(target.port, target.probe) is False
    assert probing.probe(target.port, target.probe, identify=True).ready
    assert sleeps(target)


def test_asking_for_its_slots_would_wake_it(target: ProbeTarget) -> None:
    """Why `asleep_path` is there at all; once this fails, it may go."""
    eventually(lambda: sleeps(target), 20, "it to fall asleep")
    eventually(lambda: probing.works(target.port, Probe()) and not sleeps(target), 20, "it to wake")
