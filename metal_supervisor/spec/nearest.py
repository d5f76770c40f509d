"""The known names that are most like a mistyped one, for messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from functools import lru_cache
from heapq import nlargest
from itertools import islice, pairwise

MOST_COMPARED = 10
"""Names that a word is compared with closely, at up to a millisecond each."""
MOST_KNOWN = 500
"""Names that it is compared with at all: many services may each name a Model that does not exist."""


@lru_cache(maxsize=1024)
def nearest(word: str, known: tuple[str, ...], likeness: float = 0.6) -> tuple[str, ...]:
    """Up to three known names that are like a word, the most like first.

    Answers are kept: a client repeats its mistake.
    """
    return tuple(get_close_matches(word[:200], _likely(word[:200], known), cutoff=likeness))


def _likely(word: str, known: tuple[str, ...]) -> list[str]:
    """The names that have the most characters, and pairs of characters, in common with a word."""
    if len(known) <= MOST_COMPARED:
        return list(known)
    parts = _parts(word)

    def alike(name: str) -> float:
        others = _parts(name)
        return len(parts & others) / max(1, len(parts) + len(others))

    return nlargest(MOST_COMPARED, islice(known, MOST_KNOWN), key=alike)


@lru_cache(maxsize=4096)
def _parts(word: str) -> frozenset[str]:
    """The characters of a word, and the pairs of characters in it."""
    return frozenset((*word, *map("".join, pairwise(word))))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean NAME?)`, or "" if no known name is like the word. A name that the word begins comes first."""
    found = nearest(word[:80], tuple(sorted(known)))
    best = next((each for each in found if each.startswith(word)), found[0] if found else "")
    return f" (did you mean {best}?)" if best else ""
