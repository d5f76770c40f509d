#!/usr/bin/env python3
"""How long a request waits for a model that is not loaded, beside llama-swap with the same engine and models.

`wake`: from the request to its answer, less what the same engine needs by itself from its start to that answer.
`swap`: the same where another model has to end first, less the end of that engine as well. `replay`: six models of
which two fit, asked for at random for a while, by both at the same time. llama-swap is built from its source first.

    python -m tests.support.bench.bench_on_demand wake|swap|replay --llama-swap PATH [--rounds 20] [--minutes 30]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from metal_supervisor import launch
from tests.support.bench.bench_gateway import listens
from tests.support.bench.intervals import shown
from tests.support.gateway import Gateway, with_gateway
from tests.support.system import eventually, free_ports
from tests.support.tight import LARGE, MIB, lean, share

ONE_MIB = 100
TWO_MIB = 200
"""Budgets in which one and two of these engines fit; each is charged 82 MiB."""
SETTLED_S = 1.0
"""Rest before a swap: an engine counts as in use until half a second after its answer."""
PAUSE_S = 1.5
"""Mean time between two requests of the replay."""
ON_DEMAND = "metal-supervisor.io/on-demand"


def ask(port: int, model: str) -> tuple[int, float]:
    """(status, seconds) of a short chat; 0 if the connection was lost."""
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    began = time.monotonic()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            answer.read()
            return answer.status, time.monotonic() - began
        except (OSError, http.client.HTTPException):
            return 0, time.monotonic() - began


def asked(port: int, model: str) -> float:
    """Seconds of a short chat that is answered."""
    status, seconds = ask(port, model)
    if status != 200:
        raise SystemExit(f"{model} at port {port}: {status}")
    return seconds


@dataclass(frozen=True)
class Started:
    """What an engine was started with."""

    command: list[str]
    environment: dict[str, str]

    def at_port(self, port: str) -> Started:
        """The same with another port."""
        index = self.command.index("--port")
        return Started([*self.command[: index + 1], port, *self.command[index + 2 :]], self.environment)


class Engine:
    """The engine itself, started as both of them start it."""

    def __init__(self, started: Started) -> None:
        (self.port,) = free_ports(1)
        self.started = started.at_port(str(self.port))

    def times(self) -> tuple[float, float]:
        """Seconds from its start to the first answer, and from SIGTERM to its end."""
        began = time.monotonic()
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(self.started.command, env=self.started.environment, stdout=quiet, stderr=quiet)
        while ask(self.port, "x")[0] != 200:
            if process.poll() is not None:
                raise SystemExit(f"the engine ended with {process.returncode}: {self.started.command}")
            time.sleep(0.002)
        ready = time.monotonic()
        process.terminate()
        process.wait(30)
        return ready - began, time.monotonic() - ready


@contextlib.contextmanager
def ours(base: Path, names: list[str], budget_mib: int) -> Iterator[Gateway]:
    """A system with these models on demand, none of them loaded."""
    with with_gateway(base, "--memory-fraction", f"{share(budget_mib * MIB):.9f}", "--idle-ttl", "3600") as gateway:
        system = gateway.system
        for name in names:
            made = lean(name, LARGE)
            made["metadata"]["annotations"] = {ON_DEMAND: "true"}
            system.apply(system.tiny_model(), made)
        for name in names:
            eventually(lambda name=name: system.condition("MetalReady", name).get("reason") == "Unloaded", 60, name)
        yield gateway


@contextlib.contextmanager
def theirs(base: Path, binary: Path, engine: Started, names: list[str], together: int) -> Iterator[int]:
    """The port of a llama-swap with the same engine for each model, of which so many may run at a time."""
    (port,) = free_ports(1)
    line = " ".join(engine.at_port("${PORT}").command)
    pairs = {f"{one}-{two}": f"{one} & {two}" for index, one in enumerate(names) for two in names[index + 1 :]}
    routing = {"router": {"use": "matrix", "settings": {"matrix": {"sets": pairs}}}}
    config = {
        "startPort": free_ports(1)[0],
        "models": {name: {"cmd": line, "concurrencyLimit": 1000} for name in names},
        **({"routing": routing} if together == 2 else {}),
    }
    (base / "llama-swap.yaml").write_text(json.dumps(config))
    words: list[str | Path] = [binary, "--config", base / "llama-swap.yaml", "--listen", f"127.0.0.1:{port}"]
    with (base / "llama-swap.log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, env=engine.environment)
    try:
        eventually(lambda: listens(port), what="llama-swap")
        yield port
    finally:
        process.terminate()
        process.wait(30)


def unload(port: int) -> None:
    """Have llama-swap end all engines."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("POST", "/api/models/unload")
        connection.getresponse().read()


def told(name: str, values: list[float]) -> str:
    """One figure: its median with its 95 % interval, and its spread."""
    return f"{name:<44} {shown(values)} s ({min(values):.3f} to {max(values):.3f}), n={len(values)}"


def started_with(gateway: Gateway, name: str) -> Started:
    """What a service's engine was started with, which is loaded for it; no other engine may bear its mark."""
    asked(gateway.port, name)
    process = psutil.Process(gateway.system.pid(name))
    environment = {key: value for key, value in process.environ().items() if key != launch.MARK}
    return Started(process.cmdline(), environment)


def rest(gateway: Gateway, name: str) -> None:
    """Have our model unloaded, by an edit that counts as no use of it: replicas 0 and back."""
    gateway.system.kubectl("scale", f"isvc/{name}", "--replicas=0")
    eventually(lambda: gateway.system.pid(name) == 0, 30, "its engine to end")
    gateway.system.kubectl("scale", f"isvc/{name}", "--replicas=1")
    eventually(lambda: gateway.system.condition("MetalReady", name).get("reason") == "Unloaded", 30, "it to rest")


def wake(base: Path, binary: Path, rounds: int) -> None:
    """Measure how long a request waits beyond the engine's own load."""
    names, alone = ["one"], []
    found: dict[str, list[float]] = {"ours": [], "llama-swap": []}
    with ours(base, names, ONE_MIB) as gateway:
        started = started_with(gateway, "one")
        engine = Engine(started)
        with theirs(base, binary, started, names, 1) as port:
            for _ in range(rounds):
                rest(gateway, "one")
                unload(port)
                load_s, _ = engine.times()
                alone.append(load_s)
                turns: list[tuple[str, int]] = [("ours", gateway.port), ("llama-swap", port)]
                random.shuffle(turns)
                for name, at in turns:
                    found[name].append(asked(at, "one") - load_s)
    print(told("the engine alone, start to answer", alone))
    for name, values in found.items():
        print(told(f"{name}: request to answer, beyond that", values))


def swap(base: Path, binary: Path, rounds: int) -> None:
    """Measure how long a request waits beyond the end of one engine and the load of the other."""
    names, alone = ["one", "two"], []
    found: dict[str, list[float]] = {"ours": [], "llama-swap": []}
    with ours(base, names, ONE_MIB) as gateway:
        started = started_with(gateway, "one")
        engine = Engine(started)
        with theirs(base, binary, started, names, 1) as port:
            asked(port, "one")
            for index in range(rounds):
                own_s = sum(engine.times())
                alone.append(own_s)
                time.sleep(SETTLED_S)
                name = names[(index + 1) % 2]
                for way, at in (("ours", gateway.port), ("llama-swap", port)):
                    found[way].append(asked(at, name) - own_s)
    print(told("both engines alone, end and load", alone))
    for way, values in found.items():
        print(told(f"{way}: request to answer, beyond that", values))


@dataclass
class Replayed:
    """What one of them made of the replay."""

    waits: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    loads: int = 0


def replay(base: Path, binary: Path, minutes: float) -> None:
    """Ask for six models of which two fit, by one plan for both, and compare what clients see."""
    names = [f"m{index}" for index in range(6)]
    chance = random.Random(7)
    plan, at_s = [], 0.0
    while at_s < minutes * 60:
        # Three models get most of the requests, and they come in bursts, as from people at work.
        plan.append((at_s, chance.choices(names, weights=(8, 4, 2, 1, 1, 1))[0]))
        at_s += chance.expovariate(1 / 0.3) if chance.random() < 0.5 else chance.expovariate(1 / (2 * PAUSE_S))
    with ours(base, names, TWO_MIB) as gateway:
        started = started_with(gateway, "m0")
        with theirs(base, binary, started, names, 2) as port:
            ways = {"ours": (gateway.port, Replayed()), "llama-swap": (port, Replayed())}
            watching = threading.Event()
            watchers = [
                threading.Thread(target=count_loads, args=(engines, ways[way][1], watching), daemon=True)
                for way, engines in (("ours", own_engines(gateway, names)), ("llama-swap", children_of(port)))
            ]
            for each in watchers:
                each.start()
            began, threads = time.monotonic(), []
            for due_s, name in plan:
                time.sleep(max(0.0, began + due_s - time.monotonic()))
                for at, result in ways.values():
                    thread = threading.Thread(target=replayed, args=(at, name, result))
                    thread.start()
                    threads.append(thread)
            for thread in threads:
                thread.join()
            watching.set()
    print(f"{len(plan)} requests to each in {minutes:g} min, six models of which two fit")
    for way, (_, result) in ways.items():
        waits = sorted(result.waits)
        p50, p99 = waits[len(waits) // 2], waits[int(len(waits) * 0.99)]
        hits = sum(each < 0.1 for each in waits)
        print(
            f"{way:<12} statuses {dict(result.statuses)}, loads {result.loads}, under 0.1 s {hits}, "
            f"p50 {p50:.3f} s, p99 {p99:.3f} s, longest {waits[-1]:.3f} s"
        )


def replayed(port: int, name: str, result: Replayed) -> None:
    """Ask once, and note how that went."""
    status, seconds = ask(port, name)
    result.statuses[status] += 1
    result.waits.append(seconds)


def own_engines(gateway: Gateway, names: list[str]) -> Callable[[], set[int]]:
    """The pids of our engines now."""
    return lambda: {pid for name in names if (pid := gateway.system.pid(name))}


def children_of(port: int) -> Callable[[], set[int]]:
    """The pids of llama-swap's engines now."""
    (parent,) = (each for each in psutil.Process().children() if any(f":{port}" in word for word in each.cmdline()))
    return lambda: {each.pid for each in parent.children()}


def count_loads(engines: Callable[[], set[int]], result: Replayed, ended: threading.Event) -> None:
    """Count the engines that appear."""
    seen = engines()
    while not ended.wait(0.1):
        with contextlib.suppress(psutil.Error):
            now = engines()
            result.loads += len(now - seen)
            seen |= now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("wake", "swap", "replay"))
    parser.add_argument("--llama-swap", type=Path, required=True, help="its binary")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=30.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-on-demand-") as place:
        base = Path(place)
        if given.what == "replay":
            replay(base, given.llama_swap, given.minutes)
        else:
            (wake if given.what == "wake" else swap)(base, given.llama_swap, given.rounds)


if __name__ == "__main__":
    main()
