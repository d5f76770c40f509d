"""Writes: what is refused and how, what is kept apart, who owns which field, what goes with what."""

from __future__ import annotations

import time
from typing import Any

from apiserver_support import (
    CONFIG_MAPS,
    CRD_PATH,
    EVENTS,
    JSON_PATCH,
    SERVICES,
    STRATEGIC,
    WIDGET_CRD,
    WIDGETS,
    Client,
    condition,
    config_map,
    widget,
)

from metal_supervisor.apiserver import ApiServer
from metal_supervisor.apiserver.codec import clone
from metal_supervisor.apiserver.deletes import EVENT_LIFETIME_S
from tests.support.system import eventually


def causes(reply: Any) -> list[dict[str, str]]:
    """The causes of a failure."""
    found: list[dict[str, str]] = reply.body["details"]["causes"]
    return found


def service(name: str = "s", **spec: Any) -> dict[str, Any]:
    wanted = {"ports": [{"port": 80}], **spec}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": wanted}


# ---- schema, strictness, dry run ---------------------------------------------------------------


def test_a_stricter_definition_does_not_hold_up_who_edits_nothing_that_it_is_about(widgets: Client) -> None:
    """As of an upgrade: annotations and finalizers of what was stored before."""
    name = f"{WIDGETS}/w"
    widgets.post(WIDGETS, widget(size=5) | {"metadata": {"name": "w", "finalizers": ["a.io/b"]}})
    definition = f"{CRD_PATH}/{WIDGET_CRD['metadata']['name']}"
    stricter = widgets.get(definition).body
    spec = stricter["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec["properties"]["size"]["maximum"] = 4
    assert widgets.put(definition, stricter).code == 200
    assert widgets.merge(name, {"metadata": {"annotations": {"a": "b"}}}).code == 200
    assert widgets.merge(name, {"spec": {"size": 6}}).code == 422
    widgets.delete(name)
    assert widgets.merge(name, {"metadata": {"finalizers": None}}).code == 200 and widgets.get(name).code == 404


def test_an_object_of_no_namespace_keeps_none(client: Client) -> None:
    made = client.post("/api/v1/namespaces", {"metadata": {"name": "team", "namespace": "default"}})
    assert made.code == 201 and "namespace" not in made.body["metadata"]


def test_a_dry_run_answers_but_stores_nothing(widgets: Client) -> None:
    before = widgets.version()
    assert widgets.post(WIDGETS, widget(), dryRun="All").code == 201
    assert widgets.get(f"{WIDGETS}/w").code == 404
    widgets.post(WIDGETS, widget())
    after = widgets.version()
    shown = widgets.merge(f"{WIDGETS}/w", {"spec": {"size": 5}}, dryRun="All")
    assert shown.body["spec"]["size"] == 5
    assert widgets.apply(f"{WIDGETS}/w", widget(size=7), "m", force="true", dryRun="All").body["spec"]["size"] == 7
    assert widgets.delete(f"{WIDGETS}/w", dryRun="All").code == 200
    assert widgets.get(f"{WIDGETS}/w").body["spec"]["size"] == 1
    assert (before != after) and widgets.version() == after
    assert widgets.post(WIDGETS, widget(), dryRun="Some").code == 400


def test_a_write_that_changes_nothing_moves_no_version(widgets: Client) -> None:
    widgets.apply(f"{WIDGETS}/w", widget(), "m")
    version = widgets.version()
    assert widgets.apply(f"{WIDGETS}/w", widget(), "m").code == 200
    widgets.merge(f"{WIDGETS}/w", {"spec": {"size": 1}})
    widgets.put(f"{WIDGETS}/w", widgets.get(f"{WIDGETS}/w").body)
    assert widgets.version() == version


def test_generated_names_and_mismatched_addresses(client: Client) -> None:
    made = client.post(CONFIG_MAPS, {"metadata": {"generateName": "c-"}})
    assert made.code == 201 and made.body["metadata"]["name"].startswith("c-")
    assert client.post(CONFIG_MAPS, {"metadata": {"name": "c", "namespace": "other"}}).code == 400
    assert client.put(f"{CONFIG_MAPS}/{made.body['metadata']['name']}", config_map("other")).code == 400
    assert client.post(CONFIG_MAPS, {"kind": "Secret", "metadata": {"name": "c"}}).code == 400
    assert client.post(CONFIG_MAPS, {"metadata": {"name": "c"}, "data": {"a": 1}}).code == 422
    assert client.post("/api/v1/namespaces/nowhere/configmaps", config_map("c")).code == 404


def test_a_custom_kind_that_is_named_like_a_built_in_one_has_its_own_rules(client: Client) -> None:
    for kind in ("Service", "Event"):
        crd = clone(WIDGET_CRD)
        crd["spec"]["names"] |= {"kind": kind, "listKind": f"{kind}List"}
        assert client.post(CRD_PATH, crd).code == 201
        bad = client.post(WIDGETS, {**widget("Bad_Name"), "kind": kind})
        assert bad.code == 422 and causes(bad)[0]["field"] == "metadata.name"
        assert bad.body["message"].startswith(f'{kind}.example.test "Bad_Name" is invalid: ')
        made = client.post(WIDGETS, {**widget(), "kind": kind}).body
        assert "f:ports" not in made["metadata"]["managedFields"][0]["fieldsV1"]["f:spec"]
        assert client.delete(f"{CRD_PATH}/widgets.example.test").code == 200
        eventually(lambda: client.get(f"{CRD_PATH}/widgets.example.test").code == 404, what="the definition to go")


def test_json_and_strategic_patches(client: Client) -> None:
    client.post(SERVICES, service(ports=[{"name": "a", "port": 1}, {"name": "b", "port": 2}]))
    remove = [{"op": "test", "path": "/spec/ports/0/name", "value": "a"}, {"op": "remove", "path": "/spec/ports/0"}]
    left = client.request("PATCH", f"{SERVICES}/s", remove, kind=JSON_PATCH).body["spec"]["ports"]
    assert [port["name"] for port in left] == ["b"]
    assert client.request("PATCH", f"{SERVICES}/s", remove, kind=JSON_PATCH).code == 422
    added = {"spec": {"ports": [{"port": 3, "name": "c"}, {"port": 2, "targetPort": 9}]}}
    ports = client.request("PATCH", f"{SERVICES}/s", added, kind=STRATEGIC).body["spec"]["ports"]
    assert [(port["name"], port["targetPort"]) for port in ports] == [("b", 9), ("c", 3)]
    gone = {"spec": {"ports": [{"port": 2, "$patch": "delete"}]}}
    assert len(client.request("PATCH", f"{SERVICES}/s", gone, kind=STRATEGIC).body["spec"]["ports"]) == 1
    for unclear in ({"spec": {"$patch": "replace"}}, {"spec": {"ports": [{"port": 3, "$patch": "replace"}]}}):
        assert client.request("PATCH", f"{SERVICES}/s", unclear, kind=STRATEGIC).code == 400
    assert client.request("PATCH", f"{SERVICES}/s", {}, kind="text/plain").code == 415


# ---- server-side apply -------------------------------------------------------------------------


def test_apply_owns_removes_and_defends_single_fields(widgets: Client) -> None:
    widgets.apply(f"{WIDGETS}/w", widget(colour="blue", extra={"a": "1", "b": "2"}), "one")
    shared = widgets.apply(f"{WIDGETS}/w", widget(extra={"c": "3"}), "two").body
    assert shared["spec"] == {"size": 1, "colour": "blue", "extra": {"a": "1", "b": "2", "c": "3"}}
    refused = widgets.apply(f"{WIDGETS}/w", widget(size=2), "two")
    assert refused.code == 409 and refused.body["message"].endswith('conflict with "one": .spec.size')
    assert causes(refused)[0]["reason"] == "FieldManagerConflict"
    assert widgets.apply(f"{WIDGETS}/w", widget(size=2), "two", force="true").body["spec"]["size"] == 2
    assert widgets.apply(f"{WIDGETS}/w", widget(size=1), "one").code == 409
    dropped = widgets.apply(f"{WIDGETS}/w", widget(size=2, extra={"b": "2"}), "one").body
    assert dropped["spec"] == {"size": 2, "colour": "red", "extra": {"b": "2"}}
    assert widgets.apply(f"{WIDGETS}/w", widget(), "").code == 400
    assert widgets.apply(f"{WIDGETS}/w", widget(foo=1), "one").code == 500


def test_conditions_have_an_owner_each(widgets: Client) -> None:
    widgets.post(WIDGETS, widget())
    widgets.apply(f"{WIDGETS}/w/status", condition("Ready", "True"), "operator")
    both = widgets.apply(f"{WIDGETS}/w/status", condition("Loaded", "True"), "metal/mac").body
    assert {c["type"] for c in both["status"]["conditions"]} == {"Ready", "Loaded"}
    refused = widgets.apply(f"{WIDGETS}/w/status", condition("Ready", "False"), "metal/mac")
    assert refused.code == 409 and '[type="Ready"].status' in causes(refused)[0]["field"]
    left = widgets.apply(f"{WIDGETS}/w/status", condition("Loaded", "False"), "metal/mac").body
    assert [c["status"] for c in left["status"]["conditions"]] == ["True", "False"]
    nothing = {**condition("", ""), "status": {"conditions": []}}
    only = widgets.apply(f"{WIDGETS}/w/status", nothing, "metal/mac").body
    assert [c["type"] for c in only["status"]["conditions"]] == ["Ready"]
    entries = only["metadata"]["managedFields"]
    assert {(e["manager"], e.get("subresource", "")) for e in entries} == {("tests", ""), ("operator", "status")}


def test_an_update_takes_the_fields_it_changes(widgets: Client) -> None:
    widgets.apply(f"{WIDGETS}/w", widget(size=1), "one")
    widgets.merge(f"{WIDGETS}/w", {"spec": {"size": 2}}, fieldManager="editor")
    refused = widgets.apply(f"{WIDGETS}/w", widget(size=1), "one")
    assert refused.body["message"] == (
        'Apply failed with 1 conflict: conflict with "editor" using example.test/v1: .spec.size'
    )


# ---- built-in kinds ----------------------------------------------------------------------------


def test_bytes_are_base64(client: Client) -> None:
    secrets = "/api/v1/namespaces/default/secrets"
    for path, field in ((secrets, "data"), (CONFIG_MAPS, "binaryData")):
        for wrong in ("plain text", "YQ", "YQ==YQ==", "Y\u00e4=="):
            refused = client.post(path, {"metadata": {"name": "x"}, field: {"token": wrong}})
            assert refused.code == 422 and f"{field}.token" in refused.body["message"], refused.body
        assert client.post(path, {"metadata": {"name": "x"}, field: {"token": "YWJj\nZGVm\n", "none": ""}}).code == 201
        assert client.merge(f"{path}/x", {field: {"token": "no"}}).code == 422


def event(**more: Any) -> dict[str, Any]:
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": "e"},
        "regarding": {"kind": "Pod", "name": "p", "namespace": "default", "uid": "u"},
        "reason": "R",
        "action": "A",
        "type": "Normal",
        "note": "n",
        "reportingController": "c",
        "reportingInstance": "i",
        "eventTime": "2026-01-01T00:00:00.000000Z",
        **more,
    }


def test_an_event_has_two_faces(client: Client) -> None:
    assert client.post(EVENTS, event()).code == 201
    core = client.get("/api/v1/namespaces/default/events/e").body
    assert (core["apiVersion"], core["message"], core["involvedObject"]["name"]) == ("v1", "n", "p")
    series = {"series": {"count": 2, "lastObservedTime": "2026-01-01T00:00:01.000000Z"}}
    assert client.merge(f"{EVENTS}/e", series).body["series"]["count"] == 2
    for path, field in (("/api/v1/events", "involvedObject.name"), ("/apis/events.k8s.io/v1/events", "regarding.name")):
        assert len(client.get(path, fieldSelector=f"{field}=p").body["items"]) == 1
        assert client.get(path, fieldSelector=f"{field}=q").body["items"] == []


def test_events_end_after_an_hour(api: ApiServer, client: Client) -> None:
    client.post(EVENTS, event())
    assert not api.kernel.collector.sweep(time.time() + EVENT_LIFETIME_S - 60)
    assert api.kernel.collector.sweep(time.time() + EVENT_LIFETIME_S + 60)
    assert client.get(f"{EVENTS}/e").code == 404
