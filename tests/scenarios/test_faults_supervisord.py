"""supervisord as a neighbour (cases S48 to S61): it hangs, refuses, talks rubbish, restarts, gives up on a program.

One running system with one engine that streams throughout; whatever is done to supervisord or to another program,
that engine keeps its pid and its answers end whole. What needs a system of its own is in
test_faults_supervisord_alone.py, hands are in test_faults_supervisorctl.py; S49 is in test_kills.py, S57 in
test_four_things.py.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.faults import Figure, fault
from tests.support.supervisord_support import gone, in_table, streaming
from tests.support.system import System, eventually, kill, running, service

RUBBISH = (
    b"rubbish\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Type: text/xml\r\nContent-Length: 4\r\n\r\n<no>",
    b"HTTP/1.1 200 OK\r\nContent-Type: text/xml\r\nContent-Length: 400\r\n\r\n<?xml version='1.0'?><methodR",
    b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n",
    b"",
)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running(tmp_path_factory.mktemp("super"), "--allow-extra-args=--grammar-file") as up:
        up.apply(up.tiny_model(), service("tiny", parallelSlots=2, contextSize=16384))
        up.ready()
        yield up


@contextlib.contextmanager
def another_socket(system: System, answers: Sequence[bytes]) -> Iterator[None]:
    """In the place of supervisord's socket, one that gives these answers in turn; without any, it refuses.

    Connections to the real one outlast its renaming, so controller and sidecar are killed and start into the fault.
    """
    ours = [system.own_pid(program) for program in ("controller", "sidecar")]
    place, aside = system.state / "supervisor.sock", system.state / "supervisor.aside"
    place.rename(aside)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(place))
    given = itertools.cycle(answers)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection, contextlib.suppress(OSError):
                    connection.recv(65536)
                    connection.sendall(next(given))

    thread = threading.Thread(target=serve, daemon=True)
    if answers:
        server.listen(64)
        thread.start()
    try:
        for pid in ours:
            kill(pid)
        yield
    finally:
        if answers:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(5)
        server.close()
        aside.replace(place)


def unhealthy(system: System) -> str:
    """The reason of a /healthz that says 503, else ""."""
    status, body = system.health()
    return str(body["reason"]) if status == 503 else ""


# ── supervisord itself ───────────────────────────────────────────────────────────────────────────


@fault(
    "S48",
    "supervisord's socket refuses controller and sidecar from their start on, and accepts later",
    happens="both wait and try again; engines, sections and endpoints are left as they are",
    sees="503 of /healthz, with the reason, within 10 s of a sidecar's start; 200 again by itself",
    bound="healthy within 30 s of the socket's return",
)
# Needs a sidecar that takes an engine for alive by its launcher's note until supervisord has answered once.
def test_a_socket_that_refuses_is_waited_for_and_no_endpoint_is_taken_out(system: System, figure: Figure) -> None:
    with streaming(system, figure):
        with another_socket(system, ()):
            with figure.timed("told"):
                reason = eventually(lambda: unhealthy(system), 30, "/healthz to say so")
            assert reason.startswith("supervisord: ") and "ConnectionRefused" in reason
            assert system.slice_ready() is True
        with figure.timed("healthy again"):
            eventually(lambda: system.health()[0] == 200, 30, "health")
        system.apply(service("after"))
        system.ready("after")
        gone(system, "after")


@fault(
    "S52",
    "supervisord stops answering (SIGSTOP) and goes on later",
    happens="calls are given up after 5 s; nobody is killed, and nothing is started",
    sees="503 of /healthz with the reason; engines answer all the while",
    bound="told within 40 s, healthy within 30 s of its return",
)
def test_a_supervisord_that_hangs_is_reported_and_nothing_is_killed(system: System, figure: Figure) -> None:
    before = {name: row.pid for name, row in system.rpc.table().items()}
    with streaming(system, figure):
        os.kill(system.supervisord_pid(), signal.SIGSTOP)
        try:
            with figure.timed("told"):
                reason = eventually(lambda: unhealthy(system), 40, "/healthz to say so")
            assert reason.startswith("supervisord: ") and "timed out" in reason
            system.apply(service("meanwhile"))
            assert "hello world" in system.chat()
            assert system.slice_ready() is True
        finally:
            os.kill(system.supervisord_pid(), signal.SIGCONT)
        with figure.timed("healthy again"):
            eventually(lambda: system.health()[0] == 200, 30, "health")
        system.ready("meanwhile")
        after = {name: row.pid for name, row in system.rpc.table().items()}
        assert {name: after[name] for name in before} == before
        gone(system, "meanwhile")


@fault(
    "S53",
    "something else answers on supervisord's socket: no HTTP, malformed XML, half an answer, 500, silence",
    happens="every answer is taken as none; nothing is concluded from it",
    sees="503 of /healthz, with the reason; 200 again by itself",
    bound="healthy within 30 s of the real socket's return",
)
# Needs the same as S48 of the sidecar.
def test_malformed_answers_change_nothing(system: System, figure: Figure) -> None:
    sections = {path.name: path.read_bytes() for path in (system.state / "models.d").iterdir()}
    with streaming(system, figure):
        with another_socket(system, RUBBISH):
            reason = eventually(lambda: unhealthy(system), 30, "/healthz to say so")
            assert reason.startswith("supervisord: ")
            assert system.slice_ready() is True
            assert {path.name: path.read_bytes() for path in (system.state / "models.d").iterdir()} == sections
        with figure.timed("healthy again"):
            eventually(lambda: system.health()[0] == 200, 30, "health")


# ── states ───────────────────────────────────────────────────────────────────────────────────────


@fault(
    "S61",
    "an engine exits at once, whenever it is started, until its cause is gone",
    happens="one restart at once, then supervisord gives up (FATAL) and the controller tries again, 10 s doubling",
    sees="FATAL in supervisorctl; CrashLoopBackOff with its last words and the next attempt in status and /status",
    bound="told within 30 s, Ready at the next attempt",
)
def test_a_program_in_fatal_shows_its_next_attempt_and_heals_when_the_cause_is_gone(
    system: System, figure: Figure, tmp_path: Path
) -> None:
    cause = tmp_path / "grammar.gbnf"
    begun = time.time()
    with streaming(system, figure):
        with figure.timed("told"):
            system.apply(service("fatal", extraArgs=["--threads", "1", "--grammar-file", str(cause)]))
            eventually(lambda: in_table(system, "fatal") == "FATAL", 30, "FATAL")
            eventually(lambda: system.condition("MetalReady", "fatal").get("reason") == "CrashLoopBackOff", 30, "told")
        assert "FATAL" in system.supervisorctl("status", "default.fatal")
        eventually(lambda: system.status("fatal")["phase"] == "Failed", 10, "the phase")  # told in BACKOFF already
        due = eventually(lambda: system.observe("fatal").get("nextAttempt"), 10, "the next attempt")
        gauge = 'next_start_timestamp_seconds{name="fatal",namespace="default"}'
        eventually(lambda: gauge in system.fetch("/metrics")[1], what="its metric")
        assert begun < due < time.time() + 300
        assert system.slice_ready("fatal") is not True
        cause.write_text('root ::= "a"\n')
        system.ready("fatal", 60)
        figure.add("Ready after the announced attempt", time.time() - due)
        gone(system, "fatal")


@fault(
    "S51",
    "SIGHUP to supervisord, or `supervisorctl reload`, which restarts it with everything below it",
    happens="endpoints are withdrawn, every engine is stopped and started again; it is no crash",
    sees="a short Progressing, then Ready on the same ports; nothing is held back as a crash loop",
    bound="Ready within 60 s",
)
# Needs a launcher to which an exit before supervisord's last start is no crash.
def test_a_restart_of_supervisord_by_sighup_is_recovered_from(system: System, figure: Figure) -> None:
    engine, port, daemon = system.ready(), system.port(), system.supervisord_pid()
    with figure.timed("Ready again"):
        os.kill(daemon, signal.SIGHUP)
        eventually(lambda: system.pid() not in (0, engine), 60, "a new engine")
        eventually(lambda: system.observe().get("pid") == system.pid() and system.observe()["ready"], 60, "it to serve")
        system.ready(within_s=60)
    assert (system.supervisord_pid(), system.port()) == (daemon, port)
    assert len(system.engines()) == 1
    note = system.files.run_note("default.tiny")
    assert note is not None and len(note.starts) == 1
    eventually(lambda: "hello world" in system.chat(), what="an answer")
    eventually(lambda: system.health() == (200, {"status": "ok"}), 30, "health")
