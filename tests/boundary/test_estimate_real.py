"""Estimates against what a real llama-server says it allocates, and takes, over models of every kind of cache.

The engine's log is the judge of weights, cache, state and scratch: its lines `… buffer size = N MiB`, rounded to a
hundredth. What the process takes is told by the kernel (PSS: what it shares counts in part), after a prompt that made
it use its scratch. The rows are in docs/memory.md; `pytest -rP` shows them too.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from metal_supervisor.runtimes.llama_memory import demands
from tests.support import memory
from tests.support.memory import CASES, Case, error_percent
from tests.support.system import engine_path, eventually, find_llama_server, free_ports

CHECKPOINT = re.compile(r"created context checkpoint .* size = ([0-9.]+) MiB")
BUFFER = re.compile(r"(model|KV|RS|compute|output) +buffer size = +([0-9.]+) MiB")
SCRATCH = re.compile(r"compute +buffer size")
COLUMN = {"model": "weights", "KV": "KV", "RS": "state", "compute": "compute", "output": "compute"}
LOAD_TIMEOUT_S = 60.0
DEATH_TIMEOUT_S = 10.0


def arguments(case: Case) -> list[str]:
    """The flags that the settings stand for."""
    settings = case.settings
    flags = ["--ctx-size", str(settings.context), "--parallel", str(settings.slots)]
    flags += ["--batch-size", str(settings.batch), "--ubatch-size", str(settings.ubatch)]
    flags += ["--cache-type-k", settings.cache_k, "--cache-type-v", settings.cache_v]
    flags += ["--flash-attn", "on" if settings.flash_attention else "off"]
    flags += ["--ctx-checkpoints", str(settings.checkpoints)]
    flags += ["--kv-unified"] if settings.unified else []
    flags += ["--embedding"] if case.model.encodes else []
    return flags + (["--swa-full"] if settings.swa_full else [])


@dataclass
class Engine:
    """One that was started."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def must_live(self) -> None:
        """Fails if it has ended by itself."""
        code = self.process.poll()
        assert code is None, f"ended with {code}: {self.log.read_text(errors='replace')[-2000:]}"

    def read_a_prompt(self, case: Case) -> None:
        """Has it use its scratch. What it answers is nonsense, and may be an error for that reason."""
        tokens = [3 + index % 250 for index in range(case.prompt)]
        path, body = ("/embedding", {"content": tokens}) if case.model.encodes else ("/completion", {"prompt": tokens})
        status, _ = find_llama_server.request(self.port, "POST", path, json.dumps({**body, "n_predict": 1}))
        if status == 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(DEATH_TIMEOUT_S)
        self.must_live()

    def footprint_mib(self) -> float:
        """Its own memory and its part of what it shares, mapped weights included."""
        for line in Path(f"/proc/{self.process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
        raise AssertionError("no Pss in smaps_rollup")


@contextlib.contextmanager
def started(program: Path, model: Path, case: Case, log: Path) -> Iterator[Engine]:
    """An engine with the model, ended when the block is."""
    (port,) = free_ports(1)
    argv = [str(program), "--model", str(model), "--host", "127.0.0.1", "--port", str(port), "-lv", "4"]
    # Without copies of weights in an order that suits this processor, as with AMX: Metal has none.
    argv += ["--threads", "1", "--no-warmup", "--no-repack", "--fit", "off", "--cache-ram", "0", *arguments(case)]
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    engine = Engine(process, port, log)
    try:
        eventually(
            lambda: process.poll() is not None or find_llama_server.request(port, "GET", "/health")[0] == 200,
            within_s=LOAD_TIMEOUT_S,
            what="the engine is ready or gone",
        )
        engine.must_live()
        yield engine
    finally:
        process.send_signal(signal.SIGTERM)  # a killed one would keep the last lines of its log to itself
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def measure(program: Path, case: Case, model: Path, log: Path) -> dict[str, tuple[float, int]]:
    """Column -> MiB, and how many rounded numbers they are the sum of."""
    said, tries = "", 0
    while not SCRATCH.search(said) and tries < 3:  # one that ends badly, which happens, keeps its log, or the end of it
        found, tries = dict.fromkeys(memory.COLUMNS[:-1], (0.0, 0)), tries + 1
        with started(program, model, case, log) as engine:
            engine.read_a_prompt(case)
            if sys.platform.startswith("linux"):
                found["footprint"] = (engine.footprint_mib(), 0)
        said = log.read_text(errors="replace")
    for mib in CHECKPOINT.findall(said):  # the last is of a whole window
        found["checkpoint"] = (float(mib), 0)
    for name, mib in BUFFER.findall(said):
        total, count = found[COLUMN[name]]
        found[COLUMN[name]] = (total + float(mib), count + 1)
    return found


def bounds(case: Case) -> dict[str, tuple[float, float]]:
    """Column -> how far the estimate may be off, in per cent below and above what the engine has.

    Weights, cache, state and checkpoints are arithmetic. Scratch depends on how the engine lays out its graph, and more
    so the smaller the model. The footprint of a tiny model is mostly that of the process, so only large ones are held
    to it; scratch is reserved for full contexts, and a shorter prompt uses less of it.
    """
    exact = (-5.0, 5.0)
    loose = {"compute": (-15.0, 20.0), "footprint": (-10.0, 25.0)} if case.large else {"compute": (-25.0, 60.0)}
    anything = (-math.inf, math.inf)
    return {"weights": exact, "KV": exact, "state": exact, "checkpoint": exact, "footprint": anything, **loose}


@pytest.fixture(scope="module")
def build() -> str:
    """The engine's own words for its version."""
    done = subprocess.run([engine_path(), "--version"], capture_output=True, text=True, timeout=30)
    found = re.search(r"version: *(.+)", done.stdout + done.stderr)
    return found[1].strip() if found else "unknown"


@pytest.mark.parametrize("kind", dict.fromkeys(case.kind for case in CASES))
def test_the_estimate_is_what_a_real_engine_takes(
    kind: str, build: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = tmp_path / "model.gguf"
    for number, case in enumerate(case for case in CASES if case.kind == kind):
        assert demands(arguments(case)).settings == case.settings, "the flags mean what the estimate rests on"
        if not model.exists():
            case.write(model)
        ours = memory.parts(case.estimate(model))
        theirs = measure(engine_path(), case, model, tmp_path / f"log{number}")
        memory.record(request.node, case, theirs, build)
        print(case.id)
        for column, (real, roundings) in theirs.items():
            error = error_percent(ours[column], real, roundings)
            print(f"    {column:9} {ours[column]:9.2f} {real:9.2f} {error:+6.1f} %")
            low, high = bounds(case)[column]
            assert low <= error <= high, f"{case.id}: {column}: {ours[column]} MiB, the engine has {real}"
    model.unlink()
