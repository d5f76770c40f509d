#!/usr/bin/env python3
"""What the gateway costs, beside the engine's own address and beside llama-swap, all before one llama-server.

The three take turns within each round, in an order that changes; what counts is the median of the ratios of a round,
with its 95 % interval. The client is a Go program, which costs less than what is measured. llama-swap is not in `make
bench`: it has to be built from its source first.

    python -m tests.support.bench.bench_gateway [--rounds 30] [--llama-swap PATH] [--model FILE] [--tokens 64]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import statistics
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.support.bench.intervals import shown
from tests.support.gateway import Gateway, with_gateway
from tests.support.system import eventually, free_ports, service

SOURCE = Path(__file__).with_name("load.go")


def built(base: Path) -> Path:
    """The client. Needs Go, and nothing beside its standard library."""
    subprocess.run(["go", "build", "-o", base / "load", SOURCE], check=True)
    return base / "load"


@contextlib.contextmanager
def swap(base: Path, binary: Path, engine: str) -> Iterator[str]:
    """The URL of a llama-swap before an engine that runs already."""
    (port,) = free_ports(1)
    config = base / "llama-swap.yaml"
    # By default it refuses the eleventh request at once.
    model = {"cmd": "sleep 100000", "proxy": engine, "checkEndpoint": "/health", "concurrencyLimit": 1000}
    config.write_text(json.dumps({"models": {"tiny": model}}))
    command = [binary, "--config", config, "--listen", f"127.0.0.1:{port}"]
    with (base / "llama-swap.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        eventually(lambda: listens(port), what="llama-swap")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


def listens(port: int) -> bool:
    """True once something accepts connections there."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


class Race:
    """The three ways to one engine, measured in turns."""

    def __init__(self, client: Path, ways: dict[str, str], tokens: int, requests: int) -> None:
        self._client, self._ways, self._tokens, self._requests = client, ways, tokens, requests
        self.found: dict[tuple[str, str], list[float]] = {}
        self.problems: Counter[tuple[str, str]] = Counter()
        self.streams: Counter[str] = Counter()

    def _load(self, way: str, clients: int, requests: int, *more: str) -> dict[str, Any]:
        command = [self._client, "-url", self._ways[way], "-clients", clients, "-requests", requests, *more]
        done = subprocess.run(list(map(str, command)), check=True, capture_output=True)
        told: dict[str, Any] = json.loads(done.stdout)
        for problem, count in told["problems"].items():
            self.problems[way, problem[:100]] += count
        return told

    def round(self) -> None:
        """One round of all ways."""
        for what in ("stream", "1", "8", "32"):
            ways = list(self._ways)
            random.shuffle(ways)
            for way in ways:
                if what == "stream":
                    told = self._load(way, 1, 8, "-stream", "-tokens", str(self._tokens))
                    self.streams[way] += told["requests"]
                    self.found.setdefault((way, "time to first token, ms"), []).append(1000 * told["first"])
                    self.found.setdefault((way, "time for each token, ms"), []).append(1000 * told["each"])
                else:
                    told = self._load(way, int(what), self._requests)
                    name = f"short answers a second, {what} clients"
                    self.found.setdefault((way, name), []).append(told["perSecond"])

    def rows(self) -> list[str]:
        """A table with the ratio to each other way."""
        result = []
        for name in dict.fromkeys(what for _, what in self.found):
            ours = self.found["gateway", name]
            row = f"{name:<36} gateway {statistics.median(ours):>8.3f}"
            for way in (each for each in self._ways if each != "gateway"):
                theirs = self.found[way, name]
                ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
                row += f" | {way} {statistics.median(theirs):>8.3f}, ratio {shown(ratios)}"
            result.append(row)
        return result


def measure(rounds: int, binary: Path | None, model: Path | None, tokens: int, requests: int) -> None:
    """Run the rounds and print the table."""
    with tempfile.TemporaryDirectory(prefix="bench-gateway-") as place, contextlib.ExitStack() as stack:
        base = Path(place)
        client = built(base)
        roots = ("--allowed-roots", str(model.parent)) if model else ()
        gateway: Gateway = stack.enter_context(with_gateway(base / "system", *roots))
        system = gateway.system
        made = system.tiny_model()
        if model:
            made["spec"]["source"] = str(model)
        threads = [] if model else ["--threads", "1"]
        system.apply(made, service(contextSize=8192, parallelSlots=4, extraArgs=threads))
        system.ready()
        gateway.serves("tiny")
        engine = eventually(lambda: system.status().get("endpoint"), what="its address").partition("/v1/")[0]
        ways = {"direct": engine, "gateway": gateway.url}
        if binary:
            ways["llama-swap"] = stack.enter_context(swap(base, binary, engine))
        race = Race(client, ways, tokens, requests)
        race.round()  # to warm up
        race.found.clear()
        for _ in range(rounds):
            race.round()
        print("\n".join(race.rows()))
        print(f"streams {dict(race.streams)}; failed {dict(race.problems)}")
        worker = psutil.Process(system.own_pid("gateway"))
        print(f"worker's memory {worker.memory_info().rss >> 20} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--llama-swap", type=Path, help="its binary; default: it is left out")
    parser.add_argument("--model", type=Path, help="a GGUF file; default: a tiny one")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=100, help="short answers for each figure of a round")
    asked = parser.parse_args()
    measure(asked.rounds, asked.llama_swap, asked.model, asked.tokens, asked.requests)


if __name__ == "__main__":
    main()
