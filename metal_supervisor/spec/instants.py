"""Points in time as Kubernetes writes them: RFC 3339 in UTC."""

from __future__ import annotations

from datetime import datetime, timezone


def utc(seconds: float) -> str:
    """Format a Unix time as `2026-11-21T01:45:00Z`; one that is out of range as a plain number."""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return f"{seconds:.0f}"


def unix(time: str) -> float:
    """Unix time of a formatted one. Raises ValueError, OverflowError."""
    return datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()
