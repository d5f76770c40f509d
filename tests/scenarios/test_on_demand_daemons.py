"""Services on demand that are models of a shared daemon."""

from __future__ import annotations

from pathlib import Path

from tests.support import mlx, ollama
from tests.support.gateway import Gateway, with_gateway
from tests.support.mlx import mlx_model, mlx_service
from tests.support.runtimes import CONTEXT, NOWHERE, omlx
from tests.support.system import eventually, model, service

ON_DEMAND = {"metal-supervisor.io/on-demand": "true"}


def rests(gateway: Gateway, name: str) -> None:
    eventually(
        lambda: gateway.system.condition("MetalReady", name).get("reason") == "Unloaded", 60, gateway.system.said()
    )


def test_a_model_of_omlx_comes_and_goes_beside_another(tmp_path: Path) -> None:
    for name in ("left", "right"):
        mlx.tiny(tmp_path / name, "--context", str(CONTEXT))
    flags = "--omlx", str(omlx()), "--ollama", NOWHERE, "--ollama-url", "off", "--idle-ttl", "2"
    with with_gateway(tmp_path, *flags) as up:
        always, sometimes = mlx_service("left", "left", runtime="omlx"), mlx_service("right", "right", runtime="omlx")
        sometimes["metadata"]["annotations"] = ON_DEMAND
        for name in ("left", "right"):
            up.system.apply(mlx_model(name, tmp_path / name))
        up.system.apply(always, sometimes)
        engine = up.system.ready("left", within_s=120)
        for _ in range(2):
            rests(up, "right")
            status, told = Gateway(up.system, up.system.port("right")).chat("right", timeout_s=60)
            assert status == 200, told
            assert up.chat("left", timeout_s=60)[0] == 200
        assert up.system.pid("left") == engine


def test_a_model_of_ollama_comes_and_goes_beside_another(tmp_path: Path) -> None:
    file = ollama.tiny(tmp_path / "file.gguf")
    flags = "--ollama", str(ollama.program()), "--ollama-url", "off", "--idle-ttl", "2"
    with with_gateway(tmp_path, *flags) as up:
        always, sometimes = (service(name, "file", extraArgs=[], runtime="ollama") for name in ("left", "right"))
        sometimes["metadata"]["annotations"] = ON_DEMAND
        up.system.apply(model("file", str(file)), always, sometimes)
        runner = up.system.ready("left", within_s=120)
        for _ in range(2):
            rests(up, "right")
            eventually(lambda: len(up.system.ask("left", "/api/ps")[1]["models"]) == 1, 30, "it to be unloaded")
            status, told = Gateway(up.system, up.system.port("right")).chat("right", timeout_s=60)
            assert status == 200, told
            # While Ollama deletes a model, it may not find another one: see test_ollama.
            eventually(lambda: up.chat("left", timeout_s=60)[0] == 200, what="the other to be served")
        assert up.system.pid("left") == runner


def test_an_engine_that_counts_nothing_is_unloaded_too(tmp_path: Path) -> None:
    mlx.tiny(tmp_path / "right", "--context", str(CONTEXT))
    with with_gateway(tmp_path, "--mlx-server", NOWHERE, "--mlx-lm-server", str(mlx.server()), "--idle-ttl", "2") as up:
        made = mlx_service("right", "right", runtime="mlx-server")
        made["metadata"]["annotations"] = ON_DEMAND
        up.system.apply(mlx_model("right", tmp_path / "right"), made)
        for _ in range(2):
            rests(up, "right")
            status, told = up.chat("right", timeout_s=60)
            assert status == 200, told
