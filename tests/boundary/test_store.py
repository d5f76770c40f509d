"""Model files from a real disk and a real web server."""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import json
import os
import shutil
import threading
import tracemalloc
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from range_server import Quiet, QuietPage

from metal_supervisor.models import model_files
from metal_supervisor.models import store as store_module
from metal_supervisor.models.download_job import DownloadJob
from metal_supervisor.models.listing import Unusable
from metal_supervisor.models.model_directory import Contents, ModelDirectory
from metal_supervisor.models.model_files import check_directory, check_file
from metal_supervisor.models.remote.source_policy import SourcePolicy
from metal_supervisor.models.store import Store
from metal_supervisor.models.store_context import StoreContext, Terms
from metal_supervisor.spec.sources import NO_KEYS, Artifact, canonical
from metal_supervisor.spec.types import ModelFile
from tests.support.hub import Hub
from tests.support.system import eventually, free_ports, tiny_gguf

GGUF = b"GGUF" + bytes(range(256)) * 40
WITHIN_S = 30.0
OURS = {"slot.json", ".used", ".lock"}


class Web(Quiet):
    """Answers by path; `hold` stalls a body in the middle."""

    def __init__(self) -> None:
        super().__init__(Page)
        self.asked: list[str] = []
        self.bodies: dict[str, bytes] = {"/m.gguf": GGUF}
        self.unsized = GGUF


class Page(QuietPage):
    """One answer."""

    server: Web

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        if path == "/moved.gguf":
            self._head(302, 0, Location="/m.gguf")
        elif path == "/loop.gguf":
            self._head(302, 0, Location="/loop.gguf")
        elif path == "/short.gguf":
            self._head(200, len(GGUF) + 10)
            self.wfile.write(GGUF)
            self.close_connection = True
        elif path == "/nolength.gguf":
            self._head(200, None, Connection="close")
            self.wfile.write(self.server.unsized)
        elif path == "/oddlength.gguf":
            self._head(200, "many", Connection="close")
            self.wfile.write(self.server.unsized)
        elif path == "/drops.gguf":
            self._head(200, None, **{"Transfer-Encoding": "chunked"})
            for start in (0, 1, 3):
                end = {0: 1, 1: 3, 3: len(GGUF)}[start]
                self.wfile.write(b"%x\r\n%s\r\n" % (end - start, GGUF[start:end]))
            self.wfile.write(b"0\r\n\r\n")
        elif path == "/endswell.gguf":  # as a proxy ends what its own server has cut
            self._head(200, None, **{"Transfer-Encoding": "chunked"})
            self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(self.server.unsized), self.server.unsized))
        elif path == "/zip.gguf":
            data = gzip.compress(GGUF)
            self._head(200, len(data), **{"Content-Encoding": "gzip"})
            self.wfile.write(data)
        elif path == "/slow.gguf":
            self._head(200, 1 << 30)
            with contextlib.suppress(OSError):
                self.wfile.write(GGUF)
                while not self.server.hold.wait(0.005):
                    self.wfile.write(b"x" * (1 << 20))
            self.close_connection = True
        elif path in self.server.bodies:
            self._head(200, len(self.server.bodies[path]))
            self.wfile.write(self.server.bodies[path])
        else:
            self._head(404, 0)

    def _head(self, code: int, length: int | str | None, **headers: str) -> None:
        self.send_response(code)
        if length is not None:
            self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


@pytest.fixture
def web() -> Iterator[Web]:
    with Web() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.hold.set()
        server.shutdown()
        thread.join()


LOOPBACK = Terms(SourcePolicy(private=("127.0.0.0/8",)))


def of(source: str, **more: Any) -> Artifact:
    """The artifact of a source as a user spells it."""
    return Artifact(canonical(source), **more)


class Willing(Store):
    """A store in which nothing is too large to be fetched, asked by sources."""

    def want(self, sources: Iterable[str]) -> None:  # type: ignore[override]
        wanted = {of(source): NO_KEYS for source in sources}
        super().want(wanted)
        for artifact in wanted:
            self.give_leave(artifact)

    def state(self, source: str) -> ModelFile:  # type: ignore[override]
        return super().state(of(source))


class Shelf:
    """A store, and how often it rang."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.rings = 0
        self.store: Store = Willing(directory, self._ring, LOOPBACK)

    def _ring(self) -> None:
        self.rings += 1

    def get(self, source: str) -> ModelFile:
        """Where it stands once it is decided."""
        self.store.want([source])
        return eventually(
            lambda: self.store.state(source).phase in ("Ready", "Failed") and self.store.state(source),
            WITHIN_S,
            f"{source!r:.60} to be decided: {self.store.state(source)}",
        )  # type: ignore[return-value]

    def ready(self, source: str) -> ModelFile:
        self.store.want([source])
        eventually(lambda: self.store.state(source).phase == "Ready", WITHIN_S, f"{self.store.state(source)}")
        return self.store.state(source)

    def parts(self) -> int:
        return sum(name.endswith(".partial") for name in self.files())

    def files(self) -> list[str]:
        return sorted(path.name for path in self.directory.rglob("*") if path.is_file() and path.name not in OURS)


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    monkeypatch.setattr(store_module, "FIRST_RETRY_S", 0.1)
    monkeypatch.setattr(store_module, "FIRST_AGAIN_S", 0.05)
    made = Shelf(tmp_path / "models")
    yield made
    made.store.want([])
    eventually(lambda: not any(t.name == "store" for t in threading.enumerate()), WITHIN_S, "the threads to end")


# ── local ────────────────────────────────────────────────────────────────────────────────────────


def test_a_local_file_is_known_at_once(shelf: Shelf, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(GGUF)
    shelf.store.want([str(path)])
    assert shelf.store.state(str(path)) == ModelFile("Ready", str(path), len(GGUF), real=(str(path),))
    assert shelf.rings == 0


@pytest.mark.parametrize(
    ("content", "reason", "text"),
    [
        (None, "ModelFileMissing", "does not exist on this Mac"),
        (b"", "InvalidModelFile", "is empty"),
        (b"\n <!DOCTYPE html>", "InvalidModelFile", "web page"),
        (b"<?xml version=", "InvalidModelFile", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "InvalidModelFile", "Git LFS pointer"),
        (b"PK\x03\x04", "InvalidModelFile", "something else"),
        (b"GGU", "InvalidModelFile", "something else"),
    ],
)
def test_what_is_no_model_is_refused_by_name(tmp_path: Path, content: bytes | None, reason: str, text: str) -> None:
    path = tmp_path / "m.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(Unusable, match=text) as caught:
        check_file(path)
    assert caught.value.reason == reason
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "left, says", [(200_000, "is cut short: it has 200000 bytes, and {} belong to it"), (100, "ends at byte 100")]
)
def test_a_file_that_is_cut_short_is_refused_until_the_rest_of_it_has_come(
    shelf: Shelf, tmp_path: Path, left: int, says: str
) -> None:
    path = tmp_path / "m.gguf"
    tiny_gguf.write_tiny_gguf(path, context=512)
    whole = path.read_bytes()
    path.write_bytes(whole[:left])
    found = shelf.get(str(path))
    assert (found.phase, found.reason) == ("Failed", "InvalidModelFile")
    assert f"{path}: the file {says.format(len(whole))}" in found.message
    path.write_bytes(whole)
    assert shelf.ready(str(path)).size_bytes == len(whole)


def test_a_fetched_file_that_is_cut_short_is_fetched_anew_once_the_server_has_another(
    shelf: Shelf, web: Web, tmp_path: Path
) -> None:
    tiny_gguf.write_tiny_gguf(tmp_path / "tiny.gguf", context=512)
    whole, url = (tmp_path / "tiny.gguf").read_bytes(), f"{web.url}/cut.gguf"
    web.bodies["/cut.gguf"] = whole[:200_000]
    found = shelf.get(url)
    assert found.reason == "InvalidModelFile" and "it has 200000 bytes" in found.message
    web.bodies["/cut.gguf"] = whole
    assert shelf.ready(url).size_bytes == len(whole)


def mlx_directory(path: Path, weights: int = 1000) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for shard in (1, 2):
        (path / f"model-{shard}.safetensors").write_bytes(b"x" * weights)
    (path / "tokenizer.json").write_text("{}")
    return path


def test_a_directory_counts_by_its_weights_and_by_its_real_path(shelf: Shelf, tmp_path: Path) -> None:
    real = mlx_directory(tmp_path / "real")
    (tmp_path / "link").symlink_to(real)
    for source in (str(tmp_path / "link"), f"file://{real}"):
        shelf.store.want([source])
        assert shelf.store.state(source) == ModelFile("Ready", str(real), 2000, directory=True, real=(str(real),))


def test_links_of_a_directory_are_judged_with_it(shelf: Shelf, tmp_path: Path) -> None:
    real, blob = mlx_directory(tmp_path / "real"), tmp_path / "blob"
    (real / "tokenizer.json").rename(blob)
    (real / "tokenizer.json").symlink_to(blob)
    (real / "dangling").symlink_to(tmp_path / "none")
    shelf.store.want([str(real)])
    assert shelf.store.state(str(real)).real == (str(real), str(blob))


def test_a_link_that_leads_elsewhere_is_judged_anew(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "LOOK_AT_STORE_S", 0.05)
    link, first, second = (tmp_path / name for name in ("link.gguf", "first.gguf", "second.gguf"))
    for each in (first, second):
        each.write_bytes(GGUF)
    link.symlink_to(first)
    shelf.store.want([str(link)])
    assert shelf.store.state(str(link)).real == (str(first),)
    link.unlink()
    link.symlink_to(second)
    eventually(lambda: shelf.store.state(str(link)).real == (str(second),), WITHIN_S, "the other file to be judged")


def test_a_directory_of_which_a_file_is_written_anew_is_judged_anew(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "LOOK_AT_STORE_S", 0.05)
    real = mlx_directory(tmp_path / "real")
    shelf.ready(str(real))
    (real / "config.json").write_text('{"model_file": "run.py"}')  # in its place, as `cp` does
    eventually(lambda: shelf.store.state(str(real)).phase == "Failed", WITHIN_S, "what runs code to be refused")


def test_a_local_file_that_is_replaced_or_removed_is_judged_anew(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "LOOK_AT_STORE_S", 0.05)
    path = tmp_path / "m.gguf"
    path.write_bytes(GGUF)
    artifact = of(str(path), sha256=hashlib.sha256(GGUF).hexdigest())
    store = Store(tmp_path / "other", lambda: None, LOOPBACK)
    store.want({artifact: NO_KEYS})
    try:
        eventually(lambda: store.state(artifact).phase == "Ready", WITHIN_S, f"{store.state(artifact)}")
        path.write_bytes(GGUF + b"x")
        eventually(lambda: store.state(artifact).reason == "ModelDigestMismatch", WITHIN_S, f"{store.state(artifact)}")
        path.write_bytes(GGUF)
        store.look_again([artifact])
        eventually(lambda: store.state(artifact).phase == "Ready", WITHIN_S, f"{store.state(artifact)}")
        path.unlink()
        eventually(lambda: store.state(artifact).phase == "Failed", WITHIN_S, f"{store.state(artifact)}")
    finally:
        store.want({})


@pytest.mark.parametrize("missing", ["config.json", "*.safetensors"])
def test_a_directory_that_is_no_model_is_refused_by_what_it_lacks(missing: str, shelf: Shelf, tmp_path: Path) -> None:
    path = mlx_directory(tmp_path / "m")
    for each in path.glob(missing):
        each.unlink()
    shelf.store.want([str(path)])
    found = shelf.store.state(str(path))
    assert (found.phase, found.reason) == ("Failed", "InvalidModelFile")
    assert f"{path} is a directory without {missing}: it has " in found.message


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_git_lfs_pointer_in_a_directory_is_named(name: str, tmp_path: Path) -> None:
    path = mlx_directory(tmp_path / "m")
    (path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(Unusable, match=f"{name} is a Git LFS pointer; run git lfs pull"):
        check_directory(path)


def test_a_directory_is_no_model_before_all_of_its_weights_are_there(tmp_path: Path) -> None:
    """`hf download --local-dir` puts shards there one by one, and `cp -R` lets them grow."""
    first, second = (tmp_path / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    header = json.dumps({"a": {"data_offsets": [0, 1000]}, "__metadata__": {"format": "mlx"}}).encode()
    whole = len(header).to_bytes(8, "little") + header + bytes(1000)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    first.write_bytes(whole)
    with pytest.raises(Unusable, match=r"lacks 1 of its 2 files model-…-of-00002\.safetensors"):
        check_directory(tmp_path)
    for size in (9, len(header), len(whole) - 1):
        second.write_bytes(whole[:size])
        with pytest.raises(Unusable, match=f"{second} is cut short: it has {size} bytes") as caught:
            check_directory(tmp_path)
        assert caught.value.reason == "InvalidModelFile"
    second.write_bytes(whole)
    assert check_directory(tmp_path) == 2 * len(whole)


@pytest.mark.parametrize("length", [0, model_files.MOST_HEADER_BYTES])
def test_a_header_of_an_impossible_length_is_not_read(tmp_path: Path, length: int) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(length.to_bytes(8, "little") + b"{")
        file.truncate(64 << 20)
    tracemalloc.start()
    try:
        check_directory(tmp_path)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 8 << 20


def test_a_directory_and_a_loop_of_links_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="is a directory"):
        check_file(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(Unusable) as caught:
        check_file(tmp_path / "loop")
    assert caught.value.reason == "ModelFileUnreadable"
    with pytest.raises(Unusable):
        check_file(tmp_path / ("x" * 300))


def test_what_macos_keeps_from_a_job_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal may read a disk that a job may not, and doctor with it: the message alone can tell."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    (tmp_path / "m.gguf").write_bytes(GGUF)
    for path, name, look in ((tmp_path / "m.gguf", "open", check_file), (tmp_path, "iterdir", check_directory)):
        with monkeypatch.context() as patched, pytest.raises(Unusable, match="Full Disk Access") as caught:
            patched.setattr(Path, name, refuse)
            look(path)
        assert caught.value.reason == "ModelFileUnreadable"


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(GGUF)
    path.chmod(0)
    if os.getuid() == 0:  # whom no mode stops

        def refuse(*_: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(Unusable, match="Permission denied") as caught:
        check_file(path)
    assert caught.value.reason == "ModelFileUnreadable"


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    done = threading.Event()

    def check() -> None:
        with contextlib.suppress(Unusable):
            check_file(tmp_path / "pipe")
        done.set()

    thread = threading.Thread(target=check, daemon=True)
    thread.start()
    in_time = done.wait(WITHIN_S)
    if not in_time:
        os.close(os.open(tmp_path / "pipe", os.O_WRONLY))
        thread.join()
    assert in_time


@pytest.mark.parametrize("host", ["", "localhost"])
def test_a_file_url_may_be_percent_encoded(shelf: Shelf, tmp_path: Path, host: str) -> None:
    path = tmp_path / "my ü#model.gguf"
    path.write_bytes(GGUF)
    assert shelf.ready(f"file://{host}{tmp_path}/my%20%C3%BC%23model.gguf").path == str(path)


def test_only_what_was_edited_is_asked_for_again(shelf: Shelf, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "FIRST_RETRY_S", 3600.0)
    edited, other = of(f"{web.url}/edited.gguf"), of(f"{web.url}/other.gguf")
    shelf.store.want([edited.source, other.source])
    for each in (edited, other):
        eventually(lambda each=each: shelf.store.state(each.source).reason == "SourceNotFound", WITHIN_S, each.source)
    web.asked.clear()
    web.bodies |= {"/edited.gguf": GGUF, "/other.gguf": GGUF}
    shelf.store.look_again([edited])
    eventually(lambda: shelf.store.state(edited.source).phase == "Ready", WITHIN_S, "the edited one")
    assert {*web.asked} == {"/edited.gguf"} and shelf.store.state(other.source).phase == "Failed"


def test_a_file_that_appears_later_is_found(shelf: Shelf, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    assert shelf.get(str(path)).reason == "ModelFileMissing"
    path.write_bytes(GGUF)
    shelf.store.look_again([of(str(path))])
    shelf.ready(str(path))
    assert shelf.rings == 1


@pytest.mark.parametrize(
    "source", ["/a\0b", "/\udcff", "http://h:99999/m", "http://\udcff/m", "http://127.0.0.1:1/\udcff", "http://[b"]
)
def test_a_source_that_makes_no_sense_fails_with_a_message(shelf: Shelf, source: str) -> None:
    """The custom resource's reader refuses most of these by name; whatever gets past it must not end the worker."""
    artifact = Artifact(source)
    Store.want(shelf.store, {artifact: NO_KEYS})
    found = eventually(lambda: decided(Store.state(shelf.store, artifact)), WITHIN_S, source)
    assert (found.phase, bool(found.reason and found.message)) == ("Failed", True)


def decided(state: ModelFile) -> ModelFile | None:
    return state if state.phase in ("Ready", "Failed") else None


# ── http ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["m.gguf", "moved.gguf", "drops.gguf"])
def test_a_model_is_fetched_whole(shelf: Shelf, web: Web, name: str) -> None:
    found = shelf.ready(f"{web.url}/{name}")
    assert Path(found.path).read_bytes() == GGUF
    assert found.size_bytes == len(GGUF)
    assert shelf.files() == [name]


@pytest.mark.parametrize(
    ("name", "reason", "text"),
    [
        ("none.gguf", "SourceNotFound", "answered 404"),
        ("html.gguf", "InvalidModelFile", "web page"),
        ("empty.gguf", "InvalidModelFile", "is empty"),
        ("loop.gguf", "DownloadFailed", "more than 5 other addresses"),
        ("lfs.gguf", "InvalidModelFile", "LFS"),
        ("zip.gguf", "DownloadFailed", "with an encoding of the file"),
    ],
)
def test_what_is_no_model_on_the_web_is_refused_and_not_kept(
    shelf: Shelf, web: Web, name: str, reason: str, text: str
) -> None:
    web.bodies |= {"/html.gguf": b"<html>login", "/empty.gguf": b"", "/lfs.gguf": b"version https://git-lfs.x"}
    found = shelf.get(f"{web.url}/{name}?token=secret")
    assert (found.phase, found.reason) == ("Failed", reason)
    assert text in found.message and "secret" not in found.message
    assert [each for each in shelf.files() if not each.endswith(".json")] == []


@pytest.mark.parametrize("name", ["nolength.gguf", "oddlength.gguf", "endswell.gguf"])
def test_a_file_without_a_length_has_to_end_where_its_header_says(
    name: str, shelf: Shelf, web: Web, tmp_path: Path
) -> None:
    """A line that is cut looks like the end of such a body."""
    tiny_gguf.write_tiny_gguf(tmp_path / "tiny.gguf", context=512)
    web.unsized = (tmp_path / "tiny.gguf").read_bytes()
    assert Path(shelf.ready(f"{web.url}/{name}").path).read_bytes() == web.unsized
    whole, web.unsized = web.unsized, web.unsized[:-100]
    found = shelf.get(f"{web.url}/{name}?again")
    assert (found.phase, found.reason) == ("Failed", "DownloadFailed") and "tells no length" in found.message
    web.unsized = whole
    shelf.ready(f"{web.url}/{name}?again")


def test_a_model_that_somebody_removed_is_fetched_again(
    shelf: Shelf, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "LOOK_AT_STORE_S", 0.05)
    url = f"{web.url}/m.gguf"
    path = Path(shelf.ready(url).path)
    shutil.rmtree(path.parent.rename(path.parent.with_name(".aside")))  # as a whole: it is fetched again at once
    eventually(lambda: path.exists() and path.read_bytes() == GGUF, WITHIN_S, "it to be fetched again")
    shelf.ready(url)


def test_a_shard_that_somebody_removed_is_fetched_again(
    shelf: Shelf, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "LOOK_AT_STORE_S", 0.05)
    web.bodies |= {f"/m-0000{number}-of-00002.gguf": GGUF for number in (1, 2)}
    found = shelf.ready(f"{web.url}/m-00001-of-00002.gguf")
    second = Path(found.path).with_name("m-00002-of-00002.gguf")
    second.unlink()
    eventually(second.exists, WITHIN_S, "it to be fetched again")


def weights(size: int) -> bytes:
    """A file of safetensors."""
    return (8).to_bytes(8, "little") + b"{}      " + bytes(size)


def test_a_directory_of_a_store_behind_a_link_is_watched_too(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    job = DownloadJob(of("hf://o/r", directory=True), StoreContext(tmp_path / "link", LOOPBACK), print, print)
    assert not job.is_whole((job.slot.path / "r").resolve())
    assert job.is_whole(tmp_path / "mirror/o/r")


def test_a_repository_that_is_uploaded_anew_is_taken_as_it_is_then_and_nothing_old_stays(tmp_path: Path) -> None:
    config, old, new = b'{"model_type": "llama"}', "1" * 40, "2" * 40
    broken = {"model-00001-of-00002.safetensors": weights(3000), "model-00002-of-00002.safetensors": b"\x7fELF" * 9}
    artifact = of("hf://o/r", directory=True)
    with Hub({"o/r": {"config.json": config, **broken}}, old) as hub:
        store = Store(tmp_path / "models", lambda: None, replace(LOOPBACK, hub=hub.url))

        def decided() -> ModelFile:
            store.want({artifact: NO_KEYS})
            store.give_leave(artifact)
            eventually(lambda: store.state(artifact).phase in ("Ready", "Failed"), WITHIN_S, "it to be decided")
            found = store.state(artifact)
            store.want({})
            eventually(lambda: not any(t.name == "store" for t in threading.enumerate()), WITHIN_S, "the end")
            return found

        assert decided().reason == "InvalidModelFile"
        hub.upload(new, {"o/r": {"config.json": config, "model.safetensors": weights(5000)}})
        path = Path(decided().path)
    assert sorted(each.name for each in path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_model_that_cannot_be_read_for_a_moment_needs_no_server_afterwards(
    shelf: Shelf, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, looked_at, failed = f"{web.url}/m.gguf", model_files.looked_at, threading.Event()
    shelf.ready(url)
    shelf.store.want([])

    def fails_once(path: Path) -> ModelFile:
        if failed.is_set():
            return looked_at(path)
        failed.set()
        raise Unusable("ModelFileUnreadable", f"{path}: Input/output error")

    monkeypatch.setattr(model_files, "looked_at", fails_once)
    asked = list(web.asked)
    shelf.ready(url)
    assert failed.is_set() and web.asked == asked


def test_a_sha256_that_is_that_of_a_later_commit_is_found_there(tmp_path: Path) -> None:
    sha256 = hashlib.sha256(GGUF + b"new").hexdigest()
    with Hub({"o/r": {"m.gguf": GGUF}}, "1" * 40) as hub:
        for wanted, content in (("", GGUF), (sha256, GGUF + b"new")):
            artifact = of("hf://o/r/m.gguf", sha256=wanted)
            store = Store(tmp_path / "models", lambda: None, replace(LOOPBACK, hub=hub.url))
            store.want({artifact: NO_KEYS})
            store.give_leave(artifact)
            fetched = partial(store.state, artifact)
            path = Path(eventually(lambda fetched=fetched: fetched().path, WITHIN_S, "it to be fetched"))
            assert path.read_bytes() == content
            store.want({})
            eventually(lambda: not any(t.name == "store" for t in threading.enumerate()), WITHIN_S, "the end")
            path.unlink()
            hub.upload("2" * 40, {"o/r": {"m.gguf": GGUF + b"new"}})


def test_a_file_that_never_comes_whole_is_refused_in_the_end(shelf: Shelf, web: Web) -> None:
    found = shelf.get(f"{web.url}/short.gguf")
    assert (found.phase, found.reason) == ("Failed", "DownloadFailed") and "tried again in" in found.message


def test_a_server_that_is_not_there_is_named_and_the_fetch_heals(shelf: Shelf, web: Web) -> None:
    assert "is the server up?" in shelf.get(f"http://127.0.0.1:{free_ports(1)[0]}/m.gguf").message
    assert shelf.get(f"{web.url}/later.gguf").phase == "Failed"
    web.bodies["/later.gguf"] = GGUF
    shelf.ready(f"{web.url}/later.gguf")


def test_one_fetch_serves_many_and_the_file_is_kept(shelf: Shelf, web: Web) -> None:
    url = f"{web.url}/m.gguf"
    shelf.store.want([url, url])
    shelf.ready(url)
    asked = list(web.asked)
    shelf.store.want([url])
    shelf.store.want([])
    shelf.ready(url)
    assert asked == web.asked == ["/m.gguf"] * 2  # what it is, and it


def test_two_urls_that_end_alike_are_two_files(shelf: Shelf, web: Web) -> None:
    web.bodies["/other/m.gguf"] = GGUF + b"other"
    assert shelf.ready(f"{web.url}/m.gguf").path != shelf.ready(f"{web.url}/other/m.gguf").path


def test_a_fetch_that_is_no_longer_wanted_stops_and_what_came_stays(shelf: Shelf, web: Web) -> None:
    url = f"{web.url}/slow.gguf"
    shelf.store.want([url])
    eventually(lambda: shelf.parts() == 1, WITHIN_S, "the fetch to begin")
    eventually(lambda: shelf.store.state(url).phase == "Downloading", WITHIN_S, "progress")
    shelf.store.want([])
    eventually(lambda: not any(t.name == "store" for t in threading.enumerate()), WITHIN_S, "the thread to end")
    assert shelf.files() == ["slow.gguf.partial", "slow.gguf.partial.json"]


def test_a_fetch_that_is_wanted_again_at_once_is_not_spoilt_by_the_old_one(shelf: Shelf, web: Web) -> None:
    url = f"{web.url}/slow.gguf"
    shelf.store.want([url])
    eventually(lambda: shelf.parts() == 1, WITHIN_S, "the fetch to begin")
    shelf.store.want([])
    shelf.store.want([url])
    eventually(lambda: len(web.asked) == 4, WITHIN_S, "a second fetch")
    eventually(lambda: sum(t.name == "store" for t in threading.enumerate()) == 1, WITHIN_S, "the old one to end")
    eventually(lambda: shelf.parts() == 1, WITHIN_S, "what the second one keeps")


def test_a_fetched_file_that_was_damaged_is_fetched_again(shelf: Shelf, web: Web) -> None:
    """A power cut may leave an empty file under the final name."""
    url = f"{web.url}/m.gguf"
    path = Path(shelf.ready(url).path)
    shelf.store.want([])
    path.write_bytes(b"")
    assert Path(shelf.ready(url).path).read_bytes() == GGUF


def test_a_disk_that_cannot_be_written_is_named(shelf: Shelf, web: Web) -> None:
    shelf.directory.write_text("a file, where the directory should be")
    found = shelf.get(f"{web.url}/m.gguf")
    assert (found.phase, found.reason) == ("Failed", "DownloadFailed")


def test_a_whole_file_whose_note_could_not_be_written_is_not_fetched_again(
    shelf: Shelf, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, write, failed = f"{web.url}/m.gguf", ModelDirectory.write, threading.Event()

    def fails_once(slot: ModelDirectory, contents: Contents) -> None:
        if contents.files and not failed.is_set():
            failed.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        write(slot, contents)

    monkeypatch.setattr(ModelDirectory, "write", fails_once)
    monkeypatch.setattr(store_module, "FIRST_RETRY_S", 0.05)
    shelf.store.want([url])
    assert Path(eventually(lambda: shelf.store.state(url).path, WITHIN_S, "it to be ready")).read_bytes() == GGUF
    assert failed.is_set() and web.asked == ["/m.gguf"] * 3, "what it is, twice; and it, once"


def test_nothing_is_fetched_without_leave_and_what_is_dropped_needs_none(web: Web, tmp_path: Path) -> None:
    store = Store(tmp_path, lambda: None, LOOPBACK)
    model, other = of(f"{web.url}/m.gguf"), of(f"{web.url}/moved.gguf")
    store.want({model: NO_KEYS})
    eventually(lambda: store.asks_leave(model), WITHIN_S, "it asks")
    assert store.state(model).phase == "Pending" and len(web.asked) == 1
    store.give_leave(model)
    eventually(lambda: store.state(model).phase == "Ready", WITHIN_S, "it is fetched")
    assert not store.asks_leave(model)
    store.want({other: NO_KEYS})
    eventually(lambda: store.asks_leave(other), WITHIN_S, "the other asks")
    store.want({})
    eventually(lambda: not any(t.name == "store" for t in threading.enumerate()), WITHIN_S, "the threads to end")


def test_a_namespace_with_very_many_files_leaves_threads_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MOST_OF_NAMESPACE", 2)
    store, files = Store(tmp_path / "models", lambda: None), [tmp_path / f"{number}.gguf" for number in range(5)]
    for each in files:
        each.write_bytes(GGUF)
    *many, other = map(of, map(str, files))
    namespaces = {**dict.fromkeys(many, frozenset({"many"})), other: frozenset({"other"})}

    def want(artifacts: list[Artifact]) -> list[str]:
        store.want(dict.fromkeys(artifacts, NO_KEYS), namespaces)
        eventually(lambda: all(store.state(each).phase == "Ready" for each in artifacts if store.wants(each)), WITHIN_S)
        return [store.state(each).phase for each in artifacts]

    try:
        assert want([*many, other]) == ["Ready", "Ready", "Pending", "Pending", "Ready"]
        assert "2 other files of its namespace" in store.state(many[2]).message
        assert want([*many[1:], other]) == ["Ready", "Ready", "Pending", "Ready"]
        assert want(many) == ["Pending", "Ready", "Ready", "Pending"]
    finally:
        store.want({})
    eventually(lambda: not any(t.name == "store" for t in threading.enumerate()), WITHIN_S, "the threads to end")


def test_a_model_that_waits_to_be_looked_after_is_in_use_for_gc_and_rm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MOST_OF_NAMESPACE", 0)
    store, artifact = Store(tmp_path / "models", lambda: None), of("https://models.example.com/a/b.gguf")
    store.want({artifact: NO_KEYS}, {artifact: frozenset({"many"})})
    assert store.slots() == [artifact.slot]


def test_a_thread_that_cannot_be_started_is_started_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As while other programs of this user have as many as the system allows."""
    rings, start = threading.Event(), threading.Thread.start
    store, paths = Store(tmp_path / "models", rings.set), [tmp_path / "1.gguf", tmp_path / "2.gguf"]
    wanted = {of(str(path)): NO_KEYS for path in paths}
    one, two = wanted

    def refused(thread: threading.Thread) -> None:
        if store.wants(one):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError):
            store.want(wanted)
    eventually(lambda: store.state(one).phase == "Failed", WITHIN_S, "the first to be looked at")
    paths[0].write_bytes(GGUF)
    store.look_again(wanted)
    assert rings.wait(WITHIN_S) and store.state(two).phase == "Checking"
    paths[1].write_bytes(GGUF)
    store.want(wanted)
    eventually(lambda: store.state(two).phase == "Ready", WITHIN_S, "the second")
    store.want({})
    eventually(lambda: not any(t.name == "store" for t in threading.enumerate()), WITHIN_S, "the threads to end")
