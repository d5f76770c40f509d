"""What would make a model fit: each suggestion fits, and is the least of its kind."""

from __future__ import annotations

import re
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from metal_supervisor.memory.estimate import CACHE_TYPES, Estimate
from metal_supervisor.memory.fit_advice import LEAST_CONTEXT, FitPlan, changes, largest_context, smaller_weights
from metal_supervisor.spec.sizes import GIB, MIB

WEIGHTS = 4 * GIB
STATE_BYTES = 64 * MIB


def charge(plan: FitPlan) -> Estimate:
    """64 KiB a token at f16, a state for each slot, and a gibibyte for the rest."""
    numbers, size = CACHE_TYPES[plan.kv_type]
    padded = -(-(plan.context // plan.slots) // 256) * 256 * plan.slots
    return Estimate(
        WEIGHTS, padded * 32 * 1024 * size // numbers, STATE_BYTES * plan.slots, GIB, context=padded, slots=plan.slots
    )


def test_the_largest_context_is_the_last_that_fits() -> None:
    free = WEIGHTS + GIB + STATE_BYTES + 512 * MIB
    assert largest_context(charge, FitPlan(99), free, 1 << 20) == 8192
    assert largest_context(charge, FitPlan(99), free - 1, 1 << 20) == 8192 - 256
    assert largest_context(charge, FitPlan(99), free, 5000) == 4864, "no more than was asked for"
    assert largest_context(charge, FitPlan(99), WEIGHTS, 1 << 20) == 0
    assert largest_context(charge, FitPlan(99, slots=3), free, 1 << 20) % (3 * 256) == 0


def test_of_each_kind_the_least_change_is_told() -> None:
    plan = FitPlan(32768, slots=4)  # 2 GiB of cache, 7.25 GiB together
    assert charge(plan).total_bytes == 7 * GIB + GIB // 4
    assert changes(charge, plan, 7 * GIB) == [
        "--ctx 28672 (spec.contextSize): 7.0 GiB",
        "--kv-type q8_0 (spec.cacheTypeK and cacheTypeV): 6.3 GiB",
        "--slots 3 --ctx 24576 (spec.parallelSlots and contextSize, as much for each): 6.6 GiB",
    ]
    assert changes(charge, plan, 6 * GIB) == [
        "--ctx 12288 (spec.contextSize): 6.0 GiB",
        "--kv-type q4_0 (spec.cacheTypeK and cacheTypeV): 5.8 GiB",
        "--slots 1 --ctx 8192 (spec.parallelSlots and contextSize, as much for each): 5.5 GiB",
    ]


def test_where_no_type_is_enough_a_shorter_context_with_the_smallest_is() -> None:
    plan = FitPlan(65536)
    free = WEIGHTS + GIB + STATE_BYTES + 256 * MIB
    assert changes(charge, plan, free) == [
        "--ctx 4096 (spec.contextSize): 5.3 GiB",
        "--kv-type q4_0 --ctx 14336 (spec.cacheTypeK, cacheTypeV and contextSize): 5.3 GiB",
    ]
    assert changes(charge, replace(plan, kv_type="q4_0"), free) == ["--ctx 14336 (spec.contextSize): 5.3 GiB"]


def test_a_prompt_cache_is_the_first_to_go() -> None:
    def with_cache(plan: FitPlan) -> Estimate:
        return replace(charge(plan), prompt_cache_bytes=2 * GIB)

    found = changes(with_cache, FitPlan(8192), 6 * GIB)
    assert found == ["--cache-ram 0 in spec.extraArgs (no prompt cache): 5.5 GiB"]


def test_a_context_that_is_no_help_is_not_suggested() -> None:
    free = WEIGHTS + GIB + STATE_BYTES + (LEAST_CONTEXT - 256) * 64 * 1024
    assert changes(charge, FitPlan(65536, kv_type="q4_0"), free - 40 * MIB) == []


def test_if_nothing_helps_the_weights_must_be_smaller() -> None:
    left = smaller_weights(charge, FitPlan(2048), 3 * GIB)
    assert left == "a smaller quantization, of at most 1.8 GiB of weights; these are 4.0 GiB"
    left = smaller_weights(charge, FitPlan(65536), 3 * GIB)
    assert left == "a smaller quantization, of at most 1.8 GiB of weights at --ctx 1024; these are 4.0 GiB"
    assert smaller_weights(charge, FitPlan(65536), GIB).startswith("no quantization of it")


def test_weights_are_not_asked_to_make_room_for_a_long_context() -> None:
    beside = charge(FitPlan(65536)).total_bytes - WEIGHTS
    left = smaller_weights(charge, FitPlan(65536), beside + 100 * MIB)
    assert "at --ctx 1024" in left, "100 MiB of weights are no model of 4 GiB"


@given(st.integers(1, 1 << 20), st.integers(1, 16), st.sampled_from(sorted(CACHE_TYPES)), st.integers(-GIB, 16 * GIB))
def test_whatever_is_suggested_fits(context: int, slots: int, kind: str, free_bytes: int) -> None:
    plan = FitPlan(context, slots, kind)
    if charge(plan).total_bytes <= free_bytes:
        return
    for text in changes(charge, plan, free_bytes):
        said = dict(re.findall(r"--([a-z-]+) (\w+)", text))
        told = FitPlan(int(said.get("ctx", context)), int(said.get("slots", slots)), said.get("kv-type", kind))
        assert told != plan and charge(told).total_bytes <= free_bytes
    assert smaller_weights(charge, plan, free_bytes)
