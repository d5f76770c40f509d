"""Engines that hang: each is out of service, is restarted once nobody can lose a token by it, and not before."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from tests.support.engines import (
    Stopwatch,
    Timeline,
    beside_a_bystander,
    events,
    gone,
    is_gone,
    port,
    reason,
    restarted,
    said,
    stand_in,
    tell,
    untouched,
    withdrawn,
)
from tests.support.faults import Figure, fault
from tests.support.pace import within
from tests.support.system import System, eventually, halted, kill, model, service, tiny_gguf

HANG_S = 3
LOADING_S = 4
STOP_WAIT_S = 30
LOOK_S = 15
"""How often an engine that serves is asked."""


class Death(threading.Thread):
    """Sees when a process ends, while something else is tested."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._process, self._start = psutil.Process(pid), time.monotonic()
        self.after_s = 0.0
        self.start()

    def run(self) -> None:
        with contextlib.suppress(psutil.TimeoutExpired):
            self._process.wait(120)
            self.after_s = time.monotonic() - self._start


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    flags = "--hang-timeout", str(HANG_S), "--llama-server-startup-timeout", str(LOADING_S)
    with beside_a_bystander(tmp_path_factory.mktemp("hangs"), *flags) as up:
        yield up


@pytest.fixture(autouse=True)
def bystander(system: System) -> Iterator[None]:
    with untouched(system):
        yield


@dataclass(frozen=True)
class Troubled:
    """Engines that hang, all since the same moment: each takes its time, and they can take it together."""

    since: float
    """Seconds of the monotonic clock."""
    before: dict[str, int]
    """Service -> its first engine."""
    timeline: Timeline
    deaf: Death
    client: socket.socket
    """Somebody who waits for the answer of `deep`."""


def other_loopback() -> str:
    """A loopback address that is not 127.0.0.1: a Mac has no 127.0.0.2, and a container may have no ::1."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return "::1"
    return "127.0.0.2"


# What is read and written is work as good as a processor's, of which a crowded machine may give too little to see.
WORK = {"flood_lines_per_s": 2000}
LOADING: dict[str, dict[str, Any]] = {
    "mute": {"bind_delay_s": 3600},
    "works": {"never_ready": True, **WORK},
    "idle": {"never_ready": True},
    "open": {"bind_host": "0.0.0.0"},
    "aside": {"bind_host": other_loopback()},
    "page": {"html": True},
    "stubborn": {"never_ready": True},
}
"""Engines that hang from their start."""
SERVING: dict[str, dict[str, Any]] = {
    "turned": {"html": True},
    "stuck": {"stall": True},
    "deep": {"stall": True, **WORK},
}
"""Engines that begin to hang while they serve."""


@pytest.fixture(scope="module", autouse=True)
def troubled(system: System) -> Iterator[Troubled]:
    timeline = Timeline(system)
    system.apply(stand_in("deaf", ignore_term=True), service("frozen"), *map(stand_in, SERVING))
    before = {name: system.ready(name) for name in ("deaf", "frozen", *SERVING)}
    system.delete("deaf")
    eventually(lambda: "SIGTERM ignored" in said(system, "deaf"), 20, "it to be told to end")
    death = Death(before.pop("deaf"))
    with socket.create_connection(("127.0.0.1", port(system, "deep"))) as client:
        for name, faults in SERVING.items():
            tell(system, name, **faults)
        client.sendall(b"GET /slots HTTP/1.1\r\nHost: x\r\n\r\n")
        psutil.Process(before["frozen"]).suspend()
        since = time.monotonic()
        system.apply(*(stand_in(name, **faults) for name, faults in LOADING.items()))
        before |= {name: eventually(lambda name=name: system.pid(name), 20, f"{name} to run") for name in LOADING}
        tell(system, "stubborn", ignore_term=True)  # this one only, or its successor would take half a minute to end
        yield Troubled(since, before, timeline, death, client)
    timeline.end()


def restarted_while_loading(system: System, figure: Figure, troubled: Troubled, name: str, words: str) -> None:
    """An engine that never was ready was restarted for its hang, and that is told."""
    troubled.timeline.restarted_s(name, troubled.since, troubled.before[name], 60)
    told = eventually(lambda: events(system, name).get("Hung"), 10, "an Event")
    after = re.match(r"not ready (\d+) s after its start", told)
    assert after and f"({words})" in told and "it does no work; it is being restarted" in told
    figure.add("restarted after its start", float(after[1]))
    assert system.slice_ready(name) is not True
    gone(system, name)


def restarted_while_serving(figure: Figure, troubled: Troubled, name: str) -> None:
    """An engine that served was withdrawn, restarted and is back."""
    timeline, since, before = troubled.timeline, troubled.since, troubled.before[name]
    out_s = timeline.withdrawn_s(name, since, LOOK_S + 40)
    restarted_s = timeline.restarted_s(name, since, before, LOOK_S + 80)
    assert out_s <= restarted_s + 1.0, "both are seen by looking, one after the other"
    figure.add("withdrawn", out_s)
    figure.add("restarted", restarted_s)
    figure.add("serves", timeline.serves_s(name, since, before, LOOK_S + 110))


def silent_s(system: System, name: str) -> float:
    """How long an engine has been out of service."""
    seen = system.observe(name)
    return 0.0 if seen["ready"] else time.time() - seen["since"]


# ── P 70, 71, 81, 82: it never comes into service ────────────────────────────────────────────────


@fault(
    "P70",
    "an engine hangs before it listens",
    happens="it is never published; restarted when the time for loading is over and it does no work",
    sees="Loading, then Event Hung with the reason",
    bound="restarted within 60 s of a start timeout of 4 s",
)
def test_an_engine_that_hangs_before_it_listens_is_restarted(
    system: System, figure: Figure, troubled: Troubled
) -> None:
    restarted_while_loading(system, figure, troubled, "mute", "the engine does not listen yet")


@fault(
    "P71",
    "an engine answers 503 for ever",
    happens="restarted when the time for loading is over, but never while it works",
    sees="Loading, then Event Hung with the reason",
    bound="restarted within 60 s of a start timeout of 4 s",
)
def test_an_engine_that_loads_for_ever_is_restarted_unless_it_works(
    system: System, figure: Figure, troubled: Troubled
) -> None:
    works = troubled.before["works"]
    restarted_while_loading(system, figure, troubled, "idle", "the engine is loading its model")
    assert system.pid("works") == works, "it loads a large model, for all that can be seen"
    assert reason(system, "works") == "Loading"
    figure.add("restarts while it works", system.observe("works")["restarts"], "")
    tell(system, "works", flood_lines_per_s=0)
    Stopwatch(figure).when("restarted after its work ended", lambda: restarted(system, "works", works, 40))
    gone(system, "works")


@fault(
    "P81a",
    "an engine listens on more addresses than it was told to",
    happens="it is never published; restarted when the time for loading is over",
    sees="the condition names both addresses",
    bound="restarted within 60 s of a start timeout of 4 s",
)
def test_an_engine_that_is_open_to_others_is_never_published(
    system: System, figure: Figure, troubled: Troubled
) -> None:
    words = "the engine listens on 0.0.0.0, not on 127.0.0.1"
    restarted_while_loading(system, figure, troubled, "open", words)


@fault(
    "P81b",
    "an engine listens on an address where nobody asks it",
    happens="it is never published; restarted when the time for loading is over",
    sees="the condition names both addresses",
    bound="restarted within 60 s of a start timeout of 4 s",
)
def test_an_engine_where_nobody_asks_it_is_never_published(system: System, figure: Figure, troubled: Troubled) -> None:
    words = f"the engine listens on {LOADING['aside']['bind_host']}, not on 127.0.0.1"
    restarted_while_loading(system, figure, troubled, "aside", words)


@fault(
    "P82a",
    "an engine answers /health with a page of HTML from its start",
    happens="it is never published; restarted when the time for loading is over",
    sees="the condition quotes the answer",
    bound="restarted within 60 s of a start timeout of 4 s",
)
def test_an_engine_that_answers_html_is_never_published(system: System, figure: Figure, troubled: Troubled) -> None:
    words = "/health answered something else: <!doctype html><title>It works</title><h1>It works!</h1>"
    restarted_while_loading(system, figure, troubled, "page", words)


# ── P 72, 82: it served, and hangs ───────────────────────────────────────────────────────────────


@fault(
    "P82b",
    "an engine that serves begins to answer /health with a page of HTML",
    happens="its endpoint is withdrawn, and it is restarted",
    sees="Unresponsive, Event Hung; then Ready again",
    bound="withdrawn within 55 s, looks being 15 s apart",
)
def test_an_engine_that_begins_to_answer_html_is_withdrawn_and_restarted(
    system: System, figure: Figure, troubled: Troubled
) -> None:
    restarted_while_serving(figure, troubled, "turned")
    assert "answered something else" in eventually(lambda: events(system, "turned").get("Hung"), 10, "an Event")
    gone(system, "turned")


@fault(
    "P72a",
    "an engine answers /health, but no chat and no /slots: its work loop hangs",
    happens="its endpoint is withdrawn, and it is restarted, but never while it works for a client",
    sees="Unresponsive, `its work loop takes no requests`, Event Hung; then Ready again",
    bound="withdrawn within 55 s, looks being 15 s apart",
)
def test_an_engine_whose_work_loop_hangs_is_restarted_unless_it_works_for_somebody(
    system: System, figure: Figure, troubled: Troubled
) -> None:
    restarted_while_serving(figure, troubled, "stuck")
    assert "its work loop takes no requests" in eventually(lambda: events(system, "stuck").get("Hung"), 10, "an Event")
    troubled.timeline.withdrawn_s("deep", troubled.since, LOOK_S + 40)
    eventually(lambda: silent_s(system, "deep") > 3 * HANG_S, 60, "it to be silent for longer than is allowed")
    assert system.pid("deep") == troubled.before["deep"], "it works for a client"
    assert "its work loop takes no requests" in system.condition("MetalReady", "deep")["message"]
    assert reason(system, "deep") == "Unresponsive"
    figure.add("restarts while it works for a client", system.observe("deep")["restarts"], "")
    troubled.client.close()
    watch = Stopwatch(figure)
    watch.when("restarted after its client left", lambda: restarted(system, "deep", troubled.before["deep"], 60))
    assert "no client is connected to it" in eventually(lambda: events(system, "deep").get("Hung"), 10, "an Event")
    gone(system, "stuck", "deep")


# ── P 74, 84: it does not heed signals ───────────────────────────────────────────────────────────


@fault(
    "P84b",
    "an engine is stopped by SIGSTOP and stays so",
    happens="its endpoint is withdrawn; TERM after the hang timeout, KILL 10 s later, and a new one starts",
    sees="Unresponsive, Event Hung; then Ready again",
    bound="withdrawn within 55 s, looks being 15 s apart",
)
def test_an_engine_that_stays_stopped_is_killed_and_restarted(
    system: System, figure: Figure, troubled: Troubled
) -> None:
    restarted_while_serving(figure, troubled, "frozen")
    assert is_gone(troubled.before["frozen"])
    assert "Hung" in events(system, "frozen")
    assert "hello world" in system.chat("frozen")
    gone(system, "frozen")


@fault(
    "P74b",
    "an engine hangs and ignores SIGTERM",
    happens="it is killed 10 s after it was told to end, and a new one starts",
    sees="Event Hung; lastExit SIGKILL",
    bound="restarted within 90 s of a start timeout of 4 s",
)
def test_a_hung_engine_that_ignores_sigterm_is_killed(system: System, figure: Figure, troubled: Troubled) -> None:
    before = troubled.before["stubborn"]
    figure.add("restarted", troubled.timeline.restarted_s("stubborn", troubled.since, before, 90))
    assert is_gone(before) and "Hung" in events(system, "stubborn")
    told = said(system, "stubborn").count("SIGTERM ignored")
    gone(system, "stubborn")
    # Fails: that it writes a line when it is told counts as work, and makes the controller forget that it was told.
    figure.add("told to end", told, "times")
    assert told == 1, "it should be killed 10 s after it was told to end, whatever it does then but serve"


@fault(
    "P74a",
    "an engine ignores SIGTERM and its service is deleted",
    happens="its endpoint goes at once, the process is killed after stopwaitsecs",
    sees="STOPPING in supervisorctl until then",
    bound="killed within 45 s",
)
def test_an_engine_that_ignores_sigterm_is_killed_in_the_end(
    system: System, figure: Figure, troubled: Troubled
) -> None:
    assert system.slice("deaf") is None
    eventually(lambda: troubled.deaf.after_s, STOP_WAIT_S + 30, "it to be killed")
    figure.add("killed", troubled.deaf.after_s)
    assert within(troubled.deaf.after_s, STOP_WAIT_S + 15)
    eventually(lambda: "default.deaf" not in system.rpc.table(), 20, "the program to be gone")
    assert not (system.state / "records" / "default.deaf.json").exists()


# ── P 72b: last, because it restarts the sidecar ─────────────────────────────────────────────────


class Crowd:
    """Clients that connect and do not finish their requests, until the engine may take no more connections."""

    def __init__(self, port: int, size: int) -> None:
        self._clients = [socket.socket() for _ in range(size)]
        for each in self._clients:
            each.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                each.connect(("127.0.0.1", port))
            with contextlib.suppress(OSError):
                each.send(b"GET /health HTTP/1.1\r\nHost:")
        eventually(lambda: not self._heard(port), 20, "the engine to be crowded")

    @staticmethod
    def _heard(port: int) -> bool:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            try:
                return bool(client.recv(1))
            except TimeoutError:
                return False

    def end(self) -> None:
        for each in self._clients:
            each.close()


@fault(
    "P72b",
    "a real engine streams to a client and has too many connections to answer /health",
    happens="no new requests are sent to it; it is never restarted, and the stream goes on",
    sees="Unresponsive while it lasts, then Ready again by itself",
    bound="no restart, no stream cut",
)
def test_an_engine_that_streams_and_does_not_answer_health_is_never_restarted(system: System, figure: Figure) -> None:
    large = system.base / "large.gguf"  # a tiny one is through with everything before it is doubted
    tiny_gguf.write_tiny_gguf(large, context=32768, pad_mib=64)
    few = [{"name": "TEST_OPEN_FILES", "value": "48"}]
    system.apply(model("large", f"file://{large}"), service("popular", "large", contextSize=32768, env=few))
    before = system.ready("popular")
    # Longer than the test takes, however fast the engine is.
    stream = system.stream("popular", tokens=30_000).last()
    crowd = Crowd(port(system, "popular"), 60)
    try:
        kill(system.own_pid("sidecar"))  # a new one asks at once, rather than within 15 s
        watch = Stopwatch(figure)
        watch.when("withdrawn", lambda: withdrawn(system, "popular", LOOK_S + 30))
        # Three looks that wait for an answer take longer than the hang timeout.
        words = "/health has not answered within 5 s"
        eventually(lambda: words in system.condition("MetalReady", "popular")["message"], 10, words)
        stream.goes_on()
    finally:
        crowd.end()
    watch = Stopwatch(figure)
    watch.when(
        "serves when the crowd has left",
        lambda: eventually(lambda: system.slice_ready("popular"), 30, "the endpoint to be back"),
    )
    stream.goes_on()
    assert system.pid("popular") == before
    figure.add("restarts", system.observe("popular")["restarts"], "")
    figure.add("streams cut", 0, "")
    stream.leave()
    gone(system, "popular")


@fault(
    "P84c",
    "the same while the Kubernetes API hangs",
    happens="it is restarted all the same; the cluster is told when it answers",
    sees="/healthz: 200, cluster unreachable",
    bound="restarted within 60 s",
)
def test_a_hang_is_ended_while_the_api_hangs(system: System, figure: Figure) -> None:
    system.apply(service("iced"))
    before = system.ready("iced")
    with halted(system.own_pid("apiserver")):
        os.kill(before, signal.SIGSTOP)
        with figure.timed("restarted"):
            eventually(lambda: system.pid("iced") not in (0, before), 60, "another engine")
    system.ready("iced", within_s=90)
    gone(system, "iced")
