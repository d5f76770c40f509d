"""What a cluster does to a Mac on its worst days: each is named, stops nothing, and is made good when it is over."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor.apiserver import Options, codec, server
from metal_supervisor.cluster.kube import MERGE
from metal_supervisor.controller import boot
from metal_supervisor.settings.loader import conf_dir
from metal_supervisor.sidecar.publisher import HEARTBEAT_S
from tests.support.faulty_api import FaultyApi
from tests.support.macs import LEASES, Fleet, Mac, fleet
from tests.support.system import ISVC, MODELS, SLICES, System, api_faults, eventually, free_ports, kill, service

WITHIN_S = 30.0
FLAGS = ("--status-mode", "standalone", "--lease-duration", "5")
HEARTBEAT = "llmkube.ai/agent-heartbeat"


def options(base: Path, port: int = 0, name: str = "api.db") -> Options:
    crds = tuple((conf_dir() / "crds").glob("*.yaml"))
    return Options(data_file=base / name, prefix="/k-test", crd_paths=crds, port=port)


def kubeconfig(base: Path, url: str) -> Path:
    path = base / "cluster-kubeconfig"
    path.write_text(boot.kubeconfig(url))
    return path


@dataclass
class Disturbed:
    """A Mac, and the means to disturb its cluster."""

    mac: Mac
    url: str
    macs: Fleet
    found: list[Any]
    """The services that were there once the Mac had started."""

    def disturb(self, *rules: dict[str, object]) -> None:
        api_faults(self.url, *rules)

    def heal(self) -> None:
        api_faults(self.url)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disturbed]:
    base = tmp_path_factory.mktemp("worst")
    with FaultyApi(options(base)) as api, fleet(base, kubeconfig(base, api.url), *FLAGS) as macs:
        mac = macs.add("mac-a")
        found = mac.get(ISVC)["items"]
        mac.apply(mac.tiny_model(), service("tiny"), service("other"))
        mac.ready("tiny")
        mac.ready("other")
        yield Disturbed(mac, api.url, macs, found)


@pytest.fixture(autouse=True)
def always_healed(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").heal()


def answers(mac: System, name: str = "tiny") -> bool:
    """Whether the engine answers where it listens; its advertised address leads nowhere, and the API may be away."""
    port = json.loads((mac.state / "records" / f"default.{name}.json").read_text())["port"]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
    try:
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        return "hello world" in str(json.load(connection.getresponse())["choices"][0]["message"]["content"])
    finally:
        connection.close()


def observed(mac: Mac, name: str = "tiny") -> None:
    """Waits until an edit that needs no restart was read, understood and told: nothing was lost."""
    priority = "high" if mac.get(f"{ISVC}/{name}")["spec"].get("priority") != "high" else "low"
    mac.kube.request("PATCH", f"{ISVC}/{name}", None, {"spec": {"priority": priority}}, MERGE)
    value = {"high": 100_000, "low": 1_000}[priority]
    eventually(lambda: mac.status(name).get("effectivePriority") == value, 60, "an edit to be observed")


def healthy(mac: Mac) -> None:
    eventually(lambda: mac.health() == (200, {"status": "ok"}), 60, f"healthz to be as before; {mac.health()}")


def says(mac: Mac, *words: str) -> None:
    """Waits until /healthz is 200 and names the trouble."""

    def said() -> bool:
        status, body = mac.health()
        assert status == 200, body
        return body.get("cluster") == "unreachable" and all(word in body["reason"] for word in words)

    eventually(said, WITHIN_S, f"healthz to say {words}")


# ── K 5–12: what the API may answer ──────────────────────────────────────────────────────────────


ALL_OF_IT: dict[str, tuple[dict[str, Any], str]] = {
    "5-reset": ({"drop": True}, ""),
    "6-garbage": ({"garbage": True}, "not"),
    "9-too-many-requests": ({"status": 429, "retry_after_s": 1}, "429"),
    "10-internal-error": ({"status": 500}, "500"),
    "11-unauthorized": ({"status": 401}, "credentials are refused"),
}


@pytest.mark.parametrize(("action", "named"), ALL_OF_IT.values(), ids=ALL_OF_IT)
def test_an_api_that_answers_nothing_else_is_named_and_stops_nothing(
    cluster: Disturbed, action: dict[str, Any], named: str
) -> None:
    mac = cluster.mac
    pids = mac.pid("tiny"), mac.pid("other")
    cluster.disturb({"action": action, "close_watches": True})
    says(mac, named)
    eventually(lambda: "cluster_reachable 0.0" in mac.fetch("/metrics")[1], what="its metric")
    assert mac.fetch("/readyz")[0] == 200, "what serves is ready, whatever the cluster says"
    assert (mac.pid("tiny"), mac.pid("other")) == pids
    assert answers(mac)
    cluster.heal()
    observed(mac)
    healthy(mac)
    assert (mac.pid("tiny"), mac.pid("other")) == pids


def test_errors_on_the_models_never_stop_a_service(cluster: Disturbed) -> None:
    mac = cluster.mac
    pids = mac.pid("tiny"), mac.pid("other")
    cluster.disturb({"resource": "models", "action": {"status": 500}, "close_watches": True})
    before = mac.own_pid("controller")
    mac.supervisorctl("restart", "controller")
    eventually(lambda: mac.own_pid("controller") not in (0, before), what="another controller")
    eventually(lambda: "500" in mac.fetch("/status")[1], what="the trouble to be reported")
    mac.apply(service("tiny", priority="critical"))
    time.sleep(2)
    assert (mac.pid("tiny"), mac.pid("other")) == pids
    cluster.heal()
    eventually(lambda: mac.status().get("effectivePriority") == 1_000_000, 60, "the edit to be observed")
    healthy(mac)
    assert (mac.pid("tiny"), mac.pid("other")) == pids


def test_a_cluster_is_named_and_nothing_is_applied_to_it(cluster: Disturbed) -> None:
    said = cluster.mac.said()
    assert f"cluster  {cluster.mac.kube.server_name}" in said
    assert "k-test" not in said
    assert cluster.found == []


@pytest.mark.parametrize("action", [{"status": 410}, {"expire": True}], ids=["7-status", "8-event"])
def test_a_history_that_is_gone_is_read_anew_and_is_no_trouble(cluster: Disturbed, action: dict[str, Any]) -> None:
    mac = cluster.mac
    pid = mac.pid()
    cluster.disturb({"verb": "watch", "action": action, "times": 3, "close_watches": True})
    observed(mac)
    healthy(mac)
    assert mac.pid() == pid


# ── K 12, 14: one kind of write is refused ───────────────────────────────────────────────────────


def test_12_a_status_that_is_forbidden_names_the_right_that_is_missing(cluster: Disturbed) -> None:
    mac = cluster.mac
    pid, version = mac.pid(), mac.get(f"{ISVC}/tiny")["metadata"]["resourceVersion"]
    what = {"resource": "inferenceservices", "subresource": "status"}
    cluster.disturb({**what, "verb": "patch", "action": {"status": 403}})
    mac.kube.request("PATCH", f"{ISVC}/other", None, {"spec": {"priority": "critical"}}, MERGE)
    kill(mac.pid("other"))
    says(mac, "cannot patch", '"inferenceservices/status"')
    # Traffic is looked after all the same.
    eventually(lambda: mac.pid("other") and mac.slice_ready("other"), WITHIN_S, "the endpoint to be back")
    assert (mac.pid(), mac.get(f"{ISVC}/tiny")["metadata"]["resourceVersion"]) == (pid, version)
    assert answers(mac)
    cluster.heal()
    eventually(lambda: mac.status("other").get("effectivePriority") == 1_000_000, 60, "what was refused to be written")
    mac.ready("other", within_s=60)
    healthy(mac)
    assert mac.pid() == pid


CONFLICTS: dict[str, dict[str, str]] = {
    "status": {"resource": "inferenceservices", "subresource": "status"},
    "slice": {"resource": "endpointslices"},
}


@pytest.mark.parametrize("what", CONFLICTS.values(), ids=CONFLICTS)
def test_14_a_conflict_stops_nothing_and_what_was_to_be_written_is_written(
    cluster: Disturbed, what: dict[str, str]
) -> None:
    mac = cluster.mac
    pid = mac.pid()
    cluster.disturb({**what, "verb": "patch", "action": {"status": 409}, "times": 1})
    mac.apply(service("late"))
    eventually(lambda: mac.observe("late").get("pid"), WITHIN_S, "an engine")
    eventually(lambda: mac.observe("late").get("ready"), WITHIN_S, "it to serve")
    mac.ready("late", within_s=60)
    eventually(lambda: mac.slice_ready("late"), 60, "the endpoint")
    assert mac.pid() == pid
    cluster.heal()
    mac.delete("late")
    eventually(lambda: mac.observe("late") == {}, WITHIN_S, "it to be gone")
    healthy(mac)


# ── K 17, 20 ─────────────────────────────────────────────────────────────────────────────────────


def test_17_a_controller_that_finds_everything_running_changes_nothing(cluster: Disturbed) -> None:
    mac = cluster.mac
    before = mac.pid("tiny"), mac.pid("other"), mac.get(f"{ISVC}/tiny")["metadata"]["resourceVersion"]
    mac.supervisorctl("restart", "controller")
    at = json.loads((mac.state / "controller.json").read_text())["at"]
    eventually(
        lambda: (
            (told := json.loads((mac.state / "controller.json").read_text()))["at"] > at and told["cluster"]["synced"]
        ),
        WITHIN_S,
        "a pass",
    )
    assert (mac.pid("tiny"), mac.pid("other"), mac.get(f"{ISVC}/tiny")["metadata"]["resourceVersion"]) == before


def test_20_clocks_that_differ_by_ten_minutes_make_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who judges the heartbeat has the server's clock, so that is the one it is written by."""

    def there() -> datetime:
        return datetime.now(timezone.utc) + timedelta(minutes=10)

    def date(self: Any, timestamp: float | None = None) -> str:
        return there().strftime("%a, %d %b %Y %H:%M:%S GMT")

    monkeypatch.setattr(server._Handler, "date_time_string", date)
    monkeypatch.setattr(codec, "now", there)
    with FaultyApi(options(tmp_path)) as api, fleet(tmp_path, kubeconfig(tmp_path, api.url)) as macs:
        mac = macs.add("mac-a")
        mac.apply(mac.tiny_model(), service("tiny"))
        pid = mac.ready(within_s=60)
        made = mac.slice()
        assert made is not None
        beat = datetime.fromisoformat(made["metadata"]["annotations"][HEARTBEAT].replace("Z", "+00:00"))
        assert abs((beat - there()).total_seconds()) < 120, "a heartbeat by the server's clock"
        since = datetime.fromisoformat(mac.condition("MetalReady")["lastTransitionTime"].replace("Z", "+00:00"))
        made_at = mac.get(f"{ISVC}/tiny")["metadata"]["creationTimestamp"]
        created = datetime.fromisoformat(made_at.replace("Z", "+00:00"))
        assert since - created > timedelta(seconds=-2), "nothing became ready before it was made"
        observed(mac)
        assert (mac.pid(), macs.holder()) == (pid, "mac-a")
        healthy(mac)


# ── K 1, cluster rebuilt ─────────────────────────────────────────────────────────────────────────


def test_1_a_cluster_that_is_not_there_lacks_our_definitions_or_forbids_is_named_and_used_once_it_is(
    tmp_path: Path,
) -> None:
    port = free_ports(1)[0]
    config = kubeconfig(tmp_path, f"http://127.0.0.1:{port}/k-test")
    mac = Mac(tmp_path / "mac-a", "mac-a", config, 11)
    try:
        with mac.log.open("ab") as log:
            mac.process = subprocess.Popen(
                [sys.executable, "-m", "metal_supervisor", "run", *mac.flags],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        eventually(lambda: mac.health()[0] == 200, WITHIN_S, "the sidecar to answer")
        says(mac, f"http://127.0.0.1:{port}", "refused")
        assert "k-test" not in mac.fetch("/status")[1]
        with FaultyApi(replace(options(tmp_path, port), crd_paths=())) as api:
            eventually(lambda: "CRD is not installed" in mac.fetch("/status")[1], 60, "the definitions to be missed")
            assert mac.health()[0] == 200
            for path in sorted((conf_dir() / "crds").glob("*.yaml")):
                mac.kubectl("apply", "--server-side", "-f", str(path))
            eventually(lambda: mac.get(ISVC) is not None, what="the definitions to be served")
            api_faults(api.url, {"resource": "endpointslices", "verb": "apply", "action": {"status": 403}})
            mac.apply(mac.tiny_model(), service("tiny"))
            eventually(lambda: "403" in mac.fetch("/status")[1], WITHIN_S, "the refusal to be reported")
            eventually(mac.pid, what="the engine to run all the same")
            api_faults(api.url)
            mac.ready(within_s=60)
            healthy(mac)
            mac.stop()
    finally:
        mac.close()


def test_a_cluster_that_comes_back_empty_stops_nothing_until_it_is_restored(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    config = kubeconfig(tmp_path, f"http://127.0.0.1:{port}/k-test")
    with fleet(tmp_path, config, *FLAGS) as macs:
        with FaultyApi(options(tmp_path, port)):
            mac = macs.add("mac-a")
            mac.apply(mac.tiny_model(), service("tiny"))
            pid = mac.ready()
        says(mac, "refused")
        with FaultyApi(options(tmp_path, port, "rebuilt.db")):
            mac.supervisorctl("restart", "controller")  # rather than wait ten minutes for the next list
            eventually(
                lambda: json.loads((mac.state / "controller.json").read_text())["cluster"]["doubtful"],
                WITHIN_S,
                "the Mac to doubt that all is gone",
            )
            assert mac.maybe(f"{ISVC}/tiny") is None
            assert mac.pid() == pid and answers(mac)
            # What takes its name there is another object, and nothing is done about it while in doubt.
            mac.apply(service("tiny", contextSize=4096))
            eventually(lambda: mac.get(LEASES)["items"], WITHIN_S, "the Mac to show that it lives")
            assert mac.pid() == pid and answers(mac)
        says(mac, "refused")
        with FaultyApi(options(tmp_path, port)):
            mac.supervisorctl("restart", "controller")
            observed(mac)
            assert mac.pid() == pid
            healthy(mac)
            mac.stop()


# ── others of the table ──────────────────────────────────────────────────────────────────────────


def test_two_macs_of_one_identity_are_noticed_and_the_later_one_gives_way(cluster: Disturbed, tmp_path: Path) -> None:
    first, macs = cluster.mac, cluster.macs
    healthy(first)
    pid = first.ready()
    copy = Mac(tmp_path / "copy", "mac-a", macs.kubeconfig, 12, *FLAGS)
    try:
        copy.start()
        eventually(
            lambda: "another Mac uses this one's identity" in copy.health()[1].get("reason", ""),
            WITHIN_S,
            "the copy to say so",
        )
        assert "--node-name" in copy.health()[1]["reason"]
        assert copy.health()[0] == 200
        # What the copy wrote before it knew is written over with the first one's next heartbeat.
        eventually(lambda: macs.slices() == {"mac-a": True}, HEARTBEAT_S + WITHIN_S, "one endpoint")
        assert first.pid() == pid
        healthy(first)
        # Once it is alone it goes on; the copy, with a name of its own, is another Mac.
        copy.stop()
        observed(first)
        assert first.pid() == pid and macs.holder() == "mac-a"
    finally:
        copy.close()


def test_a_plugin_that_fails_at_the_start_is_named_with_its_last_words(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin"
    plugin.write_text("#!/bin/sh\necho first >&2\necho 'token expired; run login' >&2\nexit 3\n")
    plugin.chmod(0o755)
    config = tmp_path / "config"
    config.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
                "users": [
                    {
                        "name": "u",
                        "user": {
                            "exec": {
                                "apiVersion": "client.authentication.k8s.io/v1",
                                "command": str(plugin),
                                "interactiveMode": "Never",
                            }
                        },
                    }
                ],
            }
        )
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "metal_supervisor",
            "run",
            "--state-dir",
            str(tmp_path / "run"),
            "--port",
            str(free_ports(1)[0]),
            "--kubeconfig",
            str(config),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = done.stdout + done.stderr
    assert done.returncode in (1, 78), said
    assert "token expired; run login" in said and "Traceback" not in said


def test_an_object_deleted_while_the_mac_was_off_is_stopped_when_it_is_back(cluster: Disturbed) -> None:
    """Not only the controller: nothing of this Mac ran, and the engine outlived it."""
    mac, macs = cluster.mac, cluster.macs
    mac.apply(service("gone"))
    mac.ready("gone")
    stays = mac.ready("tiny")
    frozen = [pid for pid, command in mac.commands().items() if "default." not in " ".join(command)]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    macs.kube.request("DELETE", f"{ISVC}/gone")
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: mac.pid("gone") == 0, WITHIN_S, "it to end")
    eventually(lambda: macs.slices("gone") == {} and macs.holder("gone") == "", WITHIN_S, "nothing to be left")
    assert mac.pid("tiny") == stays
    assert mac.get(SLICES)["items"] and mac.get(LEASES)["items"] and mac.get(MODELS)["items"]
