"""Answers of conf/crds to values of a wrong form: an example instead of a regular expression, in both servers alike."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.server import OURS, crd_directory
from tests.contract.api import Space
from tests.contract.things import isvc, model

pytestmark = pytest.mark.skipif(crd_directory() != OURS, reason="rules of conf/crds: METAL_TEST_CRDS=ours")
SOURCE = "hf://o/r/m.gguf"


def _budget(text: str) -> dict[str, Any]:
    return {"source": SOURCE, "hardware": {"accelerator": "metal", "memoryBudget": text}}


@pytest.mark.parametrize(
    ("spec", "field", "example"),
    [
        ({"source": "my model"}, "spec.source", "give hf://OWNER/NAME/FILE.gguf"),
        ({"source": SOURCE, "sha256": "abc"}, "spec.sha256", "64 hexadecimal digits"),
        *((_budget(text), "spec.hardware.memoryBudget", "such as 16Gi") for text in ("16GB", "8 gigs", "lots", "-1Gi")),
    ],
)
def test_a_field_of_a_model_is_refused_with_an_example(
    space: Space, spec: dict[str, Any], field: str, example: str
) -> None:
    refused = space.post("models", model(**spec))
    assert refused.outline == (422, "Invalid") and refused.causes == {field: "FieldValueInvalid"}
    assert example in refused.message and "^" not in refused.message
    assert space.apply("models", model(**spec), "m").message == refused.message


@pytest.mark.parametrize("field", ["hotCacheMaxSize", "pagedSSDCacheMaxSize"])
@pytest.mark.parametrize("text", ["8Gi", "8", "eight"])
def test_a_size_of_a_cache_is_refused_with_an_example(space: Space, field: str, text: str) -> None:
    refused = space.post("inferenceservices", isvc(**{field: text}))
    assert refused.outline == (422, "Invalid") and refused.causes == {f"spec.{field}": "FieldValueInvalid"}
    assert "give a size such as" in refused.message


def test_values_of_the_right_form_are_taken(space: Space) -> None:
    sources = (
        SOURCE,
        "hf://o/r",
        "hf://o/r:Q4_K_M",
        "o/r",
        "https://h/m.gguf",
        "https://ollama.com/library/qwen3:8b",
        "s3://bucket/key",
        "file:///m.gguf",
        "/models/m.gguf",
        "/Volumes/My Passport/m #1.gguf",
        "pvc://claim/m",
    )
    for number, source in enumerate(sources):
        assert space.post("models", model(f"s{number}", source=source, sha256="aB" * 32)).code == 201, source
    for number, text in enumerate(("16Gi", "24G", "1.5Gi", "17179869184", "16e9", "512Mi", "")):
        assert space.post("models", model(f"b{number}", **_budget(text))).code == 201, text
    assert space.post("inferenceservices", isvc(hotCacheMaxSize="0.5GB", pagedSSDCacheMaxSize="100GB")).code == 201
    assert space.post("inferenceservices", isvc("none", hotCacheMaxSize="", pagedSSDCacheMaxSize="")).code == 201
