"""kill -9 of each of our own processes: no engine notices, and everything converges again."""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.parse
from collections.abc import Iterator

import pytest

from metal_supervisor.core.types import State
from tests.faults import Figure, fault
from tests.system import SLICES, System, eventually, kill, running, service

KILLS = 10


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running(tmp_path_factory.mktemp("kills")) as up:
        up.apply(up.tiny_model(), service("tiny", parallelSlots=2, contextSize=65536))
        up.ready()
        yield up


def running_pid(system: System, program: str, not_this: int) -> int:
    """Pid of one of our own programs once supervisord calls it RUNNING, and it is another one than before."""
    row = system.rpc.table()[program]
    return row.pid if row.state is State.RUNNING and row.pid != not_this else 0


def test_a_new_sidecar_never_takes_out_what_serves(system: System) -> None:
    system.ready()
    found = system.slice()
    assert found is not None
    server = urllib.parse.urlsplit(system.kube.server)
    query = f"?watch=true&resourceVersion={found['metadata']['resourceVersion']}&timeoutSeconds=12"
    connection = http.client.HTTPConnection(server.netloc, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", server.path + SLICES + query)
        with connection.getresponse() as answer:
            kill(eventually(lambda: running_pid(system, "sidecar", 0), 30, "the sidecar to run"))
            events = [json.loads(line)["object"] for line in answer.read().splitlines() if line.strip()]
    tiny = [each for each in events if each["metadata"]["name"].startswith("tiny")]
    ready = [each["endpoints"][0]["conditions"]["ready"] for each in tiny]
    assert set(ready) <= {True}


@pytest.mark.parametrize("program", ["controller", "sidecar", "apiserver"])
def test_ten_kills_while_a_chat_streams_interrupt_nothing(system: System, program: str) -> None:
    model_pid = system.ready()
    stream = system.stream()
    pid = 0
    for _ in range(KILLS):
        pid = eventually(lambda pid=pid: running_pid(system, program, pid), 30, f"{program} to run")
        kill(pid)
        assert system.pid() == model_pid
    eventually(lambda: running_pid(system, program, pid), 30, f"{program} to run")
    assert stream.completed(), f"{stream.chunks} chunks, {stream.error}"
    assert system.pid() == model_pid
    eventually(lambda: f"{program}" in system.supervisorctl("status"), what="supervisorctl to answer")
    eventually(lambda: system.health() == (200, {"status": "ok"}), 30, "health")
    name = f"after-{program}"
    system.apply(service(name))
    system.ready(name)
    system.delete(name)
    eventually(lambda: f"default.{name}" not in system.supervisorctl("status"), 30, "the program to be gone")
    assert system.pid() == model_pid


@fault(
    "S49",
    "kill -9 of supervisord while its engine streams",
    happens="the engine lives on; the launcher of the next supervisord stands in for it, so it is never doubled",
    sees="one line that says so; the answer ends whole",
    bound="stood in for within 60 s",
)
def test_a_killed_supervisord_is_back_with_one_engine_per_service_and_says_what_it_did(
    system: System, figure: Figure
) -> None:
    engine = system.ready()
    stream = system.stream()
    old = system.supervisord_pid()
    with figure.timed("stood in for"):
        kill(old)
        eventually(lambda: system.supervisord_pid() not in (0, old) and system.rpc.answers(), 30, "one to be back")
        eventually(lambda: system.pid() == engine, 30, "the survivor to be stood in for")
    assert stream.completed(), f"{stream.chunks} chunks, {stream.error}"
    assert system.engines() == [engine]
    figure.add("engines doubled", len(system.engines()) - 1, "")
    assert f"pid {engine}, outlived the last supervisord and keeps serving" in system.said()
    assert "killed by signal 9; starting it again" in system.said()
    system.ready()
    assert "hello world" in system.chat()
    # The stand-in is a program like any other: it dies with its engine, and a real one takes its place.
    kill(engine)
    eventually(lambda: system.pid() not in (0, engine), 30, "a new engine")
    assert len(system.engines()) <= 1
    eventually(lambda: len(system.engines()) == 1, what="one engine")
    eventually(lambda: "hello world" in system.chat(), what="an answer")


def test_a_killed_supervisord_whose_service_is_gone_leaves_nothing_of_it(system: System) -> None:
    system.apply(service("leaver"))
    engine = system.ready("leaver")
    tiny = system.pid()
    system.supervisorctl("stop", "controller")  # it would write the section again
    (system.state / "models.d" / "default.leaver.conf").unlink()
    old = system.supervisord_pid()
    kill(old)
    eventually(lambda: system.supervisord_pid() not in (0, old) and system.rpc.answers(), 30, "supervisord to be back")
    assert f"ending pid {engine}, left over" in system.said()
    # It is still wanted, so the controller starts it anew.
    eventually(lambda: system.pid("leaver") not in (0, engine), 30, "a new engine")
    assert system.pid() == tiny
    system.ready("leaver")
    eventually(lambda: len(system.engines()) == 2, what="two engines")
    eventually(lambda: "hello world" in system.chat("leaver"), what="an answer")
    system.delete("leaver")
