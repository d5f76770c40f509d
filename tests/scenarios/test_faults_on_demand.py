"""Faults of services on demand, and of those around them."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.engines import either, gone, stand_in
from tests.support.faults import Figure, fault
from tests.support.gateway import Gateway, with_gateway
from tests.support.system import ISVC, eventually, halted, kill, service

ON_DEMAND = {"metal-supervisor.io/on-demand": "true"}
CROWD = 20


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with with_gateway(tmp_path_factory.mktemp("demand")) as up:
        up.system.apply(up.system.tiny_model())
        yield up


@pytest.fixture
def gateway(empty: Gateway) -> Iterator[Gateway]:
    """A system with a service on demand that is not loaded, and was not there before."""
    made = service(contextSize=32768, parallelSlots=4)
    made["metadata"]["annotations"] = ON_DEMAND
    empty.system.apply(made)
    unloaded(empty)
    yield empty
    if empty.system.maybe(f"{ISVC}/tiny"):
        gone(empty.system, "tiny")


def unloaded(gateway: Gateway) -> None:
    """Waits until there is no engine, and all say so: the word of an earlier rest may still stand."""
    system = gateway.system
    eventually(lambda: not system.pid(), 30, "the engine to be unloaded")
    eventually(lambda: system.condition("MetalReady").get("reason") == "Unloaded", 30, system.said())
    eventually(lambda: gateway.state("tiny") == "unloaded", 30, "the gateway to see it")


class Waiting:
    """Requests that are asked at once, each in a thread of its own."""

    def __init__(self, gateway: Gateway, count: int, model: str = "tiny") -> None:
        self._gateway, self._model = gateway, model
        self.answers: list[Any] = []
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(count)]
        for each in self._threads:
            each.start()
        self._count = count

    def _ask(self) -> None:
        try:
            self.answers.append(self._gateway.chat(self._model, timeout_s=90))
        except (OSError, http.client.HTTPException) as error:
            self.answers.append((0, repr(error)))

    def arrived(self) -> Waiting:
        """Waits until all of them are held."""
        eventually(lambda: held(self._gateway) == self._count, what="the requests to be held")
        return self

    def statuses(self) -> list[int]:
        """The statuses of all answers, 0 for a connection that was cut."""
        for each in self._threads:
            each.join(100)
        return sorted(status for status, _ in self.answers)


def held(gateway: Gateway) -> int:
    """Requests that wait, as the gateway tells the controller."""
    notes = [json.loads(path.read_text()) for path in (gateway.system.state / "use").glob("*.json")]
    return sum(use["waiting"] for note in notes for use in note["programs"].values())


@fault(
    "W10",
    "20 requests at once for a model on demand that is not loaded",
    happens="it is loaded once, and all of them are answered",
    sees="an answer that took as long as the load",
    bound="all of them 200",
)
def test_a_crowd_loads_it_once(gateway: Gateway, figure: Figure) -> None:
    with figure.timed("until the last answer"):
        assert Waiting(gateway, CROWD).statuses() == [200] * CROWD
    assert gateway.system.observe()["restarts"] == 0


@fault(
    "W11",
    "the gateway's worker is killed while 20 requests wait for a model",
    happens="they are cut; the next worker listens on the same sockets, and a new request loads the model",
    sees="a connection that is closed without an answer",
    bound="no request hangs; no connection is refused",
)
def test_a_killed_worker_cuts_those_who_wait(gateway: Gateway) -> None:
    with halted(gateway.system.own_pid("controller")):  # nothing is loaded meanwhile
        crowd = Waiting(gateway, CROWD).arrived()
        kill(gateway.system.own_pid("gateway"))
        assert crowd.statuses() == [0] * CROWD
    assert gateway.chat("tiny", timeout_s=60)[0] == 200


@fault(
    "W12",
    "the controller is killed while a request waits for a model",
    happens="the next controller loads it",
    sees="an answer, later",
    bound="answered",
)
def test_a_killed_controller_delays_the_load(gateway: Gateway, figure: Figure) -> None:
    controller = gateway.system.own_pid("controller")
    with halted(controller):
        crowd = Waiting(gateway, 2).arrived()
        kill(controller)
    with figure.timed("kill to answer"):
        assert crowd.statuses() == [200, 200], crowd.answers


@fault(
    "W13",
    "the engine is killed while it loads for a request",
    happens="supervisord starts it again, and the request waits",
    sees="an answer, later",
    bound="answered",
)
def test_an_engine_killed_while_it_loads_is_waited_for(gateway: Gateway) -> None:
    system = gateway.system
    with halted(system.own_pid("sidecar")):  # nobody finds it ready
        crowd = Waiting(gateway, 2).arrived()
        kill(eventually(system.pid, what="an engine"))
    assert crowd.statuses() == [200, 200], crowd.answers


@fault(
    "W14",
    "the model's file is gone when a request comes for a model that is not loaded",
    happens="the request is refused with the condition's reason; nothing is loaded",
    sees="503 `model_failed`",
    bound="within seconds",
)
def test_a_file_that_is_gone_is_told(gateway: Gateway) -> None:
    system = gateway.system
    system.tiny.rename(system.tiny.with_suffix(".away"))
    try:
        refused = eventually(lambda: (told := gateway.chat("tiny"))[0] == 503 and told[1]["error"], 30, "a refusal")
        assert refused["code"] == "model_failed" and "tiny.gguf" not in refused["message"]
    finally:
        system.tiny.with_suffix(".away").rename(system.tiny)
    # After the pause of its crashes, which would be that of the next service of this name too.
    eventually(lambda: gateway.chat("tiny")[0] == 200, 60, "it to be loaded")


@fault(
    "W15",
    "clients leave while they wait for a model",
    happens="it is loaded all the same if that has begun, and not if it has not",
    sees="nothing",
    bound="nobody is counted as waiting any more",
)
def test_clients_that_leave_are_not_waited_for(gateway: Gateway) -> None:
    with halted(gateway.system.own_pid("controller")):
        body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]})
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)) as connection:
            connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            eventually(lambda: held(gateway) == 1, what="the request to be held")
        eventually(lambda: held(gateway) == 0, what="its place to be given up")
    assert gateway.chat("tiny")[0] == 200


@fault(
    "W16",
    "a service is deleted while requests wait for its model",
    happens="they are told that there is no such model",
    sees="404 `model_not_found`",
    bound="at once",
)
def test_a_deleted_service_is_not_waited_for(gateway: Gateway) -> None:
    system = gateway.system
    with halted(system.own_pid("sidecar")):  # nobody finds it ready
        crowd = Waiting(gateway, 2).arrived()
        system.delete("tiny")
        eventually(lambda: len(crowd.answers) == 2, 40, "the requests to be answered")
    assert crowd.statuses() == [404, 404]


@fault(
    "W17",
    "more requests of one client wait for a model than may",
    happens="those beyond 64 are refused, the others answered",
    sees="503 `queue_full` with `Retry-After`",
    bound="64 answers",
)
def test_more_than_may_wait_are_refused(gateway: Gateway) -> None:
    with halted(gateway.system.own_pid("controller")):
        crowd = Waiting(gateway, 70)
        eventually(lambda: held(gateway) == 64 and len(crowd.answers) == 6, what="those that are too many")
    assert crowd.statuses() == [200] * 64 + [503] * 6


@fault(
    "W18",
    "a service is edited while its model is not loaded, while it loads for a request, and while it ends",
    happens="the request is answered, and the next engine has the edited spec",
    sees="an answer, later",
    bound="answered",
)
def test_an_edit_at_any_moment_loses_no_request(gateway: Gateway) -> None:
    system = gateway.system

    def edited(slots: int) -> None:
        made = service(contextSize=32768, parallelSlots=slots)
        made["metadata"]["annotations"] = {**ON_DEMAND, "metal-supervisor.io/idle-ttl": "10s"}
        system.apply(made)

    def slots() -> str:
        """Of the engine that is up, "" while there is none."""
        with contextlib.suppress(psutil.Error, ValueError):
            words = psutil.Process(system.pid()).cmdline()
            return words[words.index("--parallel") + 1]
        return ""

    edited(2)
    assert Waiting(gateway, 1).statuses() == [200]
    eventually(lambda: slots() == "2", 30, "an engine of the spec")  # that of the test before may have answered
    unloaded(gateway)
    with halted(system.own_pid("sidecar")):  # nobody finds it ready
        crowd = Waiting(gateway, 2).arrived()
        eventually(system.pid, what="an engine")
        edited(3)
    assert crowd.statuses() == [200, 200], crowd.answers
    eventually(lambda: slots() == "3", 30, "an engine of the edited spec")
    edited(4)
    crowd = Waiting(gateway, 2)
    assert crowd.statuses() == [200, 200], crowd.answers
    eventually(lambda: slots() == "4", 30, "an engine of the edited spec")


@fault(
    "W19",
    "the sidecar stands still while a model is unloaded, and while a request wants it again",
    happens="the request is held until the sidecar has seen the new engine, and is not sent to the one that ended",
    sees="an answer, later",
    bound="200",
)
def test_an_engine_that_ended_unseen_gets_no_request(gateway: Gateway) -> None:
    system = gateway.system
    made = service(contextSize=32768, parallelSlots=4)
    made["metadata"]["annotations"] = {**ON_DEMAND, "metal-supervisor.io/idle-ttl": "10s"}
    system.apply(made)
    assert Waiting(gateway, 1).statuses() == [200]
    ended = system.pid()
    with halted(system.own_pid("sidecar")):
        eventually(lambda: not psutil.pid_exists(ended), 30, "the engine to be unloaded")
        crowd = Waiting(gateway, 1)
        eventually(lambda: system.pid() not in (0, ended), what="another engine")
    assert crowd.statuses() == [200]


@fault(
    "W24",
    "an engine never gets ready, each time that it is loaded for a request",
    happens="it is restarted for its hang, until that counts as a crash loop; those who wait are told then",
    sees="503 `model_failed` with `Retry-After`; other models are loaded meanwhile",
    bound="no request waits for ever",
)
def test_an_engine_that_never_gets_ready_is_not_waited_for_for_ever(tmp_path: Path, figure: Figure) -> None:
    patience = "--hang-timeout", "2", "--llama-server-startup-timeout", "2"
    with with_gateway(tmp_path, *patience, engine=either(tmp_path)) as gateway:
        stuck, sound = stand_in("stuck", never_ready=True), service("sound")
        for made in (stuck, sound):
            made["metadata"]["annotations"] = ON_DEMAND
        gateway.system.apply(gateway.system.tiny_model(), stuck, sound)
        for name in ("stuck", "sound"):
            reason = f"{name} to be unloaded"
            eventually(lambda n=name: gateway.system.condition("MetalReady", n).get("reason") == "Unloaded", 30, reason)
        with figure.timed("until those who wait are told"):
            crowd = Waiting(gateway, 2, "stuck").arrived()
            assert gateway.chat("sound")[0] == 200
            assert crowd.statuses() == [503, 503], crowd.answers
        assert {told["error"]["code"] for _, told in crowd.answers} == {"model_failed"}, crowd.answers
        assert gateway.chat("sound")[0] == 200
