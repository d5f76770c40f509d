"""Laws of the pure parts: patches, field sets, ages and printer columns."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_supervisor.apiserver.apply import Manager, apply, read_entries, track_update, write_entries
from metal_supervisor.apiserver.codec import clone
from metal_supervisor.apiserver.errors import ApiError
from metal_supervisor.apiserver.fields import PRESENT, decode_set, encode_set, leaves
from metal_supervisor.apiserver.patch import json_patch, merge_patch, strategic_patch
from metal_supervisor.apiserver.schema import settle, validate
from metal_supervisor.apiserver.tables import find, human_age

NAMES = st.sampled_from(["a", "b", "c"])
SCALARS = st.one_of(st.booleans(), st.integers(-3, 3), st.sampled_from(["x", "y"]))
VALUES = st.recursive(
    SCALARS, lambda inner: st.one_of(st.dictionaries(NAMES, inner, max_size=3), st.lists(inner, max_size=2))
)
OBJECTS = st.dictionaries(NAMES, VALUES, max_size=3)
ANY: dict[str, Any] = {"x-kubernetes-preserve-unknown-fields": True}
ITEMS = st.lists(
    st.tuples(st.sampled_from(["k1", "k2", "k3"]), st.integers(0, 2)), max_size=3, unique_by=lambda item: item[0]
)
KEYED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "spec": ANY,
        "list": {
            "type": "array",
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["key"],
            "items": {"type": "object", "properties": {"key": {"type": "string"}, "value": {"type": "integer"}}},
        },
    },
}
DECLARATIONS = st.builds(
    lambda spec, items: {"spec": spec, "list": [{"key": key, "value": value} for key, value in items]}, OBJECTS, ITEMS
)


def manager(name: str, operation: str = "Apply") -> Manager:
    return Manager(name, operation, "", "v1")


def applied(live: dict[str, Any], declared: dict[str, Any], name: str, *, force: bool = False) -> dict[str, Any]:
    merged, entries = apply(KEYED, live, declared, manager(name), force=force, has_status=False)
    merged = clone(merged)
    write_entries(merged, entries)
    return merged


def diff(old: Any, new: Any) -> Any:
    """The merge patch from one object to another."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    patch: dict[str, Any] = dict.fromkeys(old.keys() - new.keys())
    for name, value in new.items():
        if name not in old:
            patch[name] = value
        elif old[name] != value or type(old[name]) is not type(value):
            both = isinstance(old[name], dict) and isinstance(value, dict)
            patch[name] = diff(old[name], value) if both else value
    return patch


@given(OBJECTS, OBJECTS)
def test_a_merge_patch_leads_from_any_object_to_any_other(old: dict[str, Any], new: dict[str, Any]) -> None:
    before = clone(old)
    assert merge_patch(old, diff(old, new)) == new
    assert strategic_patch(ANY, old, diff(old, new)) == new
    assert old == before


@given(OBJECTS, OBJECTS)
def test_json_patches_do_what_they_say(old: dict[str, Any], new: dict[str, Any]) -> None:
    operations: list[dict[str, Any]] = [{"op": "remove", "path": f"/{name}"} for name in old]
    operations += [{"op": "add", "path": f"/{name}", "value": value} for name, value in new.items()]
    operations += [{"op": "test", "path": f"/{name}", "value": value} for name, value in new.items()]
    assert json_patch(old, operations) == new


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "remove", "path": "/nope"},
        {"op": "replace", "path": "/a/9", "value": 1},
        {"op": "replace", "path": "/a/\u00b2", "value": 1},
        {"op": "add", "path": "/a/-1", "value": 1},
        {"op": "add", "path": "/s/x", "value": 1},
        {"op": "move", "from": "/nope", "path": "/b"},
        {"op": "test", "path": "/s", "value": "other"},
        {"op": "remove", "path": ""},
        {"op": "jump", "path": "/a"},
        {"op": "add", "path": "a", "value": 1},
    ],
)
def test_a_json_patch_that_does_not_fit_is_refused(operation: dict[str, Any]) -> None:
    with pytest.raises(ApiError):
        json_patch({"a": [1], "s": "text"}, [operation])


def test_copies_in_a_json_patch_cannot_become_gigabytes() -> None:
    doubling = [{"op": "copy", "from": "", "path": f"/{number}"} for number in range(25)]
    repeating = [{"op": "copy", "from": "/a", "path": f"/{number}"} for number in range(9000)]
    for operations in (doubling, repeating):
        with pytest.raises(ApiError) as refused:
            json_patch({"a": "x" * 1000}, operations)
        assert refused.value.code == 422
    assert len(json_patch({"a": "x" * 1000}, repeating[:2000])) == 2001


@given(DECLARATIONS)
def test_field_sets_survive_their_encoding(declared: dict[str, Any]) -> None:
    paths = frozenset(leaves(KEYED, declared))
    assert decode_set(encode_set(paths)) == paths


@given(DECLARATIONS)
def test_applying_twice_is_applying_once(declared: dict[str, Any]) -> None:
    once = applied({"metadata": {}}, declared, "one")
    assert applied(once, declared, "one") == once


@settings(max_examples=200)
@given(DECLARATIONS, DECLARATIONS)
def test_what_is_no_longer_declared_goes(first: dict[str, Any], second: dict[str, Any]) -> None:
    live = applied(applied({"metadata": {}}, first, "one"), second, "one")
    assert set(leaves(KEYED, live)) == set(leaves(KEYED, second))


@settings(max_examples=200)
@given(DECLARATIONS, DECLARATIONS)
def test_an_apply_never_changes_what_somebody_else_owns(first: dict[str, Any], second: dict[str, Any]) -> None:
    live = applied({"metadata": {}}, first, "one")
    before = leaves(KEYED, live)
    try:
        after = applied(live, second, "two")
    except ApiError as problem:
        assert problem.code == 409
        after = applied(live, second, "two", force=True)
        for entry in read_entries(after).values():
            if entry.manager.name == "one":
                assert intact(entry.paths, before, leaves(KEYED, after))
        return
    assert intact(frozenset(before), before, leaves(KEYED, after))


def intact(paths: frozenset[Any], before: dict[Any, Any], after: dict[Any, Any]) -> bool:
    """Whether values are as they were. Of a container only the existence is owned, and others may fill it."""
    return all(before[path] is PRESENT or after.get(path) == before[path] for path in paths)


@given(DECLARATIONS, DECLARATIONS)
def test_after_an_update_every_field_has_an_owner(first: dict[str, Any], second: dict[str, Any]) -> None:
    live = applied({"metadata": {}}, first, "one")
    entries = track_update(KEYED, live, second, read_entries(live), manager("two", "Update"), False)
    owned = frozenset().union(*(entry.paths for entry in entries.values())) if entries else frozenset()
    assert owned == frozenset(leaves(KEYED, second))


def test_a_schema_prunes_defaults_and_complains_in_kubernetes_words() -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "spec": {
                "type": "object",
                "required": ["need"],
                "properties": {
                    "kind": {"type": "string", "default": "x", "pattern": "^x"},
                    "many": {"type": "array", "maxItems": 1, "items": {"type": "object", "properties": {"n": {}}}},
                    "size": {"x-kubernetes-int-or-string": True},
                    "count": {"type": "integer", "maximum": 3},
                },
            }
        },
    }
    obj: dict[str, Any] = {"spec": {"many": [{"m": 1}, {}], "count": None, "size": 1.5, "other": 1}}
    assert sorted(settle(schema, obj)) == ["spec.many[0].m", "spec.other"]
    assert obj["spec"]["kind"] == "x" and "count" not in obj["spec"]
    assert [str(problem) for problem in validate(schema, obj)] == [
        "spec.need: Required value",
        "spec.many: Too many: 2: must have at most 1 items",
        'spec.size: Invalid value: "number": spec.size in body must be of type integer,string: "number"',
    ]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (-5, "<invalid>"),
        (-1, "0s"),
        (0, "0s"),
        (119, "119s"),
        (120, "2m"),
        (599, "9m59s"),
        (600, "10m"),
        (10_799, "179m"),
        (10_800, "3h"),
        (28_799, "7h59m"),
        (28_800, "8h"),
        (172_799, "47h"),
        (172_800, "2d"),
        (180_000, "2d2h"),
        (691_200, "8d"),
        (63_071_999, "729d"),
        (63_072_000, "2y"),
        (70_000_000, "2y80d"),
        (252_288_000, "8y"),
    ],
)
def test_ages_read_as_kubectl_writes_them(seconds: int, shown: str) -> None:
    assert human_age(seconds) == shown


def test_printer_columns_find_what_their_paths_mean() -> None:
    obj = {
        "status": {
            "conditions": [{"type": "Loaded", "status": "True"}, {"type": "Ready", "status": "False"}],
        }
    }
    assert find(obj, '.status.conditions[?(@.type=="Loaded")].status') == ["True"]
    assert find(obj, ".status.conditions[?(@.type=='None')].status") == []
    assert find(obj, ".status.conditions[*].type") == ["Loaded", "Ready"]
    assert find(obj, ".spec.nothing") == []
