"""What a Mac makes of the Leases it sees: who watches over it, and whether another one goes by its name."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor.cluster.reflector import Watched
from metal_supervisor.placement import leases, placement
from metal_supervisor.placement.placement import REAPER_STALE_S, Placement
from metal_supervisor.settings.loader import Settings
from metal_supervisor.state.directory import SESSION_FILE, StateDir


class NoKube:
    """A cluster that nobody asks: what is watched is put in by the test."""

    kicks, clock_offset_s, server_name = 0, 0.0, "https://none.invalid"

    def when_kicked(self, action: Any) -> None:
        pass


class Seen:
    """A Placement, and what its watch shows it."""

    def __init__(self, state: Path, *leases: dict[str, Any]) -> None:
        directory = StateDir(state)
        self.placement = Placement(Settings(kubeconfig="x"), directory, NoKube(), "mac-a", lambda: None)  # type: ignore[arg-type]
        self.placement._leases.connected_at = time.monotonic() - REAPER_STALE_S - 1
        self.show(*leases)

    def show(self, *leases: dict[str, Any]) -> None:
        items = {(each["metadata"]["namespace"], each["metadata"]["name"]): each for each in leases}
        self.placement._leases.seen = Watched(items, True)
        self.placement.place({}, (), {}, lambda _: 0.0)


def node(name: str, session: str = "", duration_s: float = 40.0, version: str = "1") -> dict[str, Any]:
    body = leases.node_lease_object("default", name, duration_s, {leases.SESSION: session}, "t")
    body["metadata"]["resourceVersion"] = version
    return body


def reaper() -> dict[str, Any]:
    metadata = {"namespace": "default", "name": leases.REAPER_LEASE, "resourceVersion": "7"}
    return {"metadata": {**metadata, "labels": {leases.KIND: "reaper"}}}


def test_a_mac_that_nobody_watches_over_says_so(tmp_path: Path) -> None:
    seen = Seen(tmp_path, node("mac-a"))
    assert "conf/reaper/reaper.yaml" in seen.placement.unwatched
    for other in (node("mac-b"), reaper()):
        seen.show(node("mac-a"), other)
        assert seen.placement.unwatched == ""
        seen.show(node("mac-a"))
        assert seen.placement.unwatched
    seen.show(node("mac-a"), node("mac-b", duration_s=0.0))
    assert seen.placement.unwatched, "a Mac that stopped watches over nobody"


def test_a_renewal_counts_from_when_it_came_and_wakes_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(tmp_path, node("mac-a"), node("mac-b"))
    now = time.monotonic()
    monkeypatch.setattr(placement.time, "monotonic", lambda: now + 7.0)
    assert seen.placement._leases._is_news(node("mac-b"), node("mac-b", version="2")) is False
    monkeypatch.setattr(placement.time, "monotonic", lambda: now + 20.0)
    seen.show(node("mac-a", version="2"), node("mac-b", version="2"))
    name = leases.node_lease_name("mac-b")
    assert seen.placement._sightings["default", name].at == now + 7.0
    assert seen.placement._leases._is_news(node("mac-b"), node("mac-b", duration_s=0.0, version="3")) is True
    seen.show(node("mac-a", version="2"), node("mac-b", duration_s=0.0, version="3"))
    assert seen.placement._sightings["default", name].at == now + 20.0
    seen.show(node("mac-a", version="2"))
    assert not seen.placement._renewals


def test_when_writes_fail_for_all_none_takes_another_for_dead_and_one_that_returns_is_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen(tmp_path, node("mac-a"), node("mac-b"))
    now = time.monotonic()

    def at(later_s: float, name: str, version: int) -> bool:
        """A renewal comes; True if it makes a pass."""
        monkeypatch.setattr(placement.time, "monotonic", lambda: now + later_s)
        return seen.placement._leases._is_news(node(name, version=str(version - 1)), node(name, version=str(version)))

    def silent(own: int, other: int) -> bool:
        seen.show(node("mac-a", version=str(own)), node("mac-b", version=str(other)))
        return ("default", "mac-b") in seen.placement._silent

    for version, later_s in ((2, 5.0), (3, 15.0)):
        assert not at(later_s, "mac-a", version) and not at(later_s + 1, "mac-b", version)
    assert not at(65.0, "mac-a", 4) and not silent(4, 3), "it may be the first that is back"
    for version, later_s in ((5, 75.0), (6, 85.0), (7, 95.0), (8, 105.5)):
        at(later_s, "mac-a", version)
    assert silent(8, 3), "a whole term after that"
    at(145.0, "mac-a", 9)
    assert silent(9, 3), "who was silent before another outage is so after it"
    assert at(146.0, "mac-b", 4) is True and not silent(9, 4)


def test_nothing_is_said_before_everybody_could_have_been_seen(tmp_path: Path) -> None:
    seen = Seen(tmp_path)
    seen.placement._leases.connected_at = time.monotonic()
    seen.show(node("mac-a"))
    assert seen.placement.unwatched == ""


@pytest.mark.parametrize(("foreign", "gives_way"), [("100-x", True), ("300-x", False)])
def test_of_two_macs_with_one_name_the_later_gives_way(tmp_path: Path, foreign: str, gives_way: bool) -> None:
    (tmp_path / SESSION_FILE).write_text(json.dumps(["150-before", "200-us"]))
    seen = Seen(tmp_path, node("mac-a", "200-us"))
    assert not seen.placement.cloned
    seen.show(node("mac-a", foreign, version="2"))
    assert seen.placement.cloned is gives_way


@pytest.mark.parametrize("how", ["silent", "released", "deleted"])
def test_once_the_other_mac_has_another_name_this_one_writes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    (tmp_path / SESSION_FILE).write_text(json.dumps(["200-us"]))
    seen = Seen(tmp_path, node("mac-a", "200-us"))
    seen.show(node("mac-a", "100-x", version="2"))
    assert seen.placement.cloned
    now = time.monotonic()
    monkeypatch.setattr(placement.time, "monotonic", lambda: now + placement.CLONE_GONE_S - 1)
    seen.show(node("mac-a", "100-x", version="2"))
    assert seen.placement.cloned, "it may be slow"
    if how == "silent":
        monkeypatch.setattr(placement.time, "monotonic", lambda: now + placement.CLONE_GONE_S + 1)
        seen.show(node("mac-a", "100-x", version="2"))
    elif how == "released":
        seen.show(node("mac-a", "100-x", duration_s=0.0, version="3"))
    else:
        seen.show()
    assert not seen.placement.cloned
    seen.show(node("mac-a", "200-us", version="4"))
    seen.show(node("mac-a", "100-x", version="5"))
    assert seen.placement.cloned, "it is back"


def test_a_session_of_our_own_past_is_no_stranger(tmp_path: Path) -> None:
    (tmp_path / SESSION_FILE).write_text(json.dumps(["150-before", "200-us"]))
    seen = Seen(tmp_path, node("mac-a", "100-long-ago"))
    assert not seen.placement.cloned, "what was there before us was left behind, not written by another"
    seen.show(node("mac-a", "200-us", version="2"))
    seen.show(node("mac-a", "150-before", version="3"))
    assert not seen.placement.cloned
