"""A Mac that moves to another network, or sleeps for a night: its endpoints follow, and no engine notices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import Stopwatch, gone
from tests.support.faults import Figure, fault
from tests.support.mac_part import say, standing_in
from tests.support.macs import LEASES, Mac, embedded_cluster
from tests.support.system import ISVC, SLICES, System, eventually, service

WITHIN_S = 15.0
NIGHT_S = 8 * 3600
NAMES = "one", "two", "three"


class Roaming(Mac):
    """A Mac that is told no address, and finds its own."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        at = self.flags.index("--host-ip")
        del self.flags[at : at + 2]


@pytest.fixture(scope="module")
def roaming(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    base = tmp_path_factory.mktemp("roaming")
    with embedded_cluster(base) as kubeconfig:
        # A term so long that nothing renews it by chance while a test looks.
        found = Roaming(base / "mac", "mac", kubeconfig, 1, "--lease-duration", "600")
        try:
            found.start().apply(found.tiny_model())
            yield found
        finally:
            found.close()


@pytest.fixture
def mac(roaming: System) -> Iterator[System]:
    """One that serves nothing yet."""
    yield roaming
    gone(roaming, *[each["metadata"]["name"] for each in roaming.get(ISVC)["items"]])
    eventually(lambda: not roaming.get(SLICES)["items"], 30, "their slices to go")


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


@fault(
    "M109",
    "this Mac gets another address, by DHCP or a VPN",
    happens="every slice follows; no engine is touched",
    sees="an Event AddressChanged with both, /status",
    bound="15 s, 0 engine restarts",
)
def test_every_endpoint_follows_to_another_address_within_fifteen_seconds(
    mac: System, tmp_path: Path, figure: Figure
) -> None:
    say(tmp_path, "address", "192.0.2.10")
    with standing_in(mac, "sidecar", tmp_path):
        mac.apply(*(service(name) for name in NAMES))
        pids = {name: mac.ready(name, 60) for name in NAMES}
        assert addresses(mac) == dict.fromkeys(NAMES, ("192.0.2.10", True))
        before = {each["metadata"]["name"] for each in moves(mac)}

        watch = Stopwatch(figure)
        say(tmp_path, "address", "198.51.100.7")
        watch.when(
            "address to all slices",
            lambda: eventually(
                lambda: addresses(mac) == dict.fromkeys(NAMES, ("198.51.100.7", True)), WITHIN_S, "all slices to follow"
            ),
        )
        (told,) = eventually(
            lambda: [each for each in moves(mac) if each["metadata"]["name"] not in before], what="an Event"
        )
        assert told["regarding"]["name"] == "metal-mac" and told["type"] == "Normal"
        assert "198.51.100.7" in told["note"] and "192.0.2.10" in told["note"]
        status = json.loads(mac.fetch("/status")[1])
        assert status["address"]["address"] == "198.51.100.7"
        assert {name: mac.pid(name) for name in NAMES} == pids
        figure.add("engine restarts", 0, "")


@fault(
    "M110",
    "this Mac has no address that anybody could reach, but a link-local one; later it gets one",
    happens="engines start, and none is advertised; all are once there is an address, and no engine is touched",
    sees="NoRoutableAddress, which address, and --host-ip",
    bound="0 slices; 15 s from the address to Ready",
)
def test_without_a_routable_address_nothing_is_advertised_until_there_is_one(
    mac: System, tmp_path: Path, figure: Figure
) -> None:
    say(tmp_path, "address", "169.254.3.4")
    with standing_in(mac, "sidecar", tmp_path):
        mac.apply(*(service(name) for name in NAMES))
        for name in NAMES:
            eventually(lambda name=name: "NoRoutableAddress" in mac.told(name), 60, "the reason")
            assert "169.254.3.4 is not routable; set --host-ip" in mac.told(name)
        pids = {name: mac.pid(name) for name in NAMES}
        assert addresses(mac) == {} and 0 not in pids.values()
        figure.add("slices", len(addresses(mac)), "")
        watch = Stopwatch(figure)
        say(tmp_path, "address", "192.0.2.10")
        watch.when(
            "address to all slices",
            lambda: eventually(
                lambda: addresses(mac) == dict.fromkeys(NAMES, ("192.0.2.10", True)), WITHIN_S, "all slices"
            ),
        )
        assert {name: mac.pid(name) for name in NAMES} == pids


def renewed(mac: System) -> str:
    return str(mac.get(f"{LEASES}/metal-mac")["spec"]["renewTime"])


def versions(mac: System) -> set[str]:
    return {each["metadata"]["resourceVersion"] for each in mac.get(SLICES)["items"]}


def dropped(mac: System, part: str) -> bool:
    return f"slept for {NIGHT_S} s" in (mac.state / "log" / f"world-{part}.log").read_text()


@fault(
    "H4",
    "this Mac sleeps for eight hours in the middle of two answers, of which one is the last before an edit",
    happens="Lease and slices are written and connections made anew, at once; the answers go on, the drain too",
    sees="nothing",
    bound="15 s, 0 bytes lost, 0 engine restarts",
)
def test_after_a_night_asleep_this_mac_is_back_at_once_and_no_engine_or_answer_was_touched(
    mac: System, tmp_path: Path, figure: Figure
) -> None:
    say(tmp_path, "address", "192.0.2.10")
    with standing_in(mac, "controller", tmp_path), standing_in(mac, "sidecar", tmp_path):
        mac.apply(*(service(name, contextSize=32768) for name in NAMES[:2]))
        one, two = (mac.ready(name, 60) for name in NAMES[:2])
        stream, drained = mac.stream("one", tokens=800), mac.stream("two", tokens=800).last()
        mac.apply(service("two", contextSize=16384))
        eventually(lambda: addresses(mac)["two"][1] is False, what="the drain to begin")

        lease, slices, requests = renewed(mac), versions(mac), json.loads(mac.fetch("/status")[1])["cluster"]
        watch = Stopwatch(figure)
        say(tmp_path, "slept", NIGHT_S)
        watch.when(
            "wake to Lease",
            lambda: eventually(lambda: renewed(mac) != lease, WITHIN_S, "the Lease, which was not due for long"),
        )
        watch.when(
            "wake to all slices",
            lambda: eventually(lambda: not versions(mac) & slices, WITHIN_S, "every slice written anew"),
        )
        for part in ("controller", "sidecar"):
            eventually(lambda part=part: dropped(mac, part), WITHIN_S, f"the connections of the {part} to be dropped")
        eventually(
            lambda: json.loads(mac.fetch("/status")[1])["cluster"]["reconnects"] > requests["reconnects"],
            what="the watches to begin anew",
        )
        assert drained.completed() and stream.completed(), (drained.error, stream.error)
        figure.add("answers cut", 0, "")
        eventually(lambda: mac.pid("two") not in (0, two), 30, "the edit to be followed once its answer has ended")
        mac.ready("two")
        assert mac.pid("one") == one and addresses(mac)["one"][1]
        assert [mac.observe(name)["restarts"] for name in NAMES[:2]] == [0, 0]
        events = mac.get("/apis/events.k8s.io/v1/namespaces/default/events")["items"]
        assert not {each["reason"] for each in events} & {"Crashed", "Hung", "CrashLoopBackOff", "Unresponsive"}
