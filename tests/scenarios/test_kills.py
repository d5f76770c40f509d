"""kill -9 of each of our own processes: no engine notices, and everything converges again."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator

import pytest

from metal_supervisor.apiserver import ApiServer, Options
from metal_supervisor.cluster.kube import Kube
from metal_supervisor.settings.loader import conf_dir
from metal_supervisor.spec.processes import State
from metal_supervisor.state import own_processes
from tests.support import effort
from tests.support.faults import Figure, fault
from tests.support.system import ISVC, SLICES, System, eventually, free_ports, halted, kill, running, service

KILLS = 50 if effort.ALL else 10
OUTAGES = 10
CHATS = 4
DOWN_S = 30.0


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running(tmp_path_factory.mktemp("kills")) as up:
        up.apply(up.tiny_model(), service("tiny", parallelSlots=CHATS, contextSize=65536))
        up.ready()
        yield up


def running_pid(system: System, program: str, not_this: int) -> int:
    """Pid of one of our own programs once supervisord calls it RUNNING, and it is another one than before."""
    row = system.rpc.table()[program]
    return row.pid if row.state is State.RUNNING and row.pid != not_this else 0


@contextlib.contextmanager
def unready_slices(system: System) -> Iterator[list[str]]:
    """Collects every write meanwhile that took the endpoint out, as a watch of the API tells it."""
    found: list[str] = []
    version = system.kube.request("GET", SLICES)["metadata"]["resourceVersion"]
    server = urllib.parse.urlsplit(system.kube.server)
    connection = http.client.HTTPConnection(server.netloc, timeout=600)
    connection.request("GET", f"{server.path}{SLICES}?watch=true&resourceVersion={version}&timeoutSeconds=600")
    answer = connection.getresponse()

    def follow() -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError, http.client.HTTPException):
            while line := answer.readline():
                item = json.loads(line)["object"]
                if not all(each["conditions"]["ready"] for each in item.get("endpoints", ())):
                    found.append(item["metadata"]["name"])

    watcher = threading.Thread(target=follow, daemon=True)
    watcher.start()
    yield found
    assert watcher.is_alive(), "the watch has ended early, and has seen nothing since"
    assert answer.fp is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    watcher.join(10)
    connection.close()


class Chats:
    """Four chats that stream one answer after another."""

    def __init__(self, system: System) -> None:
        self._streams = [system.stream(tokens=300) for _ in range(CHATS)]

    def told(self, figure: Figure) -> None:
        """Lets the answers under way be the last, and tells what came of all of them; none may have been cut."""
        for each in self._streams:
            each.last()
        done = [each.completed() for each in self._streams]
        figure.add("answers streamed", sum(each.answers for each in self._streams), "")
        figure.add("answers cut", sum(not each for each in done), "")
        assert all(done), [each.error for each in self._streams]


@fault(
    "U143",
    "the controller is killed with -9, 50 times (10 in `make test`), under 4 streaming chats",
    happens="supervisord starts it again; it adopts what runs",
    sees="nothing",
    bound="0 bytes lost, 0 engine restarts",
)
@fault(
    "U144",
    "the sidecar is killed with -9, as often, under the same chats",
    happens="supervisord starts it again; what was ready stays ready",
    sees="endpoints unchanged",
    bound="0 bytes lost, 0 writes of ready: false",
)
def test_kills_of_controller_and_sidecar_under_four_chats_interrupt_nothing(system: System, figure: Figure) -> None:
    engine, chats = system.ready(), Chats(system)
    with unready_slices(system) as unready:
        pids = {"controller": 0, "sidecar": 0}
        for _ in range(KILLS):
            for program, case in (("controller", "U143"), ("sidecar", "U144")):
                asked = time.monotonic()
                pids[program] = eventually(
                    lambda name=program: running_pid(system, name, pids[name]), 30, f"{program} to run"
                )
                figure.add("up again", time.monotonic() - asked, case=case)
                kill(pids[program])
                assert system.pid() == engine
        for program in pids:
            eventually(lambda name=program: running_pid(system, name, pids[name]), 30, f"{program} to run")
    figure.add("writes of ready: false", len(unready), "", case="U144")
    assert not unready
    unnoticed(system, engine, chats, figure)
    works_still(system, "after-kills")


@fault(
    "U143b",
    "the Kubernetes API is away 10 times (killed, or stopped for a second) under 4 streaming chats",
    happens="everything goes on from the last known state",
    sees="/healthz: 200, cluster unreachable meanwhile",
    bound="0 bytes lost, 0 engine restarts",
)
def test_ten_outages_of_the_api_under_four_chats_interrupt_nothing(system: System, figure: Figure) -> None:
    engine, chats = system.ready(), Chats(system)
    pid = 0
    for outage in range(OUTAGES):
        pid = eventually(lambda before=pid: running_pid(system, "apiserver", before), 30, "the API to run")
        if outage % 2:
            kill(pid)
        else:
            with halted(pid):
                time.sleep(1.0)  # the outage itself
            pid = 0
        started = time.monotonic()
        eventually(lambda: system.get("/version"), 30, "the API to answer")
        figure.add("API back", time.monotonic() - started)
        assert system.pid() == engine
    unnoticed(system, engine, chats, figure)
    works_still(system, "after-outages")


def test_an_api_that_is_down_for_30_seconds_stops_nothing_and_is_caught_up_with(system: System) -> None:
    system.apply(service("kept"), service("changed"))
    pids = {name: system.ready(name) for name in ("tiny", "kept", "changed")}
    system.supervisorctl("stop", "apiserver")
    down = time.monotonic()
    eventually(lambda: system.health()[1].get("cluster") == "unreachable", what="healthz to say so")
    # A change made meanwhile, through another server on the same data.
    _, prefix = own_processes.saved_access(system.files)
    meanwhile = Options(
        data_file=system.state / "apiserver.db",
        prefix=prefix,
        port=free_ports(1)[0],
        crd_paths=tuple((conf_dir() / "crds").glob("*.yaml")),
    )
    with ApiServer(meanwhile) as other:
        kubeconfig = system.base / "other-kubeconfig"
        kubeconfig.write_text(system.kubeconfig.read_text().replace(system.kube.server, other.url))
        with contextlib.closing(Kube(kubeconfig)) as kube:
            kube.apply(f"{ISVC}/changed", service("changed", contextSize=1024), "test", force=True)
    while time.monotonic() - down < DOWN_S:
        status, body = system.health()
        assert (status, body["status"], body["cluster"]) == (200, "ok", "unreachable")
        assert {name: system.pid(name) for name in pids} == pids
        time.sleep(1)
    system.supervisorctl("start", "apiserver")
    eventually(lambda: system.pid("changed") not in (0, pids["changed"]), what="the change to be applied")
    assert (system.pid("tiny"), system.pid("kept")) == (pids["tiny"], pids["kept"])
    eventually(lambda: system.health() == (200, {"status": "ok"}), what="healthz")
    system.ready("changed")
    for name in ("kept", "changed"):
        system.delete(name)
    eventually(lambda: not system.rpc.table().keys() & {"default.kept", "default.changed"}, 30, "both to be gone")


def unnoticed(system: System, engine: int, chats: Chats, figure: Figure) -> None:
    """No answer was cut, the engine is the same one, and all is well again."""
    chats.told(figure)
    figure.add("engine restarts", 0 if system.pid() == engine else 1, "")
    assert system.pid() == engine
    eventually(lambda: system.health() == (200, {"status": "ok"}), 30, "health")


def works_still(system: System, name: str) -> None:
    """What is applied runs, and what is deleted goes."""
    system.apply(service(name))
    system.ready(name)
    system.delete(name)
    eventually(lambda: f"default.{name}" not in system.rpc.table(), 30, "the program to be gone")


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
    stream = system.stream(tokens=700, slow=False)
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
    eventually(lambda: "default.leaver" not in system.rpc.table(), 30, "it to be gone")


def test_engines_whose_notes_are_lost_or_corrupt_are_stood_in_for_all_the_same(system: System) -> None:
    system.apply(service("other", contextSize=16384))
    engines = {name: system.ready(name) for name in ("tiny", "other")}
    streams = [system.stream(name, tokens=700, slow=False) for name in engines]
    for name in engines:
        (system.state / "runs" / f"default.{name}.json").unlink()
    (system.state / "runs" / "default.other.json").write_bytes(b"{ half a n\xff")
    old = system.supervisord_pid()
    kill(old)
    eventually(lambda: system.supervisord_pid() not in (0, old) and system.rpc.answers(), 30, "supervisord to be back")
    eventually(lambda: {name: system.pid(name) for name in engines} == engines, 30, "both to be stood in for")
    for stream in streams:
        assert stream.completed(), f"{stream.chunks} chunks, {stream.error}"
    assert system.engines() == sorted(engines.values())
    system.ready("other")
    system.delete("other")
    eventually(lambda: "default.other" not in system.rpc.table(), 30, "it to be gone")
