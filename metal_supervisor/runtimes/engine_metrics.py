"""Merging of the engines' own metrics into one page.

Each series gets the labels of its service. A page has one family per name, of one type, and our own metrics are on it
too: an engine's family is dropped if its name is reserved or taken with another type, or if its shape would make a
scraper refuse the whole page.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from metal_supervisor.spec.types import Key

COUNTER = "counter"
GAUGE = "gauge"
HISTOGRAM = "histogram"
SUMMARY = "summary"
UNTYPED = "untyped"
PARTS: Mapping[str, tuple[str, ...]] = {HISTOGRAM: ("_bucket", "_sum", "_count"), SUMMARY: ("_sum", "_count")}
"""Suffixes of a family's samples, by type, besides the family's own name."""
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?|[-+]?inf(?:inity)?", re.ASCII | re.IGNORECASE)
MOST_IN_ALL = 20_000
"""Series of all engines together."""
MOST_FAMILIES = 2_000
MOST_CHARACTERS = 4 << 20
"""Size limit of the page: it is rendered beside the loop that withdraws dead endpoints."""
OWN_LABELS = ("namespace", "name", "job", "instance")
"""Labels that identify the source of a series: ours, and those that Prometheus gives a target."""
RESERVED_BEGINNINGS = ("llmkube_metal_agent_", "metal_supervisor_", "process_", "python_", "go_", "scrape_")
RESERVED = frozenset({"up", "target", "target_info", "ALERTS", "ALERTS_FOR_STATE"})
REASONS: Mapping[str, str] = {
    "timeout": "the engine did not answer in time; what it said before stays until it is too old",
    "unreachable": "nothing answered at its port, or the connection broke; likewise",
    "status": "it answered with an error, as one without such a page does",
    "redirect": "it redirected, which is not followed",
    "key": "it wants a key that `spec.env` does not have in LLAMA_API_KEY or VLLM_API_KEY",
    "size": "the answer is 1 MiB or more, or has more than 20,000 lines, or a line of more than 16 KiB",
    "series": "more than 2,000 series of one engine; of all together 20,000, 2,000 names, or 4 MiB",
    "format": "it is not the text format, or a histogram or summary is not whole",
    "duplicate": "a family has the same series twice",
    "value": "a counter, a sum, a count or a quantile is negative or no number, or a count is no whole one",
    "name": "a name that is ours, Prometheus' own, or tells of a process (`process_*`, `python_*`, `go_*`)",
    "type": "an engine that was there before has the name with another type, or one that means the same",
}
"""Reasons for dropping. Those from `duplicate` on, and `format` for an incomplete histogram, drop one family; the
others drop the whole answer."""


class Unreadable(ValueError):
    """The page is rejected. `reason`: "format", or "series" or "size" if it is too large."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Sample:
    """One value."""

    name: str
    labels: tuple[tuple[str, str], ...]
    """(name, value) in the order of the page; values are printable and bounded."""
    value: float


@dataclass(frozen=True)
class Family:
    """The samples of one metric."""

    name: str
    """For a counter with `_total`, if its samples have it."""
    kind: str
    help: str
    """Printable, "" if there is none."""
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Block:
    """One rendered family of one engine."""

    name: str
    kind: str
    help: str
    lines: str
    """Its samples with the labels of the service; the same in both formats."""
    series: int


@dataclass(frozen=True)
class Joined:
    """One family of all engines."""

    name: str
    kind: str
    help: str
    parts: tuple[tuple[int, str], ...]
    """(number of the engine's process, lines)."""


@dataclass(frozen=True)
class Told:
    """The latest metrics of the engines."""

    page: tuple[Joined, ...] = ()
    """The families of all engines."""
    live: frozenset[int] = frozenset()
    """Numbers of the running processes whose answer is fresh."""
    up: Mapping[Key, bool] = field(default_factory=dict)
    """Engine that is scraped -> True if its last answer was accepted."""
    dropped: Mapping[Key, Mapping[str, int]] = field(default_factory=dict)
    """Engine -> reason -> number of drops."""

    def text(self, openmetrics: bool) -> str:
        """The page as text, in OpenMetrics or in Prometheus' text format."""
        return "".join(_joined_text(family, self.live, openmetrics) for family in self.page)


# ── one engine ───────────────────────────────────────────────────────────────────────────────────


def blocks(families: Iterable[Family], key: Key) -> tuple[tuple[Block, ...], Counter[str]]:
    """(families of an engine to serve, number of dropped ones by reason)."""
    kept, dropped = [], Counter[str]()
    found = list(families)
    begun = {_base(each.name, each.kind) for each in found if each.kind in (COUNTER, HISTOGRAM, SUMMARY)}
    owner = [("namespace", key[0]), ("name", key[1])]
    for family in found:
        if family.name.endswith("_created") and family.name.removesuffix("_created") in begun:
            continue  # start time of a counter; OpenMetrics has it elsewhere, and it is not served
        samples = [_owned(sample, owner) for sample in family.samples]
        if reason := _fault(family, samples):
            dropped[reason] += 1
            continue
        lines = "".join(map(_line, _grouped(family, samples)))
        kept.append(Block(family.name, family.kind, family.help, lines, len(samples)))
    return tuple(kept), dropped


def _owned(sample: Sample, owner: Sequence[tuple[str, str]]) -> Sample:
    """The sample with its service's labels; its own of the same names get the prefix `exported_`."""
    labels = dict(owner)
    taken = {name for name, _ in sample.labels}
    for name, value in sample.labels:
        told = name
        while told in OWN_LABELS or (told != name and told in taken):
            told = f"exported_{told}"
        labels[told] = _bound(value) if told == "le" else value
    return Sample(sample.name, tuple(labels.items()), sample.value)


def _bound(text: str) -> str:
    """A bucket's bound in the spelling of OpenMetrics."""
    if _float(text) == math.inf:
        return "+Inf"
    return f"{text}.0" if text.lstrip("-").isdecimal() else text


def _fault(family: Family, samples: Sequence[Sample]) -> str:
    """Reason why a family is dropped, or ""."""
    if family.name in RESERVED or family.name.startswith(RESERVED_BEGINNINGS):
        return "name"
    if len({(each.name, frozenset(each.labels)) for each in samples}) != len(samples):
        return "duplicate"
    if family.kind in (COUNTER, HISTOGRAM, SUMMARY) and not all(_can_count(family, each) for each in samples):
        return "value"
    whole = {HISTOGRAM: _is_histogram, SUMMARY: _is_summary}.get(family.kind)
    return "" if whole is None or all(whole(family.name, group) for group in _groups(samples)) else "format"


def _can_count(family: Family, sample: Sample) -> bool:
    """True if OpenMetrics allows the value of a sample of a counter, a histogram or a summary."""
    part, value = sample.name.removeprefix(family.name), sample.value
    if part in ("_bucket", "_count"):
        return value >= 0 and value.is_integer()
    return value >= 0 or (not part and family.kind == SUMMARY and math.isnan(value))


def _groups(samples: Iterable[Sample]) -> Iterable[list[Sample]]:
    """The samples of each metric of a family: groups that differ only in their bound or quantile."""
    found: dict[frozenset[tuple[str, str]], list[Sample]] = {}
    for each in samples:
        rest = frozenset(label for label in each.labels if label[0] not in ("le", "quantile"))
        found.setdefault(rest, []).append(each)
    return found.values()


def _grouped(family: Family, samples: Sequence[Sample]) -> Iterable[Sample]:
    return itertools.chain.from_iterable(_groups(samples)) if family.kind in PARTS else samples


def _is_histogram(name: str, group: Iterable[Sample]) -> bool:
    """True if these are buckets in order, the last with bound +Inf, with a sum and a matching count.

    No bound may be negative: with one, OpenMetrics allows no sum.
    """
    buckets, rest = [], {}
    for each in group:
        bound = dict(each.labels).get("le")
        if each.name == f"{name}_bucket":
            buckets.append((_float(bound or ""), each.value))
        elif bound is None:
            rest[each.name] = each.value
        else:
            return False
    rising = all(low[0] < high[0] and low[1] <= high[1] for low, high in itertools.pairwise(buckets))
    if not buckets or not rising or buckets[0][0] < 0 or buckets[-1][0] != math.inf:
        return False
    return set(rest) == {f"{name}_sum", f"{name}_count"} and rest[f"{name}_count"] == buckets[-1][1]


def _is_summary(name: str, group: Iterable[Sample]) -> bool:
    """True if all samples named `name` have a quantile from 0 to 1, and no others have one."""
    for each in group:
        share = dict(each.labels).get("quantile")
        if (share is not None) != (each.name == name) or (share is not None and not 0 <= _float(share) <= 1):
            return False
    return True


def _float(text: str) -> float:
    """A bound or a quantile, NaN for what only Python takes for a number: `1_0`, ` 1`, digits of other scripts."""
    return float(text) if _NUMBER.fullmatch(text) else math.nan


def _line(sample: Sample) -> str:
    labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in sample.labels)
    return f"{sample.name}{{{labels}}} {_number(sample.value)}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


# ── all engines ──────────────────────────────────────────────────────────────────────────────────


def merged(answers: Iterable[tuple[int, Sequence[Block]]]) -> tuple[tuple[Joined, ...], dict[int, Counter[str]]]:
    """(families of the page, drops by process number and reason). `answers`: (process number, its families).

    The first process with a name determines its type.
    """
    taken: set[str] = set()
    families: dict[tuple[str, str], tuple[str, list[tuple[int, str]]]] = {}
    dropped: dict[int, Counter[str]] = {}
    series = characters = 0
    for number, found in answers:
        for block in found:
            family = block.name, block.kind
            names = () if family in families else _claims(*family)  # nearly always: the family is already on the page
            full = series + block.series > MOST_IN_ALL or characters + len(block.lines) > MOST_CHARACTERS
            reason = "series" if full or (names and len(families) >= MOST_FAMILIES) else ""
            if any(name in taken for name in names):
                reason = "type"
            if reason:
                dropped.setdefault(number, Counter())[reason] += 1
                continue
            series, characters = series + block.series, characters + len(block.lines)
            taken.update(names)
            families.setdefault(family, (block.help, []))[1].append((number, block.lines))
    return tuple(Joined(*each, about, tuple(parts)) for each, (about, parts) in families.items()), dropped


def _base(name: str, kind: str) -> str:
    """A family's name in OpenMetrics."""
    return name.removesuffix("_total") if kind == COUNTER else name


def _claims(name: str, kind: str) -> tuple[str, ...]:
    """Names that a family reserves, in either format."""
    if kind not in (COUNTER, *PARTS):
        return (name,)
    suffixes = ("", "_created") if kind == COUNTER else (*PARTS[kind], "_created")
    return (name, *(_base(name, kind) + suffix for suffix in suffixes))


def _joined_text(family: Joined, live: Container[int], openmetrics: bool) -> str:
    """A family's text, "" if none of its processes is live."""
    lines = "".join(text for number, text in family.parts if number in live)
    if not lines:
        return ""
    name, kind, text = family.name, family.kind, family.help.replace("\\", r"\\").replace("\n", r"\n")
    if openmetrics:
        # A counter has to end in _total there; one that does not keeps its name, and loses its type.
        kind = "unknown" if kind == UNTYPED or (kind == COUNTER and not name.endswith("_total")) else kind
        name, text = _base(name, kind), text.replace('"', r"\"")
    return (f"# HELP {name} {text}\n" if text else "") + f"# TYPE {name} {kind}\n{lines}"
