"""The Lease of LLMKube's operator at an API server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from metal_supervisor.cluster import operator_lease
from metal_supervisor.cluster.kube import Kube
from metal_supervisor.cluster.operator_lease import OperatorLease
from metal_supervisor.cluster.status_mode import LEASE_NAME
from tests.support.macs import LEASES, embedded_cluster
from tests.support.system import eventually


@pytest.fixture
def kube(tmp_path: Path) -> Iterator[Kube]:
    with embedded_cluster(tmp_path) as kubeconfig:
        found = Kube(kubeconfig)
        yield found
        found.close()


def renew(kube: Kube, time: str, name: str = LEASE_NAME) -> None:
    spec = {"holderIdentity": "pod-1", "leaseDurationSeconds": 15, "renewTime": time}
    body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}, "spec": spec}
    kube.apply(f"{LEASES}/{name}", body, "operator", force=True)


@pytest.mark.parametrize("namespace", ["", "default"])
def test_the_lease_is_found_by_its_name_and_remembers_its_first_sight(kube: Kube, namespace: str) -> None:
    lease = OperatorLease(kube, namespace)
    lease.read()
    assert lease.seen is None
    renew(kube, "2026-11-21T12:00:00.000000Z", "another")
    renew(kube, "2026-11-21T12:00:00.000000Z")
    lease.read()
    first = lease.seen
    assert first is not None and (first.renewed, first.duration_s) == ("2026-11-21T12:00:00.000000Z", 15.0)
    lease.read()
    again = lease.seen
    assert again is not None and again.since == first.since and again.at > first.at
    renew(kube, "2026-11-21T12:00:02.000000Z")
    lease.read()
    renewed = lease.seen
    assert renewed is not None and renewed.since == renewed.at > again.at


def test_asking_does_not_wait_and_not_again_too_soon(kube: Kube, monkeypatch: pytest.MonkeyPatch) -> None:
    lease, held = OperatorLease(kube), threading.Event()
    asked: list[str] = []

    def request(_method: str, path: str, *_: object) -> dict[str, object]:
        asked.append(path)
        held.wait(30)
        return {"items": []}

    monkeypatch.setattr(kube, "request", request)
    lease.look()
    lease.look()
    eventually(lambda: asked, what="the request")
    held.set()
    eventually(lambda: not any(each.name == "operator lease" for each in threading.enumerate()), what="its end")
    lease.look()
    assert len(asked) == 1, f"not again within {operator_lease.REFUSED_AGAIN_S:g} s"
