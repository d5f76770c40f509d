"""Deletion: what goes with an object, what holds it, and what is left."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
from apiserver_support import (
    APPLY,
    CONFIG_MAPS,
    CRD_PATH,
    WIDGET_CRD,
    WIDGETS,
    Client,
    config_map,
    widget,
)

from metal_supervisor.apiserver import ApiServer
from metal_supervisor.apiserver.deletes import EVENT_LIFETIME_S
from metal_supervisor.apiserver.errors import ApiError
from metal_supervisor.apiserver.kernel import resource_target
from metal_supervisor.apiserver.resources import RequestTarget, WriteOptions


def owned(name: str, uid: str, **metadata: Any) -> dict[str, Any]:
    owner = {"apiVersion": "example.test/v1", "kind": "Widget", "name": "w", "uid": uid, "blockOwnerDeletion": True}
    return {"metadata": {"name": name, "ownerReferences": [owner], **metadata}}


def test_dependents_go_with_their_owner(widgets: Client) -> None:
    uid = widgets.post(WIDGETS, widget()).body["metadata"]["uid"]
    widgets.post(CONFIG_MAPS, owned("c", uid))
    with widgets.watch(CONFIG_MAPS, resourceVersion=widgets.version()) as watch:
        widgets.delete(f"{WIDGETS}/w")
        assert watch.next()[0] == "DELETED"
        widgets.post(CONFIG_MAPS, owned("late", uid))
        assert [watch.next()[0], watch.next()[0]] == ["ADDED", "DELETED"]


@pytest.mark.parametrize(
    ("options", "code", "named"),
    [
        ({"dryRun": ["all"]}, 400, "dryRun"),
        ({"dryRun": "All"}, 400, "dryRun"),
        ({"propagationPolicy": "Orphan"}, 400, "propagationPolicy"),
        ({"orphanDependents": True}, 400, "orphanDependents"),
        ({"preconditions": "1"}, 400, "preconditions"),
        ({"preconditions": {"resourceVersion": "1"}}, 409, "has been modified"),
    ],
)
def test_what_cannot_be_read_deletes_nothing(client: Client, options: dict[str, Any], code: int, named: str) -> None:
    client.post(CONFIG_MAPS, config_map("a"))
    refused = client.delete(f"{CONFIG_MAPS}/a", options)
    assert refused.code == code and named in refused.body["message"], refused.body
    assert client.delete(f"{CONFIG_MAPS}/a", orphanDependents="perhaps").code == 400
    assert client.delete(CONFIG_MAPS).code == 405
    assert len(client.get(CONFIG_MAPS).body["items"]) == 1


def test_finalizers_hold_an_object_until_they_are_gone(client: Client) -> None:
    client.post(CONFIG_MAPS, {"metadata": {"name": "c", "finalizers": ["example.test/hold"]}})
    marked = client.delete(f"{CONFIG_MAPS}/c").body
    assert marked["metadata"]["deletionTimestamp"]
    assert client.merge(f"{CONFIG_MAPS}/c", {"metadata": {"finalizers": []}}).code == 200
    assert client.get(f"{CONFIG_MAPS}/c").code == 404


def test_a_namespace_takes_its_content_along(client: Client) -> None:
    client.post("/api/v1/namespaces", {"metadata": {"name": "llm"}})
    held = {"metadata": {"name": "c", "finalizers": ["example.test/hold"]}}
    client.post("/api/v1/namespaces/llm/configmaps", held)
    with client.watch("/api/v1/namespaces", resourceVersion=client.version()) as watch:
        assert client.delete("/api/v1/namespaces/llm").body["status"]["phase"] == "Terminating"
        assert client.post("/api/v1/namespaces/llm/configmaps", config_map("d")).code == 403
        client.merge("/api/v1/namespaces/llm/configmaps/c", {"metadata": {"finalizers": None}})
        while watch.next()[0] != "DELETED":
            pass
    assert client.delete("/api/v1/namespaces/default").code == 403


def test_an_expired_event_that_is_held_is_marked_once(api: ApiServer, client: Client) -> None:
    held = {"metadata": {"name": "e", "namespace": "default", "finalizers": ["example.test/hold"]}}
    event = {**held, "involvedObject": {"namespace": "default", "kind": "Widget", "name": "w"}, "reason": "r"}
    assert client.post("/api/v1/namespaces/default/events", event).code == 201
    much_later_s = time.time() + 2 * EVENT_LIFETIME_S
    assert [api.kernel.collector.sweep(much_later_s) for _ in range(2)] == [True, False]
    assert client.get("/api/v1/namespaces/default/events/e").body["metadata"]["deletionTimestamp"]


def test_a_deleted_crd_takes_its_objects_and_routes_along(widgets: Client) -> None:
    widgets.post(WIDGETS, widget())
    with widgets.watch(WIDGETS, resourceVersion=widgets.version()) as watch:
        widgets.delete(f"{CRD_PATH}/widgets.example.test")
        assert watch.next()[0] == "DELETED" and watch.ended()
    assert widgets.get(WIDGETS).code == 404
    assert "example.test" not in str(widgets.get("/apis").body)
    assert widgets.post(CRD_PATH, WIDGET_CRD).code == 201
    assert widgets.get(WIDGETS).body["items"] == []


def test_a_crd_that_a_finalizer_held_takes_its_routes_along(widgets: Client) -> None:
    where = f"{CRD_PATH}/widgets.example.test"
    widgets.merge(where, {"metadata": {"finalizers": ["example.test/hold"]}})
    assert widgets.delete(where).body["metadata"]["deletionTimestamp"]
    assert widgets.merge(where, {"metadata": {"finalizers": None}}).code == 200
    assert widgets.get(where).code == 404 and widgets.get(WIDGETS).code == 404


def test_nothing_is_created_while_its_crd_is_being_deleted(widgets: Client) -> None:
    widgets.post(WIDGETS, {**widget("held"), "metadata": {"name": "held", "finalizers": ["example.test/hold"]}})
    with widgets.watch(WIDGETS, resourceVersion=widgets.version()) as watch:
        widgets.delete(f"{CRD_PATH}/widgets.example.test")
        assert watch.next()[0] == "MODIFIED"
        for reply in (widgets.post(WIDGETS, widget()), widgets.apply(f"{WIDGETS}/w", widget(), "tests")):
            assert (reply.code, reply.body["reason"]) == (405, "MethodNotAllowed")
            assert reply.body["message"] == "create not allowed while custom resource definition is terminating"
        assert widgets.merge(f"{WIDGETS}/held", {"spec": {"size": 2}}).code == 200
        assert widgets.merge(f"{WIDGETS}/held", {"metadata": {"finalizers": None}}).code == 200
        assert [watch.next()[0], watch.next()[0]] == ["MODIFIED", "DELETED"] and watch.ended()


def test_a_watch_that_is_still_sending_when_its_kind_goes_sends_the_rest(api: ApiServer, widgets: Client) -> None:
    widgets.post(WIDGETS, widget())
    target = resource_target(api.kernel.registry, WIDGETS)
    assert target is not None
    seen = []

    def send(lines: bytes) -> None:
        seen.extend(json.loads(line)["type"] for line in lines.splitlines())
        if seen == ["ADDED"]:
            widgets.merge(f"{WIDGETS}/w", {"spec": {"size": 2}})
        elif seen == ["ADDED", "MODIFIED"]:
            with widgets.watch(WIDGETS, resourceVersion=widgets.version()) as watch:
                widgets.delete(f"{CRD_PATH}/widgets.example.test")
                assert watch.next()[0] == "DELETED" and watch.ended()

    api.kernel.watcher.open(target, {}, "").run(send)
    assert seen == ["ADDED", "MODIFIED", "DELETED"]


def routed_before_its_crd_went(api: ApiServer, widgets: Client) -> RequestTarget:
    """Target of a request for widgets whose definition has been deleted since."""
    target = resource_target(api.kernel.registry, WIDGETS)
    assert target is not None
    with widgets.watch(WIDGETS, resourceVersion=widgets.version()) as watch:
        widgets.delete(f"{CRD_PATH}/widgets.example.test")
        assert watch.ended()
    return target


def test_a_write_that_began_before_its_crd_was_gone_leaves_nothing(api: ApiServer, widgets: Client) -> None:
    target = routed_before_its_crd_went(api, widgets)
    options = WriteOptions("tests")
    with pytest.raises(ApiError, match="could not find the requested resource"):
        api.kernel.writer.create(target, widget(), options)
    with pytest.raises(ApiError, match="could not find the requested resource"):
        api.kernel.writer.patch(replace(target, name="w"), APPLY, widget(), options)
    assert widgets.post(CRD_PATH, WIDGET_CRD).code == 201
    assert widgets.get(WIDGETS).body["items"] == []


def test_nothing_is_created_under_a_crd_of_another_scope_than_its_route(api: ApiServer, widgets: Client) -> None:
    target = routed_before_its_crd_went(api, widgets)
    spec = {**WIDGET_CRD["spec"], "scope": "Cluster"}
    assert widgets.post(CRD_PATH, {**WIDGET_CRD, "spec": spec}).code == 201
    with pytest.raises(ApiError) as refused:
        api.kernel.writer.create(target, widget(), WriteOptions("tests"))
    assert refused.value.code == 404
