"""The known name that is most like a mistyped one, for messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean NAME?)`, or "" if no known name is like the word."""
    found = difflib.get_close_matches(word[:80], sorted(known), 1)
    return f" (did you mean {found[0]}?)" if found else ""
