"""The shipped rights are enough for a whole life, and each of them is needed.

One agent runs under the Role as it is shipped, with a token as `metal-supervisor kubeconfig` writes it. Its server
keeps a record of every request, so what it needed is known, not guessed. Then each verb is taken away in turn,
something that needs it is brought about, and the agent has to say which right it misses.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from metal_supervisor.cluster.accounts import Renewal
from metal_supervisor.cluster.kube import MERGE, Kube
from metal_supervisor.doctor.cluster import is_fenced
from tests.cluster.agent import AgentFleet, AgentMac, AuditedCluster, OwnKube, refused, rights_used
from tests.cluster.server import ROOT, crd_directory
from tests.support.macs import LEASES, show
from tests.support.system import ISVC, MODELS, SERVICES, SLICES, eventually, kill, model, service

RBAC = ROOT / "conf" / "rbac"
SPACE = "llm"
NODE = "mac-a"
ROLES = "/apis/rbac.authorization.k8s.io/v1/namespaces/default/roles"
EVENTS = "/apis/events.k8s.io/v1/namespaces/default/events"
ENDPOINTS = "/api/v1/namespaces/default/endpoints"
RULES = yaml.safe_load((RBAC / "namespace.yaml").read_text())["rules"]
TOKEN_RULES = next(
    each["rules"] for each in yaml.safe_load_all((RBAC / "mac.yaml").read_text()) if each["kind"] == "Role"
)
RIGHTS = sorted(
    {
        (group, resource, verb)
        for rule in RULES
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
)
Object = dict[str, Any]


@dataclass
class Life:
    """One agent, and the administrator who watches it."""

    cluster: AuditedCluster
    fleet: AgentFleet
    mac: AgentMac
    login: Path
    said: str
    """What `metal-supervisor kubeconfig` printed."""

    @property
    def account(self) -> str:
        return f"{SPACE}:metal-{NODE}"

    @property
    def kube(self) -> OwnKube:
        return self.mac.kube

    def kubectl(self, *arguments: str, given: str | None = None) -> str:
        return self.mac.kubectl(*arguments, stdin=given)

    def audit(self, since: int = 0) -> list[Object]:
        found = self.cluster.audit(self.account, since)
        # Where an account may read its namespace, a missing one is told; the shipped rights do without.
        return [each for each in found if each["requestURI"] != f"/api/v1/namespaces/{SPACE}"]

    def restart(self, program: str) -> None:
        """As a user would; what it knew is read anew."""
        self.mac.supervisorctl("restart", program)

    def scale(self, replicas: int) -> None:
        self.kubectl("scale", "isvc", "tiny", f"--replicas={replicas}")

    def serves(self) -> None:
        """Waits until all is well."""
        eventually(lambda: self.mac.status().get("phase") == "Ready", 60, f"Ready; {self.mac.report()}")
        eventually(lambda: self.fleet.ready() == [NODE], 30, "the endpoint")
        eventually(lambda: self.fleet.holder() == NODE, 30, "the claim")
        eventually(lambda: not self.mac.report()["cluster"]["error"], 60, f"no trouble; {self.mac.report()['cluster']}")

    def stopped(self) -> None:
        eventually(lambda: self.mac.pid() == 0, 30, "the engine to end")

    # ── what may be done ─────────────────────────────────────────────────────────────────────────

    def may(self, right: tuple[str, str, str], name: str = "") -> bool:
        """What the server thinks of a right of the agent's."""
        group, resource, verb = right
        resource, _, sub = resource.partition("/")
        asked = {
            "namespace": SPACE,
            "group": group,
            "resource": resource,
            "subresource": sub,
            "verb": verb,
            "name": name,
        }
        body = {"spec": {"user": f"system:serviceaccount:{self.account}", "resourceAttributes": asked}}
        answer = self.kube.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", None, body)
        return bool(answer["status"]["allowed"])

    def grant(self, rules: list[Object], role: str = "metal-supervisor") -> None:
        self.kube.request("PATCH", f"{ROLES}/{role}", None, {"rules": rules}, MERGE)

    def without(self, right: tuple[str, str, str]) -> None:
        """Takes one verb on one resource away, and nothing else; in force when this returns."""
        rules = [
            {
                "apiGroups": [group],
                "resources": [resource],
                "verbs": [verb for verb in rule["verbs"] if (group, resource, verb) != right],
            }
            for rule in RULES
            for group in rule["apiGroups"]
            for resource in rule["resources"]
        ]
        self.grant([rule for rule in rules if rule["verbs"]])
        eventually(lambda: not self.may(right), what="the right to be gone")

    def whole(self, right: tuple[str, str, str]) -> None:
        self.grant(RULES)
        eventually(lambda: self.may(right), what="the right to be back")


@pytest.fixture(scope="module")
def audited() -> Iterator[AuditedCluster]:
    """A server of our own: it keeps a record, and the account's namespace has the name that is shipped."""
    with tempfile.TemporaryDirectory(prefix="kube-audited-") as directory, AuditedCluster(Path(directory)) as server:
        server.apply_crds(crd_directory())
        if server.has_controllers:
            server.start_controllers()
        yield server


@pytest.fixture(scope="module")
def life(audited: AuditedCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    """The agent, connected as docs/kubernetes.md says."""
    base = tmp_path_factory.mktemp("rbac")
    assert audited.request("POST", "/api/v1/namespaces", {"metadata": {"name": SPACE}})[0] == 201
    fleet = AgentFleet(base, audited, SPACE, "--lease-duration", "5")
    mac = AgentMac(base / NODE, NODE, 11, audited, SPACE, *fleet.flags, login=base / "studio")
    fleet.macs.append(mac)
    try:
        for name in ("namespace.yaml", "mac.yaml"):  # whose placeholders are right as they are
            mac.kubectl("apply", "-f", str(RBAC / name))
        command = [
            sys.executable,
            "-m",
            "metal_supervisor",
            "kubeconfig",
            "--service-account",
            f"metal-{NODE}",
            "--namespace",
            SPACE,
            "--from",
            str(mac.admin),
            "--output",
            str(base / "studio"),
        ]
        made = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert made.returncode == 0, made.stdout + made.stderr
        mac.start()
        found = Life(audited, fleet, mac, base / "studio", made.stdout)
        yield found
        show(fleet)  # pytest shows it only where something failed
    finally:
        fleet.close()


def legacy() -> Object:
    """What an old agent of LLMKube left behind; its heartbeat is of long ago."""
    return {
        "apiVersion": "v1",
        "kind": "Endpoints",
        "metadata": {
            "name": "tiny",
            "namespace": "default",
            "labels": {"llmkube.ai/managed-by": "metal-agent", "llmkube.ai/inference-service": "tiny"},
        },
        "subsets": [{"addresses": [{"ip": "192.0.2.99"}], "ports": [{"name": "http", "port": 8080}]}],
    }


def silent_peer(kube: OwnKube) -> str:
    """Another Mac that is gone, with an endpoint that still says ready; returns the slice's path."""
    labels = {"metal-supervisor.io/node": "mac-z"}
    kube.apply(
        f"{LEASES}/metal-mac-z",
        {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": "metal-mac-z",
                "namespace": "default",
                "labels": {**labels, "metal-supervisor.io/kind": "node"},
            },
            "spec": {"holderIdentity": "mac-z", "leaseDurationSeconds": 1},
        },
        "test",
    )
    path = f"{SLICES}/elsewhere-mac-z"
    kube.apply(
        path,
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": "elsewhere-mac-z",
                "namespace": "default",
                "labels": {
                    **labels,
                    "kubernetes.io/service-name": "elsewhere",
                    "endpointslice.kubernetes.io/managed-by": "metal-supervisor",
                },
            },
            "addressType": "IPv4",
            "endpoints": [{"addresses": ["192.0.2.98"], "conditions": {"ready": True, "serving": True}}],
            "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
        },
        "test",
    )
    return path


def times_told(life: Life, reason: str) -> int:
    """How often something was told of a service; an Event that is told again is counted up."""
    events = life.kube.request("GET", EVENTS)["items"]
    return sum((each.get("series") or {}).get("count", 1) for each in events if each["reason"] == reason)


def reasons(life: Life) -> list[str]:
    """Why there are Events about the service, and none about an earlier one of its name."""
    uid = life.mac.get(f"{ISVC}/tiny")["metadata"]["uid"]
    return [each["reason"] for each in life.kube.request("GET", EVENTS)["items"] if each["regarding"].get("uid") == uid]


def test_a_whole_life_needs_all_of_the_shipped_rights_and_no_other(life: Life) -> None:
    kube, mac = life.kube, life.mac
    assert "it may list inferenceservices" in life.said and f"--node-name {NODE}" in life.said
    assert (life.login.stat().st_mode & 0o777, life.login.with_name("studio.token").stat().st_mode & 0o777) == (
        0o600,
        0o600,
    )

    kube.apply(f"{ENDPOINTS}/tiny", legacy(), "old-agent")
    mac.apply(mac.tiny_model(), service("tiny"))
    life.serves()
    eventually(lambda: kube.request("GET", f"{MODELS}/tiny")["status"]["phase"] == "Ready", what="the Model's status")
    eventually(lambda: mac.maybe(f"{ENDPOINTS}/tiny") is None, what="the legacy Endpoints to be removed")

    # Twice, because the second Event of a kind counts the first one up.
    for crash in (1, 2):
        pid = mac.pid()
        kill(pid)
        eventually(lambda pid=pid: mac.pid() not in (0, pid), 60, "a new engine")
        eventually(lambda crash=crash: times_told(life, "Crashed") == crash, what=f"crash {crash} to be told")
        life.serves()

    def counted() -> bool:
        events = kube.request("GET", EVENTS)["items"]
        return any((each.get("series") or {}).get("count", 0) >= 2 for each in events if each["reason"] == "Serving")

    eventually(counted, what="the Event to be counted up")
    peer = silent_peer(kube)
    eventually(lambda: kube.request("GET", peer)["endpoints"][0]["conditions"]["ready"] is False, 40, "the withdrawal")

    life.scale(0)
    eventually(lambda: mac.status()["phase"] == "Stopped", 30, "the engine to be stopped")
    eventually(lambda: mac.slice() is None, what="the slice to be taken out")
    assert mac.maybe(f"{SERVICES}/tiny") is not None
    life.scale(1)
    life.serves()
    mac.apply(service("tiny", nodeSelector={"kubernetes.io/hostname": "mac-b"}))
    eventually(lambda: life.fleet.holder() == "", 30, "the claim to be given back")
    life.stopped()
    eventually(lambda: not mac.status().get("phase"), what="what was said of it to be taken back")
    mac.apply(service("tiny"))
    life.serves()

    used_before = life.cluster.audited()
    renew(life, 0.7)
    assert rights_used(life.audit(used_before)) >= {("", "serviceaccounts/token", "create")}
    tokens = {token_of(each) for each in life.audit()[-1:]}
    mac.delete("tiny")
    eventually(lambda: mac.slice() is None, 30, "the slice to go")
    eventually(lambda: mac.maybe(f"{SERVICES}/tiny") is None, 60, "the garbage collector to take the Service")
    life.stopped()

    def with_the_new_token() -> bool:
        return bool(tokens != {""}) and token_of(life.audit()[-1]) == token_in(life.login.with_name("studio.token"))

    eventually(with_the_new_token, 60, "the agent to use the token that was renewed")
    assert refused(life.audit()) == []
    answers = {each.get("responseStatus", {}).get("code", 0) for each in life.audit()}
    assert answers <= {0, 200, 201, 404, 409}, "something was sent that a real server does not accept"
    assert not re.search(r"(?i)forbidden|cannot \w+ [a-z]+ in namespace|refuses", mac.logged())
    assert mac.report()["cluster"]["error"] == ""
    granted = {*RIGHTS, ("", "serviceaccounts/token", "create")}
    used = rights_used(life.audit())
    assert used - granted == set()
    assert granted - used == set(), "a right that a whole life does not need"


def token_of(event: Object) -> str:
    """Which token a request came with."""
    return str((event["user"].get("extra") or {}).get("authentication.kubernetes.io/credential-id", [""])[0])


def token_in(path: Path) -> str:
    payload = path.read_text().split(".")[1]
    return "JTI=" + str(json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))["jti"])


def renew(life: Life, share: float) -> str:
    """Has the token renewed as the sidecar does, at that share of its life; returns what is wrong."""
    kube = Kube(life.login)
    try:
        payload = life.login.with_name("studio.token")
        before = payload.read_text()
        ahead_s = share * 30 * 86400
        until = time.monotonic() + 20
        while True:  # a token of the same second ends no later
            renewal = Renewal(life.login, "", kube, clock=lambda: time.time() + ahead_s)
            renewal.step()
            if "ends no later" not in renewal.problem or time.monotonic() > until:
                break
            time.sleep(0.2)
        assert (payload.read_text() != before) == (renewal.problem == "")
        return renewal.problem
    finally:
        kube.close()


# ── each right, taken away ───────────────────────────────────────────────────────────────────────


def restarted(program: str) -> Callable[[Life], None]:
    return lambda life: life.restart(program)


def no_replica(life: Life) -> None:
    life.scale(0)


def no_service(life: Life) -> None:
    """The Service is gone, and looked for anew."""
    life.kube.request("DELETE", f"{SERVICES}/tiny")
    life.restart("sidecar")


def no_slice(life: Life) -> None:
    life.kube.request("DELETE", f"{SLICES}/tiny-{NODE}")
    life.restart("sidecar")


def no_claim(life: Life) -> None:
    """Somebody deleted the claim: it is asked for again."""
    life.kube.request("DELETE", f"{LEASES}/isvc-tiny-0")


def left_behind(life: Life) -> None:
    life.kube.apply(f"{ENDPOINTS}/tiny", legacy(), "old-agent")
    life.restart("sidecar")


def for_another_mac(life: Life) -> None:
    life.mac.apply(service("tiny", nodeSelector={"kubernetes.io/hostname": "mac-b"}))


def another_model(life: Life) -> None:
    life.mac.apply(model(f"model-{time.monotonic_ns()}", "file:///nowhere.gguf"))


def nothing(life: Life) -> None:
    """The sign of life is renewed every second."""


SERIES = "inference.llmkube.dev"
NEEDED_FOR: dict[tuple[str, str, str], Callable[[Life], None]] = {
    (SERIES, "inferenceservices", "list"): restarted("controller"),
    (SERIES, "inferenceservices", "watch"): restarted("controller"),
    (SERIES, "inferenceservices", "get"): restarted("sidecar"),
    (SERIES, "inferenceservices/status", "patch"): no_replica,
    (SERIES, "models", "list"): restarted("controller"),
    (SERIES, "models", "watch"): restarted("controller"),
    (SERIES, "models", "get"): restarted("sidecar"),
    (SERIES, "models/status", "patch"): another_model,
    ("", "services", "get"): restarted("sidecar"),
    ("", "services", "create"): no_service,
    ("", "services", "patch"): restarted("sidecar"),
    ("", "endpoints", "get"): restarted("sidecar"),
    ("", "endpoints", "delete"): left_behind,
    ("discovery.k8s.io", "endpointslices", "get"): restarted("sidecar"),
    ("discovery.k8s.io", "endpointslices", "list"): restarted("sidecar"),
    ("discovery.k8s.io", "endpointslices", "create"): no_slice,
    ("discovery.k8s.io", "endpointslices", "patch"): restarted("sidecar"),
    ("discovery.k8s.io", "endpointslices", "delete"): no_replica,
    ("coordination.k8s.io", "leases", "list"): restarted("controller"),
    ("coordination.k8s.io", "leases", "watch"): restarted("controller"),
    ("coordination.k8s.io", "leases", "create"): no_claim,
    ("coordination.k8s.io", "leases", "patch"): nothing,
    ("coordination.k8s.io", "leases", "delete"): for_another_mac,
    ("events.k8s.io", "events", "create"): no_replica,
    ("events.k8s.io", "events", "get"): no_replica,
    ("events.k8s.io", "events", "patch"): no_replica,
}
"""What makes the agent need each right."""


@pytest.mark.parametrize("right", RIGHTS, ids=lambda right: f"{right[2]}-{right[1].replace('/', '-')}")
def test_without_a_right_something_fails_and_the_right_is_named(life: Life, right: tuple[str, str, str]) -> None:
    _, resource, verb = right
    if life.mac.maybe(f"{ISVC}/tiny") is None:
        life.mac.apply(life.mac.tiny_model(), service("tiny"))
    life.serves()
    if resource == "events" and verb != "create" and "ManuallyScaledToZero" not in reasons(life):
        life.scale(0)  # the first Event of its kind
        eventually(lambda: "ManuallyScaledToZero" in reasons(life), 30, "an Event")
        eventually(lambda: life.mac.status().get("phase") == "Stopped", 30, "its status, which may come later")
        life.scale(1)
        life.serves()
    before, logged, pid = life.cluster.audited(), life.mac.log_lengths(), life.mac.pid()
    life.without(right)
    named = f"cannot {verb} {resource} in namespace"
    try:
        NEEDED_FOR[right](life)
        eventually(
            lambda: named in life.mac.report()["cluster"]["error"] or named in life.mac.logged(logged),
            30,
            f"the agent to say: {named}",
        )
        assert refused(life.audit(before)) != []
        if NEEDED_FOR[right] not in (no_replica, for_another_mac):
            assert life.mac.pid() == pid, "whatever is refused, what runs goes on"
    finally:
        life.whole(right)
        life.mac.apply(service("tiny"))
        life.scale(1)
        if verb in ("list", "watch") and resource != "endpointslices":
            life.restart("controller")  # which would look again after half a minute
    life.serves()


def test_every_shipped_right_is_tried() -> None:
    assert set(RIGHTS) == set(NEEDED_FOR)


def test_without_the_right_to_it_the_token_is_not_renewed_and_the_log_says_so(life: Life) -> None:
    role = f"metal-{NODE}-token"
    right = ("", "serviceaccounts/token", "create")
    assert life.may(right, f"metal-{NODE}") and not life.may(right, "metal-other"), "its own and nobody else's"
    life.grant([], role)
    try:
        eventually(lambda: not life.may(right, f"metal-{NODE}"), what="the right to be gone")
        assert "cannot create serviceaccounts/token in namespace" in renew(life, 0.7)
    finally:
        life.grant(TOKEN_RULES, role)
    eventually(lambda: life.may(right, f"metal-{NODE}"), what="the right to be back")
    assert renew(life, 0.7) == ""


def test_a_secret_is_read_once_the_right_that_is_shipped_for_it_was_applied(life: Life) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"engine": "s3cret"}}
    life.kubectl("-n", SPACE, "apply", "-f", "-", given=json.dumps(secret))
    wanted = {"secretKeyRef": {"name": "keys", "key": "engine"}}
    life.mac.apply(life.mac.tiny_model(), service("keyed", env=[{"name": "LLAMA_API_KEY", "valueFrom": wanted}]))
    eventually(lambda: life.mac.condition("MetalReady", "keyed").get("reason") == "SecretForbidden", 60, "a refusal")
    told = life.mac.condition("MetalReady", "keyed")["message"]
    assert told.startswith("spec.env[0].valueFrom.secretKeyRef: cannot get secrets")
    assert "conf/rbac/secrets.yaml" in told
    assert life.mac.pid("keyed") == 0
    life.kubectl("apply", "-f", str(RBAC / "secrets.yaml"))
    eventually(lambda: life.mac.status("keyed").get("phase") == "Ready", 60, "the right to be of use")
    used = {each["verb"] for each in life.audit() if each.get("objectRef", {}).get("resource") == "secrets"}
    assert used == {"get"}
    life.mac.delete("keyed")
    life.kubectl("delete", "-f", str(RBAC / "secrets.yaml"))


def test_behind_the_fence_the_agent_lives_on_and_the_reaper_alone_withdraws_a_silent_peer(
    life: Life, tmp_path: Path
) -> None:
    """conf/rbac/fence.yaml, with the network of these Macs; tests/attacks/test_cluster.py has what it refuses."""
    kube, mac = life.kube, life.mac
    if mac.maybe(f"{ISVC}/tiny") is None:
        mac.apply(mac.tiny_model(), service("tiny"))
    life.serves()
    life.kubectl("apply", "-f", str(ROOT / "conf" / "reaper" / "reaper.yaml"))
    fence = (RBAC / "fence.yaml").read_text().replace("'192.168.1.0/24'", "'192.0.2.0/24'")
    life.kubectl("apply", "-f", "-", given=fence)
    login = Kube(life.login)
    try:
        eventually(lambda: is_fenced(login, SPACE), 60, "the fence to be in force")
    finally:
        login.close()

    before, logged = life.cluster.audited(), mac.log_lengths()
    if mac.maybe(f"{LEASES}/metal-mac-z"):
        kube.request("DELETE", f"{LEASES}/metal-mac-z")
    life.restart("controller")
    kube.request("DELETE", f"{LEASES}/isvc-tiny-0")
    eventually(lambda: life.fleet.holder() == NODE, 30, "the claim to be made again")
    mac.supervisorctl("stop", "sidecar")
    kube.request("DELETE", f"{SERVICES}/tiny")
    if mac.maybe(f"{SLICES}/elsewhere-mac-z"):
        kube.request("DELETE", f"{SLICES}/elsewhere-mac-z")
    peer = silent_peer(kube)
    mac.supervisorctl("start", "sidecar")
    eventually(lambda: mac.maybe(f"{SERVICES}/tiny"), 30, "the Service to be made")
    life.scale(0)
    eventually(lambda: mac.slice() is None, 30, "the slice to go")
    life.scale(1)
    life.serves()
    left = "endpoint of a silent Mac left to the reaper"
    eventually(lambda: left in mac.logged(logged), 60, "the refusal to be noted")
    life.scale(0)  # passes go by
    eventually(lambda: mac.slice() is None, 30, "the slice to go again")
    life.scale(1)
    life.serves()
    assert kube.request("GET", peer)["endpoints"][0]["conditions"]["ready"] is True
    found = refusals(life, before)
    assert len(found) == 1 and "elsewhere-mac-z" in found[0], found
    assert mac.logged(logged).count(left) == 1, "asked and told once"
    assert mac.report()["cluster"]["error"] == ""

    (tmp_path / "token").write_text(life.cluster.service_account_token(SPACE, "metal-reaper"))
    (tmp_path / "ca.crt").write_bytes(life.cluster.ca_file.read_bytes())
    (tmp_path / "namespace").write_text(SPACE)
    environment = {
        "PATH": os.environ["PATH"],
        "ACCOUNT_DIR": str(tmp_path),
        "API_URL": life.cluster.url,
        "PERIOD_S": "0.2",
    }
    script = str(ROOT / "conf" / "reaper" / "reaper.py")
    with subprocess.Popen(
        [sys.executable, "-I", "-B", script],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as reaper:
        try:
            assert reaper.stdout
            assert reaper.stdout.readline().startswith("reaped elsewhere-mac-z: mac-z is silent")
        finally:
            reaper.terminate()
    assert kube.request("GET", peer)["endpoints"][0]["conditions"]["ready"] is False
    life.serves()
    assert len(refusals(life, before)) == 1


def refusals(life: Life, since: int) -> list[str]:
    """The Mac's requests that were forbidden or refused by admission."""
    return [
        f"{each['verb']} {each['requestURI']}"
        for each in life.audit(since)
        if each.get("responseStatus", {}).get("code") in (403, 422)
    ]


def test_an_account_that_is_deleted_is_shut_out_and_its_models_serve_on(life: Life) -> None:
    if life.mac.maybe(f"{ISVC}/tiny") is None:
        life.mac.apply(life.mac.tiny_model(), service("tiny"))
    life.serves()
    pid = life.mac.pid()
    life.kubectl("-n", SPACE, "delete", "serviceaccount", f"metal-{NODE}")
    eventually(lambda: "credentials" in life.mac.report()["cluster"]["error"], 60, "the server to refuse the token")
    assert life.mac.pid() == pid
    assert life.mac.health()[0] == 200
