"""Server-side apply: who owns what, who may change it, and what is no declaration at all."""

from __future__ import annotations

import pytest

from tests.contract.api import APPLY, Space, managers
from tests.contract.things import config_map, endpoint_slice, isvc, lease, service, widget, widget_status


def owner(name: str) -> dict[str, str]:
    """A reference to a Widget of the uid `u`."""
    return {"apiVersion": "example.test/v1", "kind": "Widget", "name": name, "uid": "u"}


def test_a_declaration_creates_and_then_changes_nothing(space: Space) -> None:
    made = space.apply("widgets", widget(), "one")
    assert made.code == 201 and made.body["spec"] == {"size": 1, "colour": "red"}
    again = space.apply("widgets", widget(), "one")
    assert again.code == 200 and again.version == made.version
    assert managers(again.body) == {("one", "Apply", ""): {"f:spec": {"f:size": {}}}}
    entry = again.body["metadata"]["managedFields"][0]
    assert entry["fieldsType"] == "FieldsV1" and entry["apiVersion"] == "example.test/v1" and "time" in entry


def test_what_another_manager_owns_is_a_conflict_unless_forced(space: Space) -> None:
    space.apply("widgets", widget(), "one")
    refused = space.apply("widgets", widget(size=2, colour="blue"), "two")
    assert refused.outline == (409, "Conflict")
    assert refused.message == 'Apply failed with 1 conflict: conflict with "one": .spec.size'
    cause = {"reason": "FieldManagerConflict", "message": 'conflict with "one"', "field": ".spec.size"}
    assert refused.body["details"]["causes"] == [cause]
    assert space.apply("widgets", widget(size=2), "two", force="true").body["spec"]["size"] == 2
    assert space.apply("widgets", widget(size=1), "one").outline == (409, "Conflict")
    assert ("one", "Apply", "") not in managers(space.get("widgets", "w").body)


def test_several_conflicts_are_listed_by_manager(space: Space) -> None:
    space.apply("widgets", widget(extra={"a": "1", "b": "2"}), "one")
    refused = space.apply("widgets", widget(extra={"a": "x", "b": "y"}), "two")
    assert refused.message.startswith("Apply failed with 2 conflicts: conflict")
    named = [(cause["message"], cause["field"]) for cause in refused.body["details"]["causes"]]
    assert named == [('conflict with "one"', f".spec.extra.{field}") for field in "ab"]
    assert all(text in refused.message for text in ('with "one"', ".spec.extra.a", ".spec.extra.b"))


def test_what_a_manager_no_longer_declares_goes_if_nobody_else_does(space: Space) -> None:
    space.apply("widgets", widget(colour="blue", extra={"a": "1", "b": "2"}), "one")
    space.apply("widgets", widget(extra={"b": "2", "c": "3"}), "two")
    left = space.apply("widgets", widget(), "one").body["spec"]
    assert left == {"size": 1, "colour": "red", "extra": {"b": "2", "c": "3"}}
    assert space.apply("widgets", widget(), "two").body["spec"] == {"size": 1, "colour": "red"}


def test_a_container_that_is_no_longer_declared_takes_its_defaults_along(space: Space) -> None:
    declared = space.apply("inferenceservices", isvc(endpoint={"port": 9000}), "one").body["spec"]["endpoint"]
    assert declared == {"port": 9000, "type": "ClusterIP", "path": "/v1/chat/completions"}
    assert "endpoint" not in space.apply("inferenceservices", isvc(), "one").body["spec"]
    space.apply("inferenceservices", isvc(endpoint={"port": 9000}), "one")
    space.apply("inferenceservices", isvc(endpoint={"type": "NodePort"}), "two", force="true")
    left = space.apply("inferenceservices", isvc(), "one").body["spec"]["endpoint"]
    assert left == {"port": 8080, "type": "NodePort", "path": "/v1/chat/completions"}


def test_an_update_owns_what_it_changes_and_what_it_brings_into_being(space: Space) -> None:
    space.post("widgets", widget(extra={"a": "1"}), fieldManager="maker")
    fields = {".": {}, "f:colour": {}, "f:size": {}, "f:extra": {".": {}, "f:a": {}}}
    assert managers(space.get("widgets", "w").body) == {("maker", "Update", ""): {"f:spec": fields}}
    space.patch("widgets", "w", {"spec": {"size": 2}}, fieldManager="editor")
    refused = space.apply("widgets", widget(size=3), "one")
    assert refused.message.endswith('conflict with "editor" using example.test/v1: .spec.size')
    assert "f:size" not in managers(space.get("widgets", "w").body)["maker", "Update", ""]["f:spec"]


def test_without_a_field_manager_nothing_is_applied(space: Space) -> None:
    refused = space.apply("widgets", widget(), "")
    assert refused.code in (400, 422) and "fieldManager" in refused.message


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ({"foo": 1}, ".spec.foo: field not declared in schema"),
        ({"size": "x"}, ".spec.size: "),
        ({"colour": 5}, ".spec.colour: "),
        ({"on": "x"}, ".spec.on: "),
        ({"args": "x"}, ".spec.args: "),
        ({"inner": []}, ".spec.inner: "),
        ({"tags": ["b", "b"]}, ".spec.tags"),
    ],
)
def test_what_does_not_fit_the_schema_is_no_declaration(space: Space, spec: dict[str, object], complaint: str) -> None:
    for validation in ("Strict", "Warn", "Ignore"):
        refused = space.apply("widgets", widget(**spec), "one", fieldValidation=validation)
        assert refused.code == 500 and refused.message.startswith("failed to create typed patch object")
        assert complaint in refused.message
        assert "reason" not in refused.body


def test_a_declaration_of_a_built_in_kind_is_held_to_its_schema_too(space: Space) -> None:
    refused = space.apply("services", service(foo=1), "one")
    assert refused.code == 500 and refused.message.endswith(": .spec.foo: field not declared in schema")
    refused = space.apply("services", service(ports=[{"port": 80}, {"port": 80}]), "one")
    assert refused.code == 500 and ".spec.ports" in refused.message and "uplicate" in refused.message
    late = space.apply("leases", lease(renewTime="late"), "one")
    assert late.code in (422, 500) and '"late"' in late.message


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ({"lables": {"a": "b"}}, ".metadata.lables: field not declared in schema"),
        ({"ownerReferences": [owner("a"), owner("b")]}, ".metadata.ownerReferences"),
        ({"ownerReferences": [{**owner("a"), "nmae": "x"}]}, ".nmae: field not declared in schema"),
    ],
)
def test_unfitting_metadata_is_no_declaration(space: Space, metadata: dict[str, object], complaint: str) -> None:
    for plural, thing in (("widgets", widget("x")), ("configmaps", config_map("x"))):
        refused = space.apply(plural, {**thing, "metadata": {"name": "x", **metadata}}, "one")
        assert refused.code in (422, 500) and complaint.lstrip(".") in refused.message


def test_a_declaration_may_leave_out_a_name_that_is_known(space: Space) -> None:
    nameless = {**widget(size=2), "metadata": {}}
    refused = space.patch("widgets", "w", nameless, APPLY, fieldManager="one")
    assert refused.outline == (400, "BadRequest")
    space.apply("widgets", widget(), "one")
    assert space.patch("widgets", "w", nameless, APPLY, fieldManager="one").body["spec"]["size"] == 2


def test_what_fits_may_still_be_invalid(space: Space) -> None:
    refused = space.apply("widgets", widget(size=0), "one")
    assert refused.outline == (422, "Invalid") and refused.causes == {"spec.size": "FieldValueInvalid"}


def test_a_declaration_says_what_it_is(space: Space) -> None:
    body = {"metadata": {"name": "w"}, "spec": {"size": 1}}
    for version, kind in (("example.test/v1", "Gadget"), ("example.test/v2", "Widget")):
        head = {"apiVersion": version, "kind": kind}
        refused = space.patch("widgets", "w", {**head, **body}, APPLY, fieldManager="one")
        assert refused.outline == (400, "BadRequest")
    assert space.patch("widgets", "w", b"- a", APPLY, fieldManager="one").outline == (400, "BadRequest")
    assert space.patch("widgets", "w", widget("other"), APPLY, fieldManager="one").outline == (400, "BadRequest")
    with_managers = {**widget(), "metadata": {"name": "w", "managedFields": [{"manager": "x", "operation": "Apply"}]}}
    assert space.apply("widgets", with_managers, "one").outline == (400, "BadRequest")


def test_conditions_have_an_owner_each(space: Space) -> None:
    space.post("widgets", widget())
    space.apply("widgets", widget_status(("Ready", "True")), "operator", "status")
    both = space.apply("widgets", widget_status(("Loaded", "True")), "metal/mac", "status").body
    assert [c["type"] for c in both["status"]["conditions"]] == ["Ready", "Loaded"]
    refused = space.apply("widgets", widget_status(("Ready", "False")), "metal/mac", "status")
    assert refused.body["details"]["causes"] == [
        {
            "reason": "FieldManagerConflict",
            "message": 'conflict with "operator" with subresource "status"',
            "field": '.status.conditions[type="Ready"].status',
        }
    ]
    owned = {'k:{"type":"Loaded"}': {".": {}, "f:type": {}, "f:status": {}}}
    assert managers(both)["metal/mac", "Apply", "status"] == {"f:status": {"f:conditions": owned}}
    only = space.apply("widgets", widget_status(), "metal/mac", "status").body["status"]["conditions"]
    assert [c["type"] for c in only] == ["Ready"]
    twice = space.apply("widgets", widget_status(("A", "True"), ("A", "False")), "metal/mac", "status")
    assert twice.code == 500 and ".status.conditions" in twice.message and "uplicate" in twice.message


@pytest.mark.parametrize(("live", "applied", "merged"), [("ab", "cb", "abc"), ("cf", "ac", "acf"), ("a", "a", "a")])
def test_items_of_two_managers_are_kept_once(space: Space, live: str, applied: str, merged: str) -> None:
    space.apply("widgets", widget(tags=list(live)), "one")
    assert sorted(space.apply("widgets", widget(tags=list(applied)), "two").body["spec"]["tags"]) == list(merged)


def test_status_and_the_rest_are_declared_apart(space: Space) -> None:
    made = space.apply("widgets", {**widget(), "status": {"phase": "Ready"}}, "one")
    assert made.code == 201 and "status" not in made.body
    status = {**widget_status(("Ready", "True"), phase="Ready"), "spec": {"size": 9}}
    written = space.apply("widgets", status, "two", "status").body
    assert written["spec"]["size"] == 1 and written["status"]["phase"] == "Ready"
    assert written["metadata"]["generation"] == 1
    ignored = space.apply("widgets", {**widget(), "status": {"phase": "Lost"}}, "one")
    assert ignored.code == 200 and ignored.body["status"]["phase"] == "Ready"
    missing = widget_status(("Ready", "True"))
    missing["metadata"]["name"] = "none"
    assert space.apply("widgets", missing, "two", "status").outline == (404, "NotFound")


def test_a_version_in_a_declaration_is_a_precondition(space: Space) -> None:
    seen = space.apply("leases", lease(holderIdentity="a"), "metal/a").version
    newer = space.apply("leases", lease(holderIdentity="b"), "metal/b", force="true").version
    body = lease(holderIdentity="c")
    body["metadata"]["resourceVersion"] = seen
    stale = space.apply("leases", body, "metal/c", force="true")
    assert stale.outline == (409, "Conflict") and "the object has been modified" in stale.message
    body["metadata"]["resourceVersion"] = newer
    assert space.apply("leases", body, "metal/c", force="true").code == 200
    unborn = lease("new", holderIdentity="c")
    unborn["metadata"]["resourceVersion"] = seen
    assert space.apply("leases", unborn, "metal/c").code == 201
    stranger = lease("other")
    stranger["metadata"]["uid"] = "abc"
    assert space.apply("leases", stranger, "metal/c").outline == (409, "Conflict")


def test_endpoints_are_owned_whole(space: Space) -> None:
    space.apply("endpointslices", endpoint_slice("10.0.0.1"), "a")
    refused = space.apply("endpointslices", endpoint_slice("10.0.0.2"), "b")
    # The ports too, although both declare the same: what is there has the server's defaults in it.
    assert [c["field"] for c in refused.body["details"]["causes"]] == [".endpoints", ".ports"]
    owned = managers(space.get("endpointslices", "e").body)["a", "Apply", ""]
    assert owned == {"f:addressType": {}, "f:endpoints": {}, "f:ports": {}}


def test_the_ports_of_a_service_are_owned_one_by_one(space: Space) -> None:
    space.apply("services", service(ports=[{"port": 80, "name": "http"}]), "a")
    both = space.apply("services", service(ports=[{"port": 81, "name": "x"}]), "b").body["spec"]["ports"]
    assert [(port["port"], port["targetPort"]) for port in both] == [(80, 80), (81, 81)]
    refused = space.apply("services", service(ports=[{"port": 80, "name": "y"}]), "b")
    assert refused.body["details"]["causes"][0]["field"] == '.spec.ports[port=80,protocol="TCP"].name'


def test_nobody_owns_the_address_that_a_service_was_given(space: Space) -> None:
    made = space.post("services", service(), fieldManager="maker").body
    assert made["spec"]["clusterIP"]
    owned = managers(made)["maker", "Update", ""]["f:spec"]
    assert not {"f:clusterIP", "f:clusterIPs", "f:ipFamilies", "f:ipFamilyPolicy"} & set(owned)
    port = owned["f:ports"]['k:{"port":80,"protocol":"TCP"}']
    assert set(port) == {".", "f:port", "f:protocol", "f:targetPort"}


def test_a_dry_run_of_a_declaration_stores_nothing(space: Space) -> None:
    shown = space.apply("configmaps", config_map(a="1"), "a", dryRun="All")
    assert shown.code == 201 and "resourceVersion" not in shown.body["metadata"]
    assert space.get("configmaps", "c").outline == (404, "NotFound")
