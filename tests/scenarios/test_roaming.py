"""A Mac that moves to another network, or sleeps for a night: its endpoints follow, and no engine notices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mac_part import say, standing_in
from tests.macs import Mac, embedded_cluster
from tests.system import SLICES, System, eventually, service

WITHIN_S = 15.0
NAMES = "one", "two", "three"


class Roaming(Mac):
    """A Mac that is told no address, and finds its own."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        at = self.flags.index("--host-ip")
        del self.flags[at : at + 2]


@pytest.fixture
def mac(tmp_path: Path) -> Iterator[System]:
    with embedded_cluster(tmp_path) as kubeconfig:
        found = Roaming(tmp_path / "mac", "mac", kubeconfig, 1)
        try:
            yield found.start()
        finally:
            found.close()


def addresses(mac: System) -> dict[str, tuple[str, bool]]:
    """Service -> (address, ready) of this Mac's slices."""
    found = {}
    for each in mac.get(SLICES)["items"]:
        (endpoint,) = each["endpoints"]
        name = each["metadata"]["labels"]["kubernetes.io/service-name"]
        found[name] = endpoint["addresses"][0], endpoint["conditions"]["ready"]
    return found


def moves(mac: System) -> list[dict[str, Any]]:
    events = mac.get("/apis/events.k8s.io/v1/namespaces/default/events")["items"]
    return [each for each in events if each["reason"] == "AddressChanged"]


def test_every_endpoint_follows_to_another_address_within_fifteen_seconds(mac: System, tmp_path: Path) -> None:
    say(tmp_path, "address", "192.0.2.10")
    with standing_in(mac, "sidecar", tmp_path):
        mac.apply(mac.tiny_model(), *(service(name) for name in NAMES))
        pids = {name: mac.ready(name, 60) for name in NAMES}
        assert addresses(mac) == dict.fromkeys(NAMES, ("192.0.2.10", True)) and moves(mac) == []

        say(tmp_path, "address", "198.51.100.7")
        eventually(
            lambda: addresses(mac) == dict.fromkeys(NAMES, ("198.51.100.7", True)), WITHIN_S, "all slices to follow"
        )
        (told,) = eventually(lambda: moves(mac), what="an Event")
        assert told["regarding"]["name"] == "metal-mac" and told["type"] == "Normal"
        assert "198.51.100.7" in told["note"] and "192.0.2.10" in told["note"]
        status = json.loads(mac.fetch("/status")[1])
        assert status["address"]["address"] == "198.51.100.7"
        assert {name: mac.pid(name) for name in NAMES} == pids
