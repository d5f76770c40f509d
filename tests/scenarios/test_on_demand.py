"""Services on demand: loaded by the first request, unloaded when unused, and making room for each other."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from metal_supervisor.controller import on_demand
from tests.support.engines import gone
from tests.support.gateway import Gateway, with_gateway
from tests.support.macs import LEASES, embedded_cluster, fleet
from tests.support.ports import Range
from tests.support.system import ISVC, Stream, System, eventually, free_ports, halted, running, service, slowed
from tests.support.tight import room_for
from tests.support.typed import typed

ON_DEMAND = "metal-supervisor.io/on-demand"
IDLE_TTL = "metal-supervisor.io/idle-ttl"


def demanded(name: str = "tiny", ttl: str | None = None, **spec: Any) -> dict[str, Any]:
    """An on-demand InferenceService."""
    made = service(name, **{"contextSize": 32768, **spec})
    made["metadata"]["annotations"] = {ON_DEMAND: "true", **({IDLE_TTL: ttl} if ttl else {})}
    return made


def why(system: System, name: str) -> str:
    """Reason of its MetalReady, with the condition's status."""
    found = system.condition("MetalReady", name)
    return f"{found.get('status')}/{found.get('reason')}"


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with with_gateway(tmp_path_factory.mktemp("roomy")) as up:
        up.system.apply(up.system.tiny_model())
        yield up


@pytest.fixture
def gateway(roomy: Gateway) -> Iterator[Gateway]:
    """A system with no service, before and afterwards."""
    yield roomy
    gone(roomy.system, *(each["metadata"]["name"] for each in roomy.system.get(ISVC)["items"]))


def test_the_first_request_loads_it_and_the_endpoint_stays(gateway: Gateway) -> None:
    system = gateway.system
    system.apply(demanded())
    eventually(lambda: why(system, "tiny") == "True/Unloaded", what=system.said())
    assert system.pid() == 0 and gateway.state("tiny") == "unloaded"
    front = system.port()
    at_front = Gateway(system, front)
    assert at_front.ask("GET", "/health")[::2] == (200, {"status": "ok", "model": "unloaded"})
    assert at_front.ask("GET", "/slots")[0] == 404 and system.pid() == 0
    answer = gateway.chat("tiny")
    assert answer[0] == 200, (answer, gateway.log(), gateway.log_of("controller"))
    assert system.pid() and gateway.state("tiny") == "loaded" and system.port() == front
    eventually(lambda: why(system, "tiny") == "True/Serving", what=system.said())
    ((asked, seconds),) = system.observe("tiny")["wakes"].items()
    assert 0 < seconds < 100 and asked.endswith("Z")
    for command in (["explain", "default/tiny"], ["status", "--json"]):
        assert asked in typed(*command, "--state-dir", str(system.state)).stdout, command
    assert asked in system.fetch("/")[1]
    system.apply(demanded(replicas=0))
    eventually(lambda: at_front.ask("GET", "/health")[0] == 503, what="a service that is stopped to say so")
    eventually(lambda: at_front.chat("tiny")[1]["error"]["code"] == "model_stopped", what="its requests to be refused")


def test_no_endpoint_leads_to_a_gateway_that_was_stopped(gateway: Gateway) -> None:
    """Its holder keeps the ports open for the next worker: what is sent there waits, and other Macs get nothing."""
    system = gateway.system
    system.apply(demanded())
    eventually(lambda: why(system, "tiny") == "True/Unloaded" and system.slice_ready(), what=system.said())
    system.supervisorctl("stop", "gateway")
    try:
        eventually(lambda: not system.slice_ready(), 60, "the endpoint to be withdrawn")
    finally:
        system.supervisorctl("start", "gateway")
    eventually(system.slice_ready, 60, "the endpoint to be announced again")
    assert gateway.chat("tiny")[0] == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost.evil.example:3000"])
def test_pages_of_other_hosts_are_refused_at_a_port_on_demand(gateway: Gateway, origin: str) -> None:
    system = gateway.system
    system.apply(demanded())
    eventually(lambda: why(system, "tiny") == "True/Unloaded", what=system.said())
    front = Gateway(system, system.port())
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for method, path, asked in (("POST", "/v1/chat/completions", body), ("GET", "/v1/models", None)):
        told = front.ask(method, path, asked, headers={"Origin": origin})
        assert told[0] == 403, told
        assert told[2]["error"]["code"] == "origin_not_allowed"
    assert system.pid() == 0, "a page woke it"
    assert front.ask("GET", "/health", headers={"Origin": "http://localhost:3000"})[0] == 200


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A system with a service that is unloaded after a second without a request."""
    with with_gateway(tmp_path_factory.mktemp("hasty"), "--idle-ttl", "1") as up:
        up.system.apply(up.system.tiny_model(), demanded())
        eventually(lambda: why(up.system, "tiny") == "True/Unloaded", what=up.system.said())
        yield up.system


def test_its_own_address_loads_it_again_each_time(hasty: System) -> None:
    for _ in range(3):
        assert "hello world" in hasty.chat()
        assert hasty.slice_ready()
        eventually(lambda: why(hasty, "tiny") == "True/Unloaded" and not hasty.pid(), 30, hasty.said())
    assert hasty.slice_ready()


def test_a_stream_outlasts_the_idle_time(hasty: System) -> None:
    flow = Stream(hasty.port(), 1000).flowing()
    engine = hasty.pid()
    with slowed(engine):
        assert flow.completed(), flow.error
    assert hasty.pid() == engine
    eventually(lambda: not hasty.pid(), 30, "it to be unloaded")


def test_a_running_service_becomes_one_and_no_request_fails(gateway: Gateway) -> None:
    system = gateway.system
    system.apply(service(contextSize=32768))
    engine, direct = system.ready(), system.port()
    flow = Stream(direct, 600).flowing()
    with slowed(engine):
        system.kubectl("annotate", "inferenceservice", "tiny", f"{ON_DEMAND}=true")
        eventually(lambda: system.port() != direct, what="the gateway's port in the slice")
        assert system.slice_ready() and "hello world" in system.chat() and system.pid() == engine
        assert flow.completed(), flow.error


def test_without_a_gateway_it_stays_loaded_and_says_so(system: System) -> None:
    system.apply(system.tiny_model(), demanded())
    system.ready()
    told = system.condition("Degraded")
    assert told["reason"] == "OnDemandIgnored" and "--gateway" in told["message"]


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    with running(tmp_path) as up:
        yield up


def test_what_never_fits_here_goes_to_a_mac_where_it_does(tmp_path: Path) -> None:
    with embedded_cluster(tmp_path) as kubeconfig, fleet(tmp_path, kubeconfig) as macs:
        share = room_for(0.5, tmp_path / "small")
        ports = free_ports(2)
        small = macs.add("small", "--gateway", f"127.0.0.1:{ports[0]}", "--memory-fraction", share)
        small.apply(small.tiny_model(), demanded())
        eventually(lambda: why(small, "tiny") == "True/Unloaded", 30, small.said())
        front = Gateway(small, small.port())
        # As long as there is no other Mac, it stays, and the request is told why.
        status, told = front.chat("tiny")
        assert status == 503 and "never fits here" in told["error"]["message"] and macs.holder() == "small"
        large = macs.add("large", "--gateway", f"127.0.0.1:{ports[1]}")
        eventually(lambda: large.maybe(f"{LEASES}/metal-large"), 30, "the other Mac's own Lease")
        eventually(lambda: macs.holder() == "large" or not front.chat("tiny"), 60, "it to be given away")
        eventually(lambda: macs.slices() == {"large": True}, 30, large.said())
        assert Gateway(large, large.port()).chat("tiny", timeout_s=60)[0] == 200


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    base = tmp_path_factory.mktemp("small")
    with with_gateway(base, "--memory-fraction", room_for(1.5, base)) as up:
        up.system.apply(up.system.tiny_model())
        yield up


@pytest.fixture
def tight(small: Gateway) -> Iterator[Gateway]:
    """A system with memory for one of two models, neither of which is loaded."""
    names = "one", "two"
    small.system.apply(*map(demanded, names))
    for name in names:
        eventually(lambda name=name: why(small.system, name) == "True/Unloaded", what=small.system.said())
    yield small
    gone(small.system, *names)


def test_what_never_fits_is_told_before_anyone_asks_for_it(small: Gateway) -> None:
    system = small.system
    system.apply(demanded("never", contextSize=65536))
    eventually(lambda: why(system, "never") == "False/InsufficientMemory", 30, system.said())
    assert "never fits here" in system.condition("MetalReady", "never")["message"]
    status, told = small.chat("never")
    assert (status, told["error"]["code"]) == (503, "insufficient_memory")
    system.apply(demanded("never", contextSize=512, extraArgs=["--threads", "1", "--cache-ram", "0"]))
    eventually(lambda: why(system, "never") == "True/Unloaded", 30, system.said())
    assert small.chat("never")[0] == 200
    gone(system, "never")


def test_without_a_port_for_the_gateway_an_engine_stays_and_a_new_one_is_refused(tmp_path: Path) -> None:
    """On demand takes two ports. Without the gateway's, no request could wait until the model is loaded again."""
    (port,) = free_ports(1)
    with with_gateway(tmp_path, "--ports", f"{port}-{port}") as gateway:
        system = gateway.system
        system.apply(system.tiny_model(), service("tiny", contextSize=32768))
        pid = system.ready()
        system.apply(demanded(ttl="10s"))
        eventually(lambda: "NoPort" in str(system.status()), 30, system.said())
        assert gateway.chat("tiny")[0] == 200 and system.pid() == pid
        system.apply(service("tiny", replicas=0), demanded("new"))
        eventually(lambda: why(system, "new") == "False/NoPort", 30, system.said())


def test_unloaded_services_of_one_namespace_leave_ports_to_another(tmp_path: Path) -> None:
    held = Range()
    unloaded = [f"unloaded-{number}" for number in range(3)]
    with with_gateway(tmp_path, "--namespace", "", "--ports", f"{held.first}-{held.first + 4}") as gateway:
        system = gateway.system
        system.apply(system.tiny_model(), *map(demanded, unloaded))
        for name in unloaded:
            eventually(lambda name=name: why(system, name) == "True/Unloaded", what=system.said())
        system.kubectl("create", "namespace", "team")
        for each in (system.tiny_model(), service("tiny")):
            each["metadata"]["namespace"] = "team"
            system.kubectl("apply", "-f", "-", stdin=json.dumps(each))
        path = ISVC.replace("/default/", "/team/") + "/tiny"
        eventually(lambda: system.get(path).get("status", {}).get("phase") == "Ready", 60, system.said())
        assert gateway.chat(unloaded[0])[0] == 200, "it has the fifth port"
        status, told = gateway.chat(unloaded[1])
        assert status == 503 and "NoPort" in told["error"]["message"]
        gone(system, unloaded[0])
        assert gateway.chat(unloaded[1])[0] == 200


def test_one_whose_port_another_program_has_is_reached_at_another(gateway: Gateway) -> None:
    """As after a restart of the Mac: while the gateway runs, the port is its own."""
    system = gateway.system
    system.apply(demanded())
    eventually(lambda: why(system, "tiny") == "True/Unloaded", what=system.said())
    front, programs = system.port(), ("gateway", "gateway-2", "gateway-holder")
    system.supervisorctl("stop", *programs)
    with socket.create_server(("", front)):
        system.supervisorctl("start", *programs)
        eventually(lambda: system.port() not in (0, front), what="another port")
        eventually(lambda: why(system, "tiny") == "True/Unloaded", what=system.said())
        assert Gateway(system, system.port()).chat("tiny")[0] == 200


def test_an_idle_model_makes_room_for_another(tight: Gateway) -> None:
    for _ in range(2):
        for name, other in (("one", "two"), ("two", "one")):
            assert tight.chat(name)[0] == 200
            assert tight.system.pid(name) and not tight.system.pid(other)
    fronts = {name: tight.system.port(name) for name in ("one", "two")}
    assert len(set(fronts.values())) == 2
    for name, front in fronts.items():
        assert Gateway(tight.system, front).ask("GET", "/v1/models")[2]["data"][0]["id"] == name
    told = tight.system.condition("MetalReady", "one")
    assert told["reason"] == "Unloaded" and "made room for default/two" in told["message"]


def test_a_busy_model_answers_first(tight: Gateway) -> None:
    flow = Stream(tight.port, 800, "/services/default/one/v1/chat/completions").flowing().last()
    engine = tight.system.pid("one")
    with slowed(engine):
        assert tight.chat("two", timeout_s=240)[0] == 200
        assert flow.completed() and not psutil.pid_exists(engine), flow.error


def test_a_model_that_is_always_asked_for_takes_turns(tight: Gateway) -> None:
    """The other one's clients wait no longer than a turn, and none is refused."""
    over = threading.Event()
    failed: list[Any] = []

    def ask() -> None:
        while not over.is_set() and not failed:
            # So long that the other two are under way when one of them ends: between answers it would be idle.
            answer = tight.chat("one", timeout_s=240, max_tokens=300, ignore_eos=True)
            failed.extend([answer] if answer[0] != 200 else [])

    clients = [threading.Thread(target=ask, daemon=True) for _ in range(3)]
    for each in clients:
        each.start()
    eventually(lambda: tight.system.pid("one"), what="the first to be loaded")
    with slowed(tight.system.pid("one")):
        began = time.monotonic()
        assert tight.chat("two", timeout_s=240)[0] == 200
        waited_s = time.monotonic() - began
    over.set()
    for each in clients:
        each.join(240)
    assert not failed and waited_s >= on_demand.MIN_AWAKE_S / 2


def test_streams_show_signs_of_life_while_the_model_is_loaded(gateway: Gateway) -> None:
    """Real clients, and one whose model is deleted after the first sign."""
    import anthropic
    import openai

    system = gateway.system
    system.apply(demanded(), demanded("gone"))
    for name in ("tiny", "gone"):
        eventually(lambda name=name: why(system, name) == "True/Unloaded", what=system.said())
    told: dict[str, Any] = {}

    def ask_openai() -> None:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
            made = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=4, stream=True
            )
            told["openai"] = [each.choices[0].delta.content for each in made]

    def ask_anthropic() -> None:
        with anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as client:
            messages: list[Any] = [{"role": "user", "content": "hi"}]
            with client.messages.stream(model="tiny", max_tokens=4, messages=messages) as made:
                told["anthropic"] = "".join(made.text_stream)

    threads = [threading.Thread(target=each, daemon=True) for each in (ask_openai, ask_anthropic)]
    with halted(system.own_pid("sidecar")):  # nobody finds an engine ready
        for each in threads:
            each.start()
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)) as connection:
            body = json.dumps({"model": "gone", "messages": [{"role": "user", "content": "hi"}], "stream": True})
            connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            first = answer.readline()
            system.delete("gone")
            with pytest.raises(http.client.IncompleteRead) as ended:
                answer.read()
    for each in threads:
        each.join(60)
    assert answer.status == 200 and b'"delta": {}' in first
    assert b'"model_not_found"' in ended.value.partial and b"[DONE]" not in ended.value.partial
    assert told["openai"][0] is None and "".join(filter(None, told["openai"])) and told["anthropic"]
