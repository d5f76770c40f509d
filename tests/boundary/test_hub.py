"""What models of Hugging Face come to: the real library against a Hub on loopback, and mirrors on the disk."""

from __future__ import annotations

import hashlib
import http.client
import os
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metal_supervisor.cli import model_source
from metal_supervisor.models.listing import Listing, Retry, Unusable
from metal_supervisor.models.remote import hub
from metal_supervisor.models.remote.source_policy import SourcePolicy
from metal_supervisor.models.remote.web import Client
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.sources import Artifact, canonical
from tests.support.hub import COMMIT, Hub, http_date

TOKEN = "hf_SecretOfTests"
OTHER = "f" * 40
GGUF = b"GGUF" + bytes(range(200))
SHARDS = {f"Q8/big-0000{number}-of-00003.gguf": GGUF * number for number in (1, 2, 3)}
MLX = {
    "README.md": b"#",
    "config.json": b'{"a":1}',
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "run.py": b"evil",
    "consolidated.safetensors": b"again",
    ".eval/x.json": b"{}",
    "sub/more.json": b"[]",
}
REPOS = {"o/gguf": {"m-Q4_K_M.gguf": GGUF, "a b.gguf": GGUF, "plain.txt": b"text"}, "o/big": SHARDS, "o/mlx": MLX}
SHORT_S = 5.0
NEAR = SourcePolicy(private=("127.0.0.0/8", "localhost"))


@pytest.fixture
def server() -> Iterator[Hub]:
    with Hub(REPOS) as made:
        yield made


def source(written: str, **more: object) -> Artifact:
    return Artifact(canonical(written), **more)  # type: ignore[arg-type]


def asked(server: Hub, written: str, token: str = "", pinned: str = "", **more: object) -> Listing:
    return hub.listing(source(written, **more), server.url, token, Client(NEAR), pinned, SHORT_S)


def refused(server: Hub, written: str, token: str = "", pinned: str = "", **more: object) -> Unusable:
    """How it is refused; what nobody may see is nowhere in it."""
    with pytest.raises(Unusable) as caught:
        asked(server, written, token, pinned, **more)
    everything = f"{caught.value!r} {caught.value} {''.join(traceback.format_exception(caught.value))}"
    assert not [secret for secret in (TOKEN, "Bearer", "signature", "recursive=true") if secret in everything]
    return caught.value


# ── files ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "written",
    [
        "hf://o/gguf/m-Q4_K_M.gguf",
        "hf://o/gguf@main/m-Q4_K_M.gguf",
        f"hf://o/gguf@{COMMIT}/m-Q4_K_M.gguf",
        "https://huggingface.co/o/gguf/blob/main/m-Q4_K_M.gguf?download=true",
        "hf://o/gguf@refs%2Fpr%2F1/m-Q4_K_M.gguf",
    ],
)
def test_a_file_is_its_size_its_digest_and_its_commit(server: Hub, written: str) -> None:
    found = asked(server, written)
    (piece,) = found.pieces
    assert (found.commit, dict(found.headers), found.path) == (COMMIT, {}, "")
    assert piece.url == f"{server.url}/o/gguf/resolve/{COMMIT}/m-Q4_K_M.gguf"
    digest = hashlib.sha256(GGUF).hexdigest()
    assert (piece.name, piece.size_bytes, piece.sha256, piece.validator) == ("m-Q4_K_M.gguf", len(GGUF), digest, digest)
    assert urllib.request.urlopen(piece.url, timeout=SHORT_S).read() == GGUF


def test_a_name_with_spaces_is_quoted_once(server: Hub) -> None:
    (piece,) = asked(server, "hf://o/gguf/a%20b.gguf").pieces
    assert piece.name == "a b.gguf" and piece.url.endswith("/a%20b.gguf")
    assert urllib.request.urlopen(piece.url, timeout=SHORT_S).read() == GGUF


def test_a_file_outside_lfs_has_a_validator_and_no_digest(server: Hub) -> None:
    (piece,) = asked(server, "hf://o/gguf/plain.txt").pieces
    assert piece.sha256 == "" and len(piece.validator) == 42 and piece.size_bytes == 4


def test_all_shards_are_found_from_any_and_are_of_one_commit(server: Hub) -> None:
    found = asked(server, "hf://o/big/Q8/big-00002-of-00003.gguf")
    assert [piece.name for piece in found.pieces] == [f"big-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    assert [piece.size_bytes for piece in found.pieces] == [len(GGUF) * number for number in (1, 2, 3)]
    assert all(f"/o/big/resolve/{COMMIT}/Q8/" in piece.url for piece in found.pieces)
    # The first is asked for by the revision; the others by what it turned out to be, whoever uploads meanwhile.
    assert [each.path.split("/")[4] for each in server.asked(method="HEAD")] == ["main", COMMIT, COMMIT]


def test_a_shard_that_is_missing_is_named(server: Hub) -> None:
    server.upload(OTHER, {"o/big": dict(list(SHARDS.items())[:2])})
    error = refused(server, "hf://o/big/Q8/big-00001-of-00003.gguf")
    assert error.reason == "SourceNotFound" and "big-00003-of-00003.gguf" in str(error)


def test_the_commit_of_an_earlier_try_is_kept(server: Hub) -> None:
    server.upload(OTHER, {"o/gguf": {"m-Q4_K_M.gguf": b"GGUF new"}})
    assert asked(server, "hf://o/gguf/m-Q4_K_M.gguf").commit == OTHER
    old = asked(server, "hf://o/gguf/m-Q4_K_M.gguf", pinned=COMMIT)
    assert old.commit == COMMIT and old.pieces[0].size_bytes == len(GGUF)
    assert asked(server, "hf://o/gguf", pinned=COMMIT, quantization="Q4_K_M").commit == COMMIT


@pytest.mark.parametrize("pinned", ["e" * 40, "no commit", "../" * 13 + "x"])
def test_a_commit_that_is_gone_is_no_obstacle(server: Hub, pinned: str) -> None:
    assert asked(server, "hf://o/gguf/m-Q4_K_M.gguf", pinned=pinned).commit == COMMIT
    assert asked(server, "hf://o/mlx", pinned=pinned, directory=True).commit == COMMIT


def test_a_server_that_mixes_commits_is_refused(server: Hub) -> None:
    server.resolve_as = OTHER
    error = refused(server, f"hf://o/big@{COMMIT}/Q8/big-00001-of-00003.gguf")
    assert error.reason == "DownloadFailed" and "another commit" in str(error)


def test_a_mirror_without_the_headers_of_the_hub_will_do(server: Hub) -> None:
    server.left_out = {"x-linked-etag", "x-linked-size", "x-repo-commit"}
    found = asked(server, "hf://o/gguf/m-Q4_K_M.gguf")
    (piece,) = found.pieces
    assert (found.commit, piece.sha256, piece.size_bytes, len(piece.validator)) == (COMMIT, "", None, 42)
    assert piece.url == f"{server.url}/o/gguf/resolve/{COMMIT}/m-Q4_K_M.gguf"
    assert len({piece.url.split("/")[6] for piece in asked(server, "o/big").pieces}) == 1


def test_a_mirror_that_has_files_and_nothing_else_will_do(server: Hub) -> None:
    server.left_out, server.lfs = {"x-repo-commit"}, False
    server.forced_status, server.forced_times, server.forced_path = 404, 99, "/api/"
    found = asked(server, "hf://o/gguf/m-Q4_K_M.gguf")
    (piece,) = found.pieces
    assert (found.commit, piece.size_bytes) == ("", len(GGUF))
    assert piece.url == f"{server.url}/o/gguf/resolve/main/m-Q4_K_M.gguf"
    assert asked(server, "hf://o/gguf/m-Q4_K_M.gguf", pinned=COMMIT).commit == COMMIT
    server.left_out |= {"etag", "content-length"}
    (bare,) = asked(server, "hf://o/gguf/m-Q4_K_M.gguf").pieces
    assert (bare.validator, bare.size_bytes) == ("", None)


def test_the_size_is_what_the_server_says(server: Hub) -> None:
    server.size_off_bytes = 7
    assert asked(server, "hf://o/gguf/m-Q4_K_M.gguf").pieces[0].size_bytes == len(GGUF) + 7
    assert [piece.size_bytes for piece in asked(server, "o/mlx", directory=True).pieces] == [14, 14, 9, 9]


@pytest.mark.parametrize("commit", ["../../x", "main", "A" * 40, "1" * 41])
def test_what_is_no_commit_never_gets_into_an_address(server: Hub, commit: str) -> None:
    server.resolve_as = commit
    server.forced_status, server.forced_times, server.forced_path = 404, 99, "/api/"
    found = asked(server, "hf://o/gguf/m-Q4_K_M.gguf")
    assert found.commit == "" and "/resolve/main/" in found.pieces[0].url


# ── repositories ─────────────────────────────────────────────────────────────────────────────────


def test_the_gguf_file_of_a_repository_is_found(server: Hub) -> None:
    found = asked(server, "o/gguf", quantization="q4_k_m")
    assert [piece.name for piece in found.pieces] == ["m-Q4_K_M.gguf"] and found.commit == COMMIT
    assert found.pieces == asked(server, "hf://o/gguf/m-Q4_K_M.gguf").pieces
    assert len(asked(server, "o/big").pieces) == 3
    error = refused(server, "o/gguf")
    assert (error.reason, error.retry) == ("AmbiguousSource", Retry.LATER)
    assert "a b.gguf, m-Q4_K_M.gguf" in str(error) and "spec.quantization" in str(error)
    assert asked(server, "o/gguf", files=("a b.gguf",)).pieces[0].name == "a b.gguf"
    assert refused(server, "o/mlx").reason == "InvalidModel"


def test_a_directory_is_what_an_engine_reads(server: Hub) -> None:
    found = asked(server, "o/mlx", directory=True)
    names = ["config.json", "model.safetensors", "sub/more.json", "tokenizer.json"]
    assert [piece.name for piece in found.pieces] == names and found.commit == COMMIT
    for piece in found.pieces:
        assert piece.url == f"{server.url}/o/mlx/resolve/{COMMIT}/{piece.name}"
        assert piece.size_bytes == len(MLX[piece.name])
    weights = found.pieces[1]
    assert weights.sha256 == weights.validator == hashlib.sha256(b"weights").hexdigest()
    assert found.pieces[0].sha256 == "" and len(found.pieces[0].validator) == 42
    # What the list says a file's tag is, the file says too.
    assert asked(server, "hf://o/mlx/config.json").pieces[0].validator == found.pieces[0].validator


def test_files_of_a_directory_that_are_named(server: Hub) -> None:
    files = ("model.safetensors", "config.json")
    assert [piece.name for piece in asked(server, "o/mlx", directory=True, files=files).pieces] == list(files[::-1])
    assert "'run.py' is no file that engines read" in str(refused(server, "o/mlx", directory=True, files=("run.py",)))
    assert "spec.files[0] 'no'" in str(refused(server, "o/mlx", directory=True, files=("no",)))
    error = refused(server, "o/gguf", directory=True)
    assert (error.reason, error.retry) == ("InvalidModelFile", Retry.LATER) and "config.json" in str(error)


def test_long_lists_come_in_pages(server: Hub) -> None:
    server.upload(OTHER, {"o/mlx": {**MLX, **{f"{number:04d}.json": b"{}" for number in range(2500)}}})
    assert len(asked(server, "o/mlx", directory=True).pieces) == 2504
    assert len(server.asked(f"/tree/{OTHER}")) == 3


def test_more_files_than_a_model_has_are_refused(server: Hub) -> None:
    server.extra_names = tuple(f"{number}.md" for number in range(5000))
    assert "more than 4096 files" in str(refused(server, "o/mlx", directory=True))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(["..", ".", "", "a", "/", "\\", "\n", "x\0", "é", ".git"]), min_size=1, max_size=5))
def test_a_hostile_list_names_no_file_outside(server: Hub, parts: list[str]) -> None:
    name = "/".join(parts) + "/config.json"
    server.extra_names = (name,)
    bad = {"..", ".", "", "/", "\\", "\n", "x\0"}
    try:
        found = asked(server, "o/mlx", directory=True)
    except Unusable as error:
        assert (error.reason, error.retry) == ("InvalidModelFile", Retry.NEVER) and bad & set(parts)
        assert str(error).isprintable()
        return
    assert not bad & set(parts)
    assert all(not piece.name.startswith("/") and ".." not in piece.name.split("/") for piece in found.pieces)


# ── who may ──────────────────────────────────────────────────────────────────────────────────────


def test_a_token_goes_to_the_hub_and_nowhere_else(server: Hub) -> None:
    server.token = TOKEN
    found = asked(server, "hf://o/big/Q8/big-00001-of-00003.gguf", TOKEN)
    assert found.headers == {"Authorization": f"Bearer {TOKEN}"} and TOKEN not in repr(found)
    asked(server, "o/mlx", TOKEN, directory=True)
    assert {each.authorization for each in server.log} == {f"Bearer {TOKEN}"}
    assert {each.host for each in server.log} == {"127.0.0.1"} and not server.asked(method="POST")
    assert asked(server, "o/mlx", f" {TOKEN}\n", directory=True).headers == found.headers


def test_without_a_token_the_library_does_not_find_one(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert hub.own_token(SourcePolicy()) == TOKEN
    asked(server, "hf://o/gguf/m-Q4_K_M.gguf")
    asked(server, "o/mlx", directory=True)
    assert {each.authorization for each in server.log} == {""}


@pytest.mark.parametrize("more", [{}, {"directory": True}])
def test_a_private_repository_asks_for_a_token(server: Hub, more: dict[str, bool]) -> None:
    server.token = TOKEN
    written = "o/mlx" if more else "hf://o/gguf/m-Q4_K_M.gguf"
    error = refused(server, written, **more)
    assert (error.reason, error.retry) == ("SourceUnauthorized", Retry.LATER)
    assert "does not exist, or is private" in str(error) and "spec.sourceSecretRef (key HF_TOKEN)" in str(error)
    error = refused(server, written, "hf_wrong", **more)
    assert error.reason == "SourceUnauthorized" and "is it right" in str(error)
    assert refused(server, written, "not a token", **more).reason == "SourceUnauthorized"
    assert refused(server, written, "a\r\nb", **more).reason == "SourceUnauthorized"


@pytest.mark.parametrize("more", [{}, {"directory": True}])
def test_a_gated_repository_says_where_to_accept_its_terms(server: Hub, more: dict[str, bool]) -> None:
    server.gated = True
    written = "o/mlx" if more else "hf://o/gguf/m-Q4_K_M.gguf"
    error = refused(server, written, **more)
    assert (error.reason, error.retry) == ("GatedModel", Retry.LATER)
    assert f"terms on {server.url}/o/" in str(error) and "spec.sourceSecretRef (key HF_TOKEN)" in str(error)
    error = refused(server, written, TOKEN, **more)
    assert error.reason == "GatedModel" and "the token's account must accept" in str(error)


@pytest.mark.parametrize("more", [{}, {"directory": True}])
def test_what_does_not_exist_is_named(server: Hub, more: dict[str, bool]) -> None:
    path = "" if more else "/m-Q4_K_M.gguf"
    error = refused(server, f"hf://o/none@main{path}", TOKEN, **more)
    assert (error.reason, error.retry) == ("SourceNotFound", Retry.LATER) and "o/none does not exist" in str(error)
    error = refused(server, f"hf://o/none@main{path}", **more)
    assert error.reason == "SourceUnauthorized" and "does not exist, or is private" in str(error)
    error = refused(server, f"hf://o/gguf@v9{path}", **more)
    assert error.reason == "SourceNotFound" and "no revision 'v9'" in str(error)
    error = refused(server, "hf://o/gguf@main/none.gguf")
    assert error.reason == "SourceNotFound" and "no file 'none.gguf' at 'main'" in str(error)


def test_a_plain_404_is_one_too(server: Hub) -> None:
    with Hub({}) as empty:
        empty.left_out = {"x-error-code", "x-error-message"}
        error = refused(empty, "hf://o/r/m.gguf", TOKEN)
        assert error.reason == "SourceNotFound"


@pytest.mark.parametrize("written", ["hf://o/r@main/a//b.gguf", "hf://o/r@main/../b.gguf", "hf://o/r--x@main/b.gguf"])
def test_what_the_real_reader_refuses_is_refused_for_good(server: Hub, written: str) -> None:
    with pytest.raises(Unusable) as caught:
        hub.listing(Artifact(written), server.url, "", Client(NEAR))
    assert (caught.value.reason, caught.value.retry) == ("InvalidModel", Retry.NEVER) and not server.log


# ── troubles ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("more", [{}, {"directory": True}])
@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_server_in_trouble_is_asked_once_and_left_alone(server: Hub, status: int, more: dict[str, bool]) -> None:
    server.forced_status, server.forced_times, server.retry_after = status, 99, "17"
    written = "o/mlx" if more else "hf://o/gguf/m-Q4_K_M.gguf"
    error = refused(server, written, TOKEN, **more)
    assert (error.reason, error.retry, error.after_s) == ("DownloadFailed", Retry.SOON, 17.0)
    assert f"answered {status}" in str(error) and len(server.log) == 1


def test_a_list_that_fails_is_not_asked_for_again(server: Hub) -> None:
    """The library on its own would try five times more, and has no timeout there."""
    server.forced_status, server.forced_times, server.forced_path = 503, 99, "/tree/"
    error = refused(server, "o/mlx", TOKEN, directory=True)
    assert (error.reason, error.retry) == ("DownloadFailed", Retry.SOON)
    assert [each.status for each in server.log] == [200, 503]


@pytest.mark.parametrize(
    ("said", "least_s", "most_s"),
    [("0", 0, 0), ("999999", 300, 300), ("", 0, 0), ("soon", 0, 0), ("-5", 0, 0), ("date", 100, 125)],
)
def test_how_long_to_leave_it_alone_is_bounded(server: Hub, said: str, least_s: float, most_s: float) -> None:
    server.forced_status, server.forced_times = 429, 1
    server.retry_after = http_date(time.time() + 120) if said == "date" else said
    assert least_s <= refused(server, "hf://o/gguf/m-Q4_K_M.gguf").after_s <= most_s


def test_a_server_that_is_gone_or_silent_is_tried_again_soon() -> None:
    artifact = source("o/mlx", directory=True)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never says a word
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for each in (artifact, source("hf://o/r/m.gguf")):
            with pytest.raises(Unusable, match="no answer in time; is the server up") as caught:
                hub.listing(each, url, TOKEN, Client(NEAR), timeout_s=0.1)
            assert (caught.value.reason, caught.value.retry) == ("DownloadFailed", Retry.SOON)
    with pytest.raises(Unusable, match="connection refused; is the server up") as caught:
        hub.listing(artifact, url, TOKEN, Client(NEAR), timeout_s=SHORT_S)
    assert (caught.value.reason, caught.value.retry) == ("DownloadFailed", Retry.SOON)


class Raw:
    """A server that gives one answer to everything, byte by byte if need be."""

    def __init__(self, answer: bytes, drip_s: float = 0.0) -> None:
        self._answer, self._drip_s = answer, drip_s
        self._stop = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        while not self._stop.is_set():
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            with peer:
                try:
                    peer.recv(65536)
                    peer.sendall(self._answer)
                    while self._drip_s and not self._stop.wait(self._drip_s):
                        peer.sendall(b" ")
                except OSError:
                    continue

    def __enter__(self) -> Raw:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (HEAD + b"\r\n" + b"<html>login</html>", "not understood"),
        (HEAD + b"\r\n[]", "not understood"),
        (HEAD + b'\r\n{"sha": "../../etc", "id": "o/mlx"}', "names no commit"),
        (HEAD + b'\r\n{"sha": 5, "id": "o/mlx"}', "names no commit"),
        (HEAD + b"\r\n" + b"[" * 200_000, "not understood"),
        (HEAD + b"Content-Encoding: gzip\r\n\r\n\x1f\x8b", "compressed"),
        (HEAD.replace(b"200 OK", b"503 Busy") + b"Content-Encoding: gzip\r\n\r\n\x1f\x8b", "answered 503"),
        (HEAD + b"\r\n" + b" " * (17 << 20), "too long"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", "the line was cut"),
        (b"SSH-2.0-OpenSSH\r\n", "ProtocolError"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/x\r\nContent-Length: 0\r\n\r\n", "another server"),
        (b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n", "mirror of Hugging Face"),
        (b"HTTP/1.1 302 Found\r\nLocation: /x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", "TooManyRedirects"),
        (b"HTTP/1.1 418 I'm a teapot\r\nContent-Length: 0\r\n\r\n", "answered 418"),
    ],
)
def test_a_server_that_is_no_hub_is_said_to_be_none(answer: bytes, says: str) -> None:
    with Raw(answer) as server, pytest.raises(Unusable, match=says) as caught:
        hub.listing(source("o/mlx", directory=True), server.url, TOKEN, Client(NEAR), timeout_s=SHORT_S)
    assert caught.value.reason == "DownloadFailed" and str(caught.value).isprintable()
    assert TOKEN not in "".join(traceback.format_exception(caught.value))


def test_a_server_that_drips_its_answer_holds_nobody_for_ever() -> None:
    with Raw(HEAD + b"\r\n", drip_s=0.01) as server, pytest.raises(Unusable, match="too long") as caught:
        hub.listing(source("o/mlx", directory=True), server.url, "", Client(NEAR), timeout_s=0.5)
    assert caught.value.retry is Retry.SOON


def test_a_list_that_goes_on_elsewhere_does_not_take_the_token_along(server: Hub) -> None:
    with Hub(REPOS) as other:
        server.redirects[f"/api/models/o/mlx/tree/{COMMIT}"] = f"{other.url}/api/models/o/mlx/tree/{COMMIT}"
        error = refused(server, "o/mlx", TOKEN, directory=True)
        assert error.reason == "DownloadFailed" and not other.log
        assert f"{server.url} sends us to another server" in str(error)


def test_a_mirror_that_sends_us_to_the_hub_does_not_send_the_token() -> None:
    from metal_supervisor.models.remote import hub_client as client

    call = client._Call(Client(NEAR), "http://mirror.example", 1.0, time.monotonic() + 60)
    for url, kept in (
        ("http://mirror.example/api", True),
        ("https://huggingface.co/api", False),
        ("https://mirror.example/x", False),
    ):
        request = client.httpx2.Request("GET", url, headers={"Authorization": f"Bearer {TOKEN}"})
        client._judge(request, call)
        assert ("Authorization" in request.headers) is kept


def test_a_repository_that_was_renamed_is_followed(server: Hub) -> None:
    server.redirects["/o/old/resolve/main/m-Q4_K_M.gguf"] = "/o/gguf/resolve/main/m-Q4_K_M.gguf"
    assert asked(server, "hf://o/old/m-Q4_K_M.gguf", TOKEN).commit == COMMIT


def test_many_ask_at_once(server: Hub) -> None:
    found: list[Listing] = []
    threads = [
        threading.Thread(target=lambda: found.append(asked(server, "o/mlx", TOKEN, directory=True))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(map(repr, found))) == 1


# ── the library in our process ───────────────────────────────────────────────────────────────────


def run(program: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        env={**kept, "HF_HOME": str(home), "HOME": str(home), **environment},
        text=True,
        capture_output=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )


def test_it_is_imported_when_it_is_needed_and_says_nothing(server: Hub, tmp_path: Path) -> None:
    program = f"""
        import logging, os, sys
        logging.basicConfig(level=logging.DEBUG)
        logging.getLogger("urllib3").setLevel(logging.ERROR)  # as our programs have it
        from metal_supervisor.models.remote import hub
        from metal_supervisor.models.remote.source_policy import SourcePolicy
        from metal_supervisor.models.remote.web import Client
        from metal_supervisor.spec.sources import Artifact
        client = Client(SourcePolicy(lax=True))
        assert not {{"huggingface_hub", "httpx2"}} & sys.modules.keys()
        hub.listing(Artifact("hf://o/mlx@main", directory=True), {server.url!r}, {TOKEN!r}, client)
        try:
            hub.listing(Artifact("hf://o/none@main", directory=True), {server.url!r}, {TOKEN!r}, client)
        except hub.Unusable as error:
            assert error.reason == "SourceNotFound"
        assert os.environ.get("HF_DEBUG") == "1" and "HF_HUB_DISABLE_TELEMETRY" not in os.environ
    """
    done = run(program, tmp_path, HF_DEBUG="1", HF_ENDPOINT=server.url, HF_HUB_VERBOSITY="debug")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    # No telemetry, no registry of agents: the repository, and nothing else.
    assert all("/o/" in each.path for each in server.log) and len(server.log) == 4
    assert not list(tmp_path.iterdir())


def test_the_token_of_this_macs_user(tmp_path: Path) -> None:
    program = "from metal_supervisor.models.remote import hub, source_policy; "
    program += "print(repr(hub.own_token(source_policy.SourcePolicy())))"
    assert run(program, tmp_path).stdout == "''\n"
    (tmp_path / "token").write_text("hf_file\n")
    assert run(program, tmp_path).stdout == "'hf_file'\n"
    assert run(program, tmp_path, HF_TOKEN="hf_environment").stdout == "'hf_environment'\n"
    (tmp_path / "token").unlink()
    (tmp_path / "token").mkdir()
    assert run(program, tmp_path).stdout == "''\n"


def test_offline_is_a_reason(server: Hub, tmp_path: Path) -> None:
    program = f"""
        from metal_supervisor.models.remote import hub
        from metal_supervisor.models.remote.source_policy import SourcePolicy
        from metal_supervisor.models.remote.web import Client
        from metal_supervisor.spec.sources import Artifact
        client = Client(SourcePolicy(lax=True))
        try:
            hub.listing(Artifact("hf://o/mlx@main", directory=True), {server.url!r}, "", client)
        except hub.Unusable as error:
            print(error.reason, error.retry.value, "HF_HUB_OFFLINE" in str(error))
    """
    assert run(program, tmp_path, HF_HUB_OFFLINE="1").stdout == "DownloadFailed soon True\n" and not server.log


# ── a mirror on the disk ─────────────────────────────────────────────────────────────────────────


def put(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def cached(mirror: Path, repo: str, files: dict[str, bytes], revision: str = "main") -> Path:
    """As the library's own cache has it: blobs, and a snapshot of links to them."""
    base = mirror / f"models--{repo.replace('/', '--')}"
    (base / "refs").mkdir(parents=True, exist_ok=True)
    (base / "refs" / revision).write_text(COMMIT)
    for name, data in files.items():
        blob = base / "blobs" / hashlib.sha256(data).hexdigest()
        blob.parent.mkdir(exist_ok=True)
        blob.write_bytes(data)
        link = base / "snapshots" / COMMIT / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return base / "snapshots" / COMMIT


def missing(artifact: Artifact, mirror: Path) -> Unusable:
    with pytest.raises(Unusable) as caught:
        hub.local(artifact, mirror)
    return caught.value


def test_the_directory_that_hf_download_leaves(tmp_path: Path) -> None:
    put(tmp_path / "o/gguf", REPOS["o/gguf"])
    put(tmp_path / "o/big", SHARDS)
    put(tmp_path / "o/mlx", {**MLX, ".cache/huggingface/download/config.json.metadata": b"x"})
    assert hub.local(source("hf://o/gguf/m-Q4_K_M.gguf"), tmp_path) == tmp_path / "o/gguf/m-Q4_K_M.gguf"
    assert hub.local(source("o/gguf", quantization="Q4_K_M"), tmp_path) == tmp_path / "o/gguf/m-Q4_K_M.gguf"
    first = tmp_path / "o/big/Q8/big-00001-of-00003.gguf"
    assert hub.local(source("hf://o/big/Q8/big-00003-of-00003.gguf"), tmp_path) == first
    assert hub.local(source("o/big"), tmp_path) == first
    assert hub.local(source("o/mlx", directory=True), tmp_path) == tmp_path / "o/mlx"
    assert missing(source("o/gguf"), tmp_path).reason == "AmbiguousSource"


def test_the_cache_of_the_hubs_own_library(tmp_path: Path) -> None:
    gguf, mlx, big = (cached(tmp_path, repo, REPOS[repo]) for repo in ("o/gguf", "o/mlx", "o/big"))
    for revision in ("main", COMMIT):
        found = hub.local(source(f"hf://o/gguf@{revision}/m-Q4_K_M.gguf"), tmp_path)
        assert found == gguf / "m-Q4_K_M.gguf" and found.read_bytes() == GGUF
    assert hub.local(source("o/mlx", directory=True), tmp_path) == mlx
    assert hub.local(source("o/big"), tmp_path) == big / "Q8/big-00001-of-00003.gguf"
    assert missing(source("hf://o/gguf@v2/m-Q4_K_M.gguf"), tmp_path).reason == "ModelFileMissing"
    cached(tmp_path, "o/gguf", {}, "refs_pr_1")
    assert hub.local(source("hf://o/gguf@refs_pr_1/m-Q4_K_M.gguf"), tmp_path) == gguf / "m-Q4_K_M.gguf"


def test_the_library_finds_its_cache_where_we_do(tmp_path: Path) -> None:
    from huggingface_hub import try_to_load_from_cache

    cached(tmp_path, "o/gguf", REPOS["o/gguf"])
    found = hub.local(source("hf://o/gguf/m-Q4_K_M.gguf"), tmp_path)
    assert try_to_load_from_cache("o/gguf", "m-Q4_K_M.gguf", cache_dir=tmp_path) == str(found)


@pytest.mark.parametrize("remote", [True, False])
def test_of_two_files_of_one_quantization_the_header_tells_the_draft_head(remote: bool, tmp_path: Path) -> None:
    files = {"m-Q8_0.gguf": _model("llama"), "small/m-Q8_0.gguf": _model("gemma4-assistant")}
    wanted = source("o/r", quantization="Q8_0")
    if remote:
        with Hub({"o/r": files}) as server:
            assert asked(server, "o/r", quantization="Q8_0").chosen == "m-Q8_0.gguf"
        return
    put(tmp_path / "o/r", files)
    assert hub.local(wanted, tmp_path) == tmp_path / "o/r/m-Q8_0.gguf"


def _model(architecture: str) -> bytes:
    """A GGUF file of one tensor, without data."""

    def text(words: str) -> bytes:
        return struct.pack("<Q", len(words)) + words.encode()

    entry = text("general.architecture") + struct.pack("<I", 8) + text(architecture)
    tensor = text("t") + struct.pack("<IQIQ", 1, 8, 0, 0)
    made = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + entry + tensor
    return made + bytes(-len(made) % 32) + bytes(32)


def test_what_is_in_neither_place_names_both(tmp_path: Path) -> None:
    put(tmp_path / "o/big", dict(list(SHARDS.items())[:2]))
    for artifact in (
        source("hf://o/r/m.gguf"),
        source("o/r"),
        source("o/r", directory=True),
        source("hf://o/big/Q8/big-00001-of-00003.gguf"),
    ):
        error = missing(artifact, tmp_path)
        assert error.reason == "ModelFileMissing"
        repo = "o/big" if "big" in artifact.source else "o/r"
        assert str(tmp_path / repo) in str(error) and str(tmp_path / f"models--{repo.replace('/', '--')}") in str(error)


def test_no_link_leads_out_of_a_mirror(tmp_path: Path) -> None:
    outside = put(tmp_path / "outside", {**MLX, "m.gguf": GGUF})
    mirror = tmp_path / "mirror"
    put(mirror / "o/mlx", {name: data for name, data in MLX.items() if name != "tokenizer.json"})
    (mirror / "o/mlx/tokenizer.json").symlink_to(outside / "tokenizer.json")
    (mirror / "o/file").mkdir()
    (mirror / "o/file/m.gguf").symlink_to("../../../outside/m.gguf")
    (mirror / "o/whole").symlink_to(outside)
    for artifact in (
        source("o/mlx", directory=True),
        source("o/whole", directory=True),
        source("o/file"),
        source("hf://o/file/m.gguf"),
        source("hf://o/whole/m.gguf"),
    ):
        error = missing(artifact, mirror)
        assert error.reason == "InvalidModelFile" and "leads out of" in str(error)
    # A mirror that is a link itself is one as any other.
    (tmp_path / "alias").symlink_to(outside.parent / "real")
    put(tmp_path / "real/o/r", {"m.gguf": GGUF})
    assert hub.local(source("hf://o/r/m.gguf"), tmp_path / "alias") == tmp_path / "alias/o/r/m.gguf"


@pytest.mark.parametrize(
    "name", ["hf://o/r@main/../../x.gguf", "hf://o/r@..%2F..%2Fx/m.gguf", "hf://o/r@%2E%2E/m.gguf"]
)
def test_no_name_leads_out_of_a_mirror(tmp_path: Path, name: str) -> None:
    put(tmp_path, {"x.gguf": GGUF, "x/m.gguf": GGUF, "mirror/o/r/a": b""})
    assert missing(Artifact(name), tmp_path / "mirror").reason == "InvalidModel"


def test_pipes_and_loops_in_a_mirror_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "o/r").mkdir(parents=True)
    os.mkfifo(tmp_path / "o/r/m.gguf")
    (tmp_path / "o/r/loop.gguf").symlink_to("loop.gguf")
    assert missing(source("hf://o/r/m.gguf"), tmp_path).reason == "ModelFileMissing"
    assert missing(source("hf://o/r/loop.gguf"), tmp_path).reason == "ModelFileMissing"


# ── the Hub of the tests ─────────────────────────────────────────────────────────────────────────


def fetched(url: str, start: int = 0) -> tuple[int, bytes]:
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    with urllib.request.urlopen(request, timeout=SHORT_S) as answer:
        return answer.status, answer.read()


def test_the_test_hub_serves_files_from_the_disk_in_ranges(tmp_path: Path) -> None:
    data = os.urandom(200_001)
    (tmp_path / "m.gguf").write_bytes(data)
    with Hub({"o/r": {"m.gguf": tmp_path / "m.gguf"}}) as server:
        (piece,) = asked(server, "o/r").pieces
        assert piece.sha256 == hashlib.sha256(data).hexdigest() == server.sha256("o/r", "m.gguf")
        assert fetched(piece.url) == (200, data) and server.sent("m.gguf") == len(data)
        assert fetched(piece.url, 150_000) == (206, data[150_000:]) and server.sent("m.gguf") == len(data) + 50_001
        assert server.asked("m.gguf")[-1].host == "localhost" and server.asked("m.gguf")[-1].range == "bytes=150000-"
        server.ranges = False
        assert fetched(piece.url, 150_000) == (200, data)
        server.corrupt = True
        wrong = fetched(piece.url)[1]
        assert [at for at in range(len(data)) if data[at] != wrong[at]] == [100_000]
        server.corrupt, server.cut_after_bytes, server.cut_times = False, 70_000, 1
        before = server.sent("m.gguf")
        with pytest.raises(http.client.IncompleteRead):
            fetched(piece.url)
        assert server.sent("m.gguf") - before == 70_000 and fetched(piece.url) == (200, data)


class NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None


def test_a_signed_address_of_the_test_hub_expires(server: Hub) -> None:
    server.expires = 2
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.build_opener(NoRedirect).open(f"{server.url}/o/gguf/resolve/main/a%20b.gguf", timeout=SHORT_S)
    with caught.value as answer:
        signed = answer.headers["Location"]
    assert signed.startswith(server.cdn)
    assert [fetched(signed)[0] for _ in range(2)] == [200, 200]
    with pytest.raises(urllib.error.HTTPError) as caught:
        fetched(signed)
    with caught.value as answer:
        assert answer.code == 403


# ── what `serve` is told ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("typed", "source"),
    [
        ("o/r:UD-Q4_K_XL", "hf://o/r/UD-Q4_K_XL/big-UD-Q4_K_XL-00001-of-00002.gguf"),
        ("o/r:Q8_0", "hf://o/r/Q8_0/big-Q8_0.gguf"),
        ("o/r", "hf://o/r/UD-Q4_K_XL/big-UD-Q4_K_XL-00001-of-00002.gguf"),
    ],
)
def test_a_file_in_a_folder_of_its_repository_keeps_the_folder(typed: str, source: str, tmp_path: Path) -> None:
    parts = {f"UD-Q4_K_XL/big-UD-Q4_K_XL-0000{number}-of-00002.gguf": b"GGUF" for number in (1, 2)}
    with Hub({"o/r": {**parts, "Q8_0/big-Q8_0.gguf": b"GGUF"}}) as server:
        made = model_source.resolve(Settings(hf_endpoint=server.url, state_dir=str(tmp_path)), typed)
    assert made.source == source and not made.note.startswith("of several files, hf://")


def test_a_repository_of_a_mirror_on_this_mac_is_named_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "o/r/Q8_0").mkdir(parents=True)
    (tmp_path / "o/r/Q8_0/big-Q8_0.gguf").write_bytes(b"GGUF")
    settings = Settings(hf_endpoint=str(tmp_path), state_dir=str(tmp_path))
    assert model_source.resolve(settings, "o/r:Q8_0").source == "hf://o/r:Q8_0"
    assert model_source.resolve(settings, "o/r").source == "hf://o/r"
