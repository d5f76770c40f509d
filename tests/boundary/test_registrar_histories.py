"""Random histories of what the cluster is to show: whatever fails on the way, it ends with what is wanted at last.

The API is the embedded one. A request may fail before it takes effect or after; time passes as the history says.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor.cluster import manifests
from metal_supervisor.cluster.kube import Kube, KubeError, find
from metal_supervisor.cluster.report import report
from metal_supervisor.host import sleep_clock
from metal_supervisor.sidecar import publisher as publisher_module
from metal_supervisor.sidecar import statuses as statuses_module
from metal_supervisor.sidecar.cluster_context import ClusterContext
from metal_supervisor.sidecar.membership import Membership
from metal_supervisor.sidecar.registrar import Registrar
from metal_supervisor.sidecar.statuses import WantedStatus
from metal_supervisor.spec.processes import Observed
from metal_supervisor.spec.record import Record, Verdict
from metal_supervisor.spec.types import Endpoint, Json, Key, Standing
from metal_supervisor.spec.withdrawal import WithdrawalToken
from tests.support.effort import cases
from tests.support.macs import embedded_cluster
from tests.support.records import a_record
from tests.support.system import ISVC, SLICES, service

UNDER_WAY = frozenset({0, 500, 503})
"""Codes of failures after which a write may have taken effect; 0: no answer."""
CODES = (*UNDER_WAY, 403, 404, 409, 422)
STATES = (
    "ready",
    "ready",
    "ready",
    "loading",
    "leaving",
    "withdrawn",
    "failed",
    "stopped",
    "left",
    "another address",
    "no address",
    "claim lost",
    "gone",
)


class Failing(Kube):
    """A client whose requests fail at random."""

    chance, share = random.Random(), 0.0

    def request(self, method: str, path: str, *more: Any, **named: Any) -> Json:
        if self.chance.random() >= self.share:
            return super().request(method, path, *more, **named)
        code = self.chance.choice(CODES)
        if code == 404 and method in ("GET", "DELETE"):  # that would be an answer
            code = 500
        if method != "GET" and code in UNDER_WAY and self.chance.random() < 0.5:
            super().request(method, path, *more, **named)
        raise KubeError(code, "" if code else "Unreachable", "at random")


@pytest.fixture(scope="module")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Failing]:
    with embedded_cluster(Path(tmp_path_factory.mktemp("api"))) as kubeconfig:
        kube = Failing(kubeconfig)
        yield kube
        kube.close()


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that have passed, which only a history moves. Heartbeats say one time, and so put nothing right."""
    found, began = [0.0], time.monotonic()
    for module in (publisher_module, statuses_module):
        monkeypatch.setattr(module, "now_seconds", lambda _kube: "2026-01-01T00:00:00Z")
    monkeypatch.setattr(time, "monotonic", lambda: began + found[0])
    clocks = sleep_clock.Clocks(time.monotonic, time.monotonic)
    monkeypatch.setattr(sleep_clock, "system_clocks", lambda: clocks)
    return found


class History:
    """Three services of one Mac, and what the cluster is to show of them."""

    def __init__(self, kube: Failing, seed: int, passed: list[float]) -> None:
        self.kube, self.chance, self.passed = kube, random.Random(seed), passed
        self.names = [f"s{seed}-0", f"s{seed}-1", f"s{seed}.dotted"]
        self.uids = {name: self._made(name) for name in self.names}
        self.operator = self.chance.choice([True, False, False])
        self.want: dict[Key, WantedStatus] = {}
        self.registrar = Registrar(kube, "mac-a", Membership(kube, "mac-a", 40.0, "session"), lambda: None)

    def _made(self, name: str) -> str:
        return str(self.kube.apply(f"{ISVC}/{name}", service(name), "user")["metadata"]["uid"])

    def _state(self, name: str) -> WantedStatus:
        state = self.chance.choice(STATES)
        endpoint = Endpoint(name.replace(".", "-"), self.chance.choice([8080, 9090]), "/v1", "ClusterIP", None)
        claimed = state != "claim lost"
        record = a_record(name, uid=self.uids[name], port=18100, claimed=claimed, endpoint=endpoint)
        observed = Observed(record.program, 5, state != "loading", 100.0, "RUNNING", str(self.chance.random()))
        ended = {"failed": Standing.FAILED, "stopped": Standing.STOPPED, "left": Standing.REMOVING}.get(state)
        if ended is not None:
            record = replace(record, verdict=Verdict(ended, "NotHere", "", 100.0))
            observed = replace(observed, pid=0, ready=False, state="")
        if state == "withdrawn":
            record = replace(record, withdraw=WithdrawalToken(str(self.chance.random())))
        address = {"another address": self.chance.choice(["192.0.2.7", "2001:db8::1"]), "no address": ""}
        problem = "NoRoutableAddress: none" if state == "no address" else ""
        told = report(record, observed, leaving=state == "leaving")
        return WantedStatus(record, told, address.get(state, "192.0.2.1"), problem)

    def tell(self, operator: bool | None) -> None:
        context = ClusterContext(operator=operator, namespaces=frozenset({"default"}))
        self.registrar.want(dict(self.want), {}, context)

    def step(self) -> None:
        """Something else is wanted, or happens; then a few passes, of which some fail."""
        self.kube.share = 0.0
        if self.chance.random() < 0.1:  # the InferenceService is deleted and made again
            name = self.chance.choice(self.names)
            self.kube.request("DELETE", f"{ISVC}/{name}")
            self.uids[name] = self._made(name)
        if self.chance.random() < 0.1:  # as asleep: longer than the Lease lasts
            self.passed[0] += 100.0
        for name in self.names:
            if self.chance.random() < 0.4:
                self.want["default", name] = self._state(name)
                if self.chance.random() < 0.1:
                    del self.want["default", name]
        self.tell(self.chance.choice([self.operator, self.operator, True, False, None]))
        self.kube.share = self.chance.choice([0.0, 0.2, 0.5])
        for _ in range(self.chance.randint(1, 4)):
            self.registrar._one_pass()
            self.passed[0] += self.chance.choice([0.0, 0.3, 2.0, 30.0])

    def settle(self) -> None:
        """Nothing fails any more, for as long as backoffs and pauses last."""
        self.kube.share = 0.0
        for key, each in self.want.items():
            self.want[key] = replace(each, record=replace(each.record, uid=self.uids[key[1]]))
        self.tell(self.operator)
        for _ in range(6):
            self.registrar._one_pass()
            self.passed[0] += 11.0
        self.registrar._one_pass()

    def slices(self) -> dict[str, Json]:
        found = self.kube.request("GET", SLICES, {"labelSelector": "metal-supervisor.io/node=mac-a"})["items"]
        return {each["metadata"]["name"]: each for each in found}


def is_published(want: WantedStatus) -> bool:
    return want.report.wants_slice and not want.address_problem


def check_slice(found: Json, want: WantedStatus) -> None:
    (endpoint,) = found["endpoints"]
    assert endpoint["addresses"] == [want.address] and endpoint["conditions"]["ready"] == want.report.ready
    assert found["metadata"]["ownerReferences"][0]["uid"] == want.record.uid


def check_status(found: Json, record: Record, want: WantedStatus, operator: bool) -> None:
    if record.verdict.standing is Standing.REMOVING or not record.claimed:
        return  # another Mac writes it
    status = found["status"]
    assert manifests.metal_ready(status)["reason"] == want.report.reason
    if not operator:
        assert status["phase"] == want.report.phase
        shown = status.get("schedulingStatus"), status.get("schedulingMessage")
        assert shown == (want.report.scheduling or (None, None))
        return
    for entry in found["metadata"]["managedFields"]:
        if (entry["manager"], entry["operation"]) == (manifests.MANAGED_BY, "Apply"):
            assert set(entry["fieldsV1"]["f:status"]) == {"f:conditions"}, "all else is the operator's"


@pytest.mark.parametrize("seed", range(cases(200)))
def test_whatever_fails_on_the_way_the_cluster_ends_with_what_is_wanted(
    kube: Failing, passed: list[float], seed: int
) -> None:
    history = History(kube, seed, passed)
    kube.chance = history.chance
    random.seed(seed)  # of pauses
    for _ in range(history.chance.randint(3, 12)):
        history.step()
    history.settle()
    registrar, slices = history.registrar, history.slices()
    named = {key: manifests.slice_name(key[1].replace(".", "-"), "mac-a") for key in history.want}
    assert slices.keys() == {named[key] for key, want in history.want.items() if is_published(want)}
    for key, want in history.want.items():
        if is_published(want):
            check_slice(slices[named[key]], want)
        check_status(kube.request("GET", f"{ISVC}/{key[1]}"), want.record, want, history.operator)
        told = registrar.published(key)
        assert told.withdrawn == want.record.withdraw and told.out is not (is_published(want) and want.report.ready)
        if want.report.wants_service and not want.address_problem:
            owned = find(kube, f"/api/v1/namespaces/default/services/{key[1].replace('.', '-')}")
            assert owned is not None and owned["metadata"]["ownerReferences"][0]["uid"] == want.record.uid
            (port,) = owned["spec"]["ports"]
            assert want.record.endpoint is not None and port["port"] == want.record.endpoint.port
    assert registrar.trouble == ("", 0.0) and registrar.flush(0)
    before = kube.requests
    registrar._one_pass()
    assert kube.requests == before and registrar._due_at() - time.monotonic() > 0.1, "it rests"
    history.want.clear()
    history.settle()
    assert not history.slices()
