"""Where models may be fetched from: names that are allowed, and addresses that nobody outside could mean well with."""

from __future__ import annotations

import ipaddress

import pytest

from metal_supervisor.models.remote.source_policy import SourcePolicy, is_public

PUBLIC = [
    "1.1.1.1",
    "8.8.8.8",
    "172.32.0.1",
    "100.128.0.1",
    "2606:4700::1111",
    "::ffff:8.8.8.8",
    "64:ff9b::808:808",
    "2002:808:808::1",
]
PRIVATE = [
    "0.0.0.0",
    "10.0.0.1",
    "100.64.0.1",
    "100.127.255.255",
    "127.0.0.1",
    "127.9.9.9",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "198.18.0.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "fe80::1",
    "fec0::1",
    "fc00::1",
    "fd00:ec2::254",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:100.64.0.1",
    "::7f00:1",
    "::ffff:0:7f00:1",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::7f00:1",
    "2002:7f00:1::",
    "2002:c0a8:101::1",
    "2001:db8::1",
    "2001::1",
    "100::1",
    "5f00::1",
]


@pytest.mark.parametrize("address", PUBLIC)
def test_an_address_of_the_internet_will_do(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))
    assert SourcePolicy().allows_address("h.example", ipaddress.ip_address(address))


@pytest.mark.parametrize("address", PRIVATE)
def test_any_other_address_needs_leave(address: str) -> None:
    found = ipaddress.ip_address(address)
    assert not is_public(found)
    assert not SourcePolicy().allows_address("h.example", found)
    assert SourcePolicy(private=("h.example",)).allows_address("h.example", found)
    assert SourcePolicy(private=("example",)).allows_address("H.example.", found)
    assert SourcePolicy(private=(f"{address}/{found.max_prefixlen}",)).allows_address("h.example", found)
    assert not SourcePolicy(private=("9.9.9.0/24", "2620:fe::/48", "other.example")).allows_address("h.example", found)
    assert SourcePolicy(lax=True).allows_address("h.example", found)


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("example.com", True),
        ("EXAMPLE.com.", True),
        ("cdn.example.com", True),
        ("evilexample.com", False),
        ("example.com.evil.org", False),
        ("example.co", False),
        ("com", False),
        ("", False),
        ("10.0.0.1", False),
    ],
)
def test_a_host_that_is_allowed_has_its_subdomains_and_nobody_else(host: str, allowed: bool) -> None:
    assert SourcePolicy(hosts=("Example.com",)).allows_host(host) is allowed
    assert SourcePolicy().allows_host(host)


def test_a_network_is_no_name_and_a_name_is_no_network() -> None:
    rules = SourcePolicy(private=("10.0.0.0/8", "nas"))
    assert rules.allows_address("any.example", ipaddress.ip_address("10.1.2.3"))
    assert not rules.allows_address("any.example", ipaddress.ip_address("192.168.1.1"))
    assert rules.allows_address("nas", ipaddress.ip_address("192.168.1.1"))
    assert not rules.allows_address("nasty", ipaddress.ip_address("192.168.1.1"))


NEAR = [ipaddress.ip_network(each) for each in ("2a01:db8:1:2::/64", "2a01:db8:9::7/128", "203.0.114.9/32")]


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("2a01:db8:1:2::1", False),
        ("2a01:db8:1:2:ffff::1", False),
        ("2a01:db8:1:3::1", True),
        ("2a01:db8:9::7", False),
        ("2a01:db8:9::8", True),
        ("203.0.114.9", False),
        ("203.0.114.10", True),
        ("::ffff:203.0.114.9", False),
        ("64:ff9b::cb00:7209", False),
        ("2002:cb00:7209::1", False),
        ("2606:4700::1111", True),
        ("192.168.1.1", False),
    ],
)
def test_this_mac_and_its_ipv6_neighbours_are_not_the_internet(address: str, public: bool) -> None:
    found = ipaddress.ip_address(address)
    assert is_public(found, NEAR) is public
    assert SourcePolicy().allows_address("h.example", found, 443, NEAR) is public
    assert SourcePolicy(private=("h.example",)).allows_address("h.example", found, 443, NEAR)
