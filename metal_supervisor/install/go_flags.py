"""Parser of command lines in the syntax of Go's standard flag package.

`-x v`, `--x v` and `--x=v` are the same; a switch stands alone or takes its value after `=` only; the first word that
is no flag, or `--`, ends the flags. LLMKube's own agent uses it, and its launchd plist must mean the same here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from decimal import Decimal

from metal_supervisor.spec.fields import seconds_of

SWITCH, TEXT, PATH, WHOLE, NUMBER, DURATION, LIST, PATHS = (
    "switch", "text", "path", "whole number", "number", "duration", "list", "list of paths",
)  # fmt: skip
TRUE, FALSE = ("1", "t", "T", "true", "TRUE", "True"), ("0", "f", "F", "false", "FALSE", "False")
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)
_WHOLE = re.compile(r"[+-]?(0|[1-9][0-9]{0,17})", re.ASCII)


@dataclass(frozen=True)
class GivenFlags:
    """One flag of a command line."""

    name: str
    """Without its dashes."""
    text: str = ""
    """Its value as it was written; `true` for a switch that stands alone."""
    problem: str = ""
    """Reason why Go would refuse it, "" if it would not."""


def split(
    words: Sequence[str], known: Collection[str], switches: Collection[str]
) -> tuple[list[GivenFlags], list[str]]:
    """(flags, words after them) of a command line without its program.

    A word after an unknown flag counts as its value unless it begins with a dash; Go would refuse to start.
    """
    found: list[GivenFlags] = []
    at = 0
    while at < len(words) and len(words[at]) > 1 and words[at].startswith("-"):
        word = words[at]
        at += 1
        if word == "--":
            break
        name, equals, text = word[2 if word.startswith("--") else 1 :].partition("=")
        if not name or name.startswith("-"):
            found.append(GivenFlags(word, problem="is not how a flag is written"))
        elif equals:
            found.append(GivenFlags(name, text))
        elif name in switches:
            found.append(GivenFlags(name, "true"))
        elif at < len(words) and (name in known or not words[at].startswith("-")):
            found.append(GivenFlags(name, words[at]))
            at += 1
        else:
            found.append(GivenFlags(name, problem="has no value" if name in known else ""))
    return found, list(words[at:])


def value(kind: str, text: str) -> bool | int | float | str:
    """A value in its flag's type; durations in seconds. Raises ValueError, whose text says what it must be."""
    if kind == SWITCH:
        if text not in TRUE + FALSE:
            raise ValueError("must be true or false")
        return text in TRUE
    if kind == WHOLE:
        if not _WHOLE.fullmatch(text):
            raise ValueError("must be a whole number, in decimal digits")
        return int(text)
    if kind == NUMBER:
        if not _DECIMAL.fullmatch(text) or not math.isfinite(float(text)):
            raise ValueError("must be a number")
        return float(text)
    if kind == DURATION:
        length_s = Decimal(0) if text == "0" else seconds_of(text)
        if length_s is None:
            raise ValueError("must be a duration such as 90s, 1m30s or 300ms")
        return float(length_s)
    if kind in (LIST, PATHS):
        return ",".join(part for part in (each.strip() for each in text.split(",")) if part)
    return text
