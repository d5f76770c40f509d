"""Lists and watches: selectors, bookmarks, and versions too old or not yet there."""

from __future__ import annotations

import pytest

from tests.contract.api import Space
from tests.contract.things import config_map, lease, widget


def labelled(name: str, **labels: str) -> dict[str, object]:
    return {**lease(name), "metadata": {"name": name, "labels": labels}}


def names(reply_body: dict[str, list[dict[str, dict[str, str]]]]) -> list[str]:
    return [item["metadata"]["name"] for item in reply_body["items"]]


# ---- lists -------------------------------------------------------------------------------------


def test_lists_have_the_kind_of_their_items(space: Space) -> None:
    space.post("leases", lease())
    space.post("widgets", widget())
    typed, custom = space.get("leases").body, space.get("widgets").body
    assert (typed["kind"], typed["apiVersion"]) == ("LeaseList", "coordination.k8s.io/v1")
    assert not typed["metadata"].get("continue")
    assert (custom["kind"], custom["items"][0]["kind"]) == ("WidgetList", "Widget")


def test_the_columns_of_a_custom_kind_have_the_types_that_it_declares(space: Space) -> None:
    accept = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}
    for plural, name, kind in (("models", "Age", "date"), ("leases", "Age", "string"), ("secrets", "Data", "string")):
        table = space.api.request("GET", space.path(plural), headers=accept).body
        assert {column["name"]: column["type"] for column in table["columnDefinitions"]}[name] == kind


@pytest.mark.parametrize(
    ("selector", "found"),
    [
        ("odd=1", "bd"),
        ("odd==1", "bd"),
        ("odd!=1", "ac"),
        ("!odd", ""),
        ("odd", "abcd"),
        ("odd=0,n=c", "c"),
        ("odd in (0),n notin (c)", "a"),
    ],
)
def test_label_selectors(space: Space, selector: str, found: str) -> None:
    for place, name in enumerate("abcd"):
        space.post("leases", labelled(name, n=name, odd=str(place % 2)))
    assert "".join(names(space.get("leases", labelSelector=selector).body)) == found


def test_field_selectors(space: Space) -> None:
    for name in "ab":
        space.post("leases", lease(name))
    space.post("widgets", widget())
    assert names(space.get("leases", fieldSelector="metadata.name=a").body) == ["a"]
    assert names(space.get("leases", fieldSelector=f"metadata.name!=a,metadata.namespace={space.name}").body) == ["b"]
    refused = space.get("leases", fieldSelector="spec.x=1")
    assert refused.outline == (400, "BadRequest") and "spec.x" in refused.message
    refused = space.get("widgets", fieldSelector="spec.size=1")
    assert refused.outline == (400, "BadRequest") and refused.message.endswith("field label not supported: spec.size")
    for query in ({"labelSelector": "a b"}, {"labelSelector": "a in b"}, {"fieldSelector": "x"}):
        assert space.get("leases", **query).outline == (400, "BadRequest")


@pytest.mark.parametrize("selector", ["on=yes,", ",", "on=yes,,on", "on=é", "on=a b", "on!=a_", "on in (yes,é)", "/on"])
def test_a_selector_with_a_slip_selects_nothing_at_all(space: Space, selector: str) -> None:
    space.post("leases", labelled("l", on="yes"))
    assert space.get("leases", labelSelector=selector).outline == (400, "BadRequest")
    assert names(space.get("leases", fieldSelector="metadata.name=l,", labelSelector="on in (yes,)").body) == ["l"]


# ---- watches -----------------------------------------------------------------------------------


def test_a_watch_resumes_where_it_is_told_to(space: Space) -> None:
    before = space.get("leases").version
    made = space.post("leases", lease())
    space.patch("leases", "l", {"spec": {"holderIdentity": "a"}})
    gone = space.delete("leases", "l")
    assert gone.code == 200
    with space.watch("leases", resourceVersion=before, timeoutSeconds=10) as watch:
        events = [watch.next() for _ in range(3)]
    assert [kind for kind, _ in events] == ["ADDED", "MODIFIED", "DELETED"]
    versions = [int(obj["metadata"]["resourceVersion"]) for _, obj in events]
    assert versions[0] == int(made.version) and versions == sorted(set(versions))
    assert events[0][1]["kind"] == "Lease" and events[2][1]["spec"]["holderIdentity"] == "a"
    with space.watch("leases", resourceVersion=made.version, timeoutSeconds=10) as watch:
        assert watch.next()[0] == "MODIFIED"


def test_without_a_version_a_watch_starts_with_what_is_there(space: Space) -> None:
    space.post("leases", lease("a"))
    for query in ({}, {"resourceVersion": "0"}):
        with space.watch("leases", timeoutSeconds=10, **query) as watch:
            assert watch.next()[0] == "ADDED"
            space.post("leases", lease(f"b{len(query)}"))
            kind, obj = watch.next()
            assert (kind, obj["metadata"]["name"]) == ("ADDED", f"b{len(query)}")
            space.delete("leases", f"b{len(query)}")


def test_objects_enter_and_leave_a_selection(space: Space) -> None:
    start = space.get("leases").version
    with space.watch("leases", resourceVersion=start, labelSelector="on=yes", timeoutSeconds=10) as watch:
        space.post("leases", labelled("l", on="no"))
        space.patch("leases", "l", {"metadata": {"labels": {"on": "yes"}}})
        space.patch("leases", "l", {"spec": {"holderIdentity": "a"}})
        space.patch("leases", "l", {"metadata": {"labels": {"on": "no"}}})
        space.patch("leases", "l", {"metadata": {"labels": {"on": "yes"}}})
        space.delete("leases", "l")
        events = [watch.next() for _ in range(5)]
    assert [kind for kind, _ in events] == ["ADDED", "MODIFIED", "DELETED", "ADDED", "DELETED"]
    versions = [int(obj["metadata"]["resourceVersion"]) for _, obj in events]
    assert versions == sorted(set(versions))
    # What leaves is shown as it was while it was in the selection.
    assert [obj["metadata"]["labels"] for _, obj in events] == [{"on": "yes"}] * 5
    with space.watch("leases", resourceVersion=start, fieldSelector="metadata.name=b", timeoutSeconds=10) as watch:
        for name in "ab":
            space.post("leases", lease(name))
        assert watch.next()[1]["metadata"]["name"] == "b"


def test_whoever_takes_bookmarks_is_told_where_the_present_ends(space: Space) -> None:
    space.post("leases", lease())
    asked = {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
    for query in ({}, asked):
        with space.watch("leases", allowWatchBookmarks="true", timeoutSeconds=10, **query) as watch:
            assert watch.next()[0] == "ADDED"
            kind, mark = watch.next()
        assert kind == "BOOKMARK" and mark["kind"] == "Lease"
        assert mark["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}
        assert int(mark["metadata"]["resourceVersion"]) > 0


def test_a_bookmark_moves_a_quiet_watch_on_before_it_ends(space: Space) -> None:
    start = space.post("leases", lease()).version
    elsewhere = space.api.space()
    with space.watch("leases", allowWatchBookmarks="true", resourceVersion=start, timeoutSeconds=3) as watch:
        moved = elsewhere.post("leases", lease()).version
        events = watch.rest()
    assert events and {kind for kind, _ in events} == {"BOOKMARK"}
    assert int(events[-1][1]["metadata"]["resourceVersion"]) >= int(moved)


def test_without_leave_there_are_no_bookmarks_and_the_watch_ends_in_time(space: Space) -> None:
    space.post("leases", lease())
    with space.watch("leases", timeoutSeconds=1) as watch:
        assert [kind for kind, _ in watch.rest()] == ["ADDED"]


def test_a_watch_from_the_future_gets_no_events(space: Space) -> None:
    with space.watch("leases", resourceVersion="999999999", timeoutSeconds=1) as watch:
        space.post("leases", lease())
        got = [(kind, item.get("code"), item.get("reason")) for kind, item in watch.rest()]
    assert got == ([("ERROR", 410, "Expired")] if space.api.name == "embedded" else [])


def test_history_that_is_gone_is_said_to_be(space: Space) -> None:
    old = space.post("leases", lease()).version
    space.post("configmaps", config_map())
    space.post("leases", lease("m"))
    space.patch("leases", "l", {"spec": {"holderIdentity": "a"}})
    space.api.expire()
    with space.watch("leases", resourceVersion=old, timeoutSeconds=10) as watch:
        kind, status = watch.next()
        assert watch.rest() == []
    assert (kind, status["kind"], status["code"], status["reason"]) == ("ERROR", "Status", 410, "Expired")
    assert status["message"].startswith(f"too old resource version: {old} (")
    assert len(space.get("leases").body["items"]) == 2
    fresh = space.get("leases").version
    with space.watch("leases", resourceVersion=fresh, timeoutSeconds=10) as watch:
        space.post("leases", lease("after"))
        assert watch.next()[1]["metadata"]["name"] == "after"
