"""What a real Ollama does, as far as we rely on it or have to mind it; its documentation says little of this."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support import ollama
from tests.support.ollama import Ollama, digest_of, serving
from tests.support.system import eventually, slowed

MANY = 1000
"""Tokens that take about half a second."""
FOR_EVER = "2300"
"""An expiry later than this means never."""


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ollama.endless(tmp_path_factory.mktemp("gguf") / "a.gguf", context=8192)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes a while to load."""
    return ollama.tiny(tmp_path_factory.mktemp("slow") / "slow.gguf", pad_mib=400)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ollama]:
    with serving(tmp_path_factory.mktemp("shared")) as up:
        yield up


@pytest.fixture
def server(shared: Ollama) -> Iterator[Ollama]:
    """One server for most tests; each leaves it without models."""
    yield shared
    for name in [each["name"] for each in shared.ask("GET", "/api/tags")[1]["models"]]:
        shared.keep(name, 0)
        eventually(lambda name=name: name not in shared.loaded(), 20, f"{name} to be unloaded")
        shared.ask("DELETE", "/api/delete", {"model": name})


def own_digest(number: int) -> str:
    """A digest that no file has."""
    return f"sha256:{number:064x}"


def link_as(server: Ollama, gguf: Path, digest: str) -> str:
    """Makes a file a blob under whatever digest."""
    server.link(gguf)
    blob = server.models / "blobs" / digest.replace(":", "-")
    if not blob.exists():
        os.link(gguf, blob)
    return digest


def unloaded(server: Ollama, name: str) -> None:
    eventually(lambda: name not in server.loaded(), 20, f"{name} to be unloaded")


# ── blobs and names ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_file_that_is_hard_linked_is_a_blob_at_once(server: Ollama, gguf: Path) -> None:
    path = f"/api/blobs/{digest_of(gguf)}"
    assert server.ask("HEAD", path)[0] == 404
    status, answer = server.ask("POST", "/api/create", {"model": "a", "files": {"m.gguf": digest_of(gguf)}})
    assert status == 200 and '{"error":"open ' in answer, "an error after the first line has status 200"
    links = gguf.stat().st_nlink
    digest = server.link(gguf)
    assert server.ask("HEAD", path)[0] == 200
    assert server.ask("POST", path, b"not read")[0] == 200
    server.create("a", digest)
    assert gguf.stat().st_nlink == links + 1, "there is no second copy"


def test_an_upload_is_checked(server: Ollama) -> None:
    assert server.ask("POST", f"/api/blobs/{own_digest(1)}", b"abc")[0] == 400
    assert server.ask("POST", "/api/blobs/sha256:xyz", b"abc") == (400, {"error": "invalid digest format"})


def test_what_is_no_model_is_refused_at_once(server: Ollama, gguf: Path, tmp_path: Path) -> None:
    cut, text = tmp_path / "cut.gguf", tmp_path / "text"
    cut.write_bytes(gguf.read_bytes()[:200_000])
    text.write_text("no model" * 100)
    for path, status, why in ((cut, 500, "exceeds file size"), (text, 400, "not in GGUF format")):
        body = {"model": "bad", "files": {"m.gguf": server.link(path)}, "stream": False}
        found = server.ask("POST", "/api/create", body)
        assert found[0] == status and why in found[1]["error"]
    assert server.keep("bad")[0] == 404


@pytest.mark.parametrize("name", ["default.phi-4-mini", "ns/svc", "x" * 80, "_a"])
def test_names_that_it_takes_get_a_tag(server: Ollama, gguf: Path, name: str) -> None:
    server.create(name, server.link(gguf))
    assert [each["name"] for each in server.ask("GET", "/api/tags")[1]["models"]] == [f"{name}:latest"]
    assert [each["id"] for each in server.ask("GET", "/v1/models")[1]["data"]] == [f"{name}:latest"]
    assert server.ask("GET", f"/v1/models/{name}")[0] == (200 if "/" not in name else 404)


@pytest.mark.parametrize("name", ["a b", "x" * 81, "-a", "ü", "a:b:c"])
def test_names_that_it_does_not_take_are_said_to_be_invalid(server: Ollama, gguf: Path, name: str) -> None:
    body = {"model": name, "files": {"m.gguf": server.link(gguf)}, "stream": False}
    assert server.ask("POST", "/api/create", body) == (400, {"error": "invalid model name"})


def test_a_model_that_is_not_there_is_404_by_either_api(server: Ollama) -> None:
    assert server.keep("none") == (404, {"error": "model 'none' not found"})
    status, answer = server.chat("none")
    assert status == 404 and answer["error"]["message"] == "model 'none' not found"
    assert server.ask("DELETE", "/api/delete", {"model": "none"})[0] == 404


# ── loading and keeping ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_loaded_model_tells_its_context_and_is_served_by_its_bare_name(server: Ollama, gguf: Path) -> None:
    server.create("a", server.link(gguf), num_ctx=1024)
    assert server.loaded() == {}
    status, answer = server.keep("a")
    assert status == 200 and answer["done_reason"] == "load" and answer["response"] == ""
    row = server.loaded()["a:latest"]
    assert row["model"] == row["name"] and row["context_length"] == 1024 and row["expires_at"] > FOR_EVER
    listed = {each["name"]: each["digest"] for each in server.ask("GET", "/api/tags")[1]["models"]}
    assert row["digest"] == listed["a:latest"]
    for name in ("a", "a:latest", "A"):
        status, answer = server.chat(name)
        assert status == 200 and answer["model"] == name and "hello world" in answer["choices"][0]["message"]["content"]
    assert server.loaded()["a:latest"]["expires_at"] > FOR_EVER, "a request that says nothing changes nothing"


def test_the_context_is_held_within_what_the_model_can(server: Ollama, gguf: Path) -> None:
    for given, used in ((100_000, 8192), (1, 4), (None, 512)):
        server.create("a", server.link(gguf), **({} if given is None else {"num_ctx": given}))
        server.keep("a")
        assert server.loaded()["a:latest"]["context_length"] == used


def test_a_clients_own_context_replaces_the_runner_and_forgets_how_long_to_keep_it(server: Ollama, gguf: Path) -> None:
    server.create("a", server.link(gguf), num_ctx=1024)
    server.keep("a")
    (before,) = server.runners()
    server.stream("a", 3, options={"num_ctx": 2048, "num_predict": 3}).ended()
    row = server.loaded()["a:latest"]
    assert row["context_length"] == 2048 and row["expires_at"] < FOR_EVER
    assert [each.pid for each in server.runners()] != [before.pid]
    server.keep("a")
    row = server.loaded()["a:latest"]
    assert row["context_length"] == 1024 and row["expires_at"] > FOR_EVER


def test_two_names_of_one_blob_have_one_runner_between_them(server: Ollama, gguf: Path) -> None:
    digest = server.link(gguf)
    server.create("a", digest, num_ctx=1024)
    server.create("same", digest, num_ctx=1024)
    server.create("other", digest, num_ctx=2048)
    server.keep("a")
    assert server.chat("same")[0] == 200 and set(server.loaded()) == {"a:latest"}, "as if it were not loaded"
    server.keep("other")
    assert set(server.loaded()) == {"other:latest"} and len(server.runners()) == 1, "the first has been replaced"
    server.keep("same", 0)
    unloaded(server, "other:latest")


def test_one_file_under_two_digests_has_a_runner_for_each(server: Ollama, gguf: Path) -> None:
    for number, name in enumerate(("a", "b"), 1):
        server.create(name, link_as(server, gguf, own_digest(number)), num_ctx=1024 * number)
        server.keep(name)
    rows = server.loaded()
    assert rows["a:latest"]["context_length"] == 1024 and rows["b:latest"]["context_length"] == 2048
    before = [each.pid for each in server.runners()]
    assert server.chat("a")[0] == server.chat("b")[0] == 200
    assert [each.pid for each in server.runners()] == before and len(before) == 2
    server.keep("a", 0)
    unloaded(server, "a:latest")
    assert set(server.loaded()) == {"b:latest"}


def test_a_copy_is_another_name_of_the_same(server: Ollama, gguf: Path) -> None:
    server.create("a", server.link(gguf))
    assert server.ask("POST", "/api/copy", {"source": "a", "destination": "b"}) == (200, "")
    (first, second) = server.ask("GET", "/api/tags")[1]["models"]
    assert {first["name"], second["name"]} == {"a:latest", "b:latest"} and first["digest"] == second["digest"]
    assert server.chat("b")[0] == 200


# ── unloading ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_unload_answers_at_once_and_lets_streams_end(server: Ollama, gguf: Path) -> None:
    server.create("a", server.link(gguf), num_ctx=4096)
    assert server.keep("a", 0)[1]["done_reason"] == "unload", "though it is not loaded"
    server.keep("a")
    with slowed(server.runners()[0].pid):
        stream = server.stream("a", MANY).flowing()
        status, answer = server.keep("a", 0)
        assert status == 200 and answer["done_reason"] == "unload" and stream.running()
        assert set(server.loaded()) == {"a:latest"}, "as long as it is at work"
    assert stream.ended()[-1]["done_reason"] == "length" and len(stream.lines) == MANY + 1
    unloaded(server, "a:latest")
    eventually(lambda: not server.runners(), 20, "the runner to end")


def test_an_unload_while_a_model_loads_has_no_effect(server: Ollama, slow: Path) -> None:
    server.create("slow", server.link(slow))
    loading = server.stream("slow", 1, keep_alive=-1, prompt="")
    eventually(server.runners, 20, "the load to begin")
    assert "slow:latest" not in server.loaded(), "only what has been loaded is listed"
    assert server.keep("slow", 0)[1]["done_reason"] == "unload"
    assert loading.ended()[-1]["done_reason"] == "load"
    assert server.loaded()["slow:latest"]["expires_at"] > FOR_EVER


def test_a_client_that_leaves_ends_its_load_and_its_answer(tmp_path: Path, gguf: Path, slow: Path) -> None:
    with serving(tmp_path) as server:
        server.create("slow", server.link(slow))
        loading = server.stream("slow", 1, keep_alive=-1, prompt="")
        eventually(server.runners, 20, "the load to begin")
        loading.leave()
        eventually(lambda: not server.runners() and not server.loaded(), 20, "the load to be given up")
        server.create("a", server.link(gguf), num_ctx=8192)
        server.stream("a", 50_000).flowing().leave()
        # Another answer, or an unload, is no sign of it: both may wait for ever then (ollama/ollama#17131).
        (runner,) = server.runners()
        eventually(lambda: runner.cpu_percent(0.5) == 0, 20, "the runner to rest, minutes before 50 000 tokens")


def test_a_deleted_model_stays_loaded_and_can_no_longer_be_unloaded_by_its_name(server: Ollama, gguf: Path) -> None:
    digest = server.link(gguf)
    server.create("a", digest)
    server.keep("a")
    assert server.ask("DELETE", "/api/delete", {"model": "a"}) == (200, "")
    assert server.keep("a", 0)[0] == 404 and set(server.loaded()) == {"a:latest"}
    assert not (server.models / "blobs" / digest.replace(":", "-")).exists(), "no other name had it"
    server.create("b", server.link(gguf))
    server.keep("b", 0)
    unloaded(server, "a:latest")


def test_other_parameters_count_from_the_next_request_on_which_waits_for_streams(server: Ollama, gguf: Path) -> None:
    server.create("a", server.link(gguf), num_ctx=4096)
    server.keep("a")
    stream = server.stream("a", MANY).flowing()
    before = server.loaded()["a:latest"]
    server.create("a", server.link(gguf), num_ctx=8192)
    assert server.loaded()["a:latest"]["digest"] == before["digest"]
    server.keep("a")
    after = server.loaded()["a:latest"]
    assert after["context_length"] == 8192 and after["digest"] != before["digest"]
    assert stream.ended()[-1]["done_reason"] == "length" and len(stream.lines) == MANY + 1


# ── deaths ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_runner_that_dies_is_listed_until_the_next_request_brings_another(server: Ollama, gguf: Path) -> None:
    server.create("a", server.link(gguf), num_ctx=8192)
    server.keep("a")
    stream = server.stream("a", 50_000).flowing()
    (runner,) = server.runners()
    runner.kill()
    assert "an error was encountered" in stream.ended()[-1]["error"], "with status 200"
    assert set(server.loaded()) == {"a:latest"}
    assert server.chat("a")[0] == 200
    assert server.loaded()["a:latest"]["expires_at"] < FOR_EVER, "how long to keep it is forgotten"


def test_a_server_that_is_told_to_end_cuts_its_streams_and_leaves_no_runner(gguf: Path, tmp_path: Path) -> None:
    with serving(tmp_path) as up:
        up.create("a", up.link(gguf), num_ctx=8192)
        stream = up.stream("a", 50_000).flowing()
        (runner,) = up.runners()
        assert up.stop() == 0
        assert not stream.ended()[-1]["done"]
        eventually(lambda: not runner.is_running(), 20, "the runner to end")


def test_a_killed_server_leaves_its_runner_which_the_next_one_does_not_know(gguf: Path, tmp_path: Path) -> None:
    with serving(tmp_path) as up:
        up.create("a", up.link(gguf))
        up.keep("a")
        (runner,) = up.runners()
        assert up.process is not None and os.getpgid(runner.pid) == up.process.pid
        up.process.kill()
        up.process.wait(20)
        try:
            up.start()
            assert runner.is_running() and runner.status() != psutil.STATUS_ZOMBIE
            assert up.loaded() == {} and up.keep("a")[0] == 200
            assert [each.pid for each in up.runners()] != [runner.pid]
        finally:
            runner.kill()


def test_a_start_removes_blobs_without_a_name_unless_it_is_told_not_to(gguf: Path, tmp_path: Path) -> None:
    up = Ollama(tmp_path)
    blob = up.models / "blobs" / up.link(gguf).replace(":", "-")
    try:
        up.start()
        assert not blob.exists()
        up.stop()
        up.link(gguf)
        up.environment["OLLAMA_NOPRUNE"] = "1"
        up.start()
        assert blob.exists()
    finally:
        up.end()


def test_with_a_server_wide_time_to_keep_no_request_shortens_it_and_one_too_many_is_still_unloaded(
    gguf: Path, tmp_path: Path
) -> None:
    with serving(tmp_path, OLLAMA_KEEP_ALIVE="-1", OLLAMA_MAX_LOADED_MODELS="1") as up:
        for number, name in enumerate(("a", "b"), 1):
            up.create(name, link_as(up, gguf, own_digest(number)))
        assert up.chat("a")[0] == 200 and up.loaded()["a:latest"]["expires_at"] > FOR_EVER
        stream = up.stream("a", MANY).flowing()
        up.keep("b")
        assert set(up.loaded()) == {"b:latest"}
        assert stream.ended()[-1]["done_reason"] == "length", "but not in the middle of an answer"
