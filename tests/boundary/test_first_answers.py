"""When the sidecar's prober sends a first request, and when it does not. The engine is the stand-in."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from metal_supervisor.host import liveness, processes
from metal_supervisor.host.liveness import HangLimits
from metal_supervisor.runtimes import probing
from metal_supervisor.runtimes.probing import ProbeAnswer
from metal_supervisor.sidecar.probes import FIRST_AWAITED, ProbeFinding, Prober, ProbeTarget, _Asker
from metal_supervisor.spec.first_request import smallest
from metal_supervisor.spec.types import Probe
from tests.support.system import FAKE_ENGINE, eventually, free_ports

UNKNOWN = ProbeFinding(False, "")
CHAT = "/v1/chat/completions"
Start = Callable[..., "Asked"]


class Asked:
    """An engine that is asked by a prober."""

    def __init__(self, base: Path, mode: str, key: tuple[str, str], arguments: tuple[str, ...]) -> None:
        (port,) = free_ports(1)
        self._log = base / "log"
        command = [sys.executable, str(FAKE_ENGINE), "--alias", "tiny", "--host", "127.0.0.1", "--port", str(port)]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen([*command, *arguments], stdout=log, stderr=subprocess.STDOUT)
        path, body = smallest(mode, "tiny")
        probe = Probe(identity="tiny", first_path=path, first_body=body)
        self.target = ProbeTarget(self.process.pid, "127.0.0.1", port, probe)
        keys = {"tiny": key}
        self.prober = Prober(lambda: None, lambda: None, HangLimits(60, 60), lambda name: keys.get(name, ("", "")))

    def ask(self, known: ProbeFinding = UNKNOWN, ending: bool = False) -> None:
        self.prober.ask_only({"tiny": (self.target, known)}, {"tiny"} if ending else ())

    def finds(self, wanted: ProbeFinding) -> None:
        eventually(lambda: self.prober.finding("tiny") == wanted, 20, f"{wanted}, not {self.prober.finding('tiny')}")

    def requests(self) -> list[str]:
        """What it was asked that makes a model work."""
        return [line for line in self._log.read_text().splitlines() if line.startswith("asked ")]

    def tell(self, **faults: object) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.target.port, timeout=10)
        connection.request("POST", "/fake", json.dumps(faults))
        assert connection.getresponse().read()
        connection.close()

    def end(self) -> None:
        self.prober.ask_only({})
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    begun: list[Asked] = []

    def begin(*arguments: str, mode: str = "chat", key: tuple[str, str] = ("", "")) -> Asked:
        begun.append(Asked(tmp_path, mode, key, arguments))
        return begun[-1]

    yield begin
    for each in begun:
        each.end()


@pytest.mark.parametrize(("mode", "flag"), [("chat", "--jinja"), ("embedding", "--embedding"), ("rerank", "--rerank")])
def test_one_request_of_the_mode_makes_it_ready(start: Start, mode: str, flag: str) -> None:
    up = start(flag, mode=mode)
    up.ask()
    up.finds(ProbeFinding(True, "", served=True))
    path, body = smallest(mode, "tiny")
    assert up.requests() == [f"asked {path} {body}"]


def test_one_that_served_is_never_asked_again(start: Start) -> None:
    up = start("--fake-answer-status", "500")
    up.ask(ProbeFinding(True, "", served=True))
    up.finds(ProbeFinding(True, "", served=True))
    up.prober.ask_only({})
    up.ask(ProbeFinding(False, "silent", served=True))  # by a new sidecar, while it was in doubt
    up.finds(ProbeFinding(True, "", served=True))
    assert up.requests() == []


def test_while_its_first_answer_is_waited_for_it_is_not_ready_and_says_so(start: Start) -> None:
    up = start("--fake-answer-delay-s", "600")
    up.ask()
    up.finds(ProbeFinding(False, FIRST_AWAITED))
    eventually(lambda: len(up.requests()) == 1, 20, "the request")


def test_one_that_fails_is_asked_again_until_it_succeeds(start: Start) -> None:
    up = start("--fake-answer-status", "500")
    up.ask()
    up.finds(ProbeFinding(False, f"{CHAT} answered 500: no answer, [31m as asked"))
    up.tell(answer_status=200)
    up.finds(ProbeFinding(True, "", served=True))
    assert len(up.requests()) >= 2


def test_a_key_it_wants_is_sent(start: Start) -> None:
    up = start("--fake-api-key", "s3cret", key=("LLAMA_API_KEY", "s3cret"))
    up.ask()
    up.finds(ProbeFinding(True, "", served=True))


def test_one_that_refuses_its_key_is_not_ready_and_the_key_is_not_told(start: Start) -> None:
    up = start("--fake-api-key", "other", key=("LLAMA_API_KEY", "s3cret"))
    up.ask()
    told = f"{CHAT} answered 401 (with the key in spec.env LLAMA_API_KEY): Invalid API Key Bearer …"
    up.finds(ProbeFinding(False, told))


def test_one_with_a_key_of_somebody_elses_is_ready(start: Start) -> None:
    up = start("--fake-api-key", "other")
    up.ask()
    up.finds(ProbeFinding(True, "", served=True))


def test_one_that_is_to_end_is_not_kept_busy_by_us(start: Start) -> None:
    up = start("--fake-answer-delay-s", "600")
    up.ask(ending=True)
    up.finds(ProbeFinding(False, FIRST_AWAITED))
    assert up.requests() == []
    up.ask()
    eventually(lambda: len(up.requests()) == 1, 20, "the request")
    up.ask(ending=True)
    eventually(lambda: not clients(up), 20, "our connection to be closed")


def clients(up: Asked) -> list[object]:
    """Connections of ours to the engine."""
    found = psutil.Process().net_connections("tcp")
    return [each for each in found if each.raddr and each.raddr.port == up.target.port and each.status == "ESTABLISHED"]


def test_who_listens_is_looked_up_while_it_loads_and_not_again(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[bool] = []
    really = processes.listens

    def listens(pid: int, port: int) -> frozenset[str] | None:
        loaded.append(probing.probe(port, Probe(), identify=False).ready)
        return really(pid, port)

    monkeypatch.setattr(processes, "listens", listens)
    monkeypatch.setattr(liveness, "SIGNS_EVERY_S", 3600.0)  # it is not looked for elsewhere
    up = start("--fake-never-ready")
    up.ask()
    eventually(lambda: loaded, 20, "the look")
    up.tell(never_ready=False)
    up.finds(ProbeFinding(True, "", served=True))
    assert loaded == [False]


def test_one_that_closed_its_port_after_it_loaded_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([ProbeAnswer(False, "", loading=True), ProbeAnswer(False, "", refused=True), ProbeAnswer(True, "")])
    holders = iter([frozenset({"127.0.0.1"}), frozenset()])
    monkeypatch.setattr(probing, "probe", lambda *_, **__: next(answers))
    monkeypatch.setattr(processes, "listens", lambda *_: next(holders))
    monkeypatch.setattr(processes, "port_holder", lambda _: "a stranger")
    prober = Prober(lambda: None, lambda: None, HangLimits(60, 60))
    asker = _Asker(prober, "tiny", ProbeTarget(1, "127.0.0.1", 18100, Probe()), UNKNOWN)
    found = [(asker.once(), asker.finding)[1] for _ in range(3)]
    assert found[2] == ProbeFinding(False, "port 18100 is answered by a stranger, not by the engine")


def test_one_that_served_and_closed_its_port_is_not_said_to_load() -> None:
    (port,) = free_ports(1)
    prober = Prober(lambda: None, lambda: None, HangLimits(60, 60))
    for served, word in ((False, "yet"), (True, "any more")):
        asker = _Asker(prober, "tiny", ProbeTarget(1, "127.0.0.1", port, Probe()), ProbeFinding(False, "", served))
        asker.once()
        assert asker.finding == ProbeFinding(False, f"the engine does not listen {word}", served)


def test_a_name_of_its_own_is_found_with_the_first_request_and_known_to_the_next_sidecar(start: Start) -> None:
    up = start("--fake-identity", "org/Phi-4")
    _, body = smallest("chat")
    own = Probe(names_itself=True, first_path=CHAT, first_body=body)
    up.target = replace(up.target, probe=own)
    served = ProbeFinding(True, "", True, model_name="org/Phi-4")
    for known in (UNKNOWN, served):
        up.prober.ask_only({})
        up.ask(known)
        up.finds(served)
    assert len(up.requests()) == 1


def test_an_engine_that_never_loads_is_never_asked(start: Start) -> None:
    up = start("--fake-never-ready")
    up.ask()
    up.finds(ProbeFinding(False, "the engine is loading its model"))
    assert up.requests() == []


def test_a_stranger_on_the_port_is_never_asked(start: Start) -> None:
    up = start("--fake-identity", "other")
    up.ask()
    up.finds(ProbeFinding(False, f"port {up.target.port} is answered by another server: it serves other, not tiny"))
    assert up.requests() == []
