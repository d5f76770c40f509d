"""The reaper as a process of its own beside the embedded API, and its judgement with a clock to turn."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import ssl
import subprocess
import sys
import urllib.error
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from apiserver_support import LEASES, SLICES, Client

from metal_supervisor.apiserver import ApiServer
from metal_supervisor.cluster import manifests
from metal_supervisor.placement import leases
from tests.support.system import eventually

SCRIPT = Path(__file__).resolve().parents[2] / "conf" / "reaper" / "reaper.py"
GONE = {"ready": False, "serving": False, "terminating": False}


class Cluster:
    """The Leases and slices of a few Macs."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._count = 0

    def renew(self, node: str, duration_s: float = 1) -> None:
        self._count += 1
        now = f"2026-11-21T09:00:00.{self._count:06d}Z"
        lease = leases.node_lease_object("default", node, duration_s, {}, now)
        assert self.client.apply(f"{LEASES}/{lease['metadata']['name']}", lease, f"metal/{node}").code in (200, 201)

    def publish(self, node: str, ready: bool = True, managed_by: str = manifests.MANAGED_BY) -> None:
        labels = {"kubernetes.io/service-name": "tiny", manifests.SLICE_MANAGER: managed_by, leases.NODE: node}
        body = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "addressType": "IPv4",
            "metadata": {"name": f"tiny-{node}", "labels": labels},
            "endpoints": [{"addresses": ["10.0.0.5"], "conditions": {**GONE, "ready": ready, "serving": ready}}],
            "ports": [{"name": "http", "port": 18100}],
        }
        reply = self.client.apply(f"{SLICES}/tiny-{node}", body, f"metal/{node}", force="true")
        assert reply.code in (200, 201), reply.body

    def slice(self, node: str) -> dict[str, Any]:
        return self.client.get(f"{SLICES}/tiny-{node}").body

    def conditions(self, node: str) -> dict[str, bool]:
        return self.slice(node)["endpoints"][0]["conditions"]

    def gone(self, node: str) -> bool:
        return self.conditions(node) == GONE


@pytest.fixture
def cluster(client: Client) -> Cluster:
    return Cluster(client)


class Process:
    """The reaper, run as the Deployment runs it."""

    def __init__(self, api: ApiServer, **environment: str) -> None:
        base = {"API_URL": api.url, "NAMESPACE": "default", "PERIOD_S": "0.05", "TTL_S": "0.3"}
        self.popen = subprocess.Popen(
            [sys.executable, "-I", "-B", str(SCRIPT)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"PATH": os.environ["PATH"], **base, **environment},
        )

    def line(self) -> str:
        """The next line it prints."""
        assert self.popen.stdout
        return self.popen.stdout.readline().strip()

    def stop(self) -> int:
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(timeout=30)

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        assert self.popen.stdout
        self.popen.stdout.close()


Start = Callable[..., Process]


@pytest.fixture
def start(api: ApiServer) -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def begin(**environment: str) -> Process:
            process = Process(api, **environment)
            stack.callback(process.close)
            return process

        yield begin


# ── as a process ─────────────────────────────────────────────────────────────────────────────────


def test_a_mac_that_falls_silent_is_withdrawn_and_one_that_renews_is_not(cluster: Cluster, start: Start) -> None:
    for node, duration_s in (("silent", 1), ("alive", 30)):
        cluster.renew(node, duration_s)
        cluster.publish(node)
    reaper = start()

    def withdrawn() -> bool:
        cluster.renew("alive", 30)
        return cluster.gone("silent")

    eventually(withdrawn, what="the silent Mac's endpoints")
    assert "tiny-silent" in reaper.line()
    assert cluster.conditions("alive")["ready"] is True
    found = cluster.slice("silent")
    assert found["endpoints"][0]["addresses"] == ["10.0.0.5"]
    assert found["metadata"]["annotations"]["metal-supervisor.io/reaped"].startswith("20")
    assert reaper.stop() == 0


def test_a_mac_that_wakes_up_announces_itself_again(cluster: Cluster, start: Start) -> None:
    cluster.publish("sleeper")  # without a Lease
    start()
    eventually(lambda: cluster.gone("sleeper"))
    cluster.renew("sleeper", 3600)
    cluster.publish("sleeper")
    version = cluster.client.get(f"{LEASES}/metal-reaper").body["metadata"]["resourceVersion"]
    eventually(
        lambda: int(cluster.client.get(f"{LEASES}/metal-reaper").body["metadata"]["resourceVersion"]) > int(version) + 3
    )
    assert cluster.conditions("sleeper")["ready"] is True


def test_a_mac_that_leaves_on_purpose_is_withdrawn_at_once(cluster: Cluster, start: Start) -> None:
    cluster.renew("leaver", 3600)
    cluster.publish("leaver")
    reaper = start()
    eventually(lambda: cluster.client.get(f"{LEASES}/metal-reaper").code == 200)
    assert cluster.conditions("leaver")["ready"] is True
    cluster.renew("leaver", 0)
    assert "tiny-leaver: leaver" in reaper.line()
    assert cluster.gone("leaver")


def test_slices_of_others_are_left_alone(cluster: Cluster, start: Start) -> None:
    cluster.publish("foreign", managed_by="somebody-else")
    cluster.publish("ours")
    start()
    eventually(lambda: cluster.gone("ours"))
    assert cluster.conditions("foreign")["ready"] is True


def test_it_shows_that_it_runs(cluster: Cluster, start: Start) -> None:
    start()
    path = f"{LEASES}/metal-reaper"
    first = eventually(lambda: cluster.client.get(path).code == 200 and cluster.client.get(path).body)
    assert first["spec"]["holderIdentity"] == "metal-reaper" and first["spec"]["leaseDurationSeconds"] == 1
    assert first["metadata"]["labels"] == {leases.KIND: "reaper"}
    version = first["metadata"]["resourceVersion"]
    eventually(lambda: cluster.client.get(path).body["metadata"]["resourceVersion"] != version)
    assert leases.LeaseReader().read([first]) == ({}, {}), "no Mac takes it for another Mac"


def test_a_failure_is_one_line_and_ends_nothing(cluster: Cluster, start: Start) -> None:
    cluster.publish("silent")
    fault = {"resource": "endpointslices", "action": {"status": 500}, "times": 2}
    assert cluster.client.post("/faults", [fault]).code == 200
    reaper = start()
    first = reaper.line()
    assert first.startswith("tick failed: HTTPError") and "500" in first
    eventually(lambda: cluster.gone("silent"))
    assert reaper.stop() == 0


def test_without_an_account_it_says_so_and_keeps_trying(tmp_path: Path, start: Start) -> None:
    reaper = start(API_URL="https://127.0.0.1:9", ACCOUNT_DIR=str(tmp_path))
    assert [reaper.line().split()[:3] for _ in range(2)] == [["tick", "failed:", "FileNotFoundError"]] * 2


# ── its judgement ────────────────────────────────────────────────────────────────────────────────


def loaded() -> ModuleType:
    """The script as a module, with the environment of now; leaves no compiled file where it is shipped from."""
    module = ModuleType("reaper")
    exec(compile(SCRIPT.read_text(), str(SCRIPT), "exec"), vars(module))
    return module


class Fake:
    """The script's functions, with a clock and an API of the test's."""

    def __init__(self, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module, self.now, self.down, self.version = module, 1000.0, False, 1
        self.patches: list[dict[str, Any]] = []
        self.lease: dict[str, Any] | None = {"holderIdentity": "a", "leaseDurationSeconds": 40}
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module, "call", self.call)
        self.reaper = module.Reaper()

    def call(self, method: str, what: tuple[str, str], name: str, query: Any, body: Any = None, kind: str = "") -> Any:
        if self.down:
            raise OSError("away")
        if method == "PATCH":
            if name != "metal-reaper":
                self.patches.append(body)
            return {}
        if what == self.module.LEASES:
            metadata = {"name": "metal-a", "resourceVersion": str(self.version)}
            return {"items": [{"metadata": metadata, "spec": self.lease}] if self.lease is not None else []}
        metadata = {"name": "x-a", "resourceVersion": "7", "labels": {leases.NODE: "a"}}
        return {"items": [{"metadata": metadata, "endpoints": [{"addresses": ["10.0.0.5"]}]}]}

    def watch(self, seconds: float, renewing: bool = False) -> int:
        """Ticks every five seconds; how often it reaped."""
        self.patches.clear()
        for _ in range(int(seconds / 5)):
            self.now += 5
            self.version += renewing
            try:
                self.reaper.tick()
            except OSError:
                self.reaper.last = self.now
        return len(self.patches)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    module = loaded()
    monkeypatch.setattr(module, "time", type("Time", (), dict(vars(module.time))))
    return Fake(module, monkeypatch)


def test_silence_is_what_the_mac_had_promised_not_to_exceed(fake: Fake) -> None:
    assert fake.watch(300, renewing=True) == 0
    assert fake.watch(35) == 0
    assert fake.watch(10) > 0
    assert fake.patches[0]["endpoints"] == [{"addresses": ["10.0.0.5"], "conditions": GONE}]
    assert fake.patches[0]["metadata"]["resourceVersion"] == "7"


def test_nobody_grows_older_while_the_api_is_away(fake: Fake) -> None:
    fake.watch(20, renewing=True)
    fake.down = True
    assert fake.watch(600) == 0
    fake.down = False
    assert fake.watch(30) == 0, "it could not renew either, and gets its time"
    assert fake.watch(15) > 0


def test_nobody_grows_older_while_the_reaper_stands_still(fake: Fake) -> None:
    fake.watch(20, renewing=True)
    fake.now += 3600
    assert fake.watch(5) == 0


def test_a_lease_that_is_gone_grants_one_full_time(fake: Fake) -> None:
    fake.watch(300, renewing=True)
    fake.lease = None
    assert fake.watch(35) == 0
    assert fake.watch(10) > 0


@pytest.mark.parametrize("spec", [{}, {"holderIdentity": ""}, {"holderIdentity": None}])
def test_a_released_lease_is_believed(fake: Fake, spec: dict[str, Any]) -> None:
    fake.lease = spec
    assert fake.watch(5) == 1


def test_a_refusal_is_told_unless_the_mac_was_faster(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = iter((404, 409, 403))

    def conflict(*_: Any, **__: Any) -> Any:
        raise urllib.error.HTTPError("u", next(codes), "no", Message(), io.BytesIO())

    monkeypatch.setattr(fake.module, "call", conflict)
    found = {"metadata": {"name": "x", "resourceVersion": "1", "labels": {leases.NODE: "a"}}, "endpoints": []}
    for _ in range(3):
        fake.reaper.reap(found, 40.0)
    assert capsys.readouterr().out == "cannot reap x: 403 no\n"


def test_a_mac_that_was_faster_wins(api: ApiServer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.publish("mac", ready=False)
    stale = cluster.slice("mac")
    cluster.publish("mac")  # it woke up
    monkeypatch.setenv("API_URL", api.url)
    monkeypatch.setenv("NAMESPACE", "default")
    loaded().Reaper().reap(stale, 40.0)
    assert cluster.conditions("mac")["ready"] is True


def test_the_token_is_read_anew_and_goes_to_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCOUNT_DIR", str(tmp_path))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    module = loaded()
    trusting = ssl.create_default_context()
    monkeypatch.setattr(module.ssl, "create_default_context", lambda cafile: trusting)
    sent = []

    def opened(_opener: Any, request: Any, timeout: float) -> Any:
        sent.append((request.full_url, request.unredirected_hdrs.get("Authorization")))
        return io.BytesIO(json.dumps({}).encode())

    monkeypatch.setattr(module.urllib.request.OpenerDirector, "open", opened)
    (tmp_path / "namespace").write_text("llm\n")
    for token in ("first\n", "second\n"):
        (tmp_path / "token").write_text(token)
        module.call("GET", module.LEASES, "", {"a": "b c"})
    url = "https://10.96.0.1:443/apis/coordination.k8s.io/v1/namespaces/llm/leases?a=b+c"
    assert sent == [(url, "Bearer first"), (url, "Bearer second")]
