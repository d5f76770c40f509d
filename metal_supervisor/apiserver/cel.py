"""Evaluation of the rules that CRDs write in CEL (`x-kubernetes-validations`), for the usual subset of CEL.

LLMKube's definitions have a dozen of them, and a real cluster refuses an object that breaks one. The subset is
comparisons, logic, `in`, `has`, `size`, conversions, a few methods of strings, and `all`, `exists` and `exists_one`
over lists. A rule that needs more (arithmetic, `oldSelf`, extension libraries) is not applied: a rule left out is
enforced later by the real cluster, while a misread one would wrongly refuse objects here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, TypeAlias

from .codec import listed
from .errors import Json, Problem, json_type, shown
from .schema import child_schema, join

Scope: TypeAlias = Mapping[str, Any]
Node: TypeAlias = Callable[[Scope], Any]

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)|(?P<text>'[^'\\]*'|\"[^\"\\]*\")|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<mark>&&|\|\||==|!=|<=|>=|[!<>()\[\],.?:-]))"
)
_BLOCKING = ("NotSupported", "Required", "TooLong", "TooMany", "TypeInvalid")
_UNCHECKED = (
    "Invalid value: null: some validation rules were not checked because the object was invalid; "
    "correct the existing errors to complete validation"
)
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}
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
    if not _has_rules(schema):
        return []
    if any(problem.reason.removeprefix("FieldValue") in _BLOCKING for problem in found):
        return [Problem("<nil>", "FieldValueInvalid", _UNCHECKED)]
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
    if isinstance(value, dict):
        for name in sorted(value):
            inner = child_schema(schema, name)
            if inner and not (path == "" and name == "metadata"):
                yield from _broken(inner, value[name], join(path, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _broken(schema.get("items") or {}, item, f"{path}[{index}]")


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


@lru_cache(maxsize=512)
def _compiled(rule: str) -> Node:
    return _Parser(rule).whole()


class _Parser:
    """Recursive-descent parser that turns a rule into a function of its scope."""

    def __init__(self, rule: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        self._names = ["self"]
        place = 0
        while rule[place:].strip():
            found = _TOKEN.match(rule, place)
            if found is None or found.lastgroup is None:
                raise Unsupported(rule[place:])
            self._tokens.append((found.lastgroup, found[found.lastgroup]))
            place = found.end()

    def whole(self) -> Node:
        node = self._choice()
        if self._tokens:
            raise Unsupported(self._tokens[0][1])
        return node

    def _take(self, *marks: str) -> str:
        """The next token if it is one of these, else nothing."""
        if self._tokens and self._tokens[0][0] in ("mark", "name") and self._tokens[0][1] in marks:
            return self._tokens.pop(0)[1]
        return ""

    def _need(self, mark: str) -> None:
        if not self._take(mark):
            raise Unsupported(f"{mark} is missing")

    def _choice(self) -> Node:
        condition = self._either()
        if not self._take("?"):
            return condition
        yes = self._choice()
        self._need(":")
        no = self._choice()
        return lambda scope: yes(scope) if condition(scope) else no(scope)

    def _either(self) -> Node:
        node = self._both()
        while self._take("||"):
            node = _logic(node, self._both(), decisive=True)
        return node

    def _both(self) -> Node:
        node = self._relation()
        while self._take("&&"):
            node = _logic(node, self._relation(), decisive=False)
        return node

    def _relation(self) -> Node:
        left = self._unary()
        while operator := self._take("==", "!=", "<", "<=", ">", ">=", "in"):
            left = _relation(operator, left, self._unary())
        return left

    def _unary(self) -> Node:
        if self._take("!"):
            inner = self._unary()
            return lambda scope: not inner(scope)
        if self._take("-"):
            inner = self._unary()
            return lambda scope: -inner(scope)
        return self._postfix(self._primary())

    def _primary(self) -> Node:
        if not self._tokens:
            raise Unsupported("the rule ends early")
        if self._take("("):
            node = self._choice()
            self._need(")")
            return node
        if self._take("["):
            items = self._list("]")
            return lambda scope: [item(scope) for item in items]
        kind, text = self._tokens.pop(0)
        if kind == "number":
            number = float(text) if re.search(r"[.eE]", text) else int(text)
            return lambda _: number
        if kind == "text":
            return lambda _: text[1:-1]
        if kind == "name" and text in ("true", "false", "null"):
            constant = {"true": True, "false": False, "null": None}[text]
            return lambda _: constant
        if kind == "name" and self._take("("):
            return self._function(text)
        if kind != "name" or text not in self._names:
            raise Unsupported(text)
        return lambda scope: scope[text]

    def _list(self, end: str) -> list[Node]:
        items: list[Node] = []
        while not self._take(end):
            items.append(self._choice())
            if not self._take(","):
                self._need(end)
                break
        return items

    def _function(self, name: str) -> Node:
        arguments = self._list(")")
        if name not in ("has", "size", "double", "int", "string") or len(arguments) != 1:
            raise Unsupported(name)
        (inner,) = arguments
        if name == "has":
            return lambda scope: _present(inner, scope)
        if name == "size":
            return lambda scope: len(inner(scope))
        convert: Callable[[Any], Any] = {"double": float, "int": int, "string": str}[name]
        return lambda scope: _converted(convert, name, inner(scope))

    def _postfix(self, node: Node) -> Node:
        while True:
            if self._take("["):
                index = self._choice()
                self._need("]")
                node = _indexed(node, index)
            elif self._take("."):
                kind, name = self._tokens.pop(0) if self._tokens else ("", "")
                if kind != "name":
                    raise Unsupported("a name is missing")
                node = self._method(node, name) if self._take("(") else _selected(node, name)
            else:
                return node

    def _method(self, node: Node, name: str) -> Node:
        if name in ("all", "exists", "exists_one"):
            return self._macro(node, name)
        arguments = self._list(")")
        if name == "size" and not arguments:
            return lambda scope: len(node(scope))
        if name not in _TEXT_METHODS or len(arguments) != 1:
            raise Unsupported(name)
        test, argument = _TEXT_METHODS[name], arguments[0]
        return lambda scope: test(node(scope), argument(scope))

    def _macro(self, node: Node, name: str) -> Node:
        kind, variable = self._tokens.pop(0) if self._tokens else ("", "")
        if kind != "name":
            raise Unsupported(name)
        self._need(",")
        self._names.append(variable)
        inner = self._choice()
        self._names.pop()
        self._need(")")

        def decided(scope: Scope) -> bool:
            hits = [bool(inner({**scope, variable: item})) for item in node(scope)]
            return sum(hits) == 1 if name == "exists_one" else all(hits) if name == "all" else any(hits)

        return decided


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


def _relation(operator: str, left: Node, right: Node) -> Node:
    if operator == "in":
        return lambda scope: left(scope) in right(scope)
    if operator in ("==", "!="):
        return lambda scope: (left(scope) == right(scope)) is (operator == "==")
    compare = _COMPARISONS[operator]

    def compared(scope: Scope) -> bool:
        try:
            return compare(left(scope), right(scope))
        except TypeError as problem:
            raise Failed("no such overload") from problem

    return compared


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


def _selected(node: Node, name: str) -> Node:
    def select(scope: Scope) -> Any:
        value = node(scope)
        if not isinstance(value, dict) or name not in value:
            raise Failed(f"no such key: {name}")
        return value[name]

    return select


def _indexed(node: Node, index: Node) -> Node:
    def select(scope: Scope) -> Any:
        try:
            return node(scope)[index(scope)]
        except (KeyError, IndexError, TypeError):
            raise Failed(f"no such key: {index(scope)}") from None

    return select
