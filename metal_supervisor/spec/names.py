"""Lookup of a service by the name a user typed: `default/phi`, `default.phi`, or `phi` if only one has that name.

The typed text is only ever compared with known names, so it can be anything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

from metal_supervisor.spec.nearest import nearest
from metal_supervisor.spec.record import Record

Aliases: TypeAlias = Sequence[Collection[str]]
"""The names of one thing, the most specific first: a later one counts only if no earlier one matches."""
MOST_LISTED = 12


class Unknown(Exception):
    """No such name, or more than one thing of that name; the text says what there is."""


def aliases(record: Record) -> Aliases:
    """The names of a service's engine. Of several engines each has its own, and the first answers to the service's."""
    own = {record.program, ".".join(record.key), "/".join(record.key)}
    return own, {".".join(record.owner), "/".join(record.owner)}, {record.key[1]}, {record.name}


def meant(word: str, known: Mapping[str, Aliases]) -> str:
    """The program that a word names. `known`: the names of each. Raises Unknown."""
    for level in range(max((len(each) for each in known.values()), default=0)):
        found = sorted(program for program, each in known.items() if level < len(each) and word in each[level])
        if len(found) == 1:
            return found[0]
        if found:
            raise Unknown(f"{word!r:.80} may be any of {', '.join(found[:MOST_LISTED])}; say which")
    raise Unknown(f"there is no {word!r:.80}{_instead(word, known)}")


def of_another_namespace(word: str, namespace: str) -> str:
    """Message about a name of a namespace that this Mac does not watch, "" for others. `namespace`: "" for all."""
    theirs, slash, _ = word.partition("/")
    if not (slash and namespace) or theirs == namespace:
        return ""
    return f"{word!r:.80} is not looked at: this Mac serves the namespace {namespace} only; see --namespace"


def _instead(word: str, known: Mapping[str, Aliases]) -> str:
    every = {name: program for program, each in known.items() for names in each for name in names}
    near = sorted({every[name] for name in nearest(word, tuple(every))})
    if near:
        return f"; did you mean {' or '.join(near)}?"
    there = sorted(known)
    more = f" and {len(there) - MOST_LISTED} more" if len(there) > MOST_LISTED else ""
    return f"; there is {', '.join(there[:MOST_LISTED])}{more}" if there else "; there is none at all"
