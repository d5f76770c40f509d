"""Command-line arguments that a manifest may give to an engine: an allow-list, as data.

A deny-list of dangerous flags would be out of date with every release of the engine, so each runtime has a table of the
flags it accepts instead. A flag in no table is refused by name, with the setting that allows it. `parse` is the only
reader of `spec.extraArgs` and of the command lines composed from it: a flag that is read differently here than by the
engine is a way around the table.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import TypeAlias

from metal_supervisor.spec.nearest import did_you_mean

Problem: TypeAlias = tuple[str, str]
"""(reason, message) of a refusal."""

NAMEABLE: Mapping[str, re.Pattern[str]] = {
    "extra-args": re.compile(r"--?[A-Za-z][A-Za-z0-9-]*", re.ASCII),
    "env": re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII),
}
"""Names that the settings `allow_extra_args` and `allow_env` may hold, by the end of their flag."""
LONGEST_NAMEABLE = 80


class FlagVerdict(Enum):
    """Treatment of a flag or a variable that a manifest names."""

    VALUE = "value"
    """Passed on, once its value is checked."""
    PATH = "path"
    """Its value names files, which are judged and fetched like `spec.source`."""
    OURS = "ours"
    """Composed by this Mac; no setting allows a manifest to set it."""
    REFUSED = "refused"
    """Reaches beyond the engine; the administrator can allow it."""
    IGNORED = "ignored"
    """Has no meaning on a Mac; left out, with a condition that says so."""


class Paths(Enum):
    """Syntax by which the value of a flag names files."""

    ONE = "one"
    LIST = "list"
    """Separated by commas."""
    SCALED = "scaled"
    """FILE:SCALE, separated by commas."""


@dataclass(frozen=True)
class ValueCheck:
    """The values that a flag or a variable takes."""

    says: str = "any text"
    """For a message: "a whole number from 0 to 100"."""
    pattern: str = r"(?s:.*)"
    low: float | None = None
    """Bounds of a number, both inclusive; None for no bound."""
    high: float = 0.0
    words: frozenset[str] = frozenset()
    """Values accepted in addition."""

    def allows(self, value: str) -> bool:
        if value in self.words:
            return True
        if not re.fullmatch(self.pattern, value, re.ASCII):
            return False
        return self.low is None or self.low <= float(value) <= self.high


TEXT = ValueCheck()


def whole(low: int, high: int, *words: str) -> ValueCheck:
    """A whole number between two bounds, or one of a few words."""
    also = "".join(f", or {word}" for word in words)
    return ValueCheck(f"a whole number from {low} to {high}{also}", r"[+-]?[0-9]{1,18}", low, high, frozenset(words))


def decimal(low: float, high: float) -> ValueCheck:
    return ValueCheck(
        f"a number from {low:g} to {high:g}",
        r"[+-]?([0-9]{1,15}\.?[0-9]{0,15}|\.[0-9]{1,15})([eE][+-]?[0-9]{1,2})?",
        low,
        high,
    )


def choice(*words: str) -> ValueCheck:
    return ValueCheck(f"one of {', '.join(words)}", "(?!)", words=frozenset(words))


@dataclass(frozen=True)
class Flag:
    """One flag of an engine, with all of its names."""

    names: tuple[str, ...]
    values: tuple[ValueCheck, ...] = ()
    """A check for each value that follows the flag as an argument."""
    verdict: FlagVerdict = FlagVerdict.VALUE
    why: str = ""
    """Reason why users cannot set it."""
    variable: str = ""
    """Variable of the environment that the engine reads it from, "" for none."""
    paths: Paths | None = None


@dataclass(frozen=True)
class Grammar:
    """The flags of an engine, and how its own parser reads a command line."""

    flags: Mapping[str, Flag]
    """The flags, by each of their names."""
    folds: bool = False
    """`_` counts as `-` in what begins with `--`."""
    argparse: bool = False
    """Python's: a unique beginning of a name counts, `--flag=value` too, and no value begins with `-`."""

    def __hash__(self) -> int:
        return id(self)


NO_FLAGS = Grammar({})


def rows(*groups: Iterable[Flag]) -> dict[str, Flag]:
    """Flags by each of their names."""
    return {name: flag for group in groups for flag in group for name in flag.names}


def flags(
    *written: str,
    values: Sequence[ValueCheck] = (),
    verdict: FlagVerdict = FlagVerdict.VALUE,
    why: str = "",
    paths: Paths | None = None,
) -> Iterator[Flag]:
    """A flag for each text of names, `-t --threads LLAMA_ARG_THREADS`; what has no dash is its variable."""
    for text in written:
        words = text.split()
        names = tuple(word for word in words if word.startswith("-"))
        variable = next((word for word in words if not word.startswith("-")), "")
        yield Flag(names, tuple(values), verdict, why, variable, paths)


@dataclass(frozen=True)
class Argument:
    """One argument that stands where a flag has to, with its values."""

    index: int
    """Position of the flag itself in the command line."""
    written: str
    name: str
    """As the engine's parser reads it: in full if it was abbreviated."""
    flag: Flag | None
    """None for what is in no table."""
    values: tuple[str, ...] = ()
    glued: bool = False
    """Its value is behind a `=`."""
    ambiguous: bool = False

    @property
    def value_index(self) -> int:
        return self.index if self.glued else self.index + 1

    @property
    def ignored(self) -> bool:
        """True if it means nothing on a Mac."""
        return self.flag is not None and self.flag.verdict is FlagVerdict.IGNORED


@dataclass(frozen=True)
class ParsedArguments:
    """A command line as its engine reads it."""

    written: tuple[str, ...]
    items: tuple[Argument, ...]
    _names: frozenset[str] = field(default=frozenset(), repr=False)

    def given(self, *names: str) -> bool:
        """True if one of these flags is set, under any of its names."""
        return not self._names.isdisjoint(names)

    def last(self, name: str, default: str = "") -> str:
        """Value of a flag; of several the last one counts."""
        found = (each.values[0] for each in reversed(self.items) if each.values and _is(each, name))
        return next(found, default)

    def words(self, item: Argument) -> tuple[str, ...]:
        """An argument and its values, as they are written."""
        return self.written[item.index : item.value_index + len(item.values)]


def _is(item: Argument, name: str) -> bool:
    return item.name == name or (item.flag is not None and name in item.flag.names)


@lru_cache(maxsize=1024)
def parse(written: tuple[str, ...], grammar: Grammar) -> ParsedArguments:
    """The flags of a command line with their values, in order; what is no known flag stands alone."""
    items = []
    index = 0
    while index < len(written):
        item = _argument(written, index, grammar)
        items.append(item)
        index = max(index + 1, item.value_index + len(item.values))
    known = {name for each in items for name in (each.name, *(each.flag.names if each.flag else ()))}
    return ParsedArguments(written, tuple(items), frozenset(known))


def _argument(written: Sequence[str], index: int, grammar: Grammar) -> Argument:
    text = written[index]
    plain, equals, value = text.partition("=")
    name = folded(plain, grammar)
    flag, ambiguous = grammar.flags.get(name), False
    if equals and not grammar.argparse:
        return Argument(index, text, name, None)  # `--flag=value` is no flag of such a parser
    if flag is None and grammar.argparse and len(name) > 2 and name.startswith("--"):
        found = {each.names: each for known, each in grammar.flags.items() if known.startswith(name)}
        ambiguous = len(found) > 1
        # Of several the parser takes none; the one that is not the user's makes the better message.
        flag = min(found.values(), key=lambda each: each.verdict is FlagVerdict.VALUE, default=None)
        name = next((each for each in flag.names if each.startswith(name)), name) if flag else name
    if equals:
        return Argument(index, text, name, flag, (value,), True, ambiguous)
    behind = written[index + 1 :]
    count = len(flag.values) if flag is not None else len(behind) if text.startswith("-") else 0
    if flag is None or grammar.argparse:  # what nothing is known of may have as values whatever cannot be a flag itself
        count = next((place for place, each in enumerate(behind[:count]) if _is_flag(each)), count)
    return Argument(index, text, name, flag, tuple(behind[:count]), False, ambiguous)


def _is_flag(text: str) -> bool:
    """True if Python's argparse takes an argument for a flag, not for a value."""
    return text.startswith("-") and text != "-" and not re.fullmatch(r"-[0-9]+|-[0-9]*\.[0-9]+", text, re.ASCII)


def folded(name: str, grammar: Grammar) -> str:
    """A flag as the engine's parser reads it."""
    return name.replace("_", "-") if grammar.folds and name.startswith("--") else name


def refusal(parsed: ParsedArguments, grammar: Grammar, opened: Collection[str], engine: str) -> Problem | None:
    """(reason, message) of the first argument that a manifest may not hold, None if all are fine.

    `opened`: flags that the administrator of this Mac allows although they are refused, or in no table.
    """
    for item in parsed.items:
        if problem := _refused(item, parsed.written, grammar, opened, engine):
            return problem
    return None


def _refused(
    item: Argument, written: Sequence[str], grammar: Grammar, opened: Collection[str], engine: str
) -> Problem | None:
    place = f"spec.extraArgs[{item.index}]"
    plain = folded(item.written.partition("=")[0], grammar)
    near = item.flag or grammar.flags.get(item.name)
    allowed = is_opened(item, near, opened)
    if near is not None and near.verdict is FlagVerdict.OURS:
        return "InvalidSpec", f"{place} {plain:.80} is not yours to set: {near.why}"
    if near is not None and near.verdict is FlagVerdict.REFUSED and not allowed:
        return "InvalidSpec", f"{place} {plain:.80} is not yours to set: {near.why}{opens(plain, 'extra-args')}"
    shown = f"{place} {item.written!r:.80}"
    if item.flag is None:
        if not item.written.startswith("-"):
            return "InvalidSpec", f"{shown} is neither a flag nor the value of one; remove it, or name its flag"
        if near is not None:
            return "InvalidSpec", f"{shown}: {engine} takes no '='; write {plain} and its value as two items"
        if allowed:
            return None
        first, *rest = item.written.split(None, 1)
        name = folded(first.partition("=")[0], grammar)
        if rest and (name in grammar.flags or name in opened):
            right = json.dumps(_split(written, {*grammar.flags, *opened}, grammar), ensure_ascii=False)
            return "InvalidSpec", f"{shown} is one item; split it: spec.extraArgs: {right:.1000}"
        offered = (known for known, flag in grammar.flags.items() if flag.verdict is FlagVerdict.VALUE)
        text = f"{shown} is not known to {engine}{did_you_mean(name, offered)}; remove it"
        return "UnsupportedField", f"{text}{opens(name, 'extra-args')}"
    if item.ambiguous:
        return "InvalidSpec", f"{shown} could be several flags; write its name in full"
    if len(item.values) != len(item.flag.values):
        if item.glued and not item.flag.values:
            return "InvalidSpec", f"{shown} takes no value; remove what follows the '='"
        what = "a value" if len(item.flag.values) == 1 else f"{len(item.flag.values)} values"
        return "InvalidSpec", f"{shown} needs {what}; add it as the next item"
    if item.flag.verdict is FlagVerdict.VALUE:
        for offset, (value, check) in enumerate(zip(item.values, item.flag.values, strict=True)):
            if not check.allows(value):
                at = place.rpartition("[")[0] + f"[{item.value_index + offset}]"
                return "InvalidSpec", f"{at}: {plain:.80} takes {check.says}, not {value!r:.80}"
    return None


def _split(written: Sequence[str], known: Collection[str], grammar: Grammar) -> list[str]:
    """Arguments of which some hold several words, with each flag and each value as an item of its own."""
    words: list[str] = []
    for text in written:
        flags = [folded(word.partition("=")[0], grammar) in known for word in text.split()]
        if not any(flags[:1]):
            words.append(text)
            continue
        try:
            parts = shlex.split(text) if sum(flags) > 1 else text.split(None, 1)
        except ValueError:  # a quotation mark without its other half
            parts = text.split()
        for part in parts:
            name, equals, value = part.partition("=")
            glued = equals and not grammar.argparse and folded(name, grammar) in known
            words += [name, value] if glued else [part]
    return words


def is_opened(item: Argument, flag: Flag | None, opened: Collection[str]) -> bool:
    """True for a flag that the administrator allows, under any of its names."""
    return item.name in opened or (flag is not None and not set(flag.names).isdisjoint(opened))


def opens(name: str, setting: str) -> str:
    """Advice to add to a refusal: the setting that allows a flag or a variable; "" for a name that it cannot hold."""
    if len(name) > LONGEST_NAMEABLE or not NAMEABLE[setting].fullmatch(name):
        return ""
    return f"; the administrator of this Mac can allow it with its setting --allow-{setting}={name}"
