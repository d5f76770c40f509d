"""Estimate of an engine's memory for a model, before it is started.

The formulas for llama-server follow its source and were fitted to its own log lines (buffer sizes at `-lv 4`):
weights, KV cache and recurrent state are exact, compute buffers within some per cent. Unknown values are assumed on
the safe side and listed in `assumptions`; a file whose header is out of reach is estimated by its size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from metal_supervisor.memory.shape import Shape, shape_of
from metal_supervisor.spec.gguf import BadGguf, Header, Omitted
from metal_supervisor.spec.sizes import MIB, amount

PROCESS_BYTES = 32 * MIB
"""Memory of the process without a model; measured."""
PROCESS_BYTES_PER_TOKEN = 340
"""Memory of the tokenizer's tables; measured."""
FALLBACK_PERCENT = 120
"""Charge for a file of which only the size is known, by LLMKube's rule, so that both show the same number."""
FALLBACK_BYTES = 512 * MIB
"""Added to that charge."""
CELLS = 256
"""Tokens: llama.cpp rounds contexts up to a multiple."""
CHECKPOINTS_BESIDES = 4
"""Checkpoints of a slot besides one for each step: the first, that of the last question, two before the end."""
PATCHES_AT_WARMUP = 4 * 46 * 46
"""Patches of the picture with which llama.cpp warms up a vision encoder of variable size."""

CACHE_TYPES: Mapping[str, tuple[int, int]] = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q8_0": (32, 34),
    "q5_1": (32, 24),
    "q5_0": (32, 22),
    "q4_1": (32, 20),
    "q4_0": (32, 18),
    "iq4_nl": (32, 18),
    "turbo4": (32, 17),
    "turbo3": (32, 13),
}
"""Type of a KV cache -> the numbers of a block, and its bytes. The turbo types are in some forks only."""

IN_FILE_ALONE = (
    ".attention.head_count",
    ".attention.head_count_kv",
    ".attention.sliding_window_pattern",
    ".attention.recurrent_layers",
    ".feed_forward_length",
)
"""Endings of keys that `--override-kv` changes but never adds: they may be lists, which llama.cpp seeks in the file."""


@dataclass(frozen=True)
class CacheSettings:
    """Settings of the engine that determine its memory."""

    context: int = 0
    """`--ctx-size`, tokens of all slots together; 0: the context that the model was trained for."""
    slots: int = 1
    """`--parallel`."""
    unified: bool = False
    """`--kv-unified`: all slots share one cache."""
    batch: int = 2048
    ubatch: int = 512
    cache_k: str = "f16"
    cache_v: str = "f16"
    flash_attention: bool = True
    swa_full: bool = False
    """`--swa-full`: windowed blocks keep the whole context."""
    draft_k: str = "f16"
    """`--spec-draft-type-k`: type of the draft model's cache of keys."""
    draft_v: str = "f16"
    prompt_cache_bytes: int = 0
    """`--cache-ram`: old prompts kept beside the model, in ordinary memory."""
    checkpoints: int = 0
    """`--ctx-checkpoints`: most copies that a slot keeps, in ordinary memory, of state that cannot be rolled back."""
    checkpoint_step: int = 8192
    """`--checkpoint-min-step`: tokens between two checkpoints of earlier prompts, 0 for no minimum."""
    mmap: bool = True
    """True if weights are mapped from the file, so that macOS does not count them in the process's footprint."""
    overrides: tuple[tuple[str, int | str], ...] = ()
    """`--override-kv`: keys of the header with the values that the engine takes instead, for a draft model as well."""


@dataclass(frozen=True)
class Estimate:
    """The memory of one engine, part by part, in bytes."""

    weights_bytes: int
    kv_bytes: int = 0
    state_bytes: int = 0
    """Recurrent state: of a fixed size for each slot."""
    compute_bytes: int = 0
    """Scratch buffers and logits."""
    projector_bytes: int = 0
    """The encoder of pictures or sound (mmproj), with its scratch buffers."""
    draft_bytes: int = 0
    """The draft model, with its own cache and buffers."""
    adapter_bytes: int = 0
    prompt_cache_bytes: int = 0
    checkpoint_bytes: int = 0
    """Checkpoints of all slots; those of old prompts count in the prompt cache."""
    overhead_bytes: int = 0
    """The process itself."""
    mapped_bytes: int = 0
    """Part of the total that is mapped from files, which macOS does not count in the process's footprint."""
    context: int = 0
    """Tokens of one slot."""
    slots: int = 1
    basis: str = "header"
    """Source of the estimate: `header`, `file size` (a guess), `config` (MLX)."""
    assumptions: tuple[str, ...] = ()

    @property
    def parts(self) -> Mapping[str, int]:
        return {
            "weights": self.weights_bytes,
            f"KV cache ({self.slots} x {self.context} tokens)": self.kv_bytes,
            "state": self.state_bytes,
            "compute": self.compute_bytes,
            "projector": self.projector_bytes,
            "draft model": self.draft_bytes,
            "adapters": self.adapter_bytes,
            "prompt cache": self.prompt_cache_bytes,
            "checkpoints": self.checkpoint_bytes,
            "process": self.overhead_bytes,
        }

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())

    def explain(self) -> str:
        """One line, such as `9.2 GiB = weights 7.9 GiB + KV cache (1 x 8192 tokens) 1.0 GiB + …`."""
        parts = " + ".join(f"{name} {amount(size)}" for name, size in self.parts.items() if size)
        notes = ([] if self.basis == "header" else [f"by {self.basis}"]) + list(self.assumptions)
        return f"{amount(self.total_bytes)} = {parts}" + (f" ({'; '.join(notes)})" if notes else "")


def _padded(tokens: int) -> int:
    return -(-tokens // CELLS) * CELLS


def _row_bytes(kind: str, numbers: int) -> int:
    block, block_bytes = CACHE_TYPES.get(kind, CACHE_TYPES["f16"])
    return -(-numbers // block) * block_bytes


@dataclass(frozen=True)
class _Cells:
    """Capacity of the caches in tokens."""

    full: int
    """Tokens of one stream, in a block that keeps the whole context."""
    windowed: int
    streams: int


def _cells(shape: Shape, settings: CacheSettings) -> _Cells:
    slots = max(settings.slots, 1)
    whole = _padded(settings.context or shape.context)
    if not whole:
        raise BadGguf(f"{shape.architecture}.context_length is missing; set spec.contextSize")
    full = whole if settings.unified else _padded(whole // slots)
    looked_back = shape.window * (slots if settings.unified else 1) + min(settings.ubatch, settings.batch)
    windowed = full if settings.swa_full or not shape.window else _padded(min(full, looked_back))
    return _Cells(full, windowed, 1 if settings.unified else slots)


def _token_bytes(shape: Shape, settings: CacheSettings, windowed: bool) -> int:
    """Bytes of one token in the caches of all blocks with a window, or of all blocks without one."""
    # Without flash attention values are stored transposed, in rows as long as those of the widest block.
    widest = 0 if settings.flash_attention else max((layer.value for layer in shape.layers), default=0)
    total = 0
    for layer in shape.cached:
        if layer.windowed == windowed:
            total += _row_bytes(settings.cache_k, layer.key) + _row_bytes(settings.cache_k, layer.indexer)
            total += _row_bytes(settings.cache_v, max(layer.value, widest if layer.value else 0))
    return total


def _kv_bytes(shape: Shape, settings: CacheSettings, cells: _Cells) -> int:
    full, windowed = (_token_bytes(shape, settings, each) for each in (False, True))
    return (full * cells.full + windowed * cells.windowed) * cells.streams


def _state_bytes(shape: Shape) -> int:
    """Bytes of the recurrent state of one slot."""
    return sum(layer.state for layer in shape.layers) * 4


def _checkpoint_bytes(shape: Shape, settings: CacheSettings, cells: _Cells) -> int:
    """Most bytes of all slots' checkpoints: each holds the tokens within the window, and the recurrent state."""
    window = 0 if settings.swa_full else min(shape.window, cells.full)
    one = window * _token_bytes(shape, settings, windowed=True) + _state_bytes(shape)
    kept = settings.checkpoints
    if settings.checkpoint_step > 0:
        kept = min(kept, cells.full // settings.checkpoint_step + CHECKPOINTS_BESIDES)
    return max(settings.slots, 1) * kept * one


def _compute_bytes(shape: Shape, settings: CacheSettings, cells: _Cells) -> int:
    """Scratch bytes of the prompt's graph: the larger part of a block, the masks, and the logits of each slot."""
    batch = min(settings.ubatch, settings.batch, cells.full * cells.streams)
    kinds = {layer.windowed for layer in shape.cached}
    masked = sum(cells.windowed if windowed else cells.full for windowed in kinds)
    longest = cells.full if False in kinds else cells.windowed
    encodes = shape.heads and not shape.cached and not any(layer.state for layer in shape.layers)
    if encodes:
        longest = batch  # an encoder attends to the batch itself
        masked = batch * len({layer.windowed for layer in shape.layers})
    attention, forward = 4 * batch * shape.attention, 4 * batch * shape.forward
    if settings.flash_attention:
        # Its kernels do not read f32, so such a cache is converted first, a block at a time.
        numbers = max(((layer.key, layer.value) for layer in shape.cached), default=(0, 0))
        for kind, count in zip((settings.cache_k, settings.cache_v), numbers, strict=True):
            attention += 2 * longest * cells.streams * count if kind == "f32" else 0
        prompt = max(attention, forward) + 2 * batch * masked
    else:
        scores = 4 * batch * longest * shape.heads
        beside = attention if encodes else max(attention, forward) // 2
        prompt = max(forward, attention, scores + beside) + 4 * batch * masked
    logits = 4 * shape.vocabulary * max(settings.slots, 1)
    return max(prompt, logits) + logits


def projector_bytes(header: Header, settings: CacheSettings) -> int:
    """Bytes of an mmproj and its scratch buffers: up to a third too much by published logs of Gemma 3 and Qwen-VL."""

    def number(name: str) -> int:
        value = header.metadata.get(f"clip.vision.{name}", 0)
        return value if isinstance(value, int) and 0 < value < 1 << 20 else 0

    kind = header.metadata.get("clip.projector_type", header.metadata.get("clip.vision.projector_type", ""))
    kind = kind if isinstance(kind, str) else ""
    side = number("image_size") // max(number("patch_size"), 1)
    patches = PATCHES_AT_WARMUP if kind.startswith("qwen") else side * side
    scratch = 36 * patches * number("embedding_length")
    if kind.startswith("qwen2.5"):
        scratch += 4 * patches * patches  # the mask of its windows
    if not settings.flash_attention:
        scratch += 4 * patches * patches * number("attention.head_count")
    return header.weights_bytes + scratch


def draft_settings(settings: CacheSettings) -> CacheSettings:
    """Settings of a draft model beside a model with these settings, without those that apply to the model alone.

    Each checkpoint of the model comes with one of its draft model, so their number is the same.
    """
    return replace(settings, cache_k=settings.draft_k, cache_v=settings.draft_v, prompt_cache_bytes=0)


def _overridden(header: Header, overrides: Sequence[tuple[str, int | str]]) -> Header:
    """The header as the engine reads it. Of equal keys the first counts."""
    metadata = dict(header.metadata)
    for key, value in reversed(overrides):
        present = header.metadata.get(key)
        # A list stays, and what may be a list is only looked for in the file.
        if not isinstance(present, (tuple, Omitted)) and (present is not None or not key.endswith(IN_FILE_ALONE)):
            metadata[key] = value
    return replace(header, metadata=metadata)


def estimate(model: Header, settings: CacheSettings) -> Estimate:
    """Estimate the memory of a llama-server with this model alone; `merge` the headers of shards first.

    Raises BadGguf for hyperparameters that make no sense.
    """
    shape = shape_of(_overridden(model, settings.overrides) if settings.overrides else model)
    cells = _cells(shape, settings)
    assumptions = list(shape.assumptions)
    if shape.cached:
        for kind in dict.fromkeys((settings.cache_k, settings.cache_v)):
            if kind not in CACHE_TYPES:
                assumptions.append(f"KV cache type {kind} unknown: charged as f16")
    return Estimate(
        weights_bytes=model.weights_bytes,
        kv_bytes=_kv_bytes(shape, settings, cells),
        state_bytes=_state_bytes(shape) * max(settings.slots, 1),
        compute_bytes=_compute_bytes(shape, settings, cells),
        prompt_cache_bytes=settings.prompt_cache_bytes,
        checkpoint_bytes=_checkpoint_bytes(shape, settings, cells),
        overhead_bytes=PROCESS_BYTES + PROCESS_BYTES_PER_TOKEN * shape.vocabulary,
        mapped_bytes=model.weights_bytes if settings.mmap else 0,
        context=cells.full,
        slots=max(settings.slots, 1),
        assumptions=tuple(assumptions),
    )


def by_size(file_bytes: int, settings: CacheSettings, why: str) -> Estimate:
    """Fallback estimate for a file of which only the size is known: a fifth more, and half a gibibyte.

    Context and slots do not count, so it is not for a file that an engine would load.
    `why`: the reason why the header could not be read; it becomes the estimate's assumption.
    """
    return Estimate(
        weights_bytes=file_bytes,
        compute_bytes=-(-file_bytes * (FALLBACK_PERCENT - 100) // 100),
        overhead_bytes=FALLBACK_BYTES,
        prompt_cache_bytes=settings.prompt_cache_bytes,
        mapped_bytes=file_bytes if settings.mmap else 0,
        context=settings.context,
        slots=max(settings.slots, 1),
        basis="file size",
        assumptions=(why,) if why else (),
    )
