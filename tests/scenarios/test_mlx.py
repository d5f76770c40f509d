"""MLX and GGUF side by side: the real mlx_lm and the real llama-server under one agent, each service its own engine."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support import mlx
from tests.support.engines import gone, is_gone, reason, restarted, said
from tests.support.mlx import mlx_model, mlx_service
from tests.support.system import MODELS, System, eventually, kill, running, service

GGUF = "words"
MLX = "numbers"
LONG = 2000
"""Tokens of an answer that takes some seconds."""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A GGUF service and an MLX one, Ready at once; the MLX model is reached through a link."""
    base = tmp_path_factory.mktemp("mlx")
    mlx.tiny(base / "real", "--endless", "--context", "32768")
    (base / "link").symlink_to(base / "real")
    with running(base, "--mlx-lm-server", str(mlx.server()), "--drain-timeout", "60") as up:
        up.apply(up.tiny_model(), service(GGUF))
        up.apply(mlx_model("mlx", base / "link"), mlx_service(MLX, "mlx"))
        up.ready(GGUF, within_s=90)
        up.ready(MLX, within_s=90)  # its imports take seconds where others work too
        yield up


def answers(system: System, name: str) -> None:
    """Waits until a service answers and is said to be Ready."""
    eventually(lambda: system.ask(name, model=name)[0] == 200, 60, f"{name} to answer; {said(system, name)[-500:]}")
    system.ready(name)


def failed(system: System, name: str, why: str) -> str:
    """Waits until a service is reported with a reason; returns the message."""
    eventually(lambda: reason(system, name) == why, 60, f"{name}: {why}, {system.said()}")
    return str(system.condition("MetalReady", name)["message"])


def test_both_answer_under_their_own_names_at_once(system: System) -> None:
    for name, runtime in ((GGUF, "llama-server"), (MLX, "mlx-server")):
        status, answer = system.ask(name, model=name)
        assert status == 200 and answer["model"] in (name, "tiny")
        assert "hello world from tiny" in answer["choices"][0]["message"]["content"]
        assert system.condition("MetalReady", name)["message"].startswith(f"{runtime} serves {name} on port ")
        assert system.observe(name)["runtime"] == runtime
    listed = {each["id"] for each in system.ask(MLX, "/v1/models")[1]["data"]}
    assert listed == {MLX, "mlx"}, "no path, and nothing of a cache"
    assert system.ask(MLX, model="mlx")[0] == system.ask(MLX, model="default_model")[0] == 200
    eventually(lambda: system.get(f"{MODELS}/mlx")["status"]["phase"] == "Ready", 30, "the Model to be Ready too")
    assert str(system.base / "real") in psutil.Process(system.pid(MLX)).cmdline(), "not by its link"


def test_nothing_but_its_own_model_is_ever_loaded_or_fetched(system: System, tmp_path: Path) -> None:
    other, engine = mlx.tiny(tmp_path / "other"), system.pid(MLX)
    before = psutil.Process(engine).memory_info().rss
    for asked in (str(other), str(system.base / "real"), "mlx-community/Qwen3-0.6B-4bit", "../real", ""):
        status, answer = system.ask(MLX, model=asked)
        assert status == 404 and "serves numbers, mlx, not" in answer["error"], answer
    for further in ({"adapters": str(other)}, {"draft_model": str(other)}):
        assert system.ask(MLX, model=MLX, **further)[0] == 400
    picture = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{system.http}/healthz"}}
    assert system.ask(MLX, model=MLX, messages=[{"role": "user", "content": [picture]}])[0] == 400
    assert system.pid(MLX) == engine and system.ask(MLX, model=MLX)[0] == 200
    assert psutil.Process(engine).memory_info().rss < before + (20 << 20)
    assert not list((system.state / "hub").iterdir())
    environment = psutil.Process(engine).environ()
    assert environment["HF_HUB_OFFLINE"] == "1" and environment["HF_HUB_CACHE"] == f"{system.files.home}/hub"


def test_an_answer_ends_where_the_context_does(system: System) -> None:
    system.apply(mlx_service("short", "mlx", contextSize=128))
    system.ready("short", within_s=60)
    status, answer = system.ask("short", max_tokens=1000)
    assert status == 200 and answer["usage"]["total_tokens"] == 128
    status, answer = system.ask("short", messages=[{"role": "user", "content": "x" * 200}])
    assert status == 404 and "a slot 128 in all (spec.contextSize)" in answer["error"]
    assert "KV cache (1 x 128 tokens)" in str(json.loads((system.state / "records/default.short.json").read_text()))
    gone(system, "short")


def test_an_edit_of_one_restarts_that_one_only(system: System) -> None:
    words, numbers = system.pid(GGUF), system.pid(MLX)
    system.apply(mlx_service(MLX, "mlx", parallelSlots=2))
    numbers = restarted(system, MLX, numbers)
    answers(system, MLX)
    assert "--decode-concurrency 2" in " ".join(psutil.Process(numbers).cmdline())
    system.apply(service(GGUF, contextSize=1024))
    restarted(system, GGUF, words)
    answers(system, GGUF)
    assert system.pid(MLX) == numbers


def test_what_is_no_mlx_model_is_a_condition_of_that_service(system: System, tmp_path: Path) -> None:
    broken = mlx.tiny(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"\xff" * 1000)
    (tmp_path / "empty").mkdir()
    for name, source, spec in (
        ("empty", tmp_path / "empty", {}),
        ("file", system.tiny, {}),
        ("broken", broken, {}),
        ("directory", system.base / "real", {"format": "gguf"}),
    ):
        system.apply(mlx_model(name, source, **spec), mlx_service(f"on-{name}", name))
    assert "spec.source" in (text := failed(system, "on-empty", "InvalidModelFile")) and "without config.json" in text
    assert "is a file, and spec.format mlx wants a directory" in failed(system, "on-file", "InvalidModelFile")
    assert "is a directory, and spec.format gguf wants" in failed(system, "on-directory", "InvalidModelFile")
    eventually(lambda: system.get(f"{MODELS}/file")["status"]["phase"] == "Failed", 30, "the Model to tell of it too")
    assert "the model cannot be loaded" in failed(system, "on-broken", "CrashLoopBackOff")
    system.apply(mlx_service("on-fields", "mlx", batchSize=512))
    assert "spec.batchSize has no meaning for MLX" in failed(system, "on-fields", "UnsupportedField")
    gone(system, "on-empty", "on-file", "on-broken", "on-directory", "on-fields")
    assert system.ask(MLX, model=MLX)[0] == system.ask(GGUF, model=GGUF)[0] == 200


def test_a_port_that_is_taken_is_said_and_waited_for(system: System) -> None:
    with socket.create_server(("127.0.0.1", system.ports[-1])) as stranger:
        taken = stranger.getsockname()[1]
        system.apply(mlx_service("ported", "mlx", containerPort=taken))
        assert f"pid {os.getpid()}" in failed(system, "ported", "PortInUse")
    system.ready("ported", within_s=60)
    assert system.port("ported") == taken
    gone(system, "ported")


def test_a_deletion_lets_an_answer_end(system: System) -> None:
    system.apply(mlx_service("leaving", "mlx"))
    engine = system.ready("leaving", within_s=60)
    stream = system.stream("leaving", tokens=150).last()
    system.delete("leaving")
    eventually(lambda: system.slice("leaving") is None or system.slice_ready("leaving") is False, 20, "the withdrawal")
    assert stream.completed(), stream.error
    eventually(lambda: is_gone(engine), 20, "the engine to end")


def test_a_killed_supervisord_leaves_the_engine_and_its_stream(system: System) -> None:
    engine, stream = system.ready(MLX), system.stream(MLX, tokens=LONG, slow=False).last()
    before = system.supervisord_pid()
    kill(before)
    eventually(lambda: system.supervisord_pid() not in (0, before), 40, "another supervisord")
    assert stream.completed(), stream.error
    system.ready(MLX, within_s=60)
    assert system.pid(MLX) == engine and not is_gone(engine)
    # Nobody reads its log any more, and it goes on answering.
    assert system.ask(MLX, model=MLX)[0] == 200 and system.ask(MLX, model="none")[0] == 404
    assert "standing in for it" in said(system, MLX)


def test_a_mac_without_llama_server_serves_mlx_by_the_swift_server_if_it_is_there(tmp_path: Path) -> None:
    mlx.tiny(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    swift = str(mlx.swift(tmp_path / "swift"))
    flags = "--mlx-server", swift, "--mlx-lm-server", str(mlx.server()), "--runtimes", "llama-server,mlx-server"
    with running(tmp_path, *flags, engine=Path("/nonexistent")) as up:
        up.apply(up.tiny_model(), service(GGUF), mlx_model("mlx", tmp_path / "link"))
        up.apply(mlx_service(MLX, "mlx"), mlx_service("quantized", "mlx", cacheTypeK="q8_0"))
        up.ready(MLX, within_s=60)
        assert up.chat(MLX) == "hello world from swift"
        assert "under a model name of its own: requests have to use" in up.condition("MetalReady", MLX)["message"]
        assert "/nonexistent" in failed(up, GGUF, "RuntimeBinaryMissing")
        assert "this mlx-server has no quantized cache" in failed(up, "quantized", "UnsupportedField")
