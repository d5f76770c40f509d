"""What llama-server is told for its mode: chat, embedding or rerank."""

from __future__ import annotations

import contextlib

from metal_supervisor.memory.shape import shape_of
from metal_supervisor.models.metadata import Reading
from metal_supervisor.spec.arguments import ParsedArguments
from metal_supervisor.spec.gguf import BadGguf
from metal_supervisor.spec.types import Service

MEAN = 1
"""Number in a header of the pooling that averages the tokens."""
FIRST = 2
"""Number of the pooling that takes the first token."""
LAST = 3
"""Number of the pooling that takes the last token."""


def trained(model: Reading) -> int | None:
    """Context that a model was trained for, 0 if its header does not say; None without a header that can be read."""
    with contextlib.suppress(BadGguf):
        return None if model.header is None else shape_of(model.header).context
    return None


def _pooling(model: Reading) -> object:
    """What a model's header says of that; None without a word of it."""
    return None if model.header is None else model.header.metadata.get(f"{model.header.architecture}.pooling_type")


def flags(service: Service, model: Reading, asked: ParsedArguments) -> list[str]:
    """Flags of a service's mode, without those that the user gave. A header's word for its pooling counts."""
    wanted = {
        "chat": [],
        "embedding": [["--embedding"], *([] if _pooling(model) in (MEAN, FIRST, LAST) else [["--pooling", "last"]])],
        "rerank": [["--reranking"], ["--embedding"], ["--pooling", "rank"]],
    }[service.mode]
    return [part for flag in wanted if not asked.given(flag[0]) for part in flag]


def undivided(service: Service, model: Reading, asked: ParsedArguments, default_context: int) -> int:
    """Tokens that the engine should take in one batch, because it refuses a longer text; 0 if it divides texts.

    It divides none to rank, nor for a vector that is the mean of all tokens or that of the first.
    """
    pooled = asked.last("--pooling") in ("mean", "cls")
    pooled = pooled or (_pooling(model) in (MEAN, FIRST) and not asked.given("--pooling"))
    told = not {"batchSize", "uBatchSize"}.isdisjoint(service.options)
    told = told or asked.given("--batch-size") or asked.given("--ubatch-size")
    if told or not (service.mode == "rerank" or (service.mode == "embedding" and pooled)):
        return 0
    word = asked.last("--ctx-size")
    context = service.options.get("contextSize") or (int(word) if word.isdecimal() else 0) or default_context
    slot = context // (service.options.get("parallelSlots") or 1)
    return min(slot, trained(model) or slot)
