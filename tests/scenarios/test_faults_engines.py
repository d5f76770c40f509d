"""Engines that are slow, loud, strange or late: they are told from dead ones, and disturb no other one."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest

from tests.support.engines import (
    BYSTANDER,
    Stopwatch,
    Timeline,
    beside_a_bystander,
    events,
    gone,
    port,
    reason,
    said,
    stand_in,
    tell,
    timeline,
    untouched,
)
from tests.support.faults import Figure, fault
from tests.support.pace import within
from tests.support.system import Stream, System, eventually, service

FLOOD_LINES_PER_S = 145_000
"""Of 120 bytes: a gigabyte a minute."""
LOOK_S = 15
"""How often an engine that serves is asked."""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with beside_a_bystander(tmp_path_factory.mktemp("engines")) as up:
        yield up


SLOW = {"slow": 4.9, "slower": 5.1}


@dataclass(frozen=True)
class Slowed:
    """Engines that are slow, or halted, since the same moment: they can take their time together."""

    since: float
    """Seconds of the monotonic clock."""
    before: dict[str, int]
    """Service -> its engine."""
    timeline: Timeline
    stream: Stream
    """An answer of the halted one."""
    ready_since: float
    """Since when the slow one has served."""
    looked: int
    """How often that one had been asked before."""


@pytest.fixture(scope="module", autouse=True)
def slowed(system: System) -> Iterator[Slowed]:
    system.apply(service("paused", contextSize=32768), *map(stand_in, SLOW))
    before = {name: system.ready(name) for name in ("paused", *SLOW)}
    timeline = Timeline(system)
    stream = system.stream("paused", tokens=600, slow=False).last()
    psutil.Process(before["paused"]).suspend()
    looked = asked(system, "slow", "/health")
    for name, delay_s in SLOW.items():
        tell(system, name, health_delay_s=delay_s)
    yield Slowed(time.monotonic(), before, timeline, stream, system.observe("slow")["since"], looked)
    timeline.end()


@pytest.fixture(autouse=True)
def bystander(system: System) -> Iterator[None]:
    with untouched(system):
        yield


# ── P 73, 84: slow, or halted for a while ────────────────────────────────────────────────────────


def asked(system: System, name: str, path: str) -> int:
    """How often an engine has answered to a path."""
    return said(system, name).count(f'"GET {path} ')


@fault(
    "P84a",
    "an engine is stopped by SIGSTOP and goes on after a while",
    happens="its endpoint is withdrawn at the next look, and back when it goes on, without a restart",
    sees="Unresponsive, then Ready again; the answer under way is complete",
    bound="withdrawn within 40 s, looks being 15 s apart",
)
def test_an_engine_that_is_halted_for_a_while_is_back_without_a_restart(
    system: System, figure: Figure, slowed: Slowed
) -> None:
    figure.add("withdrawn", slowed.timeline.withdrawn_s("paused", slowed.since, LOOK_S + 25))
    eventually(lambda: reason(system, "paused") == "Unresponsive", what="the condition, written after the slice")
    psutil.Process(slowed.before["paused"]).resume()
    watch = Stopwatch(figure)
    watch.when(
        "serves when it goes on",
        lambda: eventually(lambda: system.slice_ready("paused"), 20, "the endpoint to be back"),
    )
    assert slowed.stream.completed(), f"{slowed.stream.chunks} chunks, {slowed.stream.error}"
    assert system.pid("paused") == slowed.before["paused"]
    figure.add("restarts", system.observe("paused")["restarts"], "")
    gone(system, "paused")


@fault(
    "P73",
    "/health takes 4.9 s, or 5.1 s",
    happens="4.9 s is slow, and nothing is done; 5.1 s three times is silence: withdrawn, not restarted for it",
    sees="Unresponsive with `has not answered within 5 s`; Ready as soon as it is quick",
    bound="withdrawn within 60 s, looks being 15 s apart",
)
def test_health_that_takes_almost_too_long_changes_nothing_and_too_long_withdraws(
    system: System, figure: Figure, slowed: Slowed
) -> None:
    figure.add("5.1 s withdrawn", slowed.timeline.withdrawn_s("slower", slowed.since, LOOK_S + 45))
    words = "/health has not answered within 5 s"
    eventually(lambda: words in system.condition("MetalReady", "slower")["message"], 20, "the condition to say so")
    assert reason(system, "slower") == "Unresponsive"
    # The first look of a doubt has 2 s, those after it 5 s.
    eventually(lambda: asked(system, "slow", "/health") >= slowed.looked + 2, LOOK_S + 15, "it to be asked twice")
    assert (system.observe("slow")["ready"], system.observe("slow")["since"]) == (True, slowed.ready_since)
    figure.add("4.9 s withdrawn", 0, "times")
    tell(system, "slower", health_delay_s=0)
    watch = Stopwatch(figure)
    watch.when(
        "back when it is quick", lambda: eventually(lambda: system.slice_ready("slower"), 20, "the endpoint to be back")
    )
    assert {name: system.pid(name) for name in SLOW} == {name: slowed.before[name] for name in SLOW}
    gone(system, *SLOW)


# ── P 76, 78: what it writes ──────────────────────────────────────────────────────────────────────


@fault(
    "P76",
    "an engine closes its standard output and error",
    happens="it serves on, without a log, and its end is noticed as any other's",
    sees="Ready",
    bound="its end is withdrawn within 1 s",
)
def test_an_engine_that_closes_its_output_serves_and_is_watched_all_the_same(system: System, figure: Figure) -> None:
    system.apply(stand_in("silent", close_stdout=True))
    watch = Stopwatch(figure)
    before = watch.when("Ready", lambda: system.ready("silent"))
    assert "stand-in" in system.chat("silent")
    eventually(lambda: "RUNNING" in system.supervisorctl("status", "default.silent"), what="RUNNING")
    assert system.pid("silent") == before
    with timeline(system, "silent") as seen:
        watch = Stopwatch(figure)
        psutil.Process(before).kill()
        figure.add("withdrawn", seen.withdrawn_s("silent", watch.since, 5))
        watch.when("serves", lambda: eventually(lambda: system.slice_ready("silent"), 20, "the endpoint to be back"))
    gone(system, "silent")


def strange(value: object) -> list[str]:
    """Every string in it that could move a cursor, or that is not text."""
    if isinstance(value, dict):
        return [each for part in [*value.keys(), *value.values()] for each in strange(part)]
    if isinstance(value, list):
        return [each for part in value for each in strange(part)]
    if not isinstance(value, str):
        return []
    return [] if value.replace("\n", "").isprintable() else [value]


@fault(
    "P78",
    "an engine writes bytes, NUL and terminal escapes to its log, and dies",
    happens="it is held as any other",
    sees="its last words without control characters, wherever they are shown",
    bound="none gets through",
)
def test_junk_in_a_log_reaches_nobodys_terminal(system: System, figure: Figure) -> None:
    system.apply(stand_in("vile", junk=True, exit_after_s=1))
    eventually(lambda: "\x1b" in said(system, "vile"), 20, "junk")
    eventually(lambda: reason(system, "vile") == "CrashLoopBackOff", 20, "it to be held")
    eventually(lambda: "31mred" in "".join(events(system, "vile").values()), 20, "an Event with what is left of it")
    assert not strange(events(system, "vile"))
    assert not strange(system.status("vile"))
    code, text = system.fetch("/status")
    assert code == 200 and not strange(json.loads(text)) and not strange(text)
    for words in (
        system.supervisorctl("status"),
        system.kubectl("describe", "isvc", "vile"),
        system.kubectl("get", "events"),
        system.fetch("/metrics")[1],
        system.fetch("/")[1],
    ):
        assert not strange(words.replace("\t", " "))
    for name in ("controller", "sidecar"):
        assert not strange((system.state / "log" / f"{name}.log").read_text())
    figure.add("control characters shown", 0, "")
    gone(system, "vile")


# ── P 80 ─────────────────────────────────────────────────────────────────────────────────────────


@fault(
    "P80b",
    "a port is taken after the launcher found it free and before the engine binds it",
    happens="the engine fails, and is started again on another port; what listens there is never published",
    sees="its own words in the log, then Ready",
    bound="Ready within 40 s",
)
def test_a_port_that_is_taken_before_the_engine_binds_it_is_left(system: System, figure: Figure) -> None:
    system.apply(stand_in("late", bind_delay_s=1.5))
    eventually(lambda: "--fake-bind-delay-s" in " ".join(command_line(system, "late")), 20, "the engine, not bound yet")
    taken = port(system, "late")
    with socket.create_server(("127.0.0.1", taken)):
        watch = Stopwatch(figure)
        eventually(lambda: "couldn't bind HTTP server socket" in said(system, "late"), 20, "the engine to fail")
        watch.when("Ready elsewhere", lambda: system.ready("late", 60))
        assert port(system, "late") != taken
        assert "stand-in" in system.chat("late")
    gone(system, "late")


def command_line(system: System, name: str) -> list[str]:
    """argv of what runs for a service, once it is no launcher any more."""
    pid = system.pid(name)
    found = psutil.Process(pid).cmdline() if pid else []
    return [] if any(part.endswith("launch.py") for part in found) else found


# ── P 77: last, because the whole machine hears it ───────────────────────────────────────────────


def rpc_ms(system: System, times: int = 100) -> list[float]:
    """How long supervisord takes to answer, several times."""
    found = []
    for _ in range(times):
        start = time.monotonic()
        system.rpc.call("supervisor.getState")
        found.append((time.monotonic() - start) * 1000)
    return found


def another_ready_s(system: System, name: str) -> float:
    """How long a new service takes from apply to its endpoint."""
    start = time.monotonic()
    system.apply(service(name))
    eventually(lambda: system.slice_ready(name), 30, f"{name} to serve")
    took_s = time.monotonic() - start
    gone(system, name)
    return took_s


def log_bytes(system: System, name: str) -> int:
    """What all the logs of an engine take on the disk, but for the file kept of its last crash."""
    return sum(path.stat().st_size for path in (system.state / "log").glob(f"default.{name}.log*"))


def log_bound_bytes(system: System, name: str) -> int:
    """What they may take: size times files, as the section has it."""
    section = (system.state / "models.d" / f"default.{name}.conf").read_text()
    size = re.search(r"(?m)^stdout_logfile_maxbytes=(\d+)MB$", section)
    backups = re.search(r"(?m)^stdout_logfile_backups=(\d+)$", section)
    assert size and backups
    return (int(size[1]) << 20) * (int(backups[1]) + 1)


@fault(
    "P77",
    "an engine writes a gigabyte of log a minute",
    happens="its log is rotated; supervisord, other engines and new services go on as before",
    sees="nothing; the disk use stays within size times files",
    bound="a new service is Ready within 15 s",
)
def test_a_flood_of_log_disturbs_nobody_and_stays_within_its_bound(system: System, figure: Figure) -> None:
    system.apply(stand_in("loud"))
    before = system.ready("loud")
    for sample in rpc_ms(system):
        figure.add("RPC without", sample, "ms")
    figure.add("apply to ready without", another_ready_s(system, "quiet-a"))
    tell(system, "loud", flood_lines_per_s=FLOOD_LINES_PER_S)
    process, bound = psutil.Process(before), log_bound_bytes(system, "loud")
    start, written = time.monotonic(), process.io_counters().write_chars
    most = [0]
    over = threading.Event()

    def watch_disk() -> None:
        while not over.wait(0.05):
            most[0] = max(most[0], log_bytes(system, "loud"))

    watcher = threading.Thread(target=watch_disk, daemon=True)
    watcher.start()
    try:
        other = system.stream(BYSTANDER).last()
        samples = rpc_ms(system)
        for sample in samples:
            figure.add("RPC with", sample, "ms")
        took_s = another_ready_s(system, "quiet-b")
        figure.add("apply to ready with", took_s)
        assert other.completed(), f"{other.chunks} chunks, {other.error}"
        # Twice what may be kept, so that every file has been thrown away once.
        eventually(lambda: process.io_counters().write_chars - written > 2 * bound, 120, "the flood to fill the logs")
    finally:
        over.set()
        watcher.join()
        seconds = time.monotonic() - start
        tell(system, "loud", flood_lines_per_s=0)
    figure.add("flood", (process.io_counters().write_chars - written) / seconds / 1e6, "MB/s")
    figure.add("on the disk", most[0] / (1 << 20), "MiB")
    assert sorted(samples)[-2] < 1000 and within(took_s, 15)
    assert most[0] <= bound * 1.1
    assert system.pid("loud") == before and system.slice_ready("loud")
    gone(system, "loud")
