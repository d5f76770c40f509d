"""Evaluation of the rules that CRDs write in CEL (`x-kubernetes-validations`), for the usual subset of CEL.

LLMKube's definitions have a dozen of them, and a real cluster refuses an object that breaks one. The subset is
comparisons, logic, `in`, `has`, `size`, conversions, a few methods of strings, and `all`, `exists` and `exists_one`
over lists. A rule that needs more (arithmetic, `?:`, `oldSelf`, extension libraries) is not applied: a rule left out is
enforced later by the real cluster, while a misread one would wrongly refuse objects here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, reduce
from operator import eq, ge, gt, le, lt, ne, neg, not_
from typing import Any, TypeAlias

from .codec import listed
from .errors import Json, Problem, json_type, shown
from .schema import children

Scope: TypeAlias = Mapping[str, Any]
Node: TypeAlias = Callable[[Scope], Any]

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)|(?P<text>'[^'\\]*'|\"[^\"\\]*\")|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<mark>&&|\|\||==|!=|<=|>=|[!<>()\[\],.-]))"
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
_MACROS: dict[str, Callable[[list[bool]], bool]] = {
    "all": all, "exists": any, "exists_one": lambda hits: sum(hits) == 1,
}  # fmt: skip
_TEXT_METHODS: dict[str, Callable[[str, str], bool]] = {
    "startsWith": str.startswith,
    "endsWith": str.endswith,
    "contains": str.__contains__,
    "matches": lambda text, pattern: re.search(pattern, text) is not None,
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
        return bool(_compiled(rule)({"self": value}))
    except (TypeError, ValueError, re.error):
        raise Failed("no such overload") from None
    except RecursionError:
        raise Unsupported("nested too deeply") from None


def _python(rule: str) -> str:
    """A rule in Python's grammar, which has the same precedences if `!` is spelled `~`.

    Names get a prefix: some that are free in CEL are keywords of Python.
    """
    tokens: list[str] = []
    place = 0
    while rule[place:].strip():
        found = _TOKEN.match(rule, place)
        if found is None or found.lastgroup is None:
            raise Unsupported(rule[place:])
        text, place = found[found.lastgroup], found.end()
        if found.lastgroup == "text":
            text = repr(text[1:-1])
        elif text in _SPELLINGS:
            text = _SPELLINGS[text]
        elif found.lastgroup == "name":
            text = _PREFIX + text
        tokens.append(text)
    return " ".join(tokens)


@lru_cache(maxsize=512)
def _compiled(rule: str) -> Node:
    try:
        return _node(ast.parse(_python(rule).strip(), mode="eval").body, frozenset({"self"}))
    except (SyntaxError, ValueError, MemoryError) as problem:
        raise Unsupported(str(problem)) from None


def _node(tree: ast.AST, names: frozenset[str]) -> Node:
    """An expression as a function of its scope. Raises Unsupported for anything but the subset."""

    def inner(part: ast.AST) -> Node:
        return _node(part, names)

    match tree:
        case ast.Constant(value=value):
            return lambda _: value
        case ast.Name(id=name) if name.removeprefix(_PREFIX) in names:
            return lambda scope: scope[name.removeprefix(_PREFIX)]
        case ast.List(elts=elements):
            items = [inner(element) for element in elements]
            return lambda scope: [item(scope) for item in items]
        case ast.BoolOp(op=operator, values=values):
            decisive = isinstance(operator, ast.Or)
            return reduce(lambda left, right: _logic(left, right, decisive=decisive), map(inner, values))
        case ast.Compare(left=first, ops=operators, comparators=others):
            return reduce(_relation, zip(operators, map(inner, others), strict=True), inner(first))
        case ast.UnaryOp(op=ast.Invert() | ast.USub() as operator, operand=operand):
            change: Callable[[Any], Any] = not_ if isinstance(operator, ast.Invert) else neg
            return _called(change, inner(operand))
        case ast.Attribute(value=whole, attr=name):
            return _selected(inner(whole), lambda _: name.removeprefix(_PREFIX))
        case ast.Subscript(value=whole, slice=index):
            return _selected(inner(whole), inner(index))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]):
            return _function(name.removeprefix(_PREFIX), inner(argument))
        case ast.Call(func=ast.Attribute(value=whole, attr=name), args=arguments, keywords=[]):
            return _method(inner(whole), name.removeprefix(_PREFIX), arguments, names)
    raise Unsupported(type(tree).__name__)


def _called(function: Callable[..., Any], *arguments: Node) -> Node:
    return lambda scope: function(*[argument(scope) for argument in arguments])


def _function(name: str, argument: Node) -> Node:
    if name == "has":
        return lambda scope: _present(argument, scope)
    if name == "size":
        return _called(len, argument)
    conversions: dict[str, Callable[[Any], Any]] = {"double": float, "int": int, "string": str}
    if name not in conversions:
        raise Unsupported(name)
    return lambda scope: _converted(conversions[name], name, argument(scope))


def _method(whole: Node, name: str, arguments: list[ast.expr], names: frozenset[str]) -> Node:
    match arguments:
        case [] if name == "size":
            return _called(len, whole)
        case [argument] if name in _TEXT_METHODS:
            return _called(_TEXT_METHODS[name], whole, _node(argument, names))
        case [ast.Name(id=variable), test] if name in _MACROS:
            variable = variable.removeprefix(_PREFIX)
            holds = _node(test, names | {variable})
            return lambda scope: _MACROS[name]([bool(holds({**scope, variable: item})) for item in whole(scope)])
    raise Unsupported(name)


def _logic(left: Node, right: Node, *, decisive: bool) -> Node:
    """`||` or `&&`: the decisive answer of either side counts, even if the other side has none."""

    def decided(scope: Scope) -> bool:
        try:
            if bool(left(scope)) is decisive:
                return decisive
        except Failed:
            if bool(right(scope)) is decisive:
                return decisive
            raise
        return bool(right(scope))

    return decided


def _relation(left: Node, comparison: tuple[ast.cmpop, Node]) -> Node:
    operator, right = comparison
    compare = _COMPARISONS.get(type(operator))
    if compare is None:
        raise Unsupported(type(operator).__name__)
    return _called(compare, left, right)


def _present(inner: Node, scope: Scope) -> bool:
    try:
        return inner(scope) is not None
    except Failed:
        return False


def _converted(convert: Callable[[Any], Any], name: str, value: Any) -> Any:
    try:
        return convert(value)
    except (TypeError, ValueError):
        raise Failed(f"type conversion error from '{json_type(value)}' to '{name}'") from None


def _selected(node: Node, key: Node) -> Node:
    def select(scope: Scope) -> Any:
        try:
            return node(scope)[key(scope)]
        except (KeyError, IndexError, TypeError):
            raise Failed(f"no such key: {key(scope)}") from None

    return select
