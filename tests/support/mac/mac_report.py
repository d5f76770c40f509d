"""What an acceptance run on a Mac found, as one JSON file and the same as Markdown.

Whoever runs it sends the file to strangers, so everything in it passes through a Redactor: no name of a user or a
host, no serial number, address or token leaves the Mac. A check says what it claims as it goes, so that one which
crashes half-way has still told what it saw.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

FORMAT = 1
PASS = "pass"
FAIL = "fail"
SKIPPED = "skipped"
MEASURED = "measured"
EVIDENCE_CHARACTERS = 4000
SHORTEST_NAME = 3
"""A shorter name of a user or host is a part of too many words to be replaced wherever it stands alone."""


class Skip(Exception):
    """A check cannot be made here; the message says why, and how it could be."""


@dataclass(frozen=True)
class Figure:
    """One quantity, measured once or several times."""

    name: str
    unit: str
    """`s`, `ms`, `MiB`, `tokens/s`, …"""
    values: tuple[float, ...]

    def row(self) -> dict[str, Any]:
        """As in the report: the median, and the spread where it was repeated."""
        middle = rounded(statistics.median(self.values))
        found: dict[str, Any] = {"name": self.name, "unit": self.unit, "median": middle}
        if len(self.values) > 1:
            low, high = min(self.values), max(self.values)
            found |= {"lowest": rounded(low), "highest": rounded(high), "spread": rounded(high - low)}
            found["times"] = len(self.values)
        return found


def rounded(value: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}")


@dataclass
class Sheet:
    """What one check writes down while it goes on."""

    claims: list[tuple[bool, str]] = field(default_factory=list)
    """Whether it holds, and what was to be proved."""
    figures: list[Figure] = field(default_factory=list)
    evidence: dict[str, Any] = field(default_factory=dict)
    """Title -> text, or JSON."""
    omitted: list[str] = field(default_factory=list)
    """Parts that were left out, each with how to get them."""

    def claim(self, holds: object, text: str) -> bool:
        """Notes whether something that was to be proved holds."""
        self.claims.append((bool(holds), text))
        return bool(holds)

    def figure(self, name: str, unit: str, *values: float) -> None:
        """Notes a quantity; nothing if there are no values."""
        if values:
            self.figures.append(Figure(name, unit, tuple(values)))

    def show(self, title: str, found: Any) -> None:
        """Keeps what was seen, text cut to a readable length."""
        if isinstance(found, str) and len(found) > EVIDENCE_CHARACTERS:
            found = found[:EVIDENCE_CHARACTERS] + f"\n… {len(found) - EVIDENCE_CHARACTERS} more characters"
        self.evidence[title] = found

    def omit(self, text: str) -> None:
        """Says that a part was left out, and how to get it."""
        self.omitted.append(text)


@dataclass(frozen=True)
class Result:
    """What became of one check."""

    name: str
    item: str
    """The letter of what it settles; see mac_checks.ITEMS."""
    proves: str
    on_failure: str
    outcome: str
    """PASS, FAIL, SKIPPED or MEASURED."""
    why: str
    """What did not hold, or why it was skipped."""
    sheet: Sheet
    seconds: float

    def row(self) -> dict[str, Any]:
        """As in the report."""
        found: dict[str, Any] = {
            "name": self.name,
            "item": self.item,
            "proves": self.proves,
            "outcome": self.outcome,
            "why": self.why,
            "claims": [{"holds": holds, "claim": text} for holds, text in self.sheet.claims],
            "figures": [each.row() for each in self.sheet.figures],
            "omitted": self.sheet.omitted,
            "evidence": self.sheet.evidence,
            "seconds": rounded(self.seconds),
        }
        if self.outcome == FAIL:
            found["on_failure"] = self.on_failure
        return found


def outcome_of(sheet: Sheet) -> str:
    """FAIL if a claim does not hold, MEASURED if none was made, else PASS."""
    if not all(holds for holds, _ in sheet.claims):
        return FAIL
    return PASS if sheet.claims else MEASURED


class Redactor:
    """Takes out of a report what tells whose Mac it was."""

    def __init__(self, user: str, home: str, hosts: Iterable[str], secrets: Iterable[str] = ()) -> None:
        """`secrets`: other words that must not leave this Mac, such as a host that the user named."""
        self._exact = [(home, "~")] if len(home) > 1 else []
        self._exact += [(word, "<redacted>") for word in sorted(set(secrets), key=len, reverse=True) if word]
        names = {name for each in hosts for name in (each, each.partition(".")[0]) if len(name) >= SHORTEST_NAME}
        self._rules: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
            (_alone(name), "<host>") for name in sorted(names - {"localhost"}, key=len, reverse=True)
        ]
        if len(user) >= SHORTEST_NAME and user != "root":
            self._rules.append((_alone(user), "<user>"))
        self._rules += PATTERNS

    def text(self, text: str) -> str:
        """A text without them."""
        for word, instead in self._exact:
            text = text.replace(word, instead)
        for pattern, put in self._rules:
            text = pattern.sub(put, text)
        return text

    def all(self, found: Any) -> Any:
        """The same of JSON: every string in it, keys too."""
        if isinstance(found, str):
            return self.text(found)
        if isinstance(found, dict):
            return {self.text(str(key)): self.all(value) for key, value in found.items()}
        if isinstance(found, list | tuple):
            return [self.all(each) for each in found]
        return found


def _alone(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", re.IGNORECASE)


def _address(found: re.Match[str]) -> str:
    text = found[0]
    return text if text.startswith(("127.", "0.0.0.0", "192.0.2.")) else "<address>"


PATTERNS: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"/(?:Users|home)/(?!Shared\b)[^/\s\"':]+"), "/Users/<user>"),
    (re.compile(r"(?i)(serial[\w ()-]*\"?\s*[:=]\s*\"?)[A-Z0-9]{6,20}"), r"\1<serial>"),
    (re.compile(r"(?i)\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"), "<uuid>"),
    (re.compile(r"(?i)\b[0-9a-f]{2}(?::[0-9a-f]{2}){5}\b"), "<mac-address>"),
    (re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])"), _address),
    (re.compile(r"(?i)\b(?:fe80|fd[0-9a-f]{2}|2[0-9a-f]{3}):[0-9a-f:]{3,}(?:%\w+)?"), "<address>"),
    (re.compile(r"\b(?:hf|sk|ghp|gho|github_pat)[_-][A-Za-z0-9_-]{8,}"), "<token>"),
    (re.compile(r"(?i)\b(bearer|basic) [A-Za-z0-9._~+/=-]{8,}"), r"\1 <token>"),
    (re.compile(r"/k-[A-Za-z0-9_-]{16,}"), "/k-<token>"),
]
"""Homes, serial numbers, identifiers of hardware, addresses but those of this machine, tokens, and the embedded API's
unguessable prefix."""


def report(about: dict[str, Any], results: Sequence[Result], redactor: Redactor) -> dict[str, Any]:
    """The whole report. `about`: this Mac and this release."""
    counts = {outcome: sum(each.outcome == outcome for each in results) for outcome in (PASS, FAIL, SKIPPED, MEASURED)}
    content = {"format": FORMAT, "about": about, "counts": counts, "checks": [each.row() for each in results]}
    found: dict[str, Any] = redactor.all(content)
    return found


def markdown(found: dict[str, Any]) -> str:
    """The same for people."""
    lines = ["# Acceptance on a Mac", ""]
    lines += [f"- {_inline(str(key))}: {_inline(str(value))}" for key, value in found["about"].items()]
    lines += ["", "| check | outcome | figures |", "| --- | --- | --- |"]
    for each in found["checks"]:
        figures = "; ".join(_figure(row) for row in each["figures"])
        lines.append(f"| {_cell(each['name'])} | {each['outcome']} | {_cell(figures)} |")
    for each in found["checks"]:
        lines += ["", f"## {each['name']}: {each['outcome']}", "", _inline(each["proves"]), ""]
        if each["why"]:
            lines += [f"**{_inline(each['why'])}**", ""]
        if "on_failure" in each:
            lines += [f"What to do: {_inline(each['on_failure'])}", ""]
        verdict = {True: "holds", False: "DOES NOT HOLD"}
        lines += [f"- {verdict[row['holds']]}: {_inline(row['claim'])}" for row in each["claims"]]
        lines += [f"- {_inline(_figure(row))}" for row in each["figures"]]
        lines += [f"- left out: {_inline(text)}" for text in each["omitted"]]
        for title, seen in each["evidence"].items():
            lines += ["", f"{_inline(title)}:", "", *_block(seen)]
    return "\n".join(lines) + "\n"


def _figure(row: dict[str, Any]) -> str:
    """`name 1.2 ms (0.9 to 3.4, 20 times)`."""
    spread = f" ({row['lowest']:g} to {row['highest']:g}, {row['times']} times)" if "times" in row else ""
    return f"{row['name']} {row['median']:g} {row['unit']}{spread}"


def _inline(text: str) -> str:
    """On one line, and nothing in it a tag or a link of Markdown."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", " ".join(text.split()))


def _cell(text: str) -> str:
    return _inline(text) or " "


def _block(seen: Any) -> list[str]:
    """An indented block, which no text can end."""
    text = seen if isinstance(seen, str) else json.dumps(seen, indent=1, sort_keys=True)
    shown = "".join(letter if letter.isprintable() or letter in "\n\t" else "�" for letter in text)
    return [f"    {line}" for line in shown.splitlines()] or ["    (nothing)"]
