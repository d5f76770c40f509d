"""The two scheduling fields of a status, which LLMKube's operator writes as well, through the embedded API.

Since 0.10 it leaves the refusals alone whose words it knows, and whoever wrote one has to take it back.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor.cluster.kube import MERGE, Kube, KubeError
from metal_supervisor.cluster.report import report
from metal_supervisor.sidecar.statuses import OPERATOR_WORDS, Statuses, WantedStatus
from metal_supervisor.spec.record import Verdict
from metal_supervisor.spec.types import Endpoint, Standing
from tests.support.macs import embedded_cluster
from tests.support.operator_sim import KEPT, WAITING
from tests.support.records import a_record
from tests.support.system import ISVC, service


class BesideOperator:
    """The status of a service that does not run, as a Mac writes it beside the operator."""

    def __init__(self, kube: Kube) -> None:
        self.kube = kube
        self.uid = kube.apply(f"{ISVC}/tiny", service(), "user")["metadata"]["uid"]
        self.statuses = Statuses(kube)
        self.statuses.operator = True

    def write(self, standing: Standing, reason: str, message: str = "") -> None:
        endpoint = Endpoint("tiny", 8080, "/v1", "ClusterIP", None)
        record = a_record(verdict=Verdict(standing, reason, message, 1.0), uid=self.uid, endpoint=endpoint, port=18100)
        self.statuses.service(WantedStatus(record, report(record, None), "192.0.2.1", ""))

    def operator_writes(self) -> None:
        status = {"schedulingStatus": "WaitingForMetalAgent", "schedulingMessage": WAITING}
        self.kube.request("PATCH", f"{ISVC}/tiny/status", {"fieldManager": "manager"}, {"status": status}, MERGE)

    def shown(self) -> tuple[str | None, str | None]:
        status = self.kube.request("GET", f"{ISVC}/tiny")["status"]
        return status.get("schedulingStatus"), status.get("schedulingMessage")


@pytest.fixture
def mac(tmp_path: Path) -> Iterator[BesideOperator]:
    with embedded_cluster(tmp_path) as kubeconfig:
        kube = Kube(kubeconfig)
        yield BesideOperator(kube)
        kube.close()


@pytest.mark.parametrize(
    ("reason", "message", "word"),
    [
        ("InsufficientMemory", "needs 90.0 GiB", "InsufficientMemory"),
        ("ModelDigestMismatch", "another sha256", "ModelDigestMismatch"),
        ("SourceNotAllowed", 'Model "tiny": spec.source is in no --allowed-roots', "ModelSourceNotAllowed"),
        ("InvalidSpec", "spec.extraArgs[0] --host is not yours to set", "ExtraArgsRejected"),
        ("UnsupportedField", "spec.extraArgs[2] '--such' is not known to llama-server", "ExtraArgsRejected"),
        ("UnsupportedField", "spec.extraArgs is not for oMLX", "ExtraArgsRejected"),
        ("ServiceConflict", 'metadata.name: "a.b" and "a-b" both need the Service "a-b"', "EndpointNameConflict"),
        ("Evicted", "memory was short", "InsufficientMemory"),
    ],
)
def test_a_refusal_has_the_word_that_the_operator_knows(
    mac: BesideOperator, reason: str, message: str, word: str
) -> None:
    mac.write(Standing.FAILED, reason, message)
    assert mac.shown() == (word, message)


def test_the_words_are_those_that_the_operator_keeps() -> None:
    assert set(OPERATOR_WORDS.values()) == KEPT


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("ModelFileMissing", "spec.extraArgs[1]: /m/lora.gguf does not exist on this Mac"),
        ("InvalidSpec", "spec.priority must be one of critical"),
        ("UnsupportedRuntime", "spec.runtime is 'vllm'"),
    ],
)
def test_a_refusal_without_a_word_of_the_operators_is_left_to_metal_ready(
    mac: BesideOperator, reason: str, message: str
) -> None:
    mac.operator_writes()
    mac.write(Standing.FAILED, reason, message)
    assert mac.shown() == ("WaitingForMetalAgent", WAITING), "the operator would overwrite it, again and again"
    (told,) = mac.kube.request("GET", f"{ISVC}/tiny")["status"]["conditions"]
    assert (told["reason"], told["message"]) == (reason, message)


def test_the_progress_of_a_download_is_one_write(mac: BesideOperator) -> None:
    mac.write(Standing.WAIT, "Downloading", "0 B of 9 GiB")
    before = mac.kube.requests
    mac.write(Standing.WAIT, "Downloading", "1 GiB of 9 GiB")
    assert mac.kube.requests == before + 1
    (told,) = mac.kube.request("GET", f"{ISVC}/tiny")["status"]["conditions"]
    assert (told["type"], told["message"]) == ("MetalReady", "1 GiB of 9 GiB")
    assert mac.shown() == (None, None)


def test_what_is_over_is_taken_back_at_once(mac: BesideOperator) -> None:
    mac.write(Standing.WAIT, "InsufficientMemory", "needs 90.0 GiB")
    mac.write(Standing.RUN, "")
    assert mac.shown() == (None, None)
    mac.write(Standing.FAILED, "SourceNotAllowed", "in no --allowed-roots")
    mac.write(Standing.RUN, "")
    assert mac.shown() == (None, None)


def write_in_vain(mac: BesideOperator, arrives: bool) -> None:
    """A write of a reason that fails. `arrives`: it takes effect all the same."""
    request = mac.kube.request

    def fails(*asked: Any) -> Any:
        failing = "schedulingStatus" in str(asked)
        found = request(*asked) if arrives or not failing else {}
        if failing:
            raise KubeError(504, "Timeout", "perhaps")
        return found

    mac.kube.request = fails  # type: ignore[method-assign]
    with pytest.raises(KubeError):
        mac.write(Standing.WAIT, "InsufficientMemory", "needs 90.0 GiB")
    mac.kube.request = request  # type: ignore[method-assign]


@pytest.mark.parametrize("arrives", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_a_reason_is_taken_back_though_the_last_write_failed(mac: BesideOperator, before: bool, arrives: bool) -> None:
    if before:
        mac.write(Standing.WAIT, "ModelDigestMismatch", "another sha256")
    write_in_vain(mac, arrives)
    mac.write(Standing.RUN, "")
    assert mac.shown() == (None, None)


@pytest.mark.parametrize("arrives", [True, False])
def test_what_the_operator_wrote_over_one_that_failed_is_left_alone(mac: BesideOperator, arrives: bool) -> None:
    write_in_vain(mac, arrives)
    mac.operator_writes()
    mac.write(Standing.RUN, "")
    assert mac.shown() == ("WaitingForMetalAgent", WAITING)


def test_what_the_operator_wrote_over_it_is_left_alone(mac: BesideOperator) -> None:
    mac.write(Standing.WAIT, "InsufficientMemory", "needs 90.0 GiB")
    mac.operator_writes()
    mac.write(Standing.RUN, "")
    assert mac.shown() == ("WaitingForMetalAgent", WAITING)
