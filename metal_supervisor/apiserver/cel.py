"""Evaluation of the rules that CRDs write in CEL (`x-kubernetes-validations`), for the usual subset of CEL.

LLMKube's definitions have a dozen of them, and a real cluster refuses an object that breaks one. The subset is what
those need and a little more: comparisons, logic, `in`, `has`, `size`, conversions, and a few methods of strings. A rule
that needs more (macros such as `all`, indexes, arithmetic, `?:`, `oldSelf`, extension libraries) is not applied: a rule
left out is enforced later by the real cluster, while a misread one would wrongly refuse objects here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import lru_cache, partial, reduce
from operator import eq, ge, gt, le, lt, ne, not_
from typing import Any, TypeAlias

from .codec import listed
from .errors import Json, Problem, json_type, shown
from .schema import children

Node: TypeAlias = Callable[[Any], Any]
"""An expression as a function of `self`, the value that a rule is about."""

_TOKEN = re.compile(
    r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|(?P<text>'[^'\\]*'|\"[^\"\\]*\")|(?P<name>[A-Za-z_]\w*)"
    r"|&&|\|\||==|!=|<=|>=|[!<>()\[\],.]"
)
_BLOCKING = ("NotSupported", "Required", "TooLong", "TooMany", "TypeInvalid")
_UNCHECKED = (
    "Invalid value: null: some validation rules were not checked because the object was invalid; "
    "correct the existing errors to complete validation"
)
_SPELLINGS = {"&&": "and", "||": "or", "!": "~", "true": "True", "false": "False", "null": "None", "in": "in"}
_PREFIX = "cel_"
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: eq, ast.NotEq: ne, ast.Lt: lt, ast.LtE: le, ast.Gt: gt, ast.GtE: ge, ast.In: lambda a, b: a in b,
}  # fmt: skip
_METHODS: dict[str, Callable[[str, str], bool]] = {
    "cel_startsWith": str.startswith,
    "cel_endsWith": str.endswith,
    "cel_contains": str.__contains__,
    "cel_matches": lambda text, pattern: re.search(pattern, text) is not None,
}


class Unsupported(Exception):
    """A rule that needs more of CEL than is supported here."""


class Failed(Exception):
    """A rule that cannot be evaluated for a value."""


def problems(schema: Json, value: Any, found: list[Problem]) -> list[Problem]:
    """Problems by rules. `found`: those by the schema itself, which is validated first."""
    if any(problem.reason.removeprefix("FieldValue") in _BLOCKING for problem in found):
        return [Problem("<nil>", "FieldValueInvalid", _UNCHECKED)] if _has_rules(schema) else []
    return list(_broken(schema, value, ""))


def _has_rules(schema: Any) -> bool:
    if isinstance(schema, dict):
        return bool(schema.get("x-kubernetes-validations")) or any(_has_rules(inner) for inner in schema.values())
    return False


def _broken(schema: Json, value: Any, path: str) -> Iterator[Problem]:
    if value is None:
        return
    for rule in listed(schema.get("x-kubernetes-validations")):
        yield from _judged(rule, value, path)
    for inner, item, place in children(schema, value, path):
        yield from _broken(inner, item, place)


def _judged(rule: Json, value: Any, path: str) -> Iterator[Problem]:
    text = str(rule.get("rule", ""))
    message = str(rule.get("message") or f"failed rule: {text}")
    field = path + str(rule.get("fieldPath") or "")
    try:
        if evaluate(text, value):
            return
        where = "" if isinstance(value, (dict, list)) else f"{shown(value)}: "
        yield Problem(field, str(rule.get("reason") or "FieldValueInvalid"), f"Invalid value: {where}{message}")
    except Unsupported:
        return
    except Failed as problem:
        kind = json_type(value)
        yield Problem(field, "FieldValueInvalid", f'Invalid value: "{kind}": {problem} evaluating rule: {message}')


def evaluate(rule: str, value: Any) -> bool:
    """True if a value satisfies a rule. Raises Unsupported and Failed."""
    try:
        return bool(_compiled(rule)(value))
    except (TypeError, ValueError, re.error):
        raise Failed("no such overload") from None
    except RecursionError:
        raise Unsupported("nested too deeply") from None


def _python(rule: str) -> str:
    """A rule in Python's grammar, which has the same precedences if `!` is spelled `~`.

    Names get a prefix: some that are free in CEL are keywords of Python.
    """
    if rest := _TOKEN.sub("", rule).strip():
        raise Unsupported(rest)
    return " ".join(_spelled(token) for token in _TOKEN.finditer(rule))


def _spelled(token: re.Match[str]) -> str:
    text = token[0]
    if token["text"]:
        return repr(text[1:-1])
    return _SPELLINGS.get(text) or (_PREFIX + text if token["name"] else text)


@lru_cache(maxsize=512)
def _compiled(rule: str) -> Node:
    try:
        return _node(ast.parse(_python(rule).strip(), mode="eval").body)
    except (SyntaxError, ValueError, MemoryError) as problem:
        raise Unsupported(str(problem)) from None


def _node(tree: ast.AST) -> Node:
    """The function that an expression stands for. Raises Unsupported for anything but the subset."""
    match tree:
        case ast.Constant(value=value):
            return lambda _: value
        case ast.Name(id="cel_self"):
            return lambda this: this
        case ast.List(elts=elements):
            items = [_node(element) for element in elements]
            return lambda this: [item(this) for item in items]
        case ast.BoolOp(op=operator, values=values):
            decisive = isinstance(operator, ast.Or)
            return reduce(lambda left, right: partial(_logic, left, right, decisive), map(_node, values))
        case ast.Compare(left=first, ops=comparisons, comparators=others):
            node = _node(first)
            for comparison, other in zip(comparisons, others, strict=True):
                if type(comparison) not in _COMPARISONS:
                    raise Unsupported(type(comparison).__name__)
                node = _called(_COMPARISONS[type(comparison)], node, _node(other))
            return node
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return _called(not_, _node(operand))
        case ast.Attribute(value=whole, attr=name):
            return _called(partial(_field, name.removeprefix(_PREFIX)), _node(whole))
        case ast.Call(func=ast.Name(id="cel_has"), args=[argument], keywords=[]):
            return partial(_present, _node(argument))
        case ast.Call(func=ast.Attribute(value=argument, attr="cel_size"), args=[], keywords=[]):
            return _called(len, _node(argument))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            return _called(_FUNCTIONS[name], _node(argument))
        case ast.Call(func=ast.Attribute(value=text, attr=name), args=[argument], keywords=[]) if name in _METHODS:
            return _called(_METHODS[name], _node(text), _node(argument))
    raise Unsupported(type(tree).__name__)


def _called(function: Callable[..., Any], *arguments: Node) -> Node:
    return lambda this: function(*[argument(this) for argument in arguments])


def _logic(left: Node, right: Node, decisive: bool, this: Any) -> bool:
    """`||` or `&&`: the decisive answer of either side counts, even if the other side has none."""
    try:
        if bool(left(this)) is decisive:
            return decisive
    except Failed:
        if bool(right(this)) is decisive:
            return decisive
        raise
    return bool(right(this))


def _present(field: Node, this: Any) -> bool:
    try:
        return field(this) is not None
    except Failed:
        return False


def _field(name: str, whole: Any) -> Any:
    try:
        return whole[name]
    except (KeyError, TypeError):
        raise Failed(f"no such key: {name}") from None


def _converted(name: str, convert: Callable[[Any], Any], value: Any) -> Any:
    try:
        return convert(value)
    except (TypeError, ValueError):
        raise Failed(f"type conversion error from '{json_type(value)}' to '{name}'") from None


_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "cel_double": partial(_converted, "double", float),
    "cel_int": partial(_converted, "int", int),
    "cel_string": partial(_converted, "string", str),
    "cel_size": len,
}
