"""Files beside a model, and what is said of speculation: understood, or refused by the field that is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_resources import ANYTHING, POLICY, accepted, model, refused, service, understood

from metal_supervisor.runtimes import Binary, Place, llama_server
from metal_supervisor.spec.record import same_request
from metal_supervisor.spec.sources import Artifact
from metal_supervisor.spec.types import Companion, Rejected, Role, Service

PROPERTY = settings(max_examples=150, database=None, derandomize=True)
DRAFT = model("small", source="/models/small.gguf")
DRAFT["metadata"] |= {"uid": "d-1", "generation": 4}
REF = "spec.speculativeDecoding.draftModelRef"


def speculates(kind: Any, **more: Any) -> dict[str, Any]:
    return service(speculativeDecoding={"type": kind, **more})


# ── speculation ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("said", [None, {"type": "none"}, {"type": "disabled", "nDraftMax": 3}])
def test_no_speculation_leaves_no_trace(said: Any) -> None:
    found = accepted(service(speculativeDecoding=said))
    assert "speculativeDecoding" not in found.options and found.companions == ()
    assert found.asked == accepted(service()).asked


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("draft", "draft-simple"),
        ("draft-simple", "draft-simple"),
        ("draft-eagle3", "draft-eagle3"),
        ("draft-dflash", "draft-dflash"),
        ("draft-dspark", "draft-dspark"),
        ("draft-mtp", "draft-mtp"),
    ],
)
def test_a_draft_model_is_another_model_of_the_namespace(said: str, kind: str) -> None:
    found = accepted(speculates(said, draftModelRef="small", nDraftMax=5, pMin=0.5), model(), DRAFT)
    assert found.options["speculativeDecoding"] == {"type": kind, "nDraftMax": 5, "pMin": 0.5, "draftModelRef": "small"}
    assert found.companions == (Companion(Role.DRAFT, REF, Artifact("/models/small.gguf"), "d-1/4"),)


@pytest.mark.parametrize("said", ["mtp", "draft-mtp", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod"])
def test_some_kinds_need_no_draft_model(said: str) -> None:
    found = accepted(speculates(said, nDraftMax=7))
    assert found.companions == () and found.options["speculativeDecoding"]["nDraftMax"] == 7


def test_an_edit_of_the_draft_model_is_an_edit_of_the_service() -> None:
    asked = speculates("draft", draftModelRef="small")
    edited = {"metadata": {**DRAFT["metadata"], "generation": 5}, "spec": {**DRAFT["spec"], "source": "/other.gguf"}}
    before, after = accepted(asked, model(), DRAFT).asked, accepted(asked, model(), edited).asked
    assert same_request(before, before) and not same_request(before, after)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"type": "draft"}, f"set {REF} to a Model"),
        ({"type": "draft-eagle3", "draftModelRef": " "}, f"set {REF} to a Model"),
        ({"type": "guess"}, "spec.speculativeDecoding.type must be one of none, disabled, mtp"),
        ({}, "spec.speculativeDecoding.type must be one of"),
        ({"type": 5}, "spec.speculativeDecoding.type must be a string"),
        ({"type": "ngram-mod", "draftModelRef": "small"}, f"{REF} means nothing to ngram-mod"),
        ({"type": "mtp", "draftModel": "x"}, "spec.speculativeDecoding.draftModel means nothing to mtp"),
        ({"type": "draft", "draftModelRef": "small", "draftModel": "x.gguf"}, "one of draftModelRef and draftModel"),
        ({"type": "draft", "draftModelRef": "small", "nDraftMax": 0}, "spec.speculativeDecoding.nDraftMax must be"),
        ({"type": "draft", "draftModelRef": "small", "pMin": 1.5}, "spec.speculativeDecoding.pMin must be between"),
        ({"type": "draft", "draftModelRef": "small", "pMin": float("nan")}, "spec.speculativeDecoding.pMin"),
        ({"type": "draft", "draftModelRef": "small", "pMin": 10**400}, "spec.speculativeDecoding.pMin must be a"),
        ({"type": "draft", "draftModelRef": "a\nb"}, f"{REF} 'a\\nb' is not the name of a Model"),
        ({"type": "ngram-simple", "pMin": 0.5}, "spec.speculativeDecoding.pMin means nothing to ngram-simple"),
        ({"type": "draft", "draftModel": "../x.gguf"}, "spec.speculativeDecoding.draftModel must name a file beside"),
    ],
)
def test_what_cannot_be_speculated_with_is_refused_by_its_field(said: Any, named: str) -> None:
    found = refused(service(speculativeDecoding=said), model(), DRAFT)
    assert found.reason == "InvalidSpec" and named in found.message and found.keeps_running


def test_a_draft_model_that_is_not_there_is_named_and_stops_no_engine() -> None:
    found = refused(speculates("draft", draftModelRef="gone"))
    assert found.reason == "DraftModelNotFound" and f'{REF} names "gone"' in found.message and found.keeps_running


def test_what_is_wrong_with_the_draft_model_is_said_of_the_field_that_names_it() -> None:
    for spec in ({"source": "s3://x"}, {"source": ""}, {"format": "mlx"}, {"files": ["other.gguf"]}):
        odd = model("small", **{"source": "/models/small.gguf", **spec})
        found = refused(speculates("draft", draftModelRef="small"), model(), odd)
        assert found.message.startswith(f'{REF}: Model "small"'), found.message


def test_a_draft_model_may_be_a_file_beside_the_model() -> None:
    (found,) = accepted(speculates("draft", draftModel="d.gguf"), model(files=["tiny.gguf", "d.gguf"])).companions
    assert found == Companion(Role.DRAFT, "spec.speculativeDecoding.draftModel", Artifact("/models/d.gguf"))
    (found,) = accepted(speculates("draft", draftModel="/elsewhere/d.gguf")).companions
    assert found.artifact.source == "/elsewhere/d.gguf"


def test_only_llama_server_speculates_or_takes_a_projector() -> None:
    policy = replace(POLICY, runtimes={"llama-server": frozenset({"gguf"}), "other": frozenset({"gguf"})})
    for asked, its_model, named in (
        (speculates("ngram-mod"), model(), "spec.speculativeDecoding"),
        (service(), model(mmproj="p.gguf"), "spec.mmproj"),
    ):
        asked["spec"]["runtime"] = "other"
        found = refused(asked, its_model, policy=policy)
        assert found.reason == "UnsupportedField" and f"{named} has no meaning for other" in found.message


@PROPERTY
@given(said=st.dictionaries(st.sampled_from(["type", "draftModel", "draftModelRef", "nDraftMax", "pMin"]), ANYTHING))
def test_no_speculation_of_any_shape_raises(said: Any) -> None:
    found = understood(service(speculativeDecoding=said), model(), DRAFT)
    assert isinstance(found, Service) or "speculativeDecoding" in found.message


# ── files beside the model ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("source", "name", "found"),
    [
        ("/models/m.gguf", "p.gguf", "/models/p.gguf"),
        ("file:///a%20b/m.gguf", "p q.gguf", "/a b/p q.gguf"),
        ("/models/m.gguf", "vision/./p.gguf", "/models/vision/p.gguf"),
    ],
)
def test_a_projector_lies_beside_the_model(source: str, name: str, found: str) -> None:
    service_of_it = accepted(service(), model(source=source, mmproj=name))
    assert service_of_it.model.projector == found
    assert service_of_it.companions == (Companion(Role.PROJECTOR, 'Model "tiny": spec.mmproj', Artifact(found)),)


@pytest.mark.parametrize("name", ["../p.gguf", "/p.gguf", ".", "a/../../p", "x\0y"])
def test_a_projector_elsewhere_is_refused_by_name(name: str) -> None:
    found = refused(service(), model(mmproj=name))
    assert 'Model "tiny": spec.mmproj' in found.message


@pytest.mark.parametrize(
    ("source", "files", "model_file", "projector"),
    [
        (
            "https://example.com/a/m.gguf?sig=1",
            [],
            "https://example.com/a/m.gguf?sig=1",
            "https://example.com/a/p.gguf",
        ),
        ("hf://o/r", ["sub/m.gguf", "p.gguf"], "hf://o/r@main/sub/m.gguf", "hf://o/r@main/p.gguf"),
        ("hf://o/r@v1/m.gguf", [], "hf://o/r@v1/m.gguf", "hf://o/r@v1/p.gguf"),
        ("o/r", ["m.gguf"], "hf://o/r@main/m.gguf", "hf://o/r@main/p.gguf"),
        ("s3://bucket/a/m.gguf", [], "s3://bucket/a/m.gguf", "s3://bucket/a/p.gguf"),
        ("s3://bucket/a/", ["m.gguf"], "s3://bucket/a/m.gguf", "s3://bucket/a/p.gguf"),
    ],
)
def test_a_projector_is_fetched_from_where_the_model_is(
    source: str, files: list[str], model_file: str, projector: str
) -> None:
    found = accepted(service(), model(source=source, files=files, mmproj="p.gguf", sourceSecretRef={"name": "keys"}))
    assert found.model.artifact == Artifact(model_file, secret=("default", "keys"))
    assert [each.artifact for each in found.companions] == [Artifact(projector, secret=("default", "keys"))]


def test_a_draft_model_that_is_fetched_has_the_secret_of_its_own_model() -> None:
    small = model("small", source="hf://o/small", quantization="Q8_0", sourceSecretRef={"name": "other"})
    found = accepted(speculates("draft", draftModelRef="small"), model(), small)
    secret = "default", "other"
    assert found.companions[0].artifact == Artifact("hf://o/small@main", quantization="Q8_0", secret=secret)


def test_an_adapter_that_is_elsewhere_is_fetched_with_the_models_secret() -> None:
    args = ["--lora", "hf://o/r/a.gguf", "--lora", "https://example.com/b.gguf?sig=1", "--lora", "/c.gguf"]
    asked = model(source="hf://o/big/m.gguf", sourceSecretRef={"name": "keys"})
    found = accepted(service(extraArgs=args), asked)
    secret = "default", "keys"
    assert [each.artifact for each in found.companions] == [
        Artifact("hf://o/r@main/a.gguf", secret=secret),
        Artifact("https://example.com/b.gguf?sig=1"),
        Artifact("/c.gguf"),
    ], "a token of the Hub is not for other servers"
    kept = {each.key: f"/store/{index}.gguf" for index, each in enumerate(found.companions)}
    place = Place("/m.gguf", "::1", 1, None, "/", further=kept)
    argv = llama_server.engine(found, Binary("/l", frozenset()), place).argv
    assert argv[-6:] == ("--lora", "/store/0.gguf", "--lora", "/store/1.gguf", "--lora", "/store/2.gguf")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--lora-scaled", "hf://o/r/a.gguf"], "spec.extraArgs[1] 'hf://o/r/a.gguf' must be FILE:SCALE"),
        (["--lora-scaled", "hf://o/r/a.gguf:x"], "spec.extraArgs[1] 'hf://o/r/a.gguf:x' must be FILE:SCALE"),
        (["--lora", "hf://o/r"], "spec.extraArgs[1] 'hf://o/r' must name one GGUF file"),
        (["-v", "--lora", "pvc://c/a.gguf"], "spec.extraArgs[2] 'pvc://c/a.gguf' names a volume"),
    ],
)
def test_an_adapter_that_cannot_be_fetched_is_refused_by_its_place(args: list[str], text: str) -> None:
    assert text in refused(service(extraArgs=args)).message


def test_arguments_name_no_more_files_than_there_can_be_threads() -> None:
    """Each file has one; a system that gave no more of them ended each pass, for all services."""
    most = ",".join(f"/m/{number}.gguf" for number in range(64))
    assert len(accepted(service(extraArgs=["--lora", most, "--lora", most])).companions) == 64
    found = refused(service(extraArgs=["--lora", most, "--lora", "/m/more.gguf"]))
    assert found.message == "spec.extraArgs[3] names one file too many: at most 64 are possible"


def test_files_may_list_what_is_loaded_anyway() -> None:
    shards = [f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    found = accepted(service(), model(source=f"/models/{shards[0]}", files=[*shards, "p.gguf"], mmproj="p.gguf"))
    assert found.model.source == f"/models/{shards[0]}"


@pytest.mark.parametrize("files", [["tiny.gguf", "other.gguf"], ["*"], ["sub/tiny.gguf"], ["m-00001-of-00003.gguf"]])
def test_a_file_that_nothing_would_load_is_refused_by_name(files: list[str]) -> None:
    found = refused(service(), model(files=files))
    assert found.reason == "UnsupportedField" and f"spec.files[{len(files) - 1}]" in found.message


def test_a_model_without_further_files_is_the_same_request_as_before() -> None:
    plain = understood(service(), model(), policy=POLICY)
    assert not isinstance(plain, Rejected)
    assert plain.asked == accepted(service(), model(files=["tiny.gguf"])).asked
    assert plain.asked.partition("|")[2] != accepted(service(), model(mmproj="p.gguf")).asked.partition("|")[2]
