"""CEL, as far as it is spoken: what rules say of values, and which rules are left alone."""

from __future__ import annotations

from typing import Any

import pytest

from metal_supervisor.apiserver.cel import Failed, Unsupported, evaluate, problems

VALUE: dict[str, Any] = {"a": 1, "b": "text", "list": [1, 2, 3], "none": None, "f": 1.5}


@pytest.mark.parametrize(
    ("rule", "verdict"),
    [
        ("self.a == 1 && self.b == 'text'", True),
        ('self.b != "text" || self.a < 2', True),
        ("!(self.a >= 2) && self.f > 1.0", True),
        ("has(self.a) != has(self.missing)", True),
        ("has(self.none)", False),
        ("has(self.missing.deeper)", False),
        ("self.a in [1, 2] && !(self.b in ['x', 'y'])", True),
        ("self.list.size() == 3 && self.b.size() == 4", True),
        ("double('1.5') == self.f && self.b.matches('^t.*t$')", True),
        ("self.missing == 1 || self.a == 1", True),
        ("self.a == 1 || self.missing == 1", True),
        ("self.missing == 1 && self.a == 2", False),
        ("self.a == 1 || self.a == 2 && false", True),
    ],
)
def test_rules_have_an_answer(rule: str, verdict: bool) -> None:
    assert evaluate(rule, VALUE) is verdict


@pytest.mark.parametrize(
    "rule",
    [
        "self.a + 1 == 2",
        "self.a == 1 ? true : false",
        "self.list.all(n, n > 0)",
        "self.list[0] == 1",
        "self.a > -1",
        "self == oldSelf",
        "self.b.lowerAscii() == 'b'",
        "self.b.startsWith('te')",
        "size(self.list) == 3",
        "int('7') > 6",
        "other.a",
        "self.",
        "(self.a",
        "'open",
        "",
        "a(1)",
    ],
)
def test_rules_in_more_than_is_spoken_are_left_alone(rule: str) -> None:
    with pytest.raises(Unsupported):
        evaluate(rule, VALUE)
    assert not list(problems({"x-kubernetes-validations": [{"rule": rule}]}, VALUE))


@pytest.mark.parametrize("rule", ["self.missing == 1", "double(self.b) > 1.0", "self.b > 1", "self.a.size() == 1"])
def test_rules_without_an_answer_are_broken(rule: str) -> None:
    with pytest.raises(Failed):
        evaluate(rule, VALUE)
    (problem,) = problems({"x-kubernetes-validations": [{"rule": rule, "message": "m"}]}, VALUE)
    assert problem.body.endswith(" evaluating rule: m")


def test_deep_rules_do_no_harm() -> None:
    with pytest.raises(Unsupported):
        evaluate("(" * 5000 + "true" + ")" * 5000, VALUE)


def test_rules_are_found_at_every_depth() -> None:
    positive = {"type": "integer", "x-kubernetes-validations": [{"rule": "self > 0", "message": "be positive"}]}
    schema = {"properties": {"a": positive, "list": {"items": positive}, "map": {"additionalProperties": positive}}}
    value = {"a": 0, "list": [1, 0], "map": {"k": 0, "n": None}}
    found = list(problems(schema, value))
    assert [problem.field for problem in found] == ["a", "list[1]", "map.k"]
    assert found[0].body == "Invalid value: 0: be positive"
