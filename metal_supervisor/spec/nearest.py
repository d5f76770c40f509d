"""The known name that is most like a mistyped one, for messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean NAME?)`, or "" if no known name is like the word. A name that the word begins comes first."""
    found = difflib.get_close_matches(word[:80], sorted(known))
    best = next((each for each in found if each.startswith(word)), found[0] if found else "")
    return f" (did you mean {best}?)" if best else ""
