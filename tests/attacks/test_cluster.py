"""Attacks with a Mac's account on a real API server, where conf/rbac/fence.yaml is applied.

The accounts here may do everything that RBAC can grant, so that each refusal is the fence's own. Nothing is stored:
every request is a dry run, which admission judges like any other.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from metal_supervisor.cluster import manifests
from metal_supervisor.cluster.kube import APPLY, MERGE, Kube, KubeError
from metal_supervisor.cluster.report import Report
from metal_supervisor.placement import leases
from metal_supervisor.placement.leases import ClaimAction, Move
from metal_supervisor.spec.record import Record, Verdict
from metal_supervisor.spec.types import Endpoint, Standing
from tests.cluster.server import ROOT, KubeCluster, crd_directory
from tests.support.records import a_record
from tests.support.system import eventually

Object = dict[str, Any]
SPACE = "llm"
OPEN_SPACE = "open"
"""The namespace of the accounts, and one whose annotation allows NodePort."""
MAC = "mac-a"
PEER = "mac-b"
REAPER = "reaper"
CORE = "/api/v1"
SLICES = "/apis/discovery.k8s.io/v1"
LEASES = "/apis/coordination.k8s.io/v1"
NOW = "2026-11-21T09:00:00.000000Z"
POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"


def record(name: str = "tiny", kind: str = "ClusterIP", ordinal: int = 0, space: str = SPACE) -> Record:
    """A service as the controller hands it to the sidecar."""
    endpoint = Endpoint(name.replace(".", "-"), 8080, "/v1/chat/completions", kind, None)
    verdict = Verdict(Standing.RUN, "Admitted", "", 1.0)
    return a_record(
        name,
        space,
        uid=f"uid-{name}",
        verdict=verdict,
        endpoint=endpoint,
        port=18100,
        ordinal=ordinal,
    )


def slice_of(
    name: str = "tiny", node: str = MAC, address: str = "192.168.1.20", ready: bool = True, ordinal: int = 0
) -> Object:
    """An EndpointSlice as the sidecar of `node` applies it."""
    asked = record(name, ordinal=ordinal)
    assert asked.endpoint
    told = Report("Ready", ready, ready, asked.port, 1, 1, "Serving", "", None, (), True, True, False)
    return dict(manifests.slice_object(asked, asked.endpoint, told, node, address, NOW, "0.1.0"))


def service_of(name: str = "tiny", kind: str = "ClusterIP", space: str = SPACE) -> Object:
    """A Service as the sidecar applies it."""
    asked = record(name, kind, space=space)
    assert asked.endpoint
    return dict(manifests.service_object(asked, asked.endpoint))


def claim_of(index: int, holder: str) -> Object:
    """A claim on a replica of `tiny`."""
    return dict(leases.claim_object(Move(ClaimAction.CLAIM, (SPACE, "tiny", index), "uid-tiny"), holder, NOW))


def node_lease_of(node: str, duration_s: float = 40.0) -> Object:
    return dict(leases.node_lease_object(SPACE, node, duration_s, {}, NOW))


def foreign_service(name: str = "web") -> Object:
    """A Service of another application in the same namespace."""
    metadata = {"name": name, "namespace": SPACE, "labels": {"app": name}}
    spec = {"selector": {"app": name}, "ports": [{"name": "web", "port": 80}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def foreign_slice() -> Object:
    """The slice that Kubernetes itself keeps for that Service."""
    labels = {
        "kubernetes.io/service-name": "web",
        manifests.SLICE_MANAGER: "endpointslice-controller.k8s.io",
    }
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "addressType": "IPv4",
        "metadata": {"name": "web-x7k2p", "namespace": SPACE, "labels": labels},
        "endpoints": [{"addresses": ["10.244.0.7"]}],
        "ports": [{"port": 80}],
    }


def endpoints_of(name: str, labels: Mapping[str, str]) -> Object:
    metadata = {"name": name, "namespace": SPACE, "labels": dict(labels)}
    subsets = [{"addresses": [{"ip": "10.244.0.7"}], "ports": [{"port": 80}]}]
    return {"apiVersion": "v1", "kind": "Endpoints", "metadata": metadata, "subsets": subsets}


def left_slice() -> Object:
    """A slice as LLMKube's agent leaves it behind."""
    labels = {"kubernetes.io/service-name": "old", "llmkube.ai/managed-by": "metal-agent"}
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "addressType": "IPv4",
        "metadata": {"name": "old", "namespace": SPACE, "labels": labels},
        "endpoints": [],
        "ports": [],
    }


def path_of(body: Object) -> str:
    """Where an object is, or would be."""
    group = CORE if body["apiVersion"] == "v1" else f"/apis/{body['apiVersion']}"
    kind = body["kind"].lower()
    plural = kind if kind.endswith("s") else f"{kind}s"
    metadata = body["metadata"]
    return f"{group}/namespaces/{metadata['namespace']}/{plural}/{metadata['name']}"


def edited(body: Object, **metadata: Any) -> Object:
    """A copy with other labels, name, owners; a label of None is left out."""
    found = copy.deepcopy(body)
    labels = metadata.pop("labels", {})
    kept = {**found["metadata"].get("labels", {}), **labels}
    found["metadata"].update(metadata, labels={name: value for name, value in kept.items() if value is not None})
    return found


class Account:
    """What the fence says to one ServiceAccount."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube

    def said(self, method: str, path: str, query: Object, body: Object | None, kind: str = "application/json") -> str:
        try:
            self._kube.request(method, path, {"dryRun": "All", **query}, body, kind)
        except KubeError as error:
            assert "ValidatingAdmissionPolicy" in str(error), f"refused, but not by the fence: {error}"
            return str(error)
        return ""

    def apply(self, body: Object, sub: str = "") -> str:
        """ "" if it is let through."""
        path = f"{path_of(body)}{sub}"
        return self.said("PATCH", path, {"fieldManager": "attacker", "force": "true"}, body, APPLY)

    def create(self, body: Object) -> str:
        return self.said("POST", path_of(body).rpartition("/")[0], {}, body)

    def merge(self, body: Object, change: Object, sub: str = "") -> str:
        return self.said("PATCH", f"{path_of(body)}{sub}", {"fieldManager": "attacker"}, change, MERGE)

    def delete(self, body: Object) -> str:
        return self.said("DELETE", path_of(body), {}, None)

    def delete_all(self, body: Object) -> str:
        """Every object of its kind in the namespace, with one request."""
        return self.said("DELETE", path_of(body).rpartition("/")[0], {}, None)


class Fence:
    """The server, and its accounts."""

    def __init__(self, cluster: KubeCluster, base: Path) -> None:
        self.cluster = cluster
        self.kubes: list[Kube] = []
        self.admin = Kube(cluster.kubeconfig(base / "admin"))
        self.mac, self.peer, self.reaper = (self._account(base, node) for node in (MAC, PEER, REAPER))

    def _account(self, base: Path, node: str) -> Account:
        token = self.cluster.service_account_token(SPACE, f"metal-{node}")
        self.kubes.append(Kube(self.cluster.kubeconfig(base / node, token)))
        return Account(self.kubes[-1])

    def close(self) -> None:
        for each in (*self.kubes, self.admin):
            each.close()


def present() -> list[Object]:
    """What is there when the attacks begin; mac-a is the attacker."""
    return [
        service_of("tiny"),
        foreign_service(),
        service_of("held.open", "NodePort"),
        service_of("balanced", "LoadBalancer"),
        edited(service_of("old"), labels={"app.kubernetes.io/managed-by": None}),
        slice_of("tiny", MAC),
        slice_of("tiny", PEER, "192.168.1.21"),
        foreign_slice(),
        left_slice(),
        node_lease_of(MAC),
        node_lease_of(PEER),
        node_lease_of(REAPER),
        claim_of(0, PEER),
        claim_of(1, MAC),
        {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": "leader", "namespace": SPACE},
            "spec": {"holderIdentity": "operator"},
        },
        endpoints_of("web", {}),
        endpoints_of("old", {"llmkube.ai/managed-by": "metal-agent"}),
    ]


@pytest.fixture(scope="module")
def fence() -> Iterator[Fence]:
    """A server with two Macs' objects, and those of others, behind the fence as it is shipped."""
    with tempfile.TemporaryDirectory(prefix="kube-fence-") as directory, KubeCluster(Path(directory)) as cluster:
        cluster.apply_crds(crd_directory())
        notes = {"metal-supervisor.io/service-types": "NodePort"}
        for name, annotations in ((SPACE, {}), (OPEN_SPACE, notes)):
            body = {"metadata": {"name": name, "annotations": annotations}}
            assert cluster.request("POST", f"{CORE}/namespaces", body)[0] == 201
        everything: Object = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "all"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
            "subjects": [
                {"kind": "Group", "name": f"system:serviceaccounts:{SPACE}", "apiGroup": "rbac.authorization.k8s.io"}
            ],
        }
        code, answer = cluster.request("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", everything)
        assert code == 201, answer
        found = Fence(cluster, Path(directory))
        for each in present():
            found.admin.apply(path_of(each), each, "setup")
        for each in yaml.safe_load_all((ROOT / "conf" / "rbac" / "fence.yaml").read_text()):
            plural = POLICIES if each["kind"].endswith("Policy") else f"{POLICIES.removesuffix('ies')}ybindings"
            found.admin.apply(f"{plural}/{each['metadata']['name']}", each, "setup")
        try:
            eventually(lambda: _in_force(found), 60, "the fence to be in force")
            yield found
        finally:
            found.close()


def _in_force(fence: Fence) -> bool:
    """One write that each policy refuses; a policy counts a moment after it was made."""
    mac, reaper = fence.mac, fence.reaper
    probes: list[Callable[[], str]] = [
        lambda: mac.apply(edited(slice_of("web", MAC), labels={leases.NODE: PEER})),
        lambda: mac.apply(slice_of("web", MAC)),
        lambda: mac.apply(node_lease_of(PEER)),
        lambda: mac.apply(foreign_service("made")),
        lambda: mac.delete(endpoints_of("web", {})),
        lambda: reaper.delete(slice_of("tiny", PEER)),
    ]
    with suppress(AssertionError):  # the Services are not listed yet
        return all(probe() for probe in probes)
    return False


GONE = {"ready": False, "serving": False, "terminating": False}
PEERS = slice_of("tiny", PEER, "192.168.1.21")
OURS = slice_of("tiny", MAC)
TINY = service_of("tiny")
WEB = foreign_service()
OWNER = OURS["metadata"]["ownerReferences"][0]
ATTACKS: dict[str, Callable[[Fence], str]] = {
    # ── slices of others
    "delete a peer's slice": lambda on: on.mac.delete(PEERS),
    "delete the slice of another application": lambda on: on.mac.delete(foreign_slice()),
    "delete every slice of the namespace": lambda on: on.mac.delete_all(PEERS),
    "empty a peer's slice": lambda on: on.mac.merge(PEERS, {"endpoints": []}),
    "empty the slice of another application": lambda on: on.mac.merge(foreign_slice(), {"endpoints": []}),
    "mark a peer's endpoint as gone": lambda on: on.mac.merge(
        PEERS, {"endpoints": [{"addresses": ["192.168.1.21"], "conditions": GONE}]}
    ),
    "redirect a peer's slice": lambda on: on.mac.merge(PEERS, {"endpoints": [{"addresses": ["192.168.1.20"]}]}),
    "another port for a peer's slice": lambda on: on.mac.merge(PEERS, {"ports": [{"name": "http", "port": 22}]}),
    "relabel a peer's slice as one's own": lambda on: on.mac.merge(PEERS, {"metadata": {"labels": {leases.NODE: MAC}}}),
    "relabel one's own slice as a peer's": lambda on: on.mac.merge(OURS, {"metadata": {"labels": {leases.NODE: PEER}}}),
    "take a peer's node label away": lambda on: on.mac.merge(PEERS, {"metadata": {"labels": {leases.NODE: None}}}),
    "take the manager's label off": lambda on: on.mac.merge(
        OURS, {"metadata": {"labels": {manifests.SLICE_MANAGER: None}}}
    ),
    "a slice with a peer's label": lambda on: on.mac.create(slice_of("fresh", PEER)),
    "a slice without any node": lambda on: on.mac.create(edited(slice_of("fresh"), labels={leases.NODE: None})),
    "a slice that is not ready, with a peer's label": lambda on: on.mac.create(slice_of("fresh", PEER, ready=False)),
    "a slice by a peer's name": lambda on: on.mac.create(edited(slice_of("fresh"), name=f"fresh-{PEER}")),
    "a slice by generateName": lambda on: on.mac.said(
        "POST",
        f"{SLICES}/namespaces/{SPACE}/endpointslices",
        {},
        {
            **slice_of("fresh"),
            "metadata": {
                **{k: v for k, v in slice_of("fresh")["metadata"].items() if k != "name"},
                "generateName": "fresh-",
            },
        },
    ),
    # ── a Service of another application (CVE-2021-25740)
    "a slice for the Service of another application": lambda on: on.mac.create(slice_of("web")),
    "the same, with an owner that exists": lambda on: on.mac.create(edited(slice_of("web"), ownerReferences=[OWNER])),
    "the same, with a second owner": lambda on: on.mac.create(
        edited(slice_of("web"), ownerReferences=[{**OWNER, "name": "web", "uid": "uid-web"}, OWNER])
    ),
    "the same, without an owner": lambda on: on.mac.create(edited(slice_of("web"), ownerReferences=[])),
    "one's own slice, moved to that Service": lambda on: on.mac.merge(
        OURS, {"metadata": {"labels": {"kubernetes.io/service-name": "web"}}}
    ),
    "a slice for a Service that has yet to be made": lambda on: on.mac.create(
        edited(slice_of("fresh"), labels={"kubernetes.io/service-name": "shop"}, name=f"shop-{MAC}")
    ),
    "a slice owned by something else": lambda on: on.mac.create(
        edited(slice_of("fresh"), ownerReferences=[{**OWNER, "apiVersion": "v1", "kind": "ConfigMap", "name": "fresh"}])
    ),
    "an address of a pod": lambda on: on.mac.apply(slice_of("tiny", MAC, "10.244.0.7")),
    "the address of the cluster's own API": lambda on: on.mac.apply(slice_of("tiny", MAC, "10.96.0.1")),
    "an address of IPv6": lambda on: on.mac.create(slice_of("fresh", MAC, "2001:db8::1")),
    "a second endpoint elsewhere": lambda on: on.mac.merge(
        OURS, {"endpoints": [*OURS["endpoints"], {"addresses": ["10.244.0.7"]}]}
    ),
    "a name of the domain name system": lambda on: on.mac.create(
        {**slice_of("fresh"), "addressType": "FQDN", "endpoints": [{"addresses": ["db.example.com"]}]}
    ),
    # ── Leases
    "delete a peer's node Lease": lambda on: on.mac.delete(node_lease_of(PEER)),
    "delete every Lease of the namespace": lambda on: on.mac.delete_all(node_lease_of(PEER)),
    "release a peer's node Lease": lambda on: on.mac.apply(node_lease_of(PEER, 0)),
    "drain a peer": lambda on: on.mac.merge(
        node_lease_of(PEER), {"metadata": {"annotations": {leases.UNSCHEDULABLE: "drain"}}}
    ),
    "a peer's name in one's own Lease": lambda on: on.mac.merge(node_lease_of(MAC), {"spec": {"holderIdentity": PEER}}),
    "a peer's label on one's own Lease": lambda on: on.mac.merge(
        node_lease_of(MAC), {"metadata": {"labels": {leases.NODE: PEER}}}
    ),
    "the reaper's Lease": lambda on: on.mac.apply(node_lease_of(REAPER)),
    "the Lease of another program": lambda on: on.mac.merge(
        {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "leader", "namespace": SPACE}},
        {"spec": {"holderIdentity": MAC}},
    ),
    "a Lease by generateName": lambda on: on.mac.said(
        "POST",
        f"{LEASES}/namespaces/{SPACE}/leases",
        {},
        {**node_lease_of(MAC), "metadata": {"generateName": "metal-", "namespace": SPACE}},
    ),
    "delete a peer's claim": lambda on: on.mac.delete(claim_of(0, PEER)),
    "give a peer's claim back": lambda on: on.mac.merge(claim_of(0, PEER), {"spec": {"holderIdentity": ""}}),
    "hand a peer's claim to a third Mac": lambda on: on.mac.merge(
        claim_of(0, PEER), {"spec": {"holderIdentity": "mac-c"}}
    ),
    "say that a peer does not serve": lambda on: on.mac.merge(
        claim_of(0, PEER), {"metadata": {"annotations": {leases.READY: "false"}}}
    ),
    "a claim for a peer": lambda on: on.mac.create(claim_of(2, PEER)),
    "a claim for no one": lambda on: on.mac.create({**claim_of(2, MAC), "spec": {"acquireTime": NOW}}),
    "one's own claim, handed to a peer": lambda on: on.mac.merge(claim_of(1, MAC), {"spec": {"holderIdentity": PEER}}),
    # ── Services
    "make a Service that is not ours": lambda on: on.mac.create(foreign_service("made")),
    "a selector": lambda on: on.mac.create(
        {**service_of("fresh"), "spec": {**TINY["spec"], "selector": {"app": "web"}}}
    ),
    "a selector for a Service that is there": lambda on: on.mac.merge(TINY, {"spec": {"selector": {"app": "web"}}}),
    "an external name": lambda on: on.mac.create(
        {**service_of("fresh"), "spec": {"type": "ExternalName", "externalName": "evil.example.com"}}
    ),
    "external addresses (CVE-2020-8554)": lambda on: on.mac.merge(TINY, {"spec": {"externalIPs": ["192.168.1.1"]}}),
    "an address of a load balancer (CVE-2020-8554)": lambda on: on.mac.merge(
        service_of("balanced"), {"status": {"loadBalancer": {"ingress": [{"ip": "192.168.1.1"}]}}}, "/status"
    ),
    "NodePort": lambda on: on.mac.create(service_of("fresh", "NodePort")),
    "NodePort for a Service that is there": lambda on: on.mac.apply(service_of("tiny", "NodePort")),
    "LoadBalancer": lambda on: on.mac.create(service_of("fresh", "LoadBalancer")),
    "LoadBalancer where only NodePort is allowed": lambda on: on.mac.create(
        service_of("fresh", "LoadBalancer", OPEN_SPACE)
    ),
    "take a Service over": lambda on: on.mac.apply(service_of("web")),
    "take a Service over by its label": lambda on: on.mac.merge(
        WEB, {"metadata": {"labels": {"app.kubernetes.io/managed-by": "metal-supervisor"}}}
    ),
    "another port for a Service": lambda on: on.mac.merge(
        WEB, {"spec": {"ports": [{"name": "web", "port": 80, "targetPort": 1}]}}
    ),
    "a Service without an owner": lambda on: on.mac.create(edited(service_of("fresh"), ownerReferences=[])),
    "a Service by another name than its owner's": lambda on: on.mac.create(edited(service_of("fresh"), name="shop")),
    "a Service by generateName": lambda on: on.mac.said(
        "POST",
        f"{CORE}/namespaces/{SPACE}/services",
        {},
        {
            **service_of("fresh"),
            "metadata": {
                **{k: v for k, v in service_of("fresh")["metadata"].items() if k != "name"},
                "generateName": "fresh-",
            },
        },
    ),
    "delete a Service": lambda on: on.mac.delete(TINY),
    "delete the Endpoints of another application": lambda on: on.mac.delete(endpoints_of("web", {})),
    "write the Endpoints of another application": lambda on: on.mac.merge(endpoints_of("web", {}), {"subsets": []}),
    # ── the reaper's account
    "the reaper announces": lambda on: on.reaper.apply(PEERS),
    "the reaper redirects": lambda on: on.reaper.merge(
        PEERS, {"endpoints": [{"addresses": ["192.168.1.9"], "conditions": GONE}]}
    ),
    "the reaper empties the slice of another application": lambda on: on.reaper.merge(
        foreign_slice(), {"endpoints": [{"addresses": ["10.244.0.7"], "conditions": GONE}]}
    ),
    "the reaper relabels": lambda on: on.reaper.merge(PEERS, {"metadata": {"labels": {leases.NODE: MAC}}}),
    "the reaper deletes a slice": lambda on: on.reaper.delete(PEERS),
    "the reaper makes a slice": lambda on: on.reaper.create(slice_of("fresh", REAPER)),
    "the reaper claims": lambda on: on.reaper.create(claim_of(2, REAPER)),
    "the reaper makes a Service": lambda on: on.reaper.create(service_of("fresh")),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_fence_refuses(fence: Fence, attack: str) -> None:
    assert ATTACKS[attack](fence), "it was let through"


ALLOWED: dict[str, Callable[[Fence], str]] = {
    "announce": lambda on: on.mac.apply(slice_of("tiny", MAC)),
    "announce a second engine": lambda on: on.mac.apply(slice_of("tiny", MAC, ordinal=1)),
    "announce a service with a dot": lambda on: on.mac.apply(slice_of("phi.mini", MAC)),
    "announce for a Service of LLMKube's agent": lambda on: on.mac.apply(slice_of("old", MAC)),
    "withdraw": lambda on: on.mac.apply(slice_of("tiny", MAC, ready=False)),
    "withdraw with an address of before": lambda on: on.mac.apply(slice_of("tiny", MAC, "10.9.9.9", ready=False)),
    "delete the own slice": lambda on: on.mac.delete(OURS),
    "remove the slice that LLMKube's agent left": lambda on: on.mac.delete(left_slice()),
    "remove the Endpoints that LLMKube's agent left": lambda on: on.mac.delete(
        endpoints_of("old", {"llmkube.ai/managed-by": "metal-agent"})
    ),
    "renew the own Lease": lambda on: on.mac.apply(node_lease_of(MAC)),
    "release the own Lease": lambda on: on.mac.apply(node_lease_of(MAC, 0)),
    "delete the own Lease": lambda on: on.mac.delete(node_lease_of(MAC)),
    "claim": lambda on: on.mac.apply(claim_of(2, MAC)),
    "say that it serves": lambda on: on.mac.merge(
        claim_of(1, MAC), {"metadata": {"annotations": {leases.READY: "true"}}}
    ),
    "give a claim back": lambda on: on.mac.delete(claim_of(1, MAC)),
    "make a Service": lambda on: on.mac.apply(service_of("fresh")),
    "make a Service with a dot": lambda on: on.mac.apply(service_of("phi.mini")),
    "renew a Service": lambda on: on.mac.apply(TINY),
    "renew a Service whose type is of before the fence": lambda on: on.mac.apply(service_of("held.open", "NodePort")),
    "NodePort where the namespace allows it": lambda on: on.mac.apply(service_of("fresh", "NodePort", OPEN_SPACE)),
    "take over a Service of LLMKube's agent": lambda on: on.mac.apply(service_of("old")),
    "the reaper withdraws": lambda on: on.reaper.merge(
        PEERS,
        {
            "metadata": {"annotations": {"metal-supervisor.io/reaped": NOW}},
            "endpoints": [{**PEERS["endpoints"][0], "conditions": GONE}],
        },
    ),
    "the reaper renews its Lease": lambda on: on.reaper.apply(
        {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": leases.REAPER_LEASE, "namespace": SPACE, "labels": {leases.KIND: "reaper"}},
            "spec": {"holderIdentity": leases.REAPER_LEASE, "leaseDurationSeconds": 20},
        }
    ),
}


@pytest.mark.parametrize("write", ALLOWED)
def test_the_fence_lets_through_what_the_programs_write(fence: Fence, write: str) -> None:
    assert ALLOWED[write](fence) == ""


def test_taking_a_claim_over_stays_possible_as_the_file_says(fence: Fence) -> None:
    """The price of a takeover after a power cut: no policy can tell silence, since admission has no clock."""
    assert fence.mac.merge(claim_of(0, PEER), {"spec": {"holderIdentity": MAC}}) == ""
    head = (ROOT / "conf" / "rbac" / "fence.yaml").read_text().partition("apiVersion:")[0]
    assert "take over a claim" in head
