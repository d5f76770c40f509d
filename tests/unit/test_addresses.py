"""Which address pods are told, for every kind of cluster a Mac may be used with; all of them faked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pytest

from metal_supervisor.host import addresses
from metal_supervisor.host.addresses import AddressChoice, NetworkView, choose, networks_near
from metal_supervisor.host.machine import Interface

LOOPBACK = (Interface("lo0", "127.0.0.1", True), Interface("lo0", "::1", True), Interface("lo0", "fe80::1", True))
WIFI = Interface("en0", "192.168.1.50", True)
WIFI_V6 = Interface("en0", "fd12:3456::50", True)
LINK_LOCAL = Interface("en0", "fe80::c0de", True)
TAILSCALE = Interface("utun4", "100.101.2.3", True)
VPN = Interface("utun5", "10.8.0.6", True)
VMNET = Interface("bridge100", "192.168.64.1", True)
DOCKER = Interface("bridge101", "192.168.65.1", True)


def around(
    server: str, route: str | None, *interfaces: Interface, names: Mapping[str, Sequence[str]] | None = None
) -> NetworkView:
    return NetworkView(server, route, (*LOOPBACK, *interfaces), lambda name: (names or {}).get(name, ()))


KINDS = {
    "minikube, docker driver": (around("127.0.0.1", "127.0.0.1", LINK_LOCAL, WIFI, DOCKER), "192.168.1.50"),
    "minikube, VM driver": (around("192.168.64.2", "192.168.64.1", WIFI, VMNET), "192.168.64.1"),
    "kind": (around("127.0.0.1", "127.0.0.1", WIFI_V6, WIFI), "192.168.1.50"),
    "Docker Desktop": (around("kubernetes.docker.internal", "127.0.0.1", DOCKER, WIFI), "192.168.1.50"),
    "Docker Desktop, on a tailnet": (around("127.0.0.1", "127.0.0.1", WIFI, TAILSCALE), "100.101.2.3"),
    "colima": (around("127.0.0.1", "127.0.0.1", VMNET, WIFI), "192.168.1.50"),
    "colima, with an address of its own": (around("192.168.64.7", "192.168.64.1", VMNET, WIFI), "192.168.64.1"),
    "remote, over the LAN": (around("192.168.1.10", "192.168.1.50", WIFI, TAILSCALE), "192.168.1.50"),
    "remote, over a tailnet": (around("k8s.tail.example", "100.101.2.3", WIFI, TAILSCALE), "100.101.2.3"),
    "remote, over a VPN": (around("10.8.0.1", "10.8.0.6", WIFI, VPN), "10.8.0.6"),
    "remote, over IPv6": (around("k8s.example", "2001:db8::50", WIFI), "2001:db8::50"),
    "kind, on a network with IPv6 only": (around("127.0.0.1", "127.0.0.1", WIFI_V6), "fd12:3456::50"),
    "loopback forwarded over IPv6": (around("::1", "::1", WIFI), "192.168.1.50"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_cluster_gets_an_address_that_its_pods_reach(kind: str) -> None:
    surroundings, address = KINDS[kind]
    choice = choose("", surroundings)
    assert (choice.address, choice.problem, choice.note) == (address, "", "")


def test_what_was_asked_for_wins() -> None:
    choice = choose("192.168.1.50", around("10.8.0.1", "10.8.0.6", WIFI, VPN))
    assert choice == AddressChoice("192.168.1.50", "--host-ip")


def test_an_address_that_this_mac_does_not_have_is_advertised_and_noted() -> None:
    choice = choose("203.0.113.9", around("10.8.0.1", "10.8.0.6", WIFI))
    assert (choice.address, choice.problem) == ("203.0.113.9", "")
    assert "203.0.113.9" in choice.note


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "::1",
        "169.254.7.8",
        "fe80::1%en0",
        "0.0.0.0",
        "::",
        "224.0.0.1",
        "ff02::1",
        "255.255.255.255",
        "::ffff:127.0.0.1",
        "mac.local",
    ],
)
def test_an_unusable_address_is_refused_by_reason_even_if_asked_for(address: str) -> None:
    choice = choose(address, around("10.8.0.1", "10.8.0.6", WIFI))
    assert choice.address == ""
    assert choice.problem.startswith("NoRoutableAddress: ") and "--host-ip" in choice.problem
    assert re.search("set --host-ip to (an address|one) that pods (can )?reach$", choice.problem)


@pytest.mark.parametrize(
    ("asked", "address"), [("2001:DB8:0::5", "2001:db8::5"), ("::ffff:10.0.0.5", "10.0.0.5"), ("fd00::1", "fd00::1")]
)
def test_an_address_is_written_as_the_api_server_wants_it(asked: str, address: str) -> None:
    assert choose(asked, around("10.8.0.1", "10.8.0.6")).address == address


def test_a_self_assigned_source_address_is_refused() -> None:
    choice = choose("", around("192.168.1.10", "169.254.7.8", Interface("en0", "169.254.7.8", True)))
    assert choice.address == "" and "169.254.7.8" in choice.problem and "--host-ip" in choice.problem


def test_without_a_route_to_a_remote_cluster_nothing_is_guessed() -> None:
    names = {"host.docker.internal": ["192.168.65.254"]}
    choice = choose("", around("k8s.example", None, WIFI, names=names))
    assert choice.address == ""
    assert "no route to the API server k8s.example" in choice.problem and "--host-ip" in choice.problem


def test_without_a_network_the_cluster_beside_us_may_know_a_name_for_this_mac() -> None:
    offline = Interface("en0", "192.168.1.50", False)
    names = {"host.minikube.internal": ["127.0.0.1"], "host.docker.internal": ["fe80::1", "192.168.65.254"]}
    choice = choose("", around("127.0.0.1", "127.0.0.1", offline, names=names))
    assert (choice.address, choice.origin) == ("192.168.65.254", "host.docker.internal")


def test_without_a_network_and_a_name_the_problem_says_what_to_do() -> None:
    choice = choose("", around("127.0.0.1", "127.0.0.1", DOCKER, VMNET))
    assert choice.address == ""
    assert choice.problem.startswith("NoRoutableAddress: ")
    assert "set --host-ip" in choice.problem and "host.minikube.internal" in choice.problem


def test_of_several_networks_the_lan_comes_before_a_virtual_one_and_a_public_address() -> None:
    public, corporate = Interface("en1", "203.0.113.9", True), Interface("en5", "10.1.2.3", True)
    order = [TAILSCALE, corporate, public, WIFI_V6, VPN]
    for index, best in enumerate(order):
        rest = reversed(order[index:])
        choice = choose("", around("127.0.0.1", "127.0.0.1", VMNET, DOCKER, LINK_LOCAL, *rest))
        assert choice.address == best.address, index
    assert choose("", around("127.0.0.1", "127.0.0.1", WIFI, corporate)).address == WIFI.address


def test_the_embedded_api_is_reached_on_loopback() -> None:
    assert addresses.advertised("", "http://127.0.0.1:1", embedded=True).address == "127.0.0.1"
    assert addresses.advertised("10.0.0.5", "http://127.0.0.1:1", embedded=True).address == "10.0.0.5"
    assert "NoRoutableAddress" in addresses.advertised("169.254.1.1", "http://127.0.0.1:1", embedded=True).problem


def test_loopback_is_no_address_for_another_cluster() -> None:
    problem = addresses.advertised("127.0.0.1", "http://127.0.0.1:1", embedded=False).problem
    assert problem.startswith("NoRoutableAddress: --host-ip: 127.0.0.1 is loopback")


@pytest.mark.parametrize(
    ("address", "interfaces", "doubted"),
    [
        ("192.168.1.50", (WIFI,), ""),
        ("100.101.2.3", (TAILSCALE,), ""),
        ("10.8.0.6", (VPN,), ""),
        ("10.0.9.1", (Interface("bridge0", "10.0.9.1", True),), ""),
        ("172.17.0.1", (WIFI,), "containers or virtual machines"),
        ("192.168.65.3", (), "containers or virtual machines"),
        ("192.168.64.1", (VMNET,), "(bridge100)"),
        ("10.211.55.2", (Interface("bridge102", "10.211.55.2", True),), "(bridge102)"),
        ("203.0.113.9", (WIFI,), "no address of this machine"),
    ],
)
def test_what_was_asked_for_is_doubted_where_pods_may_not_reach_it(
    address: str, interfaces: Sequence[Interface], doubted: str
) -> None:
    choice = choose(address, around("10.8.0.1", "10.8.0.6", *interfaces))
    assert (choice.address, choice.problem) == (address, ""), "it wins all the same"
    assert doubted in choice.note and bool(choice.note) == bool(doubted)
    assert not choice.note or "--host-ip" in choice.note


@pytest.mark.parametrize(
    ("address", "netmask", "networks"),
    [
        ("2a01:4f8:1:2::7", "ffff:ffff:ffff:ffff::", ["2a01:4f8:1:2::7/128", "2a01:4f8:1:2::/64"]),
        ("2a01:4f8:1:2::7", "ffff:ffff:ffff:ff00::/56", ["2a01:4f8:1:2::7/128", "2a01:4f8:1::/56"]),
        ("2a01:4f8:1:2::7", "::", ["2a01:4f8:1:2::7/128"]),
        ("2a01:4f8:1:2::7", "ffff::", ["2a01:4f8:1:2::7/128"]),
        ("2a01:4f8:1:2::7", "ffff:0:ffff::", ["2a01:4f8:1:2::7/128"]),
        ("2a01:4f8:1:2::7", "", ["2a01:4f8:1:2::7/128"]),
        ("203.0.114.9", "255.255.255.0", ["203.0.114.9/32"]),
        ("none", "", []),
    ],
)
def test_an_address_of_this_machine_is_near_and_so_is_its_ipv6_network(
    address: str, netmask: str, networks: list[str]
) -> None:
    found = networks_near([Interface("en0", address, True, netmask)])
    assert sorted(map(str, found)) == sorted(networks)
