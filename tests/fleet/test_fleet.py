"""A small fleet on a real API server: what must hold however slow the machine is. `make fleet` measures a large one."""

from __future__ import annotations

import pytest

from tests.fleet.figures import Figures
from tests.fleet.fleet import Plan, measure, overlaps
from tests.fleet.mac import Held
from tests.fleet.tally import what

PLAN = Plan(
    macs=6, services=60, lost=1, workers=1, lease_s=5.0, quiet_s=3.0, rest_s=10.0, after_s=5.0, down_s=1.0, within_s=120
)
OTHERS_AT_REST = {"patch leases", "patch endpointslices", "get services", "get inferenceservices"}


@pytest.fixture(scope="module")
def figures() -> Figures:
    found = measure(PLAN)
    print(found.table())
    return found


def test_each_slot_is_claimed_once_and_held_by_one_mac_at_a_time(figures: Figures) -> None:
    assert figures.claims == PLAN.services, "a slot was claimed twice"
    assert (figures.restart_moves, figures.living_moves) == (0, 0)
    assert figures.overlaps == [] and figures.errors == []
    assert figures.lost_slots and figures.moved_s > 0


def test_what_rest_costs_grows_with_nothing(figures: Figures) -> None:
    """Upper bounds of counts, which a slow machine stays below."""
    unknown = {name for name in figures.rest.requests if not name.startswith(("watch ", "list "))} - OTHERS_AT_REST
    assert not unknown
    renewals = figures.rest.seconds / (PLAN.lease_s / 5 * 0.9) + 2
    assert figures.rest.requests["patch leases"] <= PLAN.macs * renewals
    assert figures.passes_a_minute < 60, "a renewal of a peer is no reason for a pass: there are 300 a minute"


def test_the_endpoints_of_a_lost_mac_are_withdrawn_by_few(figures: Figures) -> None:
    """One Mac looks for them at once; the others look later, and find nothing to do."""
    assert figures.vanish.requests["list endpointslices"] <= PLAN.macs - PLAN.lost


@pytest.mark.parametrize(("begins", "holds_too"), [(4.0, True), (6.0, False)])
def test_a_slot_that_two_macs_take_for_their_own_is_found(begins: float, holds_too: bool) -> None:
    key = ("default", "tiny")
    first: list[Held] = [(1.0, key, 0, True), (5.0, key, 0, False)]
    assert bool(overlaps({"mac-a": first, "mac-b": [(begins, key, 0, True)]}, {})) is holds_too
    assert not overlaps({"mac-a": first[:1], "mac-b": [(begins, key, 0, True)]}, {"mac-a": 3.0}), "it vanished before"


@pytest.mark.parametrize(
    ("method", "url", "named"),
    [
        ("GET", "/apis/coordination.k8s.io/v1/namespaces/a/leases?watch=true&x=y", "watch leases"),
        ("GET", "/apis/inference.llmkube.dev/v1alpha1/models?limit=500", "list models"),
        ("GET", "/api/v1/namespaces/a/services/tiny", "get services"),
        (
            "PATCH",
            "/apis/inference.llmkube.dev/v1alpha1/namespaces/a/inferenceservices/t/status?force=true",
            "patch inferenceservices/status",
        ),
    ],
)
def test_a_request_is_named_by_verb_and_resource(method: str, url: str, named: str) -> None:
    assert what(method, url) == named
