"""Evaluation of the rules that CRDs write in CEL (`x-kubernetes-validations`), for the subset of CEL that ours use.

LLMKube's definitions and ours have two dozen rules, and a real cluster refuses an object that breaks one. They use
comparisons, logic, `in`, `has`, `size`, `double` and `matches`. A rule that needs more (macros such as `all`, indexes,
arithmetic, `?:`, `oldSelf`, extension libraries) is not applied: a real cluster enforces it later, while a misread rule
would wrongly refuse objects here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from operator import eq, ge, gt, le, lt, ne
from typing import Any

from .codec import listed
from .errors import Json, Problem, json_type, shown
from .schema import children

_TOKEN = re.compile(
    r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|(?P<text>'[^'\\]*'|\"[^\"\\]*\")|(?P<name>[A-Za-z_]\w*)"
    r"|&&|\|\||==|!=|<=|>=|[!<>()\[\],.]"
)
_SPELLINGS = {"&&": "and", "||": "or", "!": "~", "true": "True", "false": "False", "null": "None", "in": "in"}
_PREFIX = "cel_"
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: eq,
    ast.NotEq: ne,
    ast.Lt: lt,
    ast.LtE: le,
    ast.Gt: gt,
    ast.GtE: ge,
    ast.In: lambda a, b: a in b,
}


class Unsupported(Exception):
    """A rule that needs more of CEL than is supported here."""


class Failed(Exception):
    """A rule that cannot be evaluated for a value."""


def problems(schema: Json, value: Any, path: str = "") -> Iterator[Problem]:
    """Problems of a value that the schema itself has no objection to, by rules."""
    if value is None:
        return
    for rule in listed(schema.get("x-kubernetes-validations")):
        yield from _judged(rule, value, path)
    for inner, item, place in children(schema, value, path):
        yield from problems(inner, item, place)


def _judged(rule: Json, value: Any, path: str) -> Iterator[Problem]:
    text = str(rule.get("rule", ""))
    message = str(rule.get("message") or f"failed rule: {text}")
    try:
        if evaluate(text, value):
            return
        where = "" if isinstance(value, (dict, list)) else f"{shown(value)}: "
        yield Problem(path, "FieldValueInvalid", f"Invalid value: {where}{message}")
    except Unsupported:
        return
    except Failed as problem:
        kind = json_type(value)
        yield Problem(path, "FieldValueInvalid", f'Invalid value: "{kind}": {problem} evaluating rule: {message}')


def evaluate(rule: str, value: Any) -> bool:
    """True if a value satisfies a rule. Raises Unsupported and Failed."""
    try:
        return bool(_value(_parsed(rule), value))
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
def _parsed(rule: str) -> ast.expr:
    try:
        return ast.parse(_python(rule).strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError) as problem:
        raise Unsupported(str(problem)) from None


def _value(tree: ast.expr, this: Any) -> Any:
    """Value of an expression about `this`. Raises Unsupported for what is not spoken here, Failed for no value."""
    match tree:
        case ast.Constant(value=value):
            return value
        case ast.Name(id="cel_self"):
            return this
        case ast.List(elts=elements):
            return [_value(element, this) for element in elements]
        case ast.BoolOp(op=operator, values=operands):
            return _logic(operands, isinstance(operator, ast.Or), this)
        case ast.Compare(left=left, ops=[comparison], comparators=[right]) if type(comparison) in _COMPARISONS:
            return _COMPARISONS[type(comparison)](_value(left, this), _value(right, this))
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return not _value(operand, this)
        case ast.Attribute(value=whole, attr=name):
            return _field(name.removeprefix(_PREFIX), _value(whole, this))
        case ast.Call(func=ast.Name(id="cel_has"), args=[argument], keywords=[]):
            return _present(argument, this)
        case ast.Call(func=ast.Attribute(value=argument, attr="cel_size"), args=[], keywords=[]):
            return len(_value(argument, this))
        case ast.Call(func=ast.Name(id="cel_double"), args=[argument], keywords=[]):
            return _double(_value(argument, this))
        case ast.Call(func=ast.Attribute(value=text, attr="cel_matches"), args=[pattern], keywords=[]):
            return re.search(_value(pattern, this), _value(text, this)) is not None
    raise Unsupported(type(tree).__name__)


def _logic(operands: list[ast.expr], decisive: bool, this: Any) -> bool:
    """`||` or `&&`: the decisive answer of any operand counts, even if another one has none."""
    failed: Failed | None = None
    for operand in operands:
        try:
            if bool(_value(operand, this)) is decisive:
                return decisive
        except Failed as problem:
            failed = problem
    if failed:
        raise failed
    return not decisive


def _present(field: ast.expr, this: Any) -> bool:
    try:
        return _value(field, this) is not None
    except Failed:
        return False


def _field(name: str, whole: Any) -> Any:
    try:
        return whole[name]
    except (KeyError, TypeError):
        raise Failed(f"no such key: {name}") from None


def _double(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise Failed(f"type conversion error from '{json_type(value)}' to 'double'") from None
