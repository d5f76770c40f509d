"""Fields and annotations that nobody knows are told if they look like a known one."""

from __future__ import annotations

import pytest

from metal_supervisor.spec.misspelled import ANNOTATIONS, DOMAIN, MODEL, SERVICE, misspelled
from metal_supervisor.spec.on_demand import IDLE_TTL_ANNOTATION, ON_DEMAND_ANNOTATION
from metal_supervisor.spec.resources import ALIASES_ANNOTATION, RUNTIME_ANNOTATION
from tests.support.mistakes import MISTAKES
from tests.support.pages import mistakes_page
from tests.support.pages.fields_leaves import listed, top


@pytest.mark.parametrize(("kind", "known"), [("Model", MODEL), ("InferenceService", SERVICE)])
def test_the_known_fields_are_those_of_the_schemas(kind: str, known: frozenset[str]) -> None:
    assert {top(leaf.path) for leaf in listed(kind)} == known


def test_the_known_annotations_are_those_that_are_read() -> None:
    assert {ALIASES_ANNOTATION, IDLE_TTL_ANNOTATION, ON_DEMAND_ANNOTATION, RUNTIME_ANNOTATION} == ANNOTATIONS


def test_what_looks_like_a_known_one_is_told_and_nothing_else() -> None:
    spec = {"contextsize": 1, "contextSize": 1, "newInLlmkube": True, "\x1b[31mreplica": 1}
    annotations = {"metal-supervisor.io/aliasses": "x", "other.io/aliases": "y", "metal-supervisor.io/aliases": "z"}
    assert list(misspelled({"spec": spec, "metadata": {"annotations": annotations}}, SERVICE)) == [
        "spec.'\\x1b[31mreplica' (did you mean replicas?)",
        "spec.'contextsize' (did you mean contextSize?)",
        "annotation 'metal-supervisor.io/aliasses' (did you mean metal-supervisor.io/aliases?)",
    ]


def test_of_many_unknown_names_only_some_are_looked_at() -> None:
    """An object has room for 100,000, whose likes took the controller's thread 10 s."""
    many = {f"contextSize{number:06}": 1 for number in range(1000)}
    metadata = {"annotations": {f"{DOMAIN}{each}": 1 for each in many}}
    found = list(misspelled({"spec": many, "metadata": metadata}, SERVICE))
    assert len(found) == 2 * 64


@pytest.mark.parametrize("resource", [{}, {"spec": []}, {"spec": None, "metadata": {"annotations": 3}}])
def test_what_is_no_resource_has_none(resource: object) -> None:
    assert not list(misspelled(resource, SERVICE))  # type: ignore[arg-type]


def test_the_page_of_mistakes_is_what_the_tests_make() -> None:
    assert mistakes_page.PAGE.read_text("utf-8") == mistakes_page.page(), "mistakes_page.py writes it anew"
    assert len(MISTAKES) >= 30
