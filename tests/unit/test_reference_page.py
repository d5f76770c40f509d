"""docs/reference.md is that of the schemas, and has every annotation."""

from __future__ import annotations

import reference_page

from metal_supervisor.spec.misspelled import ANNOTATIONS, DOMAIN
from metal_supervisor.spec.references import HOSTS_ANNOTATION


def test_the_page_is_that_of_the_schemas() -> None:
    assert reference_page.PAGE.read_text("utf-8") == reference_page.page(), "run `python tools/reference_page.py`"


def test_it_has_every_annotation() -> None:
    assert {f"{DOMAIN}{name}" for name in reference_page.ANNOTATIONS} == {*ANNOTATIONS, HOSTS_ANNOTATION}


def test_types_are_told_as_a_reader_wants_them() -> None:
    assert reference_page.kind({"type": "array", "items": {"type": "string"}}) == "list of string"
    assert reference_page.kind({"type": "integer", "minimum": 0}) == "integer 0…"
    assert reference_page.kind({"enum": ["", "a", "b"]}) == "`a`, `b`"
    assert reference_page.kind({"x-kubernetes-int-or-string": True}) == "integer or string"
    assert reference_page.default({"default": True}) == "`true`" and reference_page.default({"default": 0}) == "`0`"
    assert reference_page.default({}) == reference_page.default({"default": ""}) == ""
