"""vllm-swift beside llama-server under one agent.

It needs a Mac, so a stand-in is run that follows what it documents.
"""

from __future__ import annotations

import http.client
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.engines import gone, is_gone, reason, restarted
from tests.support.mlx import mlx_model, mlx_service
from tests.support.system import ROOT, System, eventually, running, service

GGUF = "words"
SWIFT = "numbers"
KEY = "a-key-that-nobody-may-see"
LONG = 1500
"""Tokens of an answer that takes some seconds."""
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32768,
}


def program(path: Path, exec_: str = "exec") -> Path:
    """vllm-swift as Homebrew installs it: a script that becomes the server. pip's starts one beside itself."""
    stand_in = shlex.join([sys.executable, str(ROOT / "tests/support/standin_vllm_swift.py")])
    path.write_text(f'#!/bin/sh\n{exec_} {stand_in} "$@"\n')
    path.chmod(0o755)
    return path


def directory(path: Path) -> Path:
    """An MLX directory as far as it is looked at before it is loaded."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "model.safetensors").write_bytes(bytes(1 << 20))
    return path


def vllm(name: str, **spec: Any) -> dict[str, Any]:
    return mlx_service(name, "mlx", runtime="vllm-swift", **spec)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    base = tmp_path_factory.mktemp("vllm")
    directory(base / "real")
    (base / "link").symlink_to(base / "real")
    with running(base, "--vllm-swift", str(program(base / "vllm-swift")), "--drain-timeout", "60") as up:
        up.apply(up.tiny_model(), service(GGUF))
        up.apply(mlx_model("mlx", base / "link"), vllm(SWIFT, parallelSlots=2))
        up.ready(GGUF)
        up.ready(SWIFT, within_s=40)
        yield up


def ask(system: System, name: str, path: str = "/v1/chat/completions", key: str = "", **body: Any) -> tuple[int, Any]:
    """(status, answer) of one request to the registered endpoint; without a body a GET."""
    connection = http.client.HTTPConnection("127.0.0.1", system.port(name), timeout=20)
    try:
        body = {"messages": [{"role": "user", "content": "hi"}], **body} if body else {}
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"null")
    finally:
        connection.close()


def failed(system: System, name: str, why: str) -> str:
    """Waits until a service is reported with a reason; returns the message."""
    eventually(lambda: reason(system, name) == why, 40, f"{name}: {why}, {system.said()}")
    return str(system.condition("MetalReady", name)["message"])


def command(system: System, name: str) -> list[str]:
    return psutil.Process(system.pid(name)).cmdline()


def test_it_serves_under_its_own_name_beside_a_gguf_service(system: System) -> None:
    assert system.chat(SWIFT) == "hello world from vllm" and "hello world" in system.chat(GGUF)
    assert system.condition("MetalReady", SWIFT)["message"].startswith(f"vllm-swift serves {SWIFT} on port ")
    assert [each["id"] for each in ask(system, SWIFT, "/v1/models")[1]["data"]] == [SWIFT, "mlx"]
    status, answer = ask(system, SWIFT, model="another")
    assert status == 404 and "does not exist" in answer["error"]["message"]
    assert str(system.base / "real") in command(system, SWIFT), "not by its link"


def test_an_edit_restarts_it_with_other_flags_once_it_has_answered(system: System) -> None:
    before, stream = system.pid(SWIFT), system.stream(SWIFT, tokens=LONG, slow=False).last()
    system.apply(vllm(SWIFT, parallelSlots=3, cacheTypeCustomK="turbo4v2"))
    restarted(system, SWIFT, before, within_s=60)
    assert stream.completed(), stream.error
    system.ready(SWIFT, within_s=40)
    now = " ".join(command(system, SWIFT))
    assert "--max-num-seqs 3" in now and '{"kv_bits":4,"kv_scheme":"turbo4v2"}' in now


def test_a_key_of_its_own_is_asked_for_and_shown_nowhere(system: System) -> None:
    system.apply(vllm("locked", env=[{"name": "VLLM_API_KEY", "value": KEY}]))
    system.ready("locked", within_s=40)
    assert ask(system, "locked", model="locked")[0] == ask(system, "locked", "/v1/models")[0] == 401
    assert ask(system, "locked", key=KEY, model="locked")[0] == 200
    assert KEY not in " ".join(command(system, "locked")) and KEY not in system.fetch("/status")[1]
    shown = [*system.state.glob("records/*"), *system.state.glob("observed/*"), *system.state.glob("log/*.log")]
    assert len(shown) > 2 and not [path for path in shown if KEY in path.read_text(errors="replace")]
    gone(system, "locked")


def test_what_it_cannot_do_is_a_condition_of_that_service(system: System) -> None:
    system.apply(vllm("batched", batchSize=512), vllm("opened", extraArgs=["--ho", "0.0.0.0"]))
    system.apply(vllm("long", contextSize=65536), vllm("gguf") | {"spec": {**vllm("gguf")["spec"], "modelRef": "tiny"}})
    assert "spec.batchSize" in failed(system, "batched", "UnsupportedField")
    assert "spec.extraArgs[0] --ho is not yours to set" in failed(system, "opened", "InvalidSpec")
    assert "is greater than the model's 32768" in failed(system, "long", "CrashLoopBackOff")
    assert "which vllm-swift (spec.runtime) does not serve" in failed(system, "gguf", "FormatMismatch")
    gone(system, "batched", "opened", "long", "gguf")
    assert system.chat(SWIFT) == "hello world from vllm"


def test_a_mac_without_an_mlx_server_serves_mlx_by_it_even_if_it_starts_a_server_beside_itself(tmp_path: Path) -> None:
    directory(tmp_path / "real")
    flags = "--vllm-swift", str(program(tmp_path / "vllm-swift", "")), "--runtimes", "llama-server,vllm-swift"
    with running(tmp_path, *flags, engine=Path("/nonexistent")) as up:
        up.apply(mlx_model("mlx", tmp_path / "real"), mlx_service(SWIFT, "mlx"))
        up.ready(SWIFT, within_s=40)
        assert up.chat(SWIFT) == "hello world from vllm"
        wrapper = psutil.Process(up.pid(SWIFT))
        (server,) = wrapper.children()
        stream = up.stream(SWIFT, tokens=LONG, slow=False).last()
        gone(up, SWIFT)
        assert stream.completed(), stream.error
        eventually(lambda: is_gone(wrapper.pid) and is_gone(server.pid), 20, "both to end")
