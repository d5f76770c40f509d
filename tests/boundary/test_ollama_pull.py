"""What a real Ollama tells of a download, from a registry that stalls, cuts and lies when it is told to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ollama
from tests.support.ollama import Ollama, digest_of, serving
from tests.support.ollama_registry import Registry, registry
from tests.support.system import eventually

MIB = 1 << 20
SUCCESS = {"status": "success"}
seeds = itertools.count(1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ollama]:
    with serving(tmp_path_factory.mktemp("pull")) as up:
        yield up


@pytest.fixture
def source() -> Iterator[Registry]:
    with registry() as made:
        yield made


def offered(source: Registry, tmp_path: Path, pad_mib: int = 0) -> tuple[str, str]:
    """(name, digest) of a model that nobody has pulled before."""
    seed = next(seeds)
    path = ollama.tiny(tmp_path / f"{seed}.gguf", pad_mib=pad_mib, seed=seed)
    return source.publish(f"m{seed}", path, num_ctx=1024, num_thread=1), digest_of(path)


def blob(server: Ollama, digest: str) -> Path:
    return server.models / "blobs" / digest.replace(":", "-")


def test_a_download_tells_how_it_goes_and_ends_with_success(server: Ollama, source: Registry, tmp_path: Path) -> None:
    name, digest = offered(source, tmp_path)
    stream = server.pull(name)
    lines = stream.ended()
    assert lines[0] == {"status": "pulling manifest"} and lines[-1] == SUCCESS
    (size,) = {each["total"] for each in lines if each.get("digest") == digest}
    assert size == len(source.blobs[digest]), "each layer has a total of its own"
    assert [each["status"] for each in lines[-3:-1]] == ["verifying sha256 digest", "writing manifest"]
    assert name in {each["name"] for each in server.ask("GET", "/api/tags")[1]["models"]}
    status, answer = server.chat(name)
    assert status == 200 and answer["choices"][0]["message"]["content"].strip() == "hello world from tiny"
    assert server.loaded()[name]["context_length"] == 1024
    body = {"model": "mine", "from": name, "parameters": {"num_ctx": 2048}, "stream": False}
    assert server.ask("POST", "/api/create", body) == (200, SUCCESS)
    server.keep("mine")
    assert server.loaded()["mine:latest"]["context_length"] == 2048


def test_what_is_there_is_not_fetched_but_asked_for_all_the_same(
    server: Ollama, source: Registry, tmp_path: Path
) -> None:
    name, _ = offered(source, tmp_path)
    server.pull(name).ended()
    before = len(source.asked)
    assert server.pull(name).ended()[-1] == SUCCESS
    assert [method for method, _, _ in source.asked[before:]] == ["GET"], "the manifest"
    source.manifests.clear()
    assert "file does not exist" in server.pull(name).ended()[-1]["error"]
    assert server.chat(name)[0] == 200


def test_failures_come_with_status_200(server: Ollama, source: Registry, tmp_path: Path) -> None:
    def failure(name: str, insecure: bool = True) -> str:
        status, answer = server.ask("POST", "/api/pull", {"model": name, "insecure": insecure})
        assert status == 200
        return str(answer.strip().splitlines()[-1])

    assert "pull model manifest: file does not exist" in failure(f"127.0.0.1:{source.port}/library/none:1")
    assert "connection refused" in failure("127.0.0.1:9/library/none:1")
    name, digest = offered(source, tmp_path)
    # In Go's words, by how much of HTTP the answer of this Python's server to a handshake is.
    told = failure(name, insecure=False)
    assert "does not look like a TLS handshake" in told or "server gave HTTP response to HTTPS client" in told
    source.blobs[digest] = source.blobs[digest][:-1] + b"x"
    assert "digest mismatch" in failure(name)
    assert not blob(server, digest).exists()
    assert server.ask("POST", "/api/pull", {"model": "a b"}) == (400, {"error": "invalid model name"})
    silent = {"model": f"127.0.0.1:{source.port}/library/none:1", "insecure": True, "stream": False}
    assert server.ask("POST", "/api/pull", silent)[0] == 500


def test_a_stalled_download_goes_on_telling_the_same_and_is_resumed_by_the_next(
    server: Ollama, source: Registry, tmp_path: Path
) -> None:
    name, digest = offered(source, tmp_path, pad_mib=8)
    source.stop_at(4 * MIB)
    first = server.pull(name)
    eventually(lambda: first.lines and first.lines[-1].get("completed") == 4 * MIB, 20, "4 MiB")
    told = len(first.lines)
    eventually(lambda: len(first.lines) > told + 3, 20, "more lines")
    assert first.lines[-1]["completed"] == 4 * MIB and first.running()
    second = server.pull(name).flowing()
    eventually(lambda: second.lines[-1].get("completed") == 4 * MIB, 20, "the same of the other")
    assert len(source.ranges()) == 1, "both wait for one download"
    second.leave()
    told = len(first.lines)
    eventually(lambda: len(first.lines) > told + 3, 20, "the first to go on")
    first.leave()
    # The part's progress is on disk once nobody waits for it any more.
    note = blob(server, f"{digest}-partial-0")
    eventually(lambda: f'"Completed":{4 * MIB}' in note.read_text(), 20, "the progress to be kept")
    source.go_on()
    # One that comes at once may still join the download that is being given up, and fails: "context canceled".
    eventually(lambda: server.pull(name).ended()[-1] == SUCCESS, 20, "the download to be resumed")
    size = len(source.blobs[digest])
    assert source.ranges()[:2] == [f"bytes=0-{size - 1}", f"bytes={4 * MIB}-{size - 1}"]


def test_a_cut_connection_is_mended_by_the_server_itself(server: Ollama, source: Registry, tmp_path: Path) -> None:
    name, digest = offered(source, tmp_path, pad_mib=8)
    source.stop_at(4 * MIB, cut=True)
    stream = server.pull(name)
    eventually(lambda: len(source.ranges()) > 1, 20, "another attempt")
    source.go_on()
    assert stream.ended()[-1] == SUCCESS
    assert source.ranges()[1] == f"bytes={4 * MIB}-{len(source.blobs[digest]) - 1}"


def test_a_server_that_ends_in_a_download_says_nothing_and_begins_again(source: Registry, tmp_path: Path) -> None:
    name, digest = offered(source, tmp_path, pad_mib=8)
    with serving(tmp_path / "server") as up:
        source.stop_at(4 * MIB)
        stream = up.pull(name)
        eventually(lambda: stream.lines and stream.lines[-1].get("completed") == 4 * MIB, 20, "4 MiB")
        assert up.stop() == 0
        assert "error" not in stream.ended()[-1] and stream.lines[-1] != SUCCESS
        assert blob(up, f"{digest}-partial").exists()
        up.start()
        assert not blob(up, f"{digest}-partial").exists(), "what is no whole blob is removed at a start"
        source.go_on()
        assert up.pull(name).ended()[-1] == SUCCESS
        first, again, *_ = source.ranges()
        assert first == again
