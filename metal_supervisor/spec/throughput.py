"""Generation speed of an engine, from its own counters.

llama-server counts the tokens it has generated and the seconds it spent on them; the quotient is the speed that one
client sees, idle time not included. Averages between two scrapes are left to Prometheus.
"""

from __future__ import annotations

import contextlib
import math

FEWEST_TOKENS = 16
"""Fewer are too few to time: our own first request is one token, which takes no time at all."""
TOKENS = "llamacpp:tokens_predicted_total"
SECONDS = "llamacpp:tokens_predicted_seconds_total"


def tokens_per_s(exposition: str) -> float | None:
    """Tokens per second of generation since the engine's start; None if it generated too few, or does not tell."""
    found: dict[str, float] = {}
    for line in exposition.splitlines():
        name, _, value = line.partition(" ")
        if name in (TOKENS, SECONDS):
            with contextlib.suppress(ValueError):
                found[name] = float(value)
    tokens, seconds = found.get(TOKENS, 0.0), found.get(SECONDS, 0.0)
    rate = tokens / seconds if tokens >= FEWEST_TOKENS and seconds > 0 else math.nan
    return rate if math.isfinite(rate) else None
