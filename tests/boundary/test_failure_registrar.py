"""What the cluster does not accept: for how long it is left alone with it, and what a copied Mac must not write."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor.cluster import manifests
from metal_supervisor.cluster.kube import MERGE, Kube, KubeError, find
from metal_supervisor.cluster.report import Happening, report
from metal_supervisor.controller.reconcile import Outlook
from metal_supervisor.sidecar import publisher as publisher_module
from metal_supervisor.sidecar import registrar as registrar_module
from metal_supervisor.sidecar.cluster_context import ClusterContext
from metal_supervisor.sidecar.membership import Membership
from metal_supervisor.sidecar.registrar import Registrar
from metal_supervisor.sidecar.statuses import WantedStatus
from metal_supervisor.spec.processes import Observed
from metal_supervisor.spec.record import Verdict
from metal_supervisor.spec.types import Endpoint, Engine, Json, Model, ModelFile, Probe, Program, Service, Standing
from tests.support.macs import LEASES, embedded_cluster
from tests.support.records import accept
from tests.support.system import ISVC, SERVICES, SLICES, api_faults, eventually, service

ENDPOINT = Endpoint("tiny", 8080, "/v1/chat/completions", "ClusterIP", None)
SERVICE = Service(
    "default",
    "tiny",
    "u",
    2,
    Model("default", "phi", "m", 1, "/m.gguf", "gguf", None, None),
    "llama-server",
    1,
    False,
    ENDPOINT,
    "chat",
    "normal",
    None,
    {},
)
OUTLOOK = Outlook(
    ModelFile("Ready", "/m.gguf", 10),
    18100,
    Engine(("/bin/x",), (), "/", Probe(identity="tiny")),
    Program("default.tiny", "a", "{}"),
)
UP = Observed("default.tiny", 5, True, 100.0, "RUNNING")


class Cluster:
    """Takes everything, but what it is told to refuse."""

    clock_offset_s = 0.0

    def __init__(self) -> None:
        self.refuses: dict[str, int] = {}
        """Part of a path -> the code it is answered with, once."""
        self.slow_s = 0.0
        """How long a refusal takes."""
        self.written: list[str] = []
        self.bodies: dict[str, Json] = {}
        self.deleted: list[str] = []

    def request(
        self, method: str, path: str, query: Mapping[str, Any] | None = None, body: Json | None = None, *_: Any
    ) -> Json:
        if method == "GET" and path.endswith(("services/tiny", "endpoints/tiny", "endpointslices/tiny")):
            raise KubeError(404, "NotFound", "none")
        if method == "DELETE":
            self.deleted.append(path)
            self.bodies.pop(path.rpartition("/")[2], None)
        kind = {"addressType": self.bodies["tiny-mac-a"]["addressType"]} if "tiny-mac-a" in self.bodies else {}
        return {"metadata": {"name": "tiny"}, "items": [], **kind}

    def apply(self, path: str, body: Json, manager: str, force: bool = False) -> Json:
        for part in list(self.refuses):
            if part in path:
                time.sleep(self.slow_s)
                raise KubeError(self.refuses.pop(part), "Conflict", "try again")
        known = self.bodies.get(path.rpartition("/")[2])
        if known and known.get("addressType") != body.get("addressType"):
            raise KubeError(422, "Invalid", "addressType: field is immutable")
        self.written.append(path)
        self.bodies[path.rpartition("/")[2]] = body
        return body


def setup(cluster: Any = None) -> tuple[Any, Membership, Registrar]:
    cluster = cluster or Cluster()
    membership = Membership(cluster, "mac-a", 45.0, "session")
    return cluster, membership, Registrar(cluster, "mac-a", membership, lambda: None)


def wanted(address: str = "192.0.2.1", problem: str = "", uid: str = "u") -> dict[tuple[str, str], WantedStatus]:
    record = accept(replace(SERVICE, uid=uid), None, OUTLOOK, 100.0)
    return {record.key: WantedStatus(record, report(record, UP), address, problem)}


@pytest.mark.parametrize("part", ["/services/tiny", "/endpointslices/tiny-mac-a"])
@pytest.mark.parametrize(("code", "soon"), [(409, True), (422, False), (400, False)])
def test_a_conflict_is_over_in_a_moment_and_an_object_that_is_invalid_is_not(part: str, code: int, soon: bool) -> None:
    cluster, _, registrar = setup()
    registrar.want(wanted(), {})
    cluster.refuses = {part: code}
    registrar._one_pass()
    assert "try again" in registrar.published(("default", "tiny")).problem
    left_s = registrar._due_at() - time.monotonic()
    assert left_s <= 1.0 if soon else left_s > 20
    assert registrar.trouble == ("", 0.0), "that is no trouble of the cluster's"
    assert not any(part in path for path in cluster.written)


def test_on_the_embedded_api_a_service_is_looked_at_in_time_though_heartbeats_are_not_due() -> None:
    cluster: Any = Cluster()
    membership = Membership(cluster, "mac-a", 45.0, "session")
    registrar = Registrar(cluster, "mac-a", membership, lambda: None, embedded=True)
    registrar.want(wanted(), {})
    registrar._one_pass()
    (done,) = registrar._publisher._done.values()
    done.service_at -= 30.0  # looked at before the slice was written last
    assert registrar._due_at() - time.monotonic() <= 30.0


def test_a_message_that_waits_is_in_time_and_hides_nothing_while_another_write_is_held_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, membership, registrar = setup()
    registrar.want(wanted(), {}, ClusterContext(operator=False, namespaces=frozenset({"default"})))
    registrar._one_pass()
    registrar._backoffs.hold(("status", "other"), KubeError(503, "ServiceUnavailable", "later", 3600.0))
    lease_at = membership.due_at(frozenset({"default"}))
    assert registrar._due_at() <= lease_at + 0.001  # each reads two clocks one after the other
    for held_until in (time.monotonic() + 0.1, registrar._began):  # the latter ran out in the pass itself
        monkeypatch.setattr(registrar._publisher.statuses, "held_until", lambda held_until=held_until: held_until)
        assert registrar._due_at() == held_until


class Counted(Cluster):
    """Has no slice of this Mac's, and notes each request for one."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def request(self, method: str, path: str, *more: Any) -> Json:
        if path.endswith("/endpointslices/tiny-mac-a"):
            self.asked.append(method)
            raise KubeError(404, "NotFound", "none")
        return super().request(method, path, *more)


@pytest.mark.parametrize("embedded", [True, False])
def test_a_sidecar_that_starts_asks_once_at_most_for_the_slice_of_a_service(embedded: bool) -> None:
    """It has nothing else to do for the many services that are unloaded, suspended or wait for memory."""

    def asked(has_slice: bool) -> list[str]:
        cluster: Any = Counted()
        membership = Membership(cluster, "mac-a", 45.0, "session")
        registrar = Registrar(cluster, "mac-a", membership, lambda: None, embedded)
        ((key, want),) = wanted().items()
        registrar.want({key: replace(want, report=replace(want.report, wants_slice=has_slice))}, {})
        for _ in range(2):
            registrar._one_pass()
        assert registrar.published(key).out is not has_slice
        assert [f"{SLICES}/tiny-mac-a"] * has_slice == [each for each in cluster.written if "slices" in each]
        return list(cluster.asked)

    assert asked(has_slice=False) == ["GET"], "there is nothing to delete"
    assert asked(has_slice=True) == ([] if embedded else ["GET"]), "that API has no other Mac"


class Filled(Cluster):
    """Holds slices of this Mac's from before its state was lost."""

    def request(self, method: str, path: str, *more: Any) -> Json:
        if method == "GET" and path == "/apis/discovery.k8s.io/v1/endpointslices":
            return {"items": [{"metadata": {"namespace": "left", "name": f"{each}-mac-a"}} for each in ("tiny", "old")]}
        return super().request(method, path, *more)


def test_slices_that_nothing_explains_any_more_go_but_not_before_it_is_known_what_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, _, registrar = setup(Filled())
    monkeypatch.setattr(publisher_module, "FIRST_RESYNC_S", 0.0)
    registrar._one_pass()
    assert cluster.deleted == [], "nothing is known yet"
    registrar.want({}, {})
    registrar._one_pass()
    assert [path.rpartition("/")[2] for path in cluster.deleted] == ["tiny-mac-a", "old-mac-a"]


class Fenced(Filled):
    """Gives rights in the namespace of its services alone."""

    def request(self, method: str, path: str, *more: Any) -> Json:
        if path == "/apis/discovery.k8s.io/v1/endpointslices":
            raise KubeError(403, "Forbidden", "at the cluster scope")
        if path == "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices":
            return {"items": [{"metadata": {"namespace": "default", "name": "old-mac-a"}}]}
        return super().request(method, path, *more)


def test_where_rights_are_of_one_namespace_slices_are_looked_for_there_and_nothing_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, _, registrar = setup(Fenced())
    monkeypatch.setattr(publisher_module, "FIRST_RESYNC_S", 0.0)
    registrar.want(wanted(), {})
    registrar._one_pass()
    assert any(path.endswith("/old-mac-a") for path in cluster.deleted)
    assert registrar.trouble == ("", 0.0) and registrar._due_at() > time.monotonic() + 1


class Slow(Cluster):
    """Takes its time for a status: meanwhile `meanwhile` happens, once."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self.meanwhile = meanwhile

    def request(self, method: str, path: str, query: Any = None, body: Any = None, *more: Any) -> Json:
        if method == "GET" and path.rpartition("/")[0].endswith(("/services", "/endpoints", "/endpointslices")):
            raise KubeError(404, "NotFound", "none")
        if method == "POST":
            self.written.append(path)
        return super().request(method, path, query, body, *more)

    def apply(self, path: str, body: Json, manager: str, force: bool = False) -> Json:
        self.written.append(path)
        self.bodies[path.rpartition("/")[2]] = body
        if path.endswith("/status"):
            happens, self.meanwhile = self.meanwhile, lambda: None
            happens()
        return body


def ready(*names: str, but: str = "") -> dict[tuple[str, str], WantedStatus]:
    """Services that serve, but one whose engine has ended."""
    found = {}
    for name in names:
        asked = replace(SERVICE, name=name, endpoint=replace(ENDPOINT, service=name))
        record = accept(asked, None, OUTLOOK, 100.0)
        seen = replace(UP, ready=name != but, pid=5 if name != but else 0)
        found[record.key] = WantedStatus(record, report(record, seen), "192.0.2.1", "")
    return found


def test_a_withdrawal_overtakes_what_a_slow_api_has_still_to_write_and_nothing_is_lost() -> None:
    names = "a", "b", "c"
    cluster = Slow(lambda: registrar.want(ready(*names, but="b"), {}))
    _, _, registrar = setup(cluster)
    registrar.want(ready(*names), {})
    registrar.tell("default", Happening("Normal", "Moved", "elsewhere"))
    registrar._one_pass()
    first = [path for path in cluster.written if path.endswith("/status")]
    assert len(first) == 1 and registrar._wake.is_set()
    cluster.written.clear()
    registrar._one_pass()
    statuses = [index for index, path in enumerate(cluster.written) if path.endswith("/status")]
    (out,) = [index for index, path in enumerate(cluster.written) if path.endswith("/endpointslices/b-mac-a")]
    assert out < min(statuses) and cluster.bodies["b-mac-a"]["endpoints"][0]["conditions"]["ready"] is False
    assert len(statuses) == 2 and sum("/events" in path for path in cluster.written) == 1
    assert registrar.flush(0)


def test_a_lease_that_becomes_due_overtakes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Slow(lambda: monkeypatch.setattr(membership, "due_at", lambda _namespaces: time.monotonic()))
    _, membership, registrar = setup(cluster)
    monkeypatch.setattr(registrar_module, "SLOW_S", 0.0)
    registrar.want(ready("a", "b"), {}, ClusterContext(namespaces=frozenset({"default"})))
    registrar._one_pass()
    assert sum(path.endswith("/status") for path in cluster.written) == 1 and registrar._wake.is_set()


def test_a_copy_of_a_mac_does_not_say_that_the_other_one_stops() -> None:
    cluster, _, registrar = setup()
    registrar.want({}, {}, ClusterContext(namespaces=frozenset({"default"})))
    registrar._one_pass()
    assert [path for path in cluster.written if "/leases/metal-mac-a" in path], "it did not know yet"
    cluster.written.clear()
    registrar.want(wanted(), {}, ClusterContext(namespaces=frozenset({"default"}), cloned="another Mac is called so"))
    registrar._one_pass()
    registrar.release()
    assert cluster.written == []
    assert registrar.trouble[0] == "another Mac is called so"


class Late(Cluster):
    """Takes the second write of the Lease only once it is released, or once somebody waits for that write."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.goes_on = threading.Event(), threading.Event()
        self.holders: list[str] = []

    def apply(self, path: str, body: Json, manager: str, force: bool = False) -> Json:
        if path.endswith("/leases/metal-mac-a"):
            holder = body["spec"]["holderIdentity"]
            if not holder:
                self.goes_on.set()
            elif self.holders:
                self.asked.set()
                self.goes_on.wait()
            self.holders.append(holder)
        return super().apply(path, body, manager, force)


def test_a_lease_that_was_released_is_not_renewed_by_a_pass_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peers would take a Mac that has stopped for a live one, until the Lease has run out."""
    cluster, _, _ = setup(Late())
    registrar = Registrar(cluster, "mac-a", Membership(cluster, "mac-a", 0.5, "session"), lambda: None)
    join = registrar.join

    def waits(_within_s: float) -> None:
        cluster.goes_on.set()
        join(30.0)

    registrar.want({}, {}, ClusterContext(namespaces=frozenset({"default"})))
    registrar.start()
    assert cluster.asked.wait(30.0), "a renewal is under way"
    monkeypatch.setattr(registrar, "join", waits)
    registrar.release()
    join(30.0)
    assert cluster.holders[-1] == "" and not registrar.is_alive()


def test_the_thread_ends_though_it_is_told_to_just_before_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, registrar = setup()

    class SetTooEarly(threading.Event):
        def clear(self) -> None:
            registrar._ends = True
            self.set()
            super().clear()

    monkeypatch.setattr(registrar, "_wake", SetTooEarly())
    registrar.start()
    registrar.join(30.0)
    assert not registrar.is_alive()


def test_another_address_of_this_mac_is_announced_in_the_same_pass() -> None:
    cluster, _, registrar = setup()
    for address, kind in (("192.0.2.1", "IPv4"), ("192.0.2.9", "IPv4"), ("2001:db8::1", "IPv6")):
        cluster.deleted.clear()
        registrar.want(wanted(address), {})
        registrar._one_pass()
        made = cluster.bodies["tiny-mac-a"]
        assert (made["addressType"], made["endpoints"][0]["addresses"]) == (kind, [address])
        assert bool(cluster.deleted) == (kind == "IPv6"), "the type of a slice cannot change, so it is made anew"


def test_an_address_of_another_family_is_told_though_it_is_not_known_what_was_there(tmp_path: Path) -> None:
    def family(address: str) -> str:
        """Of the slice, once that address was to be told."""
        registrar.want(wanted(address, uid=uid), {})
        registrar._one_pass()
        assert registrar.published(("default", "tiny")).problem == ""
        return str(kube.request("GET", f"{SLICES}/tiny-mac-a")["addressType"])

    with embedded_cluster(tmp_path) as kubeconfig:
        kube = Kube(kubeconfig)
        uid = kube.apply(f"{ISVC}/tiny", service("tiny"), "us")["metadata"]["uid"]
        _, _, registrar = setup(kube)
        assert family("192.0.2.1") == "IPv4"
        registrar._publisher.forget_slices()  # as after a gap
        assert family("2001:db8::1") == "IPv6"
        _, _, registrar = setup(kube)  # another run
        assert family("192.0.2.1") == "IPv4"
        kube.close()


def test_the_slice_of_another_mac_is_neither_overwritten_nor_deleted_where_names_meet(tmp_path: Path) -> None:
    """The second replica on `mini` would have a slice of the name that the first on `mini-1` has."""

    def mac(node: str, address: str, ordinal: int) -> tuple[Registrar, dict[tuple[str, str], WantedStatus]]:
        record = replace(accept(replace(SERVICE, uid=uid), None, OUTLOOK, 100.0), ordinal=ordinal)
        registrar = Registrar(kube, node, Membership(kube, node, 45.0, "session"), lambda: None)
        return registrar, {record.key: WantedStatus(record, report(record, UP), address, "")}

    def told() -> list[str]:
        """The addresses that the slice of that name has."""
        return list(kube.request("GET", f"{SLICES}/tiny-mini-1")["endpoints"][0]["addresses"])

    with embedded_cluster(tmp_path) as kubeconfig:
        kube = Kube(kubeconfig)
        uid = kube.apply(f"{ISVC}/tiny", service("tiny"), "us")["metadata"]["uid"]
        (first, serving), (second, wants) = mac("mini-1", "192.0.2.1", 0), mac("mini", "192.0.2.2", 1)
        first.want(serving, {})
        first._one_pass()
        second.want(wants, {})
        second._one_pass()
        assert told() == ["192.0.2.1"]
        (key,) = wants
        assert second.published(key).problem.startswith("EndpointNameConflict: ") and second.published(key).out
        ends = replace(wants[key], report=replace(wants[key].report, wants_slice=False))
        second.want({key: ends}, {})
        second._one_pass()
        assert told() == ["192.0.2.1"]
        kube.request("DELETE", f"{SLICES}/tiny-mini-1")
        second.want(wants, {})
        second._publisher._done[key].blocked_until = 0.0
        second._one_pass()
        assert told() == ["192.0.2.2"] and second.published(key).problem == ""
        kube.close()


def test_a_service_that_is_refused_for_its_name_does_not_take_out_the_one_that_has_it(tmp_path: Path) -> None:
    """`a.b` beside `a-b`: both need one Service, and their slices would have one name."""
    with embedded_cluster(tmp_path) as kubeconfig:
        kube = Kube(kubeconfig)
        uid = kube.apply(f"{ISVC}/tiny", service("tiny"), "us")["metadata"]["uid"]
        _, _, registrar = setup(kube)
        ((key, serves),) = wanted(uid=uid).items()
        failed = Verdict(Standing.FAILED, "ServiceConflict", "", 100.0)
        record = replace(serves.record, name="ti.ny", uid="other", program="default.ti.ny", port=None, verdict=failed)
        refused = WantedStatus(record, report(record, None), "192.0.2.1", "")
        registrar.want({key: serves}, {})
        registrar._one_pass()
        registrar.want({key: serves, record.key: refused}, {})
        for _ in range(2):
            registrar._one_pass()
            assert kube.request("GET", f"{SLICES}/tiny-mac-a")["endpoints"][0]["conditions"]["ready"]
            registrar._publisher.resync_at = 0.0
        kube.close()


def test_a_service_that_lost_its_endpoint_is_withdrawn_by_the_next_sidecar(tmp_path: Path) -> None:
    """Its slice would keep the one that has the Kubernetes Service by now from having one of that name."""
    with embedded_cluster(tmp_path) as kubeconfig:
        kube = Kube(kubeconfig)
        uid = kube.apply(f"{ISVC}/tiny", service("tiny"), "us")["metadata"]["uid"]
        _, _, registrar = setup(kube)
        ((key, serves),) = wanted(uid=uid).items()
        registrar.want({key: serves}, {})
        registrar._one_pass()
        assert kube.request("GET", f"{SLICES}/tiny-mac-a")["endpoints"][0]["conditions"]["ready"]
        record = replace(serves.record, endpoint=None, verdict=Verdict(Standing.FAILED, "InvalidSpec", "", 100.0))
        _, _, registrar = setup(kube)
        registrar.want({key: WantedStatus(record, report(record, None), "192.0.2.1", "")}, {})
        registrar._one_pass()
        assert find(kube, f"{SLICES}/tiny-mac-a") is None
        kube.close()


def test_a_service_gets_its_kubernetes_service_from_one_of_the_same_that_no_mac_serves(tmp_path: Path) -> None:
    """`ti-ny` got the name after `ti.ny` had written the Service, and had the conflict until that was deleted."""
    with embedded_cluster(tmp_path) as kubeconfig:
        kube = Kube(kubeconfig)
        endpoint = replace(ENDPOINT, service="ti-ny")

        def mac(node: str, name: str, address: str, observed: Observed | None) -> tuple[Registrar, Any]:
            uid = kube.apply(f"{ISVC}/{name}", service(name), "us")["metadata"]["uid"]
            record = accept(replace(SERVICE, name=name, uid=uid, endpoint=endpoint), None, OUTLOOK, 100.0)
            if observed is None:
                record = replace(record, verdict=Verdict(Standing.WAIT, "Downloading", "", 100.0))
            registrar = Registrar(kube, node, Membership(kube, node, 45.0, "session"), lambda: None)
            return registrar, WantedStatus(record, report(record, observed), address, "")

        def passed(registrar: Registrar, want: WantedStatus) -> str:
            registrar.want({want.record.key: want}, {})
            registrar._one_pass()
            return registrar.published(want.record.key).problem

        def owners() -> list[str]:
            found = kube.request("GET", "/api/v1/namespaces/default/services/ti-ny")["metadata"]
            return [each["name"] for each in found["ownerReferences"]]

        assert passed(*mac("mac-b", "ti.ny", "192.0.2.2", None)) == "" and owners() == ["ti.ny"]
        serving, ours = mac("mac-a", "ti-ny", "192.0.2.1", UP)
        assert passed(serving, ours) == "" and owners() == ["ti-ny"]
        assert kube.request("GET", f"{SLICES}/ti-ny-mac-a")["endpoints"][0]["conditions"]["ready"]
        late = mac("mac-b", "ti.ny", "192.0.2.2", UP)
        assert passed(*late).startswith("EndpointNameConflict: ") and owners() == ["ti-ny"], "that one is served"
        kube.close()


@pytest.mark.parametrize("theirs", [True, False])
def test_a_service_of_others_is_not_touched_to_tell_the_operator_of_a_dotted_name(tmp_path: Path, theirs: bool) -> None:
    """Nor is one asked for that is not there, as without an address: that is no refusal, to be tried again."""
    with embedded_cluster(tmp_path) as kubeconfig:
        kube, path = Kube(kubeconfig), "/api/v1/namespaces/default/services/ti-ny"
        if theirs:
            there = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "ti-ny"}}
            kube.apply(path, {**there, "spec": {"ports": [{"port": 80}]}}, "others")
        before = find(kube, path)
        uid = kube.apply(f"{ISVC}/ti.ny", service("ti.ny"), "us")["metadata"]["uid"]
        dotted = replace(SERVICE, name="ti.ny", uid=uid, endpoint=replace(ENDPOINT, service="ti-ny"))
        record = accept(dotted, None, OUTLOOK, 100.0)
        want = WantedStatus(record, report(record, UP), "192.0.2.1", "" if theirs else "NoRoutableAddress: none")
        _, _, registrar = setup(kube)
        registrar.want({record.key: want}, {}, ClusterContext(operator=True, namespaces=frozenset({"default"})))
        registrar._one_pass()
        (status,) = registrar._publisher.statuses._services.values()
        assert len(status.nudge_at) == 1
        status.nudge_at = [time.monotonic()]
        registrar._one_pass()
        assert find(kube, path) == before and not status.nudge_at
        for problem in ("EndpointNameConflict: it is theirs", ""):
            told = report(record, replace(UP, published=problem))
            context = ClusterContext(operator=True, namespaces=frozenset({"default"}))
            registrar.want({record.key: replace(want, report=told)}, {}, context)
            registrar._one_pass()
        assert len(status.nudge_at) == 1, "once it can be reached"
        kube.close()


def not_serving() -> dict[tuple[str, str], WantedStatus]:
    return {key: replace(each, report=report(each.record, UP, leaving=True)) for key, each in wanted().items()}


def is_out(registrar: Registrar) -> bool:
    return registrar.published(("default", "tiny")).out


def test_endpoints_are_out_though_the_lease_cannot_be_written() -> None:
    cluster, _, registrar = setup()
    registrar.want(wanted(), {})
    registrar._one_pass()
    assert not is_out(registrar), "it serves"
    cluster.refuses = {"/leases/": 500}
    registrar.want(not_serving(), {}, ClusterContext(namespaces=frozenset({"default"})))
    registrar._one_pass()
    assert not cluster.refuses and is_out(registrar) and "500" in registrar.trouble[0]


def due(registrar: Registrar) -> None:
    """A pass once the pauses of what failed are over."""
    for each, held in registrar._backoffs._held.items():
        registrar._backoffs._held[each] = replace(held, until=0.0)
    registrar._one_pass()


@pytest.mark.parametrize("code", [403, 409, 422, 500])
def test_endpoints_are_not_out_as_long_as_the_cluster_refuses_it(code: int) -> None:
    cluster, _, registrar = setup()
    registrar.want(wanted(), {})
    registrar._one_pass()
    registrar.want(not_serving(), {})
    cluster.refuses = {"/endpointslices/tiny-mac-a": code}
    registrar._one_pass()
    assert cluster.bodies["tiny-mac-a"]["endpoints"][0]["conditions"]["ready"] and not is_out(registrar)
    due(registrar)
    assert not cluster.bodies["tiny-mac-a"]["endpoints"][0]["conditions"]["ready"] and is_out(registrar)


class Refusing(Cluster):
    """Refuses what is of the services `bad-1` and `bad-2`, as a quota or an admission policy does."""

    def __init__(self, part: str, code: int) -> None:
        super().__init__()
        self.part, self.code, self.asked = part, code, 0

    def request(self, method: str, path: str, *more: Any) -> Json:
        if method == "GET" and "/services/" in path:
            raise KubeError(404, "NotFound", "none")
        return super().request(method, path, *more)

    def apply(self, path: str, body: Json, manager: str, force: bool = False) -> Json:
        if self.part in path and self.code:
            self.asked += 1
            raise KubeError(self.code, "Refused", f"{path.partition(self.part)[2]}: exceeded quota")
        return super().apply(path, body, manager, force)


def three() -> dict[tuple[str, str], WantedStatus]:
    """`bad-1`, `bad-2` and `good`, which are ready."""
    want = {}
    for name in ("bad-1", "bad-2", "good"):
        made = replace(SERVICE, name=name, uid=name, endpoint=replace(ENDPOINT, service=name))
        record = accept(made, None, OUTLOOK, 100.0)
        want[record.key] = WantedStatus(record, report(record, UP), "192.0.2.1", "")
    return want


def alone() -> ClusterContext:
    return ClusterContext(operator=False, namespaces=frozenset({"default"}))


@pytest.mark.parametrize("part", ["/services/bad-", "/endpointslices/bad-", "/inferenceservices/bad-"])
@pytest.mark.parametrize("code", [403, 405])
def test_what_is_refused_is_told_once_and_tried_less_and_less_often(
    part: str, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    cluster, _, registrar = setup(Refusing(part, code))
    registrar.want(three(), {}, alone())
    for _ in range(5):  # as for what happens to other services
        registrar._one_pass()
    assert cluster.asked == 2, "each is tried again in its own time"
    assert "exceeded quota" in registrar.trouble[0] and "bad-1" in registrar.trouble[0]
    assert registrar.flush(0.0), "no shutdown waits for it"
    for name in ("bad-1", "bad-2"):
        problem = registrar.published(("default", name)).problem
        assert ("exceeded quota" in problem) == ("inferenceservices" not in part), "the status says so, if it can"
    assert not registrar.published(("default", "good")).problem and "good-mac-a" in cluster.bodies
    for _ in range(4):
        due(registrar)
    pauses = [held.until - time.monotonic() for held in registrar._backoffs._held.values()]
    assert cluster.asked == 10 and min(pauses) > 10 and max(pauses) <= 30
    assert len([each for each in caplog.records if each.msg == "the cluster refuses a write"]) == 2
    cluster.code = 0
    due(registrar)
    assert registrar.trouble == ("", 0.0)
    assert not any(registrar.published(key).problem for key in three())


@pytest.mark.parametrize("code", [400, 422])
def test_a_status_that_is_refused_is_told_and_not_written_in_each_pass(code: int) -> None:
    cluster, _, registrar = setup(Refusing("/inferenceservices/bad-", code))
    registrar.want(three(), {}, alone())
    for _ in range(5):
        registrar._one_pass()
    assert cluster.asked == 2
    assert registrar.trouble[0].startswith(f"status of default/bad-1: {code} ")


@pytest.mark.parametrize("code", [403, 422])
def test_a_lease_that_is_refused_is_told_and_is_not_late_once_it_is_allowed(code: int) -> None:
    _, _, registrar = setup(Refusing("/leases/", code))
    registrar.want({}, {}, alone())
    for _ in range(9):
        due(registrar)
    assert "exceeded quota" in registrar.trouble[0]
    assert registrar._due_at() - time.monotonic() <= 5.0


def test_an_endpoint_that_the_cluster_has_stays_announced_though_its_renewal_is_refused() -> None:
    cluster, _, registrar = setup(Refusing("/endpointslices/bad-", 0))
    registrar.want(three(), {}, alone())
    registrar._one_pass()
    for done in registrar._publisher._done.values():
        done.heartbeat_at = time.monotonic() - 61
    cluster.code, cluster.clock_offset_s = 403, 61.0  # which its heartbeat is written by
    registrar._one_pass()
    assert cluster.asked == 2 and "exceeded quota" in registrar.trouble[0]
    assert not any(registrar.published(key).problem for key in three())


@pytest.mark.parametrize(
    "rule",
    [
        {"resource": "inferenceservices", "name": "bad", "subresource": "status"},
        {"resource": "endpointslices", "name": "bad-mac-a"},
        {"resource": "services", "name": "bad"},
        {"resource": "events"},
    ],
    ids=["status", "slice", "service", "event"],
)
def test_one_object_whose_write_fails_silences_nothing_else(tmp_path: Path, rule: dict[str, Any]) -> None:
    with embedded_cluster(tmp_path) as kubeconfig:
        kube = Kube(kubeconfig)
        want = {}
        for name in ("bad", "good"):
            uid = kube.apply(f"{ISVC}/{name}", service(name), "us")["metadata"]["uid"]
            made = replace(SERVICE, name=name, uid=uid, endpoint=replace(ENDPOINT, service=name))
            record = accept(made, None, OUTLOOK, 100.0)
            want[record.key] = WantedStatus(record, report(record, UP), "192.0.2.1", "")
        membership = Membership(kube, "mac-a", 0.5, "session")  # renewed every 0.1 s
        registrar = Registrar(kube, "mac-a", membership, lambda: None)
        api_faults(kube.server, {**rule, "action": {"status": 500}})
        registrar.want(want, {}, ClusterContext(namespaces=frozenset({"default"}), operator=False))
        registrar.tell(want["default", "bad"].record, Happening("Normal", "Tried", "it is tried"))
        versions: set[str] = set()

        def caught_up() -> bool:
            registrar._one_pass()
            versions.add(kube.request("GET", f"{LEASES}/metal-mac-a")["metadata"]["resourceVersion"])
            phase = (kube.request("GET", f"{ISVC}/good").get("status") or {}).get("phase")
            return len(versions) >= 5 and phase == "Ready" and find(kube, f"{SLICES}/good-mac-a") is not None

        eventually(caught_up, 20, "the Lease and the other service to be written")
        assert kube.request("GET", f"{SLICES}/good-mac-a")["endpoints"][0]["conditions"]["ready"]
        assert "500" in registrar.trouble[0] and not registrar.flush(0.0)
        api_faults(kube.server)

        def written() -> bool:  # a Lease that was renewed too late holds a ready endpoint back for a pass
            due(registrar)
            return find(kube, f"{SLICES}/bad-mac-a") is not None

        eventually(written, 20, "the slice of the service that failed")
        assert registrar.trouble == ("", 0.0) and registrar.flush(0.0)
        assert kube.request("GET", f"{ISVC}/bad")["status"]["phase"] == "Ready"
        assert kube.request("GET", f"{SLICES}/bad-mac-a")["endpoints"][0]["conditions"]["ready"]
        events = kube.request("GET", "/apis/events.k8s.io/v1/namespaces/default/events")["items"]
        assert [each["reason"] for each in events] == ["Tried"]
        kube.close()


def test_an_object_that_fails_is_tried_less_and_less_often_and_not_waited_for_in_a_circle() -> None:
    cluster, _, registrar = setup()
    registrar.want(wanted(), {})
    pauses = []
    for _ in range(12):
        cluster.refuses = {"/endpointslices/": 503}
        due(registrar)
        pauses.append(registrar._due_at() - time.monotonic())
        tried = registrar._counters.counted().refused["endpoints", "503"]
        cluster.refuses.clear()
        registrar._one_pass()
        assert registrar._counters.counted().refused["endpoints", "503"] == tried and not registrar.flush(0.0), "held"
    assert 0.0 < pauses[0] <= 0.5 and 2.0 < pauses[-1] <= 5.0


def test_a_service_is_looked_at_and_written_only_if_it_is_not_as_it_was_written(tmp_path: Path) -> None:
    with embedded_cluster(tmp_path) as kubeconfig:
        kube = Kube(kubeconfig)
        uid = kube.apply(f"{ISVC}/tiny", service("tiny"), "test")["metadata"]["uid"]
        _, _, registrar = setup(kube)
        path = "/api/v1/namespaces/default/services/tiny"

        def look_again() -> int:
            """Requests of a pass in which it is due."""
            registrar._publisher._done["default", "tiny"].service_at = 0.0
            before = kube.requests
            registrar._one_pass()
            return kube.requests - before

        registrar.want(wanted(uid=uid), {})
        registrar._one_pass()
        assert look_again() == 1
        kube.request("PATCH", path, None, {"metadata": {"labels": {"app": "other"}}}, MERGE)
        assert look_again() == 2 and kube.request("GET", path)["metadata"]["labels"]["app"] == "tiny"
        assert look_again() == 1
        kube.request("DELETE", path)
        assert look_again() == 2 and kube.request("GET", path)
        kube.close()


def test_a_withdrawal_does_not_wait_for_its_service_or_for_the_pause_of_its_announcement() -> None:
    cluster, _, registrar = setup()
    registrar.want(wanted(), {})
    registrar._one_pass()
    registrar._publisher._done["default", "tiny"].service_at = 0.0  # its heartbeat is due
    cluster.refuses = {"/services/tiny": 500}
    registrar._one_pass()
    assert registrar._backoffs
    cluster.refuses = {"/services/tiny": 500}
    registrar.want(not_serving(), {})
    registrar._one_pass()
    assert not cluster.bodies["tiny-mac-a"]["endpoints"][0]["conditions"]["ready"]


class Overtaken(Cluster):
    """Something else is wanted by the time that it fails to write a Service."""

    def __init__(self, now: Callable[[], None]) -> None:
        super().__init__()
        self.now = now

    def apply(self, path: str, body: Json, manager: str, force: bool = False) -> Json:
        if path.endswith("/services/tiny") and "/services/tiny" in self.refuses:
            self.now()
        return super().apply(path, body, manager, force)


def test_a_withdrawal_does_not_wait_for_an_announcement_that_fails_as_the_engine_ends() -> None:
    cluster = Overtaken(lambda: registrar.want(not_serving(), {}))
    _, _, registrar = setup(cluster)
    registrar.want(wanted(), {})
    registrar._one_pass()
    registrar._publisher._done["default", "tiny"].service_at = 0.0  # its heartbeat is due
    cluster.refuses = {"/services/tiny": 503}
    registrar._one_pass()
    assert registrar._backoffs and registrar._wake.is_set()
    registrar._one_pass()
    assert not cluster.bodies["tiny-mac-a"]["endpoints"][0]["conditions"]["ready"]


def test_a_pass_that_loses_long_to_failing_writes_ends_and_the_next_one_begins_with_the_lease() -> None:
    cluster, membership, registrar = setup()
    many = {}
    for number in range(5):
        record = accept(replace(SERVICE, name=f"s{number}"), None, OUTLOOK, 100.0)
        many[record.key] = WantedStatus(record, report(record, UP), "192.0.2.1", "")
    cluster.refuses, cluster.slow_s = {"/endpointslices/": 504}, 1.1
    registrar.want(many, {}, ClusterContext(namespaces=frozenset({"default"})))
    registrar._one_pass()
    assert cluster.written[0].endswith("/leases/metal-mac-a") and registrar._pass_failed
    assert not any("/endpointslices/" in path for path in cluster.written)
    membership._renewed_at.clear()
    cluster.written.clear()
    registrar._one_pass()
    assert cluster.written[0].endswith("/leases/metal-mac-a")
    assert sum("/endpointslices/" in path for path in cluster.written) == 4, "all but the one that failed"


def test_an_announcement_that_failed_may_have_been_made_and_is_taken_back() -> None:
    cluster, _, registrar = setup()
    registrar.want(not_serving(), {})
    registrar._one_pass()
    assert is_out(registrar)
    registrar.want(wanted(), {})
    cluster.refuses = {"/endpointslices/tiny-mac-a": 500}
    registrar._one_pass()
    registrar.want(not_serving(), {})
    cluster.written.clear()
    registrar._one_pass()
    assert any("/endpointslices/tiny-mac-a" in path for path in cluster.written) and is_out(registrar)
    cluster.written.clear()
    registrar._one_pass()
    assert cluster.written == [], "and that once"


class Doubtful(Cluster):
    """Keeps statuses; writes one, and answers that it could not, once."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False

    def request(self, method: str, path: str, *more: Any) -> Json:
        if method == "GET" and path.endswith("/inferenceservices/tiny"):
            return {"status": self.bodies.get("status", {}).get("status", {})}
        return super().request(method, path, *more)

    def apply(self, path: str, body: Json, manager: str, force: bool = False) -> Json:
        done = super().apply(path, body, manager, force)
        if path.endswith("/status") and self.fails:
            self.fails = False
            raise KubeError(504, "Timeout", "perhaps")
        return done


@pytest.mark.parametrize("operator", [True, False])
def test_a_status_whose_write_failed_may_be_there_and_is_put_right(operator: bool) -> None:
    cluster, _, registrar = setup(Doubtful())

    def shown(want: dict[tuple[str, str], WantedStatus]) -> str:
        registrar.want(want, {}, ClusterContext(operator=operator, namespaces=frozenset({"default"})))
        due(registrar)
        return str(manifests.metal_ready(cluster.bodies["status"]["status"])["reason"])

    assert shown(wanted()) == "Serving"
    cluster.fails = True
    assert shown(not_serving()) == "Stopping" and not cluster.fails
    assert shown(wanted()) == "Serving", "and not what the write that failed has left there"


class DoubtfulService(Kube):
    """Makes a change of a Service without an answer, the `nth` from now."""

    nth = -1

    def request(self, method: str, path: str, *more: Any, **named: Any) -> Json:
        answer = super().request(method, path, *more, **named)
        if method == "PATCH" and path.endswith("/services/tiny"):
            self.nth -= 1
        if self.nth == 0:
            self.nth = -1
            raise KubeError(504, "Timeout", "perhaps")
        return answer


@pytest.mark.parametrize("nth", [1, 2])
def test_a_service_whose_write_failed_may_be_there_and_is_put_right(tmp_path: Path, nth: int) -> None:
    """A new port takes two writes: the old one goes first, because both have one name."""
    with embedded_cluster(tmp_path) as kubeconfig:
        kube = DoubtfulService(kubeconfig)
        uid = kube.apply(f"{ISVC}/tiny", service("tiny"), "us")["metadata"]["uid"]
        _, _, registrar = setup(kube)

        def with_port(port: int) -> int:
            want = {
                key: replace(each, record=replace(each.record, endpoint=replace(ENDPOINT, port=port)))
                for key, each in wanted(uid=uid).items()
            }
            registrar.want(want, {})
            due(registrar)
            (found,) = kube.request("GET", f"{SERVICES}/tiny")["spec"]["ports"]
            return int(found["port"])

        assert with_port(8080) == 8080
        kube.nth = nth
        assert with_port(9090) == 9090 and kube.nth < 0
        assert with_port(8080) == 8080, "and not what the write that failed has left there"
        kube.close()


class Listed(Cluster):
    """Lists the slice of this Mac."""

    def request(self, method: str, path: str, *more: Any) -> Json:
        answer = super().request(method, path, *more)
        shown = method == "GET" and path.endswith("/endpointslices") and "tiny-mac-a" in self.bodies
        return {**answer, "items": [self.bodies["tiny-mac-a"]] if shown else []}


class Unanswered(Cluster):
    """Deletes a slice, and answers that it could not."""

    def request(self, method: str, path: str, *more: Any) -> Json:
        answer = super().request(method, path, *more)
        if method == "DELETE" and len(self.deleted) == 1:
            raise KubeError(504, "Timeout", "perhaps")
        return answer


@pytest.mark.parametrize("still_a_service", [True, False])
def test_a_slice_whose_deletion_failed_may_be_gone_and_is_written_again(still_a_service: bool) -> None:
    cluster, _, registrar = setup(Unanswered())
    registrar.want(wanted(), {})
    registrar._one_pass()
    off = {key: replace(each, report=replace(each.report, wants_slice=False)) for key, each in wanted().items()}
    registrar.want(off if still_a_service else {}, {})
    registrar._one_pass()
    assert "tiny-mac-a" not in cluster.bodies and registrar._backoffs
    registrar.want(wanted(), {})
    registrar._one_pass()
    assert cluster.bodies["tiny-mac-a"]["endpoints"][0]["conditions"]["ready"], "not only with the next heartbeat"


def test_a_slice_that_a_resync_deletes_is_written_again_if_it_is_wanted_before_anything_else_is_done() -> None:
    cluster, _, registrar = setup(Listed())
    for _ in range(2):
        registrar.want(wanted(), {})
        registrar._one_pass()
        assert "tiny-mac-a" in cluster.bodies
        registrar._publisher.resync({})
        assert "tiny-mac-a" not in cluster.bodies


def test_a_slice_that_could_not_be_deleted_is_taken_out_before_its_service_is_looked_at() -> None:
    cluster, _, registrar = setup()
    registrar.want(wanted(), {})
    registrar._one_pass()
    delete, cluster.request = cluster.request, refusing_deletes(cluster.request)
    off = {key: replace(each, report=replace(each.report, wants_slice=False)) for key, each in wanted().items()}
    registrar.want(off, {})
    registrar._one_pass()
    cluster.request = delete
    registrar._publisher._done["default", "tiny"].service_at = 0.0
    cluster.refuses = {"/services/tiny": 500}
    registrar.want(not_serving(), {})
    registrar._one_pass()
    assert not cluster.bodies["tiny-mac-a"]["endpoints"][0]["conditions"]["ready"]


def refusing_deletes(request: Callable[..., Json]) -> Callable[..., Json]:
    def refused(method: str, *more: Any) -> Json:
        if method == "DELETE":
            raise KubeError(500, "InternalError", "not now")
        return request(method, *more)

    return refused


def test_without_an_address_the_endpoint_goes_and_the_reason_is_kept() -> None:
    cluster, _, registrar = setup()
    registrar.want(wanted(), {})
    registrar._one_pass()
    registrar.want(wanted("", "NoRoutableAddress: 169.254.3.4 is link-local"), {})
    registrar._one_pass()
    assert [path.rpartition("/")[2] for path in cluster.deleted] == ["tiny-mac-a"]
    assert registrar.published(("default", "tiny")).problem == "NoRoutableAddress: 169.254.3.4 is link-local"
    registrar.want(wanted("192.0.2.5"), {})
    registrar._one_pass()
    assert cluster.bodies["tiny-mac-a"]["endpoints"][0]["addresses"] == ["192.0.2.5"]
    assert registrar.published(("default", "tiny")).problem == ""


def test_a_slice_that_was_taken_out_before_a_gap_goes_when_there_is_no_address_after_it() -> None:
    cluster, _, registrar = setup()
    registrar.want(not_serving(), {})
    registrar._one_pass()
    assert is_out(registrar) and cluster.deleted == []
    registrar._publisher.forget_slices()  # as after a gap
    registrar.want(wanted("", "NoRoutableAddress: 169.254.3.4 is link-local"), {})
    registrar._one_pass()
    assert [path.rpartition("/")[2] for path in cluster.deleted] == ["tiny-mac-a"]


@pytest.mark.parametrize("how", ["a gap", "a failed write"])
def test_the_slice_of_a_service_that_goes_is_deleted_though_it_is_not_known_how_it_was_written(how: str) -> None:
    """One without an engine, as on demand, goes at once: it may be another Mac's when this one wakes."""
    cluster, _, registrar = setup()
    registrar.want(wanted(), {})
    cluster.refuses = {"/endpointslices/tiny-mac-a": 500} if how == "a failed write" else {}
    registrar._one_pass()
    if how == "a gap":
        registrar._publisher.forget_slices()
    registrar.want({}, {})
    registrar._one_pass()
    assert [path.rpartition("/")[2] for path in cluster.deleted] == ["tiny-mac-a"]


def test_a_service_that_is_switched_off_by_an_edit_that_breaks_its_endpoint_is_taken_out() -> None:
    cluster, _, registrar = setup()
    registrar.want(wanted(), {})
    registrar._one_pass()
    assert not is_out(registrar) and cluster.bodies["tiny-mac-a"]["endpoints"][0]["conditions"]["ready"]
    (serving,) = wanted().values()
    stopped = Verdict(Standing.STOPPED, "ManuallyScaledToZero", "", 101.0)
    record = replace(serving.record, endpoint=None, verdict=stopped)
    registrar.want({record.key: replace(serving, record=record, report=report(record, UP))}, {})
    registrar._one_pass()
    assert [path.rpartition("/")[2] for path in cluster.deleted] == ["tiny-mac-a"] and is_out(registrar)


def test_a_slice_that_was_never_accepted_is_left_alone_while_its_engine_is_not_ready() -> None:
    cluster, _, registrar = setup(Counted())
    registrar.want(wanted(), {})
    cluster.refuses = {"/endpointslices/tiny-mac-a": 422}
    registrar._one_pass()
    for each in (not_serving(), wanted(), not_serving()):
        cluster.refuses = {"/endpointslices/tiny-mac-a": 422}
        registrar.want(each, {})
        registrar._one_pass()
        assert cluster.refuses, "it waits for the end of its pause"


@pytest.mark.parametrize("how", ["a gap", "a restart"])
def test_a_slice_that_is_there_is_taken_out_at_once_though_its_last_write_was_refused(how: str) -> None:
    cluster, _, registrar = setup()  # which has a slice of this Mac's for whoever asks, as after a restart
    registrar.want(wanted(), {})
    if how == "a gap":
        registrar._one_pass()
        registrar._publisher.forget_slices()
    cluster.refuses = {"/endpointslices/tiny-mac-a": 422}
    registrar._one_pass()
    assert not cluster.refuses
    registrar.want(not_serving(), {})
    registrar._one_pass()
    assert not cluster.bodies["tiny-mac-a"]["endpoints"][0]["conditions"]["ready"], "requests come to it still"


@pytest.mark.parametrize("code", [422, 500])
def test_a_slice_of_an_earlier_sidecar_is_taken_out_though_its_service_is_refused(code: int) -> None:
    cluster, _, registrar = setup()  # which has a slice of this Mac's for whoever asks
    registrar.want(wanted(), {})
    cluster.refuses = {"/services/tiny": code}
    registrar._one_pass()
    assert not cluster.refuses and "tiny-mac-a" not in cluster.bodies
    cluster.refuses = {"/services/tiny": code}
    registrar.want(not_serving(), {})
    registrar._one_pass()
    assert not cluster.bodies["tiny-mac-a"]["endpoints"][0]["conditions"]["ready"], "requests come to it still"


def test_a_slice_that_is_not_there_is_looked_for_once_while_its_service_is_refused() -> None:
    cluster = Counted()
    _, _, registrar = setup(cluster)
    registrar.want(not_serving(), {})
    cluster.refuses = {"/services/tiny": 422}
    for _ in range(5):
        registrar._one_pass()
    assert cluster.asked == ["GET"]
    assert registrar.published(("default", "tiny")).out, "a stop of the system need not wait for it"


def test_a_heartbeat_that_is_not_accepted_is_not_tried_in_a_circle() -> None:
    cluster, _, registrar = setup()
    registrar.want(wanted(), {})
    registrar._one_pass()
    (done,) = registrar._publisher._done.values()
    done.heartbeat_at -= 61.0
    cluster.clock_offset_s = 61.0
    cluster.refuses = {"/endpointslices/tiny-mac-a": 422}
    registrar._one_pass()
    assert not cluster.refuses and "try again" in registrar.published(("default", "tiny")).problem
    assert registrar._due_at() - time.monotonic() > 20


class Mute(Cluster):
    """Takes no Events for now."""

    def request(self, method: str, path: str, query: Any = None, body: Any = None, *more: Any) -> Json:
        if method == "POST":
            if self.refuses.pop("/events", 0):
                raise KubeError(503, "Unavailable", "try again")
            self.written.append(body["reason"])
        return super().request(method, path, query, body, *more)


def test_an_event_that_fails_waits_for_its_turn_and_wakes_nobody() -> None:
    cluster, _, registrar = setup(Mute())
    for reason in ("First", "Second"):
        registrar.tell("default", Happening("Normal", reason, "it is so"))
    cluster.refuses = {"/events": 503}
    registrar._wake.clear()
    registrar._one_pass()
    registrar._one_pass()
    assert cluster.written == [] and not registrar._wake.is_set()
    registrar.tell("default", Happening("Normal", "Third", "it is so"))
    due(registrar)
    assert cluster.written == ["First", "Second", "Third"]


def test_what_fails_is_counted_by_what_was_written_and_how_it_was_answered() -> None:
    cluster, _, registrar = setup()
    registrar.want(wanted(), {})
    cluster.refuses = {"/endpointslices/tiny-mac-a": 409}
    registrar._one_pass()
    cluster.refuses = {"/leases/": 503}
    registrar.want(wanted(), {}, ClusterContext(namespaces=frozenset({"default"})))
    registrar._one_pass()
    assert registrar._counters.counted().refused == {("endpoints", "409"): 1, ("lease", "503"): 1}


@pytest.mark.parametrize("code", [409, 422, 500])
def test_a_withdrawal_takes_from_the_decision_until_the_cluster_has_it(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    cluster, membership, registrar = setup()
    monkeypatch.setattr(membership, "steady", lambda _: True)
    ready = wanted()
    registrar.want(ready, {})
    registrar._one_pass()
    assert not sum(registrar._counters.counted().withdrawals.counts), "nothing was withdrawn"
    (key, want), down = next(iter(ready.items())), Observed("default.tiny", 0, False, 101.0, "EXITED")
    lost = {key: replace(want, report=report(want.record, down))}
    cluster.refuses = {"/endpointslices/tiny-mac-a": code}
    registrar.want(lost, {})
    registrar._one_pass()
    assert not sum(registrar._counters.counted().withdrawals.counts), "it is not out yet"
    due(registrar)
    assert sum(registrar._counters.counted().withdrawals.counts) == 1
    registrar._one_pass()
    registrar.want(ready, {})
    registrar._one_pass()
    registrar.want({}, {})
    registrar._one_pass()
    assert sum(registrar._counters.counted().withdrawals.counts) == 2, "a service that is deleted goes, too"


def test_an_engine_that_the_cluster_does_not_name_has_nothing_to_withdraw() -> None:
    cluster, _, registrar = setup()
    (direct,) = wanted().values()
    record = replace(direct.record, idle_s=60.0, front_port=18101)
    fronted = WantedStatus(record, report(record, UP, fronts=[18101]), "192.0.2.1", "")
    unfronted = WantedStatus(record, report(record, UP, fronts=[]), "192.0.2.1", "")
    for want, named in ((unfronted, False), (fronted, True), (unfronted, False)):
        registrar.want({record.key: want}, {})
        registrar._one_pass()
        assert registrar.published(record.key).fronted is named
    registrar.want({record.key: fronted}, {})
    registrar._one_pass()
    cluster.refuses["endpointslices"] = 500
    registrar.want({record.key: unfronted}, {})
    registrar._one_pass()
    assert not registrar.published(record.key).fronted, "the write that failed may have taken effect"


class Unconfirmed(Cluster):
    """Makes one change of a slice without an answer, once it is told to."""

    silent = False

    def apply(self, path: str, body: Json, manager: str, force: bool = False) -> Json:
        answer = super().apply(path, body, manager, force)
        if self.silent and "/endpointslices/" in path:
            self.silent = False
            raise KubeError(503, "ServiceUnavailable", "it was made all the same")
        return answer


def test_an_engine_that_is_ready_again_is_announced_though_its_withdrawal_seemed_to_fail() -> None:
    cluster, _, registrar = setup(Unconfirmed())
    ready = wanted()
    registrar.want(ready, {})
    registrar._one_pass()
    key, want = next(iter(ready.items()))
    cluster.silent = True
    for up in (replace(UP, ready=False), UP):
        registrar.want({key: replace(want, report=report(want.record, up))}, {})
        registrar._one_pass()
        assert cluster.bodies["tiny-mac-a"]["endpoints"][0]["conditions"]["ready"] is up.ready


@pytest.mark.parametrize("code", [404, 409, 422])
def test_a_lease_that_is_refused_for_what_it_says_is_not_written_again_at_once(code: int) -> None:
    cluster, _, registrar = setup()
    registrar.want({}, {}, ClusterContext(namespaces=frozenset({"default"})))
    cluster.refuses = {"/leases/": code}
    registrar._one_pass()
    assert registrar._due_at() - time.monotonic() > 1


class Unmoved(Cluster):
    """Refuses each change of a status or of a Service, but the applies of this Mac's own fields."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code

    def request(self, method: str, path: str, query: Any = None, body: Json | None = None, *more: Any) -> Json:
        if method == "PATCH":
            raise KubeError(self.code, "Refused", "not this")
        if method == "GET" and path.endswith("/inferenceservices/tiny"):
            return {"status": {"schedulingStatus": "WaitingForMetalAgent"}}
        return super().request(method, path, query, body, *more)


@pytest.mark.parametrize("code", [400, 404, 409, 422])
def test_a_reason_that_cannot_be_cleared_is_not_tried_in_a_circle(code: int) -> None:
    _, _, registrar = setup(Unmoved(code))
    registrar.want(wanted(), {}, ClusterContext(operator=True, namespaces=frozenset({"default"})))
    registrar._one_pass()
    (status,) = registrar._publisher.statuses._services.values()
    status.clear_at = [time.monotonic()]
    registrar._one_pass()
    assert status.clear_at, "it is due still"
    assert registrar._due_at() - time.monotonic() > 1


def test_an_address_that_is_not_accepted_takes_the_one_of_before_out() -> None:
    cluster, _, registrar = setup()
    registrar.want(wanted(), {})
    registrar._one_pass()
    assert cluster.bodies["tiny-mac-a"]["endpoints"][0]["addresses"] == ["192.0.2.1"]
    registrar.want(wanted("198.51.100.9"), {})
    cluster.refuses = {"/endpointslices/tiny-mac-a": 422}
    registrar._one_pass()
    registrar._one_pass()
    assert any(path.endswith("/endpointslices/tiny-mac-a") for path in cluster.deleted)


def test_a_copy_of_a_mac_does_not_try_in_a_circle_what_it_held_back() -> None:
    cluster, _, registrar = setup()
    registrar.want(wanted(), {})
    cluster.refuses = {"/endpointslices/": 503}
    registrar._one_pass()
    assert registrar._backoffs
    registrar.want(wanted(), {}, ClusterContext(cloned="another Mac has its name"))
    due(registrar)
    assert registrar._due_at() - time.monotonic() > 1.0


def test_what_happens_while_there_is_a_copy_of_a_mac_is_told_once_it_is_alone() -> None:
    cluster, _, registrar = setup(Mute())
    registrar.want({}, {}, ClusterContext(cloned="another Mac is called so"))
    registrar.tell("default", Happening("Normal", "Moved", "elsewhere"))
    registrar._one_pass()
    assert cluster.written == []
    registrar.want({}, {})
    registrar._one_pass()
    assert cluster.written == ["Moved"]


class LoginPage(Cluster):
    """A proxy that asks for a login: it answers 200, and with an object at times."""

    def request(self, *_: Any, **__: Any) -> Json:
        return {"login": "required"}

    def apply(self, *_: Any, **__: Any) -> Json:
        return {"login": "required"}


def test_an_answer_that_no_api_gives_ends_no_registrar() -> None:
    cluster, _, registrar = setup(LoginPage())
    context = ClusterContext(namespaces=frozenset({"default"}))
    registrar.want(wanted(), {}, context)
    registrar._one_pass()
    assert "metadata" in registrar.trouble[0]
    cluster.request, cluster.apply = Cluster.request.__get__(cluster), Cluster.apply.__get__(cluster)
    registrar._one_pass()
    assert registrar.trouble == ("", 0.0) and "tiny-mac-a" in cluster.bodies


class Left(Cluster):
    """Has slices that LLMKube's agent left long ago; since 0.10 that of `m` is named `m-agent`."""

    def __init__(self, owner: str | None) -> None:
        super().__init__()
        self.labels = {"llmkube.ai/managed-by": "metal-agent"}
        self.labels |= {"llmkube.ai/inference-service": owner} if owner is not None else {}

    def request(self, method: str, path: str, *more: Any) -> Json:
        if method == "GET" and path == f"{SLICES}/tiny":
            return {"metadata": {"name": "tiny", "uid": "x", "labels": self.labels}}
        return super().request(method, path, *more)


@pytest.mark.parametrize(("owner", "removed"), [("tiny", True), (None, True), ("ti", False)])
def test_what_the_agent_left_is_removed_unless_it_is_another_services(owner: str | None, removed: bool) -> None:
    cluster, _, registrar = setup(Left(owner))
    registrar.want(wanted(), {})
    registrar._one_pass()
    assert cluster.deleted == [f"{SLICES}/tiny"] * removed


def test_too_many_open_files_end_no_registrar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's own addresses cannot be read then, by which leftovers of another agent are told."""
    cluster, _, registrar = setup()
    registrar.want(wanted(), {})

    def unreadable(_told: str) -> frozenset[str]:
        raise OSError(24, "Too many open files")

    cluster.request = lambda *_: {
        "metadata": {"name": "tiny", "uid": "u", "labels": {"app.kubernetes.io/managed-by": "metal-supervisor"}},
        "spec": {},
        "items": [],
    }
    with monkeypatch.context() as patched:
        patched.setattr(publisher_module.machine, "own_addresses", unreadable)
        registrar._one_pass()
    assert "Too many open files" in registrar.trouble[0]
    registrar._one_pass()
    assert registrar.trouble == ("", 0.0)


def test_a_status_whose_removal_fails_is_removed_later() -> None:
    cluster, _, registrar = setup()
    context = ClusterContext(operator=False)
    registrar.want(wanted(), {}, context)
    registrar._one_pass()
    leaves = {
        key: replace(each, record=replace(each.record, verdict=Verdict(Standing.REMOVING, "NotHere", "", 1.0)))
        for key, each in wanted().items()
    }
    registrar.want(leaves, {}, context)
    registrar._one_pass()
    cluster.written.clear()
    cluster.refuses = {"inferenceservices/tiny/status": 500}
    registrar.want({}, {}, context)
    registrar._one_pass()
    assert not cluster.written
    registrar._backoffs.over(("forget", ("default", "tiny")))
    registrar._one_pass()
    assert [path.rpartition("/inferenceservices/")[2] for path in cluster.written] == ["tiny/status"]
    registrar._one_pass()
    assert len(cluster.written) == 1


def test_the_first_slice_has_a_heartbeat_however_short_ago_the_mac_booted(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, _, registrar = setup()
    monkeypatch.setattr(time, "monotonic", lambda: 20.0)
    registrar.want(wanted(), {})
    registrar._one_pass()
    assert cluster.bodies["tiny-mac-a"]["metadata"]["annotations"]["llmkube.ai/agent-heartbeat"]
