#!/usr/bin/env python3
"""Cost of confinement, in pairs that alternate with unconfined runs: part of `make bench`.

The start is launch.py until the program it becomes has ended, which does nothing. The CPU time of a token is that of
all threads of a real llama-server, by the scheduler's own clock (nanoseconds), over one request of many tokens.

    python -m tests.support.bench.bench_confinement [--rounds 40]
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import find_llama_server
import tiny_gguf

from metal_supervisor import launch
from metal_supervisor.confinement.access import Access
from metal_supervisor.confinement.probe import launcher_command
from metal_supervisor.runtimes import RUNTIMES, Binary
from metal_supervisor.runtimes.builds import homes_of
from tests.support.bench.intervals import shown
from tests.support.system import free_ports

ROOT = Path(__file__).resolve().parents[3]

TOKENS = 200
MODEL = {"n_layer": 8, "n_embd": 512, "n_ff": 2048, "n_head": 16, "n_head_kv": 8, "vocab": 4096, "dtype": "f16"}
"""A token of it takes some milliseconds of CPU, still a tenth of what those of useful models take."""


def _command(base: Path, name: str, argv: list[str], access: Access) -> list[str]:
    for directory in ("specs", "scratch"):
        (base / name / directory).mkdir(parents=True, exist_ok=True)
    access = replace(access, write=(str(base / name / "scratch"),))
    return launcher_command(base / name, Path(launch.__file__), argv, {}, access, confined=name == "confined")


def starts(base: Path, rounds: int) -> list[float]:
    """Milliseconds that a confined start takes longer than the one beside it."""
    (port,) = free_ports(1)
    program = str(Path("/bin/true").resolve())
    commands = [_command(base, name, [program], Access((program,), bind=(port,))) for name in ("plain", "confined")]
    found = []
    for _ in range(rounds):
        took = []
        for command in commands:
            began = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            took.append(1000 * (time.perf_counter() - began))
        found.append(took[1] - took[0])
    return found


@contextmanager
def _engine(base: Path, name: str) -> Iterator[tuple[int, int]]:
    """(pid, port) of a llama-server with a tiny model, ready."""
    (port,) = free_ports(1)
    path, model = str(find_llama_server.find(install_it=False)), base / "tiny.gguf"
    argv = [path, "--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--threads", "1"]
    access = RUNTIMES["llama-server"].access(Binary(path, frozenset(), homes=homes_of(Path(path), "")), "")
    access = replace(access, read=(*access.read, str(model)), bind=(port,))
    command = _command(base, name, [*argv, "--ctx-size", "2048"], access)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while _ask(port, "GET", "/health") != 200:
            time.sleep(0.1)
        yield process.pid, port
    finally:
        process.kill()
        process.wait()


def _ask(port: int, method: str, path: str, body: object = None) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, json.dumps(body) if body else None)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except OSError:
        return 0
    finally:
        connection.close()


def _cpu_s(pid: int) -> float:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((each / "schedstat").read_text().split()[0]) for each in threads) / 1e9


def tokens(base: Path, rounds: int) -> list[float]:
    """CPU time of a token in a confined engine, as a share of that in the one beside it."""
    tiny_gguf.write_tiny_gguf(base / "tiny.gguf", context=4096, **MODEL)
    body = {"prompt": "a", "n_predict": TOKENS, "ignore_eos": True, "cache_prompt": False, "temperature": 0, "seed": 1}
    found = []
    with _engine(base, "plain") as plain, _engine(base, "confined") as confined:
        for number in range(rounds + 2):
            took = {}
            for pid, port in (plain, confined) if number % 2 else (confined, plain):
                before = _cpu_s(pid)
                assert _ask(port, "POST", "/completion", body) == 200
                took[pid] = _cpu_s(pid) - before
            if number >= 2:  # the first of each warm up
                found.append(took[confined[0]] / took[plain[0]])
    return found


def measure(rounds: int) -> tuple[list[float], list[float]]:
    """(milliseconds that a confined start takes longer, CPU time of a token as a share of an unconfined one's)."""
    with tempfile.TemporaryDirectory(prefix="metal-bench-") as place:
        base = Path(place).resolve()
        return starts(base, rounds), tokens(base, rounds // 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    later, share = measure(parser.parse_args().rounds)
    print(f"a confined start takes longer, in ms: {shown(later, 1)}")
    print(f"CPU time of a token, confined to not: {shown(share)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
