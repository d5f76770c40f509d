"""The known names that are most like a mistyped one, for messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from functools import lru_cache


@lru_cache(maxsize=256)
def nearest(word: str, known: tuple[str, ...], likeness: float = 0.6) -> tuple[str, ...]:
    """Up to three known names that are like a word, the most like first.

    Answers are kept: one takes tens of milliseconds with some hundred names, and a client repeats its mistake.
    """
    return tuple(get_close_matches(word[:200], known, cutoff=likeness))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean NAME?)`, or "" if no known name is like the word. A name that the word begins comes first."""
    found = nearest(word[:80], tuple(sorted(known)))
    best = next((each for each in found if each.startswith(word)), found[0] if found else "")
    return f" (did you mean {best}?)" if best else ""
