"""The reflector against a real API server on its worst days."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from apiserver_support import CONFIG_MAPS, CRD_PATH, WIDGET_CRD, WIDGETS, Client, config_map, options, widget
from test_kube import answering, config

from metal_supervisor.apiserver import ApiServer
from metal_supervisor.cluster import reflector as watch_module
from metal_supervisor.cluster.kube import Kube
from metal_supervisor.cluster.reflector import Reflector
from tests.support.system import eventually

WITHIN_S = 30.0


class Ended:
    """A Kube that ends the thread which asks it."""

    kicks = 0

    def request(self, *_: Any) -> None:
        raise SystemExit

    stream = request


class CountingKube(Kube):
    """A Kube that counts its requests."""

    def __init__(self, kubeconfig: Path) -> None:
        super().__init__(kubeconfig)
        self.lists = self.watches = 0

    def request(self, method: str, path: str, query: Any = None, *more: Any, **named: Any) -> Any:
        self.lists += (query or {}).get("limit") != 1  # one item is read only to compare versions
        return super().request(method, path, query, *more, **named)

    def stream(self, *arguments: Any) -> Any:
        self.watches += 1
        return super().stream(*arguments)


class Mortal(Reflector):
    """A reflector that can be ended."""

    def run(self) -> None:
        with contextlib.suppress(SystemExit):
            super().run()


class Seen:
    """A reflector, its API, and every set of names it ever showed."""

    def __init__(self, kube: CountingKube, path: str, known: frozenset[str] = frozenset(), **more: Any) -> None:
        self.kube = kube
        self.history: list[tuple[str, ...]] = []
        self.reflector = Mortal(kube, path, self._note, known, **more)
        self.reflector.start()

    def _note(self) -> None:
        self.history.append(self.names())

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(name for _, name in self.reflector.seen.items))

    def become(self, *names: str) -> None:
        eventually(lambda: self.reflector.seen.synced and self.names() == names, WITHIN_S, f"{names}; {self.history}")

    def error(self, text: str) -> None:
        eventually(lambda: text in self.reflector.seen.error, WITHIN_S, f"{text!r} in {self.reflector.seen.error!r}")

    def connected(self) -> None:
        eventually(lambda: not self.reflector.seen.error, WITHIN_S, "the error to go")


Reflect = Callable[..., Seen]


@contextlib.contextmanager
def reflecting(directory: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reflect]:
    """Makes reflectors that don't wait long; ends them."""
    for name in ("MISSING_PAUSE_S", "FORBIDDEN_PAUSE_S", "FIRST_PAUSE_S"):
        monkeypatch.setattr(watch_module, name, 0.1)
    made: list[Seen] = []

    def make(path: str = CONFIG_MAPS, url: str = url, **more: Any) -> Seen:
        made.append(Seen(CountingKube(config(directory / f"kubeconfig{len(made)}", url)), path, **more))
        return made[-1]

    yield make
    for seen in made:
        seen.reflector._kube = Ended()  # type: ignore[assignment]
        until = time.monotonic() + 10
        while seen.reflector.is_alive() and time.monotonic() < until:
            seen.kube.close()
            seen.reflector.kick()
            seen.reflector.join(0.1)
        assert not seen.reflector.is_alive()


@pytest.fixture
def reflect(api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reflect]:
    with reflecting(tmp_path, api.url, monkeypatch) as make:
        yield make


def put(client: Client, *names: str, **data: str) -> None:
    for name in names:
        assert client.apply(f"{CONFIG_MAPS}/{name}", config_map(name, **data), "t", force="true").code < 300


def drop(client: Client, *names: str) -> None:
    for name in names:
        assert client.delete(f"{CONFIG_MAPS}/{name}").code == 200


def established(seen: Seen, client: Client) -> Seen:
    """Waits until a watch is open: one that is only being opened is not closed by a fault."""
    names = seen.names()
    put(client, "up")
    seen.become(*sorted((*names, "up")))
    drop(client, "up")
    seen.become(*names)
    return seen


def fault(client: Client, close: bool = True, **rule: Any) -> None:
    assert client.post("/faults", [{"resource": "configmaps", "close_watches": close, **rule}]).code == 200


def test_a_list_and_a_watch_deliver_what_is_added_changed_and_deleted(reflect: Reflect, client: Client) -> None:
    put(client, "a", "b")
    seen = reflect()
    seen.become("a", "b")
    put(client, "c", k="1")
    seen.become("a", "b", "c")
    put(client, "c", k="2")
    items = seen.reflector
    eventually(lambda: items.seen.items[("default", "c")]["data"] == {"k": "2"}, WITHIN_S, "the change")
    drop(client, "a")
    seen.become("b", "c")
    assert all("managedFields" not in item["metadata"] for item in seen.reflector.seen.items.values())
    assert seen.kube.lists == 1


def test_an_empty_collection_is_synced_too(reflect: Reflect) -> None:
    reflect().become()


def test_it_resumes_after_a_dropped_connection_without_a_list(reflect: Reflect, client: Client) -> None:
    put(client, "a")
    seen = reflect()
    seen.become("a")
    established(seen, client)
    fault(client, verb="watch", action={"drop": True}, times=2)
    put(client, "b")
    drop(client, "a")
    seen.become("b")
    eventually(lambda: seen.kube.watches >= 3, what="a third watch, after two that were dropped")
    seen.connected()
    assert seen.kube.lists == 1


@pytest.mark.parametrize("action", [{"expire": True}, {"status": 410}])
def test_a_version_that_is_too_old_leads_to_a_list(reflect: Reflect, client: Client, action: Any) -> None:
    put(client, "a", "z")
    seen = reflect()
    seen.become("a", "z")
    established(seen, client)
    fault(client, verb="watch", action=action, times=1)
    drop(client, "a")
    put(client, "b")
    seen.become("b", "z")
    eventually(lambda: seen.kube.lists == 2, WITHIN_S, "a second list")


@pytest.mark.parametrize("action", [{"expire": True}, {"status": 410}])
def test_a_server_that_always_says_gone_is_not_asked_in_a_tight_loop(
    reflect: Reflect, client: Client, action: Any
) -> None:
    seen = reflect()
    seen.become()
    established(seen, client)
    fault(client, verb="watch", action=action)
    eventually(lambda: seen.kube.watches >= 3, WITHIN_S, "the fault to be met")
    before = seen.kube.watches
    threading.Event().wait(0.5)
    assert seen.kube.watches - before < 10


def test_watches_that_keep_failing_are_tried_less_and_less(
    reflect: Reflect, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "FIRST_PAUSE_S", 0.01)
    seen = reflect()
    seen.become()
    established(seen, client)
    fault(client, verb="watch", action={"status": 500})
    seen.error("500")
    threading.Event().wait(1.5)
    assert seen.kube.watches < 15


@pytest.mark.parametrize(
    "action", [{"garbage": True}, {"status": 500}, {"status": 403}, {"status": 429, "retry_after_s": 1}, {"drop": True}]
)
def test_nothing_is_ever_deleted_because_of_an_error(reflect: Reflect, client: Client, action: Any) -> None:
    put(client, "a")
    seen = reflect()
    seen.become("a")
    established(seen, client)
    fault(client, action=action)
    eventually(lambda: seen.reflector.seen.error, WITHIN_S, "an error")
    threading.Event().wait(0.3)
    assert seen.history.count(()) == 0
    client.delete("/faults")
    put(client, "b")
    seen.reflector.kick()
    seen.become("a", "b")
    seen.connected()


@pytest.mark.parametrize(
    "action", [{"garbage": True}, {"status": 500}, {"status": 403}, {"status": 401}, {"drop": True}, {"status": 410}]
)
def test_a_first_list_that_fails_is_not_an_empty_list(reflect: Reflect, client: Client, action: Any) -> None:
    put(client, "a")
    fault(client, verb="list", action=action)
    seen = reflect()
    eventually(lambda: seen.kube.lists >= 2, WITHIN_S, "a second attempt")
    assert not seen.reflector.seen.synced
    client.delete("/faults")
    seen.reflector.kick()
    seen.become("a")


def test_a_crd_that_is_missing_is_named_and_found_once_it_is_there(reflect: Reflect, client: Client) -> None:
    seen = reflect(WIDGETS)
    seen.error("widgets are not served: the CRD is not installed")
    assert not seen.reflector.seen.synced and seen.reflector.failures
    assert client.post(CRD_PATH, WIDGET_CRD).code == 201
    assert client.post(WIDGETS, widget("w")).code == 201
    seen.become("w")
    seen.connected()
    assert not seen.reflector.failures, "a watch that is open goes well, however long it lasts"


def test_a_forbidden_verb_is_named(reflect: Reflect, client: Client) -> None:
    fault(client, verb="watch", action={"status": 403, "message": "no"})
    seen = reflect()
    seen.error("forbidden")
    seen.error('cannot watch configmaps in namespace "default"; grant the verb "watch"')


def test_a_hanging_watch_is_given_up(reflect: Reflect, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metal_supervisor.cluster.kube.WATCH_READ_S", 0.2)
    fault(client, verb="watch", action={"hang_s": 20}, times=1)
    seen = reflect()
    seen.error("ReadTimeoutError")
    put(client, "a")
    seen.become("a")


def test_an_api_that_restarts_is_caught_up_with(reflect: Reflect, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with ApiServer(options(tmp_path / "other")) as first:
        port = first.port
        with Client(port) as client:
            put(client, "a", "b")
        seen = reflect(url=first.url)
        seen.become("a", "b")
    seen.error("configmaps")
    with ApiServer(options(tmp_path / "other", port=port)), Client(port) as client:
        drop(client, "a")
        seen.become("b")
        assert () not in seen.history


def test_a_first_list_without_anything_remembered_is_doubted(
    reflect: Reflect, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reflector, "CONFIRM_S", 1.0)
    put(client, "stranger")
    seen = reflect(known=frozenset({"uid-of-before"}))
    eventually(lambda: seen.reflector.seen.doubtful_until, WITHIN_S, "doubt")
    assert seen.names() == ("stranger",)
    eventually(lambda: not seen.reflector.seen.doubtful_until, WITHIN_S, "belief")


def test_what_comes_back_while_in_doubt_ends_the_doubt_with_nothing_lost(
    reflect: Reflect, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reflector, "CONFIRM_S", 1.2)
    put(client, "a")
    uid = client.get(f"{CONFIG_MAPS}/a").body["metadata"]["uid"]
    seen = reflect(known=frozenset({uid}))
    seen.become("a")
    assert seen.reflector.seen.doubtful_until == 0.0


@contextlib.contextmanager
def restored(tmp_path: Path) -> Iterator[tuple[Callable[[], ApiServer], str]]:
    """A server's data with `a`, copied before `b` was added: (starts a server on the copy, URL of both)."""
    directory = tmp_path / "other"
    directory.mkdir()
    with ApiServer(options(directory)) as first, Client(first.port) as client:
        put(client, "a")
        port, url = first.port, first.url
    copy = shutil.copytree(directory, tmp_path / "copy")

    def start() -> ApiServer:
        return ApiServer(options(copy, port=port))

    with ApiServer(options(directory, port=port)), Client(port) as client:
        put(client, "b", "c")
        yield start, url


def test_a_restored_server_is_listed_again_and_what_it_lacks_is_known(reflect: Reflect, tmp_path: Path) -> None:
    with restored(tmp_path) as (start, url):
        seen = reflect(url=url)
        seen.become("a", "b", "c")
        assert seen.reflector.seen.went_back_at == 0.0
    with start() as server, Client(server.port) as client:
        seen.become("a")
        assert seen.reflector.seen.went_back_at > 0.0
        put(client, "new")
        seen.become("a", "new")


def test_a_restore_while_nothing_watched_is_noticed_by_the_next_process(reflect: Reflect, tmp_path: Path) -> None:
    with restored(tmp_path) as (start, url):
        before = reflect(url=url)
        before.become("a", "b", "c")
    with start():
        after = reflect(url=url, history=before.reflector.history)
        after.become("a")
        assert after.reflector.seen.went_back_at > 0.0


def test_a_server_that_restarts_with_its_own_data_has_not_gone_back(reflect: Reflect, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with ApiServer(options(tmp_path / "other")) as first, Client(first.port) as client:
        put(client, "a")
        seen = reflect(url=first.url)
        seen.become("a")
    with ApiServer(options(tmp_path / "other", port=first.port)) as second, Client(second.port) as client:
        put(client, "b")
        seen.become("a", "b")
    assert (seen.reflector.seen.went_back_at, seen.kube.lists) == (0.0, 1)


def lines(*events: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
    body = b"".join(events)
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


LIST = b'{"metadata": {"resourceVersion": "1"}, "items": []}'
ADDED = b'{"type": "ADDED", "object": {"metadata": {"name": "a", "namespace": "default", "resourceVersion": "2"}}}\n'


def test_blank_lines_are_nothing(reflect: Reflect) -> None:
    def answer(request: bytes) -> bytes:
        return lines(b"\n \r\n", ADDED, b"\n") if b"watch=true" in request else lines(LIST)

    with answering(answer) as url:
        seen = reflect(url=url)
        seen.become("a")
        assert seen.reflector.seen.error == ""


@pytest.mark.parametrize(
    "line",
    [
        b"7",
        b"null",
        b"[]",
        b"{}",
        b'""',
        b"\xff",
        b'{"type": "ADDED"}',
        b'{"type": "ADDED", "object": null}',
        b'{"type": "ERROR", "object": null}',
        b'{"type": "ERROR", "object": {"code": "x"}}',
        b"[" * 100_000,
        b'{"type": "ADDED", "object": {"metadata": {"name": {}, "resourceVersion": "2"}}}',
        b'{"type": "ADDED", "object": {"metadata": {"name": "a"}}}',
        b'{"type": {}, "object": {"metadata": []}}',
        b'{"type": "ADDED", "object": {"metadata": {"name": "a", "resourceVersion": {}}}}',
        b'{"type": "ERROR", "object": {"code": 1e999}}',
        b'{"type": "ADDED", "object": {"metadata": {"name": "a", "uid": {}, "resourceVersion": "2"}}}',
        b'{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "%s"}}}' % (b"9" * 5000),
    ],
)
def test_a_garbage_line_is_an_error_and_the_reflector_lives_on(reflect: Reflect, line: bytes) -> None:
    bad = threading.Event()
    bad.set()

    def answer(request: bytes) -> bytes:
        if b"watch=true" not in request:
            return lines(LIST)
        return lines(line + b"\n") if bad.is_set() else lines(ADDED)

    with answering(answer) as url:
        seen = reflect(url=url)
        eventually(
            lambda: seen.kube.watches >= 2 or seen.reflector.seen.error or not seen.reflector.is_alive(),
            WITHIN_S,
            "the line to be read",
        )
        bad.clear()
        seen.reflector.kick()
        seen.become("a")


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"[]",
        b'{"items": null}',
        b'{"items": [null]}',
        b'{"items": [{}]}',
        b'{"items": []}',
        b'{"metadata": null, "items": []}',
        b'{"metadata": {"resourceVersion": null}, "items": [{"metadata": 7}]}',
        b'{"metadata": {"resourceVersion": "1"}, "items": [{"metadata": {"name": "a", "uid": {}}}]}',
    ],
)
def test_a_list_without_the_shape_of_one_is_not_an_empty_list(reflect: Reflect, body: bytes) -> None:
    with answering(lambda _: lines(body)) as url:
        seen = reflect(url=url)
        eventually(lambda: seen.kube.lists >= 2, WITHIN_S, "a second attempt")
        assert seen.reflector.is_alive() and not seen.reflector.seen.synced


def test_an_enormous_line_is_refused(reflect: Reflect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "LONGEST_LINE_BYTES", 1000)
    with answering(lambda r: lines(b"x" * 5000) if b"watch=true" in r else lines(LIST)) as url:
        reflect(url=url).error("exceeds")


def test_a_server_that_asks_for_ages_of_patience_does_not_end_the_reflector(reflect: Reflect) -> None:
    slow = b"HTTP/1.1 429 Slow\r\nRetry-After: 99999999999999\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
    with answering(lambda _: slow) as url:
        seen = reflect(url=url)
        seen.error("429")
        threading.Event().wait(0.2)
        assert seen.reflector.is_alive()


def test_a_namespace_that_does_not_exist_is_told_until_it_is_there(
    reflect: Reflect, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers a list of such a namespace as an empty one."""
    monkeypatch.setattr(watch_module, "NO_NAMESPACE_AGAIN_S", 0.2)
    seen = reflect("/api/v1/namespaces/nosuch/configmaps", namespace="nosuch")
    eventually(lambda: seen.reflector.no_namespace, WITHIN_S, "the missing namespace to be noticed")
    assert seen.reflector.seen.synced and not seen.reflector.seen.error and seen.history
    assert client.request("POST", "/api/v1/namespaces", {"metadata": {"name": "nosuch"}}).code == 201
    eventually(lambda: not seen.reflector.no_namespace, WITHIN_S, "the namespace to be found")
    other = reflect("/api/v1/namespaces/default/configmaps", namespace="default")
    other.become()
    assert not other.reflector.no_namespace
