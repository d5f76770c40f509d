"""Services on demand that are models of a shared daemon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import mlx, ollama
from tests.support.engines import gone
from tests.support.gateway import Gateway, with_gateway
from tests.support.mlx import mlx_model, mlx_service
from tests.support.runtimes import CONTEXT, had, installed, omlx
from tests.support.system import eventually, model, service

ON_DEMAND = {"metal-supervisor.io/on-demand": "true"}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A system with every engine that can be had here, which unloads what was not asked for two seconds."""
    base = tmp_path_factory.mktemp("daemons")
    with with_gateway(base, *installed(had(), base), "--idle-ttl", "2") as up:
        yield up


def rests(gateway: Gateway, name: str) -> None:
    eventually(
        lambda: gateway.system.condition("MetalReady", name).get("reason") == "Unloaded", 60, gateway.system.said()
    )


def test_a_model_of_omlx_comes_and_goes_beside_another(gateway: Gateway, tmp_path: Path) -> None:
    omlx()
    system = gateway.system
    for name in ("left", "right"):
        mlx.tiny(tmp_path / name, "--context", str(CONTEXT))
    always, sometimes = mlx_service("left", "left", runtime="omlx"), mlx_service("right", "right", runtime="omlx")
    sometimes["metadata"]["annotations"] = ON_DEMAND
    for name in ("left", "right"):
        system.apply(mlx_model(name, tmp_path / name))
    system.apply(always, sometimes)
    engine = system.ready("left", within_s=120)
    for _ in range(2):
        rests(gateway, "right")
        status, told = Gateway(system, system.port("right")).chat("right", timeout_s=60)
        assert status == 200, told
        assert gateway.chat("left", timeout_s=60)[0] == 200
    assert system.pid("left") == engine
    gone(system, "left", "right")


def test_a_model_of_ollama_comes_and_goes_beside_another(gateway: Gateway, tmp_path: Path) -> None:
    ollama.program()
    system, file = gateway.system, ollama.tiny(tmp_path / "file.gguf")
    always, sometimes = (service(name, "file", extraArgs=[], runtime="ollama") for name in ("left", "right"))
    sometimes["metadata"]["annotations"] = ON_DEMAND
    system.apply(model("file", str(file)), always, sometimes)
    runner = system.ready("left", within_s=120)
    for _ in range(2):
        rests(gateway, "right")
        eventually(lambda: len(system.ask("left", "/api/ps")[1]["models"]) == 1, 30, "it to be unloaded")
        status, told = Gateway(system, system.port("right")).chat("right", timeout_s=60)
        assert status == 200, told
        # While Ollama deletes a model, it may not find another one: see test_ollama.
        eventually(lambda: gateway.chat("left", timeout_s=60)[0] == 200, what="the other to be served")
    assert system.pid("left") == runner
    gone(system, "left", "right")


def test_an_engine_that_counts_nothing_is_unloaded_too(gateway: Gateway, tmp_path: Path) -> None:
    mlx.server()
    system = gateway.system
    mlx.tiny(tmp_path / "right", "--context", str(CONTEXT))
    made = mlx_service("right", "right", runtime="mlx-server")
    made["metadata"]["annotations"] = ON_DEMAND
    system.apply(mlx_model("right", tmp_path / "right"), made)
    for _ in range(2):
        rests(gateway, "right")
        status, told = gateway.chat("right", timeout_s=60)
        assert status == 200, told
    gone(system, "right")
