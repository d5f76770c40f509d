"""This machine's interfaces and its resolver, as they really are."""

from __future__ import annotations

import ipaddress

import pytest

from metal_supervisor.host import addresses, machine


def test_every_interface_has_an_address_that_can_be_read() -> None:
    found = machine.interfaces()
    assert any(each.address == "127.0.0.1" and each.up for each in found)
    for each in found:
        ipaddress.ip_address(each.address)
    assert machine.own_addresses() == {each.address for each in found}


def test_a_name_has_addresses_or_none() -> None:
    assert "127.0.0.1" in addresses.look_up("localhost")
    assert addresses.look_up("no-such-name.invalid") == ()


def test_the_network_is_seen_from_the_servers_url(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[addresses.NetworkView]()
    monkeypatch.setattr(addresses, "choose", lambda _asked, around: seen.append(around))
    addresses.advertised("", "https://127.0.0.1:6443/some/path", embedded=False)
    addresses.advertised("", "https://[::1]", embedded=False)
    assert (seen[0].route, seen[1].server) == ("127.0.0.1", "::1")


def test_a_choice_is_always_made() -> None:
    for server in ("https://127.0.0.1:6443", "https://no-such-name.invalid", "nonsense"):
        choice = addresses.advertised("", server, embedded=False)
        assert bool(choice.address) != bool(choice.problem)
