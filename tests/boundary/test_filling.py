"""The store over a bad line: one download for each file, resumed, taken over, proven, and never of a link."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import socket
import subprocess
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from uneven_server import File, Uneven, serving

from metal_supervisor.models import store as store_module
from metal_supervisor.models.disk_space import KEPT_FREE_BYTES
from metal_supervisor.models.model_directory import ModelDirectory
from metal_supervisor.models.places import Places
from metal_supervisor.models.remote import fetch as fetch_module
from metal_supervisor.models.remote.source_policy import SourcePolicy
from metal_supervisor.models.store import Store
from metal_supervisor.models.store_context import Terms
from metal_supervisor.spec.model_resource import read_model
from metal_supervisor.spec.sources import NO_KEYS, Artifact, Keys, canonical
from metal_supervisor.spec.types import Model, ModelFile
from tests.support.hub import Hub
from tests.support.s3 import Server as Bucket
from tests.support.system import eventually

NEAR = Terms(SourcePolicy(private=("127.0.0.0/8", "localhost")))
MODEL = b"GGUF" + random.Random(1).randbytes(300_000)
WITHIN_S = 30.0
Usage = namedtuple("Usage", "total used free")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Home:
    """A store on a disk that lasts, whoever runs it."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.terms = directory, NEAR
        self.stores: list[Store] = []
        self.rings = 0
        self.store = self._made()

    def restart(self) -> Store:
        """Another process, as far as anybody can tell; the one before is stopped."""
        self.stop()
        self.store = self._made()
        return self.store

    def _made(self) -> Store:
        self.stores.append(Store(self.directory, self._ring, self.terms))
        return self.stores[-1]

    def beside(self) -> Home:
        """Another process at the same time."""
        other = Home(self.directory)
        self.stores.append(other.store)
        return other

    def _ring(self) -> None:
        self.rings += 1

    def stop(self) -> None:
        for each in self.stores:
            each.want({})
        eventually(lambda: not any(t.name == "store" for t in threading.enumerate()), WITHIN_S, "threads to end")

    def want(self, artifact: Artifact, keys: Keys = NO_KEYS) -> None:
        self.store.want({artifact: keys})
        self.store.give_leave(artifact)

    def until(self, artifact: Artifact, phase: str, text: str = "") -> ModelFile:
        def there() -> ModelFile | None:
            found = self.store.state(artifact)
            return found if found.phase == phase and text in found.message else None

        found = eventually(there, WITHIN_S, f"{phase} {text}: {self.store.state(artifact)}")
        assert isinstance(found, ModelFile)
        return found

    def ready(self, artifact: Artifact, keys: Keys = NO_KEYS) -> ModelFile:
        self.want(artifact, keys)
        return self.until(artifact, "Ready")

    def failed(self, artifact: Artifact, reason: str, text: str, keys: Keys = NO_KEYS) -> ModelFile:
        self.want(artifact, keys)
        found = self.until(artifact, "Failed", text)
        assert found.reason == reason and "hunter2" not in found.message
        return found

    def slot(self, artifact: Artifact) -> Path:
        return self.directory / artifact.slot


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    monkeypatch.setattr(store_module, "FIRST_RETRY_S", 0.05)
    monkeypatch.setattr(store_module, "FIRST_AGAIN_S", 0.02)
    made = Home(tmp_path / "models")
    yield made
    made.stop()


@pytest.fixture
def web() -> Iterator[Uneven]:
    with serving() as server:
        server.files = {"/m.gguf": File(MODEL)}
        yield server


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub({"o/r": REPOSITORY}) as server:
        yield server


REPOSITORY = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "nested/extra.json": b"{}",
    "empty.txt": b"",
    "model-00001-of-00002.safetensors": random.Random(5).randbytes(200_000),
    "model-00002-of-00002.safetensors": random.Random(6).randbytes(200_000),
    "README.md": b"no",
}


def of(source: str, **more: Any) -> Artifact:
    return Artifact(canonical(source), **more)


def link_to(web: Uneven, **more: Any) -> Artifact:
    return of(f"{web.url}/m.gguf", **more)


# ── once ─────────────────────────────────────────────────────────────────────────────────────────


def test_two_stores_that_want_one_file_fetch_it_once(home: Home, web: Uneven) -> None:
    """The controller, and somebody at a terminal: the lock is between processes, so two descriptors do as well."""
    artifact, web.files["/m.gguf"].stalls_at = link_to(web), 1 << 16
    home.want(artifact)
    assert web.stalled.wait(WITHIN_S)
    other = home.beside()
    other.want(artifact)
    other.until(artifact, "Downloading", "another fetch of it is under way, 0 MiB of a file are here")
    web.hold.set()
    assert other.until(artifact, "Ready") == home.until(artifact, "Ready")
    assert web.sent() == len(MODEL) and len(web.asked) == 1


def test_shards_of_two_editions_are_not_put_together(home: Home, web: Uneven) -> None:
    """Of equal size, and without a digest: only what the server said of the first one tells them apart."""
    first, second = (f"/s-0000{number}-of-00002.gguf" for number in (1, 2))
    web.files |= {first: File(MODEL, '"old-1"'), second: File(MODEL, '"old-2"', stalls_at=1 << 14)}
    artifact = of(f"{web.url}{first}")
    home.want(artifact)
    assert web.stalled.wait(WITHIN_S)
    home.store.want({})
    fresh = MODEL[:-8] + b"edition2"
    web.files |= {first: File(fresh, '"new-1"'), second: File(fresh, '"new-2"')}
    web.hold.set()
    path = Path(home.ready(artifact).path)
    assert [each.read_bytes() == fresh for each in (path, path.with_name(second[1:]))] == [True, True]


def test_one_that_waits_for_another_goes_on_where_that_one_died(home: Home, web: Uneven) -> None:
    artifact, web.files["/m.gguf"].stalls_at = link_to(web), 1 << 16
    home.want(artifact)
    assert web.stalled.wait(WITHIN_S)
    other = home.beside()
    other.want(artifact)
    other.until(artifact, "Downloading", "another fetch")
    web.files["/m.gguf"].stalls_at = -1
    home.store.want({})
    other.until(artifact, "Ready")
    assert web.starts() == [None, 1 << 16]


def test_spellings_of_one_file_are_one_download(home: Home, hub: Hub) -> None:
    hub.upload("1" * 40, {"o/r": {"m.gguf": MODEL}})
    home.terms = replace(NEAR, hub=hub.url)
    home.restart()
    spellings = ["hf://o/r", "https://huggingface.co/o/r/blob/main", "https://hf.co/o/r/resolve/main"]
    wanted = {of(f"{each}/m.gguf"): NO_KEYS for each in spellings}
    assert len(wanted) == 1
    home.ready(*wanted)
    assert hub.sent("m.gguf") == len(MODEL)


def test_no_more_than_so_many_are_fetched_at_once(home: Home, web: Uneven) -> None:
    home.terms = replace(NEAR, at_once=2)
    home.restart()
    web.files = {f"/{name}.gguf": File(MODEL, stalls_at=1 << 16) for name in "abcd"}
    artifacts = [of(f"{web.url}/{name}.gguf") for name in "abcd"]
    home.store.want(dict.fromkeys(artifacts, NO_KEYS))
    for each in artifacts:
        home.store.give_leave(each)

    def waiting() -> list[Artifact]:
        return [each for each in artifacts if "2 other models are being fetched" in home.store.state(each).message]

    eventually(lambda: len(waiting()) == 2 and len(web.asked) == 2, WITHIN_S, "two to come, and two to wait")
    home.store.want({waiting()[0]: NO_KEYS})  # the others are dropped, so there is room
    eventually(lambda: len(web.asked) >= 3, WITHIN_S, "the third to come")
    web.hold.set()


def test_a_namespace_with_one_model_does_not_wait_for_all_that_another_has(home: Home, web: Uneven) -> None:
    home.terms = replace(NEAR, at_once=1)
    home.restart()
    many, few = [f"many-{number}" for number in range(8)], ["few-0", "few-1"]
    web.files = {f"/{name}.gguf": File(MODEL) for name in (*many, *few)}
    web.files["/many-0.gguf"].stalls_at = 1 << 16
    artifacts = {name: of(f"{web.url}/{name}.gguf") for name in (*many, *few)}

    def want(names: list[str]) -> None:
        wanted = {each: NO_KEYS for name, each in artifacts.items() if name in names}
        home.store.want(wanted, {each: frozenset({name[:4]}) for name, each in artifacts.items()})
        for each in wanted:
            home.store.give_leave(each)

    def waits(name: str) -> bool:
        return "it waits for its turn" in home.store.state(artifacts[name]).message

    want(many[:1])
    assert web.stalled.wait(WITHIN_S)
    want(many)
    eventually(lambda: all(map(waits, many[1:])), WITHIN_S, "the others to wait")
    want([*many, *few])
    eventually(lambda: all(map(waits, few)), WITHIN_S, "the other namespace's to wait")
    web.hold.set()
    for artifact in artifacts.values():
        home.until(artifact, "Ready")
    order = [each.path[1:5] for each in web.asked]
    assert order == ["many", "few-", "many", "few-", *["many"] * 6], order


def test_one_that_is_dropped_lets_go_within_a_second(home: Home, web: Uneven) -> None:
    artifact, web.files["/m.gguf"].stalls_at = link_to(web), 1 << 16
    home.want(artifact)
    assert web.stalled.wait(WITHIN_S)
    home.store.want({})
    eventually(lambda: not any(t.name == "store" for t in threading.enumerate()), 1.0, "it to end")
    assert fetch_module.partial(home.slot(artifact) / "m.gguf").stat().st_size == 1 << 16


def test_one_that_is_dropped_while_its_hub_is_silent_lets_go_within_a_second(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(WITHIN_S)
        home.terms = replace(NEAR, hub=f"http://127.0.0.1:{silent.getsockname()[1]}")
        home.restart()
        home.want(of("hf://o/r@main/m.gguf"))
        peer, _ = silent.accept()
        with peer:
            assert peer.recv(1 << 16).startswith(b"HEAD /o/r/")
            home.store.want({})
            eventually(lambda: not any(t.name == "store" for t in threading.enumerate()), 1.0, "it to end")


# ── resumed and whole ────────────────────────────────────────────────────────────────────────────


def test_a_line_that_is_cut_again_and_again_is_no_failure(home: Home, web: Uneven) -> None:
    web.files["/m.gguf"].cuts = [40_000] * 6
    home.ready(link_to(web))
    assert web.sent() == len(MODEL) and web.starts() == [None, *range(40_000, 280_000, 40_000)]


def test_a_line_that_brings_nothing_is_one_in_the_end(home: Home, web: Uneven) -> None:
    web.files["/m.gguf"].cuts = [40_000] + [0] * 50
    artifact = link_to(web)
    found = home.failed(artifact, "DownloadFailed", "the line was cut; tried again in")
    assert found.phase == "Failed" and home.slot(artifact).exists()
    web.files["/m.gguf"].cuts = []
    home.until(artifact, "Ready")
    assert web.sent() == len(MODEL)


def test_a_repository_that_was_cut_goes_on_with_what_is_missing_and_starts_offline(home: Home, hub: Hub) -> None:
    home.terms = replace(NEAR, hub=hub.url)
    home.restart()
    artifact = of("o/r", directory=True)
    hub.cut_after_bytes, hub.cut_times = 50_000, 2
    found = home.ready(artifact)
    fetched = {name for name in REPOSITORY if name != "README.md"}
    assert {str(each.relative_to(found.path)) for each in Path(found.path).rglob("*") if each.is_file()} == fetched
    for name in fetched:
        assert (Path(found.path) / name).read_bytes() == REPOSITORY[name]
        assert hub.sent(name) == len(REPOSITORY[name])
    requests = len(hub.log)
    home.restart()
    assert home.ready(artifact) == found and len(hub.log) == requests


def test_a_repository_is_ready_only_when_all_of_it_is_here(home: Home, hub: Hub) -> None:
    home.terms = replace(NEAR, hub=hub.url)
    home.restart()
    artifact = of("o/r", directory=True)
    hub.forced_status, hub.forced_times, hub.forced_path = 500, 10_000, "/cdn/o/r/" + hub.commit + "/model-00002"
    home.failed(artifact, "DownloadFailed", "answered 500")
    assert home.store.here(artifact) is None and ModelDirectory(home.directory, artifact.slot).model_path() is None
    home.restart()
    assert home.store.here(artifact) is None
    hub.forced_status = 0
    home.ready(artifact)
    assert hub.sent("model-00001-of-00002.safetensors") == 200_000


def test_a_link_that_is_too_old_is_asked_for_anew(home: Home, hub: Hub) -> None:
    hub.upload("1" * 40, {"o/r": {"m.gguf": MODEL}})
    home.terms = replace(NEAR, hub=hub.url)
    home.restart()
    hub.cut_after_bytes, hub.cut_times = 100_000, 1
    hub.forced_status, hub.forced_times, hub.forced_path = 0, 1, "/cdn/"
    artifact = of("hf://o/r/m.gguf")
    home.ready(artifact)
    assert hub.sent("m.gguf") == len(MODEL)


def test_a_model_of_any_name_is_looked_at_before_it_is_kept(home: Home, web: Uneven) -> None:
    """A login page that was kept as the model would never be fetched again."""
    web.files["/latest"] = File(b"<!DOCTYPE html>log in")
    artifact = of(f"{web.url}/latest?sig=hunter2")
    home.failed(artifact, "InvalidModelFile", "is a web page")
    web.files["/latest"] = File(MODEL)
    home.until(artifact, "Ready")


@pytest.mark.parametrize(
    "name",
    ["slot.json", "SLOT.json", ".lock", ".Lock", ".used", "m.gguf.partial", "m.gguf.PARTIAL", "m.gguf.partial.json"],
)
def test_no_model_is_called_like_something_of_the_store(home: Home, web: Uneven, name: str) -> None:
    web.files[f"/{name}"] = File(MODEL)
    home.failed(of(f"{web.url}/{name}"), "InvalidModelFile", "is no name of a file within the model store")
    assert web.asked == []


@pytest.mark.parametrize("name", ["..%2F..%2Fx.gguf", "%2Fetc%2Fx.gguf", "..%5Cx.gguf", "%00x.gguf", "a%0Ab.gguf"])
def test_no_name_leads_out_of_the_store(home: Home, web: Uneven, name: str) -> None:
    web.files[f"/{name}"] = File(MODEL)
    artifact = of(f"{web.url}/{name}")
    found = Path(home.ready(artifact).path)
    assert found.parent == home.slot(artifact) and found.name.isprintable() and "/" not in found.name
    assert [each.name for each in home.directory.iterdir()] == [artifact.slot]


@pytest.mark.parametrize("name", ["../x.json", "/etc/x.json", "a/../../x.json", "a\\x.json", "x\n.json"])
def test_no_name_of_a_repository_leads_out_of_it(home: Home, hub: Hub, name: str) -> None:
    hub.extra_names = (name,)
    home.terms = replace(NEAR, hub=hub.url)
    home.restart()
    home.failed(of("o/r", directory=True), "InvalidModelFile", "which would lead out of its directory")
    assert not hub.sent(".json")


# ── digests ──────────────────────────────────────────────────────────────────────────────────────


def test_a_mismatch_is_remembered_until_the_model_says_something_else(home: Home, web: Uneven) -> None:
    wrong, right = link_to(web, sha256="a" * 64), link_to(web, sha256=sha256(MODEL))
    home.failed(wrong, "ModelDigestMismatch", f"and has {sha256(MODEL)}")
    bodies, heads = len(web.asked), web.heads
    home.store.look_again([wrong])
    home.restart()
    home.failed(wrong, "ModelDigestMismatch", "it is not fetched again until that changes")
    home.store.look_again([wrong])
    assert (len(web.asked), web.heads) == (bodies, heads) == (1, 1)
    home.ready(right)
    assert len(web.asked) == 2


def test_a_mismatch_that_the_hub_tells_costs_no_byte(home: Home, hub: Hub) -> None:
    hub.upload("1" * 40, {"o/r": {"m.gguf": MODEL}})
    home.terms = replace(NEAR, hub=hub.url)
    home.restart()
    home.failed(of("hf://o/r/m.gguf", sha256="a" * 64), "ModelDigestMismatch", "nothing was fetched")
    assert hub.sent("m.gguf") == 0


def test_a_file_that_the_hub_sends_wrong_is_not_kept(home: Home, hub: Hub) -> None:
    hub.upload("1" * 40, {"o/r": {"m.gguf": MODEL}})
    hub.corrupt = True
    home.terms = replace(NEAR, hub=hub.url)
    home.restart()
    artifact = of("hf://o/r/m.gguf")
    first = home.failed(artifact, "ModelDigestMismatch", f"should have sha256 {sha256(MODEL)}")
    assert not list(home.slot(artifact).glob("*.gguf*"))
    hub.corrupt = False
    home.restart()
    later = home.failed(artifact, "ModelDigestMismatch", "it is not fetched again until that changes")
    for told in (first, later):  # nothing in the Model can be changed
        assert f"metal-supervisor models rm {artifact.slot}" in told.message


@pytest.mark.parametrize("first", ["", "right"])
def test_a_digest_that_is_edited_after_the_fetch_is_compared_with_the_file(home: Home, web: Uneven, first: str) -> None:
    right, wrong = link_to(web, sha256=sha256(MODEL)), link_to(web, sha256="a" * 64)
    path = Path(home.ready(right if first else link_to(web)).path)
    bodies, heads = len(web.asked), web.heads
    message = home.failed(wrong, "ModelDigestMismatch", f"and has {sha256(MODEL)}").message
    assert "a" * 64 in message and f"models rm {wrong.slot}" in message
    home.ready(right)
    assert (len(web.asked), web.heads) == (bodies, heads) and path.read_bytes() == MODEL


def test_a_local_file_is_hashed_once_and_again_when_it_changes(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, hashed = tmp_path / "m.gguf", []
    path.write_bytes(MODEL)
    real = fetch_module.digest
    monkeypatch.setattr(fetch_module, "digest", lambda *at: (hashed.append(at[0]), real(*at))[1])
    right, wrong = of(str(path), sha256=sha256(MODEL)), of(str(path), sha256="a" * 64)
    home.store.want({right: NO_KEYS, wrong: NO_KEYS})  # two jobs, and one slot
    assert home.until(right, "Ready").path == str(path)
    assert home.until(wrong, "Failed").reason == "ModelDigestMismatch"
    home.store.look_again([right, wrong])
    home.restart()
    home.ready(right)
    assert hashed == [path]
    path.write_bytes(MODEL + b"x")
    home.restart()
    assert sha256(MODEL + b"x") in home.failed(right, "ModelDigestMismatch", "correct one of them").message
    path.write_bytes(MODEL)
    home.store.look_again([right])
    home.until(right, "Ready")


# ── spec.fileSha256 ──────────────────────────────────────────────────────────────────────────────

SHARDS = {f"m-0000{number}-of-00002.gguf": MODEL[:-number] for number in (1, 2)}
MLX = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": (2).to_bytes(8, "little") + b"{}" + random.Random(6).randbytes(1000),
}


@contextlib.contextmanager
def ended(bucket: Bucket) -> Iterator[Bucket]:
    try:
        yield bucket
    finally:
        bucket.end()


def with_digests(source: str, files: dict[str, bytes], wrong: str, **spec: Any) -> Model:
    """A Model that names the digest of each file; that of `wrong` is another one."""
    digests = {name: "a" * 64 if name == wrong else sha256(data) for name, data in files.items()}
    written = {"source": source, "files": list(files), "fileSha256": digests, **spec}
    return read_model({"metadata": {"namespace": "n", "name": "m"}, "spec": written})


@pytest.fixture(params=["Hub", "URL", "S3", "local"])
def origin(
    request: pytest.FixtureRequest, tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[dict[str, bytes]], tuple[str, Keys]]]:
    """Puts files at one kind of source; returns the source of the directory that has them, and its keys."""
    with contextlib.ExitStack() as stack:

        def put(files: dict[str, bytes]) -> tuple[str, Keys]:
            if request.param == "local":
                place = tmp_path / "put"
                place.mkdir()
                for name, data in files.items():
                    (place / name).write_bytes(data)
                return str(place), NO_KEYS
            if request.param == "Hub":
                server = stack.enter_context(Hub({"o/r": dict(files)}))
                home.terms = replace(home.terms, hub=server.url)
                home.restart()
                return "hf://o/r", NO_KEYS
            if request.param == "URL":
                server = stack.enter_context(serving())
                server.files = {f"/d/{name}": File(data) for name, data in files.items()}
                return f"{server.url}/d/", NO_KEYS
            bucket = stack.enter_context(ended(Bucket(tmp_path / "s3")))
            bucket.put("models", "", b"")
            for name, data in files.items():
                bucket.put("models", f"d/{name}", data)
            return "s3://models/d/", Keys(bucket.keys)

        yield put


@pytest.mark.parametrize("wrong", ["", *SHARDS])
def test_each_shard_has_to_have_its_digest(home: Home, origin: Any, wrong: str) -> None:
    source, keys = origin(SHARDS)
    first = source if source.startswith("hf:") else f"{source.rstrip('/')}/{next(iter(SHARDS))}"
    artifact = with_digests(first, SHARDS, wrong).artifact
    if not wrong:
        assert home.ready(artifact, keys).size_bytes == sum(map(len, SHARDS.values()))
        return
    home.failed(artifact, "ModelDigestMismatch", "a" * 64, keys)
    home.restart()
    home.failed(artifact, "ModelDigestMismatch", "a" * 64, keys)


@pytest.mark.parametrize("wrong", ["", "config.json", "model.safetensors"])
def test_each_file_of_a_directory_has_to_have_its_digest(home: Home, origin: Any, wrong: str) -> None:
    source, keys = origin(MLX)
    artifact = with_digests(source, MLX, wrong, format="mlx").artifact
    if not wrong:
        assert home.ready(artifact, keys).directory
        return
    home.failed(artifact, "ModelDigestMismatch", "a" * 64, keys)


@pytest.mark.parametrize("wrong", ["", "mmproj.gguf"])
def test_a_projector_has_to_have_its_digest(home: Home, origin: Any, wrong: str) -> None:
    files = {"m.gguf": MODEL, "mmproj.gguf": MODEL[:-1]}
    source, keys = origin(files)
    place = source if source.startswith("hf:") else f"{source.rstrip('/')}/m.gguf"
    model = with_digests(place, files, wrong, mmproj="mmproj.gguf")
    projector = replace(model.artifact, source=model.projector, sha256="", quantization="")
    home.ready(model.artifact, keys)
    if wrong:
        home.failed(projector, "ModelDigestMismatch", "a" * 64, keys)
    else:
        home.ready(projector, keys)


def test_a_local_file_that_only_its_digest_names_is_missing(home: Home, tmp_path: Path) -> None:
    for name, data in MLX.items():
        (tmp_path / name).write_bytes(data)
    artifact = with_digests(str(tmp_path), {**MLX, "more.safetensors": b"x"}, "", format="mlx").artifact
    home.failed(artifact, "ModelFileMissing", "spec.fileSha256['more.safetensors']")


# ── taken over ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layout", ["earlier", "llmkube"])
def test_what_others_fetched_is_taken_over(
    home: Home, web: Uneven, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that has no room for it twice."""
    artifact = link_to(web, model="my-model", sha256=sha256(MODEL))
    old = home.directory / (artifact.slot if layout == "earlier" else "my-model") / "m.gguf"
    old.parent.mkdir(parents=True)
    old.write_bytes(MODEL)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 1 << 40, 0))
    path = Path(home.ready(artifact).path)
    assert path.samefile(old) and path.parent == home.slot(artifact) and web.asked == []


@pytest.mark.parametrize("what", ["size", "sha256", "magic", "link", "directory"])
def test_what_is_another_file_is_not_taken_over(home: Home, web: Uneven, tmp_path: Path, what: str) -> None:
    artifact = link_to(web, model="my-model", sha256=sha256(MODEL))
    old = home.directory / "my-model" / "m.gguf"
    data = {"size": MODEL[:-1], "sha256": MODEL[:-1] + b"?", "magic": b"FUGG" + MODEL[4:]}.get(what, MODEL)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "m.gguf").write_bytes(data)
    home.directory.mkdir()
    if what == "directory":
        old.parent.symlink_to(outside)
    else:
        old.parent.mkdir()
        old.symlink_to(outside / "m.gguf") if what == "link" else old.write_bytes(data)
    found = Path(home.ready(artifact).path)
    assert found.read_bytes() == MODEL and web.sent() == len(MODEL)
    assert old.read_bytes() == data and not found.samefile(outside / "m.gguf")


def test_a_model_that_is_named_like_a_slot_takes_nothing_out_of_it(home: Home, web: Uneven) -> None:
    """The digest and the size of a gated file are public on the Hub."""
    secret = link_to(web, secret=("a", "key"))
    private = Path(home.ready(secret).path)
    thief = of(f"{web.url}/copy/m.gguf", model=secret.slot, sha256=sha256(MODEL))
    web.files["/copy/m.gguf"] = File(b"GGUF" + bytes(len(MODEL) - 4))
    home.failed(thief, "ModelDigestMismatch", "should have sha256")
    assert not (home.slot(thief) / "m.gguf").exists() and private.stat().st_nlink == 1


def test_where_no_link_can_be_made_it_is_fetched(home: Home, web: Uneven, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = link_to(web, model="my-model")
    (home.directory / "my-model").mkdir(parents=True)
    (home.directory / "my-model" / "m.gguf").write_bytes(MODEL)

    def link(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", link)
    home.ready(artifact)
    assert web.sent() == len(MODEL)


# ── links, roots, namespaces ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("what", ["slot", "slot.json", "m.gguf", "m.gguf.partial", ".lock", ".used", "slot.json.new"])
def test_no_link_in_the_store_is_followed(home: Home, web: Uneven, tmp_path: Path, what: str) -> None:
    artifact, outside = link_to(web), tmp_path / "outside"
    outside.mkdir()
    home.ready(artifact)
    home.restart()
    slot = home.slot(artifact)
    if what == "slot":
        shutil.move(slot, outside / "slot")
        slot.symlink_to(outside / "slot")
    else:
        (outside / what).write_bytes((slot / what).read_bytes() if (slot / what).exists() else b"kept")
        (slot / what).unlink(missing_ok=True)
        (slot / what).symlink_to(outside / what)
        if what != "m.gguf" and what != ".used":
            (slot / "m.gguf").unlink()
    before = {each: (each.read_bytes(), each.stat().st_mtime_ns) for each in outside.rglob("*") if each.is_file()}
    home.want(artifact)
    found = eventually(lambda: decided(home.store.state(artifact)), WITHIN_S, "it to be decided")
    if what in ("slot", "slot.json", "m.gguf"):
        assert found.reason == "InvalidModelFile" and "is a symbolic link" in found.message
    after = {each: (each.read_bytes(), each.stat().st_mtime_ns) for each in outside.rglob("*") if each.is_file()}
    assert after == before


def decided(state: ModelFile) -> ModelFile | None:
    return state if state.phase in ("Ready", "Failed") else None


def test_a_directory_within_a_slot_that_is_a_link_is_not_followed(home: Home, hub: Hub, tmp_path: Path) -> None:
    home.terms = replace(NEAR, hub=hub.url)
    home.restart()
    artifact, outside = of("o/r", directory=True), tmp_path / "outside"
    found = Path(home.ready(artifact).path)
    home.restart()
    shutil.move(found / "nested", outside)
    (found / "nested").symlink_to(outside)
    home.failed(artifact, "InvalidModelFile", "nested is a symbolic link, which is not followed")
    (outside / "extra.json").unlink()
    home.restart()
    home.failed(artifact, "InvalidModelFile", "nested is a symbolic link, which is not followed")
    assert list(outside.iterdir()) == []


def test_what_a_secret_opened_is_not_for_other_namespaces(home: Home, web: Uneven) -> None:
    one, two = link_to(web, secret=("a", "key")), link_to(web, secret=("b", "key"))
    slots = {link_to(web).slot, one.slot, two.slot, link_to(web, secret=("a", "other")).slot}
    assert len(slots) == 3
    assert home.ready(one).path != home.ready(two).path
    assert web.sent() == 2 * len(MODEL)


def test_nobody_learns_of_files_outside_the_roots(home: Home, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    home.terms = replace(NEAR, places=Places((root,)))
    home.restart()
    there = tmp_path / "there.gguf"
    there.write_bytes(MODEL)
    (root / "out.gguf").symlink_to(there)
    (root / "m-00001-of-00002.gguf").write_bytes(MODEL)
    (root / "m-00002-of-00002.gguf").symlink_to(there)
    (root / "mlx").mkdir()
    (root / "mlx" / "config.json").symlink_to(there)
    for path in (
        there,
        tmp_path / "not-there.gguf",
        root / ".." / "there.gguf",
        root / "out.gguf",
        root / "mlx",
        root / "m-00001-of-00002.gguf",
    ):
        artifact = Artifact(str(path))
        found = home.failed(artifact, "SourceNotAllowed", "is not below --allowed-roots")
        assert found.size_bytes == 0 and found.path == ""
    assert [home.store.here(Artifact(str(each))) for each in (there, tmp_path / "no")] == [None, None]
    (root / "m.gguf").write_bytes(MODEL)
    assert home.store.here(Artifact(str(root / "m.gguf"))) == root / "m.gguf"
    home.ready(Artifact(str(root / "m.gguf")))


# ── the disk ─────────────────────────────────────────────────────────────────────────────────────


def test_a_disk_without_room_is_told_with_the_arithmetic(
    home: Home, web: Uneven, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [(2 << 30) + 100_000]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, free[0]))
    artifact = link_to(web)
    home.failed(artifact, "InsufficientDisk", "needs 1 MiB; 2.0 GiB are free, 2.0 GiB of them are left to the machine")
    assert web.asked == []
    free[0] = 1 << 39
    home.store.look_again([artifact])
    home.until(artifact, "Ready")


def test_a_disk_that_others_fill_meanwhile_keeps_what_came(
    home: Home, web: Uneven, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [1 << 39]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, free[0]))
    monkeypatch.setattr(fetch_module, "SYNC_BYTES", 1 << 17)
    monkeypatch.setattr(fetch_module, "CHUNK_BYTES", 1 << 15)  # a whole file in one chunk would be no part
    web.files["/m.gguf"].stalls_at = 1 << 16
    artifact = link_to(web)
    home.want(artifact)
    assert web.stalled.wait(WITHIN_S)
    free[0] = KEPT_FREE_BYTES - 1
    web.hold.set()
    home.until(artifact, "Failed", "only 1.9 GiB of the disk are free, and 2.0 GiB are left to the machine")
    here = fetch_module.partial(home.slot(artifact) / "m.gguf").stat().st_size
    assert 1 << 17 <= here < len(MODEL)
    free[0] = 1 << 39
    home.store.look_again([artifact])
    home.until(artifact, "Ready")
    assert web.starts() == [None, here]


def test_a_write_that_finds_no_room_is_told_with_the_arithmetic(
    home: Home, web: Uneven, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, room = os.write, [100_000]

    def write(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        size = real(descriptor, data[: room[0]])
        room[0] -= size
        return size

    monkeypatch.setattr(fetch_module.os, "write", write)
    artifact = link_to(web)
    found = home.failed(artifact, "InsufficientDisk", "the disk is full; 1 MiB are still to come, and ")
    assert "models gc" in found.message
    room[0] = 1 << 30
    home.until(artifact, "Ready")
    assert web.starts() == [None, 100_000]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A real disk of 128 KiB. Needs root."""
    where = tmp_path / "small"
    where.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", where], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    yield where
    subprocess.run(["umount", "-l", where], check=True)


def test_a_real_disk_that_is_full_is_told_and_goes_on_once_there_is_room(
    home: Home, web: Uneven, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, 1 << 39))  # which is wrong, as quotas are
    home.directory = small / "models"
    home.restart()
    artifact = link_to(web)
    home.failed(artifact, "InsufficientDisk", "the disk is full")
    here = fetch_module.partial(home.slot(artifact) / "m.gguf").stat().st_size
    assert 0 < here < 128 << 10
    subprocess.run(["mount", "-o", "remount,size=4m", small], check=True)
    home.store.look_again([artifact])
    assert Path(home.until(artifact, "Ready").path).read_bytes() == MODEL
    assert web.sent() < 2 * len(MODEL)
    home.stop()


def test_a_file_is_hashed_once_although_the_disk_is_too_full_to_note_it(
    home: Home, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, hashed = tmp_path / "m.gguf", []
    path.write_bytes(MODEL)
    real = fetch_module.digest
    monkeypatch.setattr(fetch_module, "digest", lambda *at: (hashed.append(at[0]), real(*at))[1])
    home.directory = small / "models"
    artifact = of(str(path), sha256=sha256(MODEL))
    ModelDirectory(home.directory, artifact.slot).prepare()
    with (small / "other").open("wb", 0) as other, contextlib.suppress(OSError):
        while other.write(bytes(4096)):
            pass
    home.restart()
    home.ready(artifact)
    assert hashed == [path]
    home.stop()


def test_a_verified_model_is_ready_on_a_disk_that_has_become_read_only(
    home: Home, web: Uneven, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, 1 << 39))
    subprocess.run(["mount", "-o", "remount,size=4m", small], check=True)
    home.directory = small / "models"
    home.restart()
    artifact = link_to(web, sha256=sha256(MODEL))
    home.ready(artifact)
    home.stop()
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    home.restart()
    home.ready(artifact)
    home.stop()


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────


def test_keys_that_change_are_tried_at_once(home: Home, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "FIRST_RETRY_S", 1000.0)
    hub.upload("1" * 40, {"o/r": {"m.gguf": MODEL}})
    hub.token = "hunter2"
    home.terms = replace(NEAR, hub=hub.url)
    home.restart()
    artifact = of("hf://o/r/m.gguf", secret=("a", "key"))
    home.failed(artifact, "SourceUnauthorized", "", Keys({"HF_TOKEN": "wrong"}))
    home.ready(artifact, Keys({"HF_TOKEN": "hunter2\n"}))
    assert all(each.authorization in ("", "Bearer wrong", "Bearer hunter2") for each in hub.log)
    assert not any(each.authorization for each in hub.log if each.path.startswith("/cdn/"))
    assert not any("hunter2" in each.read_text("latin-1") for each in home.directory.rglob("*.json"))


def test_a_token_that_ends_with_a_line_break_is_a_token(home: Home, web: Uneven) -> None:
    artifact = link_to(web, secret=("a", "key"))
    home.failed(artifact, "SourceUnauthorized", "has characters that none has", Keys({"HF_TOKEN": "hunter2\nX: y"}))
    home.ready(artifact, Keys({"HF_TOKEN": "hunter2\n"}))


@pytest.mark.parametrize(("knob", "value", "reason"), [("gated", True, "GatedModel"), ("", 0, "SourceNotFound")])
def test_a_gated_repository_is_told_apart_from_one_that_is_not_there(
    home: Home, hub: Hub, knob: str, value: object, reason: str
) -> None:
    hub.upload("1" * 40, {"o/r": {"m.gguf": MODEL}})
    home.terms = replace(NEAR, hub=hub.url)
    home.restart()
    if knob:
        setattr(hub, knob, value)
    home.failed(of(f"hf://o/r/{'m' if knob else 'n'}.gguf"), reason, "")


def test_a_note_that_makes_no_sense_is_as_good_as_none(home: Home, web: Uneven) -> None:
    artifact = link_to(web, sha256=sha256(MODEL))
    home.ready(artifact)
    good = json.loads((home.slot(artifact) / "slot.json").read_text())
    for bad in (
        "",
        "[]",
        "{",
        "[" * 100_000,
        json.dumps({**good, "format": 9}),
        json.dumps({**good, "files": []}),
        json.dumps({**good, "model": 5}),
        json.dumps({**good, "files": {"m.gguf": {"size_bytes": "x"}}}),
    ):
        home.restart()
        (home.slot(artifact) / "slot.json").write_text(bad)
        assert home.store.here(artifact) is None
        home.ready(artifact)
    assert web.sent() == len(MODEL)
