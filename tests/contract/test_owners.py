"""Garbage collection: what belongs to an object goes with it, whoever is watching."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.api import Space
from tests.contract.things import endpoint_slice, isvc, lease, service


@pytest.fixture(autouse=True)
def _collected(space: Space) -> None:
    if not space.api.collects:
        pytest.skip("KUBEBUILDER_ASSETS has no kube-controller-manager, which collects")


def owned(thing: dict[str, Any], *owners: dict[str, Any]) -> dict[str, Any]:
    """A thing that belongs to others."""
    references = [
        {"apiVersion": o["apiVersion"], "kind": o["kind"], "name": o["metadata"]["name"], "uid": o["metadata"]["uid"]}
        for o in owners
    ]
    return {**thing, "metadata": {**thing["metadata"], "ownerReferences": references}}


def test_everything_of_a_service_goes_with_it(space: Space) -> None:
    owner = space.post("inferenceservices", isvc()).body
    things = {"leases": lease(), "services": service(), "endpointslices": endpoint_slice()}
    starts = {plural: space.post(plural, owned(thing, owner)).version for plural, thing in things.items()}
    assert space.delete("inferenceservices", "phi").code == 200
    for plural, start in starts.items():
        with space.watch(plural, resourceVersion=start) as watch:
            assert watch.next()[0] == "DELETED"


def test_an_owner_that_is_gone_already_is_noticed(space: Space) -> None:
    owner = space.post("inferenceservices", isvc()).body
    space.delete("inferenceservices", "phi")
    start = space.post("leases", owned(lease(), owner)).version
    with space.watch("leases", resourceVersion=start) as watch:
        assert watch.next()[0] == "DELETED"


def test_one_owner_is_enough_to_stay(space: Space) -> None:
    first, second = (space.post("inferenceservices", isvc(name)).body for name in ("a", "b"))
    start = space.post("leases", owned(lease(), first, second)).version
    space.delete("inferenceservices", "a")
    with space.watch("leases", resourceVersion=start) as watch:
        kind, left = watch.next()
        assert kind == "MODIFIED" and [o["name"] for o in left["metadata"]["ownerReferences"]] == ["b"]
        space.delete("inferenceservices", "b")
        assert watch.next()[0] == "DELETED"


def test_only_what_says_so_holds_up_a_foreground_deletion(space: Space) -> None:
    owner = space.post("inferenceservices", isvc()).body
    start = space.get("inferenceservices").version
    held = owned(lease(), owner)
    held["metadata"]["finalizers"] = ["x.test/f"]
    space.post("leases", held)
    assert space.delete("inferenceservices", "phi", {"propagationPolicy": "Foreground"}).code == 200
    with space.watch("inferenceservices", resourceVersion=start) as watch:
        assert [watch.next()[0] for _ in range(2)] == ["MODIFIED", "DELETED"]


def test_a_foreground_deletion_goes_down_to_the_last_dependent(space: Space) -> None:
    owner = space.post("inferenceservices", isvc()).body
    middle = owned(lease(), owner)
    middle["metadata"]["finalizers"] = ["x.test/f"]
    middle["metadata"]["ownerReferences"][0]["blockOwnerDeletion"] = True
    inner = owned(service(), space.post("leases", middle).body)
    start = space.post("services", inner).version
    space.delete("inferenceservices", "phi", {"propagationPolicy": "Foreground"})
    with space.watch("services", resourceVersion=start) as watch:
        assert watch.next()[0] == "DELETED"
    assert space.get("leases", "l").body["metadata"]["deletionTimestamp"]
    assert space.get("inferenceservices", "phi").code == 200


def test_what_belongs_to_each_other_can_be_deleted(space: Space) -> None:
    first = space.post("leases", lease("a")).body
    second = owned(lease("b"), first)
    references = owned(lease("a"), space.post("leases", second).body)["metadata"]["ownerReferences"]
    for name, given in (("a", references), ("b", second["metadata"]["ownerReferences"])):
        blocking = [{**reference, "blockOwnerDeletion": True} for reference in given]
        start = space.patch("leases", name, {"metadata": {"ownerReferences": blocking}}).version
    space.delete("leases", "a", {"propagationPolicy": "Foreground"})
    with space.watch("leases", resourceVersion=start) as watch:
        gone: list[str] = []
        while len(gone) < 2:
            kind, obj = watch.next()
            gone += [obj["metadata"]["name"]] if kind == "DELETED" else []
    assert sorted(gone) == ["a", "b"]
