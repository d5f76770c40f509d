"""Values of the environment that are kept elsewhere: read, refused by name, filled in, and never told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decide import outlook
from test_resources import ANYTHING, accepted, refused, service, understood

from metal_supervisor.spec.record import same_request
from metal_supervisor.spec.references import Holding, Source, filled, keys_of, sources
from metal_supervisor.spec.sources import Artifact, Keys
from metal_supervisor.spec.types import Reference, Rejected, Service, Standing
from tests.support.records import accept

NOW = 100.0
PATH = "spec.env[0].valueFrom.secretKeyRef"
SECRET: Source = ("default", "secrets", "keys")
PROPERTY = settings(max_examples=150, database=None, derandomize=True)


def wants(kind: str = "secretKeyRef", **more: Any) -> dict[str, Any]:
    return service(env=[{"name": "LLAMA_API_KEY", "valueFrom": {kind: {"name": "keys", "key": "engine", **more}}}])


def with_(found: Service, holding: Holding | None) -> Service:
    return filled(found, {SECRET: holding}.get)


def holding(**values: str) -> Holding:
    return Holding(200, values)


# ── read ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_reference_is_read_with_the_field_that_says_it() -> None:
    found = accepted(wants(optional=True))
    assert found.references == (Reference("LLAMA_API_KEY", "secrets", "keys", "engine", True, PATH),)
    assert found.env == (("LLAMA_API_KEY", ""),), "its name is known to whoever judges names"
    assert sources(found) == {SECRET}
    (config,) = accepted(wants("configMapKeyRef")).references
    assert (config.kind, config.optional) == ("configmaps", False)


def test_of_two_entries_of_one_name_the_last_wins_whatever_it_is() -> None:
    entry, plain = wants()["spec"]["env"][0], {"name": "LLAMA_API_KEY", "value": "x"}
    assert accepted(service(env=[entry, plain])).references == ()
    assert len(accepted(service(env=[plain, entry])).references) == 1


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"fieldRef": {"fieldPath": "metadata.name"}}, ".fieldRef is not supported"),
        ({"resourceFieldRef": {"resource": "limits.cpu"}}, ".resourceFieldRef is not supported"),
        ({"fileKeyRef": {}}, ".fileKeyRef is not supported"),
        ({"a\nb": 5}, ".'a\\nb' is not supported"),
        ({}, " must hold one of"),
        ({"secretKeyRef": {"name": "a", "key": "b"}, "configMapKeyRef": {"name": "a", "key": "b"}}, " must hold one"),
        ({"secretKeyRef": {"key": "b"}}, ".secretKeyRef.name '' is not the name of a Secret"),
        ({"configMapKeyRef": {"name": "../x", "key": "b"}}, ".configMapKeyRef.name '../x' is not the name"),
        ({"secretKeyRef": {"name": "a/b", "key": "b"}}, ".secretKeyRef.name"),
        ({"secretKeyRef": {"name": "a", "key": "b c"}}, ".secretKeyRef.key 'b c' is not a key"),
        ({"secretKeyRef": {"name": 5, "key": "b"}}, ".secretKeyRef.name must be a string"),
        ({"secretKeyRef": {"name": "a", "key": "b", "optional": "yes"}}, ".secretKeyRef.optional must be true or"),
        ({"secretKeyRef": "a"}, ".secretKeyRef must be an object"),
        ("a", " must be an object"),
    ],
)
def test_a_reference_that_is_none_is_refused_by_name(said: Any, named: str) -> None:
    found = refused(service(env=[{"name": "A", "value": "b"}, {"name": "T", "valueFrom": said}]))
    assert f"spec.env[1].valueFrom{named}" in found.message, found.message


def test_a_value_and_a_reference_at_once_are_refused() -> None:
    entry = {**wants()["spec"]["env"][0], "value": "x"}
    assert "spec.env[0]: set one of value and valueFrom" in refused(service(env=[entry])).message


@PROPERTY
@given(said=ANYTHING | st.dictionaries(st.sampled_from(["secretKeyRef", "configMapKeyRef", "fieldRef"]), ANYTHING))
def test_no_reference_of_any_shape_raises(said: Any) -> None:
    found = understood(service(env=[{"name": "T", "valueFrom": said}]))
    assert isinstance(found, Service) or "spec.env[0].valueFrom" in found.message


# ── filled in, or waited for ─────────────────────────────────────────────────────────────────────


def test_a_value_reaches_the_environment() -> None:
    found = with_(accepted(wants()), holding(engine="s3cret", other="x"))
    assert found.env == (("LLAMA_API_KEY", "s3cret"),) and found.awaits is None


@pytest.mark.parametrize("known", [Holding(404), holding(other="x")])
def test_an_optional_value_that_is_not_there_leaves_the_variable_out(known: Holding) -> None:
    found = with_(accepted(wants(optional=True)), known)
    assert found.env == () and found.awaits is None


@pytest.mark.parametrize(
    ("known", "standing", "reason", "named"),
    [
        (None, Standing.WAIT, "WaitingForSecret", "has not been read yet"),
        (Holding(0, text="no route"), Standing.WAIT, "WaitingForSecret", "has not been read yet: no route"),
        (Holding(403, text="cannot get secrets"), Standing.FAILED, "SecretForbidden", "apply conf/rbac/secrets.yaml"),
        (Holding(404), Standing.FAILED, "SecretNotFound", 'the Secret "keys" of namespace "default" does not exist'),
        (holding(other="x"), Standing.FAILED, "SecretKeyNotFound", 'has no key "engine"'),
        (Holding(200, {}, frozenset({"engine"})), Standing.FAILED, "SecretNotText", 'key "engine"'),
    ],
)
def test_what_is_missing_is_named_by_the_field_that_asks_for_it_and_stops_no_engine(
    known: Holding | None, standing: Standing, reason: str, named: str
) -> None:
    asked = accepted(wants())
    found = with_(asked, known)
    assert found.awaits is not None
    assert found.awaits[:2] == (standing, reason)
    assert found.awaits[2].startswith(f"{PATH}: ") and named in found.awaits[2]
    new = accept(found, None, outlook(), NOW)
    assert (new.verdict.standing, new.verdict.reason, new.runs) == (standing, reason, False)
    runs = accept(with_(asked, holding(engine="old")), None, outlook(), NOW)
    kept = accept(found, runs, outlook(), NOW)
    assert kept.runs and kept.edition == runs.edition and kept.asked == runs.asked
    assert kept.warning is not None and kept.warning[0] == reason


def test_words_of_configmaps_are_their_own() -> None:
    found = filled(accepted(wants("configMapKeyRef")), lambda _: None)
    assert found.awaits is not None and found.awaits[1] == "WaitingForConfigMap"


def test_a_changed_value_is_an_edit_and_the_same_value_is_none() -> None:
    asked = accepted(wants())
    first, again, other = (with_(asked, holding(engine=text)) for text in ("one", "one", "two"))
    assert first.asked == again.asked and same_request(first.asked, again.asked)
    assert not same_request(first.asked, other.asked)
    edited = replace(first, generation=first.generation + 1)
    assert same_request(first.asked, edited.asked), "an edit of something else is no reason to restart it"
    gone = with_(accepted(wants(optional=True)), Holding(404))
    assert not same_request(first.asked, gone.asked)


def test_nothing_that_is_remembered_or_shown_has_the_value_in_it() -> None:
    known = holding(engine="s3cret")
    found = with_(accepted(wants()), known)
    record = accept(found, None, outlook(), NOW)
    assert "s3cret" not in repr(record) and "s3cret" not in repr(known) and "s3cret" not in found.asked


def test_a_service_without_references_is_left_as_it_is() -> None:
    plain = understood(service())
    assert not isinstance(plain, Rejected)
    assert filled(plain, lambda _: None) is plain


OPENED = Artifact("hf://o/r@main/m.gguf", secret=("default", "hub"))
NAMED = 'spec.sourceSecretRef: the Secret "hub" of namespace "default"'


@pytest.mark.parametrize(
    ("holding", "reason", "text"),
    [
        (None, "WaitingForSecret", f"{NAMED} has not been read yet"),
        (Holding(0, text="no answer"), "WaitingForSecret", f"{NAMED} has not been read yet: no answer"),
        (Holding(404), "SecretNotFound", f"{NAMED} does not exist; create it"),
        (Holding(403, text="not yours"), "SecretForbidden", "spec.sourceSecretRef: not yours; apply conf/rbac"),
        (Holding(200, {"OTHER": "x"}), "SecretKeyNotFound", f'{NAMED} has no key "HF_TOKEN"; add your token'),
        (Holding(200, {"HF_TOKEN": " \n"}), "SecretKeyNotFound", f'{NAMED} has no key "HF_TOKEN"; add your token'),
        (Holding(200, {}, frozenset({"HF_TOKEN"})), "SecretKeyNotFound", f'{NAMED} holds no plain text in key "HF_TOK'),
    ],
)
def test_a_model_says_what_is_wrong_with_its_secret(holding: Holding | None, reason: str, text: str) -> None:
    keys = keys_of(OPENED, lambda source: holding if source == ("default", "secrets", "hub") else None)
    assert keys.problem is not None and not keys.values
    assert keys.problem[0] == reason and keys.problem[1].startswith(text), keys.problem
    assert keys.passing == (reason == "WaitingForSecret")


def test_a_secret_that_holds_what_its_source_needs_is_taken() -> None:
    token, bucket = {"HF_TOKEN": "hf_x"}, {"AWS_ACCESS_KEY_ID": "a"}
    assert keys_of(OPENED, lambda _: Holding(200, token)) == Keys(token)
    assert keys_of(replace(OPENED, source="s3://b/m.gguf"), lambda _: Holding(200, bucket)) == Keys(bucket)
    assert keys_of(replace(OPENED, secret=None), lambda _: None) == Keys()
