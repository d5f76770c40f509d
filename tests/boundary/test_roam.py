"""Which address pods are told, as it is kept and shown; and when connections are dropped."""

from __future__ import annotations

import errno
import logging
import socket
from typing import Any

import psutil
import pytest

from metal_supervisor.cluster.network_watcher import AddressBook
from metal_supervisor.host import addresses, machine, sleep_clock
from metal_supervisor.host.sleep_clock import Clocks
from metal_supervisor.sidecar import board


class Hands:
    """A pair of clocks that are set by hand."""

    asleep_s = 0.0

    @property
    def clocks(self) -> Clocks:
        return Clocks(lambda: 1000.0 + self.asleep_s, lambda: 1000.0)


class Cluster:
    """A Kube as far as it is asked here."""

    server = first_hop = "https://192.0.2.1:6443"
    peer = None
    kicks = 0

    def kick(self) -> None:
        self.kicks += 1


@pytest.fixture
def route(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The address from which the API server is reached, which a test may change."""
    found: list[str | None] = ["192.0.2.10"]
    monkeypatch.setattr(machine, "route_to", lambda *_: found[0])
    return found


def book(asked: str = "") -> tuple[AddressBook, list[str]]:
    cluster: Any = Cluster()
    seen: list[str] = []
    kept = AddressBook(cluster, asked, False, lambda: seen.append(kept.choice.address))
    return kept, seen


def test_the_address_follows_the_route_and_stays_while_there_is_none(route: list[str | None]) -> None:
    kept, seen = book()
    for address in ("192.0.2.10", "192.0.2.10", None, "198.51.100.7"):
        route[0] = address
        kept.look()
    assert seen == ["192.0.2.10", "198.51.100.7"] and kept.choice.problem == ""


def test_after_a_sleep_somewhere_else_nobody_is_told_the_old_address_again(
    route: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    hands = Hands()
    monkeypatch.setattr(sleep_clock, "system_clocks", lambda: hands.clocks)
    kept, seen = book()
    kept.look()
    hands.asleep_s, route[0] = 3600.0, "198.51.100.7"
    kept.look()
    assert seen == ["192.0.2.10", "198.51.100.7"] and kept._kube.kicks == 1  # type: ignore[attr-defined]
    hands.asleep_s += 3600.0
    kept.look()
    assert seen[2:] == ["198.51.100.7"], "what is there may have been taken out meanwhile"


def test_an_address_of_containers_is_told_as_asked_and_doubted_in_the_log_and_in_status(
    route: list[str | None], caplog: pytest.LogCaptureFixture
) -> None:
    kept, seen = book("172.17.0.1")
    with caplog.at_level(logging.WARNING):
        kept.look()
        kept.look()
    assert seen == ["172.17.0.1"]
    doubts = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert len(doubts) == 1 and "containers" in doubts[0].doubt  # type: ignore[attr-defined]
    told = board.status(board.Board(address=kept.choice))["address"]
    assert told["address"] == "172.17.0.1" and "containers" in told["note"] and told["origin"] == "--host-ip"


def test_status_tells_of_no_address_before_one_is_known() -> None:
    assert board.status(board.Board())["address"]["address"] == ""
    assert addresses.AddressChoice("", "") == board.NO_ADDRESS


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), RuntimeError("as psutil on a Mac")])
def test_interfaces_that_cannot_be_read_leave_the_address(
    route: list[str | None], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    kept, seen = book()
    kept.look()
    before = kept.choice.address

    def unreadable() -> dict[str, Any]:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(psutil, "net_if_addrs", unreadable)
        kept.look()
    assert before and kept.choice.address == before and seen == [before]


def test_a_server_whose_name_no_resolver_takes_has_no_route() -> None:
    assert machine.route_to("a" * 64 + ".example", 443) is None


LINK = ("fe80::1c2b%en0", 6443, 0, 11)
LAN = ("192.168.1.20", 6443)
SOURCES = {LINK: "fe80::8a1%en0", LAN: "192.168.1.10"}


@pytest.mark.parametrize(
    ("resolved", "sources", "found"),
    [
        ((LINK, LAN), SOURCES, "192.168.1.10"),
        ((LAN, LINK), SOURCES, "192.168.1.10"),
        ((LINK,), SOURCES, "fe80::8a1%en0"),
        ((LINK, LAN), {LAN: "192.168.1.10"}, "192.168.1.10"),
        ((LINK, LAN), {LINK: "fe80::8a1%en0"}, "fe80::8a1%en0"),
        ((LINK, LAN), {}, None),
    ],
    ids=["local name", "IPv4 first", "link alone", "no IPv6", "no IPv4", "no route"],
)
def test_a_mac_whose_cluster_has_a_local_name_is_not_at_its_links_own_address(
    monkeypatch: pytest.MonkeyPatch, resolved: tuple[Any, ...], sources: dict[Any, str], found: str | None
) -> None:
    class Probe:
        def __init__(self, *_: object) -> None:
            self.local = ""

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def connect(self, target: Any) -> None:
            if target not in sources:
                raise OSError(errno.EHOSTUNREACH, "No route to host")
            self.local = sources[target]

        def getsockname(self) -> tuple[str, int]:
            return self.local, 50000

    told = [(socket.AF_INET6 if len(each) > 2 else socket.AF_INET, 2, 17, "", each) for each in resolved]
    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", lambda *_, **__: told)
        patched.setattr(socket, "socket", Probe)
        assert machine.route_to("nas.local", 6443) == found
