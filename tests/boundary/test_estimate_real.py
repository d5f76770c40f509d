"""Estimates against what a real llama-server says it allocates, over tiny models of every kind of cache.

The engine's log is the judge: its lines `… buffer size = N MiB`. They are rounded to a hundredth, which with models
this small is some per cent, so half of the last digit is forgiven. `pytest -rP` shows the table.
"""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import kv_models
import pytest

from metal_supervisor.core.estimate import Settings, estimate
from metal_supervisor.core.gguf import Prefix, read_header
from metal_supervisor.runtimes.llama_memory import demands
from tests.system import engine_path, eventually, find_llama_server, free_ports

MIB = 1 << 20
BUFFER = re.compile(r"(model|KV|RS|compute|output) +buffer size = +([0-9.]+) MiB")
CACHES = {
    "llama": (Settings(1024), Settings(8192, slots=3), Settings(4096, slots=2, unified=True, ubatch=128)),
    "gemma3": (Settings(4096, slots=2), Settings(8192, slots=3, unified=True), Settings(4096, swa_full=True)),
    "deepseek2": (Settings(4096),),
    "qwen3moe": (Settings(2048, ubatch=2048), Settings(2048, flash_attention=False)),
    "mamba": (Settings(1024, slots=3),),
    "jamba": (Settings(2048, slots=2), Settings(4096, cache_k="f32", cache_v="f32")),
}
"""Architecture → how it is started. Quantized caches are left out: not every processor here runs them."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for architecture in kv_models.KINDS:
        kv_models.write(directory / f"{architecture}.gguf", architecture)
    return directory


def arguments(settings: Settings) -> list[str]:
    """The flags that the settings stand for."""
    flags = ["--ctx-size", str(settings.context), "--parallel", str(settings.slots)]
    flags += ["--batch-size", str(settings.batch), "--ubatch-size", str(settings.ubatch)]
    flags += ["--cache-type-k", settings.cache_k, "--cache-type-v", settings.cache_v]
    flags += ["--flash-attn", "on" if settings.flash_attention else "off"]
    flags += ["--kv-unified"] if settings.unified else []
    return flags + (["--swa-full"] if settings.swa_full else [])


def allocated(model: Path, settings: Settings, log: Path) -> dict[str, float]:
    """MiB of each kind of buffer, as the engine tells them."""
    (port,) = free_ports(1)
    argv = [str(engine_path()), "--model", str(model), "--host", "127.0.0.1", "--port", str(port), "-lv", "4"]
    argv += ["--threads", "1", "--no-warmup", "--fit", "off", "--cache-ram", "0", *arguments(settings)]
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    try:
        eventually(
            lambda: process.poll() is not None or find_llama_server.request(port, "GET", "/health")[0] == 200,
            within_s=60,
            what="the engine is ready or gone",
        )
        assert process.poll() is None, log.read_text(errors="replace")[-2000:]
    finally:
        process.send_signal(signal.SIGTERM)  # a killed one would keep the last lines of its log to itself
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    found: dict[str, float] = {}
    for name, mib in BUFFER.findall(log.read_text(errors="replace")):
        found[name] = found.get(name, 0.0) + float(mib)
    return found


def percent(ours: float, theirs: float) -> str:
    return f"{ours:8.2f} {theirs:8.2f}" + (f" {100 * (ours / theirs - 1):+6.1f} %" if theirs else "")


@pytest.mark.parametrize("architecture", CACHES)
def test_the_estimate_is_what_a_real_engine_allocates(architecture: str, models: Path, tmp_path: Path) -> None:
    model = models / f"{architecture}.gguf"
    data = model.read_bytes()
    header = read_header(Prefix(data, len(data)), len(data))
    for number, settings in enumerate(CACHES[architecture]):
        assert demands(arguments(settings)).settings == settings, "the flags mean what the estimate rests on"
        theirs = allocated(model, settings, tmp_path / f"log{number}")
        ours = estimate(header, settings)
        rows = {
            "model": (ours.weights_bytes / MIB, theirs["model"]),
            "KV": (ours.kv_bytes / MIB, theirs.get("KV", 0.0)),
            "RS": (ours.state_bytes / MIB, theirs.get("RS", 0.0)),
            "compute": (ours.compute_bytes / MIB, theirs["compute"] + theirs["output"]),
        }
        print(architecture, settings)
        for name, (mine, real) in rows.items():
            print(f"    {name:8} {percent(mine, real)}")
        for name in ("model", "KV", "RS"):
            mine, real = rows[name]
            buffers = 2  # gemma3 has two caches, each rounded
            assert abs(mine - real) <= 0.005 * buffers + 0.001 * real, f"{name}: {mine} MiB, the engine says {real}"
        mine, real = rows["compute"]
        assert 0.93 * real <= mine <= 1.2 * real, f"compute: {mine} MiB, the engine says {real}"
