"""Memory estimate of an MLX server, read back from the command line that it will be started with."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from metal_supervisor.memory.estimate import CacheSettings, Estimate, by_size
from metal_supervisor.memory.estimate_mlx import GROUP, CannotEstimate, estimate_mlx
from metal_supervisor.models.metadata import Demand, Reading
from metal_supervisor.runtimes.mlx_arguments import MLX
from metal_supervisor.spec.arguments import parse
from metal_supervisor.spec.sizes import MIB
from metal_supervisor.spec.types import Service

PROMPT_CACHE_MIB = 1024
"""Size limit of the prompt cache."""
PROMPT_CACHE_MIB_UNKNOWN = 512
"""Its size for a model that cannot be estimated."""
QUANTIZED_FROM = 5000
"""Default of mlx_lm's `--quantized-kv-start`: tokens after which `--kv-bits` takes effect."""


def demand(
    service: Service, argv: Sequence[str], model: Reading, _reading_of: Callable[[str], Reading | None]
) -> Demand:
    """Estimate for an MLX server with this command line and model.

    It is charged for `spec.contextSize`, which its slots share, or else for the model's full context in each of them:
    MLX allocates as a conversation grows. For mlx_lm that limit is enforced; the Swift server is trusted to keep it.
    """
    return as_demand(estimate_of(service, argv, model), model)


def as_demand(made: Estimate | None, model: Reading) -> Demand:
    """The estimate of a model as a demand, which says why there is none."""
    if made is None:
        return Demand(None, text=model.problem or "the size of its model is not known")
    return Demand(made.total_bytes, made.mapped_bytes, made.explain())


def prompt_cache_bytes(made: Estimate | None) -> int:
    """Size of mlx_lm's prompt cache: holds the last conversation, whose next turn would else start from nothing."""
    if made is None or made.basis != "config":
        return PROMPT_CACHE_MIB_UNKNOWN * MIB
    return min(made.kv_bytes + made.state_bytes, PROMPT_CACHE_MIB * MIB)


def slot_tokens(service: Service) -> int:
    """Context of one slot in tokens, 0 if the service does not set it."""
    total, slots = int(service.options.get("contextSize", 0)), int(service.options.get("parallelSlots", 1))
    return max(total // slots, 1) if total else 0


def estimate_of(service: Service, argv: Sequence[str], model: Reading) -> Estimate | None:
    """Estimate by config.json, or else by size; None if neither is known."""
    said = parse(tuple(argv), MLX.grammar)
    context = whole(said.last("--context"), slot_tokens(service))
    slots = whole(said.last("--max-slots"), whole(said.last("--decode-concurrency"), 1))
    bits, cache = whole(said.last("--kv-bits"), 0), whole(said.last("--prompt-cache-bytes"), 0)
    start, group = whole(said.last("--quantized-kv-start"), QUANTIZED_FROM), whole(said.last("--kv-group-size"), GROUP)
    settings = CacheSettings(context=context, slots=slots, prompt_cache_bytes=cache, mmap=False)
    return by_config(model, settings, bits or None, start, group)


def by_config(
    model: Reading, settings: CacheSettings, kv_bits: int | None, quantized_from: int = 0, group: int = GROUP
) -> Estimate | None:
    """Estimate by config.json, or else by size; None if neither is known. `kv_bits` and on: see `estimate_mlx`."""
    if model.size_bytes is None:
        return None
    why, cache = model.problem, settings.prompt_cache_bytes
    if model.config is not None:
        try:
            return estimate_mlx(
                model.size_bytes, model.config, settings.context, settings.slots, kv_bits, cache, quantized_from, group
            )
        except CannotEstimate as error:
            why = str(error)
    return by_size(model.size_bytes, settings, why)


def whole(text: str | None, default: int) -> int:
    """The value of a flag as Python's `int` parses it, `default` if it is no whole number of 0 or more."""
    return int(text) if text and re.fullmatch(r"\+?[0-9]{1,18}", text) else default
