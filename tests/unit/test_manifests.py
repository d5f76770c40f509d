"""The Kubernetes objects: what an API server accepts, what LLMKube expects, and what does not change for nothing."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_supervisor.cluster.manifests import (
    HEARTBEAT,
    agent_name,
    event_object,
    human_size,
    is_relayed,
    model_status,
    own_status,
    service_object,
    slice_name,
    slice_object,
    status,
    timed,
    url_of,
)
from metal_supervisor.cluster.report import Condition, Happening, report
from metal_supervisor.spec.processes import Observed
from metal_supervisor.spec.record import Record, Verdict
from metal_supervisor.spec.resources import service_name
from metal_supervisor.spec.types import Endpoint, Json, ModelFile, Standing
from tests.support.records import a_record

PROPERTY = settings(max_examples=100, database=None, derandomize=True)
LABEL_VALUE = re.compile(r"(|[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
REASON = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
T1 = "2026-01-01T00:00:00Z"
T2 = "2026-01-01T00:01:00Z"
ENDPOINT = Endpoint("tiny", 8080, "/v1/chat/completions", "ClusterIP", None)
UP = Observed("default.tiny", 7, True, 1.0, "RUNNING")
NAMES = st.from_regex(r"\A[a-z0-9]([-a-z0-9]{0,60}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,60}[a-z0-9])?){0,4}\Z").filter(
    lambda name: len(name) <= 253
)


def record(standing: Standing = Standing.RUN, reason: str = "Admitted", message: str = "", **other: Any) -> Record:
    base = a_record(
        uid="u-1",
        generation=4,
        priority="high",
        verdict=Verdict(standing, reason, message, 1.0),
        endpoint=ENDPOINT,
        port=18100,
    )
    return replace(base, **other)


def made_slice(asked: Record, observed: Observed | None, address: str = "10.0.0.5") -> Json:
    return slice_object(asked, asked.endpoint or ENDPOINT, report(asked, observed), "mac-1", address, T1, "0.1.0")


# ── status ───────────────────────────────────────────────────────────────────────────────────────


def test_the_status_of_a_serving_service_is_complete() -> None:
    body = status(record(), report(record(), UP), {}, T1)
    assert {key: value for key, value in body.items() if key != "conditions"} == {
        "phase": "Ready",
        "mode": "chat",
        "modelReady": True,
        "readyReplicas": 1,
        "replicas": 1,
        "desiredReplicas": 1,
        "effectivePriority": 100_000,
        "lastUpdated": "2026-01-01T00:00:00+00:00",
        "endpoint": "http://tiny.default.svc.cluster.local:8080/v1/chat/completions",
    }
    for each in body["conditions"]:
        assert (each["observedGeneration"], each["lastTransitionTime"]) == (4, T1)
        assert REASON.fullmatch(each["reason"]) and each["status"] in ("True", "False", "Unknown")


def test_without_a_cluster_the_endpoint_is_the_engines_own_from_the_first_ready_on() -> None:
    """Nothing resolves the cluster's names there, and an address that never served is none."""
    asked, where = record(), "http://127.0.0.1:18100/v1/chat/completions"
    starting = status(asked, report(asked, None), {"endpoint": url_of("default", ENDPOINT)}, T1, "127.0.0.1")
    assert "endpoint" not in starting
    ready = status(asked, report(asked, UP), starting, T1, "127.0.0.1")
    assert ready["endpoint"] == where
    assert status(asked, report(asked, None), ready, T2, "127.0.0.1")["endpoint"] == where, "it comes back there"
    moved = record(port=18101)
    assert "endpoint" not in status(moved, report(moved, None), ready, T2, "127.0.0.1")
    assert status(asked, report(asked, UP), {}, T1, "::1")["endpoint"] == "http://[::1]:18100/v1/chat/completions"


@pytest.mark.parametrize(
    ("priority", "value"),
    [("critical", 1000000), ("high", 100000), ("normal", 10000), ("low", 1000), ("batch", 100), ("odd", 10000)],
)
def test_the_effective_priority_is_llmkubes(priority: str, value: int) -> None:
    asked = record(priority=priority)
    assert status(asked, report(asked, UP), {}, T1)["effectivePriority"] == value


CASES = [
    (record(), UP),
    (record(), None),
    (record(Standing.WAIT, "Downloading", "1 %"), None),
    (record(Standing.FAILED, "ModelNotFound", "x"), None),
    (record(Standing.SUSPENDED, "Suspended", ""), None),
    (record(warning=("InvalidSpec", "x")), UP),
    (record(endpoint=None), UP),
]


@pytest.mark.parametrize(("asked", "observed"), CASES)
def test_a_status_in_which_nothing_happened_is_the_same_status(asked: Record, observed: Observed | None) -> None:
    told = report(asked, observed)
    before = status(asked, told, {}, T1)
    # As it comes back from an API: through JSON, keys in another order.
    returned = json.loads(json.dumps(before, sort_keys=True))
    assert status(asked, told, returned, T2) == before


def test_a_status_is_written_anew_when_anything_happened() -> None:
    before = status(record(), report(record(), None), {}, T1)
    after = status(record(), report(record(), UP), before, T2)
    written = "2026-01-01T00:01:00+00:00"
    assert (after["lastUpdated"], after["phase"], "schedulingStatus" in after) == (written, "Ready", False)
    assert before["schedulingStatus"] == "WaitingForMetalAgent"
    edited = record(generation=5)
    assert status(edited, report(edited, None), before, T2)["lastUpdated"] == written


def test_a_transition_time_moves_only_with_the_status_of_its_condition() -> None:
    first = timed([Condition("A", "True", "R", "m"), Condition("B", "False", "R", "m")], [], 1, T1)
    second = timed([Condition("A", "True", "Other", "n"), Condition("B", "True", "R", "m")], first, 2, T2)
    assert [(each["type"], each["lastTransitionTime"]) for each in second] == [("A", T1), ("B", T2)]
    assert [(each["reason"], each["observedGeneration"]) for each in second] == [("Other", 2), ("R", 2)]


@pytest.mark.parametrize("before", [[{}], [{"type": "A"}], [{"type": "A", "status": "True"}], [{"type": "B"}]])
def test_conditions_of_others_that_lack_something_do_no_harm(before: list[Json]) -> None:
    assert timed([Condition("A", "True", "R", "m")], before, 1, T2)[0]["lastTransitionTime"] == T2


def test_the_url_is_the_operators() -> None:
    assert url_of("ns", Endpoint("a-b", 80, "/x", "ClusterIP", None)) == "http://a-b.ns.svc.cluster.local:80/x"


@pytest.mark.parametrize(
    ("warning", "silence", "further"),
    [
        (None, "", ""),
        (("ModelNotFound", "no such Model"), "", "; ModelNotFound: no such Model"),
        (None, "it is silent", "; it is silent"),
        (("ModelNotFound", "no such Model"), "it is silent", "; ModelNotFound: no such Model; it is silent"),
    ],
    ids=["nothing", "warning", "silence", "both"],
)
def test_beside_the_operator_metal_ready_says_what_has_no_other_place(
    warning: tuple[str, str] | None, silence: str, further: str
) -> None:
    asked = record(warning=warning)
    told = report(asked, UP)
    (condition,) = own_status(asked, told, {}, T1, silence)["conditions"]
    assert (condition["type"], condition["message"]) == ("MetalReady", told.message + further)


def test_what_is_wrong_is_not_said_twice() -> None:
    asked = record(warning=("MetalUnavailable", "no device"))
    (condition,) = own_status(asked, report(asked, None), {}, T1)["conditions"]
    assert condition["message"] == "no device"


# ── Service ──────────────────────────────────────────────────────────────────────────────────────


def test_the_service_has_no_selector_and_is_found_by_llmkubes_labels() -> None:
    body = service_object(record(), ENDPOINT)
    assert body["spec"] == {
        "type": "ClusterIP",
        "ports": [{"name": "http", "port": 8080, "targetPort": "http", "protocol": "TCP", "appProtocol": "http"}],
    }
    labels = body["metadata"]["labels"]
    assert (labels["app"], labels["inference.llmkube.dev/service"], labels["llmkube.ai/managed-by"]) == (
        "tiny",
        "tiny",
        "metal-agent",
    )
    assert labels["app.kubernetes.io/managed-by"] == "metal-supervisor"
    (owner,) = body["metadata"]["ownerReferences"]
    assert owner == {
        "apiVersion": "inference.llmkube.dev/v1alpha1",
        "kind": "InferenceService",
        "name": "tiny",
        "uid": "u-1",
        "controller": True,
    }


def test_the_service_is_the_same_from_every_mac_and_in_every_state() -> None:
    other = record(Standing.SUSPENDED, "Suspended", "", port=9, withdraw="t", edition="x", generation=9)
    assert service_object(record(), ENDPOINT) == service_object(other, ENDPOINT)


@pytest.mark.parametrize(
    ("kind", "port", "expected"),
    [("ClusterIP", 30080, None), ("NodePort", 30080, 30080), ("LoadBalancer", 30080, 30080), ("NodePort", None, None)],
)
def test_a_node_port_is_given_only_where_one_may_be(kind: str, port: int | None, expected: int | None) -> None:
    body = service_object(record(), replace(ENDPOINT, type=kind, node_port=port))
    assert body["spec"]["ports"][0].get("nodePort") == expected
    assert body["spec"]["type"] == kind


# ── EndpointSlice ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("asked", "observed", "expected"),
    [
        (record(), UP, (True, True, False)),
        (record(), replace(UP, ready=False), (False, False, False)),
        (record(), None, (False, False, False)),
        (record(withdraw="t"), UP, (False, True, True)),
        (record(Standing.SUSPENDED, "S", "", withdraw="t"), UP, (False, True, True)),
        (record(withdraw="t"), replace(UP, ready=False, pid=0), (False, False, False)),
        (record(stopped_by_hand=True), replace(UP, ready=False, pid=0), (False, False, False)),
    ],
)
def test_all_three_conditions_of_a_slice_are_always_set(
    asked: Record, observed: Observed | None, expected: tuple[bool, bool, bool]
) -> None:
    (endpoint,) = made_slice(asked, observed)["endpoints"]
    ready, serving, terminating = expected
    assert endpoint == {
        "addresses": ["10.0.0.5"],
        "conditions": {"ready": ready, "serving": serving, "terminating": terminating},
    }


def test_the_slice_points_at_the_engines_own_port_under_the_services_port_name() -> None:
    body = made_slice(record(), UP)
    assert body["ports"] == [{"name": "http", "port": 18100, "protocol": "TCP", "appProtocol": "http"}]
    assert body["ports"][0]["name"] == service_object(record(), ENDPOINT)["spec"]["ports"][0]["targetPort"]
    metadata = body["metadata"]
    assert (metadata["name"], metadata["namespace"]) == ("tiny-mac-1", "default")
    assert metadata["labels"]["kubernetes.io/service-name"] == "tiny"
    assert metadata["labels"]["endpointslice.kubernetes.io/managed-by"] == "metal-supervisor"
    assert metadata["annotations"][HEARTBEAT] == T1
    assert metadata["ownerReferences"][0]["uid"] == "u-1"
    assert HEARTBEAT == "llmkube.ai/agent-heartbeat"


@pytest.mark.parametrize(("address", "kind"), [("10.0.0.5", "IPv4"), ("fd00::5", "IPv6")])
def test_the_address_type_follows_the_address(address: str, kind: str) -> None:
    assert made_slice(record(), UP, address)["addressType"] == kind


def test_two_macs_have_two_slices() -> None:
    assert slice_name("tiny", "mac-1") != slice_name("tiny", "mac-2")


@PROPERTY
@given(NAMES)
def test_labels_and_names_are_ones_that_the_api_accepts_however_long_the_name(name: str) -> None:
    endpoint = replace(ENDPOINT, service=service_name(name)[:63].rstrip("-"))
    asked = record(name=name, endpoint=endpoint)
    for body in (service_object(asked, endpoint), made_slice(asked, UP)):
        for value in body["metadata"]["labels"].values():
            assert LABEL_VALUE.fullmatch(value), value
        assert SUBDOMAIN.fullmatch(body["metadata"]["name"])


def test_a_name_that_no_label_can_hold_is_shortened_and_stays_its_own() -> None:
    def label(name: str) -> str:
        return str(service_object(record(name=name), ENDPOINT)["metadata"]["labels"]["app"])

    assert label("a" * 63) == "a" * 63
    assert len(label("a" * 64)) <= 63
    assert len({label("a" * 64), label("a" * 65), label("a" * 63)}) == 3


# ── Events ───────────────────────────────────────────────────────────────────────────────────────


@PROPERTY
@given(NAMES | st.sampled_from(["a" * 199 + "-b" * 20, "a" * 199 + ".b" * 20, "a" * 253]), st.text(max_size=20))
def test_an_event_has_a_name_that_the_api_accepts(name: str, text: str) -> None:
    body = event_object(record(name=name), Happening("Warning", "Crashed", text), "mac-1", T1)
    assert SUBDOMAIN.fullmatch(body["metadata"]["name"])
    assert len(body["metadata"]["name"]) <= 253


def test_the_same_event_has_the_same_name_and_another_another() -> None:
    def name(reason: str = "Crashed", text: str = "x", at: str = T1, uid: str = "u-1") -> str:
        return event_object(record(uid=uid), Happening("Warning", reason, text), "mac-1", at)["metadata"]["name"]

    assert name() == name(at=T2)
    assert len({name(), name(reason="Serving"), name(text="y"), name(uid="u-2")}) == 4


def test_an_event_regards_the_inference_service() -> None:
    body = event_object(record(), Happening("Normal", "Serving", "up"), "mac-1", "2026-01-01T00:00:00.000001Z")
    assert body["regarding"] == {
        "apiVersion": "inference.llmkube.dev/v1alpha1",
        "kind": "InferenceService",
        "name": "tiny",
        "namespace": "default",
        "uid": "u-1",
    }
    assert (body["type"], body["reason"], body["action"], body["note"]) == ("Normal", "Serving", "Serving", "up")
    assert (body["reportingInstance"], body["eventTime"]) == ("mac-1", "2026-01-01T00:00:00.000001Z")


# ── Models ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("file", "phase", "kind", "reason"),
    [
        (ModelFile("Ready", "/m.gguf", 5), "Ready", "Available", "MetalAgentManaged"),
        (ModelFile("Downloading", message="3 %"), "Downloading", "Progressing", "DownloadStarted"),
        (ModelFile("Failed", reason="ModelFileMissing", message="no"), "Failed", "Degraded", "ModelFileMissing"),
        (ModelFile("Failed"), "Failed", "Degraded", "DownloadFailed"),
        (ModelFile("Checking"), "Pending", "Progressing", "Pending"),
        (ModelFile("Pending"), "Pending", "Progressing", "Pending"),
    ],
)
def test_a_models_status_has_a_phase_of_the_crd_and_one_condition(
    file: ModelFile, phase: str, kind: str, reason: str
) -> None:
    body = model_status(file, "/m.gguf", 2, {}, T1)
    (told,) = body["conditions"]
    assert (body["phase"], told["type"], told["status"], told["reason"]) == (phase, kind, "True", reason)
    assert ("path" in body) == (phase == "Ready")
    assert model_status(file, "/m.gguf", 2, json.loads(json.dumps(body)), T2) == body


def test_the_path_and_size_of_a_model_are_shown_once_it_is_here() -> None:
    body = model_status(ModelFile("Ready", "/m.gguf", 4_720_000_000), "/m.gguf", 1, {}, T1)
    assert (body["path"], body["size"]) == ("/m.gguf", "4.4 GiB")


@pytest.mark.parametrize("source", ["\ud800", "\0", ""])
def test_no_source_is_too_odd_for_a_cache_key(source: str) -> None:
    assert re.fullmatch(r"[0-9a-f]{16}", model_status(ModelFile("Failed"), source, 1, {}, T1)["cacheKey"])


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 * 2**30, "5.0 GiB"), (3 * 2**50, "3072.0 TiB")],
)
def test_sizes_are_written_as_llmkube_writes_them(size: int, expected: str) -> None:
    assert human_size(size) == expected


RELAY = {"app": "tiny-relay", "inference.llmkube.dev/metal-relay": "true"}


@pytest.mark.parametrize(
    ("selector", "owner", "expected"),
    [
        (RELAY, {}, True),
        (None, {}, True),
        ({}, {}, True),
        ({**RELAY, "app": "other-relay"}, {}, False),
        ({**RELAY, "tier": "x"}, {}, False),
        ({"app": "tiny-relay"}, {}, False),
        ({"app": "tiny"}, {}, False),
        (RELAY, {"uid": "another"}, False),
        (RELAY, {"controller": False}, False),
        (None, {"uid": "another"}, False),
    ],
    ids=str,
)
def test_a_service_is_the_relays_by_its_selector_and_its_owner(
    selector: dict[str, str] | None, owner: dict[str, Any], expected: bool
) -> None:
    record = a_record()
    owners = [{"uid": record.uid, "controller": True, **owner}]
    found = {"metadata": {"name": "tiny", "ownerReferences": owners}, "spec": {"selector": selector}}
    assert is_relayed(found, record) is expected


def test_a_mac_called_agent_has_no_slice_of_the_name_of_llmkubes_agent() -> None:
    names = {slice_name("tiny", "agent", ordinal) for ordinal in (0, 1, 2)}
    assert agent_name("tiny") not in names and len(names) == 3
