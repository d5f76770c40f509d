"""Create, update, patch and delete: what is refused and how, what is dropped, and what is filled in."""

from __future__ import annotations

import pytest

from tests.contract.api import JSON_PATCH, MERGE, STRATEGIC, Space
from tests.contract.things import config_map, isvc, lease, model, service, widget

# ---- unknown fields, defaults, validation ------------------------------------------------------


def test_unknown_fields_are_refused_warned_about_or_dropped(space: Space) -> None:
    unknown = {**widget(foo=1), "zzz": 1}
    strict = space.post("widgets", unknown, fieldValidation="Strict")
    assert strict.outline == (400, "BadRequest")
    said = 'Widget in version "v1" cannot be handled as a Widget: strict decoding error: '
    assert strict.message == said + 'unknown field "spec.foo", unknown field "zzz"'
    warned = space.post("widgets", unknown)
    assert warned.code == 201 and "foo" not in warned.body["spec"] and "zzz" not in warned.body
    assert warned.headers["warning"] == '299 - "unknown field \\"spec.foo\\"", 299 - "unknown field \\"zzz\\""'
    ignored = space.post("widgets", widget("x", foo=1), fieldValidation="Ignore")
    assert ignored.code == 201 and "warning" not in ignored.headers
    odd = space.post("widgets", widget("y"), fieldValidation="Odd")
    assert odd.code in (400, 422) and "fieldValidation: Unsupported value" in odd.message


@pytest.mark.parametrize(
    ("plural", "thing"), [("widgets", widget("p")), ("leases", lease("p")), ("services", service("p"))]
)
def test_a_patch_with_an_unknown_field_is_refused(space: Space, plural: str, thing: dict[str, object]) -> None:
    space.post(plural, thing)
    refused = space.patch(plural, "p", {"spec": {"foo": 1}}, fieldValidation="Strict")
    assert refused.code in (400, 422)
    assert refused.message.endswith('strict decoding error: unknown field "spec.foo"')
    assert 'unknown field \\"spec.foo\\"' in space.patch(plural, "p", {"spec": {"foo": 1}}).headers["warning"]


def test_defaults_are_filled_in_where_their_parent_is(space: Space) -> None:
    made = space.post("widgets", widget(inner={}, colour=None)).body["spec"]
    assert made == {"size": 1, "colour": "red", "inner": {"a": "x"}}
    assert space.post("widgets", widget("x", size=2.0, inner=None)).body["spec"] == {"size": 2, "colour": "red"}


@pytest.mark.parametrize(
    ("spec", "field", "reason", "text"),
    [
        ({"size": "x"}, "spec.size", "FieldValueTypeInvalid", 'spec.size in body must be of type integer: "string"'),
        ({"size": 0}, "spec.size", "FieldValueInvalid", "0: spec.size in body should be greater than or equal to 1"),
        ({"size": 101}, "spec.size", "FieldValueInvalid", "spec.size in body should be less than or equal to 100"),
        ({"size": 1.5}, "spec.size", "FieldValueTypeInvalid", "spec.size in body must be of type int"),
        ({"colour": "x"}, "spec.colour", "FieldValueNotSupported", '"x": supported values: "red", "blue"'),
        ({"name": "A"}, "spec.name", "FieldValueInvalid", "spec.name in body should be at least 2 chars long"),
        ({"name": "abcdef"}, "spec.name", "FieldValueTooLong", "Too long: may not be more than 5 bytes"),
        ({"name": "ABC"}, "spec.name", "FieldValueInvalid", "spec.name in body should match '^[a-z]+$'"),
        ({"tags": ["a", "a"]}, "spec.tags[1]", "FieldValueDuplicate", 'Duplicate value: "a"'),
        ({"tags": list("abcd")}, "spec.tags", "FieldValueTooMany", "Too many: 4: must have at most 3 items"),
        (
            {"args": [1]},
            "spec.args[0]",
            "FieldValueTypeInvalid",
            'spec.args[0] in body must be of type string: "integer"',
        ),
        ({"extra": {"a": 1}}, "spec.extra.a", "FieldValueTypeInvalid", 'must be of type string: "integer"'),
        ({"on": "yes"}, "spec.on", "FieldValueTypeInvalid", 'spec.on in body must be of type boolean: "string"'),
        ({"port": 1.5}, "spec.port", "FieldValueTypeInvalid", "must be of type integer,string"),
    ],
)
def test_an_invalid_value_is_named(space: Space, spec: dict[str, object], field: str, reason: str, text: str) -> None:
    refused = space.post("widgets", widget() | {"spec": {"size": 1, **spec}})
    assert refused.outline == (422, "Invalid")
    found = {cause["field"]: cause for cause in refused.body["details"]["causes"]}[field]
    assert found["reason"] == reason and text in found["message"]
    assert refused.message.startswith('Widget.example.test "w" is invalid: ')
    details = refused.body["details"]
    assert (details["name"], details["group"], details["kind"]) == ("w", "example.test", "Widget")


def test_every_invalid_field_is_a_cause(space: Space) -> None:
    refused = space.post("widgets", widget() | {"spec": {"colour": "foo"}})
    assert refused.causes == {"spec.colour": "FieldValueNotSupported", "spec.size": "FieldValueRequired"}
    assert refused.message.startswith('Widget.example.test "w" is invalid: [')


def test_our_kinds_are_defaulted_and_checked(space: Space) -> None:
    made = space.post("inferenceservices", isvc(), fieldValidation="Strict")
    assert made.code == 201 and made.body["spec"]["replicas"] == 1
    assert made.body["metadata"]["generation"] == 1
    assert space.post("models", model(), fieldValidation="Strict").code == 201
    missing = space.post("inferenceservices", {**isvc("x"), "spec": {}})
    # The real one adds that it left out the rules written in CEL.
    assert missing.causes["spec.modelRef"] == "FieldValueRequired"
    wrong = space.post("inferenceservices", isvc("x", replicas="two"))
    assert wrong.causes["spec.replicas"] == "FieldValueTypeInvalid"


def test_metadata_has_rules_of_its_own(space: Space) -> None:
    def named(**metadata: object) -> dict[str, object]:
        return widget() | {"metadata": {"name": "k", **metadata}}

    nameless = space.post("widgets", widget() | {"metadata": {}})
    assert nameless.causes == {"metadata.name": "FieldValueRequired"} and "name" not in nameless.body["details"]
    assert space.post("widgets", widget("Bad_Name")).causes == {"metadata.name": "FieldValueInvalid"}
    labelled = space.post("widgets", named(labels={"a": "no good!"}))
    assert labelled.causes == {"metadata.labels": "FieldValueInvalid"}
    assert space.post("widgets", named(labels={"a": 1})).code in (400, 422)
    assert space.post("widgets", named(namespace="other")).outline == (400, "BadRequest")
    assert space.post("widgets", named(ownerReferences=[{"kind": "X"}])).outline == (422, "Invalid")


def test_a_body_says_what_it_is(space: Space) -> None:
    assert space.post("widgets", {**widget("k"), "kind": "Gadget"}).code in (400, 422)
    assert space.post("widgets", {**widget("k"), "apiVersion": "example.test/v2"}).outline == (400, "BadRequest")
    assert space.post("leases", {"metadata": {"name": "k"}}).code == 201
    assert space.post("leases", {**lease("x"), "kind": "Gadget"}).outline == (400, "BadRequest")
    for body in (b"{nonsense", b"", b"[]"):
        assert space.post("widgets", body).outline == (400, "BadRequest")


# ---- create, update, patch ---------------------------------------------------------------------


def test_a_name_is_taken_once(space: Space) -> None:
    space.post("widgets", widget())
    taken = space.post("widgets", widget())
    assert taken.outline == (409, "AlreadyExists")
    assert taken.message == 'widgets.example.test "w" already exists'
    assert taken.body["details"] == {"name": "w", "group": "example.test", "kind": "widgets"}
    assert space.api.request("POST", "/api/v1/namespaces/nowhere/configmaps", config_map()).outline == (404, "NotFound")


def test_a_stale_version_is_a_conflict(space: Space) -> None:
    old = space.post("widgets", widget()).body
    space.patch("widgets", "w", {"spec": {"size": 2}})
    stale = space.put("widgets", "w", old)
    assert stale.outline == (409, "Conflict") and "the object has been modified" in stale.message
    assert space.patch("widgets", "w", {"metadata": {"resourceVersion": "1"}}).outline == (409, "Conflict")
    space.post("services", service())
    assert space.put("services", "s", service(ports=[{"port": 81}])).code == 200
    assert space.patch("services", "s", {"metadata": {"resourceVersion": ""}}).code == 200


def test_a_put_creates_nothing(space: Space) -> None:
    for plural, thing in (("configmaps", config_map()), ("widgets", widget())):
        assert space.put(plural, thing["metadata"]["name"], thing).outline == (404, "NotFound")


def test_a_put_of_another_uid_is_a_conflict(space: Space) -> None:
    for plural, thing in (("widgets", widget("p")), ("services", service("p"))):
        version = space.post(plural, thing).version
        other = {**thing, "metadata": {"name": "p", "uid": "other", "resourceVersion": version}}
        for sub in ("", "status"):
            refused = space.put(plural, "p", other, sub)
            assert refused.outline == (409, "Conflict")


@pytest.mark.parametrize(
    ("plural", "thing"), [("widgets", widget("p")), ("leases", lease("p")), ("configmaps", config_map("p"))]
)
def test_what_replaces_an_object_has_its_name(space: Space, plural: str, thing: dict[str, object]) -> None:
    labelled = {"name": "p", "labels": {"a": "b"}, "finalizers": ["x.test/f"]}
    version = space.post(plural, {**thing, "metadata": labelled}).version
    removed = [{"op": "remove", "path": "/metadata/name"}]
    for refused in (
        space.patch(plural, "p", {"metadata": None}),
        space.patch(plural, "p", {"metadata": {"name": None}}),
        space.patch(plural, "p", removed, JSON_PATCH),
        space.put(plural, "p", {**thing, "metadata": {}}),
    ):
        assert refused.outline == (400, "BadRequest")
    assert space.get(plural, "p").version == version


def test_a_foreign_uid_is_refused(space: Space) -> None:
    space.post("widgets", widget())
    refused = space.patch("widgets", "w", {"metadata": {"uid": "other"}})
    assert refused.code in (409, 422)
    assert space.patch("widgets", "w", {"metadata": {"name": "other"}}).outline == (400, "BadRequest")


def test_status_and_spec_are_kept_apart_and_counted_apart(space: Space) -> None:
    made = space.post("widgets", {**widget(), "status": {"phase": "x"}}).body
    assert "status" not in made and made["metadata"]["generation"] == 1
    patched = {"status": {"phase": "y", "foo": 1}, "spec": {"size": 9}}
    status = space.patch("widgets", "w", patched, sub="status").body
    assert (status["spec"]["size"], status["status"], status["metadata"]["generation"]) == (1, {"phase": "y"}, 1)
    main = space.patch("widgets", "w", {"status": {"phase": "z"}, "spec": {"size": 2}}).body
    assert (main["status"]["phase"], main["metadata"]["generation"]) == ("y", 2)
    labelled = space.patch("widgets", "w", {"metadata": {"labels": {"a": "b"}}}).body
    assert labelled["metadata"]["generation"] == 2
    wrong = space.patch("widgets", "w", {"status": {"phase": 5}}, sub="status")
    assert wrong.causes == {"status.phase": "FieldValueTypeInvalid"}
    assert 'phase in body must be of type string: "integer"' in wrong.message
    assert space.patch("widgets", "none", {"status": {}}, sub="status").outline == (404, "NotFound")


def test_a_version_in_a_scale_is_a_precondition(space: Space) -> None:
    old = space.post("inferenceservices", isvc()).version
    assert space.patch("inferenceservices", "phi", {"spec": {"replicas": 2}}, sub="scale").body["spec"]["replicas"] == 2
    stale = {"metadata": {"resourceVersion": old}, "spec": {"replicas": 3}}
    assert space.patch("inferenceservices", "phi", stale, sub="scale").outline == (409, "Conflict")
    current = space.get("inferenceservices", "phi")
    assert current.body["spec"]["replicas"] == 2
    for count in ("two", -1):
        wrong = space.patch("inferenceservices", "phi", {"spec": {"replicas": count}}, sub="scale")
        assert wrong.code in (400, 422), wrong
    stale["metadata"]["resourceVersion"] = current.version
    assert space.patch("inferenceservices", "phi", stale, sub="scale").body["spec"]["replicas"] == 3


def test_a_write_that_changes_nothing_keeps_the_version(space: Space) -> None:
    made = space.post("widgets", widget())
    assert space.patch("widgets", "w", {"spec": {"size": 1}}).version == made.version
    assert space.put("widgets", "w", space.get("widgets", "w").body).version == made.version


def test_a_merge_patch_removes_with_null(space: Space) -> None:
    space.post("widgets", widget(extra={"a": "1", "b": "2"}))
    assert space.patch("widgets", "w", {"spec": {"extra": {"a": None}}}).body["spec"]["extra"] == {"b": "2"}
    assert space.patch("widgets", "w", {"spec": {"size": None}}).causes == {"spec.size": "FieldValueRequired"}
    assert space.patch("widgets", "none", {"spec": {}}).outline == (404, "NotFound")


def test_json_patches(space: Space) -> None:
    space.post("widgets", widget(args=["a", "b"]))
    operations = [
        {"op": "test", "path": "/spec/size", "value": 1},
        {"op": "add", "path": "/spec/args/1", "value": "x"},
        {"op": "move", "from": "/spec/args/0", "path": "/spec/args/-"},
        {"op": "remove", "path": "/spec/args/0"},
        {"op": "replace", "path": "/spec/size", "value": 4},
    ]
    assert space.patch("widgets", "w", operations, JSON_PATCH).body["spec"] == {
        "size": 4,
        "colour": "red",
        "args": ["b", "a"],
    }
    valueless = [{"op": "replace", "path": "/spec/name", "value": "abc"}, {"op": "add", "path": "/spec/name"}]
    assert space.patch("widgets", "w", valueless[:1], JSON_PATCH).body["spec"]["name"] == "abc"
    assert "name" not in space.patch("widgets", "w", valueless[1:], JSON_PATCH).body["spec"]
    for operation in (
        {"op": "test", "path": "/spec/size", "value": 5},
        {"op": "remove", "path": "/spec/none"},
        {"op": "add", "path": "/spec/a/b", "value": 1},
        {"op": "bogus", "path": "/spec/size"},
    ):
        refused = space.patch("widgets", "w", [operation], JSON_PATCH)
        assert refused.outline == (422, "Invalid")
        assert refused.message == "the server rejected our request due to an error in our request"
    assert space.patch("widgets", "w", {"op": "remove"}, JSON_PATCH).outline == (400, "BadRequest")


def test_strategic_patches_are_for_built_in_kinds(space: Space) -> None:
    space.post("services", service(ports=[{"name": "a", "port": 1}, {"name": "b", "port": 2}]))
    patch = {
        "spec": {"ports": [{"port": 3, "name": "c"}, {"port": 2, "targetPort": 9}, {"port": 1, "$patch": "delete"}]}
    }
    ports = space.patch("services", "s", patch, STRATEGIC).body["spec"]["ports"]
    assert sorted((port["name"], port["targetPort"]) for port in ports) == [("b", 9), ("c", 3)]
    keyless = space.patch("services", "s", {"spec": {"ports": [{"name": "x"}]}}, STRATEGIC)
    assert keyless.code == 500 and keyless.message.endswith("does not contain declared merge key: port")
    space.post("widgets", widget())
    refused = space.patch("widgets", "w", {"spec": {"size": 2}}, STRATEGIC)
    assert refused.outline == (415, "UnsupportedMediaType")


def test_directives_of_a_strategic_patch_order_retain_and_remove(space: Space) -> None:
    space.post("services", service("d", ports=[{"name": name, "port": port} for port, name in enumerate("abcd", 1)]))
    order = [{"port": port} for port in (4, 9, 1, 2, 3)]
    moved = {"$setElementOrder/ports": order, "ports": [{"port": 9, "name": "n"}]}
    ports = space.patch("services", "d", {"spec": moved}, STRATEGIC).body["spec"]["ports"]
    assert [port["name"] for port in ports] == ["d", "n", "a", "b", "c"]
    held = {"metadata": {"finalizers": ["x.test/a", "x.test/b"]}}
    assert space.patch("services", "d", held, STRATEGIC).body["metadata"]["finalizers"] == ["x.test/a", "x.test/b"]
    more = {"metadata": {"$setElementOrder/finalizers": ["x.test/c", "x.test/a"], "finalizers": ["x.test/c"]}}
    found = space.patch("services", "d", more, STRATEGIC).body["metadata"]["finalizers"]
    assert found == ["x.test/c", "x.test/a", "x.test/b"]
    freed = {"metadata": {"$deleteFromPrimitiveList/finalizers": ["x.test/a", "x.test/b", "x.test/c"]}}
    assert "finalizers" not in space.patch("services", "d", freed, STRATEGIC).body["metadata"]


# ---- dry runs, deletion, paths -----------------------------------------------------------------


def test_a_dry_run_answers_and_stores_nothing(space: Space) -> None:
    shown = space.post("widgets", widget(), dryRun="All")
    assert shown.code == 201 and shown.body["spec"]["colour"] == "red"
    assert "resourceVersion" not in shown.body["metadata"]
    assert space.get("widgets", "w").code == 404
    odd = space.post("widgets", widget(), dryRun="Some")
    assert odd.code in (400, 422) and "dryRun: Unsupported value" in odd.message
    space.post("widgets", widget())
    assert space.delete("widgets", "w", dryRun="All").code == 200
    assert space.get("widgets", "w").code == 200


@pytest.mark.parametrize(("plural", "thing"), [("widgets", widget("d")), ("leases", lease("d"))])
def test_a_deletion_may_have_preconditions(space: Space, plural: str, thing: dict[str, object]) -> None:
    uid = space.post(plural, thing).body["metadata"]["uid"]
    other = space.delete(plural, "d", {"preconditions": {"uid": "x"}})
    assert other.outline == (409, "Conflict")
    assert other.message.startswith("Operation cannot be fulfilled on ")
    stale = space.delete(plural, "d", {"preconditions": {"resourceVersion": "1"}})
    assert stale.outline == (409, "Conflict")
    odd = space.delete(plural, "d", {"propagationPolicy": "Odd"})
    assert odd.code in (400, 422) and "propagationPolicy: Unsupported value" in odd.message
    gone = space.delete(plural, "d", {"preconditions": {"uid": uid}})
    assert gone.code == 200 and gone.body["kind"] == "Status" and gone.body["details"]["uid"] == uid
    assert space.delete(plural, "d").outline == (404, "NotFound")


def test_finalizers_hold_an_object(space: Space) -> None:
    space.post("widgets", widget() | {"metadata": {"name": "w", "finalizers": ["example.test/x"]}})
    assert space.delete("widgets", "w").body["metadata"]["deletionTimestamp"]
    freed = space.patch("widgets", "w", {"metadata": {"finalizers": None}})
    assert freed.code == 200 and "finalizers" not in freed.body["metadata"]
    assert space.get("widgets", "w").outline == (404, "NotFound")
    with space.watch("widgets", resourceVersion=freed.version, timeoutSeconds=10) as watch:
        space.post("widgets", widget("later"))
        kind, gone = watch.next()
    assert (kind, gone["metadata"]["name"]) == ("DELETED", "w")
    assert int(gone["metadata"]["resourceVersion"]) > int(freed.version)


def test_wrong_verbs_and_paths(space: Space) -> None:
    missing = space.get("widgets", "none")
    assert missing.outline == (404, "NotFound") and missing.message == 'widgets.example.test "none" not found'
    assert missing.body["details"] == {"name": "none", "group": "example.test", "kind": "widgets"}
    leases, widgets = space.path("leases"), space.path("widgets")
    for method, path, body in (("PUT", leases, lease()), ("PATCH", leases, {}), ("POST", f"{leases}/x", lease())):
        refused = space.api.request(method, path, body, kind=MERGE if method == "PATCH" else "application/json")
        assert refused.outline == (405, "MethodNotAllowed") and refused.body["details"] == {}
    assert space.api.request("DELETE", "/api/v1/namespaces").outline == (405, "MethodNotAllowed")
    assert space.api.request("GET", f"{leases}/x/status").outline == (404, "NotFound")
    for path in ("/apis/example.test/v2/widgets", "/apis/nope/v1", "/api/v1/nope", "/nope"):
        assert space.api.request("GET", path).code == 404
    for path in (leases, widgets):
        assert space.api.request("POST", path, b"x", kind="text/plain").outline == (415, "UnsupportedMediaType")
        space.api.request("POST", path, lease() if path == leases else widget())
        name = "l" if path == leases else "w"
        refused = space.api.request("PATCH", f"{path}/{name}", {}, kind="text/plain")
        assert refused.outline == (415, "UnsupportedMediaType")
