"""Rules that the definitions of our kinds write in CEL, in both sets of them."""

from __future__ import annotations

import pytest

from tests.contract.api import Space
from tests.contract.things import isvc

SLO = {"indicator": "latency", "objective": "99", "latencyThreshold": "1"}


@pytest.mark.parametrize(
    ("spec", "field", "message"),
    [
        ({"slo": {"indicator": "latency", "objective": "99"}}, "spec.slo", "latencyThreshold is required"),
        ({"slo": {**SLO, "objective": "9"}}, "spec.slo.objective", '"9": objective must be a number'),
        ({"speculativeDecoding": {"type": "draft-simple"}}, "spec.speculativeDecoding", "needs draft weights"),
        (
            {"speculativeDecoding": {"type": "draft-simple", "draftModelRef": "x", "draftModel": "y"}},
            "spec.speculativeDecoding",
            "set only one of draftModelRef",
        ),
        (
            {"speculativeDecoding": {"type": "ngram-simple", "draftModelRef": "x"}},
            "spec.speculativeDecoding",
            "are only valid for the draft-model types",
        ),
    ],
)
def test_what_breaks_a_rule_is_refused(space: Space, spec: dict[str, object], field: str, message: str) -> None:
    refused = space.post("inferenceservices", isvc(**spec))
    assert refused.outline == (422, "Invalid") and refused.causes == {field: "FieldValueInvalid"}
    assert refused.body["details"]["causes"][0]["message"].startswith("Invalid value: ") and message in refused.message
    assert space.apply("inferenceservices", isvc(**spec), "m").message == refused.message


def test_what_keeps_the_rules_is_taken(space: Space) -> None:
    assert space.post("inferenceservices", isvc("a", slo=SLO)).code == 201
    assert space.post("inferenceservices", isvc("b", speculativeDecoding={"type": "ngram-simple"})).code == 201
    draft = {"type": "draft-simple", "draftModelRef": "x"}
    assert space.post("inferenceservices", isvc("c", speculativeDecoding=draft)).code == 201
    broken = space.patch("inferenceservices", "c", {"spec": {"speculativeDecoding": {"draftModelRef": None}}})
    assert broken.causes == {"spec.speculativeDecoding": "FieldValueInvalid"}


def test_rules_wait_until_the_rest_is_in_order(space: Space) -> None:
    refused = space.post("inferenceservices", isvc(slo={"indicator": "latency", "objective": "99"}, runtime="odd"))
    assert refused.causes["spec.runtime"] == "FieldValueNotSupported" and "spec.slo" not in refused.causes
