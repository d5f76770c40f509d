"""Messages about engines that do not fit, with the arithmetic and advice; and refusals of those that never will."""

from __future__ import annotations

from metal_supervisor.spec.sizes import amount

INSUFFICIENT = "InsufficientMemory"
"""LLMKube's reason why an engine waits: too little memory is left."""
CHECK_FAILED = "MemoryCheckFailed"
"""LLMKube's reason why an engine waits: its memory could not be estimated."""
PRESSURE = "MemoryPressure"
UNKNOWN_STARTED = "its size is not known, so it was started without knowing whether it fits"


def _smaller(need: int, weights: int) -> tuple[str, ...]:
    """Changes that reduce an engine's need. `weights`: bytes of its weights, 0 if unknown."""
    if weights and 2 * weights < need:
        return (f"a shorter context, as {amount(need - weights)} of that are not weights",)
    share = f", as {amount(weights)} of that are weights" if weights else ""
    return f"a smaller quantization{share}", "a shorter context"


def advice_for(need: int, weights: int) -> str:
    """Advice for an engine that does not fit."""
    return f"try {', '.join(_smaller(need, weights))}, or --memory-fraction"


def room_left(left: int, budget: int) -> str:
    """Text about the memory that is left of a budget."""
    return f"{amount(max(left, 0), 'down')} of {amount(budget)} left"


def over_limit(need: int | None, limit: int | None, weights: int) -> str:
    """Message for an engine that needs more than its Model allows, "" if it does not. `weights`: part of `need`."""
    if need is None or limit is None or need <= limit:
        return ""
    return (
        f"needs {amount(need, 'up')}, its Model allows {amount(limit, 'down')} (spec.hardware.memoryBudget or "
        f"memoryFraction); raise that, or try {' or '.join(_smaller(need, weights))}"
    )


def too_large(need: int | None, limit: int | None, budget: int, left: int, weights: int = 0) -> str:
    """Message for an engine that never fits, even alone; "" if it may.

    `limit`: its Model's; `budget`: this Mac's, of which `left` is left.
    """
    over = over_limit(need, limit, weights)
    if over or need is None or need <= budget:
        return over
    text = f"needs {amount(need, 'up')}, {room_left(left, budget)}, so it never fits here"
    return f"{text}; {advice_for(need, weights)}"
