"""A network that goes silent, a Mac that slept or moved: nothing hangs for longer than it may."""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from apiserver_support import CONFIG_MAPS
from test_kube import answering, config, failure
from test_kube_tls import OURS, server_context
from test_kube_tls import config as tls_config

from metal_supervisor.apiserver import ApiServer
from metal_supervisor.cluster import kube as kube_module
from metal_supervisor.cluster.kube import Kube, KubeError
from metal_supervisor.cluster.network_watcher import NetworkWatcher
from metal_supervisor.host.sleep_clock import Clocks, Wake, system_clocks


class Forwarder:
    """A way to a server that can go silent, or break, as no server would do it."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._mute = threading.Event()
        self._pairs: list[tuple[socket.socket, socket.socket, threading.Event]] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def connections(self) -> int:
        """How many were made so far."""
        return len(self._pairs)

    def go_silent(self) -> None:
        """Nothing comes through any more, and nobody is told: half-open connections, and new ones like them."""
        self._mute.set()
        for *_, mute in self._pairs:
            mute.set()

    def heal(self) -> None:
        """New connections work again; those of before stay dead."""
        self._mute.clear()

    def reset(self) -> None:
        """All connections end with RST."""
        for near, far, _ in list(self._pairs):
            with contextlib.suppress(OSError):
                near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._end(near, far, hard=True)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for near, far, _ in self._pairs:
            self._end(near, far)
        for thread in self._threads:
            thread.join(30)

    def _end(self, *ends: socket.socket, hard: bool = False) -> None:
        for end in ends:
            with contextlib.suppress(OSError):
                if hard and end is ends[0]:
                    end.shutdown(socket.SHUT_RD)  # ends the read of the pump; close then sends the RST
                else:
                    end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                near.close()
                continue
            mute = threading.Event()
            if self._mute.is_set():
                mute.set()
            self._pairs.append((near, far, mute))
            for source, sink in ((near, far), (far, near)):
                thread = threading.Thread(target=self._pump, args=(source, sink, mute), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, mute: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not mute.is_set():
                    sink.sendall(data)
        if not mute.is_set():
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def forwarding(port: int) -> Iterator[Forwarder]:
    made = Forwarder(port)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def way(api: ApiServer) -> Iterator[Forwarder]:
    with forwarding(api.port) as made:
        yield made


@pytest.fixture
def kube(api: ApiServer, way: Forwarder, tmp_path: Path) -> Iterator[Kube]:
    """A client that reaches the API by that way."""
    made = Kube(config(tmp_path / "kubeconfig", api.url.replace(f"http://127.0.0.1:{api.port}", way.url)))
    yield made
    made.close()


# ── silence ──────────────────────────────────────────────────────────────────────────────────────


def test_the_limits_are_those_of_the_design() -> None:
    assert (kube_module.CONNECT_S, kube_module.READ_S, kube_module.WATCH_READ_S) == (5.0, 15.0, 75.0)


def test_dead_connections_of_the_pool_cost_one_wait_and_are_all_forgotten(
    kube: Kube, way: Forwarder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, failed = threading.Barrier(3), []

    def ask() -> None:
        asked.wait(30)
        try:
            kube.request("GET", CONFIG_MAPS)
        except KubeError as error:
            failed.append(error)

    def ask_at_once() -> None:
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    while way.connections < 3:  # then some wait in the pool
        ask_at_once()
    monkeypatch.setattr(kube_module, "READ_S", 0.3)
    way.go_silent()
    error = failure(kube)
    assert (error.code, error.reason, "ReadTimeoutError" in str(error)) == (0, "Unreachable", True)
    way.heal()
    monkeypatch.setattr(kube_module, "READ_S", 3.0)
    ask_at_once()
    assert failed == []


def test_a_server_that_does_not_even_accept_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_module, "CONNECT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as waiting:
        for _ in range(3):  # so that the next is not answered at all
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        kube = Kube(config(tmp_path / "k", f"http://127.0.0.1:{full.getsockname()[1]}"))
        error = failure(kube)
        assert (error.code, "ConnectTimeoutError" in str(error)) == (0, True)
        kube.close()


def test_a_watch_that_gets_no_header_is_given_up_as_early_as_a_request(
    kube: Kube, way: Forwarder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_module, "READ_S", 0.3)
    way.go_silent()
    far_later = threading.Timer(20, way.reset)  # so that another limit would show as another error
    far_later.start()
    with pytest.raises(KubeError, match="ReadTimeoutError"):
        kube.stream(CONFIG_MAPS, {"watch": "true"})
    far_later.cancel()
    far_later.join()


def test_a_watch_may_be_silent_for_longer_than_a_request(kube: Kube, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_module, "READ_S", 1.0)
    with contextlib.closing(kube.stream(CONFIG_MAPS, {"watch": "true", "timeoutSeconds": 2})) as answer:
        assert list(answer.stream()) == []  # ended by the server, after two seconds


# ── kicks ────────────────────────────────────────────────────────────────────────────────────────


class Holding:
    """A server's answer that begins and then waits."""

    def __init__(self, head: bytes) -> None:
        self._head = head
        self.asked, self.leave = threading.Event(), threading.Event()

    def __call__(self, _: bytes) -> bytes:
        self.asked.set()
        if not self._head:
            self.leave.wait(30)
        return self._head


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n{}\r\n\r\n"


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("act", ["kick", "close"])
def test_a_read_that_waits_returns_at_once(tmp_path: Path, tls: bool, act: str) -> None:
    """Also a request whose answer has not begun. None of the limits is near."""
    hold = Holding(b"")
    with answering(hold, server_context(tmp_path) if tls else None) as url:
        path = tmp_path / "k"
        kube = Kube(tls_config(path, url, **OURS) if tls else config(path, url))
        errors: list[KubeError] = []
        thread = threading.Thread(target=lambda: errors.append(failure(kube)))
        thread.start()
        assert hold.asked.wait(30)
        getattr(kube, act)()
        thread.join(30)
        assert not thread.is_alive()
        hold.leave.set()
    assert [each.reason for each in errors] == ["Unreachable"]
    kube.close()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_an_open_watch_returns_at_once(tmp_path: Path, tls: bool) -> None:
    """One whose stream has begun, and that has read all there is."""
    leave = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    context = server_context(tmp_path) if tls else None

    def serve() -> None:
        near, _ = listener.accept()
        with contextlib.suppress(OSError, ssl.SSLError):
            near = context.wrap_socket(near, server_side=True) if context else near
            near.recv(65536)
            near.sendall(CHUNKED)
            leave.wait(30)
        near.close()

    server = threading.Thread(target=serve)
    server.start()
    url = f"http{'s' if tls else ''}://127.0.0.1:{listener.getsockname()[1]}"
    kube = Kube(tls_config(tmp_path / "k", url, **OURS) if tls else config(tmp_path / "k", url))
    begun, ended = threading.Event(), threading.Event()

    def read() -> None:
        with contextlib.closing(kube.stream("/x", {"watch": "true"})) as answer:
            with contextlib.suppress(Exception):
                for _ in answer.stream(amt=None, decode_content=False):
                    begun.set()
            ended.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(30)
    kube.kick()
    assert ended.wait(30)
    leave.set()
    for thread in (reader, server):
        thread.join()
    listener.close()


def test_after_a_kick_everything_is_begun_anew(kube: Kube, way: Forwarder) -> None:
    told: list[int] = []
    kube.when_kicked(lambda: told.append(kube.kicks))
    kube.request("GET", CONFIG_MAPS)
    kube.request("GET", CONFIG_MAPS)
    before = way.connections
    kube.close()
    assert told == []
    kube.kick()
    assert (told, kube.kicks) == ([1], 1)
    kube.request("GET", CONFIG_MAPS)
    assert (before, way.connections) == (1, 2)


def test_it_can_be_kicked_while_eight_threads_ask(kube: Kube) -> None:
    over, odd = threading.Event(), []

    def ask() -> None:
        while not over.is_set():
            try:
                kube.request("GET", CONFIG_MAPS)
            except KubeError as error:
                if error.reason != "Unreachable":
                    odd.append(error)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for each in threads:
        each.start()
    for _ in range(30):
        kube.kick()
        time.sleep(0.01)
    over.set()
    for each in threads:
        each.join()
    assert odd == []
    assert kube.request("GET", CONFIG_MAPS)["items"] == []


# ── sleep and other addresses ────────────────────────────────────────────────────────────────────


class Hands:
    """Clocks that are set by hand, and an address."""

    def __init__(self) -> None:
        self.awake, self.asleep = 1000.0, 500.0
        self.address: str | None = "192.0.2.10"
        self.asked: list[tuple[str, int]] = []

    @property
    def clocks(self) -> Clocks:
        return Clocks(lambda: self.awake + self.asleep, lambda: self.awake)

    def route(self, host: str, port: int) -> str | None:
        self.asked.append((host, port))
        return self.address


def test_a_machine_that_slept_is_told_once_and_one_that_only_worked_is_not() -> None:
    hands = Hands()
    wake = Wake(hands.clocks)
    hands.awake += 10_000
    assert wake.slept_s() == 0.0
    hands.asleep += 1.9
    assert wake.slept_s() == 0.0
    hands.asleep += 3600.0
    assert wake.slept_s() == pytest.approx(3601.9)
    assert wake.slept_s() == 0.0


def test_naps_add_up() -> None:
    hands = Hands()
    wake = Wake(hands.clocks)
    told = []
    for _ in range(4):
        hands.asleep += 0.9
        told.append(wake.slept_s())
    assert told == [0.0, 0.0, pytest.approx(2.7), 0.0]


def test_a_machine_so_busy_that_time_passes_between_two_looks_has_not_slept() -> None:
    ticks = itertools.count(0.0, 7.0)  # seven seconds go by at each look
    wake = Wake(Clocks(lambda: next(ticks), lambda: next(ticks)))
    assert [wake.slept_s() for _ in range(5)] == [0.0] * 5


def test_the_clocks_of_this_machine_are_a_pair() -> None:
    clocks = system_clocks()
    first, second = clocks.inclusive(), clocks.inclusive()
    assert second >= first >= 0 and clocks.exclusive() >= 0
    assert Wake().slept_s() == 0.0


@pytest.mark.parametrize(
    ("platform", "names"),
    [("darwin", ("CLOCK_MONOTONIC_RAW", "CLOCK_UPTIME_RAW")), ("linux", ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC"))],
)
def test_the_clocks_are_those_of_the_platform(
    monkeypatch: pytest.MonkeyPatch, platform: str, names: tuple[str, str]
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    for value, name in enumerate(names, 100):
        monkeypatch.setattr(time, name, value, raising=False)
    monkeypatch.setattr(time, "clock_gettime", float)
    clocks = system_clocks()
    assert (clocks.inclusive(), clocks.exclusive()) == (100.0, 101.0)
    monkeypatch.delattr(time, names[0])
    assert system_clocks() == (time.monotonic, time.monotonic)


def roaming(hands: Hands, peer: tuple[str, int] | None = ("192.0.2.1", 6443)) -> tuple[NetworkWatcher, Any]:
    class Peer:
        pass

    kube: Any = Peer()
    kube.peer = peer
    return NetworkWatcher(kube, clocks=hands.clocks, route=hands.route), kube


def test_sleep_and_another_address_are_reasons_to_begin_anew() -> None:
    hands = Hands()
    check = roaming(hands)[0].check
    assert [check(), check()] == ["", ""]
    hands.address = "198.51.100.7"
    assert [check(), check()] == ["local address changed from 192.0.2.10 to 198.51.100.7", ""]
    hands.asleep += 60
    assert [check(), check()] == ["slept for 60 s", ""]
    hands.asleep, hands.address = hands.asleep + 60, "192.0.2.10"
    assert [check(), check()] == ["slept for 60 s", ""]  # one reason is enough
    assert set(hands.asked) == {("192.0.2.1", 6443)}


def test_without_a_network_nothing_is_begun_anew_until_it_is_back() -> None:
    hands = Hands()
    check = roaming(hands)[0].check
    check()
    hands.address = None
    assert [check(), check()] == ["", ""]
    hands.address = "192.0.2.10"
    assert [check(), check()] == ["the network is back", ""]
    hands.address = None
    check()
    hands.address = "192.0.2.11"
    assert [check(), check()] == ["local address changed from 192.0.2.10 to 192.0.2.11", ""]


def test_another_address_of_the_server_is_none_of_ours() -> None:
    hands = Hands()
    roam, kube = roaming(hands, None)
    assert (roam.check(), hands.asked) == ("", [])
    kube.peer = ("192.0.2.1", 6443)
    assert roam.check() == ""
    kube.peer, hands.address = ("2001:db8::1", 6443), "2001:db8::2"
    assert [roam.check(), roam.check()] == ["", ""]


def test_the_peer_is_the_address_connected_to_so_that_no_name_is_ever_resolved(kube: Kube, way: Forwarder) -> None:
    roam = NetworkWatcher(kube)
    assert (kube.peer, roam.check()) == (None, "")
    kube.request("GET", CONFIG_MAPS)
    assert kube.peer == ("127.0.0.1", int(way.url.rpartition(":")[2]))
    assert [roam.check(), roam.check()] == ["", ""]
