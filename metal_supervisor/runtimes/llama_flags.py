"""Which flags a build of llama-server has, by its own `--help`, and how to say the same to another build.

llama-server ends with 1 at an argument that it does not know, so a flag that one release dropped is a crash loop
under the next. What its help lists is therefore held against what it is about to be given. Its parser is plain:
`_` counts as `-` in what begins with `--`, a value is always the next argument, and nothing is abbreviated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

OPTION = re.compile(r"(?P<names>--?[A-Za-z][\w.-]*(?:, +--?[A-Za-z][\w.-]*)*)(?P<values>(?: [^ ]+)*)(?: {2,}.*)?")
"""A line of the help that lists a flag: its names, what its values are called, and after a gap what it does."""
REMOVED = "argument has been removed"
ALWAYS_THERE = "--ctx-size"
"""A help without it is not llama-server's own: some wrapper's, which tells nothing of the engine's flags."""
CHOICES = re.compile(r"[a-z0-9_-]+(,[a-z0-9_-]+)+")
ALLOWED = re.compile(r"allowed values: ([\w, ]+)")


@dataclass(frozen=True)
class Option:
    """One flag of a build."""

    values: int
    """How many of the arguments behind it are its own."""
    choices: str = ""
    """What its value may be, as far as the help lists that: separated by commas, without spaces."""


@lru_cache(maxsize=16)
def options_of(help_text: str) -> Mapping[str, Option]:
    """Every name of every flag that a build takes; none if that cannot be told from its help."""
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
    """The lines of each flag: the one that begins at the margin, and those that go on about it."""
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
    """How many values there are, of which one may be called by several words: `<tensor name pattern>=<…>`."""
    text = re.sub(r"<[^>]*>", "X", " ".join(values))
    return len(text.split())


def folded(argument: str) -> str:
    """A flag as the engine's parser reads it."""
    return argument.replace("_", "-") if argument.startswith("--") else argument


@dataclass(frozen=True)
class Argument:
    """One argument that stands where a flag has to."""

    index: int
    name: str
    """As the parser reads it, known or not."""
    values: tuple[str, ...] = ()


def arguments_of(arguments: Sequence[str], options: Mapping[str, Option]) -> Iterator[Argument]:
    """The flags of a command line with their values, in order; what is no known flag stands alone."""
    index = 0
    while index < len(arguments):
        name = folded(arguments[index])
        after = index + 1 + (options[name].values if name in options else 0)
        yield Argument(index, name, tuple(arguments[index + 1 : after]))
        index = after


# ── how the model is loaded: two spellings ───────────────────────────────────────────────────────

LOAD_MODE = ("-lm", "--load-mode")
SWITCHES: Mapping[str, tuple[str, bool]] = {
    "--mlock": ("mlock", True), "--mmap": ("mmap", True), "--no-mmap": ("mmap", False),
    "-dio": ("dio", True), "--direct-io": ("dio", True), "-ndio": ("dio", False), "--no-direct-io": ("dio", False),
}  # fmt: skip
"""The spelling of older builds, gone from newer ones; between them some knew both, and took --mlock for unmapped."""
OLD_SPELLING: Mapping[str, tuple[str, ...]] = {
    "auto": (), "mmap": ("--mmap",), "none": ("--no-mmap",), "mlock": ("--mlock", "--no-mmap"),
    "mmap+mlock": ("--mlock",), "dio": ("--direct-io",),
}  # fmt: skip
"""Mode -> what older builds call it. Locked memory was mapped there, unless that was switched off as well."""


def accepted(options: Mapping[str, Option]) -> Mapping[str, Option]:
    """What may be asked of a build: its own flags, and those that `as_built` says in its way."""
    if "--load-mode" in options:
        return {**dict.fromkeys(SWITCHES, Option(0)), **options}
    if "--mlock" in options:
        modes = [mode for mode, spelled in OLD_SPELLING.items() if all(name in options for name in spelled)]
        return {**dict.fromkeys(LOAD_MODE, Option(1, ",".join(modes))), **options}
    return options


def as_built(arguments: Sequence[str], options: Mapping[str, Option]) -> tuple[str, ...]:
    """The same arguments, with how the model is loaded said as this build wants it said."""
    parsed = list(arguments_of(arguments, accepted(options)))
    if "--load-mode" in options:
        return _with_mode(arguments, parsed)
    return _with_switches(arguments, parsed) if "--mlock" in options else tuple(arguments)


def _with_mode(arguments: Sequence[str], parsed: Sequence[Argument]) -> tuple[str, ...]:
    switches = [each for each in parsed if each.name in SWITCHES]
    said = dict(SWITCHES[each.name] for each in switches)
    result: list[str] = []
    for each in parsed:
        if each.name not in SWITCHES:
            result += arguments[each.index : each.index + 1 + len(each.values)]
        elif each is switches[-1]:
            result += ["--load-mode", _mode(said)]
    return tuple(result)


def _mode(said: Mapping[str, bool]) -> str:
    """The mode of what older builds were told with several switches."""
    if said.get("dio"):
        return "dio"
    mapped = said.get("mmap", True)
    if said.get("mlock"):
        return "mmap+mlock" if mapped else "mlock"
    return "auto" if mapped and "mmap" not in said else "mmap" if mapped else "none"


def _with_switches(arguments: Sequence[str], parsed: Sequence[Argument]) -> tuple[str, ...]:
    result: list[str] = []
    for each in parsed:
        plain = arguments[each.index : each.index + 1 + len(each.values)]
        result += OLD_SPELLING.get(each.values[0], plain) if each.name in LOAD_MODE and each.values else plain
    return tuple(result)
