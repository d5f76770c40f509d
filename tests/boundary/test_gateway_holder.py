"""The holder of the gateway's sockets, and a worker's listeners: over a real socket of a directory."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from metal_supervisor import launch
from metal_supervisor.gateway import holder as holders
from metal_supervisor.gateway import listeners
from metal_supervisor.gateway.deadline import timeout
from metal_supervisor.gateway.holder import Holder, received, send
from metal_supervisor.gateway.listeners import NO_HOLDER, Listeners
from tests.support.system import eventually, free_ports


@contextlib.contextmanager
def running(path: Path) -> Iterator[Path]:
    """A holder in a thread."""
    stop = threading.Event()
    before = holders.LOOK_EVERY_S
    holders.LOOK_EVERY_S = 0.05
    holder = Holder(path)
    thread = threading.Thread(target=holder.run, args=(stop.is_set,), daemon=True)
    thread.start()
    try:
        eventually(path.exists, what="the holder's socket")
        yield path
    finally:
        stop.set()
        thread.join(10)
        holders.LOOK_EVERY_S = before
        for listener in holder._listeners.values():
            listener.close()
        for line in list(holder._workers.values()):
            holder._forget(line)


class FakeWorker:
    """A worker's end, message by message."""

    def __init__(self, path: Path) -> None:
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.connection.settimeout(10)
        eventually(lambda: self.connection.connect(str(path)) is None, what="a connection to the holder")

    def ask(self, **message: Any) -> tuple[dict[str, Any], list[socket.socket]]:
        send(self.connection, message)
        return self.next()

    def next(self) -> tuple[dict[str, Any], list[socket.socket]]:
        messages, _, sockets = received(self.connection, b"")
        return messages[0], sockets

    def close(self) -> None:
        self.connection.close()


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    with running(tmp_path / "gateway.sock") as up:
        yield up


def test_its_socket_is_this_users_alone(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_worker_gets_a_socket_that_listens(path: Path) -> None:
    (port,) = free_ports(1)
    worker = FakeWorker(path)
    told, (listener,) = worker.ask(want=f"127.0.0.1:{port}", born=1.0)
    assert told == {"listener": f"127.0.0.1:{port}"}
    with socket.create_connection(("127.0.0.1", port), 10), listener:
        listener.setblocking(True)
        listener.accept()[0].close()
    worker.close()


def test_a_port_that_is_taken_is_told(path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        worker = FakeWorker(path)
        told, sockets = worker.ask(want=f"127.0.0.1:{taken.getsockname()[1]}", born=1.0)
        assert "in use" in told["error"] and not sockets
        worker.close()


def test_a_port_at_which_a_server_answers_is_taken_also_where_it_could_be_bound(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a Mac 127.0.0.1:p can be bound beside another program's *:p, whose clients would come here."""
    monkeypatch.setattr(holders, "bound", pytest.fail)
    monkeypatch.setattr(holders.launch, "holder_of", lambda *_: launch.ANSWERED)
    worker = FakeWorker(path)
    told, sockets = worker.ask(want="127.0.0.1:9100", born=1.0)
    assert told["error"] == os.strerror(errno.EADDRINUSE) and not sockets
    worker.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_all_addresses_are_those_of_ipv4_too_as_they_are_for_engines() -> None:
    with holders.bound("::", 0) as listener:
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, listener.getsockname()[1]), 10).close()


@pytest.mark.parametrize("port", [99_999, -1, 10**30])
def test_a_port_that_no_system_has_is_told(path: Path, port: int) -> None:
    """As of a record that is damaged: the holder listens on all other ports."""
    worker = FakeWorker(path)
    told, sockets = worker.ask(want=f"127.0.0.1:{port}", born=1.0)
    assert told["error"] and told["address"] == f"127.0.0.1:{port}" and not sockets
    (good,) = free_ports(1)
    told, (listener,) = worker.ask(want=f"127.0.0.1:{good}", born=1.0)
    listener.close()
    worker.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\n",
        b"[]\n",
        b'{"want": 7}\n',
        b'{"want": "a:b", "born": 1}\n',
        b'{"want": "", "born": "x"}\n',
        b"a" * 20_000,
        b'{"serving": true, "want"',
        b"\xff\n",
        b"[" * 4000 + b"\n",
        b'{"want": "a:1", "born": 1%s}\n' % (b"0" * 400),
    ],
)
def test_what_no_worker_says_ends_that_connection_only(path: Path, sent: bytes) -> None:
    (port,) = free_ports(1)
    stranger = FakeWorker(path)
    with contextlib.suppress(OSError):
        stranger.connection.sendall(sent)
    worker = FakeWorker(path)
    told, sockets = worker.ask(want=f"127.0.0.1:{port}", born=1.0)
    assert told and sockets
    for each in (*sockets, stranger, worker):
        each.close()


def test_the_youngest_that_serves_retires_the_others(path: Path) -> None:
    (port,) = free_ports(1)
    old, young = FakeWorker(path), FakeWorker(path)
    given = []
    for worker, born in ((old, 1.0), (young, 2.0)):
        given += worker.ask(want=f"127.0.0.1:{port}", born=born)[1]
    send(young.connection, {"serving": True})
    send(old.connection, {"serving": True})  # as after a new holder: the order of words must not count
    assert old.next()[0] == {"retire": True}
    young.connection.settimeout(0.2)
    with pytest.raises(TimeoutError):
        young.next()
    for each in (*given, old, young):
        each.close()


class Worker:
    """A worker's listeners, served by a thread."""

    def __init__(self, path: Path, address: str, fronts: Sequence[str] = ()) -> None:
        self.path, self.address, self.fronts = path, address, fronts
        self.served: list[str] = []
        self.problems: list[tuple[str, str]] = []
        self.retired = threading.Event()
        self.ended = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self.listeners: Listeners | None = None
        self.ended.start()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.listeners = Listeners(
            str(self.path), self.address, lambda _tls: asyncio.Protocol(), lambda *told: self.problems.append(told)
        )
        self.listeners.fronts(self.fronts)
        await self.listeners.serve(None, self.served.append)
        self.retired.set()

    def ports(self) -> list[int]:
        return self.listeners.ports if self.listeners else []


def test_a_worker_gets_and_gives_up_more_sockets_than_a_buffer_holds_messages(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_a_small_buffer(*kind: Any) -> socket.socket:
        made = socket.socket(*kind)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        return made

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.01)
        return received(*arguments)

    monkeypatch.setattr(listeners, "socket", SimpleNamespace(**{**vars(socket), "socket": with_a_small_buffer}))
    monkeypatch.setattr(holders, "received", slowly)
    first, *ports = sorted(free_ports(41))
    worker = Worker(path, f"127.0.0.1:{first}", [f"127.0.0.1:{port}" for port in ports[:20]])
    eventually(lambda: worker.ports() == ports[:20], what="the sockets of the start")
    later = [f"127.0.0.1:{port}" for port in ports[20:]]
    worker.loop.call_soon_threadsafe(worker.listeners.fronts, later)
    eventually(lambda: worker.ports() == ports[20:], what="the sockets of later")

    def refused(port: int) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) != 0

    eventually(lambda: all(map(refused, ports[:20])), what="the sockets that were given up to be closed")
    assert not refused(first) and not any(map(refused, ports[20:]))
    other = FakeWorker(path)
    (taken,) = other.ask(want=f"127.0.0.1:{first}", born=time.monotonic())[1]
    send(other.connection, {"serving": True})
    assert worker.retired.wait(10)
    for each in (taken, other):
        each.close()


def test_a_port_that_is_taken_is_no_problem_any_more_once_it_is_given_up(path: Path) -> None:
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        taken = f"127.0.0.1:{stranger.getsockname()[1]}"
        worker = Worker(path, f"127.0.0.1:{port}", [taken])
        eventually(lambda: dict(worker.problems).get(taken), what="the port that is taken to be told")
        worker.loop.call_soon_threadsafe(worker.listeners.fronts, [])
        eventually(lambda: dict(worker.problems)[taken] == "", what="the problem to be over")
    other = FakeWorker(path)
    (again,) = other.ask(want=f"127.0.0.1:{port}", born=time.monotonic())[1]
    send(other.connection, {"serving": True})
    assert worker.retired.wait(10)
    for each in (again, other):
        each.close()


def test_workers_that_cannot_have_the_public_port_retire_for_one_another(path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        taken, (front,) = f"127.0.0.1:{stranger.getsockname()[1]}", free_ports(1)
        workers = []
        for _ in range(2):
            workers.append(Worker(path, taken, [f"127.0.0.1:{front}"]))
            eventually(lambda: workers[-1].ports() == [front], what="the port of a service")
        assert workers[0].retired.wait(10) and not workers[1].retired.is_set()
        other = FakeWorker(path)
        (again,) = other.ask(want=f"127.0.0.1:{front}", born=time.monotonic())[1]
        send(other.connection, {"serving": True})
        assert workers[1].retired.wait(10)
        for each in (again, other):
            each.close()


def test_a_worker_gives_its_socket_to_the_next_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    path = tmp_path / "gateway.sock"
    tries = Tries(monkeypatch)
    worker = Worker(path, f"127.0.0.1:{port}")
    tries.more()
    assert worker.problems == [], "a holder that starts beside it takes its time"
    monkeypatch.setattr(listeners, "LATE_S", 0.0)
    eventually(lambda: worker.problems, what="the missing holder to be told")
    with running(path):
        eventually(lambda: worker.served, what="the socket")
    with running(path):
        other = FakeWorker(path)

        # Until the worker has given its socket back, the port is taken.
        def told() -> list[socket.socket]:
            return other.ask(want=f"127.0.0.1:{port}", born=time.monotonic())[1]

        (again,) = eventually(told, what="the socket from the worker before")
        assert worker.served == [f"127.0.0.1:{port}"], "once"
        assert {text for address, text in worker.problems if not address} == {NO_HOLDER, ""}
        assert worker.problems[-1][1] == ""
        send(other.connection, {"serving": True})
        assert worker.retired.wait(10)
        worker.ended.join(10)
        assert not worker.ended.is_alive()
        again.close()
        other.close()


class Tries:
    """Counts how often a worker looks for the holder, which it does quickly."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._count = 0
        monkeypatch.setattr(listeners, "RETRY_S", 0.01)
        monkeypatch.setattr(listeners, "timeout", self._timeout)

    def _timeout(self, seconds: float) -> Any:
        self._count += 1
        return timeout(seconds)

    def more(self) -> None:
        """Waits until the holder has been looked for ten more times."""
        before = self._count
        eventually(lambda: self._count > before + 10, what="more tries")


def test_a_worker_without_a_holder_retires_once_it_has_no_supervisord_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    path = tmp_path / "gateway.sock"
    monkeypatch.setattr(listeners, "ALONE_S", 0.0)
    tries = Tries(monkeypatch)
    with running(path):
        worker = Worker(path, f"127.0.0.1:{port}")
        eventually(lambda: worker.served, what="the socket")
    path.unlink(missing_ok=True)
    tries.more()
    assert not worker.retired.is_set()
    monkeypatch.setattr(worker.listeners, "_parent", -1)
    assert worker.retired.wait(10)
    worker.ended.join(10)
    assert not worker.ended.is_alive()


def test_a_worker_waits_for_the_next_holder_however_long_it_had_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    path = tmp_path / "gateway.sock"
    tries, later_s = Tries(monkeypatch), [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later_s[0])
    monkeypatch.setattr(listeners, "time", clock)
    with running(path):
        worker = Worker(path, f"127.0.0.1:{port}")
        eventually(lambda: worker.served, what="the socket")
        monkeypatch.setattr(worker.listeners, "_parent", -1)
        later_s[0] += 2 * listeners.ALONE_S
    path.unlink(missing_ok=True)
    tries.more()
    assert not worker.retired.is_set()
    later_s[0] += 2 * listeners.ALONE_S
    assert worker.retired.wait(10)
    worker.ended.join(10)
