"""What Ollama's registry may answer when it is asked where a model is; garbage of any kind is told as such."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from daemon_support import Answer, Stand, said, standing

from metal_supervisor.models.listing import Unusable
from metal_supervisor.models.remote import ollama_library, web
from metal_supervisor.models.remote.ollama_library import MODEL, blob_url
from metal_supervisor.models.remote.source_policy import SourcePolicy
from metal_supervisor.models.remote.web import Client
from tests.support.system import free_ports

SOURCE = "https://ollama.com/library/phi4-mini:3.8b"
PATH = "/v2/library/phi4-mini/manifests/3.8b"
DIGEST = "sha256:" + "a" * 64


@pytest.fixture
def stand() -> Iterator[Stand]:
    with standing() as made:
        yield made


def found(stand: Stand, source: str = SOURCE) -> str:
    return blob_url(source, stand.url, Client(SourcePolicy(lax=True)))


def manifest(*layers: object) -> Answer:
    return said(200, {"layers": layers})


MODEL_LAYER = {"mediaType": MODEL, "digest": DIGEST}
OTHER_LAYER = {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:" + "b" * 64}


@pytest.mark.parametrize(
    ("source", "path"),
    [
        (SOURCE, PATH),
        ("https://ollama.com/someone/model", "/v2/someone/model/manifests/latest"),
        ("https://registry.ollama.ai/library/tiny", "/v2/library/tiny/manifests/latest"),
    ],
)
def test_the_layer_with_the_model_is_found(stand: Stand, source: str, path: str) -> None:
    stand.answers["GET", path] = manifest(OTHER_LAYER, MODEL_LAYER)
    assert found(stand, source) == f"{stand.url}{path.partition('/manifests/')[0]}/blobs/{DIGEST}"


@pytest.mark.parametrize(
    "answer",
    [
        Answer(200),
        Answer(200, b"<html>"),
        Answer(200, b"\xff\xfe"),
        Answer(200, b"[" * 200_000),
        said(200, []),
        said(200, None),
        said(200, {}),
        said(200, {"layers": None}),
        said(200, {"layers": "sha256:"}),
        manifest(),
        manifest("a", 1),
        manifest(OTHER_LAYER),
        manifest({"mediaType": MODEL}),
        manifest({"mediaType": MODEL, "digest": None}),
        manifest({"mediaType": MODEL, "digest": "../../../etc/passwd"}),
    ],
)
def test_garbage_names_no_model(stand: Stand, answer: Answer) -> None:
    stand.answers["GET", PATH] = answer
    with pytest.raises(Unusable, match=r"what Ollama's library says of phi4-mini:3\.8b names no model"):
        found(stand)


def test_a_model_that_is_not_there_is_told_with_the_status(stand: Stand) -> None:
    with pytest.raises(Unusable, match=r"has no phi4-mini:3\.8b \(it answered 404\)"):
        found(stand)
    stand.answers["GET", PATH] = Answer(500, b"oops")
    with pytest.raises(Unusable, match="it answered 500"):
        found(stand)


def test_a_registry_that_is_away_stalls_or_is_cut_off_does_not_answer(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ollama_library, "TIMEOUT_S", 0.2)
    for answer in (Answer(200, b"{", promised_bytes=100), Answer(200, b"{", promised_bytes=100, stalls=True)):
        stand.answers["GET", PATH] = answer
        with pytest.raises(Unusable, match="does not answer"):
            found(stand)
    with pytest.raises(Unusable, match="does not answer"):
        blob_url(SOURCE, f"http://127.0.0.1:{free_ports(1)[0]}", Client(SourcePolicy(lax=True)))


def test_a_vast_manifest_is_not_read_to_its_end(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "LONGEST_PAGE_BYTES", 100)
    stand.answers["GET", PATH] = manifest(*[OTHER_LAYER] * 1000, MODEL_LAYER)
    with pytest.raises(Unusable, match="too long"):
        found(stand)
