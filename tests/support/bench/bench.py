#!/usr/bin/env python3
"""How fast, and at what cost: the figures this project promises, measured on the whole running system.

Latencies are of twenty services, each up longer than supervisord's startsecs and outside a crash loop, and
are taken where a user would feel them: from the request that asks to the process, the EndpointSlice or the
status that shows. Prints a table and writes build/bench.json. A figure here is a measurement of this
machine, whatever else it was doing; nothing in the tests depends on one.

    python -m tests.support.bench.bench [--services 20] [--idle-s 120] [--outage-s 30] [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import tiny_gguf

from metal_supervisor.apiserver import ApiServer, Options
from metal_supervisor.cluster.kube import Kube
from metal_supervisor.controller import boot
from metal_supervisor.runtimes import probing
from metal_supervisor.settings.loader import conf_dir
from metal_supervisor.spec.types import Probe
from metal_supervisor.state import own_processes
from tests.support.bench import bench_confinement, bench_fetch, bench_header, bench_pages
from tests.support.bench.bench_scale import cpu_s
from tests.support.bench.watching import Watch, readiness
from tests.support.system import ISVC, SLICES, System, eventually, free_ports, kill, running, service

ROOT = Path(__file__).resolve().parents[3]

OWN = ("controller", "sidecar")
STARTSECS_S = 2.5
PAD_MIB = 256
MARKER = "bench-marker-3f9a"


@dataclass
class Figure:
    """One measured quantity."""

    name: str
    aim: str
    unit: str = "s"
    values: list[float] = field(default_factory=list)

    def row(self) -> str:
        if not self.values:
            return f"{self.name:<48} not measured  {self.aim}"
        middle, worst = statistics.median(self.values), max(self.values)
        measured = f"{middle:>8.3f} {self.unit:<3} {worst:>8.3f} {self.unit:<3} {len(self.values):>3}"
        return f"{self.name:<48} {measured}  {self.aim}".rstrip()

    def json(self) -> dict[str, Any]:
        found = {"aim": self.aim, "unit": self.unit, "n": len(self.values), "values": self.values}
        if self.values:
            found |= {"median": statistics.median(self.values), "worst": max(self.values), "best": min(self.values)}
        return found


def lean(name: str, **spec: Any) -> dict[str, Any]:
    """A service whose scratch is small: the model is padded by its width, and twenty of it must fit into the budget."""
    return service(name, uBatchSize=32, **spec)


def phase(event: dict[str, Any]) -> str:
    return str((event["object"].get("status") or {}).get("phase", ""))


def engine_up(system: System, name: str, but: int = 0) -> int | None:
    """Pid of the service's llama-server once the launcher has become it."""
    note = system.files.run_note(f"default.{name}")
    if note is None or note.pid in (0, but):
        return None
    with contextlib.suppress(OSError):
        if b"--alias" in Path(f"/proc/{note.pid}/cmdline").read_bytes():
            return note.pid
    return None


def answers(port: int) -> bool:
    return probing.probe(port, Probe(), identify=False).ready


def until(look: Callable[[], Any], within_s: float = 30) -> float:
    """Monotonic time at which `look` was first true, at a millisecond's grain."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if look():
            return time.monotonic()
        time.sleep(0.001)
    raise AssertionError("not in time")


def latencies(system: System, count: int) -> list[Figure]:
    """apply, crash and delete of `count` services."""
    to_pid = Figure("apply -> llama-server's pid", "aim 0.15 s; incumbent 4.3 s")
    to_ready = Figure("apply -> Ready, beyond the engine's own load", "aim 0.2 s; incumbent +0.5 s")
    load = Figure("  the engine's own load (exec -> /health 200)", "")
    to_new = Figure("crash -> new pid", "aim 0.02 s; incumbent 20.7 s")
    to_exec = Figure("  crash -> that pid is llama-server (exec)", "")
    to_withdrawn = Figure("crash -> EndpointSlice ready: false", "aim 0.1 s; incumbent up to 25 s")
    to_gone = Figure("delete -> process gone, engine's exit included", "aim 0.1 s + the engine's own exit")
    own_exit = Figure("  the engine's own exit (TERM -> gone)", "")
    phases, slices = Watch(system, ISVC, phase), Watch(system, SLICES, readiness)
    names = [f"bench-{index:02}" for index in range(count)]
    slice_of = {}
    for name in names:
        start = time.monotonic()
        system.apply(lean(name))
        pid_at = until(lambda name=name: engine_up(system, name))
        port = json.loads((system.state / "records" / f"default.{name}.json").read_text())["port"]
        healthy_at = until(lambda port=port: answers(port))
        ready_s = phases.after(name, "Ready", start)
        to_pid.values.append(pid_at - start)
        load.values.append(healthy_at - pid_at)
        to_ready.values.append(max(0.0, ready_s - (healthy_at - pid_at)))
        found = system.slice(name)
        assert found is not None
        slice_of[name] = found["metadata"]["name"]
    time.sleep(STARTSECS_S)
    for name in names:
        old = system.pid(name)
        start, wall = time.monotonic(), time.time()
        kill(old)
        to_exec.values.append(until(lambda name=name, old=old: engine_up(system, name, old)) - start)
        to_new.values.append(spawned_at(system, name, wall) - wall)
        # A model this small may serve again before there was anything to withdraw.
        with contextlib.suppress(AssertionError):
            to_withdrawn.values.append(slices.after(slice_of[name], "ready=False", start, within_s=1))
        eventually(lambda name=name, old=old: serves_again(system, name, old), what=f"{name} to serve again")
    time.sleep(STARTSECS_S)
    for name in names:
        pid = system.pid(name)
        start = time.monotonic()
        system.delete(name)
        to_gone.values.append(until(lambda pid=pid: not psutil.pid_exists(pid)) - start)
        eventually(lambda name=name: f"default.{name}" not in system.rpc.table(), what="gone")
    for index in range(min(5, count)):
        name = f"exit-{index}"
        system.apply(lean(name))
        pid = system.ready(name)
        start = time.monotonic()
        os.kill(pid, 15)
        own_exit.values.append(until(lambda pid=pid: not psutil.pid_exists(pid) or _zombie(pid)) - start)
        system.delete(name)
        eventually(lambda name=name: f"default.{name}" not in system.rpc.table(), what="gone")
    return [to_pid, to_ready, load, to_new, to_exec, to_withdrawn, to_gone, own_exit]


def serves_again(system: System, name: str, old: int) -> bool:
    seen = system.observe(name)
    return bool(seen["ready"]) and seen["pid"] not in (0, old)


def _zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def spawned_at(system: System, name: str, since: float) -> float:
    """Unix time of supervisord's first spawn of the service after `since`, from its own log.

    Asking supervisord instead would wake its loop, and make it faster than it is.
    """
    pattern = re.compile(rf"^(\S+ \S+),(\d+) INFO spawned: 'default\.{re.escape(name)}' ", re.M)
    for stamp, millis in pattern.findall((system.state / "log" / "supervisord.log").read_text()):
        at = time.mktime(time.strptime(stamp, "%Y-%m-%d %H:%M:%S")) + int(millis) / 1000
        if at >= since - 0.001:
            return float(at)
    raise AssertionError(f"{name} was not spawned again")


def outages(system: System, lengths_s: list[float]) -> Figure:
    """A change made while the API was away: from the API's return to the new process."""
    figure = Figure("API back -> change made meanwhile is applied", "aim 2 s")
    _, prefix = own_processes.saved_access(system.files)
    system.apply(lean("away"))
    system.ready("away")
    for index, length_s in enumerate(lengths_s):
        before = system.pid("away")
        system.supervisorctl("stop", "apiserver")
        stopped = time.monotonic()
        options = Options(
            data_file=system.state / "apiserver.db",
            prefix=prefix,
            port=free_ports(1)[0],
            crd_paths=tuple((conf_dir() / "crds").glob("*.yaml")),
        )
        with ApiServer(options) as other, tempfile.NamedTemporaryFile("w", suffix=".json") as kubeconfig:
            kubeconfig.write(boot.kubeconfig(other.url))
            kubeconfig.flush()
            kube = Kube(Path(kubeconfig.name))
            kube.apply(f"{ISVC}/away", lean("away", contextSize=512 + 256 * (index + 1)), "test", force=True)
            kube.close()
        time.sleep(max(0.0, length_s - (time.monotonic() - stopped)))
        system.rpc.start("apiserver")
        back = until(lambda: _up(system))
        figure.values.append(until(lambda before=before: engine_up(system, "away", before)) - back)
        system.ready("away")
    system.delete("away")
    return figure


def _up(system: System) -> bool:
    with contextlib.suppress(Exception):
        return bool(system.get("/version"))
    return False


def idle(system: System, services: int, seconds: float) -> list[Figure]:
    """What the system costs while nothing happens."""
    names = [f"idle-{index}" for index in range(services)]
    for name in names:
        system.apply(lean(name))
    for name in names:
        system.ready(name)
    time.sleep(5)
    pids = {name: system.own_pid(name) for name in OWN} | {"supervisord": system.supervisord_pid()}
    processes = {name: psutil.Process(pid) for name, pid in pids.items()}
    before = cpu_s(processes)
    asked = requests(system)
    start = time.monotonic()
    time.sleep(seconds)
    lasted = time.monotonic() - start
    used = {name: spent - before[name] for name, spent in cpu_s(processes).items()}
    rss = {name: process.memory_info().rss / 2**20 for name, process in processes.items()}
    per_minute = (requests(system) - asked) * 60 / lasted
    for name in names:
        system.delete(name)
    return [
        Figure("idle CPU, ours together", "aim 0.3 % of a core", "%", [100 * sum(used.values()) / lasted]),
        *(Figure(f"  {name}", "", "%", [100 * each / lasted]) for name, each in used.items()),
        Figure("idle RSS, ours together", "aim 150 MiB", "MiB", [sum(rss.values())]),
        *(Figure(f"  {name}", "", "MiB", [each]) for name, each in rss.items()),
        Figure("idle requests to the API per minute", "aim 30", "", [per_minute]),
    ]


def requests(system: System) -> float:
    """Requests sent to the API so far, by the sidecar and by the controller."""
    lines = system.fetch("/metrics")[1].splitlines()
    sidecar = next(float(line.split()[1]) for line in lines if line.startswith("metal_supervisor_api_requests_total"))
    told = json.loads((system.state / "controller.json").read_text())
    return sidecar + float(told["cluster"]["requests"])


@contextlib.contextmanager
def traced(pids: list[int], into: Path) -> Iterator[bool]:
    """Every byte that the processes read, write, send or receive, by strace; False if it is not to be had."""
    strace = shutil.which("strace")
    if strace is None:
        yield False
        return
    calls = "trace=read,write,readv,writev,sendto,recvfrom,sendmsg,recvmsg,sendfile,splice"
    targets = [part for pid in pids for part in ("-p", str(pid))]
    process = subprocess.Popen(
        [strace, "-f", "-q", "-s", "1000000", "-e", calls, "-o", str(into), *targets], stderr=subprocess.DEVNULL
    )
    time.sleep(1)
    try:
        yield process.poll() is None
    finally:
        process.terminate()
        process.wait(10)


def chat_bytes(system: System, into: Path) -> str:
    """Whether a byte of a chat passed through one of our processes, as seen by the kernel."""
    system.apply(lean("secret"))
    system.ready("secret")
    port = system.port("secret")
    pids = [system.own_pid(name) for name in (*OWN, "apiserver")] + [system.supervisord_pid()]
    with traced(pids, into) as works:
        if not works:
            return "not measured: strace is not installed here (apt-get install strace)"
        body = json.dumps({"messages": [{"role": "user", "content": MARKER}]}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body)
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert b"hello world from tiny" in answer.read()
        system.fetch("/healthz")  # something that is theirs, so that an empty trace cannot pass
        time.sleep(1)
    text = into.read_text(errors="replace")
    system.delete("secret")
    if "/healthz" not in text:
        return "not measured: the trace holds nothing"
    found = [word for word in (MARKER, "hello world from tiny", "chat.completion") if word in text]
    return f"FOUND {found}" if found else f"none, in {text.count(chr(10))} traced calls of {len(pids)} processes"


def header_reading(base: Path) -> Figure:
    """How long the controller's thread takes for the header of a large model that the system has read before."""
    return Figure("header of a 70 GiB model, 150,000 tokens", "aim 0.05 s", values=bench_header.measure(base))


def fetching(base: Path, quick: bool) -> list[Figure]:
    """How fast a model comes over loopback beside curl, and how fast it is checked."""
    found = bench_fetch.measure(base, 64 if quick else 512, 2 if quick else 5)
    gib_s = [1.073741824e3 / rate for rate in found["hash"]]
    shares = [curl / ours for ours, curl in zip(found["ours"], found["curl"], strict=True)]
    return [
        Figure("a download beside curl's on loopback, time", "aim 1.11 times", "x", shares),
        Figure("check of a GiB's sha256", "", "s", gib_s),
    ]


def confining(quick: bool) -> list[Figure]:
    """Cost of confinement, beside starts and tokens without it."""
    later, share = bench_confinement.measure(10 if quick else 100)
    return [
        Figure("a confined start takes longer by", "aim 5", "ms", later),
        Figure("CPU time of a token, confined to not", "aim 1.01", "x", share),
    ]


def looking(quick: bool) -> list[Figure]:
    """How long the sidecar's answers take with a hundred services, while they are edited."""
    figures = []
    for path, values in bench_pages.measure(times=50 if quick else 200).items():
        millis = [1000 * each for each in values]
        figures.append(Figure(f"GET {path} of 100 services, an edit a second", "", "ms", millis))
        worst = [bench_pages.percentile_99(millis)]
        figures.append(Figure(f"GET {path} of 100 services, an edit a second: p99", "aim 50 ms", "ms", worst))
    return figures


def main() -> int:
    """Measures everything, or with --quick a little of everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--services", type=int, default=20)
    parser.add_argument("--idle-s", type=float, default=120)
    parser.add_argument("--outage-s", type=float, default=30)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter, to see that it works")
    given = parser.parse_args()
    if given.quick:
        given.services, given.idle_s, given.outage_s = 3, 5, 3
    base = Path(tempfile.mkdtemp(prefix="ms-bench-"))
    try:
        # Large enough that loading takes longer than withdrawing, as with any model that is worth a Mac.
        tiny_gguf.write_tiny_gguf(base / "tiny.gguf", context=32768, pad_mib=PAD_MIB)
        with running(base) as system:
            system.apply(system.tiny_model())
            figures = [header_reading(base), *fetching(base, given.quick), *latencies(system, given.services)]
            figures += looking(given.quick)
            figures += confining(given.quick)
            figures.append(outages(system, [given.outage_s, *([] if given.quick else [5.0] * 4)]))
            figures += idle(system, min(10, given.services), given.idle_s)
            chat = chat_bytes(system, base / "strace.txt")
    finally:
        shutil.rmtree(base, ignore_errors=True)
    load_1 = os.getloadavg()[0]
    print(f"\n{'':<48} {'median':>8}     {'worst':>8}     {'n':>3}")
    for figure in figures:
        print(figure.row())
    print(f"bytes of a chat through our processes: {chat}")
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {load_1:.2f} at the end"
    print(f"machine: {machine}; real llama-server, a model of {PAD_MIB} MiB")
    out = ROOT / "build" / "bench.json"
    out.parent.mkdir(exist_ok=True)
    body = {figure.name.strip(): figure.json() for figure in figures}
    out.write_text(json.dumps({"figures": body, "chat": chat, "load": load_1}, indent=1) + "\n")
    print(f"written: {out.relative_to(ROOT)}")
    return 0 if not chat.startswith("FOUND") else 1


if __name__ == "__main__":
    sys.exit(main())
