"""Lists and watches: nothing is missed, nothing is shown that was not asked for, and too old is said so."""

from __future__ import annotations

import socket
import struct
import time
from typing import Any

from apiserver_support import CONFIG_MAPS, EVENTS, PREFIX, WIDGETS, Client, config_map, options, widget

from metal_supervisor.apiserver import ApiServer
from metal_supervisor.apiserver.kernel import Kernel, Request, Response, Stream
from metal_supervisor.apiserver.storage import HISTORY_CHANGES

TABLE = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"}


def names(reply: Any) -> list[str]:
    return [item["metadata"]["name"] for item in reply.body["items"]]


def test_a_watch_may_be_asked_to_last_longer_than_any_machine(client: Client) -> None:
    version = client.version()
    with client.watch(CONFIG_MAPS, resourceVersion=version, timeoutSeconds="99999999999999") as watch:
        for name in "abcde":
            client.post(CONFIG_MAPS, config_map(name))
            assert watch.next()[0] == "ADDED"


def test_bookmarks_and_timeouts(tmp_path: Any) -> None:
    with ApiServer(options(tmp_path, bookmark_s=0.05, crd_paths=())) as server:
        client = Client(server.port)
        with client.watch(CONFIG_MAPS, resourceVersion=client.version(), allowWatchBookmarks="true") as watch:
            client.post("/api/v1/namespaces", {"metadata": {"name": "llm"}})
            wanted = client.version()
            while True:
                kind, obj = watch.next()
                assert kind == "BOOKMARK"
                if obj["metadata"]["resourceVersion"] == wanted:
                    break
        with client.watch(CONFIG_MAPS, resourceVersion=client.version(), timeoutSeconds="1") as watch:
            assert watch.ended()
        client.close()


def test_a_version_from_before_the_history_is_expired(client: Client) -> None:
    first = client.post(CONFIG_MAPS, config_map("a", n="0")).body["metadata"]["resourceVersion"]
    for number in range(HISTORY_CHANGES + 1):
        client.merge(f"{CONFIG_MAPS}/a", {"data": {"n": str(number + 1)}})
    with client.watch(CONFIG_MAPS, resourceVersion=first) as watch:
        kind, status = watch.next()
        assert (kind, status["code"], status["reason"]) == ("ERROR", 410, "Expired")
        assert watch.ended()


def test_tables_are_watched_with_one_header(widgets: Client) -> None:
    widgets.post(WIDGETS, widget())
    with widgets.watch(WIDGETS, headers=TABLE) as watch:
        _, first = watch.next()
        assert [column["name"] for column in first["columnDefinitions"]] == ["Name", "Loaded", "Age"]
        widgets.merge(f"{WIDGETS}/w", {"spec": {"size": 2}})
        _, second = watch.next()
        assert second["columnDefinitions"] is None and second["rows"][0]["cells"][0] == "w"


def test_events_leave_as_soon_as_they_are_written(client: Client) -> None:
    delays_s = []
    with client.watch(CONFIG_MAPS, resourceVersion=client.version()) as watch:
        for number in range(20):
            client.post(CONFIG_MAPS, config_map(f"c{number}"))
            written_s = time.monotonic()
            watch.next()
            delays_s.append(time.monotonic() - written_s)
    # Generous for a busy machine; what it excludes is a polling loop or a delayed acknowledgement.
    assert sorted(delays_s)[len(delays_s) // 2] < 0.02


def test_a_client_that_hangs_up_is_noticed_without_a_write(api: ApiServer, client: Client) -> None:
    with client.watch(CONFIG_MAPS, resourceVersion=client.version()):
        assert len(api.kernel.watcher.subscriptions()) == 1
    deadline_s = time.monotonic() + 5
    while api.kernel.watcher.subscriptions() and time.monotonic() < deadline_s:
        time.sleep(0.005)
    assert api.kernel.watcher.subscriptions() == []


def test_a_client_that_hangs_up_before_the_headers_leaves_no_watch_behind(tmp_path: Any) -> None:
    opened = []
    with socket.socket() as impatient:
        # Closing resets the connection, so that writing the headers fails.
        impatient.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        class HangUp(Kernel):
            def answer(self, request: Request) -> Response | Stream:
                answer = super().answer(request)
                opened.extend(self.watcher.subscriptions())
                impatient.close()
                return answer

        with ApiServer(options(tmp_path, crd_paths=()), HangUp) as server:
            impatient.connect(("127.0.0.1", server.port))
            impatient.sendall(f"GET {PREFIX}{CONFIG_MAPS}?watch=true HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            deadline_s = time.monotonic() + 5
            while time.monotonic() < deadline_s and (not opened or server.kernel.watcher.subscriptions()):
                time.sleep(0.005)
            assert len(opened) == 1 and server.kernel.watcher.subscriptions() == []


def test_a_list_is_whole_whatever_its_limit(client: Client) -> None:
    for name in "abc":
        client.post(CONFIG_MAPS, config_map(name))
    page = client.get(CONFIG_MAPS, limit="2")
    assert names(page) == list("abc") and not page.body["metadata"].get("continue")


def test_selectors(client: Client) -> None:
    for name, labels in (("a", {"x": "1"}), ("b", {"x": "2"}), ("c", {})):
        client.post(CONFIG_MAPS, {"metadata": {"name": name, "labels": labels}})
    for selector, expected in (
        ("x=1", "a"),
        ("x==2", "b"),
        ("x!=1", "bc"),
        ("x", "ab"),
        ("!x", "c"),
        ("x in (1,2)", "ab"),
        ("x notin (1)", "bc"),
        ("x,x!=2", "a"),
        ("x in (1), x", "a"),
    ):
        assert names(client.get(CONFIG_MAPS, labelSelector=selector)) == list(expected), selector
    assert names(client.get(CONFIG_MAPS, fieldSelector="metadata.name=b")) == ["b"]
    assert names(client.get(CONFIG_MAPS, fieldSelector="metadata.name!=b,metadata.namespace=default")) == ["a", "c"]
    assert client.get(CONFIG_MAPS, labelSelector="x in 1").code == 400
    assert client.get(CONFIG_MAPS, fieldSelector="data.x=1").code == 400
    assert client.get(EVENTS, fieldSelector="reason=x").code == 200
