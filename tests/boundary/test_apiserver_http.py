"""The HTTP side: the prefix, errors that are always a Status, discovery in all its forms, and faults."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import threading
import time
from typing import Any

import pytest
from apiserver_support import (
    APPLY,
    CONFIG_MAPS,
    CRD_PATH,
    ISVCS,
    LEASES,
    MERGE,
    PREFIX,
    SERVICES,
    SLICES,
    STRATEGIC,
    WIDGET_CRD,
    WIDGETS,
    Client,
    config_map,
    isvc,
    lease,
    options,
    widget,
)

from metal_supervisor.apiserver import ApiServer
from metal_supervisor.apiserver import server as api_server
from metal_supervisor.apiserver.server import MOST, Connections
from tests.support.system import eventually


def test_who_does_not_know_the_prefix_sees_nothing(api: ApiServer) -> None:
    for prefix in ("", "/", "/k", PREFIX[:-1], PREFIX + "0", PREFIX.upper(), "/..%2f" + PREFIX[1:]):
        stranger = Client(api.port, prefix)
        reply = stranger.get("/version")
        assert (reply.code, reply.body["kind"], reply.body["reason"]) == (404, "Status", "NotFound"), prefix
        stranger.close()


@pytest.mark.parametrize(
    ("method", "path", "body", "code"),
    [
        ("GET", "/apis/nope/v1/things", None, 404),
        ("GET", "/api/v1/nope", None, 404),
        ("GET", "/openapi/v1", None, 404),
        ("POST", "/openapi/v2", b"{}", 404),
        ("GET", f"{ISVCS}/x/log", None, 404),
        ("POST", "/api/v1/services", b"{}", 405),
        ("PUT", SERVICES, b"{}", 405),
        ("PATCH", SERVICES, b"{}", 405),
        ("POST", SERVICES, b"{nope", 400),
        ("POST", SERVICES, b"a: [", 400),
        ("POST", SERVICES, b"[]", 400),
        ("POST", SERVICES, b'{"metadata": []}', 422),
        ("POST", SERVICES, b'{"metadata": {"name": 1}}', 422),
        ("POST", SERVICES, b'{"metadata": {"name": "s"}, "spec": []}', 422),
        ("POST", SERVICES, b"[" * 100_000, 400),
        ("POST", SERVICES, b'{"a": NaN}', 400),
        ("POST", SERVICES, b'{"a": 1e999}', 400),
        ("POST", SERVICES, b'{"a": -1e999}', 400),
        ("POST", SERVICES, b'{"a": 1%s}' % (b"0" * 400), 400),
        ("POST", SERVICES, b"k8s\x00\xff\xff", 400),
        ("GET", "//[", None, 404),
        ("GET", SERVICES + "?watch=1&resourceVersion=x", None, 400),
        ("GET", SERVICES + "?watch=1&labelSelector=a%20b", None, 400),
    ],
)
def test_every_error_is_a_status(client: Client, method: str, path: str, body: bytes | None, code: int) -> None:
    reply = client.request(method, path, body)
    assert (reply.code, reply.body["kind"], reply.body["status"]) == (code, "Status", "Failure"), reply.body
    assert reply.body["code"] == code and reply.body["message"]
    assert client.get("/healthz").code == 200


def test_a_body_has_a_limit(client: Client) -> None:
    assert client.post(CONFIG_MAPS, config_map("c", a="x" * 3_200_000)).code == 413


def test_half_of_a_character_is_kept_as_a_real_server_keeps_it(client: Client) -> None:
    for name, spelled in (("escape", rb"x\udcff"), ("bytes", b"x\xed\xb3\xbf")):
        head = f'{{"apiVersion":"v1","kind":"ConfigMap","metadata":{{"name":"{name}"}},"data":{{"a":"'.encode()
        assert client.request("POST", CONFIG_MAPS, head + spelled + b'"}}').code == 201
        assert client.get(f"{CONFIG_MAPS}/{name}").body["data"] == {"a": "x\ufffd"}


def test_discovery_whatever_form_is_preferred(client: Client) -> None:
    groups = [group["name"] for group in client.get("/apis").body["groups"]]
    assert "inference.llmkube.dev" in groups
    resources = client.get("/apis/inference.llmkube.dev/v1alpha1").body["resources"]
    wanted = {"inferenceservices", "inferenceservices/status", "inferenceservices/scale"}
    assert wanted <= {resource["name"] for resource in resources}
    aggregated = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json"
    plain = client.request("GET", "/apis", headers={"Accept": aggregated})
    assert plain.headers["content-type"] == "application/json"
    assert [group["name"] for group in plain.body["groups"]] == groups
    assert client.get("/version").body["gitVersion"].endswith("+metal-supervisor")
    paths = client.get("/openapi/v3").body["paths"]
    document = client.get(paths["apis/inference.llmkube.dev/v1alpha1"]["serverRelativeURL"].partition("?")[0]).body
    assert any(name.endswith("InferenceService") for name in document["components"]["schemas"])
    assert [client.get(path).body for path in ("/healthz", "/livez", "/readyz")] == ["ok"] * 3


def test_who_prefers_protobuf_gets_json(client: Client) -> None:
    preferring = {"Accept": "application/vnd.kubernetes.protobuf,application/json"}
    assert client.request("GET", CONFIG_MAPS, headers=preferring).body["kind"] == "ConfigMapList"


JUNK: list[Any] = [None, 0, -1, 1.5, True, "", "x", [], {}, [None], ["a"], [{}], {"a": {"b": [1]}}, 10**30, {"": ""}]
SUBJECTS: list[tuple[str, dict[str, Any]]] = [
    (ISVCS, isvc(replicas=1) | {"status": {"phase": "Ready", "conditions": []}}),
    (WIDGETS, widget(tags=["a"], extra={"a": "b"})),
    (CRD_PATH, WIDGET_CRD),
    (LEASES, lease("l", holderIdentity="a", leaseDurationSeconds=3, renewTime="2026-01-01T00:00:00.000000Z")),
    (SERVICES, {"metadata": {"name": "s"}, "spec": {"type": "NodePort", "ports": [{"name": "a", "port": 1}]}}),
    (
        SLICES,
        {
            "metadata": {"name": "e", "labels": {"a": "b"}, "finalizers": ["a.test/b"]},
            "addressType": "IPv4",
            "endpoints": [{"addresses": ["10.0.0.1"], "conditions": {"ready": True}}],
            "ports": [{"name": "a", "port": 1}],
        },
    ),
    (
        CONFIG_MAPS,
        {
            "metadata": {
                "name": "c",
                "ownerReferences": [{"apiVersion": "v1", "kind": "Service", "name": "s", "uid": "u"}],
                "managedFields": [{"manager": "m", "operation": "Update", "fieldsV1": {"f:data": {"f:a": {}}}}],
            },
            "data": {"a": "b"},
        },
    ),
]


def spoiled(value: Any, chance: random.Random) -> Any:
    """The value with some parts missing, doubled, or replaced by junk."""
    if chance.random() < 0.1:
        return chance.choice(JUNK)
    if isinstance(value, dict):
        return {name: spoiled(inner, chance) for name, inner in value.items() if chance.random() > 0.03}
    if isinstance(value, list):
        return [spoiled(inner, chance) for inner in value] * chance.choice([1, 1, 2])
    return value


AS_THE_REAL_ONE_FAILS = (
    "failed to create typed patch object",
    "failed to convert new object",
    "does not contain declared merge key",
    "resourceVersion should not be set",
)
"""What the real server too answers with 500."""


@pytest.mark.parametrize("seed", range(3))
def test_no_body_is_too_strange_for_an_answer(widgets: Client, caplog: pytest.LogCaptureFixture, seed: int) -> None:
    chance = random.Random(seed)
    for path, body in SUBJECTS:
        widgets.post(path, body)
    for _ in range(300):
        path, body = chance.choice(SUBJECTS)
        method, kind = chance.choice(
            [("POST", ""), ("PUT", ""), ("PATCH", MERGE), ("PATCH", STRATEGIC), ("PATCH", APPLY), ("PATCH", APPLY)]
        )
        where = path if method == "POST" else f"{path}/{body['metadata']['name']}{chance.choice(['', '', '/status'])}"
        reply = widgets.request(method, where, spoiled(body, chance), kind=kind, fieldManager=chance.choice("ab"))
        assert reply.code < 500 or any(text in reply.body["message"] for text in AS_THE_REAL_ONE_FAILS)
    assert caplog.records == []
    assert {widgets.get(path).code for path in ("/openapi/v3", "/apis", CONFIG_MAPS)} == {200}


# ---- faults ------------------------------------------------------------------------------------


def test_faults_strike_what_they_name_as_often_as_they_say(client: Client) -> None:
    rules = [
        {"verb": "get", "resource": "configmaps", "name": "c", "times": 2, "action": {"status": 500}},
        {"verb": "list", "action": {"status": 429, "retry_after_s": 1}},
        {"verb": "patch", "action": {"status": 401}},
    ]
    assert len(client.post("/faults", rules).body) == 3
    client.post(CONFIG_MAPS, config_map("c"))
    assert [client.get(f"{CONFIG_MAPS}/c").code for _ in range(3)] == [500, 500, 200]
    limited = client.get(CONFIG_MAPS)
    assert limited.code == 429 and limited.headers["retry-after"] == "1"
    assert client.merge(f"{CONFIG_MAPS}/c", {}).code == 401
    assert client.apply(f"{CONFIG_MAPS}/c", {}, "m").body["reason"] == "Unauthorized"
    assert len(client.get("/faults").body) == 2
    client.delete("/faults")
    assert client.get(CONFIG_MAPS).code == 200
    assert client.post("/faults", [{"verb": "get"}]).code == 400


def test_connections_can_be_dropped_delayed_hung_and_spoiled(client: Client) -> None:
    client.post("/faults", [{"verb": "get", "times": 1, "action": {"drop": True}}])
    with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
        client.get(f"{CONFIG_MAPS}/c")
    client.close()
    client.post("/faults", [{"verb": "get", "times": 1, "action": {"latency_s": 0.1}}])
    began_s = time.monotonic()
    assert client.get(f"{CONFIG_MAPS}/c").code == 404
    assert time.monotonic() - began_s >= 0.1
    client.post("/faults", [{"verb": "get", "times": 1, "action": {"hang_s": 0.1}}])
    with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
        client.get(f"{CONFIG_MAPS}/c")
    client.close()
    client.post("/faults", [{"verb": "get", "times": 1, "action": {"garbage": True}}])
    assert "not what you expected" in client.get(f"{CONFIG_MAPS}/c").body


def test_watches_can_be_cut_silenced_spoiled_and_expired(client: Client) -> None:
    version = client.version()
    with client.watch(CONFIG_MAPS, resourceVersion=version) as watch:
        rule = {"verb": "watch", "resource": "configmaps", "times": 1, "close_watches": True}
        client.post("/faults", [{**rule, "action": {"drop": True}}])
        assert watch.ended()
    cut = (http.client.IncompleteRead, json.JSONDecodeError, ConnectionError, EOFError)
    with client.watch(CONFIG_MAPS, resourceVersion=version) as watch, pytest.raises(cut):
        watch.next()
    client.post("/faults", [{**rule, "action": {"garbage": True}}])
    with client.watch(CONFIG_MAPS, resourceVersion=version) as watch, pytest.raises(json.JSONDecodeError):
        watch.next()
    client.post("/faults", [{**rule, "action": {"hang_s": 0.1}}])
    with client.watch(CONFIG_MAPS, resourceVersion=version) as watch, pytest.raises(cut):
        watch.next()
    client.post("/faults", [{**rule, "action": {"expire": True}}])
    with client.watch(CONFIG_MAPS, resourceVersion=version) as watch:
        assert watch.next()[1]["code"] == 410


def test_a_rebuilt_cluster_counts_from_the_beginning(client: Client) -> None:
    client.post(ISVCS, isvc())
    for number in range(20):
        client.merge(f"{ISVCS}/phi", {"metadata": {"labels": {"n": str(number)}}})
    before = int(client.version())
    client.post("/faults", [{"times": 1, "action": {"reset_rv": True}}])
    client.get("/api/v1/namespaces")
    assert int(client.version()) < before
    assert client.get(f"{ISVCS}/phi").body["metadata"]["labels"] == {"n": "19"}


def test_the_product_takes_no_orders_to_misbehave(tmp_path_factory: pytest.TempPathFactory) -> None:
    with ApiServer(options(tmp_path_factory.mktemp("api"), crd_paths=())) as server:
        client = Client(server.port)
        assert client.post("/faults", [{"action": {"status": 500}}]).code == 404
        client.close()


def test_a_request_without_length_is_refused(api: ApiServer) -> None:
    with socket.create_connection(("127.0.0.1", api.port), timeout=5) as raw:
        raw.sendall(f"POST {PREFIX}{SERVICES} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        assert raw.recv(100).startswith(b"HTTP/1.1 411")


def test_a_length_is_a_number(api: ApiServer) -> None:
    with socket.create_connection(("127.0.0.1", api.port), 10) as raw:
        raw.sendall(f"POST {PREFIX}{SERVICES} HTTP/1.1\r\nHost: x\r\nContent-Length: \xb2\r\n\r\n".encode("latin-1"))
        assert raw.recv(65536).startswith(b"HTTP/1.1 400 ")


def test_a_body_that_is_cut_off_changes_nothing(api: ApiServer, client: Client) -> None:
    full = json.dumps(config_map("c", one="x", two="y")).encode()
    where = f"{CONFIG_MAPS}/c"
    assert client.request("PATCH", where, full, kind=APPLY, fieldManager="m").code == 201
    options_of_delete = b'{"dryRun":["All"]}'
    for method, kind, body, sent in (
        ("PATCH", APPLY, full, len(full) // 2),
        ("DELETE", "application/json", options_of_delete, 0),
    ):
        head = f"{method} {PREFIX}{where}?fieldManager=m HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\n"
        with socket.create_connection(("127.0.0.1", api.port), 10) as dying:
            dying.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:sent])
            dying.shutdown(socket.SHUT_WR)
            answer = dying.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 400 ") and b"Connection: close" in answer
        assert f"after {sent} of {len(body)} bytes" in answer.decode()
    assert client.get(where).body["data"] == {"one": "x", "two": "y"}


def test_a_wrong_path_is_refused_before_the_body_is_read(api: ApiServer) -> None:
    for head in (
        "Content-Length: 3145728",
        "Content-Length: 3145728\r\nExpect: 100-continue",
        "Content-Length: x",
        "Transfer-Encoding: chunked",
    ):
        with socket.create_connection(("127.0.0.1", api.port), 5) as stranger:
            stranger.sendall(f"POST /k-wrong{SERVICES} HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode())
            answer = stranger.recv(65536)
            assert answer.startswith(b"HTTP/1.1 404 ") and b"Connection: close" in answer


def test_a_refused_body_that_was_sent_does_not_eat_the_answer(api: ApiServer) -> None:
    for _ in range(20):
        connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=10)
        connection.request("POST", f"/k-wrong{SERVICES}", b"x" * 60_000)
        assert connection.getresponse().status == 404
        connection.close()


@pytest.mark.parametrize("first", [b"", b"GET /k-wrong HTTP/1.1\r\nHost: x\r\n"])
def test_a_thousand_idle_strangers_stop_nobody(api: ApiServer, client: Client, first: bytes) -> None:
    before = threading.active_count()
    with client.watch(CONFIG_MAPS) as watch, contextlib.ExitStack() as strangers:
        for _ in range(1000):
            stranger = strangers.enter_context(socket.create_connection(("127.0.0.1", api.port), 60))
            stranger.sendall(first)
        other = Client(api.port, PREFIX)
        assert other.post(CONFIG_MAPS, config_map("made", a="x")).code == 201
        assert client.get(f"{CONFIG_MAPS}/made").code == 200, "a connection that was idle is opened anew at worst"
        assert watch.next()[0] == "ADDED", "a watch is not idle"
        eventually(lambda: threading.active_count() <= before + MOST + 10, 60, "those that gave way to end")
        other.close()


def test_a_thread_that_the_system_refuses_costs_one_connection(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(api._http, "process_request", refused)
        with pytest.raises((OSError, http.client.HTTPException)):
            Client(api.port).get("/version")
    with Client(api.port) as client:
        assert client.get("/version").code == 200


def test_connections_that_are_idle_give_way_and_those_at_work_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_server, "MOST", 3)
    pairs = [socket.socketpair() for _ in range(6)]
    ours = [pair[0] for pair in pairs]
    kept = Connections()
    for each in ours[:3]:
        assert kept.admit(each)
    for each in ours[:2]:
        kept.working(each)
    kept.resting(ours[0])
    assert kept.admit(ours[3]) and set(kept.all()) == {ours[0], ours[1], ours[3]}, "a stranger first"
    assert kept.admit(ours[4]) and set(kept.all()) == {ours[0], ours[1], ours[4]}
    kept.working(ours[4])
    assert kept.admit(ours[5]) and set(kept.all()) == {ours[1], ours[4], ours[5]}
    kept.working(ours[5])
    assert not kept.admit(ours[0]), "all are at work"
    kept.gone(ours[1])
    assert kept.admit(ours[0])
    for one, other in pairs:
        one.close()
        other.close()
