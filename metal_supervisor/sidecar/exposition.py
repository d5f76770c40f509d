"""Parser of Prometheus' text format for untrusted input: an engine's answer, parsed by the client library.

The library accepts more than the format allows, and the time that it takes for a line grows with the square of the
length. So sizes are checked before it parses, and everything that is served again is checked after. It is given one
line at a time: given all, it renames counters that do not end in `_total` and forgets types. Timestamps and exemplars
are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample as Parsed

from metal_supervisor.runtimes.engine_metrics import (
    COUNTER,
    GAUGE,
    HISTOGRAM,
    PARTS,
    SUMMARY,
    UNTYPED,
    Family,
    Sample,
    Unreadable,
)
from metal_supervisor.spec.terminal_text import shortened

MOST_SERIES = 2000
MOST_LINES = 20_000
LONGEST_LINE = 16_384
"""Characters. The library takes 60 ms for a line of four times as many, a second at sixteen times, and so on."""
MOST_LABELS = 32
LONGEST_NAME = 200
LONGEST_TEXT = 200
"""Characters of a label's value or of a help text; longer ones are cut."""

KNOWN = frozenset({COUNTER, GAUGE, HISTOGRAM, SUMMARY})
"""Types of both formats; a family of any other type, or of none, is untyped."""

_HEAD = re.compile(r"\s*([a-zA-Z_:][a-zA-Z0-9_:]*)[ \t{]")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


def read(text: str) -> list[Family]:
    """Parse a page of metrics into families, in the order of their first samples. Raises Unreadable."""
    lines = text.split("\n") if text.count("\n") <= MOST_LINES else []
    if not lines or max(map(len, lines)) > LONGEST_LINE:
        raise Unreadable("size")
    kinds: dict[str, str] = {}
    helps: dict[str, str] = {}
    samples: list[Sample] = []
    for line in lines:
        for metric in _parsed(line):
            samples += [_sample(line, each) for each in metric.samples]
            if not metric.samples:
                _declared(line, metric, kinds, helps)
        if len(samples) > MOST_SERIES:
            raise Unreadable("series")
    if not samples:
        raise Unreadable("format")
    return _families(samples, kinds, helps)


def _parsed(line: str) -> list[Metric]:
    """Parse one line: a sample, a type or a help text, or nothing. Raises Unreadable."""
    try:
        return list(text_string_to_metric_families(line))
    except Exception:  # noqa: BLE001 - whatever the library stumbles over is not the format
        raise Unreadable("format") from None


def _declared(line: str, metric: Metric, kinds: dict[str, str], helps: dict[str, str]) -> None:
    """Record a type or a help text. The library strips `_total` from a counter's name; the line shows whether it did.

    Raises Unreadable if a name is given two types.
    """
    if metric.type not in KNOWN:
        if metric.documentation:
            helps.setdefault(metric.name, shortened(metric.documentation, LONGEST_TEXT))
        return
    whole = f"{metric.name}_total"
    name = whole if metric.type == COUNTER and whole in line.split() else metric.name
    if kinds.setdefault(name, metric.type) != metric.type:
        raise Unreadable("format")


def _sample(line: str, parsed: Parsed) -> Sample:
    head = _HEAD.match(line)
    if head is None or head[1] != parsed.name or len(head[1]) > LONGEST_NAME or len(parsed.labels) > MOST_LABELS:
        raise Unreadable("format")
    if not all(_LABEL.fullmatch(name) and len(name) <= LONGEST_NAME for name in parsed.labels):
        raise Unreadable("format")
    try:
        value = float(parsed.value)
    except OverflowError:  # an integer of more than 308 digits
        raise Unreadable("format") from None
    labels = tuple((name, shortened(text, LONGEST_TEXT)) for name, text in parsed.labels.items())
    return Sample(head[1], labels, value)


def _families(samples: list[Sample], kinds: Mapping[str, str], helps: Mapping[str, str]) -> list[Family]:
    together: dict[str, list[Sample]] = {}
    told: dict[str, str] = {}
    for sample in samples:
        name, declared = _family_of(sample.name, kinds)
        together.setdefault(name, []).append(sample)
        told[name] = declared
    return [
        Family(name, kinds.get(told[name], UNTYPED), helps.get(told[name], ""), tuple(found))
        for name, found in together.items()
    ]


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
