"""The cluster misbehaves: nothing that serves is touched, and everything is made good afterwards."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from metal_supervisor.apiserver import ApiServer, Options
from metal_supervisor.cluster.kube import Kube
from metal_supervisor.controller import boot
from metal_supervisor.settings.loader import conf_dir
from metal_supervisor.state import own_processes
from tests.support.faulty_api import FaultyApi
from tests.support.system import ISVC, System, api_faults, eventually, free_ports, running, service

DOWN_S = 30.0


def test_an_api_that_is_down_for_30_seconds_stops_nothing_and_is_caught_up_with(tmp_path: Path) -> None:
    with running(tmp_path) as system:
        system.apply(system.tiny_model(), service("tiny"), service("other"))
        pids = {name: system.ready(name) for name in ("tiny", "other")}
        system.supervisorctl("stop", "apiserver")
        down = time.monotonic()
        eventually(lambda: system.health()[1].get("cluster") == "unreachable", what="healthz to say so")
        # A change made meanwhile, through another server on the same data.
        _, prefix = own_processes.saved_access(system.files)
        port = free_ports(1)[0]
        meanwhile = Options(data_file=system.state / "apiserver.db", prefix=prefix, port=port,
                            crd_paths=tuple((conf_dir() / "crds").glob("*.yaml")), allow_loopback_endpoints=True)
        with ApiServer(meanwhile) as other:
            kubeconfig = tmp_path / "other-kubeconfig"
            text = system.kubeconfig.read_text()
            kubeconfig.write_text(text.replace(json.loads(text)["clusters"][0]["cluster"]["server"], other.url))
            kube = Kube(kubeconfig)
            kube.apply(f"{ISVC}/tiny", service("tiny", contextSize=1024), "test", force=True)
            kube.close()
        while time.monotonic() - down < DOWN_S:
            status, body = system.health()
            assert (status, body["status"], body["cluster"]) == (200, "ok", "unreachable")
            assert {name: system.pid(name) for name in pids} == pids
            time.sleep(1)
        system.supervisorctl("start", "apiserver")
        eventually(lambda: system.pid("tiny") not in (0, pids["tiny"]), what="the change to be applied")
        assert system.pid("other") == pids["other"]
        eventually(lambda: system.health() == (200, {"status": "ok"}), what="healthz")
        system.ready("tiny")


@dataclasses.dataclass
class Outside:
    """A system that uses a cluster of ours from outside, and the means to disturb it."""

    system: System
    api: ApiServer

    def disturb(self, *rules: dict[str, object]) -> None:
        api_faults(self.api.url, *rules)

    def heal(self) -> None:
        api_faults(self.api.url)


class ClusterSystem(System):
    """A System whose cluster is not the embedded one."""

    outside: Path

    @property
    def kubeconfig(self) -> Path:
        return self.outside


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Outside]:
    """Everything through a kubeconfig; the advertised address is one of the documentation range."""
    options = Options(
        data_file=tmp_path / "api.db", prefix="/k-test", crd_paths=tuple((conf_dir() / "crds").glob("*.yaml")),
    )
    with FaultyApi(options) as api:
        ClusterSystem.outside = tmp_path / "cluster-kubeconfig"
        ClusterSystem.outside.write_text(boot.kubeconfig(api.url))
        flags = ("--kubeconfig", str(ClusterSystem.outside), "--host-ip", "192.0.2.10", "--bind", "127.0.0.1")
        system = ClusterSystem(tmp_path, *flags)
        try:
            yield Outside(system.start(), api)
        finally:
            system.close()


def test_errors_on_the_models_never_stop_a_service(outside: Outside) -> None:
    system = outside.system
    system.apply(system.tiny_model(), service("tiny"))
    pid = system.ready()
    outside.disturb({"resource": "models", "action": {"status": 500}, "close_watches": True})
    system.supervisorctl("restart", "controller")
    eventually(lambda: "500" in system.fetch("/status")[1], what="the trouble to be reported")
    system.apply(service("tiny", priority="high"))
    time.sleep(2)
    assert system.pid() == pid
    outside.heal()
    eventually(lambda: system.status().get("effectivePriority") == 100000, 30, "the edit to be observed")
    assert system.pid() == pid


def test_a_cluster_is_named_and_nothing_is_applied_to_it(outside: Outside) -> None:
    said = outside.system.said()
    assert f"cluster  {outside.system.kube.server_name}" in said
    assert "k-test" not in said
    assert outside.system.get(ISVC)["items"] == []


def test_loopback_is_refused_as_an_address_outside_the_embedded_api(tmp_path: Path) -> None:
    options = Options(data_file=tmp_path / "api.db", prefix="/k", crd_paths=tuple((conf_dir() / "crds").glob("*.yaml")))
    with ApiServer(options) as api:
        ClusterSystem.outside = tmp_path / "cluster-kubeconfig"
        ClusterSystem.outside.write_text(boot.kubeconfig(api.url))
        flags = ("--kubeconfig", str(ClusterSystem.outside), "--bind", "127.0.0.1", "--host-ip", "127.0.0.1")
        system = ClusterSystem(tmp_path, *flags)
        try:
            system.start().apply(system.tiny_model(), service("tiny"))
            eventually(lambda: system.condition("MetalReady").get("reason") == "NoRoutableAddress", what="a condition")
            assert "127.0.0.1 is loopback" in system.condition("MetalReady")["message"]
            assert "--host-ip" in system.condition("MetalReady")["message"]
            assert system.slice() is None
        finally:
            system.close()


def test_a_missing_crd_and_a_forbidden_verb_are_named_and_heal(tmp_path: Path) -> None:
    options = Options(data_file=tmp_path / "api.db", prefix="/k")
    with FaultyApi(options) as api:
        ClusterSystem.outside = tmp_path / "cluster-kubeconfig"
        ClusterSystem.outside.write_text(boot.kubeconfig(api.url))
        flags = ("--kubeconfig", str(ClusterSystem.outside), "--host-ip", "192.0.2.10", "--bind", "127.0.0.1")
        system = ClusterSystem(tmp_path, *flags)
        try:
            system.start()
            eventually(lambda: "CRD is not installed" in system.fetch("/status")[1], what="the CRD to be missed")
            assert system.health()[0] == 200
            for path in sorted((conf_dir() / "crds").glob("*.yaml")):
                system.kubectl("apply", "--server-side", "-f", str(path))
            eventually(lambda: system.get(ISVC) is not None, what="the CRD to be served")
            outside = Outside(system, api)
            outside.disturb({"resource": "endpointslices", "verb": "apply", "action": {"status": 403}})
            system.apply(system.tiny_model(), service("tiny"))
            eventually(lambda: "403" in system.fetch("/status")[1], 30, "the refusal to be reported")
            eventually(system.pid, what="the engine to run all the same")
            outside.heal()
            system.ready()
        finally:
            system.close()


def test_an_expired_token_is_named_without_being_shown(outside: Outside) -> None:
    system = outside.system
    system.apply(system.tiny_model(), service("tiny"))
    pid = system.ready()
    outside.disturb({"action": {"status": 401}, "close_watches": True})
    eventually(lambda: "credentials are refused" in system.fetch("/status")[1], 30, "the refusal to be reported")
    assert system.health()[0] == 200
    assert system.pid() == pid
    outside.heal()
    eventually(lambda: system.health() == (200, {"status": "ok"}), 90, "health")
    assert system.pid() == pid
