"""Custom resources as users write them: understood, or refused by naming the field, and never an exception."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_crds import EXAMPLES, documents

from metal_supervisor.runtimes import VOCABULARIES
from metal_supervisor.spec.fields import OPTIONS
from metal_supervisor.spec.on_demand import IDLE_TTL_ANNOTATION
from metal_supervisor.spec.record import same_request
from metal_supervisor.spec.resources import (
    ALIASES_ANNOTATION,
    OMLX_OPTIONS,
    RUNTIME_ANNOTATION,
    UNSUPPORTED,
    Policy,
    interpret,
    is_metal,
    service_name,
)
from metal_supervisor.spec.types import Json, Rejected, Service
from tests.support.effort import cases

KEY = ("default", "tiny")
POLICY = Policy(
    "llama-server",
    {"llama-server": frozenset({"gguf"}), "mlx-server": frozenset({"mlx"})},
    allowed_env=frozenset({"A", "B", "GOOD", "T"}),
    vocabularies=VOCABULARIES,
)
ON_OMLX = replace(POLICY, runtimes={**POLICY.runtimes, "omlx": frozenset({"mlx"})})
PROPERTY = settings(max_examples=150, database=None, derandomize=True)

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=12)
    | st.sampled_from(["metal", "tiny", "gguf", "\0", "\ud800", "a" * 300, "llamacpp", "/m.gguf", "NodePort"])
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [
    "modelRef",
    "runtime",
    "replicas",
    "suspend",
    "endpoint",
    "mode",
    "priority",
    "containerPort",
    "extraArgs",
    "env",
    "speculativeDecoding",
    *OPTIONS,
    *UNSUPPORTED,
]


def model(name: str = "tiny", namespace: str = "default", **spec: Any) -> Json:
    body = {"source": "/models/tiny.gguf", "format": "gguf", "hardware": {"accelerator": "metal"}, **spec}
    return {"metadata": {"namespace": namespace, "name": name, "uid": "m-1", "generation": 1}, "spec": body}


def service(name: str = "tiny", created: str = "2026-01-01T00:00:00Z", **spec: Any) -> Json:
    metadata = {"namespace": "default", "name": name, "uid": f"u-{name}", "generation": 3, "creationTimestamp": created}
    return {"metadata": metadata, "spec": {"modelRef": "tiny", **spec}}


def understood(resource: Json, *models: Json, policy: Policy = POLICY) -> Service | Rejected:
    """What becomes of one InferenceService."""
    key = resource["metadata"]["namespace"], resource["metadata"]["name"]
    found = {(each["metadata"]["namespace"], each["metadata"]["name"]): each for each in models or (model(),)}
    return interpret({key: resource}, found, policy)[key]


def accepted(resource: Json, *models: Json, policy: Policy = POLICY) -> Service:
    result = understood(resource, *models, policy=policy)
    assert isinstance(result, Service), result
    return result


def refused(resource: Json, *models: Json, policy: Policy = POLICY) -> Rejected:
    result = understood(resource, *models, policy=policy)
    assert isinstance(result, Rejected), result
    return result


def test_fields_of_pods_that_llmkube_added_are_named_as_ignored() -> None:
    spec = {"attestation": {"configMapKeyRef": {"name": "a"}}, "prefetchNodeSelector": {"a": "b"}}
    named = accepted(service(multiNode={"members": []}), model(**spec)).ignored
    assert [each.partition(" (")[0] for each in named] == [
        "spec.multiNode",
        'Model "tiny" spec.attestation',
        'Model "tiny" spec.prefetchNodeSelector',
    ]
    assert "--model-attestation" in named[1], "what is relied on"
    assert accepted(service(multiNode={}), model(attestation=None)).ignored == ()


# ── it never raises ──────────────────────────────────────────────────────────────────────────────


@PROPERTY
@given(spec=ANYTHING, annotations=ANYTHING, model_spec=ANYTHING, model_annotations=ANYTHING)
def test_no_spec_or_annotations_of_any_shape_raise(
    spec: Any, annotations: Any, model_spec: Any, model_annotations: Any
) -> None:
    resource, its_model = service(), model()
    resource["spec"], resource["metadata"]["annotations"] = spec, annotations
    its_model["spec"], its_model["metadata"]["annotations"] = model_spec, model_annotations
    result = understood(resource, its_model)
    assert result.key == KEY
    assert is_metal(its_model) in (True, False)


@PROPERTY
@given(data=st.data())
def test_no_value_in_any_known_field_raises(data: st.DataObject) -> None:
    fields = data.draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=3, unique=True))
    resource = service(**{field: data.draw(ANYTHING, label=field) for field in fields})
    result = understood(resource)
    if isinstance(result, Rejected):
        assert result.reason.isalnum()
        assert any(field in result.message for field in fields), (fields, result.message)
        assert (result.uid, result.generation) == ("u-tiny", 3)


@PROPERTY
@given(data=st.data())
def test_no_value_in_any_field_of_the_model_raises(data: st.DataObject) -> None:
    fields = ["source", "format", "sha256", "mmproj", "files", "hardware"]
    chosen = data.draw(st.sampled_from(fields))
    result = understood(service(), model(**{chosen: data.draw(ANYTHING)}))
    if isinstance(result, Rejected):
        assert '"tiny"' in result.message


@PROPERTY
@given(value=ANYTHING)
def test_no_runtime_annotation_of_any_type_raises(value: Any) -> None:
    resource = service()
    resource["metadata"]["annotations"] = {RUNTIME_ANNOTATION: value}
    understood(resource)


@pytest.mark.parametrize("value", [["mlx-server"], {"a": "b"}])
def test_a_runtime_annotation_that_is_not_a_string_is_refused_by_name(value: Any) -> None:
    resource = service()
    resource["metadata"]["annotations"] = {RUNTIME_ANNOTATION: value}
    assert RUNTIME_ANNOTATION in refused(resource).message


@pytest.mark.parametrize(
    ("name", "item"),
    [
        ("extraArgs", "--mlock"),
        ("tensorOverrides", "a=CPU"),
        ("metadataOverrides", "a=int:1"),
        ("env", {"name": "LANG", "value": "C"}),
    ],
)
def test_a_list_that_is_far_too_long_is_refused_before_it_costs_a_pass(name: str, item: Any) -> None:
    """An engine of 100,000 arguments took minutes to compose, in the thread that decides for all services."""
    assert accepted(service(**{name: [item] * 10_000}))
    told = refused(service(**{name: [item] * 10_001})).message
    assert told == f"spec.{name} has 10001 items; at most 10000 are possible"
    assert "spec.files has 4097 items" in refused(service(), model(files=["tiny.gguf"] * 4097)).message


DEEP = "/" + "a/" * 2048 + "b"


@pytest.mark.parametrize(
    ("where", "spec", "model_spec"),
    [
        ("spec.source", {}, {"source": DEEP}),
        ("spec.source", {}, {"source": f"file://{DEEP}"}),
        ("spec.mmproj", {}, {"mmproj": DEEP[1:]}),
        ("spec.files[0]", {}, {"files": [DEEP[1:]]}),
        ("spec.extraArgs[1]", {"extraArgs": ["--lora", DEEP]}, {}),
        ("spec.extraArgs[1]", {"extraArgs": ["--lora", DEEP[1:]]}, {}),
        ("spec.speculativeDecoding.draftModel", {"speculativeDecoding": {"type": "draft", "draftModel": DEEP}}, {}),
        ("spec.pagedSSDCacheDir", {"pagedSSDCacheDir": DEEP}, {}),
    ],
)
def test_no_path_has_more_parts_than_can_be_looked_up(where: str, spec: Json, model_spec: Json) -> None:
    """That takes memory by the square of them: one of 100,000 took all there is."""
    told = refused(service(**spec), model(**model_spec)).message
    assert re.search(rf"{re.escape(where)} has 4[0-9]{{3}} characters; at most 4096 are possible", told)


WHOLE = service(
    "whole",
    replicas=1,
    suspend=False,
    runtime="llamacpp",
    mode="chat",
    priority="high",
    containerPort=9000,
    extraArgs=["--verbose"],
    env=[{"name": "A", "value": "b"}],
    flashAttention=True,
    jinja=False,
    contextSize=4096,
    endpoint={"port": 8080, "path": "/v1", "type": "NodePort", "nodePort": 30000},
    tensorOverrides=["a=CPU"],
    ropeScaling={"type": "yarn", "factor": "2.5", "originalContext": 8192},
    cacheTypeK="q8_0",
    speculativeDecoding={"type": "none"},
    reasoningBudgetMessage="stop",
)
"""An InferenceService with something in every kind of field."""
WHOLE["metadata"] |= {
    "annotations": {RUNTIME_ANNOTATION: "llama-server", IDLE_TTL_ANNOTATION: "15m"},
    "deletionTimestamp": None,
    "labels": {},
}


def manifests() -> list[Json]:
    """Models and InferenceServices of the examples, and some that use every field, as the API would give them."""
    found = [each for path in sorted(EXAMPLES.glob("*.yaml")) for each in documents(path)]
    found += [{"kind": "Model", **model()}, {"kind": "InferenceService", **WHOLE}]
    given = {"namespace": "default", "uid": "u", "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z"}
    for each in found:
        each["metadata"] = {**given, **each["metadata"]}
    return [each for each in found if each["kind"] in ("Model", "InferenceService")]


def paths(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a document that may be anything: not its kind, its name or its namespace."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        here = (*above, key)
        if here[0] in ("metadata", "spec") and here[:2] not in (("metadata", "name"), ("metadata", "namespace")):
            if here != ("metadata",):
                yield here
            if isinstance(inner, (dict, list)):
                yield from paths(inner, here)


def nested(levels: int) -> Any:
    inner: Any = "x"
    for level in range(levels):
        inner = {"a": inner} if level % 2 else [inner]
    return inner


STRANGE = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**63,
    10**400,
    -(10**400),
    0.5,
    float("nan"),
    float("inf"),
    -0.0,
    1e308,
    "",
    " ",
    "0",
    "true",
    "null",
    "\0",
    "\ud800",
    "\u202e",
    "🦙",
    "é" * 70,
    "x" * 100_000,
    "a\nb",
    "../x",
    "/",
    "http://",
    "metal",
    "gguf",
    [],
    {},
    [None],
    [[]],
    {"": None},
    {"name": 5},
    [{"name": "A"}],
    {"a": {"b": []}},
    nested(50),
    nested(900),
)
MANIFESTS = manifests()
PLACES = [(at, path) for at, each in enumerate(MANIFESTS) for path in paths(each)]
DAMAGE = st.lists(st.tuples(st.sampled_from(PLACES), st.integers(-1, len(STRANGE) - 1)), min_size=1, max_size=4)
NAMES_A_FIELD = re.compile(r"\b(spec|metadata)(\.[a-zA-Z]| must be)|metal-supervisor.io/|finalizers|--runtime")


def damaged(damage: list[tuple[tuple[int, tuple[Any, ...]], int]]) -> list[Json]:
    """The manifests with strange things in some places; -1 leaves nothing there."""
    result = list(MANIFESTS)
    for at in {at for (at, _), _ in damage}:
        result[at] = copy.deepcopy(result[at])
    for (at, path), what in damage:
        inner: Any = result[at]
        with contextlib.suppress(LookupError, TypeError, AttributeError):  # what was there has been replaced already
            for key in path[:-1]:
                inner = inner[key]
            if what < 0:
                inner.pop(path[-1])
            elif isinstance(inner, (dict, list)):
                inner[path[-1]] = STRANGE[what]
    return result


@settings(PROPERTY, max_examples=cases(3000))
@given(damage=DAMAGE, running=st.booleans())
def test_no_damage_to_any_manifest_raises_and_every_refusal_names_a_field(
    damage: list[tuple[tuple[int, tuple[Any, ...]], int]], running: bool
) -> None:
    services, models = (
        {
            (each["metadata"]["namespace"], each["metadata"]["name"]): each
            for each in damaged(damage)
            if each["kind"] == kind
        }
        for kind in ("InferenceService", "Model")
    )
    found = interpret(services, models, POLICY, set(services) if running else ())
    assert found.keys() == services.keys()
    for item in found.values():
        if isinstance(item, Rejected):
            assert item.reason.isalnum() and NAMES_A_FIELD.search(item.message), item
            assert len(item.message) < 32_768
            item.message.encode("utf-8")
        else:
            given = [*item.extra_args, *map(list, item.env), dict(item.options)]
            json.dumps(given, ensure_ascii=False, allow_nan=False).encode("utf-8")


def test_the_manifests_are_fine_before_they_are_damaged() -> None:
    assert len(PLACES) > 100
    fine = {each["metadata"]["name"] for each in MANIFESTS if each["kind"] == "InferenceService"}
    assert "whole" in fine and isinstance(understood(WHOLE), Service)


def test_one_bad_service_leaves_the_others_alone() -> None:
    found = interpret(
        {
            KEY: service(),
            ("default", "bad"): service("bad", priority=5),
            ("default", "worse"): service("worse") | {"spec": None},
        },
        {KEY: model()},
        POLICY,
    )
    assert {key[1]: type(item) for key, item in found.items()} == {"tiny": Service, "bad": Rejected, "worse": Rejected}


def test_interpreting_changes_nothing_it_was_given() -> None:
    resource, its_model = service(env=[{"name": "A", "value": "b"}], ropeScaling={"type": "yarn"}), model()
    before = copy.deepcopy((resource, its_model))
    understood(resource, its_model)
    assert (resource, its_model) == before


# ── defaults ─────────────────────────────────────────────────────────────────────────────────────


def test_a_bare_service_gets_the_documented_defaults() -> None:
    found = accepted(service(), model(source=" /models/tiny.gguf\n"))
    assert (found.uid, found.generation, found.key) == ("u-tiny", 3, KEY)
    assert (found.runtime, found.replicas, found.suspended, found.mode, found.priority) == (
        "llama-server",
        1,
        False,
        "chat",
        "normal",
    )
    endpoint = found.endpoint
    assert (endpoint.service, endpoint.port, endpoint.path, endpoint.type, endpoint.node_port) == (
        "tiny",
        8080,
        "/v1/chat/completions",
        "ClusterIP",
        None,
    )
    assert (dict(found.options), found.extra_args, found.env, found.container_port) == ({}, (), (), None)
    assert found.model.source == "/models/tiny.gguf"
    assert (found.model.gpu_layers, found.model.sha256) == (None, None)


def test_null_counts_as_unset_in_every_field() -> None:
    assert accepted(service(**dict.fromkeys(set(FIELDS) - {"modelRef"}))) == accepted(service())


def test_an_empty_string_counts_as_unset_where_llmkubes_schema_lets_one_in() -> None:
    """Templates render one for a value that is not given, and to LLMKube's programs, in Go, it is the same."""
    names = (
        "cacheTypeCustomK",
        "cacheTypeCustomV",
        "reasoningBudgetMessage",
        "pagedSSDCacheDir",
        "pagedSSDCacheMaxSize",
        "hotCacheMaxSize",
    )
    assert accepted(service(**dict.fromkeys(names, ""))) == accepted(service())
    assert accepted(service(endpoint={"path": ""})) == accepted(service(endpoint={}))
    repository = {"source": "hf://o/r", "mmproj": "", "sourceSecretRef": {"name": ""}}
    assert accepted(service(), model(**repository, quantization="")) == accepted(service(), model(**repository))


def test_a_model_without_format_is_gguf() -> None:
    bare = model()
    del bare["spec"]["format"]
    assert accepted(service(), bare).model.format == "gguf"


def test_every_option_reaches_the_service_as_it_was_written() -> None:
    options = {
        "contextSize": 4096,
        "parallelSlots": 4,
        "batchSize": 512,
        "uBatchSize": 256,
        "flashAttention": False,
        "cacheTypeK": "q8_0",
        "cacheTypeV": "q4_0",
        "cacheTypeCustomK": "turbo4",
        "cacheTypeCustomV": "turbo3",
        "moeCPUOffload": True,
        "moeCPULayers": 0,
        "noKvOffload": True,
        "noWarmup": False,
        "jinja": False,
        "reasoningBudget": 0,
        "reasoningBudgetMessage": "stop.\nnow",
        "tensorOverrides": ["a=CPU"],
        "metadataOverrides": ["k=int:1"],
        "ropeScaling": {"type": "yarn", "factor": "2.5", "originalContext": 8192},
        "turboQuantBits": 6,
        "pagedSSDCacheDir": "/cache",
        "pagedSSDCacheMaxSize": "100GB",
        "hotCacheMaxSize": "0.5GB",
    }
    assert set(options) == set(OPTIONS), "an option was added: add it here"
    expected = {**options, "tensorOverrides": ("a=CPU",), "metadataOverrides": ("k=int:1",)}
    found = accepted(service(runtime="omlx", **options), model(format="mlx"), policy=ON_OMLX)
    assert dict(found.options) == expected


@pytest.mark.parametrize("field", OMLX_OPTIONS)
def test_what_only_omlx_has_is_refused_by_name_elsewhere(field: str) -> None:
    found = refused(service(**{field: "8GB" if field.endswith("Size") else 6 if field.endswith("Bits") else "/cache"}))
    assert found.reason == "UnsupportedField" and f"spec.{field}" in found.message and "omlx" in found.message


def test_zero_replicas_and_suspend_are_understood_rather_than_refused() -> None:
    assert accepted(service(replicas=0)).replicas == 0
    assert accepted(service(suspend=True)).suspended is True


@pytest.mark.parametrize(
    ("policy", "drain_s"),
    [
        (None, None),
        ({"idleTimeoutSeconds": 0}, 0.0),
        ({"idleTimeoutSeconds": 300, "waitForIdle": True}, 300.0),
        ({"idleTimeoutSeconds": 604_800, "waitForIdle": True}, 604_800.0),
        ({"idleTimeoutSeconds": 2**63 - 1}, float(2**63 - 1)),
        ({"idleTimeoutSeconds": 300, "waitForIdle": False}, 0.0),
        ({"idleTimeoutSeconds": 300, "waitForIdle": True, "force": True}, 0.0),
    ],
)
def test_running_requests_may_finish_as_long_as_the_spec_says(policy: Any, drain_s: float | None) -> None:
    assert accepted(service(rolloutPolicy=policy)).drain_s == drain_s


@pytest.mark.parametrize(
    ("spec", "mode"),
    [
        ({}, "chat"),
        ({"mode": "rerank"}, "rerank"),
        ({"extraArgs": ["--embedding"]}, "embedding"),
        ({"extraArgs": ["--embeddings"]}, "embedding"),
        ({"extraArgs": ["--reranking", "--embedding"]}, "rerank"),
        ({"extraArgs": ["--rerank"]}, "rerank"),
        ({"endpoint": {"path": "/v1/embeddings"}}, "embedding"),
        ({"endpoint": {"path": "/v1/rerank"}}, "rerank"),
        ({"mode": "chat", "extraArgs": ["--embedding"]}, "chat"),
    ],
)
def test_the_mode_comes_from_the_spec_then_the_arguments_then_the_path(spec: Json, mode: str) -> None:
    assert accepted(service(**spec)).mode == mode


def test_the_last_of_two_env_entries_wins_and_the_order_is_stable() -> None:
    env = [{"name": "B", "value": "1"}, {"name": "A", "value": "\n%(x)s"}, {"name": "B", "value": "2"}]
    assert accepted(service(env=env)).env == (("A", "\n%(x)s"), ("B", "2"))


def test_an_env_entry_without_value_is_empty() -> None:
    assert accepted(service(env=[{"name": "A"}])).env == (("A", ""),)


# ── runtime ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("annotation", "said", "expected"),
    [
        (None, None, "llama-server"),
        (None, "llamacpp", "llama-server"),
        (None, "", "llama-server"),
        ("", "mlx-server", "mlx-server"),
        (None, "mlx-server", "mlx-server"),
        ("mlx-server", "llama-server", "mlx-server"),
        ("mlx-server", "llamacpp", "mlx-server"),
        ("mlx-server", "vllm", "mlx-server"),
    ],
)
def test_annotation_wins_over_spec_runtime_which_wins_over_the_setting(
    annotation: str | None, said: str | None, expected: str
) -> None:
    resource = service(runtime=said)
    if annotation is not None:
        resource["metadata"]["annotations"] = {RUNTIME_ANNOTATION: annotation}
    kind = "mlx" if expected == "mlx-server" else "gguf"
    assert accepted(resource, model(format=kind)).runtime == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (None, None),
        ("", None),
        ("off", None),
        ("0", None),
        ("0s", None),
        ("0h0m", None),
        ("15m", 900),
        ("10", 10),
        ("10s", 10),
        ("9.5s", 10),
        ("90", 90),
        (" 1h30m ", 5400),
        ("1.5h", 5400),
        ("1m500ms", 61),
        ("168h", 604_800),
        ("604800", 604_800),
    ],
)
def test_an_idle_ttl_is_read_as_a_duration(said: str | None, expected: int | None) -> None:
    resource = service()
    resource["metadata"]["annotations"] = {IDLE_TTL_ANNOTATION: said}
    assert accepted(resource).options.get("idleTtlS") == expected
    assert ("idleTtlS" in accepted(resource).options) is (expected is not None)


@pytest.mark.parametrize(
    "said",
    [
        "9",
        "9s",
        "8.999s",
        "168h1s",
        "604801",
        "-15m",
        "+15m",
        "15 m",
        "m",
        "1d",
        "15M",
        "1e3",
        "0x10",
        "٣٠m",
        ".5h",
        "1h" * 9,
        "9" * 400,
        "1.h",
        "never",
        "\0",
        "on",
        900,
        0,
        True,
        [],
        {},
        1.5,
    ],
)
def test_an_idle_ttl_that_is_none_is_refused_by_name_with_advice(said: Any) -> None:
    resource = service()
    resource["metadata"]["annotations"] = {IDLE_TTL_ANNOTATION: said}
    found = refused(resource)
    assert found.reason == "InvalidSpec"
    assert found.message.startswith(f"annotation {IDLE_TTL_ANNOTATION} must be ")
    assert '"off"' in found.message and len(found.message) < 300


@pytest.mark.parametrize(
    ("said", "expected"),
    [(None, ()), ("", ()), ("gpt-4o", ("gpt-4o",)), ("a, b/c:7b ,a", ("a", "b/c:7b"))],
)
def test_aliases_are_names_and_change_no_engine(said: str | None, expected: tuple[str, ...]) -> None:
    plain, resource = accepted(service()), service()
    resource["metadata"]["annotations"] = {ALIASES_ANNOTATION: said}
    assert accepted(resource).aliases == expected and accepted(resource).asked == plain.asked


@pytest.mark.parametrize("said", [7, ",", "a,,b", "a b", "-a", "a" * 129, ",".join("abcdefghi" * 4), "\n", ["a"]])
def test_aliases_that_are_none_are_refused_by_name(said: Any) -> None:
    resource = service()
    resource["metadata"]["annotations"] = {ALIASES_ANNOTATION: said}
    found = refused(resource)
    assert found.reason == "InvalidSpec" and found.message.startswith(f"annotation {ALIASES_ANNOTATION} must be ")


def test_another_idle_ttl_is_another_request_though_no_generation_says_so() -> None:
    def asked(ttl: str) -> str:
        resource = service()
        resource["metadata"]["annotations"] = {IDLE_TTL_ANNOTATION: ttl}
        return accepted(resource).asked

    assert same_request(asked("10m"), asked("600s"))
    assert same_request(asked("off"), accepted(service()).asked)
    assert not same_request(asked("10m"), asked("11m"))
    assert not same_request(asked("10m"), asked("off"))
    assert not same_request(asked("off"), asked("10m"))


def test_llamacpp_counts_as_unset_so_the_setting_applies() -> None:
    policy = replace(POLICY, default_runtime="mlx-server")
    assert accepted(service(runtime="llamacpp"), model(format="mlx"), policy=policy).runtime == "mlx-server"


@pytest.mark.parametrize("kind", ["safetensors", "pytorch", "custom", "GGUF", ""])
def test_a_format_that_no_runtime_serves_is_refused_with_those_they_serve(kind: str) -> None:
    found = refused(service(), model(format=kind))
    assert (found.reason, found.keeps_running) == ("FormatMismatch", True)
    assert "spec.format" in found.message and "they serve gguf, mlx" in found.message


def test_a_service_that_names_no_runtime_gets_one_that_serves_its_format() -> None:
    assert accepted(service(), model(format="mlx")).runtime == "mlx-server"
    assert accepted(service(), model()).runtime == "llama-server"
    assert accepted(service(), model(), policy=replace(POLICY, default_runtime="mlx-server")).runtime == "llama-server"


def test_a_format_that_the_named_runtime_does_not_serve_is_refused_with_the_one_that_does() -> None:
    found = refused(service(runtime="mlx-server"), model())
    assert found.reason == "FormatMismatch"
    assert "which mlx-server (spec.runtime) does not serve: it serves mlx; gguf is served by llama-server" in (
        found.message
    )


def annotated(resource: dict[str, Any], runtime: object) -> dict[str, Any]:
    resource["metadata"]["annotations"] = {RUNTIME_ANNOTATION: runtime}
    return resource


def test_the_annotation_goes_before_that_of_the_model_and_that_before_the_spec() -> None:
    mlx = model(format="mlx")
    everything = Policy(
        "llama-server",
        {"llama-server": frozenset({"gguf"}), "mlx-server": frozenset({"mlx"}), "omlx": frozenset({"mlx"})},
    )
    by_model = accepted(service(runtime="mlx-server"), annotated(mlx, "omlx"), policy=everything)
    assert by_model.runtime == "omlx"
    by_service = accepted(annotated(service(), "mlx-server"), annotated(mlx, "omlx"), policy=everything)
    assert by_service.runtime == "mlx-server"
    assert "of Model" in refused(service(), annotated(model(), "nonsense")).message


def test_an_unknown_runtime_names_where_it_was_said_and_what_there_is() -> None:
    by_spec = refused(service(runtime="nonsense"))
    by_annotation = refused(annotated(service(), "nonsense"))
    assert by_spec.message.startswith("spec.runtime is 'nonsense'") and "llama-server, mlx-server" in by_spec.message
    assert by_annotation.message.startswith(f"annotation {RUNTIME_ANNOTATION}")
    assert {each.reason for each in (by_spec, by_annotation)} == {"UnsupportedRuntime"}
    assert "must be a string" in refused(annotated(service(), 7)).message


@pytest.mark.parametrize("runtime", ["vllm", "tgi", "sglang", "personaplex", "generic", "llamacpp-router"])
def test_runtimes_of_pods_are_refused_by_name(runtime: str) -> None:
    found = refused(service(runtime=runtime))
    assert found.reason == "UnsupportedRuntime" and found.message.startswith(f"spec.runtime is '{runtime}', which ")


# ── refusals name the field ──────────────────────────────────────────────────────────────────────


def test_a_model_reference_to_nothing_leaves_the_engine_as_it_runs() -> None:
    found = refused(service(modelRef="gone"))
    assert (found.reason, found.keeps_running, found.model_name) == ("ModelNotFound", True, "gone")
    assert "Model not found" in found.message and "spec.modelRef" in found.message and '"gone"' in found.message


def test_a_model_of_another_namespace_is_not_found() -> None:
    assert refused(service(), model(namespace="other")).reason == "ModelNotFound"


@pytest.mark.parametrize("reference", ["gone", None])
def test_one_that_is_being_deleted_ends_whatever_its_model_reference_says(reference: Any) -> None:
    leaving = service(modelRef=reference)
    leaving["metadata"] |= {"deletionTimestamp": "2026-11-21T01:41:10Z", "finalizers": ["example.com/a"]}
    assert not refused(leaving).keeps_running


def test_a_model_that_is_made_anew_with_the_same_spec_asks_for_the_same_engine() -> None:
    before, anew = model(), model()
    anew["metadata"] |= {"uid": "another", "generation": 7}
    said = accepted(service(), before).asked, accepted(service(), anew).asked
    assert said[0] != said[1] and same_request(*said)
    on_gpu = {"accelerator": "metal", "gpu": {"layers": 3}}
    for spec in ({"source": "/other.gguf"}, {"sha256": "a" * 64}, {"hardware": on_gpu}):
        edited = model(**spec)
        edited["metadata"]["generation"] = 2
        assert not same_request(said[0], accepted(service(), edited).asked), spec


@pytest.mark.parametrize("hardware", [None, {}, {"accelerator": "cuda"}, {"accelerator": None}, "metal", []])
def test_a_model_that_is_not_for_a_mac_takes_the_engine_down(hardware: Any) -> None:
    found = refused(service(), model(hardware=hardware))
    assert (found.reason, found.keeps_running) == ("NotMetal", False)
    assert "spec.hardware.accelerator" in found.message


@pytest.mark.parametrize("reference", ["", None, 5, ["tiny"]])
def test_a_missing_model_reference_is_named(reference: Any) -> None:
    found = refused(service(modelRef=reference))
    assert found.reason == "InvalidSpec" and "spec.modelRef" in found.message


def test_a_huge_model_reference_makes_a_message_that_a_condition_can_hold() -> None:
    assert len(refused(service(modelRef="x" * 100_000)).message) <= 32_768


@pytest.mark.parametrize("text", ["a\0b", "\ud83d", "tail\udc00"])
@pytest.mark.parametrize("field", ["extraArgs[1]", "env[0].value", "reasoningBudgetMessage", "tensorOverrides[0]"])
def test_a_text_that_no_process_can_be_given_is_refused_by_name(field: str, text: str) -> None:
    spec: Json = {
        "extraArgs[1]": {"extraArgs": ["--ok", text]},
        "env[0].value": {"env": [{"name": "A", "value": text}]},
        "reasoningBudgetMessage": {"reasoningBudgetMessage": text},
        "tensorOverrides[0]": {"tensorOverrides": [text]},
    }[field]
    found = refused(service(**spec))
    assert found.reason == "InvalidSpec" and f"spec.{field}" in found.message
    found.message.encode("utf-8")


@pytest.mark.parametrize("text", ["\n[program:evil]", "%s %(ENV_HOME)s", " ; #", "\r\t\x01", "🦙", "\"'\\"])
def test_nasty_but_possible_arguments_are_kept_byte_for_byte(text: str) -> None:
    assert accepted(service(extraArgs=[text])).extra_args == (text,)


@pytest.mark.parametrize("name", ["", "1A", "A B", "A=B", "Ä", "A\n", "A\0", None, 5])
def test_an_env_name_that_is_none_is_refused(name: Any) -> None:
    found = refused(service(env=[{"name": "GOOD", "value": "1"}, {"name": name, "value": "x"}]))
    assert found.reason == "InvalidSpec" and "spec.env[1].name" in found.message


@pytest.mark.parametrize(
    "name", ["LD_PRELOAD", "DYLD_INSERT_LIBRARIES", "SUPERVISOR_SERVER_URL", "METAL_SUPERVISOR_PORT"]
)
def test_an_env_name_that_would_change_loader_or_supervisor_is_refused(name: str) -> None:
    assert f"spec.env[0].name '{name}'" in refused(service(env=[{"name": name, "value": "x"}])).message


@pytest.mark.parametrize("name", ["LLAMA_ARG_PORT", "LLAMA_ARG_API_PREFIX", "LLAMA_ARG_HOST"])
def test_an_owned_flag_cannot_come_in_as_environment_either(name: str) -> None:
    assert name in refused(service(env=[{"name": name, "value": "1"}])).message


@pytest.mark.parametrize("item", ["A=B", 5, ["A"], None])
def test_an_env_entry_that_is_no_object_is_refused(item: Any) -> None:
    assert "spec.env[0] must be an object" in refused(service(env=[item])).message


def test_a_name_of_64_characters_is_too_long_for_the_service_and_63_are_not() -> None:
    found = refused(service("a" * 64))
    assert found.reason == "ServiceNameTooLong" and "metadata.name" in found.message and "64" in found.message
    assert accepted(service("a" * 63)).endpoint.service == "a" * 63


@pytest.mark.parametrize("field", sorted(UNSUPPORTED))
def test_an_unsupported_field_is_refused_by_name_and_only_when_it_is_set(field: str) -> None:
    found = refused(service(**{field: ["x"] if field in ("args", "command") else 3}))
    assert found.reason == "UnsupportedField" and f"spec.{field}" in found.message
    for unset in (None, "", [], {}):
        accepted(service(**{field: unset}))


@pytest.mark.parametrize("field", sorted(OPTIONS))
@pytest.mark.parametrize("value", [object, -5, "two words", ["", 5]], ids=["object", "-5", "words", "list"])
def test_every_option_refuses_what_it_cannot_be_and_names_itself(field: str, value: Any) -> None:
    value = {"a": object} if value is object else value
    if field in ("reasoningBudgetMessage", "pagedSSDCacheDir") and isinstance(value, str):
        value = 5
    found = refused(service(**{field: value}))
    assert found.reason == "InvalidSpec" and f"spec.{field}" in found.message
    assert found.keeps_running


@pytest.mark.parametrize("field", ["contextSize", "replicas", "containerPort", "parallelSlots", "reasoningBudget"])
@pytest.mark.parametrize("value", [True, 1.5, "8"])
def test_a_number_must_be_a_whole_number_and_no_boolean(field: str, value: Any) -> None:
    assert f"spec.{field} must be a whole number" in refused(service(**{field: value})).message


@pytest.mark.parametrize(
    ("field", "low", "high"),
    [
        ("contextSize", 128, 2_097_152),
        ("parallelSlots", 1, 64),
        ("batchSize", 1, 16_384),
        ("uBatchSize", 1, None),
        ("containerPort", 1, 65535),
        ("replicas", 0, None),
        ("moeCPULayers", 0, None),
        ("reasoningBudget", 0, None),
    ],
)
def test_a_number_is_accepted_to_its_very_bounds_and_refused_beyond(field: str, low: int, high: int | None) -> None:
    bounds = (low, high or 2**31 - 1)
    for good in bounds:
        accepted(service(**{field: good}))
    for bad in (bounds[0] - 1, bounds[1] + 1):
        found = refused(service(**{field: bad}))
        assert f"spec.{field} must be between {bounds[0]} and {bounds[1]}, not {bad}" in found.message


@pytest.mark.parametrize("field", ["flashAttention", "jinja", "suspend", "noWarmup"])
@pytest.mark.parametrize("value", ["true", 1, 0, []])
def test_a_switch_must_be_true_or_false(field: str, value: Any) -> None:
    assert f"spec.{field} must be true or false" in refused(service(**{field: value})).message


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({}, "spec.ropeScaling.type"),
        ({"type": "none"}, "spec.ropeScaling.type"),
        ({"type": "yarn", "factor": "x"}, "spec.ropeScaling.factor"),
        ({"type": "yarn", "factor": 2.0}, "spec.ropeScaling.factor"),
        ({"type": "yarn", "originalContext": 1}, "spec.ropeScaling.originalContext"),
    ],
)
def test_a_wrong_part_of_rope_scaling_is_named(rope: Json, named: str) -> None:
    assert named in refused(service(ropeScaling=rope)).message


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"endpoint": {"type": "ExternalName"}}, "spec.endpoint.type"),
        ({"endpoint": {"port": 0}}, "spec.endpoint.port"),
        ({"endpoint": {"port": 70000}}, "spec.endpoint.port"),
        ({"endpoint": {"nodePort": 80}}, "spec.endpoint.nodePort"),
        ({"endpoint": {"path": 5}}, "spec.endpoint.path"),
        ({"mode": "audio"}, "spec.mode"),
        ({"priority": "urgent"}, "spec.priority"),
        ({"extraArgs": "--verbose"}, "spec.extraArgs"),
        ({"extraArgs": [5]}, "spec.extraArgs[0]"),
        ({"env": {"A": "b"}}, "spec.env"),
        ({"env": [{"name": "A", "value": 5}]}, "spec.env[0].value"),
    ],
)
def test_a_wrong_field_is_named(spec: Json, named: str) -> None:
    found = refused(service(**spec))
    assert found.reason == "InvalidSpec" and named in found.message


@pytest.mark.parametrize("field", ["endpoint", "speculativeDecoding"])
@pytest.mark.parametrize("value", ["draft", 5, ["x"]])
def test_an_object_field_of_another_type_is_refused_rather_than_taken_for_unset(field: str, value: Any) -> None:
    assert f"spec.{field}" in refused(service(**{field: value})).message


@pytest.mark.parametrize("path", ["v1/chat", "x\0y", "\ud800", "/a b\n"])
def test_an_endpoint_path_that_makes_no_url_is_refused(path: str) -> None:
    assert "spec.endpoint.path" in refused(service(endpoint={"path": path})).message


@pytest.mark.parametrize("source", ["", None, "  "])
def test_a_model_without_source_is_refused(source: Any) -> None:
    found = refused(service(), model(source=source))
    assert found.reason == "InvalidModel" and '"tiny"' in found.message and "spec.source" in found.message


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("pvc://claim/m.gguf", "UnsupportedSource"),
        ("oci://x/y", "UnsupportedSource"),
        ("ftp://x", "UnsupportedSource"),
        ("models/x.gguf", "UnsupportedSource"),
        ("m.gguf", "UnsupportedSource"),
        ("a/b/c", "UnsupportedSource"),
        ("s3://a", "InvalidModel"),
        ("http://", "InvalidModel"),
        ("hf://a", "InvalidModel"),
        ("hf://datasets/a/b", "InvalidModel"),
        ("file://host/m.gguf", "InvalidModel"),
        ("http://[bad/m", "InvalidModel"),
        ("https://user:secret@x/m.gguf", "InvalidModel"),
        ("http://h:99999/m", "InvalidModel"),
    ],
)
def test_a_source_that_cannot_be_fetched_is_refused(source: str, reason: str) -> None:
    found = refused(service(), model(source=source))
    assert found.reason == reason and 'Model "tiny": spec.source' in found.message
    assert "secret" not in found.message.replace("sourceSecretRef", "")


@pytest.mark.parametrize("source", ["/m.gguf", "file:///m.gguf", "http://x/m.gguf", "https://x/m.gguf"])
def test_paths_files_and_urls_are_sources(source: str) -> None:
    assert accepted(service(), model(source=source)).model.source == source


# ── suspension must always work ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("off", [{"suspend": True}, {"replicas": 0}], ids=["suspend", "replicas-0"])
@pytest.mark.parametrize(
    ("spec", "model_spec"),
    [({}, {"source": ""}), ({}, {"format": "mlx"}), ({"contextSize": 1}, {}), ({"runtime": "vllm"}, {})],
    ids=["model-source", "model-format", "bad-option", "bad-runtime"],
)
def test_a_service_told_to_stop_does_not_keep_running_because_something_else_is_wrong(
    off: Json, spec: Json, model_spec: Json
) -> None:
    found = understood(service(**off, **spec), model(**model_spec))
    assert isinstance(found, Service) or not found.keeps_running, found


def test_a_refusal_keeps_what_the_status_needs() -> None:
    found = refused(service(replicas=3, priority="urgent", endpoint={"port": 9000}))
    assert (found.replicas, found.model_name, found.keeps_running) == (3, "tiny", True)
    assert found.endpoint is not None and (found.endpoint.service, found.endpoint.port) == ("tiny", 9000)


@pytest.mark.parametrize("replicas", [True, "3", None, -3, 2**40])
def test_the_replicas_of_a_refusal_are_a_number_that_a_status_can_hold(replicas: Any) -> None:
    assert 0 <= refused(service(replicas=replicas, priority="urgent")).replicas < 2**31


# ── who is ours ──────────────────────────────────────────────────────────────────────────────────


def test_services_not_on_the_allowlist_are_left_out_entirely() -> None:
    policy = replace(POLICY, allowlist=frozenset({"tiny"}))
    services = {KEY: service(), ("default", "other"): service("other"), ("b", "bad"): service("bad", priority=1)}
    assert list(interpret(services, {KEY: model()}, policy)) == [KEY]


def test_a_dotted_name_is_served_with_dashes() -> None:
    assert service_name("phi-4.mini.q4") == "phi-4-mini-q4"
    assert accepted(service("a.b")).endpoint.service == "a-b"


@pytest.mark.parametrize(("first", "second"), [("a.b", "a-b"), ("a-b", "a.b")])
def test_of_two_names_that_need_one_service_the_older_keeps_it(first: str, second: str) -> None:
    services = {
        ("default", second): service(second, "2026-02-01T00:00:00Z"),
        ("default", first): service(first, "2026-01-01T00:00:00Z"),
    }
    found = interpret(services, {KEY: model()}, POLICY)
    assert isinstance(found["default", first], Service)
    loser = found["default", second]
    assert isinstance(loser, Rejected) and (loser.reason, loser.keeps_running) == ("ServiceConflict", False)
    assert "metadata.name" in loser.message and first in loser.message and second in loser.message


@pytest.mark.parametrize("wrong", [{}, {"contextSize": 1}])
@pytest.mark.parametrize(("refused_one", "served"), [("a.b", "a-b"), ("a-b", "a.b")])
def test_what_is_refused_has_no_endpoint_where_another_one_has_its_service(
    refused_one: str, served: str, wrong: dict[str, Any]
) -> None:
    """Its status.endpoint was the URL of the other one's model."""
    at = {refused_one: "2026-01-01T00:00:00Z" if wrong else "2026-03-01T00:00:00Z", served: "2026-02-01T00:00:00Z"}
    services = {
        ("default", refused_one): service(refused_one, at[refused_one], **wrong),
        ("default", served): service(served, at[served]),
    }
    found = interpret(services, {KEY: model()}, POLICY)
    loser, winner = found["default", refused_one], found["default", served]
    assert isinstance(loser, Rejected) and loser.endpoint is None
    assert isinstance(winner, Service) and winner.endpoint.service == "a-b"
    alone = interpret({("default", "a.b"): service("a.b", contextSize=1)}, {KEY: model()}, POLICY)["default", "a.b"]
    assert alone.endpoint is not None, "nobody else has it"


def test_the_same_two_names_in_different_namespaces_do_not_conflict() -> None:
    other = service("a-b")
    other["metadata"]["namespace"] = "other"
    services = {("default", "a.b"): service("a.b"), ("other", "a-b"): other}
    found = interpret(services, {KEY: model(), ("other", "tiny"): model(namespace="other")}, POLICY)
    assert all(isinstance(item, Service) for item in found.values())


def test_a_bad_edit_of_the_older_does_not_hand_its_service_to_the_younger() -> None:
    # The older one's engine keeps running behind the Service, so the younger must go on waiting.
    services = {
        ("default", "a.b"): service("a.b", "2026-01-01T00:00:00Z", contextSize=1),
        ("default", "a-b"): service("a-b", "2026-02-01T00:00:00Z"),
    }
    found = interpret(services, {KEY: model()}, POLICY, running={("default", "a.b")})
    assert isinstance(found["default", "a-b"], Rejected)


def test_a_directory_has_to_be_one_that_can_be_listed() -> None:
    found = refused(service(), model(format="mlx", source="https://example.org/m"))
    assert found.reason == "UnsupportedSource" and "name its files in spec.files" in found.message
    assert refused(service(), model(format="mlx", source="hf://o/r/config.json")).reason == "UnsupportedSource"
    files = ["config.json", "model.safetensors"]
    found = accepted(service(), model(format="mlx", source="https://example.org/m/", files=files))
    assert (found.model.artifact.directory, found.model.artifact.files) == (True, tuple(files))
    assert accepted(service(), model(format="mlx", source="file:///models/m")).model.format == "mlx"
