"""Headers of models from real disks and real web servers, good and bad."""

from __future__ import annotations

import json
import os
import random
import struct
import sys
import threading
import time
import tracemalloc
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from range_server import Web, serving

from metal_supervisor.controller.prerequisites.claim_check import FETCH_S, READY_S, ClaimCheck
from metal_supervisor.controller.prerequisites.composer import Composer
from metal_supervisor.controller.prerequisites.readings import Readings
from metal_supervisor.controller.snapshot import Room
from metal_supervisor.memory.estimate_mlx import CannotEstimate, estimate_mlx
from metal_supervisor.models import headers as headers_module
from metal_supervisor.models.headers import Headers, read_file
from metal_supervisor.models.listing import Listing, Piece, Unusable
from metal_supervisor.models.metadata import Reading
from metal_supervisor.models.model_files import looked_at
from metal_supervisor.models.places import Places
from metal_supervisor.models.remote import remote_headers
from metal_supervisor.models.remote.remote_headers import read_listing
from metal_supervisor.models.remote.source_policy import SourcePolicy
from metal_supervisor.models.remote.web import Client
from metal_supervisor.models.store import Store
from metal_supervisor.models.store_context import Terms
from metal_supervisor.runtimes import Binary
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.gguf import Header, read_header
from metal_supervisor.spec.sources import Artifact
from metal_supervisor.spec.types import Endpoint, Model, Service
from tests.support.broken import mutated
from tests.support.faults import Figure, fault
from tests.support.in_memory import InMemory
from tests.support.pace import within
from tests.support.shards import write_shards
from tests.support.system import eventually, free_ports, tiny_gguf

WITHIN_S = 30.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("headers") / "tiny.gguf"
    tiny_gguf.write_tiny_gguf(path)
    return path


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model of six tensors in three files."""
    return write_shards(tmp_path_factory.mktemp("shards"), "my model.gguf")


@pytest.fixture
def web() -> Iterator[Web]:
    with serving() as server:
        yield server


def remote(*urls: str) -> Reading:
    """What the files at these addresses are read to be: one, or all shards of one."""
    client = Client(SourcePolicy(lax=True))
    try:
        names = [urllib.parse.unquote(url.partition("?")[0].rpartition("/")[2]) for url in urls]
        return read_listing(Listing(tuple(map(Piece, names, urls))), client)
    finally:
        client.close()


def header_of(path: Path) -> Header:
    data = path.read_bytes()
    return read_header(InMemory(data), len(data))


def long_header() -> bytes:
    """Some 3 MiB of it, so that one request does not do."""
    tokens = b"".join(struct.pack("<Q", 16) + b"token%011d" % index for index in range(130_000))
    key = b"tokenizer.ggml.tokens"
    listed = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, 8, 130_000) + tokens
    made = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + listed
    return made + bytes(-len(made) % 32)


# ── hostile files ────────────────────────────────────────────────────────────────────────────────


@fault(
    "G142",
    "1000 model files with bits turned, lengths and counts out of all reason, pieces gone or repeated",
    happens="each is read, or refused with what is wrong with it",
    sees="InvalidModelFile, or an estimate",
    bound="0 other errors, 50 MiB",
)
def test_a_thousand_broken_files_do_no_harm(tmp_path: Path, tiny: Path, figure: Figure) -> None:
    whole, path, chance = tiny.read_bytes(), tmp_path / "model.gguf", random.Random(2)
    start, refused = header_of(tiny).data_offset, 0
    tracemalloc.start()
    try:
        for _ in range(1000):
            path.write_bytes(mutated(whole[:start], chance) + whole[start:])
            found = read_file(path)
            assert found.size_bytes in (path.stat().st_size, None) and (found.header is None or found.size_bytes)
            assert bool(found.problem) == (found.header is None) and len(found.problem) < 400
            refused += bool(found.problem)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50 << 20 and 10 < refused < 990
    figure.add("files", 1000, "")
    figure.add("refused", refused, "")
    figure.add("most memory", peak / (1 << 20), "MiB")


# ── on the disk ──────────────────────────────────────────────────────────────────────────────────


def test_a_file_is_its_size_and_its_header(tiny: Path) -> None:
    assert read_file(tiny) == Reading(tiny.stat().st_size, header_of(tiny))


def test_any_shard_stands_for_all_of_them(shards: list[Path]) -> None:
    found = read_file(shards[0])
    assert found.header is not None and found.header.weights_bytes == 6 * 4 * 32 * 4
    assert found.size_bytes == sum(path.stat().st_size for path in shards)
    assert read_file(shards[2]) == found


def copied(shards: list[Path], into: Path) -> list[Path]:
    made = [into / path.name for path in shards]
    for path, copy in zip(shards, made, strict=True):
        copy.write_bytes(path.read_bytes())
    return made


def test_a_shard_that_is_missing_or_broken_is_named(shards: list[Path], tmp_path: Path) -> None:
    first, second, third = copied(shards, tmp_path)
    second.write_bytes(b"x" * second.stat().st_size)
    assert read_file(first) == Reading(None, problem=f"{second.name}: it is not a GGUF file")
    second.unlink()
    gone = Reading(None, problem=f"{second.name}: it cannot be read: No such file or directory")
    assert read_file(first) == read_file(third) == gone


def test_shards_of_different_models_are_not_one(shards: list[Path], tmp_path: Path) -> None:
    first, _, third = copied(shards, tmp_path)
    first.write_bytes(shards[1].read_bytes())
    found = read_file(third)
    assert found.header is None and f"{first.name}: it is file 2 of 3 by its header" in found.problem
    assert found.size_bytes is None


@pytest.mark.parametrize("where", ["disk", "server", "store"])
def test_a_shard_under_another_name_is_said_to_be_one(where: str, shards: list[Path], web: Web, tmp_path: Path) -> None:
    path = tmp_path / "renamed.gguf"
    path.write_bytes(shards[0].read_bytes())
    if where == "store":
        with pytest.raises(Unusable) as caught:
            looked_at(path)
        assert caught.value.reason == "InvalidModelFile"
        problem = str(caught.value)
    elif where == "server":
        web.files["renamed.gguf"] = path.read_bytes()
        problem = remote(f"{web.url}/range/renamed.gguf").problem
    else:
        problem = read_file(path).problem
    assert "it is file 1 of 3 by its header; rename it to renamed-00001-of-00003.gguf" in problem


def test_a_whole_file_that_is_named_like_a_shard_is_said_to_be_whole(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00003.gguf"
    path.write_bytes(tiny.read_bytes())
    assert "is whole by its header; rename it to m.gguf" in read_file(path).problem
    with pytest.raises(Unusable, match=r"is whole by its header; rename it to m\.gguf"):
        looked_at(path)


def test_the_pieces_of_a_file_are_to_be_joined_and_not_fetched_again(tiny: Path, tmp_path: Path) -> None:
    """As `split` cuts a file, under the names of shards."""
    data, first = tiny.read_bytes(), tmp_path / "m-00001-of-00002.gguf"
    first.write_bytes(data[: len(data) // 2])
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(data[len(data) // 2 :])
    with pytest.raises(Unusable, match=r"join the pieces in their order: cat m-00001-of-00002\.gguf … > m\.gguf"):
        looked_at(first)


@pytest.mark.parametrize(
    ("content", "text"),
    [(b"", "the file ends at byte 0"), (b"<html>", "not a GGUF file"), (b"GGUF\0\0\0\x03", "big-endian")],
)
def test_what_cannot_be_read_keeps_its_size(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    found = read_file(path)
    assert (found.size_bytes, found.header, text in found.problem) == (len(content), None, True)


@pytest.mark.parametrize("where", ["disk", "server"])
def test_what_an_engine_may_load_although_its_header_is_not_understood_is_of_unknown_size(
    where: str, web: Web, tiny: Path, tmp_path: Path
) -> None:
    """One string of 65 MiB: the engine loads such a model, with a cache as large as its context."""
    data, padding = tiny.read_bytes(), 65 << 20
    entries = int.from_bytes(data[16:24], "little") + 1
    name = b"general.description"
    long = struct.pack("<Q", len(name)) + name + struct.pack("<IQ", 8, padding) + bytes(padding)
    content = data[:16] + struct.pack("<Q", entries) + long + data[24:]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    if where == "server":
        web.files["m.gguf"] = content
    found = read_file(path) if where == "disk" else remote(f"{web.url}/range/m.gguf")
    assert (found.size_bytes, found.header) == (None, None)
    assert found.problem == "the header goes on for more than 64 MiB"
    assert web.sent_bytes <= 64 << 20


def test_a_file_that_was_cut_short_is_told(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny.read_bytes()[:-10])
    found = read_file(path)
    assert found.size_bytes == tiny.stat().st_size - 10
    assert "cut short" in found.problem


def test_what_may_not_be_read_keeps_its_size(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny.read_bytes())
    path.chmod(0)
    if os.getuid() == 0:  # whom no mode stops

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "open", refuse)
    assert read_file(path) == Reading(tiny.stat().st_size, problem="it cannot be read: Permission denied")


@pytest.mark.parametrize(
    "name", ["", "/", "none", "dir", "loop", "pipe", "x" * 300, "a\0b", "\udcff", "m-00001-of-00002.gguf"]
)
def test_nothing_that_a_path_may_be_raises_or_hangs(tmp_path: Path, name: str) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    found = read_file(tmp_path / name)
    assert found.header is None and found.problem
    assert found.size_bytes is None


def test_a_directory_is_read_by_its_config_and_weighed_by_its_weights(tmp_path: Path) -> None:
    assert "without a config.json" in read_file(tmp_path).problem
    for shard in (1, 2):
        (tmp_path / f"model-{shard}.safetensors").write_bytes(b"x" * 500)
    (tmp_path / "tokenizer.json").write_bytes(b"x" * 500)
    for text in ("", "[]", "[" * 100_000, "\xff"):
        (tmp_path / "config.json").write_text(text, "latin-1")
        assert read_file(tmp_path) == Reading(1000, problem="its config.json cannot be read")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert read_file(tmp_path) == Reading(1000, config={"model_type": "llama"})


def test_no_config_is_kept_that_a_pass_cannot_quote(tmp_path: Path) -> None:
    """One nested as deep as the thread that reads it can parse ended each pass of the controller, for all services."""
    (tmp_path / "model.safetensors").write_bytes(b"x" * 500)

    def estimated(config: Mapping[str, Any], frames: int) -> None:
        if frames:
            return estimated(config, frames - 1)
        with pytest.raises(CannotEstimate, match="num_hidden_layers must be a whole number"):
            estimate_mlx(500, config)
        return None

    for levels in range(sys.getrecursionlimit() - 100, sys.getrecursionlimit(), 2):
        deep = "[" * levels + "]" * levels
        inner = f'{{"num_hidden_layers": {deep}, "layer_types": [1, "x"]}}'
        text = f'{{"model_type": "gemma3n", "num_hidden_layers": {deep}, "rope": {{"a": 1}}, "text_config": {inner}}}'
        (tmp_path / "config.json").write_text(text)
        with ThreadPoolExecutor(1) as reader:
            found = reader.submit(read_file, tmp_path).result()
        if (config := found.config) is not None:
            kept = {"num_hidden_layers": [], "layer_types": ["", "x"]}
            assert config == {"model_type": "gemma3n", "num_hidden_layers": [], "rope": {}, "text_config": kept}
            estimated(config, 60)


# ── on a server ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["range", "plain", "star", "short", "moved", "larger", "pebibytes"])
def test_a_remote_header_is_the_one_of_the_file(how: str, web: Web, tiny: Path) -> None:
    web.files["tiny.gguf"] = tiny.read_bytes()
    size = tiny.stat().st_size
    found = remote(f"{web.url}/{how}/tiny.gguf")
    assert found.header == header_of(tiny), found.problem
    assert found.size_bytes == {"larger": size * 10}.get(how, size)


def test_a_server_that_sends_less_than_it_is_asked_for_is_asked_until_a_skipped_list_is_over(web: Web) -> None:
    key = b"tokenizer.ggml.scores"
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, 0, 100_000) + bytes(100_000)
    made = b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + entry + entry.replace(b"scores", b"others")
    web.files["m.gguf"] = data = made + bytes(-len(made) % 32)
    found = remote(f"{web.url}/short/m.gguf")
    assert found.header is not None and len(found.header.metadata) == 2, found.problem
    assert found.header.data_offset == found.size_bytes == len(data)


def test_only_the_beginning_of_a_large_model_is_fetched(web: Web, tiny: Path) -> None:
    web.files["tiny.gguf"], web.padding["tiny.gguf"] = tiny.read_bytes(), 70 << 30
    found = remote(f"{web.url}/range/tiny.gguf")
    assert found.header is not None and found.size_bytes == tiny.stat().st_size + (70 << 30)
    assert web.asked == [("/range/tiny.gguf", "bytes=0-1048575")]
    assert web.sent_bytes <= 1 << 20
    found = remote(f"{web.url}/plain/tiny.gguf")
    assert found.header is not None and found.size_bytes == tiny.stat().st_size + (70 << 30)
    assert web.sent_bytes < 64 << 20, "what was on its way when the client left"


@pytest.mark.parametrize(("how", "requests"), [("range", 3), ("star", 3), ("plain", 1), ("unsized", 1)])
def test_a_long_header_is_read_on_from_where_it_was(how: str, requests: int, web: Web) -> None:
    web.files["m.gguf"] = data = long_header()
    found = remote(f"{web.url}/{how}/m.gguf")
    assert found.header is not None and found.header.tokens == 130_000, found.problem
    assert found.size_bytes == len(data)
    assert len(web.asked) == requests
    assert web.sent_bytes == len(data)
    if how == "range":
        assert [said for _, said in web.asked][:2] == ["bytes=0-1048575", "bytes=1048576-2097151"]
        assert len(web.connections) == 1, "one connection serves all requests"


def test_a_header_that_leads_behind_the_end_of_its_file_is_not_read_on(web: Web) -> None:
    entry = struct.pack("<Q", 1) + b"k" + struct.pack("<IQ", 8, 40 << 20)
    web.files["m.gguf"] = b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + entry + bytes(20 << 20)
    assert "the file ends" in remote(f"{web.url}/range/m.gguf").problem
    assert web.asked == [("/range/m.gguf", "bytes=0-1048575")]


def test_remote_shards_are_judged_together(web: Web, shards: list[Path]) -> None:
    web.files |= {path.name.replace(" ", "%20"): path.read_bytes() for path in shards}
    urls = [f"{web.url}/range/{path.name.replace(' ', '%20')}?token=secret" for path in shards]
    found = remote(*urls)
    assert found == read_file(shards[0])
    del web.files[shards[2].name.replace(" ", "%20")]
    found = remote(*urls)
    assert found.header is None and found.size_bytes is None
    assert found.problem.startswith(f"{shards[2].name}: http://127.0.0.1") and found.problem.endswith("answered 404")
    assert "secret" not in found.problem


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("loop", "more than 5 other addresses"),
        ("ftp", ""),
        ("file", ""),
        ("forbidden", "answered 403"),
        ("gzip", "encoding"),
        ("shifted", "was asked for a range from byte 0"),
        ("smaller", "cut short"),
        ("breaking", ""),
    ],
)
def test_a_server_that_does_it_wrong_is_told_from_one_that_does_not(how: str, text: str, web: Web, tiny: Path) -> None:
    web.files["tiny.gguf"] = tiny.read_bytes()
    url = f"{web.url.replace('//', '//user:pass@')}/{how}/tiny.gguf?token=secret"
    found = remote(url)
    assert found.header is None and found.problem
    assert text in found.problem
    assert not any(word in found.problem for word in ("secret", "pass@", "root:"))
    assert len(web.asked) <= 8


def test_a_file_that_is_replaced_meanwhile_is_told(web: Web) -> None:
    web.files["m.gguf"] = long_header()
    assert "another size each time" in remote(f"{web.url}/changing/m.gguf").problem


@pytest.mark.parametrize("content", [b"", b"<html>please log in</html>"])
@pytest.mark.parametrize("how", ["range", "plain", "unsized"])
def test_a_page_is_no_model(how: str, content: bytes, web: Web) -> None:
    web.files["m.gguf"] = content
    found = remote(f"{web.url}/{how}/m.gguf")
    assert found.header is None and found.problem


def test_a_header_without_end_is_given_up(web: Web) -> None:
    """It has texts of 8 KiB, and more and more of them; no more than the most that is allowed is fetched."""
    value = struct.pack("<IQ", 8, 1 << 13) + bytes(1 << 13)
    entries = b"".join(struct.pack("<Q", 6) + b"%06d" % number + value for number in range(9000))
    web.files["m.gguf"] = b"GGUF" + struct.pack("<IQQ", 3, 0, 16_000) + entries
    found = remote(f"{web.url}/range/m.gguf")
    assert "more than 64 MiB" in found.problem
    assert web.sent_bytes <= 64 << 20


def test_a_server_that_drips_is_given_up(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_headers, "ALTOGETHER_S", 0.3)
    web.files["m.gguf"], web.padding["m.gguf"] = b"GGUF", 1 << 30
    start = time.monotonic()
    assert "takes too long" in remote(f"{web.url}/dripping/m.gguf").problem
    assert time.monotonic() - start < WITHIN_S


def test_an_answer_that_goes_on_behind_its_length_is_not_read_on(web: Web, tiny: Path) -> None:
    web.files["tiny.gguf"], web.padding["tiny.gguf"] = tiny.read_bytes(), 2 << 20
    assert remote(f"{web.url}/endless/tiny.gguf").header is not None
    assert web.sent_bytes < 48 << 20


def test_headers_of_the_caller_go_to_the_server_and_its_own_connection_is_used(web: Web, tiny: Path) -> None:
    web.files["tiny.gguf"] = tiny.read_bytes()
    client = Client(SourcePolicy(lax=True))
    for _ in range(2):
        pieces = (Piece("tiny.gguf", f"{web.url}/range/tiny.gguf"),)
        found = read_listing(Listing(pieces, headers={"Authorization": "Bearer t"}), client)
        assert found.header is not None
    client.close()
    assert [each["Authorization"] for each in web.headers] == ["Bearer t"] * 2
    assert len(web.connections) == 1


@pytest.mark.parametrize(
    "url",
    [
        "",
        "m.gguf",
        "/m.gguf",
        "ftp://h/m",
        "file:///etc/passwd",
        "http://",
        "http://[bad/m.gguf",
        "hf://a/b",
        "http://h:99999/m",
        "http://\udcff/m",
        "http://127.0.0.1:1/\udcff",
        "http://127.0.0.1:1/a%00b",
    ],
)
def test_a_url_that_makes_no_sense_is_a_problem(url: str) -> None:
    found = remote(url)
    assert found.header is None and found.size_bytes is None and found.problem


def test_a_server_that_is_not_there_is_named() -> None:
    (port,) = free_ports(1)
    found = remote(f"http://127.0.0.1:{port}/m.gguf?token=secret")
    assert f"127.0.0.1:{port}/m.gguf: connection refused; is the server up?" in found.problem


# ── in the background ────────────────────────────────────────────────────────────────────────────


class Asker:
    """Someone who asks, and how often the bell rang."""

    def __init__(self) -> None:
        self.rings = 0
        self.headers = Headers(self._ring)

    def _ring(self) -> None:
        self.rings += 1


@pytest.fixture
def asker() -> Iterator[Asker]:
    yield Asker()
    eventually(lambda: not any(t.name == "headers" for t in threading.enumerate()), WITHIN_S, "the threads to end")


def until_read(ask: Callable[[], Reading | None]) -> Reading:
    return eventually(ask, WITHIN_S, "a reading")


def test_a_local_file_is_known_at_once_and_read_once(asker: Asker, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny.read_bytes())
    known = asker.headers.look(str(path))
    assert known is not None and known.header == header_of(tiny)
    path.write_bytes(b"something else")
    assert asker.headers.look(str(path)) is known
    asker.headers.forget_others()
    assert asker.headers.look(str(path)) is known
    asker.headers.forget_others()
    assert asker.headers.latest(str(path)) is known
    asker.headers.forget_others()
    asker.headers.forget_others()
    found = asker.headers.look(str(path))
    assert found is not None and "not a GGUF" in found.problem
    assert asker.rings == 0


def test_a_disk_that_hangs_keeps_nobody_waiting(asker: Asker, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hang, read = threading.Event(), read_file

    def slow(path: Path) -> Reading:
        hang.wait(WITHIN_S)
        return read(path)

    monkeypatch.setattr(headers_module, "read_file", slow)
    start = time.monotonic()
    for _ in range(50):
        assert asker.headers.look(str(tiny)) is None
    assert within(time.monotonic() - start, 1.0), "only the first look waits"
    hang.set()
    assert until_read(lambda: asker.headers.look(str(tiny))).header is not None
    eventually(lambda: asker.rings == 1, WITHIN_S, "the bell")


class HangingDisk(Places):
    """Places on a disk that does not answer until it is told to."""

    hang = threading.Event()

    def check(self, path: Path) -> None:
        if threading.current_thread() is threading.main_thread():
            raise AssertionError("the pass itself asked a disk that hangs")
        self.hang.wait(WITHIN_S)


def test_a_disk_that_hangs_delays_no_check_before_a_claim(asker: Asker, tiny: Path, tmp_path: Path) -> None:
    """Whether this Mac has a model that is named by its path is asked in each pass, before it claims the service."""
    places = HangingDisk()
    store = Store(tmp_path, lambda: None, Terms(places=places))
    readings = Readings(asker.headers, store, str(tmp_path))
    binary = Binary("/bin/engine", frozenset())
    check = ClaimCheck(
        store, Composer(Settings(), str(tmp_path)), readings, cast(Any, None), lambda *_: (binary, None), lambda: None
    )
    model = Model("default", "m", "u", 1, str(tiny), "gguf", None, None, artifact=Artifact(str(tiny)))
    endpoint = Endpoint("m", 8080, "", "ClusterIP", None)
    service = Service("default", "m", "u", 1, model, "llama-server", 1, False, endpoint, "chat", "normal", None, {})
    snapshot = cast(Any, SimpleNamespace(room=Room(64 << 30, 48 << 30, 48 << 30)))
    assert check.delay_s(service, snapshot) == FETCH_S
    places.hang.set()
    eventually(lambda: check.delay_s(service, snapshot) == READY_S, WITHIN_S, "the answer of the disk")
    eventually(lambda: asker.rings, WITHIN_S, "the bell")
    gone = replace(service, model=replace(model, artifact=Artifact(f"{tiny}-gone")))
    eventually(lambda: check.delay_s(gone, snapshot) is None, WITHIN_S, "a missing file")


def test_a_file_that_was_judged_is_not_read_a_second_time(
    asker: Asker, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Mac that claims a service has read its header before, to judge whether it fits."""
    read = list[Path]()
    monkeypatch.setattr(headers_module, "read_file", lambda path: (read.append(path), read_file(path))[1])
    refused = until_read(lambda: asker.headers.judged(f"{tiny}-other", lambda: False))
    assert refused == headers_module.MISSING and not read
    judged = until_read(lambda: asker.headers.judged(str(tiny), lambda: True))
    assert until_read(lambda: asker.headers.look(str(tiny))) is judged and read == [tiny]
    asker.headers.forget_others()
    assert asker.headers.look(str(tiny)) is judged
    asker.headers.forget_others()
    assert asker.headers.look(str(tiny)) is judged


def test_what_is_forgotten_while_it_is_read_rings_no_bell(
    asker: Asker, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang, done = threading.Event(), threading.Event()

    def slow(path: Path) -> Reading:
        hang.wait(WITHIN_S)
        done.set()
        return Reading(1)

    monkeypatch.setattr(headers_module, "read_file", slow)
    assert asker.headers.look(str(tiny)) is None
    asker.headers.forget_others()
    asker.headers.forget_others()
    hang.set()
    assert done.wait(WITHIN_S)
    eventually(lambda: not any(t.name == "headers" for t in threading.enumerate()), WITHIN_S, "the thread to end")
    assert asker.rings == 0


def test_what_failed_is_tried_again_after_a_while(
    asker: Asker, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "late.gguf"
    missing = asker.headers.look(str(path))
    assert missing is not None and missing.problem
    path.write_bytes(tiny.read_bytes())
    assert asker.headers.look(str(path)) == missing, "not before the time has come"
    monkeypatch.setattr(headers_module, "LOCAL_AGAIN_S", 0.0)
    rings = asker.rings
    eventually(lambda: until_read(lambda: asker.headers.look(str(path))).header, WITHIN_S, "the file")
    eventually(lambda: asker.rings == rings + 1, WITHIN_S, "a bell")


def test_a_file_of_a_directory_that_is_written_anew_is_read_anew(
    asker: Asker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headers_module, "LOCAL_AGAIN_S", 0.0)
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    until_read(lambda: asker.headers.look(str(tmp_path)))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 500)  # in its place, as `cp` does
    wanted = Reading(500, config={})
    eventually(lambda: asker.headers.look(str(tmp_path)) == wanted, WITHIN_S, "the larger weights")


def test_a_thread_that_cannot_be_started_leaves_no_header_unread(
    asker: Asker, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError):
            asker.headers.look(str(tiny))
    assert until_read(lambda: asker.headers.look(str(tiny))).header is not None


def test_a_known_header_is_told_also_while_no_thread_can_look_whether_it_still_is_that(
    asker: Asker, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing on this Mac would be started or stopped, for a look that can wait."""
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny.read_bytes())
    known = until_read(lambda: asker.headers.look(str(path)))
    monkeypatch.setattr(headers_module, "LOCAL_AGAIN_S", 0.0)
    path.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        assert asker.headers.look(str(path)) is known
    eventually(lambda: until_read(lambda: asker.headers.look(str(path))).problem, WITHIN_S, "the next look")


def no_thread(_: threading.Thread) -> None:
    """As while other programs of this user have as many as the system allows."""
    raise RuntimeError("can't start new thread")


def test_a_repository_on_a_server_is_judged_by_its_config_and_what_is_listed(web: Web) -> None:
    web.files["config.json"] = json.dumps({"model_type": "llama"}).encode()
    pieces = Piece("config.json", f"{web.url}/range/config.json"), Piece("a.safetensors", "http://x/", 70 << 30)
    client = Client(SourcePolicy(lax=True))
    assert read_listing(Listing(pieces), client) == Reading(70 << 30, config={"model_type": "llama"})
    beside = Piece("2_Dense/model.safetensors", "", size_bytes=1 << 30)
    assert read_listing(Listing((*pieces, beside)), client).size_bytes == 70 << 30
    web.files["config.json"] = b"<html>"
    assert "cannot be read" in read_listing(Listing(pieces), client).problem
    del web.files["config.json"]
    assert "answered 404" in read_listing(Listing(pieces), client).problem
    client.close()
