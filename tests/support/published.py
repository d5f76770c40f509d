"""Published facts of real models: their hyperparameters, their caches as engines' logs tell them, and by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from metal_supervisor.memory.estimate import CACHE_TYPES, CacheSettings
from metal_supervisor.spec.gguf import Header, Omitted

MIB = 1 << 20
GIB = 1 << 30


def header(architecture: str, tokens: int = 0, weights: int = 0, **keys: Any) -> Header:
    """A header with these hyperparameters; `__` stands for a dot."""
    metadata: dict[str, Any] = {f"{architecture}.{key.replace('__', '.')}": value for key, value in keys.items()}
    metadata["general.architecture"] = architecture
    if tokens:
        metadata["tokenizer.ggml.tokens"] = Omitted(tokens)
    return Header(metadata, weights, 4096, weights)


def attention(heads: int, kv: int | tuple[int, ...], size: int, **more: Any) -> dict[str, Any]:
    return {
        "attention__head_count": heads,
        "attention__head_count_kv": kv,
        "attention__key_length": size,
        "attention__value_length": size,
        **more,
    }


LLAMA_8B = header(
    "llama",
    128_256,
    block_count=32,
    embedding_length=4096,
    feed_forward_length=14_336,
    context_length=131_072,
    **attention(32, 8, 128),
)
GEMMA_270M = header(
    "gemma3",
    262_144,
    block_count=18,
    embedding_length=640,
    feed_forward_length=2048,
    context_length=32_768,
    **attention(4, 1, 256, attention__sliding_window=512),
)
GEMMA_27B = header(
    "gemma3",
    262_208,
    block_count=62,
    embedding_length=5376,
    feed_forward_length=21_504,
    context_length=131_072,
    **attention(32, 16, 128, attention__sliding_window=1024),
)
QWEN3_30B = header(
    "qwen3moe",
    151_936,
    block_count=48,
    embedding_length=2048,
    feed_forward_length=6144,
    context_length=40_960,
    expert_count=128,
    expert_used_count=8,
    expert_feed_forward_length=768,
    **attention(32, 4, 128),
)
DEEPSEEK_V3 = header(
    "deepseek2",
    129_280,
    block_count=61,
    embedding_length=7168,
    feed_forward_length=18_432,
    context_length=163_840,
    attention__head_count=128,
    attention__head_count_kv=1,
    attention__kv_lora_rank=512,
    attention__key_length=576,
    attention__value_length=512,
    attention__key_length_mla=192,
    attention__value_length_mla=128,
)
MISTRAL_SMALL = header(
    "llama",
    131_072,
    block_count=40,
    embedding_length=5120,
    feed_forward_length=32_768,
    context_length=131_072,
    **attention(32, 8, 128),
)
GPT_OSS_20B = header(
    "gpt-oss",
    201_088,
    block_count=24,
    embedding_length=2880,
    feed_forward_length=2880,
    context_length=131_072,
    expert_count=32,
    expert_used_count=4,
    expert_feed_forward_length=2880,
    **attention(64, 8, 64, attention__sliding_window=128),
)
QWEN3_NEXT = header(
    "qwen3next",
    151_936,
    block_count=48,
    embedding_length=2048,
    feed_forward_length=5120,
    context_length=262_144,
    ssm__conv_kernel=4,
    ssm__inner_size=4096,
    ssm__state_size=128,
    ssm__group_count=16,
    **attention(16, 2, 256),
)


@dataclass(frozen=True)
class Known:
    """A model, how it is started, and what its caches take."""

    header: Header
    settings: CacheSettings
    kv_bytes: int
    state_bytes: int = 0
    tolerance: int = 0
    """Bytes; what was read from a log is rounded."""


# The KV sizes of Gemma 3 270M are from runs of a real llama-server, in whole MiB (reference/runtimes.md section 7);
# that of gpt-oss is from a log in llama.cpp's pull request 17609: 12 windowed blocks of 768 cells are 18.00 MiB, of
# a Mac with Metal. The others are the models' published hyperparameters, and the arithmetic.
PUBLISHED = {
    "gemma 3 270m, 2048": Known(GEMMA_270M, CacheSettings(2048), 21 * MIB, tolerance=MIB // 2),
    "gemma 3 270m, 8192": Known(GEMMA_270M, CacheSettings(8192), 39 * MIB, tolerance=MIB // 2),
    "gemma 3 270m, 32768": Known(GEMMA_270M, CacheSettings(32768), 111 * MIB, tolerance=MIB // 2),
    "gemma 3 270m, 4 slots": Known(GEMMA_270M, CacheSettings(32768, slots=4), 156 * MIB, tolerance=MIB // 2),
    "gemma 3 270m, q8_0": Known(
        GEMMA_270M, CacheSettings(32768, cache_k="q8_0", cache_v="q8_0"), 59 * MIB, tolerance=MIB // 2
    ),
    "gemma 3 270m, q4_0": Known(
        GEMMA_270M, CacheSettings(32768, cache_k="q4_0", cache_v="q4_0"), 31 * MIB, tolerance=MIB // 2
    ),
    # blocks x (keys + values) x heads x size x 2 bytes x tokens
    "llama 3.1 8b": Known(LLAMA_8B, CacheSettings(8192), 32 * 2 * 8 * 128 * 2 * 8192),  # 1 GiB
    "mistral small": Known(MISTRAL_SMALL, CacheSettings(32768), 40 * 2 * 8 * 128 * 2 * 32768),  # 5 GiB
    "qwen3 30b-a3b": Known(QWEN3_30B, CacheSettings(32768), 48 * 2 * 4 * 128 * 2 * 32768),  # 3 GiB
    # 10 blocks of 62 keep everything, 52 a window of 1024 and the 512 that are read at once
    "gemma 3 27b": Known(GEMMA_27B, CacheSettings(32768), 2 * 16 * 128 * 2 * (10 * 32768 + 52 * (1024 + 512))),
    # one row of 512 + 64 for all heads, and no values
    "deepseek-v3": Known(DEEPSEEK_V3, CacheSettings(32768), 61 * (512 + 64) * 2 * 32768),
    # every other block keeps a window of 128 and the 512 read at once, rounded up to 768
    "gpt-oss 20b": Known(GPT_OSS_20B, CacheSettings(4096), 12 * 2 * 8 * 64 * 2 * 4096 + 18 * MIB),
    # every fourth block attends; the others keep 3 steps of convolution and a state of 128 x 4096
    "qwen3-next": Known(
        QWEN3_NEXT,
        CacheSettings(32768),
        12 * 2 * 2 * 256 * 2 * 32768,
        state_bytes=36 * 4 * (3 * (4096 + 2 * 16 * 128) + 128 * 4096),
    ),
}


# ── by hand ──────────────────────────────────────────────────────────────────────────────────────

READ_AT_ONCE = 512
"""A windowed block keeps these too, besides its window; `--ubatch-size`."""


@dataclass(frozen=True)
class Blocks:
    """Blocks of a model that keep the same."""

    count: int
    rows: tuple[int, ...]
    """Numbers per token: factors, such as heads, numbers of a head, and 2 for keys and values."""
    window: int = 0
    """Tokens they look back, 0 for all."""

    def tokens(self, context: int) -> int:
        return self.window + READ_AT_ONCE if self.window else context


@dataclass(frozen=True)
class ByHand:
    """A published model, with what a person would multiply."""

    name: str
    header: Header
    blocks: tuple[Blocks, ...]

    @property
    def file_bytes(self) -> int:
        return self.header.weights_bytes

    def kv_bytes(self, settings: CacheSettings) -> int:
        block, block_bytes = CACHE_TYPES[settings.cache_k]
        numbers = 0
        for each in self.blocks:
            product = each.count * each.tokens(settings.context)
            for factor in each.rows:
                product *= factor
            numbers += product
        return numbers * block_bytes // block

    def arithmetic(self, settings: CacheSettings) -> str:
        """`32 x 8 x 128 x 2 x 8192 x 2 B`."""
        block, block_bytes = CACHE_TYPES[settings.cache_k]
        terms = []
        for each in self.blocks:
            row = " x ".join(map(str, each.rows))
            terms.append(f"{each.count} x {row} x {each.tokens(settings.context)}")
        whole = terms[0] if len(terms) == 1 else f"({' + '.join(terms)})"
        return f"{whole} x " + (f"{block_bytes} B" if block == 1 else f"{block_bytes}/{block} B")

    def incumbent_kv_bytes(self, settings: CacheSettings) -> int:
        """LLMKube's formula: layers x embedding x tokens x bytes of a key and a value."""
        block, block_bytes = CACHE_TYPES[settings.cache_k]
        keys = self.header.metadata
        layers, embedding = (keys[f"{self.header.architecture}.{key}"] for key in ("block_count", "embedding_length"))
        assert isinstance(layers, int)
        assert isinstance(embedding, int)
        return layers * embedding * settings.context * 2 * block_bytes // block

    def incumbent_bytes(self, settings: CacheSettings) -> int:
        """All that LLMKube charges."""
        return self.file_bytes + self.incumbent_kv_bytes(settings) + 512 * MIB


def _of(header: Header, gib: float) -> Header:
    """The model with weights of that size."""
    size = round(gib * GIB)
    return replace(header, weights_bytes=size, data_bytes=size)


# The sizes are of files in Q4_K_M, as llama.cpp prints them in many published logs.
BY_HAND = (
    ByHand("Llama 3.1 8B", _of(LLAMA_8B, 4.58), (Blocks(32, (8, 128, 2)),)),
    ByHand("Mistral Small 3 24B", _of(MISTRAL_SMALL, 13.34), (Blocks(40, (8, 128, 2)),)),
    ByHand("Qwen3 30B-A3B", _of(QWEN3_30B, 17.28), (Blocks(48, (4, 128, 2)),)),
    ByHand("Gemma 3 27B", _of(GEMMA_27B, 15.40), (Blocks(10, (16, 128, 2)), Blocks(52, (16, 128, 2), 1024))),
    ByHand("DeepSeek-V3", _of(DEEPSEEK_V3, 376.65), (Blocks(61, (512 + 64,)),)),
)


def starts() -> list[CacheSettings]:
    """How each of them is started."""
    return [
        CacheSettings(context, cache_k=kind, cache_v=kind) for context in (8192, 32_768) for kind in ("f16", "q8_0")
    ]
