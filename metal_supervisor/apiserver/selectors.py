"""Label and field selectors, parsed once per request and applied to each object."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

from .codec import dig, section
from .errors import Json, bad_request
from .resources import Resource

Test: TypeAlias = Callable[[Json], bool]

_BETWEEN_TERMS = re.compile(r",(?![^()]*\))")
"""A comma that is not inside parentheses."""
_SET_TERM = re.compile(r"(\S+)\s+(in|notin)\s*\(([^()]*)\)")
_EQUALITY_TERM = re.compile(r"([^=!\s]+)\s*(==|=|!=)\s*(.*)")
_LABEL_KEY = re.compile(r"([a-z0-9A-Z.-]+/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")


def selector(resource: Resource, labels: str, fields: str) -> Test:
    """A test for objects that satisfy both selectors; 400 for one that cannot be read."""
    tests = [_label_test(term) for term in _split_terms(labels)]
    tests += [_field_test(resource, term) for term in _split_terms(fields)]
    return lambda obj: all(test(obj) for test in tests)


def _split_terms(text: str) -> list[str]:
    return [term.strip() for term in _BETWEEN_TERMS.split(text) if term.strip()]


def _label_test(term: str) -> Test:
    if found := _SET_TERM.fullmatch(term):
        key, operator, values = found[1], found[2], {value.strip() for value in found[3].split(",")}
    elif found := _EQUALITY_TERM.fullmatch(term):
        key, operator, values = found[1], "notin" if found[2] == "!=" else "in", {found[3].strip()}
    else:
        key, operator, values = term.removeprefix("!").strip(), "absent" if term.startswith("!") else "present", set()
    if not _LABEL_KEY.fullmatch(key):
        raise bad_request(f'unable to parse requirement: <nil>: Invalid value: "{term}": invalid label key')

    def test(obj: Json) -> bool:
        labels = section(obj, "metadata", "labels")
        if operator in ("present", "absent"):
            return (key in labels) is (operator == "present")
        return (labels.get(key) in values) is (operator == "in")

    return test


def _field_test(resource: Resource, term: str) -> Test:
    equality = _EQUALITY_TERM.fullmatch(term)
    if not equality:
        raise bad_request(f"invalid selector: '{term}'; can't understand '{term}'")
    name, wanted, negated = equality[1], equality[3].strip(), equality[2] == "!="
    known = {"metadata.name", *resource.selectable}
    if resource.namespaced:
        known.add("metadata.namespace")
    if name not in known:
        if resource.custom or resource.selectable:
            raise bad_request(f"field label not supported: {name}")
        only = '"metadata.name", "metadata.namespace"'
        raise bad_request(f'"{name}" is not a known field selector: only {only}')
    path = ["source", "component"] if name == "source" and resource.storage == "/events" else name.split(".")
    return lambda obj: (_field_text(obj, path) == wanted) is not negated


def _field_text(obj: Json, path: list[str]) -> str:
    value = dig(obj, *path)
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)
