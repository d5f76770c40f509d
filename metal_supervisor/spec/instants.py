"""Points in time as Kubernetes writes them: RFC 3339 in UTC."""

from __future__ import annotations

import re
from datetime import datetime, timezone


def utc(seconds: float) -> str:
    """Format a Unix time as `2026-11-21T01:45:00Z`; one that is out of range as a plain number."""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return f"{seconds:.0f}"


def unix(time: str) -> float:
    """Unix time, in whole seconds, of a formatted one of any zone. Raises ValueError."""
    # Without its fraction, which has up to nine digits in Go: Python 3.10 reads three or six.
    found = datetime.fromisoformat(re.sub(r"\.\d+", "", time).replace("Z", "+00:00"))
    if found.tzinfo is None:
        raise ValueError(f"no zone: {time!r:.80}")
    return found.timestamp()
