"""Behind LLMKube's ModelRouter: an `inferenceServiceRef` reaches the Mac, and a model that is down refuses at once.

The router and kube-proxy are stand-ins: the one resolves a reference as LLMKube's router does, by name and
`spec.endpoint.port` alone; the other follows the Service's port to the ready endpoints of its slices, and
refuses a connection that has none, which is what kube-proxy's rules do.
"""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.system import ISVC, SERVICES, SLICES, System, eventually, running, service


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running(tmp_path_factory.mktemp("router")) as up:
        up.apply(up.tiny_model(), service("qwen2.5-7b", endpoint={"port": 9000}))
        up.ready("qwen2.5-7b")
        yield up


def resolve(system: System, reference: str) -> str:
    """The address of a backend, as the router writes it into its configuration."""
    found = system.get(f"{ISVC}/{reference}")
    port = (found["spec"].get("endpoint") or {}).get("port") or 8080
    return f"http://{reference.replace('.', '-')}.default.svc.cluster.local:{port}"


def connect(system: System, url: str) -> http.client.HTTPConnection:
    """What a pod's connection to a Service comes to."""
    parts = urllib.parse.urlsplit(url)
    assert parts.hostname
    name = parts.hostname.partition(".")[0]
    found = system.get(f"{SERVICES}/{name}")
    assert "selector" not in found["spec"]
    port = next(each["name"] for each in found["spec"]["ports"] if each["port"] == parts.port)
    slices = system.kube.request("GET", SLICES, {"labelSelector": f"kubernetes.io/service-name={name}"})["items"]
    for item in slices:
        for endpoint in item["endpoints"]:
            if endpoint["conditions"]["ready"]:
                number = next(each["port"] for each in item["ports"] if each["name"] == port)
                return http.client.HTTPConnection(endpoint["addresses"][0], number, timeout=20)
    raise ConnectionRefusedError(f"{name} has no ready endpoint")


def ask(system: System, reference: str) -> dict[str, Any]:
    """One chat through the router: the body's model passes through unchanged."""
    connection = connect(system, resolve(system, reference))
    body = {"model": reference, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200
        return dict(json.load(answer))
    finally:
        connection.close()


def test_a_reference_reaches_the_engine_under_the_name_of_the_custom_resource(system: System) -> None:
    answer = ask(system, "qwen2.5-7b")
    assert answer["model"] == "qwen2.5-7b"
    assert "hello world" in answer["choices"][0]["message"]["content"]


def test_a_model_that_is_down_is_refused_at_once_and_is_back_when_it_is(system: System) -> None:
    address = urllib.parse.urlsplit(f"//{system.observe('qwen2.5-7b')['address']}")
    system.supervisorctl("stop", "default.qwen2.5-7b")
    name = "qwen2-5-7b"
    eventually(lambda: system.slice_ready(name) is False, what="the endpoint to be withdrawn")
    with pytest.raises(ConnectionRefusedError):
        ask(system, "qwen2.5-7b")
    # Nor does anybody hang who still has the address.
    late = http.client.HTTPConnection(address.hostname or "", address.port, timeout=20)
    with pytest.raises(ConnectionRefusedError):
        late.request("GET", "/health")
    system.supervisorctl("start", "default.qwen2.5-7b")
    eventually(lambda: system.slice_ready(name), what="the endpoint to be back")
    assert ask(system, "qwen2.5-7b")["model"] == "qwen2.5-7b"
