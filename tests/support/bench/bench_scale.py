"""What an edit, a crash and rest cost a Mac that has few, many or very many services.

The whole system runs on its own API server, with stand-ins for engines that load for LOAD_S. An edit is a service that
comes; crashes are of services that have been up for long. *Beyond the engines* is what it takes longer than without us:
of one service the time that a stand-in takes from its start to its health, of all together the time that as many
stand-ins take, started as fast as the machine can.

    python -m tests.support.bench.bench_scale [--services 10 150 500] [--times 20] [--idle-s 60]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from metal_supervisor.memory import machine_memory
from metal_supervisor.runtimes import probing
from metal_supervisor.spec.types import Probe
from tests.support.bench.intervals import shown
from tests.support.bench.watching import Watch, readiness
from tests.support.system import FAKE_ENGINE, SLICES, System, eventually, kill, service, system_environment

LOAD_S = 0.2
OWN_TIMES = 10
SETTLED_S = 3.0
"""Longer than supervisord's startsecs."""
QUIET_S = 20.0
"""After the last edit, until rest is rest: the probes have their long pause, and every Lease its pace."""
SIZES = (10, 150, 500)
OURS = ("controller", "sidecar", "supervisord", "apiserver")
FLAGS = ("--memory-fraction", "0.9", "--parallel-starts", "0")
"""Starts are paced as for users; what tests run starts all at once."""
FIRST_PORT = 5000
PORTS = "6000-7999"
"""Below those of tests, so that a test beside it takes none."""


@dataclass
class Scale:
    """Figures of one number of services: seconds, but for what is named otherwise."""

    to_pid: list[float] = field(default_factory=list)
    to_slice: list[float] = field(default_factory=list)
    """Beyond `own_load_s`."""
    withdrawn: list[float] = field(default_factory=list)
    edit_cpu_ms: dict[str, list[float]] = field(default_factory=dict)
    """Process -> CPU of each edit, in ms: from when the slice before was ready until its own is."""
    idle_percent: dict[str, float] = field(default_factory=dict)
    """Process -> share of a core."""
    switches: dict[str, float] = field(default_factory=dict)
    """Process -> context switches a second at rest."""
    pss_mib: dict[str, float] = field(default_factory=dict)
    first_ready: float = 0.0
    all_ready: float = 0.0
    own: float = 0.0
    """Median of `own_load_s`."""
    alone: float = 0.0
    """Until as many stand-ins answer without us."""


def engine(name: str) -> dict[str, Any]:
    flags = ["--fake-load-s", str(LOAD_S), "--fake-quiet", "--cache-ram", "0"]
    return service(name, uBatchSize=32, contextSize=256, extraArgs=flags)


def processes(system: System) -> dict[str, psutil.Process]:
    """Ours; the API server is besides, for a Mac of a cluster has none."""
    pids = {name: system.own_pid(name) for name in ("controller", "sidecar", "apiserver")}
    return {name: psutil.Process(pid) for name, pid in {**pids, "supervisord": system.supervisord_pid()}.items()}


def cpu_s(ours: dict[str, psutil.Process]) -> dict[str, float]:
    """CPU so far, without that of children; psutil has it in steps of 10 ms, of which a short edit is one."""
    if sys.platform == "linux":  # the clock of another process, as clock_getcpuclockid(3) makes it
        return {name: time.clock_gettime(~process.pid << 3 | 2) for name, process in ours.items()}
    return {name: sum(process.cpu_times()[:2]) for name, process in ours.items()}


def switches(process: psutil.Process) -> dict[str, int]:
    """Context switches so far of each thread that lives: psutil has those of the first alone on Linux."""
    found = {path.parent.name: path.read_text() for path in Path(f"/proc/{process.pid}/task").glob("*/status")}
    return {
        thread: sum(int(line.split()[1]) for line in text.splitlines() if "ctxt_switches" in line)
        for thread, text in found.items()
    } or {"": sum(process.num_ctx_switches())}


def started(system: System, name: str) -> bool:
    """True once the launcher has become the engine."""
    note = system.files.run_note(f"default.{name}")
    if note is None or not note.pid:
        return False
    with contextlib.suppress(OSError):
        return b"--alias" in Path(f"/proc/{note.pid}/cmdline").read_bytes()
    return False


def seconds_until(look: Any, since: float, within_s: float = 120) -> float:
    """Seconds from `since` until `look` was true, to a millisecond."""
    while not look():
        assert time.monotonic() - since < within_s
        time.sleep(0.001)
    return time.monotonic() - since


def edits(system: System, slices: Watch, times: int, scale: Scale) -> None:
    """Measures services that come to those that are there, one at a time."""
    ours = processes(system)
    for index in range(times):
        name, before = f"edit-{index}", cpu_s(ours)
        since = time.monotonic()
        system.apply(engine(name))
        scale.to_pid.append(seconds_until(lambda name=name: started(system, name), since))
        scale.to_slice.append(slices.after_for(name, "ready=True", since) - scale.own)
        for process, spent in cpu_s(ours).items():
            scale.edit_cpu_ms.setdefault(process, []).append(1000 * (spent - before[process]))


def crashes(system: System, slices: Watch, times: int, scale: Scale) -> None:
    """Measures engines that end by SIGKILL, one at a time."""
    time.sleep(SETTLED_S)
    for index in range(times):
        name = f"edit-{index}"
        pid, since = system.pid(name), time.monotonic()
        kill(pid)
        scale.withdrawn.append(slices.after_for(name, "ready=False", since))
        slices.after_for(name, "ready=True", since + scale.withdrawn[-1])


def rest(system: System, seconds: float, scale: Scale) -> None:
    """Measures what nothing costs."""
    time.sleep(QUIET_S)
    ours = processes(system)
    before, switched = cpu_s(ours), {name: switches(each) for name, each in ours.items()}
    since = time.monotonic()
    time.sleep(seconds)
    lasted, after = time.monotonic() - since, cpu_s(ours)
    for name, each in ours.items():
        scale.idle_percent[name] = 100 * (after[name] - before[name]) / lasted
        counts = switches(each)
        scale.switches[name] = sum(counts[thread] - switched[name].get(thread, 0) for thread in counts) / lasted
        # Of the process alone: supervisord's children are the engines.
        held = machine_memory.memory_of(each.pid, machine_memory.PROC)
        scale.pss_mib[name] = held[0] / 2**20 if held else 0.0


def stand_in(port: int) -> subprocess.Popen[bytes]:
    """One without us, started as an engine is."""
    command = [str(FAKE_ENGINE), "--fake-load-s", str(LOAD_S), "--host", "127.0.0.1", "--port", str(port)]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=system_environment())


def own_load_s() -> float:
    """Seconds from the start of a stand-in to its first answer that it is healthy."""
    since = time.monotonic()
    with stand_in(FIRST_PORT) as process:
        found = seconds_until(lambda: probing.probe(FIRST_PORT, Probe(), identify=False).ready, since)
        process.kill()
    return found


def alone_s(count: int) -> float:
    """Seconds until as many stand-ins answer, started at once without us."""
    first, since, running = FIRST_PORT, time.monotonic(), []

    def up(port: int) -> None:
        ask = ["curl", "-sf", "--retry", "1000", "--retry-all-errors", "--retry-delay", "1", "-o", os.devnull]
        subprocess.run([*ask, f"http://127.0.0.1:{port}/health"], check=True, timeout=300)

    try:
        for port in range(first, first + count):
            running.append(stand_in(port))
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(up, range(first, first + count)))
        return time.monotonic() - since
    finally:
        for each in running:
            each.send_signal(signal.SIGKILL)
            each.wait()


@contextlib.contextmanager
def loaded(services: int, scale: Scale) -> Iterator[tuple[System, Watch]]:
    """A system with so many services, all of one apply, and a watch of their slices."""
    with tempfile.TemporaryDirectory(prefix="ms-scale-") as base:
        system = System(Path(base), "--ports", PORTS, *FLAGS, engine=FAKE_ENGINE)
        try:
            system.start()
            slices = Watch(system, SLICES, readiness)
            time.sleep(1)
            since = time.monotonic()
            names = [f"many-{number}" for number in range(services)]
            system.apply(system.tiny_model(), *(engine(name) for name in names))
            eventually(lambda: any(slices.seen_for(name, "ready=True") for name in names), 30, "one to be Ready")
            eventually(lambda: all(slices.seen_for(name, "ready=True") for name in names), 600, "all to be Ready")
            took = [slices.after_for(name, "ready=True", since) for name in names]
            scale.first_ready, scale.all_ready = min(took), max(took)
            yield system, slices
        finally:
            system.close()


def measure(services: int, times: int, idle_s: float) -> Scale:
    """All figures of one number of services."""
    scale = Scale(alone=alone_s(services), own=statistics.median(own_load_s() for _ in range(OWN_TIMES)))
    with loaded(services, scale) as (system, slices):
        rest(system, idle_s, scale)
        edits(system, slices, times, scale)
        crashes(system, slices, times, scale)
    return scale


def report(services: int, scale: Scale) -> str:
    """All figures, for people; those of edits and crashes with the 95 % interval of their median."""

    def each(values: dict[str, float], digits: int = 2) -> str:
        parts = ", ".join(f"{name} {values[name]:.{digits}f}" for name in OURS if name in values)
        total = sum(value for name, value in values.items() if name != "apiserver")
        return f"{total:.{digits}f} ({parts}, which is not counted)"

    return "\n".join(
        (
            f"── {services} services",
            f"apply -> pid, s                       {shown(scale.to_pid)}",
            f"apply -> ready slice, beyond load, s  {shown(scale.to_slice)}",
            f"crash -> slice not ready, s           {shown(scale.withdrawn)}",
            *(
                f"CPU of an edit, ms, {name:<18}{shown(scale.edit_cpu_ms[name], 1)}, mean "
                f"{statistics.fmean(scale.edit_cpu_ms[name]):.1f}"
                for name in OURS
            ),
            f"idle, % of a core                     {each(scale.idle_percent)}",
            f"idle, context switches a second       {each(scale.switches, 1)}",
            f"PSS, MiB                              {each(scale.pss_mib, 0)}",
            f"  a stand-in's own load, s            {scale.own:.3f}",
            f"first Ready after one apply, s        {scale.first_ready:.2f}",
            f"all Ready after one apply, s          {scale.all_ready:.2f}, the stand-ins alone {scale.alone:.2f}",
        )
    )


def main() -> None:
    """Measures, and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--services", type=int, nargs="+", default=SIZES)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--idle-s", type=float, default=60)
    given = parser.parse_args()
    for services in given.services:
        print(report(services, measure(services, given.times, given.idle_s)), flush=True)


if __name__ == "__main__":
    main()
