"""Advice for a model that does not fit: a shorter context, a smaller cache, fewer slots, smaller weights.

"It does not fit" leaves users guessing at quantizations. Each of these changes the estimate in a known way, so the
largest context, and the smallest sufficient change of each kind, are found by calling the estimate itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from metal_supervisor.memory.estimate import CACHE_TYPES, CELLS, Estimate
from metal_supervisor.spec.sizes import amount

KV_TYPES = ("f16", "q8_0", "q4_0")
"""Cache types to try, those with the least loss of quality first."""
LEAST_CONTEXT = 1024
"""Tokens of a slot below which a context is useless."""


@dataclass(frozen=True)
class FitPlan:
    """Settings that a model is to be served with."""

    context: int
    """Tokens of all slots together, as `spec.contextSize`."""
    slots: int = 1
    kv_type: str = "f16"


Charge: TypeAlias = Callable[[FitPlan], Estimate]
"""Estimate of the model's memory with given settings."""


def largest_context(charge: Charge, plan: FitPlan, free_bytes: int, most: int) -> int:
    """Largest context that fits, up to `most`, in tokens of all slots, a multiple of the engine's step; 0 if none."""
    step = CELLS * plan.slots
    low, high = 0, most // step
    while low < high:
        middle = (low + high + 1) // 2
        if charge(replace(plan, context=middle * step)).total_bytes <= free_bytes:
            low = middle
        else:
            high = middle - 1
    return low * step


def _smaller_types(kind: str) -> tuple[str, ...]:
    def per_number(name: str) -> float:
        numbers, size = CACHE_TYPES.get(name, CACHE_TYPES["f16"])
        return size / numbers

    return tuple(name for name in KV_TYPES if per_number(name) < per_number(kind))


def changes(charge: Charge, plan: FitPlan, free_bytes: int) -> list[str]:
    """Changes with which a model fits that does not fit as planned: the smallest of each kind, the mildest first.

    Each with its flag of `fit`, its fields of the InferenceService, and the memory that is needed then.
    """
    made = charge(plan)
    found: list[str] = []
    least = LEAST_CONTEXT * plan.slots

    def add(text: str, need: int) -> None:
        # Rounded down like what is left, into which it fits: it must not look like more.
        found.append(f"{text}: {amount(need, 'down')}")

    def takes(other: FitPlan) -> int:
        return charge(other).total_bytes

    without = made.total_bytes - made.prompt_cache_bytes
    if without <= free_bytes:
        add("--cache-ram 0 in spec.extraArgs (no prompt cache)", without)
    context = largest_context(charge, plan, free_bytes, plan.context)
    if context >= least:
        add(f"--ctx {context} (spec.contextSize)", takes(replace(plan, context=context)))
    smaller = _smaller_types(plan.kv_type)
    for kind in smaller:
        if (need := takes(replace(plan, kv_type=kind))) <= free_bytes:
            add(f"--kv-type {kind} (spec.cacheTypeK and cacheTypeV)", need)
            break
    else:
        other = replace(plan, kv_type=smaller[-1]) if smaller else plan
        longer = largest_context(charge, other, free_bytes, plan.context)
        if longer >= max(least, context + 1):
            text = f"--kv-type {other.kv_type} --ctx {longer} (spec.cacheTypeK, cacheTypeV and contextSize)"
            add(text, takes(replace(other, context=longer)))
    for slots in range(plan.slots - 1, 0, -1):
        fewer = replace(plan, slots=slots, context=plan.context // plan.slots * slots)
        if (need := takes(fewer)) <= free_bytes:
            add(f"--slots {slots} --ctx {fewer.context} (spec.parallelSlots and contextSize, as much for each)", need)
            break
    return found


def smaller_weights(charge: Charge, plan: FitPlan, free_bytes: int) -> str:
    """Size that the weights must have to fit, if no other change is enough; one line."""
    least = replace(plan, context=min(plan.context, LEAST_CONTEXT * plan.slots))
    for tried, at in ((plan, ""), (least, f" at --ctx {least.context}")):
        made = charge(tried)
        left = free_bytes - (made.total_bytes - made.weights_bytes)
        # A quarter is about the range of quantizations; below that, a shorter context is assumed as well.
        if left > (0 if at else made.weights_bytes // 4):
            weights = f"{amount(left, 'down')} of weights{at}; these are {amount(made.weights_bytes)}"
            return f"a smaller quantization, of at most {weights}"
    return "no quantization of it: what it takes besides its weights is more than what is left"
