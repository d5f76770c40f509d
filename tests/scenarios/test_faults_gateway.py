"""Faults of the gateway and around it: what it costs, and what goes on."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

from metal_supervisor.spec.processes import State
from metal_supervisor.state.gateway_note import WORKERS
from tests.support import effort
from tests.support.engines import either, stand_in
from tests.support.faults import Figure, fault
from tests.support.gateway import Gateway, with_gateway
from tests.support.system import Stream, eventually, halted, kill, service, slowed

UPGRADES = 20 if effort.ALL else 5
TERMS = 20 if effort.ALL else 4
PACED = "paced"
TOKENS = 400
"""A stand-in whose answers take ten seconds of time, and next to none of a processor's."""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    base = tmp_path_factory.mktemp("faults")
    (base / "settings.toml").write_text("")
    with with_gateway(base, "--config", str(base / "settings.toml"), engine=either(base)) as up:
        up.system.apply(up.system.tiny_model(), service("tiny", contextSize=32768, parallelSlots=4))
        up.system.apply(stand_in(PACED, tokens=TOKENS, tokens_per_s=40))
        up.serves("tiny", PACED)
        yield up


class Load:
    """Short requests one after another, on kept connections and on new ones, until told to end."""

    def __init__(self, gateway: Gateway, kept: bool) -> None:
        self._port, self._kept = gateway.port, kept
        self.answers, self.error = 0, ""
        self._last = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            while not self._last.is_set():
                connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                content = answer.read()
                if answer.status != 200:
                    raise ValueError(f"{answer.status} {content[:200]!r}")
                self.answers += 1
                if not self._kept:
                    connection.close()
                self._last.wait(0.05)  # two that never rest take all of the machine
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.error = repr(error)
        finally:
            connection.close()

    def ended(self) -> str:
        """Lets the request under way be the last; returns the failure, "" without one."""
        self._last.set()
        self._thread.join(60)
        return self.error or ("" if self.answers else "no answer")


def serving(gateway: Gateway) -> int:
    """Pid of the worker that serves, by its note."""
    return int(json.loads((gateway.system.state / "gateway.json").read_text())["pid"])


def next_worker(gateway: Gateway) -> None:
    """Has the worker that stands by take over, once there is one."""
    rpc, before = gateway.system.rpc, serving(gateway)
    idle = eventually(lambda: [each for each in WORKERS if not rpc.table()[each].pid], 60, "a worker that stands by")
    rpc.start(idle[0])
    eventually(lambda: serving(gateway) != before, 30, "another worker to serve")


def stream(gateway: Gateway, tokens: int, name: str = "tiny") -> Stream:
    """A stream through the gateway; the stand-in for a client names no model, so the path does."""
    return Stream(gateway.port, tokens, f"/services/default/{name}/v1/chat/completions").flowing()


@fault(
    "W1",
    "twenty upgrades of the gateway under load",
    happens="each time another worker gets the sockets, and the one before finishes its answers",
    sees="nothing",
    bound="no request refused, reset or cut",
)
def test_workers_in_succession_reset_nothing(gateway: Gateway, figure: Figure) -> None:
    with slowed(gateway.system.pid()):
        loads = [Load(gateway, kept) for kept in (True, False)]
        flow = stream(gateway, 400)
        for _ in range(UPGRADES):
            next_worker(gateway)
    assert [each.ended() for each in loads] == ["", ""]
    assert flow.completed(), flow.error
    figure.add("answers meanwhile, all whole", sum(each.answers for each in loads), "")


@fault(
    "W2",
    "`metal-supervisor upgrade` while an answer streams through the gateway",
    happens="the new release serves; the earlier worker finishes the stream, then ends",
    sees="nothing",
    bound="the stream is whole",
)
@pytest.mark.parametrize("settings", ["", "stop_timeout = 30"])
def test_an_upgrade_cuts_no_stream(gateway: Gateway, figure: Figure, settings: str) -> None:
    """Also with a setting by which the sections of the workers change."""
    (gateway.system.base / "settings.toml").write_text(settings)
    flow, before = stream(gateway, 1000), serving(gateway)
    with slowed(gateway.system.pid()):
        with figure.timed("the command"):
            done = subprocess.run(
                [sys.executable, "-I", "-m", "metal_supervisor", "upgrade", "--state-dir", str(gateway.system.state)],
                capture_output=True,
                text=True,
                timeout=180,
            )
        assert done.returncode == 0, done.stdout + done.stderr
        assert serving(gateway) != before and gateway.chat("tiny")[0] == 200
        assert flow.completed(), flow.error
    eventually(lambda: not psutil.pid_exists(before), 30, "the worker before to end")
    told = gateway.system.files.log_path("supervisord").read_text()
    assert "stopped: gateway" not in told, "it ends by itself, however long its answers take"


@fault(
    "W3",
    "the holder of the gateway's sockets is killed, and then the worker",
    happens="the worker gives the sockets to the next holder, which gives them to the next worker",
    sees="the requests that went through the worker end; new ones wait until the next worker is there",
    bound="no connection refused",
)
def test_sockets_outlive_holder_and_worker(gateway: Gateway, figure: Figure) -> None:
    system = gateway.system
    for name in ("gateway-holder", next(each for each in WORKERS if system.own_pid(each))):
        before = eventually(lambda name=name: system.own_pid(name), what=name)
        told = len(gateway.log_of("gateway-holder", "another worker serves"))
        kill(before)
        began = time.monotonic()
        assert gateway.chat("tiny")[0] == 200
        which = "worker" if name in WORKERS else "holder"
        figure.add(f"first answer after the end of the {which}", time.monotonic() - began)
        eventually(lambda name=name, before=before: system.own_pid(name) not in (0, before), 30, f"another {name}")
        eventually(lambda told=told: len(gateway.log_of("gateway-holder", "another worker serves")) > told, 30)


@fault(
    "W4",
    "the gateway's worker is killed with 20 streams",
    happens="these streams end, no engine does; new requests wait for the next worker",
    sees="a broken stream, which is not taken for a whole one",
    bound="engines idle within 10 s",
)
def test_a_killed_worker_costs_its_own_streams_only(gateway: Gateway) -> None:
    engine = gateway.system.pid()
    direct = gateway.system.stream(tokens=500)
    flows = [stream(gateway, 20000) for _ in range(3)] + [
        Stream(gateway.port, 20000, "/services/default/tiny/v1/chat/completions") for _ in range(17)
    ]
    with slowed(engine):
        every = "all of them to be accepted"
        eventually(lambda: gateway.ask("GET", "/healthz")[2]["inFlight"] == len(flows), what=every)
    kill(serving(gateway))
    for flow in flows:
        eventually(flow.ended, what="the stream to break")
        assert flow.error and not flow.answers
    assert gateway.chat("tiny")[0] == 200
    assert direct.completed(), direct.error
    assert gateway.system.pid() == engine


@fault(
    "W5",
    "supervisord is killed while an answer streams through the gateway",
    happens="the worker keeps serving, and gives its sockets to the next supervisord's",
    sees="nothing",
    bound="the stream is whole",
)
def test_a_killed_supervisord_cuts_no_stream(gateway: Gateway) -> None:
    flow, before = stream(gateway, TOKENS, PACED), serving(gateway)
    old = gateway.system.supervisord_pid()
    kill(old)
    eventually(lambda: gateway.system.supervisord_pid() not in (0, old), 30, "another supervisord")
    eventually(lambda: serving(gateway) != before, 60, "another worker")
    assert flow.completed(), flow.error
    assert gateway.chat("tiny")[0] == 200
    eventually(lambda: not psutil.pid_exists(before), 30, "the worker before to end")


@fault(
    "W6",
    "the controller, the sidecar and the embedded API are killed while an answer streams through the gateway",
    happens="the stream continues, and new requests are answered",
    sees="nothing",
    bound="the stream is whole",
)
def test_our_other_programs_may_die(gateway: Gateway) -> None:
    flow = stream(gateway, 400)
    with slowed(gateway.system.pid()):
        for name in ("controller", "sidecar", "apiserver"):
            kill(gateway.system.own_pid(name))
            assert gateway.chat("tiny")[0] == 200
        assert flow.completed(), flow.error


@fault(
    "W8",
    "the engine is killed in the middle of a stream, and before the first byte of an answer",
    happens="the stream ends with an error as its last event, and is cut; the request is not sent to another engine",
    sees="`engine_lost`: in the stream, or as status 502",
    bound="at once; served again as soon as the engine is",
)
def test_an_engine_that_dies_is_told_to_its_clients(gateway: Gateway) -> None:
    system = gateway.system
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20000, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/chat/completions", json.dumps({**body, "stream": True}))
        answer = connection.getresponse()
        assert answer.readline().startswith(b"data: ")
        kill(system.pid())
        lines: list[bytes] = []
        with pytest.raises(http.client.IncompleteRead):
            while True:
                lines.append(answer.readline())
                if not lines[-1]:
                    raise http.client.IncompleteRead(b"")
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    assert events[-1]["error"]["code"] == "engine_lost" and b"data: [DONE]\n" not in lines
    eventually(lambda: gateway.chat("tiny")[0] == 200, 30, "the next engine")
    with halted(pid := system.pid()):
        told: list[int] = []
        asking = threading.Thread(target=lambda: told.append(gateway.chat("tiny")[0]), daemon=True)
        asking.start()
        # A slow machine may have noticed by then that the engine does not answer, and refuse the request at once.
        under_way = "the request to be under way"
        eventually(lambda: told or gateway.ask("GET", "/healthz")[2]["inFlight"] == 1, what=under_way)
        kill(pid)
        asking.join(30)
    assert told in ([502], [503]), told  # 503: it had no connection to the engine yet
    eventually(lambda: gateway.chat("tiny")[0] == 200, 60, "the engine that crashed twice")


@fault(
    "W9",
    "1,000 connections, and more than the process may have descriptors for",
    happens="those beyond the limit are answered with 503 and closed",
    sees="503 with `Retry-After`",
    bound="served again as soon as the others are gone; memory below 150 MiB",
)
def test_more_connections_than_there_may_be(gateway: Gateway, figure: Figure) -> None:
    worker = psutil.Process(serving(gateway))
    most = min(2000, (worker_limit(worker) - 64) // 2)
    with contextlib.ExitStack() as stack:
        for _ in range(most):
            stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port), 10))

        def refused() -> bool:
            extra = stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port), 10))
            extra.settimeout(1)
            return extra.recv(64).startswith(b"HTTP/1.1 503 ")

        eventually(refused, what="one too many")
        figure.add(f"memory with {most} connections", worker.memory_info().rss / (1 << 20), "MiB")
        assert worker.memory_info().rss < 150 << 20
    eventually(lambda: gateway.chat("tiny")[0] == 200, 10, "it to serve again")


def worker_limit(process: psutil.Process) -> int:
    """The number of descriptors that a process may have."""
    limits = Path("/proc") / str(process.pid) / "limits"
    lines = limits.read_text().splitlines() if limits.exists() else []
    return next((int(line.split()[3]) for line in lines if line.startswith("Max open files")), 1 << 20)


def test_a_halted_holder_stops_no_request(gateway: Gateway) -> None:
    with halted(eventually(lambda: gateway.system.own_pid("gateway-holder"))):
        assert gateway.chat("tiny")[0] == 200


@fault(
    "W23",
    "the gateway's worker stands still for more than a minute",
    happens="the sidecar tells; engines answer at their own addresses",
    sees="503 of the sidecar's /healthz, with the reason; 200 by itself once the worker goes on",
    bound="told within 75 s",
)
def test_a_gateway_that_stands_still_is_told(gateway: Gateway) -> None:
    with halted(serving(gateway)):
        eventually(lambda: gateway.system.health()[0] == 503, 75, "it to be told")
        assert "the gateway has not looked" in gateway.system.fetch("/healthz")[1]
        assert "hello world" in gateway.system.chat("tiny")
    eventually(lambda: gateway.system.health()[0] == 200, what="it to be well again")
    assert gateway.chat("tiny")[0] == 200


@fault(
    "W25",
    "`kill` (TERM) of the gateway's worker, round after round, while OpenAI's client reads a stream through it",
    happens="the worker finishes the stream and exits, which is no hand-over: supervisord starts it again",
    sees="a whole stream; new requests wait for the next worker",
    bound="20 rounds, no stream cut",
)
def test_a_worker_that_gets_a_term_is_started_again(gateway: Gateway, figure: Figure) -> None:
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
    with contextlib.closing(client), slowed(gateway.system.pid()):
        for _ in range(TERMS):
            before = serving(gateway)
            answer = client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=200,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            chunks = iter(answer)
            next(chunks)
            os.kill(before, signal.SIGTERM)
            assert [each.choices[0].finish_reason for each in chunks if each.choices][-1] == "length"
            with figure.timed("the stream's end to the next answer"):
                assert gateway.chat("tiny")[0] == 200
            assert serving(gateway) != before
    figure.add("streams, all whole", TERMS, "")
    eventually(lambda: gateway.system.health()[0] == 200, what="the sidecar to see the worker")
    next_worker(gateway)  # a hand-over still ends the worker before
    eventually(lambda: len([each for each in WORKERS if gateway.system.rpc.table()[each].pid]) == 1, 60, "one worker")
    assert {gateway.system.rpc.table()[each].state for each in WORKERS} <= {State.RUNNING, State.EXITED}


@fault(
    "W26",
    "`kill` (TERM) of the holder, the controller, the sidecar and the embedded API while an answer streams",
    happens="supervisord starts each again",
    sees="nothing",
    bound="the stream is whole",
)
@pytest.mark.parametrize("name", ["gateway-holder", "controller", "sidecar", "apiserver"])
def test_each_of_our_programs_that_gets_a_term_is_started_again(gateway: Gateway, name: str) -> None:
    flow = stream(gateway, 400)
    with slowed(gateway.system.pid()):
        before = eventually(lambda: gateway.system.own_pid(name), what=name)
        os.kill(before, signal.SIGTERM)
        eventually(lambda: gateway.system.own_pid(name) not in (0, before), 30, f"another {name}")
        assert gateway.chat("tiny")[0] == 200
        assert flow.completed(), flow.error


@fault(
    "W27",
    "`supervisorctl stop` of the gateway's worker",
    happens="the worker stays stopped; engines answer at their own addresses",
    sees="503 of the sidecar's /healthz with the reason and the command that starts the worker; 200 after it",
    bound="reported within 15 s",
)
def test_a_gateway_stopped_by_hand_stays_stopped_and_is_reported(gateway: Gateway, figure: Figure) -> None:
    system = gateway.system
    name = next(each for each in WORKERS if system.rpc.table()[each].pid)
    system.supervisorctl("stop", name)
    with figure.timed("until reported"):
        eventually(lambda: system.health()[0] == 503, 15, "it to be reported")
    reason = system.health()[1]["reason"]
    assert "no worker of it runs" in reason and "supervisorctl start gateway`" in reason, reason
    told = "`status` to show it"
    eventually(lambda: json.loads(system.fetch("/status")[1])["gateway"]["problem"] == reason, what=told)
    assert {system.rpc.table()[each].pid for each in WORKERS} == {0}
    assert "hello world" in system.chat("tiny")
    system.supervisorctl("start", "gateway")
    eventually(lambda: system.health()[0] == 200, what="it to be well again")
    assert gateway.chat("tiny")[0] == 200


@fault(
    "W7",
    "a client sends its headers byte by byte, another sends headers of 100 kB, 300 connect and send nothing",
    happens="the first is closed in the end, the second refused; the others cost a descriptor each",
    sees="400 for headers too large; other clients notice nothing",
    bound="a chat is answered meanwhile",
)
def test_slow_large_and_silent_clients(gateway: Gateway) -> None:
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port), 10)) for _ in range(300)]
        idle[0].sendall(b"POST /v1/chat/comp")
        assert gateway.chat("tiny")[0] == 200
        idle[1].sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * 100_000)
        assert b" 400 " in idle[1].recv(64)
        assert gateway.chat("tiny")[0] == 200
    assert gateway.ask("GET", "/healthz")[2]["inFlight"] == 0


def test_a_hundred_megabytes_are_refused_and_not_kept(gateway: Gateway) -> None:
    worker = psutil.Process(serving(gateway))
    before = worker.memory_info().rss
    with socket.create_connection(("127.0.0.1", gateway.port), 30) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        piece = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
        with contextlib.suppress(OSError):  # it is refused before all of it was sent
            for _ in range(100):
                connection.sendall(piece)
        with contextlib.suppress(ConnectionError):
            assert connection.recv(64).startswith(b"HTTP/1.1 413 ")
    eventually(lambda: gateway.ask("GET", "/healthz")[2]["inFlight"] == 0, what="nothing in flight")
    assert worker.memory_info().rss - before < 100 << 20
    assert gateway.chat("tiny")[0] == 200
