"""The doctor and API servers: dead ones, strange ones, ones that refuse; and how long credentials hold."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from accounts_support import DAY, kubeconfig, token
from apiserver_support import PREFIX
from doctor_support import found, shown, surroundings, web
from test_kube import answering, http
from test_kube_tls import ELSEWHERE, EXPIRED, MAC, OURS, config, data, pem, server_context

from metal_supervisor.apiserver import ApiServer
from metal_supervisor.cluster.kube import BadKubeconfig, Kube
from metal_supervisor.controller import boot
from metal_supervisor.doctor import expiry, login
from metal_supervisor.doctor.rights import REVIEW, Right, bundles
from metal_supervisor.doctor.surroundings import Surroundings
from metal_supervisor.host.addresses import AddressChoice
from metal_supervisor.host.machine import Interface
from metal_supervisor.spec.instants import utc
from tests.support.system import free_ports

RBAC = Path(__file__).resolve().parents[2] / "conf" / "rbac"
CLUSTER = ("kubeconfig", "credential", "api", "rights", "kinds", "clock", "watch")
GROUP = "/apis/inference.llmkube.dev"


def around(tmp_path: Path, file: Path, **more: Any) -> Surroundings:
    settings = {"kubeconfig": str(file), "namespace": "llm", **more.pop("settings", {})}
    return surroundings(tmp_path, settings=settings, **more)


class Cluster:
    """A cluster as far as the doctor asks it."""

    def __init__(self) -> None:
        self.denied: set[tuple[str, str, str]] = set()
        """(group, resource, verb)"""
        self.asked: list[dict[str, str]] = []
        self.groups: Any = {"versions": [{"version": "v1alpha1"}]}
        self.leases: list[Any] = []
        self.services: list[Any] = []
        self.status: dict[str, int] = {}
        """Path -> the status that it answers with."""

    def __call__(self, path: str, body: bytes) -> tuple[int, bytes]:
        return self.status.get(path, 200), json.dumps(self._answer(path, body)).encode()

    def _answer(self, path: str, body: bytes) -> Any:
        if path in self.status:
            return {"kind": "Status", "message": "no"}
        if path.endswith("selfsubjectaccessreviews"):
            asked = json.loads(body)["spec"]["resourceAttributes"]
            self.asked.append(asked)
            resource = "/".join(filter(None, (asked["resource"], asked["subresource"])))
            return {"status": {"allowed": (asked["group"], resource, asked["verb"]) not in self.denied}}
        return {
            "/version": {"gitVersion": "v1.36.0"},
            GROUP: self.groups,
            f"{GROUP}/v1alpha1": {"resources": [{"name": "models"}, {"name": "inferenceservices"}]},
            "/apis/coordination.k8s.io/v1/namespaces/llm/leases": {"items": self.leases},
            f"{GROUP}/v1alpha1/namespaces/llm/inferenceservices": {"items": self.services},
        }.get(path, {"items": []})


def asked(tmp_path: Path, cluster: Cluster, *names: str, behind_s: float = 0.0, **more: Any) -> dict[str, str]:
    """What these checks say of a cluster, as text."""
    with web(cluster, behind_s) as url:
        file = kubeconfig(tmp_path / "k", url, {"token": token(0, time.time() + 30 * DAY)})
        told = found(around(tmp_path, file, **more), *(names or CLUSTER))
    return {name: shown(each) for name, each in told.items()}


# ── one that answers ─────────────────────────────────────────────────────────────────────────────


def test_a_cluster_that_is_in_order(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.leases = [
        {
            "metadata": {"labels": {"metal-supervisor.io/kind": "node"}},
            "spec": {"holderIdentity": name, "renewTime": utc(time.time())},
        }
        for name in ("a", "b")
    ]
    told = asked(tmp_path, cluster, settings={"node_name": "a"})
    assert all(each.startswith("ok ") for each in told.values()), told
    assert "context c of" in told["kubeconfig"] and "Kubernetes v1.36.0" in told["api"]
    assert "2 Macs watch over each other" in told["watch"] and "all 26 rights" in told["rights"]
    wanted = {(e.group, e.resource, e.verb) for e in bundles(RBAC, "llm", None, "", False)[0].rights}
    seen = {(e["group"], "/".join(filter(None, (e["resource"], e["subresource"]))), e["verb"]) for e in cluster.asked}
    assert seen == wanted and {each["namespace"] for each in cluster.asked} == {"llm"}


def test_a_namespace_that_does_not_exist_is_told_and_a_refusal_tells_nothing(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.status = {"/api/v1/namespaces/llm": 404}
    told = asked(tmp_path, cluster, "api", "kinds")["kinds"]
    assert "fail the cluster has no namespace 'llm'" in told and "kubectl create namespace llm" in told
    cluster.status = {"/api/v1/namespaces/llm": 403}
    assert asked(tmp_path, cluster, "api", "kinds")["kinds"].startswith("ok")


def test_each_right_that_is_missing_is_named_with_the_line_that_gives_it(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.denied = {("discovery.k8s.io", "endpointslices", "patch"), ("", "services", "create")}
    told = asked(tmp_path, cluster, "api", "rights")["rights"]
    assert told.startswith("fail ")
    assert "in namespace llm: create services, patch endpointslices.discovery.k8s.io |" in told
    assert "sed -e 's/namespace: llm/namespace: llm/'" in told and "namespace.yaml | kubectl apply -f -" in told
    assert "to bind it" not in told


def test_the_right_to_renew_its_own_token_is_asked_for_where_it_is_renewed(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.denied = {("", "serviceaccounts/token", "create")}
    (tmp_path / "k.token").write_text(token(time.time(), time.time() + 30 * DAY))
    with web(cluster) as url:
        file = kubeconfig(tmp_path / "k", url, {"tokenFile": "k.token"})
        told = found(around(tmp_path, file), "api", "rights", "credential")
    assert "create serviceaccounts/token" in shown(told["rights"]) and "mac.yaml" in shown(told["rights"])
    (own,) = (each for each in cluster.asked if each["subresource"] == "token")
    assert (own["name"], own["namespace"], own["resource"]) == ("metal-mac-a", "llm", "serviceaccounts")
    assert "is renewed at" in shown(told["credential"])


@pytest.mark.parametrize("wanted_by", ["service", "gateway"])
def test_the_right_to_values_is_asked_for_only_where_some_are_taken(tmp_path: Path, wanted_by: str) -> None:
    cluster = Cluster()
    cluster.denied = {("", "secrets", "get")}
    assert asked(tmp_path, cluster, "api", "rights")["rights"].startswith("ok")
    if wanted_by == "service":
        cluster.services = [{"spec": {"env": [{"name": "K", "valueFrom": {"secretKeyRef": {}}}]}}]
    settings = {"gateway_keys_secret": "llm/keys"} if wanted_by == "gateway" else {}
    told = asked(tmp_path, cluster, "api", "rights", settings={"namespace": "llm", **settings})["rights"]
    assert told.startswith("warn ") and "get secrets" in told and "secrets.yaml" in told


def test_all_namespaces_are_asked_for_at_once(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.denied = {(e.group, e.resource, e.verb) for e in bundles(RBAC, "", None, "", False)[0].rights}
    told = asked(tmp_path, cluster, "api", "rights", settings={"namespace": "", "node_name": "studio"})["rights"]
    assert {each["namespace"] for each in cluster.asked} == {""}
    assert "in all namespaces" in told and "cluster-wide.yaml" in told and "s/mac-a/studio/g" in told
    assert "to bind it" in told and "mac.yaml" in told


@pytest.mark.parametrize(
    ("groups", "status", "word"),
    [
        ({"versions": [{"version": "v1"}]}, {}, "we speak v1alpha1"),
        ({}, {GROUP: 404}, "is not installed"),
        ({}, {GROUP: 500}, "could not be asked"),
    ],
)
def test_our_kinds_are_looked_for(tmp_path: Path, groups: Any, status: dict[str, int], word: str) -> None:
    cluster = Cluster()
    cluster.groups, cluster.status = groups, status
    assert word in asked(tmp_path, cluster, "api", "kinds")["kinds"]


def test_a_clock_that_is_wrong_is_told_by_how_much(tmp_path: Path) -> None:
    told = asked(tmp_path, Cluster(), "api", "clock", behind_s=3600.0)["clock"]
    assert told.startswith("fail ") and "s behind the API server's" in told


def test_a_single_mac_without_a_reaper_is_a_warning(tmp_path: Path) -> None:
    told = asked(tmp_path, Cluster(), "api", "watch")["watch"]
    assert told.startswith("warn ") and "reaper.yaml | kubectl apply" in told


# ── the embedded one ─────────────────────────────────────────────────────────────────────────────


def test_the_embedded_api_is_in_order_and_its_way_in_is_not_shown(tmp_path: Path, api: ApiServer) -> None:
    made = surroundings(tmp_path)
    made.settings.kubeconfig_path.write_text(boot.kubeconfig(f"http://127.0.0.1:{api.port}{PREFIX}"))
    told = found(made, *CLUSTER)
    assert all(each.status == "ok" for findings in told.values() for each in findings), told
    assert "all 26 rights" in shown(told["rights"])
    assert PREFIX not in "".join(shown(each) for each in told.values()), "its address is its password"
    assert "credential" not in told and "watch" not in told and "clock" not in told


def test_only_of_an_embedded_api_is_it_well_that_it_does_not_tell_of_rights(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.status = {REVIEW: 404}
    made = surroundings(tmp_path)
    with web(cluster) as url:
        made.settings.kubeconfig_path.write_text(boot.kubeconfig(url))
        assert "lets everybody" in shown(found(made, "api", "rights")["rights"])
    assert asked(tmp_path, cluster, "api", "rights")["rights"].startswith("warn could not be asked")


# ── ones that do not answer ──────────────────────────────────────────────────────────────────────


def test_a_server_that_is_away_is_told_once_and_the_rest_says_what_it_waits_for(tmp_path: Path) -> None:
    file = config(tmp_path / "k", f"https://127.0.0.1:{free_ports(1)[0]}", **OURS)
    told = found(around(tmp_path, file), *CLUSTER)
    assert told["api"][0].status == "fail" and "connection refused" in told["api"][0].text
    for name in ("rights", "kinds", "clock", "watch"):
        assert [each.text for each in told[name]] == ["could not be asked: the API server does not answer"]


def test_a_server_that_says_nothing_is_waited_for_only_so_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        file = config(tmp_path / "k", f"http://127.0.0.1:{silent.getsockname()[1]}")
        told = found(around(tmp_path, file), *CLUSTER, check_s=0.5)
        ready = Kube(file)  # a login takes time as well, and is no part of the answer
        monkeypatch.setattr(login, "ANSWER_S", 0.3)
        (silence,) = found(around(tmp_path, file, login=lambda *_: ready), "api")["api"]
    assert told["api"][0].text == "could not be asked: no answer within 0.5 s"
    assert silence.status == "fail" and "says nothing" in silence.text
    assert told["rights"][0].text == "could not be asked: the API server does not answer"
    assert told["kubeconfig"][0].status == "ok"


def test_a_login_that_takes_too_long_is_not_the_servers_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login, "ANSWER_S", 0.3)
    browser = threading.Event()

    def slow(_file: Path, _context: str) -> Kube:
        browser.wait()
        raise BadKubeconfig("too late")

    try:
        with web(Cluster()) as url:
            file = kubeconfig(tmp_path / "k", url, {"token": "x"})
            (told,) = found(around(tmp_path, file, login=slow), "api")["api"]
    finally:
        browser.set()
    assert told.status == "warn" and "the login took longer than 0.3 s" in told.text and "plugin" in told.fix


def test_a_user_without_a_credential_is_named(tmp_path: Path) -> None:
    with web(Cluster()) as url:
        file = kubeconfig(tmp_path / "k", url, {"tokenFile": "none"})
        told = found(around(tmp_path, file), "kubeconfig", "credential", "api", "rights")
    assert told["kubeconfig"][0].status == "fail" and "none (tokenFile), which does not" in told["kubeconfig"][0].text
    assert told["api"][0].text == "not asked: the kubeconfig cannot be used" and "credential" not in told
    assert told["rights"][0].text == "could not be asked: the kubeconfig cannot be used"


def test_a_plugin_that_fails_gives_no_credential(tmp_path: Path) -> None:
    plugin = tmp_path / "plug"
    plugin.write_text("#!/bin/sh\necho 'no active account' >&2\necho ')' >&2\nexit 1\n")
    plugin.chmod(0o755)
    user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": str(plugin)}}
    told = found(around(tmp_path, kubeconfig(tmp_path / "k", "https://127.0.0.1:1", user)), "credential")["credential"]
    assert "fail" in shown(told) and "failed (1): no active account |" in shown(told)


def test_no_route_is_macos_hiding_the_network_and_says_all_the_ways_out(tmp_path: Path) -> None:
    def blocked(_host: str, _port: int) -> None:
        raise OSError(65, "No route to host")

    file = config(tmp_path / "k", "https://192.168.1.10:6443", **OURS)
    (told,) = found(around(tmp_path, file, connect=blocked), "api")["api"]
    assert "Local Network privacy" in told.text
    ways = ["LaunchDaemon", "tailnet", "gateway", "ssh -N -L", "System Settings", "terminal"]
    assert [told.fix.index(each) for each in ways] == sorted(told.fix.index(each) for each in ways), "best first"


def test_a_name_that_is_not_known_is_a_matter_of_dns(tmp_path: Path) -> None:
    def unknown(_host: str, _port: int) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    file = config(tmp_path / "k", "https://api.test:6443", **OURS)
    (told,) = found(around(tmp_path, file, connect=unknown), "api")["api"]
    assert told.status == "fail" and "DNS" in told.fix


@pytest.mark.parametrize(("certificate", "word"), [(EXPIRED, "has expired"), (ELSEWHERE, "not valid for '127.0.0.1'")])
def test_a_certificate_that_is_not_accepted_says_why(tmp_path: Path, certificate: str, word: str) -> None:
    with answering(lambda _: http(b"{}"), server_context(tmp_path, certificate)) as url:
        (told,) = found(around(tmp_path, config(tmp_path / "k", url, **OURS)), "api")["api"]
    assert told.status == "fail" and word in told.text and "certificate-authority-data" in told.fix


@pytest.mark.parametrize(
    ("status", "word"),
    [(401, "does not know who we are"), (404, "answers 404"), (403, "refuses")],
)
def test_a_server_that_refuses_is_told_from_one_that_is_away(tmp_path: Path, status: int, word: str) -> None:
    cluster = Cluster()
    cluster.status = {"/version": status}
    told = asked(tmp_path, cluster, "api", "rights")
    assert word in told["api"]
    assert told["rights"].startswith("ok") == (status == 403), "who is known may still be asked for"


# ── kubeconfigs and what is in them ──────────────────────────────────────────────────────────────


def test_a_kubeconfig_that_cannot_be_used_names_what_is_wrong(tmp_path: Path) -> None:
    for text, word in (("{", "cannot be used"), ("{}", "no current-context")):
        (tmp_path / "k").write_text(text)
        told = found(around(tmp_path, tmp_path / "k"), "kubeconfig", "credential", "api")
        assert told["kubeconfig"][0].status == "fail" and word in told["kubeconfig"][0].text
        assert told["api"][0].status == "fail" and "credential" not in told
    told = found(around(tmp_path, tmp_path / "none"), "kubeconfig")
    assert "does not exist" in shown(told["kubeconfig"])
    file = config(tmp_path / "k", "https://127.0.0.1:1", **OURS)
    (missing,) = found(around(tmp_path, file, settings={"context": "z"}), "kubeconfig")["kubeconfig"]
    assert 'no context "z"' in missing.text


def test_until_when_a_credential_holds_is_told_and_nothing_of_it_shown(tmp_path: Path) -> None:
    now = time.time()
    secret = token(now - DAY, now + DAY)
    (tmp_path / "old").write_text(token(now - 9 * DAY, now - DAY))
    (tmp_path / "young").write_text(token(now - DAY, now + 29 * DAY))
    users: list[tuple[dict[str, Any], str, str]] = [
        ({"token": secret}, "warn", "nothing renews it"),
        ({"tokenFile": "old"}, "fail", "expired at"),
        ({"tokenFile": "young"}, "ok", "llm/metal-mac-a holds until"),
        ({"token": "opaque-s3cr3t"}, "ok", "does not say"),
        ({"client-certificate-data": data(pem(MAC)), "client-key-data": "eA=="}, "ok", "2124-01-01T00:00:00Z"),
        ({"client-certificate-data": data(pem(EXPIRED)), "client-key-data": "eA=="}, "fail", "2024-02-01T00:00:00Z"),
        ({"exec": {"command": "cloud-login"}}, "fail", "cloud-login must speak"),
        ({"username": "u", "password": "opaque-s3cr3t"}, "ok", "a user name and password"),
    ]
    for user, status, word in users:
        file = kubeconfig(tmp_path / "k", "https://127.0.0.1:1", user)
        (told,) = found(around(tmp_path, file), "credential")["credential"]
        assert told.status == status and word in told.text, user
        assert secret not in shown([told]) and "opaque-s3cr3t" not in shown([told])


@pytest.mark.parametrize("text", ["", "a.b", "a.e30.c", "a.!!!.c", "a.eyJleHAiOiAibm8ifQ.c", "a.eyJleHAiOiAxZTk5OX0.c"])
def test_a_token_that_says_nothing_of_its_end_is_no_error(text: str) -> None:
    assert expiry.of_token(text) is None


def test_a_certificate_is_read_as_far_as_its_end_or_not_at_all() -> None:
    whole = base64.b64decode("".join(MAC.split()))
    assert expiry.of_certificate(pem(MAC).encode()) == datetime(2124, 1, 1, tzinfo=timezone.utc).timestamp()
    for cut in range(0, len(whole), 7):
        text = f"-----BEGIN CERTIFICATE-----\n{base64.b64encode(whole[:cut]).decode()}\n-----END CERTIFICATE-----\n"
        assert expiry.of_certificate(text.encode()) is None
    for junk in (b"", b"-----BEGIN CERTIFICATE-----\n!!!\n-----END CERTIFICATE-----"):
        assert expiry.of_certificate(junk) is None


# ── this Mac's address ───────────────────────────────────────────────────────────────────────────


def test_the_address_is_told_with_why_not_the_others(tmp_path: Path) -> None:
    file = config(tmp_path / "k", "https://192.168.1.10:6443", **OURS)
    seen: list[tuple[str, str, bool]] = []

    def advertised(said: str, server: str, embedded: bool) -> AddressChoice:
        seen.append((said, server, embedded))
        return AddressChoice("192.168.1.20", "the route to 192.168.1.10")

    known = [Interface("lo0", "127.0.0.1", True), Interface("en0", "192.168.1.20", True)]
    more: dict[str, Any] = {"interfaces": lambda: known, "settings": {"host_ip": ""}}
    (told,) = found(around(tmp_path, file, advertised=advertised, **more), "address")["address"]
    assert told.text == "pods are told 192.168.1.20, by the route to 192.168.1.10; not 127.0.0.1 (lo0: loopback)"
    assert seen == [("", "https://192.168.1.10:6443", False)]
    loopback = {"settings": {"host_ip": "127.0.0.1"}}
    (told,) = found(around(tmp_path, file, **loopback), "address")["address"]
    assert told.status == "fail" and "no pod can reach it" in told.text


def test_a_right_is_shown_as_kubectl_names_it() -> None:
    assert str(Right("discovery.k8s.io", "endpointslices", "patch", "llm")) == "patch endpointslices.discovery.k8s.io"
    assert str(Right("", "services", "get", "llm")) == "get services"
