"""What a watch may say: twice, late, cut off, in the wrong order, or that it won't. Told by a script, line by line."""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import re
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from apiserver_support import CRD_PATH, WIDGET_CRD, WIDGETS, Client, widget
from test_kube import TOKEN, config
from test_watch import Reflect, Seen, drop, established, fault, put, reflecting

from metal_supervisor.apiserver import ApiServer
from metal_supervisor.cluster import decoding
from metal_supervisor.cluster import reflector as watch_module
from metal_supervisor.cluster.decoding import MOST_LEVELS, decode
from metal_supervisor.cluster.reflector import Reflector
from tests.support.system import eventually

WITHIN_S = 30.0
HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
END = object()
CUT = object()
RESET = object()
"""Ends of a stream: in order, in the middle of a chunk, with RST."""


def item(name: str, version: int | str, uid: str = "", **data: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "default", "uid": uid or f"uid-{name}", "resourceVersion": str(version)}
    return {"metadata": metadata, "data": data}


def event(kind: str, name: str, version: int | str, uid: str = "", **data: str) -> bytes:
    return json.dumps({"type": kind, "object": item(name, version, uid, **data)}).encode() + b"\n"


def bookmark(version: int) -> bytes:
    return json.dumps({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(version)}}}).encode() + b"\n"


def trouble(code: int, **more: Any) -> bytes:
    status = {"code": code, "reason": "R", "message": "m", **more}
    return json.dumps({"type": "ERROR", "object": status}).encode() + b"\n"


class Script:
    """An API that says what it is told to say."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.deep = b""
        """Stands in a list for the text DEEP."""
        self.version = "10"
        self.newest = "999999"
        """Version in the answer to a request for one item."""
        self.refusals: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        """(status line, further header lines) with which the next requests are refused."""
        self.says: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.asked: list[tuple[float, str]] = []
        """When, and `list` or the resourceVersion that a watch began from."""

    def say(self, *what: Any) -> None:
        for each in what:
            self.says.put(each)

    @property
    def watches(self) -> list[str]:
        return [what for _, what in self.asked if what != "list"]

    @property
    def lists(self) -> list[float]:
        return [at for at, what in self.asked if what == "list"]

    def _next(self, client: socket.socket) -> Any:
        """What is to be said next, as long as somebody listens."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self.says.get(timeout=0.02)
            with contextlib.suppress(BlockingIOError):
                if not client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    return END

    def serve(self, connection: socketserver.StreamRequestHandler) -> None:
        path = connection.rfile.readline().decode()
        while connection.rfile.readline() not in (b"\r\n", b""):
            pass
        if not path:
            return
        if "limit=1 " in path:
            body = json.dumps({"metadata": {"resourceVersion": self.newest}, "items": []}).encode()
            connection.wfile.write(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            return
        found = re.search(r"resourceVersion=(\w+)", path)
        self.asked.append((time.monotonic(), found[1] if found else "list"))
        with contextlib.suppress(queue.Empty):
            status, headers = self.refusals.get_nowait()
            head = f"HTTP/1.1 {status}\r\n{headers}Connection: close\r\nContent-Length: 2\r\n\r\n"
            connection.wfile.write(head.encode() + b"{}")
            return
        if not found:
            first, last = (int((re.search(rf"{name}=(\d+)", path) or "00")[1]) for name in ("continue", "limit"))
            more = str(first + last) if first + last < len(self.items) else ""
            metadata = {"resourceVersion": self.version, "continue": more}
            page = self.items[first : first + last]
            body = json.dumps({"metadata": metadata, "items": page}).encode()
            body = body.replace(b'"DEEP"', self.deep)
            connection.wfile.write(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            return
        connection.wfile.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        while True:
            what = self._next(connection.connection)
            if isinstance(what, bytes):
                connection.wfile.write(b"%x\r\n%s\r\n" % (len(what), what))
            elif what is END:
                connection.wfile.write(b"0\r\n\r\n")
                return
            else:
                connection.wfile.write(b'fff\r\n{"type": "ADDED", "obj')
                if what is RESET:
                    linger = struct.pack("ii", 1, 0)
                    connection.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                return


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def reflect(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reflect]:
    """Makes reflectors that read the script."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                script.serve(self)

        def finish(self) -> None:
            with contextlib.suppress(OSError):
                super().finish()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        with reflecting(tmp_path, url, monkeypatch) as make:
            yield make
        for _ in range(10):
            script.say(END)
        server.shutdown()
        thread.join()


NUMBERS = itertools.count(1000)


def fresh() -> tuple[str, bytes]:
    """News that nobody can take for old: their name, and the event."""
    number = next(NUMBERS)
    return f"news{number}", event("ADDED", f"news{number}", number)


def heard(script: Script, seen: Seen) -> None:
    """Waits until all that was said has been read."""
    name, news = fresh()
    script.say(news)
    eventually(lambda: name in seen.names(), WITHIN_S, "the news")


def wakes(script: Script, seen: Seen, *says: bytes) -> int:
    """How often somebody is woken by what is said."""
    heard(script, seen)
    before = len(seen.history)
    script.say(*says)
    heard(script, seen)
    return len(seen.history) - before - 1


def reported(version: int, status: str, **more: Any) -> bytes:
    """An event about `a`, whose status is this, and more of it as given."""
    found = {**item("a", version), "status": {"phase": status}, **more}
    return json.dumps({"type": "MODIFIED", "object": found}).encode() + b"\n"


@pytest.mark.parametrize(
    ("says", "woken"),
    [
        ([reported(21, "Creating"), reported(22, "Ready")], 0),
        ([reported(21, "Ready"), reported(22, "Ready")], 1),  # something else must have changed, if only the version
        ([reported(21, "Ready", data={"k": "new"})], 1),
        ([reported(21, "Ready", metadata={**item("a", 21)["metadata"], "generation": 2})], 1),
        ([reported(21, "Ready"), event("DELETED", "a", 22)], 1),
    ],
)
def test_a_change_of_status_alone_wakes_nobody_and_is_known(
    reflect: Reflect, script: Script, says: list[bytes], woken: int
) -> None:
    script.items = [item("a", 20)]
    seen = reflect()
    seen.become("a")
    assert wakes(script, seen, *says) == woken
    found = seen.reflector.seen.items.get(("default", "a"))
    assert found is None or found["status"] == {"phase": "Ready"}


def test_each_item_is_kept_as_of_its_latest_news(reflect: Reflect, script: Script) -> None:
    script.items = [item("a", 20), item("b", 20)]
    seen = reflect()
    seen.become("a", "b")
    a, b, first = ("default", "a"), ("default", "b"), seen.reflector.seen.as_of_news
    script.say(reported(21, "Ready"))
    eventually(lambda: "status" in seen.reflector.seen.items[a], WITHIN_S, "the status")
    assert seen.reflector.seen.as_of_news is first
    script.say(reported(22, "Ready", data={"k": "new"}))
    eventually(lambda: seen.reflector.seen.as_of_news is not first, WITHIN_S, "the edit")
    edited = seen.reflector.seen.as_of_news
    assert edited == seen.reflector.seen.items and edited[b] is first[b]
    script.items, script.version = [json.loads(reported(22, "Ready", data={"k": "new"}))["object"], item("b", 20)], "22"
    script.say(trouble(410))
    eventually(lambda: len(script.lists) == 2 and not seen.reflector.failures, WITHIN_S, "the second list")
    assert seen.reflector.seen.as_of_news is edited
    script.say(event("DELETED", "b", 23))
    eventually(lambda: b not in seen.reflector.seen.as_of_news, WITHIN_S, "its end")
    assert seen.reflector.seen.as_of_news[a] is edited[a]


def test_a_long_list_is_read_page_by_page(script: Script, reflect: Reflect) -> None:
    names = [f"n{number:03}" for number in range(501)]
    script.items = [item(name, 5) for name in names]
    reflect().become(*names)
    assert len(script.lists) == 2


# ── old news ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("says", "woken"),
    [
        ([event("MODIFIED", "a", 20)], 0),
        ([event("ADDED", "a", 20)], 0),
        ([event("MODIFIED", "a", 19, k="old")], 0),
        ([event("MODIFIED", "a", 9)], 0),  # as numbers, not as texts
        ([event("MODIFIED", "a", 21), event("MODIFIED", "a", 21), event("MODIFIED", "a", 20)], 1),
        ([event("MODIFIED", "a", 100)], 1),
        ([event("DELETED", "a", 19)], 0),
        ([event("DELETED", "a", 20)], 1),
        ([event("DELETED", "a", 21), event("DELETED", "a", 21), event("ADDED", "a", 20)], 1),
        ([event("DELETED", "nobody", 50)], 0),
        ([bookmark(30), bookmark(31), bookmark(5)], 0),
        ([event("INVENTED", "a", 50)], 0),
        ([event("MODIFIED", "a", "opaque"), event("MODIFIED", "a", "opaque"), event("MODIFIED", "a", "other")], 2),
        ([b"\n", b" \r\n"], 0),
    ],
)
def test_only_news_wakes_anybody(reflect: Reflect, script: Script, says: list[bytes], woken: int) -> None:
    script.items = [item("a", 20)]
    seen = reflect()
    seen.become("a")
    assert wakes(script, seen, *says) == woken
    assert (len(script.lists), seen.reflector.seen.error) == (1, "")


def test_old_news_changes_nothing(reflect: Reflect, script: Script) -> None:
    script.items = [item("a", 20, k="new")]
    seen = reflect()
    seen.become("a")
    wakes(script, seen, event("MODIFIED", "a", 19, k="old"), event("DELETED", "a", 19))
    assert seen.reflector.seen.items[("default", "a")]["data"] == {"k": "new"}


def test_a_namesake_takes_the_place_of_what_was_deleted_even_if_nobody_said_so(
    reflect: Reflect, script: Script
) -> None:
    script.items = [item("a", 20, "first")]
    seen = reflect()
    seen.become("a")
    # Deleted and made anew between two events; then the end of the first is told late.
    assert wakes(script, seen, event("ADDED", "a", 30, "second"), event("DELETED", "a", 25, "first")) == 1
    assert seen.reflector.seen.items[("default", "a")]["metadata"]["uid"] == "second"
    assert wakes(script, seen, event("MODIFIED", "a", 26, "first")) == 0
    assert wakes(script, seen, event("DELETED", "a", 31, "second"), event("MODIFIED", "a", 29, "first")) == 1
    assert ("default", "a") not in seen.reflector.seen.items


def test_a_list_without_news_wakes_nobody_and_one_with_news_does(reflect: Reflect, script: Script) -> None:
    script.items = [item("a", 20), item("b", 21)]
    seen = reflect()
    seen.become("a", "b")
    for count in (2, 3):
        seen.kube.kick()
        eventually(lambda count=count: len(script.watches) == count, WITHIN_S, "a watch")
        assert seen.history == [("a", "b")]
    script.items = [item("a", 20), item("b", 21, "another")]
    seen.kube.kick()
    eventually(lambda: len(seen.history) == 2, WITHIN_S, "a wake")


def test_bookmarks_move_the_place_to_resume_from(reflect: Reflect, script: Script) -> None:
    seen = reflect()
    script.say(bookmark(40), bookmark(55), bookmark(54), END)
    eventually(lambda: len(script.watches) >= 2, WITHIN_S, "another watch")
    assert script.watches[:2] == ["10", "55"]
    assert (seen.names(), len(script.lists), seen.history) == ((), 1, [()])


# ── streams that break ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", [CUT, RESET, END], ids=["cut", "reset", "ended"])
def test_a_stream_that_breaks_in_the_middle_of_an_event_is_resumed_before_it(
    reflect: Reflect, script: Script, how: object
) -> None:
    script.items = [item("a", 9)]
    seen = reflect()
    seen.become("a")
    half = event("ADDED", "c", 12)[:40]
    script.say(event("ADDED", "b", 11), half, how)
    eventually(lambda: len(script.watches) >= 2, WITHIN_S, "another watch")
    script.say(event("ADDED", "c", 12))
    seen.become("a", "b", "c")
    assert script.watches[:2] == ["10", "11"]
    assert len(script.lists) == 1
    assert all("a" in names for names in seen.history)


def test_a_line_that_comes_in_pieces_is_one(reflect: Reflect, script: Script) -> None:
    seen = reflect()
    whole = event("ADDED", "a", 11) + event("ADDED", "b", 12)
    script.say(*(whole[start : start + 7] for start in range(0, len(whole), 7)))
    seen.become("a", "b")


def test_garbage_is_answered_with_more_and_more_patience_and_the_copy_stays(
    reflect: Reflect, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(watch_module, "UNREACHABLE_PAUSE_S", 0.02)  # that of silence, not of nonsense
    script.items = [item("a", 9)]
    seen = reflect()
    seen.become("a")
    for _ in range(6):
        script.say(f"{TOKEN} is no JSON\n".encode(), END)
    seen.error("not an event")
    eventually(lambda: len(script.watches) >= 6, WITHIN_S, "six attempts")
    began = [at for at, what in script.asked if what != "list"]
    assert began[5] - began[4] >= 0.02 * 2**5 * 0.5
    assert seen.names() == ("a",)
    assert TOKEN not in seen.reflector.seen.error


@pytest.mark.parametrize("what", [trouble(500), b"no event\n"], ids=["error", "garbage"])
def test_what_every_watch_from_one_version_meets_is_passed_with_a_list(
    reflect: Reflect, script: Script, monkeypatch: pytest.MonkeyPatch, what: bytes
) -> None:
    monkeypatch.setattr(watch_module, "FIRST_PAUSE_S", 0.02)
    go_on = script._next

    def says(client: socket.socket) -> Any:
        if script.watches[-1] != "10":
            return go_on(client)
        script.items, script.version = [item("a", 11)], "12"
        return what

    script._next = says  # type: ignore[method-assign]
    seen = reflect()
    seen.become("a")
    seen.connected()
    assert len(script.lists) == 2 and script.watches == ["10", "10", "12"]


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["status", "event"])
def test_a_version_that_is_always_too_old_leads_to_at_most_a_list_a_second(
    reflect: Reflect, script: Script, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[float] = []
    """When the reflector began each list: on a busy machine they arrive at other intervals."""
    ask = watch_module.Reflector._list

    def noting(reflector: watch_module.Reflector) -> None:
        try:
            ask(reflector)
        finally:
            begun.append(reflector._listed_at)

    monkeypatch.setattr(watch_module.Reflector, "_list", noting)
    if how == "event":
        script._next = lambda _: trouble(410)  # type: ignore[method-assign]
    else:
        serve = script.serve

        def gone(connection: socketserver.StreamRequestHandler) -> None:
            if len(script.lists) > len(script.watches):
                script.refusals.put(("410 Gone", ""))
            serve(connection)

        script.serve = gone  # type: ignore[method-assign]
    seen = reflect()
    eventually(lambda: len(script.lists) >= 4 and len(begun) >= 4, WITHIN_S, "four lists")
    gaps = [later - earlier for earlier, later in itertools.pairwise(begun)]
    assert min(gaps) >= watch_module.LIST_AGAIN_S - 0.01
    assert seen.reflector.seen.error == ""  # nobody need know


def test_one_version_that_is_too_old_leads_to_a_list_at_once(reflect: Reflect, script: Script) -> None:
    seen = reflect()
    seen.become()
    seen.reflector._listed_at -= 60.0
    script.items = [item("a", 11)]
    script.say(trouble(410))
    seen.become("a")
    assert len(script.lists) == 2


@pytest.mark.parametrize(
    ("headers", "least_s"),
    [
        ("Retry-After: 1\r\n", 1.0),
        ("Retry-After: 0\r\n", 0.05),
        ("", 0.05),
        ("Retry-After: soon\r\n", 0.05),
        ("Retry-After: Wed, 21 Oct 2026 07:28:01 GMT\r\nDate: Wed, 21 Oct 2026 07:28:00 GMT\r\n", 1.0),
    ],
    ids=["1", "0", "absent", "garbage", "date"],
)
@pytest.mark.parametrize("status", ["429 Slow", "503 No"])
def test_a_server_that_asks_for_patience_gets_it(
    reflect: Reflect, script: Script, status: str, headers: str, least_s: float
) -> None:
    script.refusals.put((status, headers))
    seen = reflect()
    seen.become()
    assert script.lists[1] - script.lists[0] >= least_s


def test_patience_that_is_asked_for_in_a_stream_is_had_too(reflect: Reflect, script: Script) -> None:
    seen = reflect()
    seen.become()
    script.say(trouble(429, details={"retryAfterSeconds": 1}))
    eventually(lambda: len(script.watches) >= 2, WITHIN_S, "another watch")
    began = [at for at, what in script.asked if what != "list"]
    assert began[1] - began[0] >= 1.0


def test_no_server_gets_more_than_a_minute(monkeypatch: pytest.MonkeyPatch, reflect: Reflect, script: Script) -> None:
    script.refusals.put(("429 Slow", "Retry-After: 86400\r\n"))
    seen = reflect()
    seen.error("429")
    paused = seen.reflector._failed
    from metal_supervisor.cluster.kube import KubeError

    assert paused(KubeError(429, "R", "m", 60.0), 1) == 60.0
    assert 15.0 <= paused(KubeError(503, "R", "m"), 30) <= 60.0


def test_a_burst_of_errors_is_outlived_with_growing_pauses(reflect: Reflect, script: Script) -> None:
    script.items = [item("a", 9)]
    seen = reflect()
    seen.become("a")
    for status in ("500 Oops", "503 No", "504 Slow"):
        script.refusals.put((status, ""))
    script.say(END)
    eventually(lambda: len(script.watches) >= 5, WITHIN_S, "the end of it")
    seen.connected()
    script.say(event("ADDED", "b", 11))
    seen.become("a", "b")
    assert len(script.lists) == 1 and all("a" in names for names in seen.history)


def test_an_error_that_quotes_the_token_is_shown_without_it(
    reflect: Reflect, script: Script, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen = reflect()
    seen.become()
    seen.kube._kubeconfig.write_text(config(tmp_path / "with", seen.kube.server, {"token": TOKEN}).read_text())
    seen.kube.load()
    script.say(trouble(500, message=f"etcd says {TOKEN}", reason=TOKEN))
    seen.error("etcd says …")
    assert TOKEN not in seen.reflector.seen.error + caplog.text + str([vars(each) for each in caplog.records])


# ── against the real thing ───────────────────────────────────────────────────────────────────────


@pytest.fixture
def real(api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reflect]:
    with reflecting(tmp_path, api.url, monkeypatch) as make:
        yield make


@pytest.mark.parametrize("verb", ["list", "watch"])
def test_a_verb_that_is_forbidden_is_named_for_as_long_as_it_is_and_what_was_known_stays(
    real: Reflect, client: Client, verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    put(client, "a")
    seen = real()
    seen.become("a")
    established(seen, client)
    fault(client, verb=verb, action={"status": 403})
    if verb == "list":
        seen.reflector._version = ""
        seen.kube.kick()
    seen.error(f'forbidden: cannot {verb} configmaps in namespace "default"; grant the verb "{verb}" on "configmaps"')
    woken = len(seen.history)
    before = seen.reflector.reconnects
    eventually(lambda: seen.reflector.reconnects >= before + 2, WITHIN_S, "further attempts")
    seen.kube.kick()  # a list that succeeds does not make the watch right
    eventually(lambda: seen.reflector.reconnects >= before + 5, WITHIN_S, "further attempts")
    assert (seen.names(), len(seen.history)) == (("a",), woken)  # said once, not at each attempt
    assert caplog.text.count("cluster trouble") == 1
    client.delete("/faults")
    put(client, "b")
    seen.become("a", "b")
    seen.connected()


def test_the_pauses_are_those_of_the_design() -> None:
    assert (watch_module.FORBIDDEN_PAUSE_S, watch_module.LONGEST_PAUSE_S, watch_module.LIST_AGAIN_S) == (30, 60, 1)
    assert Reflector.CONFIRM_S == 30.0


def test_a_definition_that_goes_and_comes_back_is_noticed_both_times(real: Reflect, client: Client) -> None:
    client.post(CRD_PATH, WIDGET_CRD)
    client.post(WIDGETS, widget("a"))
    client.post(WIDGETS, widget("b"))
    seen = real(WIDGETS)
    seen.become("a", "b")
    assert client.delete(f"{CRD_PATH}/widgets.example.test").code == 200
    seen.error("widgets are not served: the CRD is not installed")
    lists = seen.kube.lists
    client.post(CRD_PATH, WIDGET_CRD)
    client.post(WIDGETS, widget("c"))
    eventually(lambda: "c" in seen.names() and seen.kube.lists > lists, WITHIN_S, "a list")
    seen.connected()


def test_objects_of_a_missing_definition_stay_known(reflect: Reflect, script: Script) -> None:
    script.items = [item("a", 9)]
    seen = reflect()
    seen.become("a")
    for _ in range(3):
        script.refusals.put(("404 Not Found", ""))
    script.say(END)
    seen.error("not served")
    assert seen.names() == ("a",)
    script.items = [item("a", 9), item("b", 12)]
    seen.become("a", "b")  # by a list: what came meanwhile is in no watch
    assert all("a" in names for names in seen.history)


def test_what_was_deleted_while_nobody_looked_is_gone_after_the_next_list(real: Reflect, client: Client) -> None:
    put(client, "a", "b")
    seen = real()
    seen.become("a", "b")
    established(seen, client)
    fault(client, verb="watch", action={"expire": True}, times=1)
    drop(client, "a")
    seen.become("b")


@pytest.mark.parametrize("levels", [500, 980, 1100, 9900])
def test_an_object_that_nests_deeper_than_a_parser_follows_costs_nobody_the_others(
    script: Script, reflect: Reflect, levels: int
) -> None:
    """A real server takes up to 10,000 levels where a schema keeps unknown fields, as conf/crds does."""
    deep = b"[" * levels + b"]" * levels
    script.items = [item("a", 3), item("b", 4, text="DEEP")]
    script.deep = deep
    seen = reflect()
    seen.become("a", "b")
    script.say(event("ADDED", "c", 21, text="DEEP").replace(b'"DEEP"', deep))
    heard(script, seen)
    assert {"a", "b", "c"} <= set(seen.names())
    for name in ("b", "c"):
        kept, found = 0, seen.reflector.seen.items["default", name]["data"]["text"]
        while found:
            kept, found = kept + 1, found[0]
        assert 90 < kept <= MOST_LEVELS


def test_what_is_nested_deep_is_left_out_in_either_way() -> None:
    """Whether or not the parser can follow it."""
    deep = b'[{"x": ' * 80 + b"1" + b"}]" * 80
    written = b'{"a": "]}\\\\", "b": [1, {"c\\"[": DEEP}, 2], "d": DEEP, "e": {}}'
    text, shallow = written.replace(b"DEEP", deep), written.replace(b"DEEP", b"[[[]]]")
    assert decode(text) == json.loads(decoding._emptied(text))
    assert decode(text) != json.loads(text)
    assert decode(shallow) == json.loads(shallow) == json.loads(decoding._emptied(shallow))
    for bad in (b"[" * 100_000, b"]" * 100_000, b"]" + b"[" * 100_000 + b"]" * 100_000, b'"' + b"[" * 100_000):
        with pytest.raises((ValueError, RecursionError)):
            decode(bad)
