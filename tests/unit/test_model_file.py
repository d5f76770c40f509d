"""State of a Model's file as its status tells it: in agreement with what its services say."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest
from test_decide import running
from test_resources import accepted, model, refused, service

from metal_supervisor.controller.controller_status import ModelFiles
from metal_supervisor.models.metadata import Reading
from metal_supervisor.spec import model_resource
from metal_supervisor.spec.gguf import Header
from metal_supervisor.spec.model_resource import read_artifact
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.sources import Artifact
from metal_supervisor.spec.types import ModelFile

READY = ModelFile("Ready", "/models/tiny.gguf", 10)
NOTHING = Reading(10, problem="it is no GGUF file")


class Held:
    """A store that looks after the given artifacts."""

    def __init__(self, files: Mapping[Artifact, ModelFile]) -> None:
        self._files = files

    def wants(self, artifact: Artifact) -> bool:
        return artifact in self._files

    def state(self, artifact: Artifact) -> ModelFile:
        return self._files.get(artifact, ModelFile("Checking"))


def told(
    written: dict[str, Any], records: Collection[Record] = (), reading: Reading | None = NOTHING, **files: ModelFile
) -> ModelFile:
    """`files`: `here` is what the store says of the Model's own artifact; `reading`: what is known of its header."""
    held = {read_artifact(written): files["here"]} if files else {}
    store: Any = Held(held)
    return ModelFiles(store, lambda _: reading).state(written, {(each.namespace, each.model) for each in records})


@pytest.mark.parametrize(
    "spec",
    [
        {"source": "models/foo.gguf"},
        {"source": ""},
        {"sha256": "short"},
        {"refreshPolicy": "Always"},
        {"source": "https://example.com/x.gguf", "format": "mlx"},
        {"mmproj": 5},
    ],
    ids=str,
)
def test_a_model_that_its_services_refuse_says_why_in_the_same_words(spec: dict[str, Any]) -> None:
    written = model(**spec)
    found, by_service = told(written), refused(service(), written)
    assert (found.phase, found.reason) == ("Failed", by_service.reason)
    assert by_service.message == f'Model "tiny": {found.message}'


@pytest.mark.parametrize("reason", ["ModelAttestationRejected", "SourceNotAllowed", "AReasonOfTomorrow", ""])
def test_a_model_that_the_operator_rejected_is_refused_with_its_services(reason: str) -> None:
    written = model(source="https://example.com/x.gguf")
    written["metadata"]["operatorFailed"] = {"reason": reason, "message": "unsigned"}
    found, by_service = told(written), refused(service(), written)
    assert (found.phase, found.reason) == ("Failed", "ModelSourceNotAllowed") and "unsigned" in found.message
    assert (by_service.reason, by_service.message) == (found.reason, f'Model "tiny": {found.message}')
    draft = model("draft", source="/d.gguf")
    draft["metadata"]["operatorFailed"] = written["metadata"]["operatorFailed"]
    resource = service(speculativeDecoding={"type": "draft", "draftModelRef": "draft"})
    if reason != "SourceNotAllowed":
        assert "draftModelRef" in refused(resource, model(), draft).message


@pytest.mark.parametrize("reason", ["SourceNotAllowed", "DownloadFailed", "InvalidFileSet"])
def test_a_model_that_only_the_operator_cannot_obtain_is_served_with_a_warning(reason: str) -> None:
    written = model()
    written["metadata"]["operatorFailed"] = {"reason": reason, "message": "not here"}
    ((word, text),) = accepted(service(), written).not_granted
    assert word == "ModelFailedInCluster" and f"{reason}: not here" in text


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"files": ["m.gguf"], "fileSha256": {"other.gguf": "a" * 64}}, "'other.gguf'] is neither in spec.files"),
        ({"files": ["m.gguf"], "fileSha256": {"m.gguf": "a" * 63}}, "'m.gguf'] must be 64 hexadecimal digits"),
        ({"files": ["m.gguf"], "fileSha256": {"m.gguf": 5}}, "'m.gguf'] must be 64 hexadecimal digits"),
        ({"files": ["m.gguf"], "fileSha256": ["a"]}, "spec.fileSha256 must be an object"),
        ({"files": ["../m.gguf"], "fileSha256": {"../m.gguf": "a" * 64}}, "not '../m.gguf'"),
        ({"format": "mlx", "files": ["../x"], "source": "/mlx"}, "not '../x'"),
    ],
    ids=str,
)
def test_a_digest_of_a_file_that_cannot_be_checked_is_refused_by_name(spec: dict[str, Any], message: str) -> None:
    assert message in refused(service(), model(**{"source": "hf://o/r", **spec})).message


def test_digests_are_part_of_the_request_and_only_where_there_are_some() -> None:
    plain, digests = {"source": "hf://o/r", "files": ["m.gguf"]}, {"m.gguf": "A" * 64}
    asked = [accepted(service(), model(**spec)).asked for spec in (plain, {**plain, "fileSha256": {}})]
    assert asked[0] == asked[1] != accepted(service(), model(**plain, fileSha256=digests)).asked
    found = accepted(service(), model(**plain, fileSha256=digests)).model.artifact
    assert found.expected(("m.gguf",)) == ("a" * 64,)


def test_a_model_is_used_by_services_of_its_own_namespace() -> None:
    used, namesake = model("phi"), model("phi", namespace="b")
    assert told(used, [running()]).phase == "Checking"
    assert told(namesake, [running()]).phase == "Pending", "the one in use is of another namespace"
    assert told(namesake, [running()], here=READY) == READY, "the same file"


def test_a_file_that_is_not_what_the_format_wants_is_refused() -> None:
    assert told(model(format="mlx"), here=READY).reason == "InvalidModelFile"


def test_a_file_that_is_here_is_told_with_what_its_header_says() -> None:
    header = Header({"general.architecture": "llama"}, 0, 0, 0)
    assert told(model(), reading=Reading(10, header), here=READY).gguf == {"architecture": "llama"}
    assert told(model(), reading=NOTHING, here=READY) == READY
    assert told(model(), reading=None, here=READY).phase == "Checking", "a status without it would be written first"


def test_a_model_at_which_our_code_fails_keeps_no_other_from_being_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is of all Models: it was not written, and each pass failed at its end."""

    def fails(*_: object) -> Any:
        raise RuntimeError("can't start new thread")

    held = {read_artifact(model()): READY}
    assert ModelFiles(Held(held), fails).state(model(), ()).phase == "Checking"
    monkeypatch.setattr(model_resource, "read_model", fails)
    found = told(model(), here=READY)
    assert (found.phase, found.reason, found.message) == ("Failed", "InvalidSpec", "it cannot be read: RuntimeError")
