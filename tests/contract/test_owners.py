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
    space.post("leases", owned(lease("only-a"), first))

    def next_deleted() -> str:
        while (change := watch.next())[0] != "DELETED":
            pass
        return str(change[1]["metadata"]["name"])

    with space.watch("leases", resourceVersion=start) as watch:
        space.delete("inferenceservices", "a")
        assert next_deleted() == "only-a" and space.get("leases", "l").code == 200
        space.delete("inferenceservices", "b")
        assert next_deleted() == "l"
