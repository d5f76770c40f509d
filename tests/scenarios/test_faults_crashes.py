"""Engines that die, in every way: each is out of service at once and back by itself, and no other one notices."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from metal_supervisor.spec.processes import State
from tests.support.engines import (
    BYSTANDER,
    Stopwatch,
    beside_a_bystander,
    either,
    events,
    gone,
    is_gone,
    reason,
    restarted,
    said,
    stand_in,
    tell,
    timeline,
    untouched,
    withdrawn,
)
from tests.support.faults import Figure, fault
from tests.support.own_logs import logged
from tests.support.system import ISVC, System, eventually, kill, service
from tests.support.transitions import Transitions

ELF_S390 = b"\x7fELF\x02\x02\x01" + bytes(9) + struct.pack(">HHI", 2, 22, 1) + bytes(200)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with beside_a_bystander(tmp_path_factory.mktemp("crashes")) as up:
        up.apply(stand_in("weary", exit_after_s=3, exit_code=7))  # it takes its time, in which others are tested
        yield up


@pytest.fixture(autouse=True)
def bystander(system: System) -> Iterator[None]:
    with untouched(system):
        yield


def state(system: System, name: str) -> State:
    return system.rpc.table()[f"default.{name}"].state


def next_attempt_s(system: System, name: str) -> float:
    """Seconds until an engine that is held is started again, as /status tells it; 0 while it is not held."""
    at = system.observe(name).get("nextAttempt")
    return at - time.time() if at else 0.0


def lives(system: System, name: str) -> bool:
    """Whether supervisord has called the engine RUNNING: a death from now on is no failed start."""
    return state(system, name) is State.RUNNING


# ── P 68, 69, 86: it is killed ───────────────────────────────────────────────────────────────────


@fault(
    "P68",
    "an engine is killed in the middle of a stream",
    happens="its endpoint is withdrawn and it starts again at once; streams of others go on",
    sees="its clients are cut; Event Crashed with SIGKILL; Ready again",
    bound="withdrawn within 1 s",
)
def test_an_engine_killed_in_the_middle_of_a_stream_is_withdrawn_within_a_second(
    system: System, figure: Figure
) -> None:
    system.apply(service("victim", contextSize=32768))
    before = system.ready("victim")
    eventually(lambda: lives(system, "victim"), what="RUNNING")
    other, cut = system.stream(BYSTANDER).last(), system.stream("victim", tokens=20000)
    with timeline(system, "victim") as seen:
        watch = Stopwatch(figure)
        kill(before)
        figure.add("withdrawn", seen.withdrawn_s("victim", watch.since, 5))
        watch.when("process", lambda: restarted(system, "victim", before, 10))
        watch.when("serves", lambda: eventually(lambda: system.slice_ready("victim"), 20, "the endpoint to be back"))
    assert not cut.completed() and cut.chunks > 0
    assert other.completed(), f"{other.chunks} chunks, {other.error}"
    figure.add("streams of others cut", 0, "")
    eventually(lambda: "terminated by SIGKILL" in events(system, "victim").get("Crashed", ""), 30, "an Event")
    assert events(system, "victim")["Crashed"].endswith("SIGKILL"), "nothing in its log says why"
    assert (restarts(system, "victim"), system.observe("victim")["lastExit"]) == (1, "terminated by SIGKILL")
    figure.add("restarts", restarts(system, "victim"), "")
    gone(system, "victim")


@fault(
    "P69",
    "an engine crashes with SIGSEGV",
    happens="its endpoint is withdrawn and it starts again at once",
    sees="Event Crashed and lastExit name SIGSEGV; Ready again",
    bound="withdrawn within 1 s",
)
def test_an_engine_that_crashes_with_sigsegv_is_withdrawn_and_back(system: System, figure: Figure) -> None:
    system.apply(service("faulty"))
    before = system.ready("faulty")
    eventually(lambda: lives(system, "faulty"), what="RUNNING")
    with timeline(system, "faulty") as seen:
        watch = Stopwatch(figure)
        os.kill(before, signal.SIGSEGV)
        figure.add("withdrawn", seen.withdrawn_s("faulty", watch.since, 5))
        watch.when("serves", lambda: eventually(lambda: system.slice_ready("faulty"), 20, "the endpoint to be back"))
    assert system.pid("faulty") != before
    eventually(lambda: "terminated by SIGSEGV" in events(system, "faulty").get("Crashed", ""), 30, "an Event")
    assert system.observe("faulty")["lastExit"] == "terminated by SIGSEGV"
    gone(system, "faulty")


@fault(
    "P86",
    "two engines die in the same moment",
    happens="both are withdrawn and both start again at once",
    sees="an Event Crashed for each; both Ready again",
    bound="both withdrawn within 1 s",
)
def test_two_deaths_in_one_moment_are_both_seen(system: System, figure: Figure) -> None:
    names = "twin-a", "twin-b"
    system.apply(*(service(name) for name in names))
    before = {name: system.ready(name) for name in names}
    for name in names:
        eventually(lambda name=name: lives(system, name), what="RUNNING")
    with timeline(system, *names) as seen:
        watch = Stopwatch(figure)
        for pid in before.values():
            kill(pid)
        figure.add("both withdrawn", max(seen.withdrawn_s(name, watch.since, 5) for name in names))
        watch.when(
            "both serve",
            lambda: [
                eventually(lambda name=name: system.slice_ready(name), 20, f"{name} to be back") for name in names
            ],
        )
    assert all(system.pid(name) != before[name] for name in names)
    assert [restarts(system, name) for name in names] == [1, 1]
    for name in names:
        eventually(lambda name=name: "Crashed" in events(system, name), 30, f"an Event of {name}")
    gone(system, *names)


# ── P 75, 83, 85: what is left of it, and what it takes with it ──────────────────────────────────


def child_of(system: System, name: str) -> int:
    """The latest child that a stand-in has left behind, by its own word."""
    found = eventually(lambda: re.findall(r"(?m)^child (\d+)$", said(system, name)), what="the engine's child")
    return int(found[-1])


@fault(
    "P75a",
    "an engine leaves a child behind that ignores SIGTERM, and is killed",
    happens="the child is ended before the engine starts again",
    sees="a line in the engine's or the controller's log",
    bound="gone within 5 s",
)
def test_a_child_that_outlives_a_killed_engine_is_ended(system: System, figure: Figure) -> None:
    system.apply(stand_in("parent", fork=True))
    before = system.ready("parent")
    child = child_of(system, "parent")
    kill(before)
    Stopwatch(figure).when("child gone", lambda: eventually(lambda: is_gone(child), 10, "the child to be gone"))
    restarted(system, "parent", before)
    eventually(lambda: child_of(system, "parent") != child, 20, "another engine with another child")
    assert not is_gone(child_of(system, "parent"))
    # Whoever comes first: the launcher of the next engine, or the controller.
    told = logged(system.files.log_path("controller"), "leftovers ended")
    by_launcher = f"ended what pid {before} had left behind: {child}" in said(system, "parent")
    assert by_launcher or (before, f"[{child}]") in [(each["engine"], each["pids"]) for each in told]


@fault(
    "P75b",
    "an engine that leaves a child behind is stopped by hand, or deleted",
    happens="the child is ended although no engine starts again",
    sees="`leftovers ended` in the controller's log",
    bound="gone within 5 s of the engine",
)
def test_a_child_that_outlives_a_stop_is_ended(system: System, figure: Figure) -> None:
    system.apply(stand_in("parent", fork=True))
    engine = system.ready("parent")
    child = child_of(system, "parent")
    system.supervisorctl("stop", "default.parent")
    assert is_gone(engine)
    Stopwatch(figure).when("after a stop", lambda: eventually(lambda: is_gone(child), 10, "the child to be gone"))
    system.supervisorctl("start", "default.parent")
    engine = restarted(system, "parent", engine)
    eventually(lambda: child_of(system, "parent") != child, what="another child")
    child = child_of(system, "parent")
    system.ready("parent")
    system.delete("parent")
    eventually(lambda: is_gone(engine), 20, "the engine to end")
    Stopwatch(figure).when("after a delete", lambda: eventually(lambda: is_gone(child), 10, "the child to be gone"))
    assert logged(system.files.log_path("controller"), "leftovers ended")
    eventually(lambda: "default.parent" not in system.rpc.table(), 20, "the program to be gone")


@fault(
    "P85",
    "an engine leaks memory until the system's limit kills it",
    happens="its endpoint is withdrawn and it starts again, small; others are not ended",
    sees="rssBytes in /status grows; Event Crashed with SIGKILL; Ready again",
    bound="withdrawn within 2 s",
)
def test_an_engine_that_leaks_memory_to_its_limit_is_withdrawn_and_back(system: System, figure: Figure) -> None:
    system.apply(stand_in("leaky", limit_mib=1000))
    before = system.ready("leaky")
    eventually(lambda: lives(system, "leaky"), what="RUNNING")
    process, most = psutil.Process(before), 0
    with timeline(system, "leaky") as seen:
        tell(system, "leaky", grow_mib_per_s=400)
        while not is_gone(before):
            watch = Stopwatch(figure)  # of when it was last seen alive: it may be out before its death is seen here
            with contextlib.suppress(psutil.NoSuchProcess):
                most = max(most, process.memory_info().rss)
            time.sleep(0.01)  # no wait for an event: each turn is a sample of its memory
        figure.add("held at its end", most / (1 << 20), "MiB")
        figure.add("withdrawn", seen.withdrawn_s("leaky", watch.since, 10))
        watch.when("serves", lambda: eventually(lambda: system.slice_ready("leaky"), 20, "the endpoint to be back"))
    eventually(lambda: "terminated by SIGKILL" in events(system, "leaky").get("Crashed", ""), 30, "an Event")
    assert system.pid("leaky") != before
    gone(system, "leaky")


# ── P 66, 67: it does not come up, or does not stay up ───────────────────────────────────────────


@fault(
    "P66",
    "an engine exits with 1 as soon as it is started",
    happens="a second start at once, then a pause of 10 s that doubles to 5 min",
    sees="FATAL; CrashLoopBackOff with exit status, last words and next attempt in condition and Event",
    bound="FATAL within 15 s",
)
def test_an_engine_that_exits_at_once_is_held_with_its_exit_status_and_its_last_words(
    system: System, figure: Figure
) -> None:
    system.apply(service("hasty", flashAttention=False, cacheTypeV="q8_0"))
    watch = Stopwatch(figure)
    watch.when(
        "first told",
        lambda: eventually(
            lambda: "exit status 1" in system.condition("MetalReady", "hasty").get("message", ""), 10, "its exit status"
        ),
    )
    watch.when("FATAL", lambda: eventually(lambda: state(system, "hasty") is State.FATAL, 20, "it to be held"))
    assert "FATAL" in system.supervisorctl("status", "default.hasty")
    eventually(lambda: system.status("hasty")["phase"] == "Failed", 10, "Failed")
    assert reason(system, "hasty") == "CrashLoopBackOff"
    assert "CrashLoopBackOff" in events(system, "hasty")
    figure.add("pause", eventually(lambda: next_attempt_s(system, "hasty"), 10, "the time of the next attempt"))
    assert 0 < next_attempt_s(system, "hasty") <= 10
    # While it is held, too, the exit status is the engine's own, and not the launcher's "not now".
    held = system.condition("MetalReady", "hasty")["message"]
    # Of the lines that supervisord has read: its two pipes have no common order, and one line of ggml goes to each.
    last = "V cache requires flash_attn|failed to create.context|exiting due|cleaning up before exit|AMX is not ready"
    last += "|Failed to init server"  # llama-server's library
    assert "exit status 1" in held and re.search(last, held)
    assert re.search(last, events(system, "hasty")["CrashLoopBackOff"])
    assert system.observe("hasty")["lastExit"] == "exit status 1"
    gone(system, "hasty")


def test_a_crash_loop_is_failed_from_when_it_is_held_until_its_new_spec_serves(system: System) -> None:
    """Each edition of its status counts, those of the moments in which it is started again included."""
    seen = Transitions(system, ISVC, lambda item: str((item.get("status") or {}).get("phase")))
    system.apply(service("looping", flashAttention=False, cacheTypeV="q8_0"))
    eventually(lambda: 3 in holds(system, "looping"), 60, "a third start")
    eventually(lambda: state(system, "looping") is State.FATAL, 30, "it to be held after that")
    system.apply(service("looping"))
    system.ready("looping")
    phases = [phase for phase, _ in itertools.groupby(told for _, told in seen.end()["looping"])]
    assert phases.count("Failed") == 1 and phases[-1] == "Ready", phases
    gone(system, "looping")


@fault(
    "P67",
    "an engine dies a few seconds after every load",
    happens="the first restart is at once, then pauses of 10, 20, 40 s and so on, forgotten after 10 min up",
    sees="CrashLoopBackOff with the exit status and the time of the next attempt; the endpoint out in between",
    bound="a pause before the third start",
)
def test_an_engine_that_dies_after_every_load_is_held_longer_each_time(system: System, figure: Figure) -> None:
    """That 10 min up forget it all: tests/unit/test_launch.py, `..._or_after_ten_minutes_up`."""
    note = system.state / "runs" / "default.weary.json"
    held = {
        deaths: eventually(lambda deaths=deaths: holds(system, "weary").get(deaths), 90, f"{deaths} deaths")
        for deaths in (2, 3)
    }
    assert 5 < held[2] <= 10 < held[3] <= 20
    first, second, third = json.loads(note.read_text())["starts"][:3]
    assert second - first < 3 + 10 < third - first
    figure.add("first restart", second - first - 3)
    figure.add("pause 1", held[2])
    figure.add("pause 2", held[3])
    eventually(lambda: 10 < next_attempt_s(system, "weary") <= 40, 60, "the time of the next attempt in /status")
    assert state(system, "weary") is State.FATAL
    assert system.slice_ready("weary") is False
    assert "exit status 7" in events(system, "weary")["Crashed"]
    # Three starts, on a busy machine four; and no more, however often its launcher said not now.
    eventually(lambda: restarts(system, "weary") == len(json.loads(note.read_text())["starts"]) - 1, what="as many")
    assert restarts(system, "weary") in (2, 3)
    # The next ones, from the launcher itself: it is made to believe in more deaths rather than to see them.
    for deaths, expected in ((4, 40), (5, 80), (8, 300)):
        known = json.loads(note.read_text())
        note.write_text(json.dumps({**known, "starts": [time.time() - 1] * deaths, "not_before": 0}))
        system.supervisorctl("start", "default.weary")
        assert eventually(lambda deaths=deaths: holds(system, "weary").get(deaths), 20, "a pause") == expected
    gone(system, "weary")


def holds(system: System, name: str) -> dict[int, int]:
    """Deaths -> the pause after them in seconds, as the launcher first told it."""
    told = re.findall(r"crashed (\d+) times; next start in (\d+) s", said(system, name))
    return {int(deaths): int(pause_s) for deaths, pause_s in reversed(told)}


def restarts(system: System, name: str) -> int:
    return int(system.observe(name)["restarts"])


# ── P 75, 83: with supervisord ───────────────────────────────────────────────────────────────────


@fault(
    "P75c",
    "an engine that left a child behind and supervisord are killed together",
    happens="the child is ended at boot, before anything starts; other engines go on",
    sees="a line of the boot",
    bound="gone when supervisord is back",
)
def test_a_child_that_outlives_its_engine_and_supervisord_is_ended_at_boot(system: System, figure: Figure) -> None:
    system.apply(stand_in("parent", fork=True))
    engine = system.ready("parent")
    child, old = child_of(system, "parent"), system.supervisord_pid()
    os.kill(old, signal.SIGSTOP)  # or it would notice the first of the two deaths
    kill(engine)
    kill(old)
    watch = Stopwatch(figure)
    watch.when("child gone", lambda: eventually(lambda: is_gone(child), 30, "the child to be gone"))
    watch.when(
        "supervisord",
        lambda: eventually(
            lambda: system.supervisord_pid() not in (0, old) and system.rpc.answers(), 30, "supervisord to be back"
        ),
    )
    assert f"default.parent: ended what pid {engine} had left behind: {child}" in system.said()
    watch.when("serves", lambda: restarted(system, "parent", engine, 30) and system.ready("parent"))
    eventually(lambda: system.pid(BYSTANDER), 30, "the bystander's survivor to be stood in for")
    tell(system, "parent", ignore_term=False)
    gone(system, "parent")


@fault(
    "P83",
    "a dead engine stays a zombie, because supervisord is stopped and reaps nothing",
    happens="its endpoint is withdrawn all the same; it is reaped and started when supervisord goes on",
    sees="not Ready at once; Ready again when supervisord goes on",
    bound="withdrawn within 5 s",
)
def test_an_engine_that_is_a_zombie_is_dead(system: System, figure: Figure) -> None:
    names = ("undead", "undead-too")  # the second exit is noticed while supervisord is still asked about the first
    system.apply(*map(service, names))
    before = {name: system.ready(name) for name in names}
    eventually(lambda: all(lives(system, name) for name in names), what="RUNNING")
    warden = system.supervisord_pid()
    os.kill(warden, signal.SIGSTOP)
    try:
        for name, pid in before.items():
            kill(pid)
            watch = Stopwatch(figure)
            eventually(lambda pid=pid: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, 10, "a zombie")
            watch.when("withdrawn", lambda name=name: withdrawn(system, name, 5))
            assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    finally:
        os.kill(warden, signal.SIGCONT)
    for name, pid in before.items():
        watch = Stopwatch(figure)
        watch.when(
            "serves after supervisord went on",
            lambda name=name: eventually(lambda: system.slice_ready(name), 30, "the endpoint to be back"),
        )
        assert system.pid(name) not in (0, pid) and not psutil.pid_exists(pid)
    eventually(lambda: system.health()[0] == 200, 30, "healthz to be as before")
    gone(system, *names)


# ── P 65: it cannot be started; last, because the file is everybody's ────────────────────────────


def missing(path: Path) -> None:
    path.write_text("#!/no/such/interpreter\n")
    path.chmod(0o755)


def forbidden(path: Path) -> None:
    path.write_text("#!/bin/sh\n")
    path.chmod(0o644)


def foreign(path: Path) -> None:
    path.write_bytes(ELF_S390)
    path.chmod(0o755)


BROKEN = {
    "enoent": (missing, "No such file or directory", "RuntimeBroken"),
    "eacces": (forbidden, "Permission denied", "RuntimeBinaryMissing"),
    "foreign": (foreign, "Exec format error", "RuntimeBroken"),
}


@fault(
    "P65",
    "llama-server cannot be executed: interpreter missing, not executable, made for another processor",
    happens="what runs goes on; an engine that must start is held, and starts once the file is right",
    sees="the path and the system's words in the condition; FATAL in supervisorctl",
    bound="told within 10 s",
)
def test_an_engine_that_cannot_be_executed_is_named_and_heals_with_its_file(system: System, figure: Figure) -> None:
    binary = either(system.base)
    system.apply(*(service(name) for name in BROKEN))
    before = {name: system.ready(name) for name in BROKEN}
    for name, (damage, words, verdict) in BROKEN.items():
        damage(binary.with_suffix(".new"))
        binary.with_suffix(".new").replace(binary)  # as an upgrade does it: what runs keeps its own file
        kill(before[name])
        watch = Stopwatch(figure)
        watch.when(
            "told of an engine",
            lambda name=name, words=words: eventually(
                lambda: words in system.condition("MetalReady", name).get("message", ""), 10, f"{name}: {words}"
            ),
        )
        system.apply(service(f"new-{name}"))
        watch = Stopwatch(figure)
        watch.when(
            "told of a new service",
            lambda name=name, verdict=verdict: eventually(
                lambda: reason(system, f"new-{name}") == verdict, 10, f"new-{name}: {verdict}"
            ),
        )
        assert str(binary) in system.condition("MetalReady", f"new-{name}")["message"]
        assert system.status(f"new-{name}")["phase"] == "Failed"
    first = next(iter(BROKEN))
    eventually(lambda: state(system, first) is State.FATAL, 30, "it to be held")
    assert "FATAL" in system.supervisorctl("status", f"default.{first}")
    either(system.base)
    watch = Stopwatch(figure)
    for name in BROKEN:
        watch.when("back after the file was right", lambda name=name: system.ready(name, 60))
        system.ready(f"new-{name}")
    gone(system, *BROKEN, *(f"new-{name}" for name in BROKEN))
