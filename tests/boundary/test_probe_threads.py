"""Probes share a few threads: a hung engine takes one of its own, and many engines at rest take none."""

from __future__ import annotations

import http.server
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from metal_supervisor.host.liveness import HangLimits
from metal_supervisor.sidecar import probe_threads, probes
from metal_supervisor.sidecar.probe_threads import ProbeThreads
from metal_supervisor.sidecar.probes import ProbeFinding, Prober, ProbeTarget
from metal_supervisor.spec.types import Probe
from tests.support.system import eventually


def probing() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "probe"}


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """Set at the end: turns that went on would keep the tests behind this one waiting."""
    event = threading.Event()
    yield event
    event.set()


def test_a_turn_that_hangs_delays_no_other_and_one_that_fails_comes_again(over: threading.Event) -> None:
    turns, counted, go, before = ProbeThreads(), Counter[str](), threading.Event(), probing()

    def counting(name: str, again_s: float | None) -> probe_threads.Turn:
        def turn() -> float | None:
            counted[name] += 1
            if over.is_set():
                return None
            if name == "fails":
                raise ValueError("once more")
            if name.startswith("hangs"):
                go.wait()
            return again_s

        return turn

    for index in range(100):
        turns.add(counting(f"quick {index}", 0.01))
    for name in ("hangs", "hangs too", "fails"):
        turns.add(counting(name, 0.01))
    turns.add(counting("last", None))
    eventually(lambda: min(counted[f"quick {index}"] for index in range(100)) > 5, what="the others to go on")
    assert (counted["hangs"], counted["hangs too"], counted["last"]) == (1, 1, 1)
    assert 3 <= len(probing() - before) < 50
    eventually(lambda: counted["fails"] > 1, what="the one that failed")
    go.set()
    eventually(lambda: counted["hangs"] > 1 and counted["hangs too"] > 1, what="those that hung")
    over.set()
    eventually(lambda: len(probing() - before) == probe_threads.MOST_IDLE, what="the others to end")


def test_more_engines_that_hang_than_threads_are_still_all_asked(
    monkeypatch: pytest.MonkeyPatch, over: threading.Event
) -> None:
    monkeypatch.setattr(probe_threads, "MOST_THREADS", 2)
    turns, seen = ProbeThreads(), Counter[int]()

    def slow(index: int) -> probe_threads.Turn:
        def turn() -> float | None:
            time.sleep(0.02)  # an engine that takes longer to answer than a thread is waited for
            seen[index] += 1
            return None if over.is_set() else 0.0

        return turn

    for index in range(6):
        turns.add(slow(index))
    eventually(lambda: min(seen[index] for index in range(6)) > 2, what="each of them")


class Serving(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"status": "ok"}')

    def log_message(self, *_: object) -> None:
        pass


def test_engines_at_rest_have_no_threads_of_their_own() -> None:
    before = probing()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Serving) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        prober = Prober(lambda: None, lambda: None, HangLimits(30.0, 0.0))
        target = ProbeTarget(0, "127.0.0.1", server.server_address[1], Probe(shared=True))
        names = [f"engine {index}" for index in range(60)]
        prober.ask_only({name: (target, ProbeFinding(False, "")) for name in names})
        eventually(lambda: all((found := prober.finding(name)) and found.ready for name in names), what="all ready")
        assert len(probing() - before) < 20
        prober.ask_only({})
        server.shutdown()


@pytest.mark.parametrize(("engines", "seconds"), [(1, 15.0), (60, 15.0), (150, 37.5), (1000, 60.0)])
def test_many_engines_at_rest_are_asked_less_often(engines: int, seconds: float) -> None:
    assert probes.rest_s(engines) == seconds


def test_an_engine_at_rest_is_asked_again_after_the_pause_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "READY_EVERY_S", 1000.0)
    monkeypatch.setattr(probes, "LONGEST_REST_S", 0.01)
    answered: list[float] = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Serving) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        prober = Prober(lambda: None, lambda: None, HangLimits(30.0, 0.0), on_probe=lambda _, s: answered.append(s))
        target = ProbeTarget(0, "127.0.0.1", server.server_address[1], Probe(shared=True))
        prober.ask_only({"one": (target, ProbeFinding(False, ""))})
        eventually(lambda: (found := prober.finding("one")) and found.ready, what="it to be ready")
        answered.clear()
        eventually(lambda: len(answered) > 2, what="more looks")
        prober.ask_only({})
        server.shutdown()


def test_a_thread_that_cannot_be_started_ends_no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while other programs of this user have as many as the system allows."""
    start, failed = threading.Thread.start, Counter[str]()

    def refused(thread: threading.Thread) -> None:
        if thread.name in ("probes due", "probe", "drain 1") and failed[thread.name] < 2:
            failed[thread.name] += 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    turns, counted = ProbeThreads(), Counter[str]()

    def turn() -> None:
        counted["turn"] += 1

    for _ in range(2):
        with pytest.raises(RuntimeError):
            turns.add(turn)
    turns.add(turn)
    eventually(lambda: counted["turn"] == 1, what="the turns")
    assert failed["probe"] == 2
    prober = Prober(lambda: None, lambda: None, HangLimits(60.0, 60.0))
    target = ProbeTarget(1, "127.0.0.1", 1, Probe())
    for _ in range(2):
        with pytest.raises(RuntimeError):
            prober.busy("default.tiny", "token", target)
    eventually(lambda: prober.busy("default.tiny", "token", target) is False, what="an answer")
