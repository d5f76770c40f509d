"""Prometheus' text format, as an engine writes it: read strictly, in bounded time, from somebody who may be hostile.

The client library's parser takes more than the format allows, and has no bounds. What is read here is written anew for
others, so an answer with anything that is not understood is refused as a whole. Times and exemplars are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from metal_supervisor.core.bar import printable

MOST_SERIES = 2000
MOST_LINES = 20_000
MOST_LABELS = 32
LONGEST_NAME = 200
LONGEST_TEXT = 200
"""Characters of a label's value, or of a help text; the rest is cut."""
LONGEST_NUMBER = 64

COUNTER, GAUGE, HISTOGRAM, SUMMARY, UNTYPED = "counter", "gauge", "histogram", "summary", "untyped"
PARTS: Mapping[str, tuple[str, ...]] = {HISTOGRAM: ("_bucket", "_sum", "_count"), SUMMARY: ("_sum", "_count")}
"""What the names of a family's samples end in, beside the family's own name."""

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_COMMENT = re.compile(rf"#[ \t]+(HELP|TYPE)[ \t]+({_NAME})(?:[ \t]+(.*))?")
_HEAD = re.compile(rf"({_NAME})[ \t]*")
_LABEL = re.compile(r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"([^"\\]*(?:\\.[^"\\]*)*)"[ \t]*(?:,|(?=\}))')
_CLOSE = re.compile(r"[ \t]*\}")
_NUMBER = r"[+-]?(?:[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|\.[0-9]+(?:e[+-]?[0-9]+)?|inf|nan)"
_TAIL = re.compile(rf"[ \t]*({_NUMBER})(?:[ \t]+[+-]?[0-9.]+)?(?:[ \t]+#.*)?", re.IGNORECASE)
_ESCAPED = re.compile(r'\\([\\n"])')


class Unreadable(ValueError):
    """What was said is not taken; `reason` is "format", or "series" or "size" if it is too much."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Sample:
    """One value."""

    name: str
    labels: tuple[tuple[str, str], ...]
    """(name, value) in the order in which they were said; values are printable and bounded."""
    value: float


@dataclass(frozen=True)
class Family:
    """The samples of one metric."""

    name: str
    """Of a counter, with `_total` if its samples have it."""
    kind: str
    help: str
    """Printable, "" if there is none."""
    samples: tuple[Sample, ...]


def read(text: str) -> list[Family]:
    """What a page of metrics says, in its order; samples of one family are together. Raises Unreadable."""
    kinds: dict[str, str] = {}
    helps: dict[str, str] = {}
    samples: list[Sample] = []
    if text.count("\n") > MOST_LINES:
        raise Unreadable("size")
    for line in text.split("\n"):
        stripped = line.strip(" \t\r")
        if stripped.startswith("#"):
            _comment(stripped, kinds, helps)
        elif stripped:
            samples.append(_sample(stripped))
            if len(samples) > MOST_SERIES:
                raise Unreadable("series")
    if not samples:
        raise Unreadable("format")
    return _families(samples, kinds, helps)


def _comment(line: str, kinds: dict[str, str], helps: dict[str, str]) -> None:
    found = _COMMENT.fullmatch(line)
    if found is None:
        return
    word, name, rest = found[1], found[2], found[3] or ""
    if word == "HELP":
        helps.setdefault(name, _shown(rest))
    elif kinds.setdefault(name, rest.strip()) != rest.strip():
        raise Unreadable("format")


def _sample(line: str) -> Sample:
    head = _HEAD.match(line)
    if head is None or len(head[1]) > LONGEST_NAME:
        raise Unreadable("format")
    labels, end = _labels(line, head.end() + 1) if line.startswith("{", head.end()) else ((), head.end())
    tail = _TAIL.fullmatch(line, end)
    if tail is None or len(tail[1]) > LONGEST_NUMBER:
        raise Unreadable("format")
    return Sample(head[1], labels, float(tail[1]))


def _labels(line: str, start: int) -> tuple[tuple[tuple[str, str], ...], int]:
    """(labels, where they end) of what begins after a `{`."""
    found: dict[str, str] = {}
    while not (close := _CLOSE.match(line, start)):
        label = _LABEL.match(line, start)
        if label is None or len(found) >= MOST_LABELS:
            raise Unreadable("format")
        name = label[1]
        if name in found or name.startswith("__") or len(name) > LONGEST_NAME:
            raise Unreadable("format")
        found[name], start = _shown(label[2]), label.end()
    return tuple(found.items()), close.end()


def _shown(escaped: str) -> str:
    """A text as it may be passed on: printable, and not long."""
    begun = escaped[: 2 * LONGEST_TEXT + 2]  # of which no character stands for less than half of one
    text = _ESCAPED.sub(lambda found: "\n" if found[1] == "n" else found[1], begun) if "\\" in begun else begun
    cut = text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"
    return cut if cut.isprintable() else printable(cut)


def _families(samples: list[Sample], kinds: Mapping[str, str], helps: Mapping[str, str]) -> list[Family]:
    together: dict[str, list[Sample]] = {}
    told: dict[str, str] = {}
    for sample in samples:
        name, declared = _family_of(sample.name, kinds)
        together.setdefault(name, []).append(sample)
        told[name] = declared
    known = (COUNTER, GAUGE, HISTOGRAM, SUMMARY)
    return [
        Family(name, kind if (kind := kinds.get(told[name], "")) in known else UNTYPED, helps.get(told[name], ""),
               tuple(found))
        for name, found in together.items()
    ]  # fmt: skip


def _family_of(name: str, kinds: Mapping[str, str]) -> tuple[str, str]:
    """(name of the family that a sample belongs to, the name by which its type was declared)."""
    if name in kinds and kinds[name] != HISTOGRAM:
        return name, name
    for suffix in ("_bucket", "_sum", "_count"):
        base = name.removesuffix(suffix)
        if base != name and suffix in PARTS.get(kinds.get(base, ""), ()):
            return base, base
    base = name.removesuffix("_total")  # OpenMetrics declares a counter without it
    return (name, base) if base != name and kinds.get(base) == COUNTER else (name, name)
