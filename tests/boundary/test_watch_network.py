"""The reflector on a network that goes silent, breaks or moves: nothing is lost, and nobody waits for ever."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from apiserver_support import CONFIG_MAPS, Client, options
from test_kube_network import Forwarder, forwarding
from test_watch import Reflect, drop, fault, put, reflecting

from metal_supervisor.apiserver import ApiServer
from metal_supervisor.cluster import kube as kube_module
from metal_supervisor.cluster import reflector as watch_module
from metal_supervisor.cluster.kube import Kube
from metal_supervisor.cluster.reflector import Reflector
from tests.support.system import eventually

WITHIN_S = 30.0


@pytest.fixture
def way(api: ApiServer) -> Iterator[Forwarder]:
    with forwarding(api.port) as made:
        yield made


@pytest.fixture
def reflect(api: ApiServer, way: Forwarder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reflect]:
    """Makes reflectors that reach the API by that way."""
    url = api.url.replace(f"http://127.0.0.1:{api.port}", way.url)
    with reflecting(tmp_path, url, monkeypatch) as make:
        yield make


def test_a_half_open_watch_is_given_up_and_resumed_without_losing_an_event(
    reflect: Reflect, way: Forwarder, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_module, "WATCH_READ_S", 0.5)
    put(client, "a", "b")
    seen = reflect()
    seen.become("a", "b")
    way.go_silent()
    put(client, "c")
    drop(client, "a")
    seen.error("ReadTimeoutError")
    assert seen.names() == ("a", "b")  # what was known is still what is known
    way.heal()
    seen.become("b", "c")
    seen.connected()
    assert seen.kube.lists == 1
    assert ("a", "b", "c") in seen.history  # each event, and not only what came of them


def test_a_watch_that_is_reset_is_resumed_without_losing_an_event(
    reflect: Reflect, way: Forwarder, client: Client
) -> None:
    put(client, "a")
    seen = reflect()
    seen.become("a")
    for number in range(5):
        way.reset()
        put(client, f"b{number}")
    seen.become("a", "b0", "b1", "b2", "b3", "b4")
    seen.connected()
    assert seen.kube.lists == 1
    assert all("a" in names for names in seen.history)


def test_a_kick_ends_a_watch_that_waits_and_everything_is_listed_anew(
    reflect: Reflect, way: Forwarder, client: Client
) -> None:
    put(client, "a")
    seen = reflect()
    seen.become("a")
    eventually(lambda: seen.kube.watches == 1, WITHIN_S, "the watch")
    way.go_silent()  # the limits of half-open connections are more than a minute away
    put(client, "b")
    way.heal()
    seen.kube.kick()
    seen.become("a", "b")
    assert seen.kube.lists == 2
    assert seen.reflector.seen.error == ""


def test_a_kick_at_any_moment_leads_to_a_list_and_is_no_trouble_of_the_clusters(
    reflect: Reflect, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    put(client, "a")
    seen = reflect()
    seen.become("a")
    for number in range(2, 12):
        seen.kube.kick()
        eventually(lambda number=number: seen.kube.lists >= number, WITHIN_S, "a list")
    assert "cluster trouble" not in caplog.text
    assert seen.history == [("a",)]  # and no news


def test_a_kick_ends_the_pause_after_a_failure(
    reflect: Reflect, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "FORBIDDEN_PAUSE_S", 600.0)
    fault(client, verb="list", action={"status": 403}, times=1)
    seen = reflect()
    seen.error("forbidden")
    seen.kube.kick()
    seen.become()


def test_a_server_that_goes_away_and_comes_back_is_caught_up_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "other"
    directory.mkdir()
    server = ApiServer(options(directory))
    with contextlib.ExitStack() as stack:
        with server, Client(server.port) as client:
            put(client, "a")
            reflect = stack.enter_context(reflecting(tmp_path, server.url, monkeypatch))
            seen = reflect()
            seen.become("a")
        for name in ("b", "c"):
            seen.error("refused")
            assert "a" in seen.names()
            with ApiServer(options(directory, port=server.port)) as again, Client(again.port) as client:
                put(client, name)
                eventually(lambda name=name: name in seen.names(), WITHIN_S, name)
                seen.connected()
        assert all("a" in names for names in seen.history)


def test_a_cluster_that_was_rebuilt_is_found_out_by_the_next_list_even_on_a_silent_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its versions went back, so the watch is accepted and silent; and all uids are others, which is said twice."""
    monkeypatch.setattr(watch_module, "RELIST_S", 1.2)
    monkeypatch.setattr(Reflector, "CONFIRM_S", 0.5)
    with contextlib.ExitStack() as stack:
        servers = []
        for name in ("old", "new"):
            (tmp_path / name).mkdir()
            servers.append(stack.enter_context(ApiServer(options(tmp_path / name))))
        old, new = servers
        way = stack.enter_context(forwarding(old.port))
        prefix = old.url.partition(f":{old.port}")[2]
        assert new.url.endswith(prefix)
        with Client(old.port) as client:
            for number in range(50):
                put(client, "a", k=str(number))
            put(client, "same")
        with Client(new.port) as client:
            put(client, "same")
            assert int(client.version()) < 50
        reflect = stack.enter_context(reflecting(tmp_path, way.url + prefix, monkeypatch))
        seen = reflect()
        seen.become("a", "same")
        before = seen.reflector.seen.items[("default", "same")]["metadata"]["uid"]
        way._target = new.port
        way.reset()
        with Client(new.port) as client:
            put(client, "b")
        eventually(lambda: seen.reflector.seen.doubtful_until, WITHIN_S, "doubt")
        assert {"a", "same"} <= set(seen.names())  # nothing is gone before it is said again
        eventually(lambda: not seen.reflector.seen.doubtful_until, WITHIN_S, "belief")
        seen.become("b", "same")
        assert seen.reflector.seen.items[("default", "same")]["metadata"]["uid"] != before


def test_the_limit_of_a_watch_ends_with_the_next_list(reflect: Reflect, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    stream = Kube.stream

    def note(kube: Kube, path: str, query: dict[str, int]) -> object:
        asked.append(query["timeoutSeconds"])
        return stream(kube, path, query)

    monkeypatch.setattr(Kube, "stream", note)
    assert (watch_module.RELIST_S, watch_module.WATCH_S) == (1800.0, 300.0)
    monkeypatch.setattr(watch_module, "RELIST_S", 20.0)
    seen = reflect()
    seen.become()
    eventually(lambda: asked, WITHIN_S, "a watch")
    assert 1 <= asked[0] <= 22
    monkeypatch.setattr(watch_module, "RELIST_S", 600.0)
    seen.kube.kick()
    eventually(lambda: len(asked) == 2, WITHIN_S, "a second")
    assert 239 <= asked[1] <= 300


def test_reflectors_share_a_kube_and_a_kick(
    api: ApiServer, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reflecting(tmp_path, api.url, monkeypatch) as reflect:
        first = reflect()
        first.become()
        woken = threading.Event()
        other = Reflector(first.kube, CONFIG_MAPS, woken.set)
        assert first.kube._on_kick == [first.reflector.kick, other.kick]
