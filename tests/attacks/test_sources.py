"""Sources that send a Secret to a host of their choice, and files that can be changed on the way."""

from __future__ import annotations

import functools
import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from metal_supervisor.models.download_job import DownloadJob
from metal_supervisor.models.listing import Unusable
from metal_supervisor.models.remote.origins import locate
from metal_supervisor.models.remote.source_policy import SourcePolicy
from metal_supervisor.models.remote.web import Client
from metal_supervisor.models.store_context import StoreContext, Terms
from metal_supervisor.spec.references import Holding, keys_of, read_hosts
from metal_supervisor.spec.sources import Artifact, canonical
from metal_supervisor.spec.types import ModelFile
from tests.support.system import tiny_gguf

SECRET = ("team", "token")
VALUES = {"HF_TOKEN": "hunter2"}
FOREIGN = (
    "https://evil.example/m.gguf",
    "http://evil.example/m.gguf",
    "https://huggingface.co.evil.example/o/r/m.gguf",
    "https://huggingface.co@evil.example/m.gguf",
    "https://evil.example/huggingface.co/m.gguf",
    "https://datasets.huggingface.co/m.gguf",
    "https://HUGGINGFACE.CO.evil",
    "https://evil.example:443/m.gguf",
    "https://127.0.0.1/m.gguf",
    "https://[::1]/m.gguf",
    "https://evil.example/m.gguf?host=huggingface.co",
    "https://evil.example#huggingface.co",
)


def keys(source: str, annotation: object = None) -> str:
    """Why a Secret is not sent for a source, "" if it is."""
    held = Holding(200, VALUES, hosts=read_hosts(annotation))
    found = keys_of(Artifact(source, secret=SECRET), lambda _: held)
    assert found.problem or found.values == VALUES
    assert not (found.problem and found.values), "what is refused is not handed on"
    return found.problem[1] if found.problem else ""


@pytest.mark.parametrize("written", FOREIGN)
@pytest.mark.parametrize("annotation", [None, "", " , ", 5, "models.example.com"])
def test_a_secret_goes_to_no_host_that_its_owner_did_not_name(written: str, annotation: object) -> None:
    try:
        source = canonical(written)
    except Exception as error:  # noqa: BLE001 - refused before any Secret is looked at
        assert type(error).__name__ == "Bad"
        return
    if source.startswith("hf://"):
        pytest.fail(f"{written} is taken for the Hub")
    said = keys(source, annotation)
    assert "metal-supervisor.io/hosts" in said and "hunter2" not in said


def test_a_secret_goes_where_its_owner_says() -> None:
    web = "https://models.example.com/m.gguf"
    assert keys("hf://o/r@main/m.gguf") == keys("s3://bucket/m.gguf") == keys("https://huggingface.co/x/m.gguf") == ""
    assert keys(web, "models.example.com") == keys(web, " a.b , MODELS.example.com. ") == ""
    assert keys("https://models.example.com:8443/m.gguf", "models.example.com") == ""
    assert "huggingface.co" in keys("hf://o/r@main/m.gguf", "models.example.com"), "what it names counts alone"
    assert keys("https://sub.models.example.com/m.gguf", "models.example.com"), "a host, not what is below it"


# ── plain http ───────────────────────────────────────────────────────────────────────────────────


def fetched(base: Path, url: str, sha256: str = "", private: tuple[str, ...] = ()) -> ModelFile:
    """What the store's own job makes of a source on this machine, whose addresses count as public. Raises Unusable."""
    shelf = StoreContext(base, Terms(Public(private=private)))
    return DownloadJob(Artifact(url, sha256=sha256), shelf, lambda _: None, lambda *_: None).ready()


class Public(SourcePolicy):
    """Rules of a Mac on which loopback is the internet."""

    def allows_address(self, *_: object, **__: object) -> bool:
        return True


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[str, bytes]]:
    """(URL of a directory on a server of this machine, the model in it)."""
    directory = tmp_path / "web"
    directory.mkdir()
    for name in ("m.gguf", "m-00001-of-00002.gguf", "m-00002-of-00002.gguf"):
        tiny_gguf.write_tiny_gguf(directory / name)
    page = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(directory))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", (directory / "m.gguf").read_bytes()
        server.shutdown()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_plain_http_needs_a_digest_or_a_host_that_is_named(tmp_path: Path, host: str, web: tuple[str, bytes]) -> None:
    url, digest = f"{web[0].replace('127.0.0.1', host)}/m.gguf", hashlib.sha256(web[1]).hexdigest()
    with pytest.raises(Unusable) as caught:
        fetched(tmp_path / "a", url)
    assert caught.value.reason == "SourceNotAllowed" and "spec.sha256" in str(caught.value)
    assert fetched(tmp_path / "b", url, digest).phase == "Ready"
    assert fetched(tmp_path / "c", url, private=("127.0.0.0/8", "::1")).phase == "Ready"
    assert fetched(tmp_path / "d", url, private=(host,)).phase == "Ready"
    with pytest.raises(Unusable, match="plain http"):
        fetched(tmp_path / "e", url, private=("example.com", "10.0.0.0/8"))
    with pytest.raises(Unusable, match="plain http"):  # a digest is of one file
        fetched(tmp_path / "f", url.replace("m.gguf", "m-00001-of-00002.gguf"), digest)


def test_no_token_is_sent_where_anyone_on_the_way_can_read_it(web: tuple[str, bytes]) -> None:
    artifact = Artifact(f"{web[0]}/m.gguf", sha256=hashlib.sha256(web[1]).hexdigest(), secret=SECRET)
    with pytest.raises(Unusable) as caught:
        locate(artifact, VALUES, Client(Public()), "https://huggingface.co")
    assert caught.value.reason == "SourceNotAllowed" and "use https" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    named = Client(Public(private=("127.0.0.0/8",)))
    assert locate(artifact, VALUES, named, "https://huggingface.co").headers == {"Authorization": "Bearer hunter2"}
