"""A Mac among others: its Lease, the silence of peers, and what comes after a gap."""

from __future__ import annotations

import errno
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor.cluster.kube import Kube, KubeError
from metal_supervisor.host import sleep_clock
from metal_supervisor.host.sleep_clock import Clocks
from metal_supervisor.placement import leases
from metal_supervisor.sidecar import fleetnode, membership
from metal_supervisor.sidecar.fleetnode import FleetNode, fleet_node
from metal_supervisor.sidecar.membership import Membership
from tests.support.macs import LEASES, embedded_cluster
from tests.support.system import ROOT, SLICES

NS = ["default"]


@pytest.fixture(scope="module")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with embedded_cluster(tmp_path_factory.mktemp("member")) as path:
        yield path


class Clock:
    """A pair of clocks that are set by hand."""

    def __init__(self) -> None:
        self.now, self.slept_s = 1000.0, 0.0

    def monotonic(self) -> float:
        return self.now

    def inclusive(self) -> float:
        return self.now + self.slept_s + 500.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(membership.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(sleep_clock, "system_clocks", lambda: Clocks(clock.inclusive, clock.monotonic))
    return clock


@pytest.fixture
def kube(kubeconfig: Path) -> Iterator[Kube]:
    kube = Kube(kubeconfig)
    yield kube
    kube.close()


def lease(kube: Kube, node: str) -> dict[str, Any]:
    return kube.request("GET", f"{LEASES}/metal-{node}")


def test_the_lease_says_who_and_what_this_mac_is_and_is_renewed_when_due(kube: Kube, clock: Clock) -> None:
    mac = Membership(kube, "mac-a", 40.0, "s1")
    mac.describe({"metal-supervisor.io/chip": "M9"})
    assert mac.due_at(NS) < clock.now
    assert mac.renew("default") is False
    found = lease(kube, "mac-a")
    assert found["spec"]["holderIdentity"] == "mac-a" and found["spec"]["leaseDurationSeconds"] == 40
    assert found["metadata"]["annotations"] == {"metal-supervisor.io/chip": "M9", leases.SESSION: "s1"}
    assert mac.due_at(NS) == clock.now + 8.0, "five renewals to a term: four may get lost"
    clock.now += 5
    mac.renew("default")
    assert lease(kube, "mac-a")["metadata"]["resourceVersion"] == found["metadata"]["resourceVersion"], "not yet due"
    clock.now += 3
    mac.renew("default")
    assert lease(kube, "mac-a")["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"]


def test_a_drain_is_told_at_once_and_taken_back_at_once(kube: Kube, clock: Clock) -> None:
    mac = Membership(kube, "mac-b", 40.0, "s1")
    mac.renew("default")
    mac.describe({leases.UNSCHEDULABLE: "drain"})
    mac.renew("default")
    assert lease(kube, "mac-b")["metadata"]["annotations"][leases.UNSCHEDULABLE] == "drain"
    mac.describe({})
    assert mac.due_at(NS) <= clock.now
    mac.renew("default")
    assert leases.UNSCHEDULABLE not in lease(kube, "mac-b")["metadata"]["annotations"]


@pytest.mark.parametrize("before", ["[" * 100_000, "{", '"x"', "[1, null]"])
def test_a_session_is_named_whatever_was_in_its_file(tmp_path: Path, before: str) -> None:
    kept = tmp_path / "session"
    kept.write_text(before)
    session = membership.session_kept(kept)
    assert json.loads(kept.read_text())[-1] == session


def test_a_session_is_named_on_a_full_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "session"
    first = membership.session_kept(kept)

    def full(*_: Any, **__: Any) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(membership, "write_atomic", full)
    later = membership.session_kept(kept)
    assert later > first, "the controller takes a later session that it does not know for no clone"


def test_a_release_says_that_nobody_holds_it(kube: Kube, clock: Clock) -> None:
    mac = Membership(kube, "mac-c", 40.0, "s1")
    mac.renew("default")
    mac.release()
    assert not lease(kube, "mac-c")["spec"].get("holderIdentity")


def test_a_lease_that_cannot_be_released_keeps_no_other_from_being_released(
    kube: Kube, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    mac, apply = Membership(kube, "mac-g", 40.0, "s1"), kube.apply
    kube.request("POST", "/api/v1/namespaces", None, {"metadata": {"name": "broken"}})
    for namespace in ("default", "broken"):
        mac.renew(namespace)

    def failing(path: str, *rest: Any, **more: Any) -> Any:
        if "/namespaces/broken/" in path:
            raise KubeError(503, "Unavailable", "no")
        return apply(path, *rest, **more)

    monkeypatch.setattr(kube, "apply", failing)
    with pytest.raises(KubeError):
        mac.release()
    assert not lease(kube, "mac-g")["spec"].get("holderIdentity")


def test_after_a_gap_endpoints_are_announced_only_after_a_second_renewal(kube: Kube, clock: Clock) -> None:
    mac = Membership(kube, "mac-d", 40.0, "s1")
    assert mac.renew("default") is False and mac.steady("default"), "a start is no gap"
    clock.now += 41
    assert mac.renew("default") is True, "peers may have taken the endpoints out"
    assert not mac.steady("default"), "a dark wake may end at any moment"
    assert mac.due_at(NS) == clock.now + membership.STEADY_PAUSE_S
    clock.now += membership.STEADY_PAUSE_S
    assert mac.renew("default") is False
    assert mac.steady("default")


def test_a_night_asleep_is_a_gap_though_no_awake_time_went_by(kube: Kube, clock: Clock) -> None:
    mac = Membership(kube, "mac-e", 40.0, "s1")
    mac.renew("default")
    before = lease(kube, "mac-e")["metadata"]["resourceVersion"]
    clock.slept_s += 8 * 3600.0
    assert mac.due_at(NS) <= clock.now, "at once"
    assert mac.renew("default") is True and not mac.steady("default")
    assert lease(kube, "mac-e")["metadata"]["resourceVersion"] != before
    clock.slept_s += 1.0
    assert mac.renew("default") is False and mac.due_at(NS) > clock.now, "a nap is none"


def test_a_drain_hides_no_gap(kube: Kube, clock: Clock) -> None:
    mac = Membership(kube, "mac-f", 40.0, "s1")
    mac.renew("default")
    clock.slept_s += 8 * 3600.0
    mac.describe({leases.UNSCHEDULABLE: "drain"})
    assert mac.due_at(NS) <= clock.now
    assert mac.renew("default") is True and not mac.steady("default"), "peers have taken its endpoints out all the same"
    assert lease(kube, "mac-f")["metadata"]["annotations"][leases.UNSCHEDULABLE] == "drain"
    mac.describe({})
    assert mac.due_at(NS) <= clock.now
    assert mac.renew("default") is False and mac.due_at(NS) > clock.now, "told once"


def slice_of(kube: Kube, node: str, ready: bool = True, service: str = "tiny") -> dict[str, Any]:
    return kube.apply(
        f"{SLICES}/{service}-{node}",
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": f"{service}-{node}",
                "namespace": "default",
                "labels": {
                    "kubernetes.io/service-name": service,
                    leases.NODE: node,
                    "endpointslice.kubernetes.io/managed-by": "metal-supervisor",
                },
            },
            "addressType": "IPv4",
            "endpoints": [
                {"addresses": ["192.0.2.9"], "conditions": {"ready": ready, "serving": ready, "terminating": False}}
            ],
            "ports": [{"name": "http", "port": 18100, "protocol": "TCP"}],
        },
        f"metal/{node}",
        force=True,
    )


def withdraw(mac: Membership, *silent: tuple[str, str]) -> None:
    for namespace, node in mac.to_withdraw(silent):
        mac.withdraw_peer(namespace, node)


def conditions(kube: Kube, node: str, service: str = "tiny") -> dict[str, bool]:
    return dict(kube.request("GET", f"{SLICES}/{service}-{node}")["endpoints"][0]["conditions"])


def test_the_endpoints_of_a_silent_mac_are_taken_out_once(kube: Kube, clock: Clock) -> None:
    mac = Membership(kube, "mac-a", 40.0, "s1")
    slice_of(kube, "gone")
    slice_of(kube, "alive")
    withdraw(mac, ("default", "gone"))
    assert conditions(kube, "gone") == {"ready": False, "serving": False, "terminating": False}
    assert conditions(kube, "alive")["ready"] is True
    sent = kube.requests
    withdraw(mac, ("default", "gone"))
    assert kube.requests == sent, "once is enough while it stays silent"
    # It comes back, announces itself, and falls silent again.
    withdraw(mac)
    slice_of(kube, "gone")
    withdraw(mac, ("default", "gone"))
    assert conditions(kube, "gone")["ready"] is False


def test_a_slice_that_cannot_be_written_holds_no_other_of_a_silent_mac_back(
    kube: Kube, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    mac = Membership(kube, "mac-a", 40.0, "s1")
    for name in ("a", "b"):
        slice_of(kube, "broken", service=name)
    ask = kube.request

    def failing(method: str, path: str, *rest: Any) -> Any:
        if method == "PATCH" and path.endswith("/a-broken"):
            raise KubeError(500, "InternalError", "no")
        return ask(method, path, *rest)

    monkeypatch.setattr(kube, "request", failing)
    with pytest.raises(KubeError):
        withdraw(mac, ("default", "broken"))
    assert conditions(kube, "broken", "b")["ready"] is False
    assert mac.to_withdraw([("default", "broken")]), "it is tried again"
    monkeypatch.setattr(kube, "request", ask)
    withdraw(mac, ("default", "broken"))
    assert conditions(kube, "broken", "a")["ready"] is False


def test_a_refusal_by_admission_leaves_a_silent_mac_to_the_reaper(
    kube: Kube, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mac = Membership(kube, "mac-a", 40.0, "s1")
    slice_of(kube, "fenced")
    ask, sent = kube.request, []

    def fenced(method: str, *rest: Any, **more: Any) -> Any:
        sent.append(method)
        if method == "PATCH":
            raise KubeError(422, "Invalid", "denied request")
        return ask(method, *rest, **more)

    monkeypatch.setattr(kube, "request", fenced)
    for _ in range(3):
        withdraw(mac, ("default", "fenced"))
    assert sent == ["GET", "PATCH"], "asked once while it stays silent"
    assert [each.message for each in caplog.records] == ["endpoint of a silent Mac left to the reaper"]
    assert conditions(kube, "fenced")["ready"] is True


def test_a_mac_that_wakes_meanwhile_wins(kube: Kube, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    mac = Membership(kube, "mac-a", 40.0, "s1")
    slice_of(kube, "woken", ready=True)
    ask = kube.request
    calls = itertools.count()

    def racing(method: str, *rest: Any, **more: Any) -> Any:
        if method == "PATCH" and next(calls) == 0:  # between our look and our write it writes its own
            monkeypatch.setattr(kube, "request", ask)
            found = ask("GET", f"{SLICES}/tiny-woken")
            found["metadata"]["annotations"] = {"awake": "yes"}
            ask("PUT", f"{SLICES}/tiny-woken", None, found)
        return ask(method, *rest, **more)

    monkeypatch.setattr(kube, "request", racing)
    withdraw(mac, ("default", "woken"))
    assert conditions(kube, "woken")["ready"] is True


def test_a_fleet_node_is_written_every_minute_and_after_a_night_asleep_at_once(clock: Clock) -> None:
    class Cluster:
        clock_offset_s = 0.0
        written = 0

        def apply(self, *_: Any, force: bool) -> None:
            self.written += 1

    cluster: Any = Cluster()
    mac = FleetNode(cluster, "mac-a", 64 << 30)
    assert mac.due_at < clock.now
    mac.write([])
    mac.write([])
    assert cluster.written == 2 and mac.due_at == clock.now + fleetnode.EVERY_S, "itself and its status, once"
    clock.slept_s += 8 * 3600.0
    assert mac.due_at < clock.now
    mac.write([])
    assert cluster.written == 4


def test_a_fleet_node_attracts_no_work_and_fits_the_fields_definition() -> None:
    body = fleet_node("mac-a", 64 << 30, ["b", "a", "a"], "2026-11-21T12:00:00Z")
    assert body["status"]["phase"] == "Draining", "a node that is Ready is given tasks"
    assert body["status"]["capability"] == {"accelerator": "metal", "totalRAMGB": 64, "installedModels": ["a", "b"]}
    path = ROOT.parent / "shared" / "crds" / "foreman.llmkube.dev_fleetnodes.yaml"
    if not path.exists():
        pytest.skip(f"{path.name} is not at ../shared/crds beside the checkout; put the field's definitions there")
    import yaml

    from metal_supervisor.apiserver.schema import validate

    schema = yaml.safe_load(path.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert validate(schema, body) == []
