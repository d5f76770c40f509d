"""Flags of a build of llama-server, from its own `--help`, and translation of arguments between builds.

llama-server exits with 1 at an unknown argument, so a flag that a release drops is a crash loop after the upgrade. The
command line is therefore checked against the flags in the help.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from metal_supervisor.runtimes.llama_arguments import GRAMMAR
from metal_supervisor.spec.arguments import ParsedArguments, parse

OPTION = re.compile(r"(?P<names>--?[A-Za-z][\w.-]*(?:, +--?[A-Za-z][\w.-]*)*)(?P<values>(?: [^ ]+)*)(?: {2,}.*)?")
"""A line of the help that lists a flag: its names, placeholders of its values, and after a gap its description."""
REMOVED = "argument has been removed"
ALWAYS_THERE = "--ctx-size"
"""A help without it is not llama-server's own but some wrapper's, which does not list the engine's flags."""
CHOICES = re.compile(r"[a-z0-9_-]+(,[a-z0-9_-]+)+")
ALLOWED = re.compile(r"allowed values: ([\w, ]+)")


@dataclass(frozen=True)
class Option:
    """One flag of a build."""

    values: int
    """Number of values it takes."""
    choices: str = ""
    """Allowed values, comma-separated without spaces; "" if the help does not list them."""


@lru_cache(maxsize=16)
def options_of(help_text: str) -> Mapping[str, Option]:
    """Name -> flag, for all names of all flags of a build; empty if the help does not list them."""
    found: dict[str, Option] = {}
    for lines in _entries(help_text):
        match = OPTION.fullmatch(lines[0].rstrip())
        about = " ".join(lines)
        if match is None or REMOVED in about:
            continue
        values = match["values"].split()
        listed = ALLOWED.search(about)
        choices = listed[1].replace(" ", "") if listed else values[0] if len(values) == 1 else ""
        option = Option(_count(values), choices if CHOICES.fullmatch(choices) else "")
        found |= dict.fromkeys(match["names"].replace(" ", "").split(","), option)
    return found if ALWAYS_THERE in found else {}


def _entries(help_text: str) -> Iterator[list[str]]:
    """The lines of each flag: the one that begins at the margin, and its indented continuation lines."""
    entry: list[str] = []
    for line in help_text.splitlines():
        if line[:1] not in (" ", "") and entry:
            yield entry
            entry = []
        if entry or line.startswith("-"):
            entry.append(line)
    if entry:
        yield entry


def _count(values: Sequence[str]) -> int:
    """Number of values. The placeholder of one may have several words: `<tensor name pattern>=<…>`."""
    text = re.sub(r"<[^>]*>", "X", " ".join(values))
    return len(text.split())


# ── how the model is loaded ──────────────────────────────────────────────────────────────────────

LOAD_MODE = "--load-mode"
SWITCHES: Mapping[str, tuple[str, bool]] = {
    "--mlock": ("mlock", True),
    "--mmap": ("mmap", True),
    "--no-mmap": ("mmap", False),
    "-dio": ("dio", True),
    "--direct-io": ("dio", True),
    "-ndio": ("dio", False),
    "--no-direct-io": ("dio", False),
}
"""Switches of older builds, gone from newer ones; some in between knew both, and took --mlock for unmapped."""


def accepted(options: Mapping[str, Option]) -> Mapping[str, Option]:
    """Flags that may be given for a build: its own, and those that `as_built` translates."""
    return {**dict.fromkeys(SWITCHES, Option(0)), **options} if LOAD_MODE in options else options


def as_built(arguments: Sequence[str], options: Mapping[str, Option]) -> tuple[str, ...]:
    """The same arguments, with the load mode instead of the switches of older builds where this build has it."""
    parsed = parse(tuple(arguments), GRAMMAR)
    return _with_mode(parsed) if LOAD_MODE in options else parsed.written


def _with_mode(parsed: ParsedArguments) -> tuple[str, ...]:
    switches = [each for each in parsed.items if each.name in SWITCHES]
    said = dict(SWITCHES[each.name] for each in switches)
    result: list[str] = []
    for each in parsed.items:
        if each.name not in SWITCHES:
            result += parsed.words(each)
        elif each is switches[-1]:
            result += [LOAD_MODE, _mode(said)]
    return tuple(result)


def _mode(said: Mapping[str, bool]) -> str:
    """The load mode that corresponds to older builds' switches."""
    if said.get("dio"):
        return "dio"
    mapped = said.get("mmap", True)
    if said.get("mlock"):
        return "mmap+mlock" if mapped else "mlock"
    return "auto" if mapped and "mmap" not in said else "mmap" if mapped else "none"
