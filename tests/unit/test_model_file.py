"""State of a Model's file as its status tells it: in agreement with what its services say."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest
from test_decide import running
from test_resources import model, refused, service

from metal_supervisor.controller.controller_status import ModelFiles
from metal_supervisor.spec.model_resource import read_artifact
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.sources import Artifact
from metal_supervisor.spec.types import ModelFile

READY = ModelFile("Ready", "/models/tiny.gguf", 10)


class Held:
    """A store that looks after the given artifacts."""

    def __init__(self, files: Mapping[Artifact, ModelFile]) -> None:
        self._files = files

    def wants(self, artifact: Artifact) -> bool:
        return artifact in self._files

    def state(self, artifact: Artifact) -> ModelFile:
        return self._files.get(artifact, ModelFile("Checking"))


def told(written: dict[str, Any], records: Collection[Record] = (), **files: ModelFile) -> ModelFile:
    """`files`: `here` is what the store says of the Model's own artifact."""
    held = {read_artifact(written): files["here"]} if files else {}
    return ModelFiles(Held(held)).state(written, {(each.namespace, each.model) for each in records})


@pytest.mark.parametrize(
    "spec",
    [
        {"source": "models/foo.gguf"}, {"source": ""}, {"sha256": "short"}, {"refreshPolicy": "Always"},
        {"source": "https://example.com/x.gguf", "format": "mlx"}, {"mmproj": 5},
    ],
    ids=str,
)
def test_a_model_that_its_services_refuse_says_why_in_the_same_words(spec: dict[str, Any]) -> None:
    written = model(**spec)
    found, by_service = told(written), refused(service(), written)
    assert (found.phase, found.reason) == ("Failed", by_service.reason)
    assert by_service.message == f'Model "tiny": {found.message}'


def test_a_model_is_used_by_services_of_its_own_namespace() -> None:
    used, namesake = model("phi"), model("phi", namespace="b")
    assert told(used, [running()]).phase == "Checking"
    assert told(namesake, [running()]).phase == "Pending", "the one in use is of another namespace"
    assert told(namesake, [running()], here=READY) == READY, "the same file"


def test_a_file_that_is_not_what_the_format_wants_is_refused() -> None:
    assert told(model(format="mlx"), here=READY).reason == "InvalidModelFile"
