"""Estimates for MLX models, by the config.json of their directory.

MLX allocates its cache as a conversation grows, without a limit; so the estimate is for as many conversations of full
length as the service may hold at once. The files come from untrusted sources, so every number is checked, and a missing
one is listed as an assumption. A key lowers the estimate only for a `model_type` whose code reads it, in mlx-lm 0.31.3
and 0.32.2 and, where it has that type too, in mlx-vlm 0.6.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metal_supervisor.memory.estimate import Estimate
from metal_supervisor.spec.gguf import MAX_DATA_BYTES, MAX_LAYERS
from metal_supervisor.spec.sizes import MIB

MARGIN_PERCENT = 5
"""Addition to the size of the files, for scratch memory; oMLX uses the same, and measurements confirm it."""
PROCESS_BYTES = 256 * MIB
STEP = 256
"""Tokens by which mlx_lm's caches grow."""
PREFILL = 2048
"""Tokens of a prompt read at once, which a sliding cache holds besides its window; mlx_lm's default."""
GROUP = 64
"""Numbers of a quantized cache that share a scale and a bias: mlx_lm's default."""
GROUP_BYTES = 4
"""Bytes of a scale and a bias."""
ROPE_NUMBERS = 64
"""Positional part of a latent row where `qk_rope_head_dim` is missing."""
MAX_NUMBER = 1 << 31

SIZED = frozenset(
    {
        "afmoe",
        "bailing_moe_linear",
        "bitnet",
        "cohere2",
        "deepseek_v4",
        "deepseek_v41",
        "deepseek_v41_text",
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone",
        "exaone4",
        "exaone_moe",
        "falcon_h1",
        "gear",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "gemma3n",
        "gemma4",
        "gemma4_text",
        "gemma4_unified",
        "glm",
        "glm4",
        "glm4_moe",
        "gpt_oss",
        "hunyuan_v1_dense",
        "iquestcoder",
        "iquestloopcoder",
        "laguna",
        "llama",
        "llama4",
        "llama4_text",
        "mellum",
        "mimo_v2_flash",
        "minimax",
        "minimax_m2",
        "minimax_m3_vl",
        "ministral3",
        "mistral",
        "mistral3",
        "muse_glimmer",
        "muse_spark",
        "nemotron",
        "nemotron_h",
        "olmo2",
        "olmo3",
        "olmo_hybrid",
        "olmoe",
        "pixtral",
        "plamo3",
        "prism_hadamard_qwen35",
        "qwen3",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_vl",
        "qwen3_vl_moe",
        "seed_oss",
        "smollm3",
        "solar_open",
        "spark2_5",
        "telechat3",
        "xverse",
    }
)
"""Types that read `head_dim`; of all others it is at least `hidden_size` / `num_attention_heads`."""
GROUPED = SIZED | frozenset(
    {
        "Klear",
        "apertus",
        "aya_vision",
        "bailing_moe",
        "cohere",
        "cohere2_moe",
        "cohere2_vision",
        "cohere2moe",
        "deepseek",
        "deepseekocr",
        "dots_ocr",
        "ernie4_5_moe_vl",
        "fastvlm",
        "glm4v",
        "glm4v_moe",
        "glm_ocr",
        "granite",
        "granite4_vision",
        "granite_vision",
        "granitemoe",
        "granitemoehybrid",
        "helium",
        "hunyuan",
        "hunyuan_vl",
        "idefics2",
        "idefics3",
        "internlm2",
        "internlm3",
        "internvl_chat",
        "jamba",
        "jina_vlm",
        "lfm2",
        "lfm2-vl",
        "lfm2_moe",
        "lfm2_vl",
        "llava",
        "llava-qwen2",
        "llava_bunny",
        "llava_next",
        "llava_qwen2",
        "mimo",
        "minicpm",
        "mixtral",
        "mllama",
        "moondream3",
        "nanochat",
        "paddleocr_vl",
        "paligemma",
        "phi",
        "phi3",
        "phi3small",
        "phi4_siglip",
        "phi4mm",
        "phimoe",
        "plamo2",
        "qwen2",
        "qwen2_5_vl",
        "qwen2_moe",
        "qwen2_vl",
        "qwen3_omni_moe",
        "smolvlm",
        "stablelm",
        "starcoder2",
    }
)
"""Types that read `num_key_value_heads`; of all others every head has keys and values of its own."""
NESTED = frozenset(
    {
        "aya_vision",
        "cohere2_vision",
        "deepseek_v41",
        "deepseek_v41_text",
        "deepseekocr",
        "dots_ocr",
        "ernie4_5_moe_vl",
        "fastvlm",
        "gemma3",
        "gemma3n",
        "gemma4",
        "gemma4_unified",
        "glm4v",
        "glm4v_moe",
        "glm_ocr",
        "granite4_vision",
        "granite_vision",
        "hunyuan_vl",
        "idefics2",
        "idefics3",
        "internvl_chat",
        "jina_vlm",
        "kimi_k25",
        "kimi_k3",
        "kimi_vl",
        "lfm2-vl",
        "lfm2_vl",
        "llama4",
        "llava",
        "llava-qwen2",
        "llava_bunny",
        "llava_next",
        "llava_qwen2",
        "minimax_m3_vl",
        "mistral3",
        "mllama",
        "moondream3",
        "muse_glimmer",
        "muse_spark",
        "paddleocr_vl",
        "paligemma",
        "phi4_siglip",
        "phi4mm",
        "pixtral",
        "prism_hadamard_qwen35",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_omni_moe",
        "qwen3_vl",
        "qwen3_vl_moe",
        "smolvlm",
    }
)
"""Types that take all of their language model's values from `text_config`, if there is one."""
LATENT = frozenset(
    {
        "bailing_hybrid",
        "bailing_moe_v3",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "joyai_llm_flash",
        "kimi_k2",
        "kimi_k25",
        "kimi_k3",
        "kimi_linear",
    }
)
"""Types that cache `kv_lora_rank` numbers for all heads; deepseek_v2, kimi_vl and others cache what they unpack to."""
LISTED = frozenset(
    {
        "afmoe",
        "exaone_moe",
        "gear",
        "gemma3n",
        "gemma4",
        "gemma4_text",
        "gemma4_unified",
        "gpt_oss",
        "iquestcoder",
        "laguna",
        "llama",
        "mellum",
        "ministral3",
        "mistral",
        "muse_glimmer",
        "muse_spark",
        "olmo3",
        "olmo_hybrid",
        "spark2_5",
        "step3p5",
        "xverse",
    }
)
"""Types that read the kind of each layer from `layer_types`."""
LINEAR = frozenset({"olmo_hybrid"})
"""Those of them with linear layers, whose others are all full; no other has a linear one, whatever the list says."""
PERIODS: Mapping[str, int] = {"cohere2": 4, "gemma3": 6, "gemma3_text": 6, "plamo3": 8}
"""Type that reads `sliding_window_pattern` -> its value where that is missing: the last of so many layers is full."""
INTERVALS: Mapping[str, int] = dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe", "prism_hadamard_qwen35"), 4)
"""The same of `full_attention_interval`, where all other layers are linear."""
WIDE = frozenset({"gemma4", "gemma4_text", "gemma4_unified"})
"""Types whose full layers have heads of another size, and may have another number of them."""
QWEN_3_5: Mapping[str, int] = {
    "linear_num_value_heads": 64,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 192,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
DEFAULTS: Mapping[str, Mapping[str, int]] = {
    **{kind: {"head_dim": 64} for kind in ("afmoe", "falcon_h1", "gpt_oss")},
    **{kind: {"head_dim": 128} for kind in ("cohere2", "laguna", "minimax_m3_vl", "muse_glimmer", "plamo3")},
    **{kind: {"head_dim": 256} for kind in ("gemma3_text", "gemma4", "gemma4_text", "gemma4_unified")},
    **{kind: {"head_dim": 512} for kind in ("deepseek_v41", "deepseek_v41_text")},
    **{kind: {"kv_lora_rank": 512} for kind in ("bailing_moe_v3", "deepseek_v3", "glm4_moe_lite", "joyai_llm_flash")},
    **{kind: {"kv_lora_rank": 512} for kind in ("kimi_k2", "kimi_k25")},
    "deepseek_v32": {"index_head_dim": 128, "kv_lora_rank": 512},
    "gemma3": {"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4},
    "iquestloopcoder": {"loop_window_size": 64},
    "plamo2": {"hidden_size_per_head": 128},
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "prism_hadamard_qwen35"), QWEN_3_5),
}
"""Type -> what its code takes for keys that are missing, as in the published config.json of Gemma 3."""
KNOWN = GROUPED | NESTED | LATENT | LISTED


class CannotEstimate(Exception):
    """The files lack a number or have a wrong one; the text says which."""


class _Config:
    """The values of a config.json that engines read for its `model_type`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        kind, inner = config.get("model_type"), config.get("text_config")
        self.kind = kind if isinstance(kind, str) else ""
        self._values = dict(config)
        if isinstance(inner, dict) and inner and self.kind in NESTED:
            self._values = inner
        elif isinstance(inner, dict) and self.kind not in KNOWN:
            self._values = {**inner, **config}

    def number(self, name: str, default: int | None = None) -> int:
        value = self._values.get(name)
        if value is None:
            value = DEFAULTS.get(self.kind, {}).get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_NUMBER:
            raise CannotEstimate(f"config.json: {name} must be a whole number, not {value!r:.80}")
        return value

    def is_true(self, name: str) -> bool:
        return self._values.get(name) is True

    def layers(self, layers: int) -> list[str]:
        """Kind of each layer: `full`, `sliding` or `linear`."""
        kinds = self._values.get("layer_types")
        if self.kind == "iquestloopcoder":  # which goes through its layers twice, with a window the second time
            return ["full", "sliding"] * layers
        if self.kind in LISTED and isinstance(kinds, list):
            if len(kinds) > MAX_LAYERS:
                text = f"config.json: layer_types has {len(kinds)} layers; at most {MAX_LAYERS} are possible"
                raise CannotEstimate(text)
            # Some types have as many layers as this list, whatever num_hidden_layers says.
            word, smaller = ("linear_attention", "linear") if self.kind in LINEAR else ("sliding_attention", "sliding")
            found = [smaller if kind == word else "full" for kind in kinds]
            return found + ["full"] * (layers - len(kinds))
        if self.kind in INTERVALS:
            interval = self.number("full_attention_interval", INTERVALS[self.kind])
            return ["full" if interval and (index + 1) % interval == 0 else "linear" for index in range(layers)]
        if self.kind in PERIODS and self.number("sliding_window", 0):
            period = self.number("sliding_window_pattern", PERIODS[self.kind])
            return ["full" if period and (index + 1) % period == 0 else "sliding" for index in range(layers)]
        return ["full"] * layers


def _row(config: _Config, kind: str) -> int:
    """Numbers that a token has in the cache of one layer of that kind."""
    heads, rank = config.number("num_attention_heads"), config.number("kv_lora_rank", 0)
    rope = config.number("qk_rope_head_dim", ROPE_NUMBERS if rank else 0)
    if rank and config.kind in LATENT:
        return rank + rope + 2 * config.number("index_head_dim", 0)  # the indexer caches its keys twice
    whole = max(config.number("hidden_size") // max(heads, 1), config.number("hidden_size_per_head", 0))
    head, groups = config.number("head_dim", 0) or whole, config.number("num_key_value_heads", 0) or heads
    head = head if config.kind in SIZED else max(head, whole)
    groups = max(groups, config.number("swa_num_key_value_heads", 0)) if config.kind in GROUPED else max(groups, heads)
    if config.kind in WIDE and kind == "full":
        head = config.number("global_head_dim", 512) or head
        groups = config.number("num_global_key_value_heads", groups) if config.is_true("attention_k_eq_v") else groups
    value = config.number("v_head_dim", 0)
    nope = config.number("qk_nope_head_dim", 0)
    unpacked = heads * (nope + rope + value) if rank or nope else 0
    return max(groups * (head + max(head, value)), unpacked)


def _quantized_bytes(numbers: int, bits: int, group: int) -> int:
    return -(-numbers * bits // 8) + -(-numbers // max(group, 1)) * GROUP_BYTES


def _state_bytes(config: _Config) -> int:
    """State bytes of one linear layer and one conversation: a gated delta net, as in Qwen3-Next."""
    keys = config.number("linear_num_key_heads", 0) * config.number("linear_key_head_dim", 0)
    value_heads, value_dim = config.number("linear_num_value_heads", 0), config.number("linear_value_head_dim", 0)
    kernel = max(config.number("linear_conv_kernel_dim", 1) - 1, 0)
    states = value_heads * value_dim * config.number("linear_key_head_dim", 0)
    return 4 * (kernel * (2 * keys + value_heads * value_dim) + states)


def estimate_mlx(
    weights: int,
    config: Mapping[str, Any],
    context: int = 0,
    slots: int = 1,
    kv_bits: int | None = None,
    prompt_cache_bytes: int = 0,
    quantized_from: int = 0,
    group: int = GROUP,
) -> Estimate:
    """Estimate the memory of an MLX engine. `weights`: bytes of all weights in the directory; context 0: the model's.
    `quantized_from`: tokens of a cache that stay 16 bits wide; `kv_bits` are of those behind.

    Raises CannotEstimate if there are no weights, or config.json makes no sense.
    """
    if not 0 < weights <= MAX_DATA_BYTES:
        raise CannotEstimate("the directory has no weights (*.safetensors or *.npz)")
    read, assumptions = _Config(config), []
    layers = read.number("num_hidden_layers")
    if not 1 <= layers <= MAX_LAYERS:
        raise CannotEstimate(f"config.json: num_hidden_layers is {layers}; between 1 and {MAX_LAYERS} are possible")
    tokens = context or read.number("max_position_embeddings", 0)
    if not tokens:
        raise CannotEstimate("config.json: max_position_embeddings is missing; set spec.contextSize")
    kinds = read.layers(layers)
    kept = {"full": -(-tokens // STEP) * STEP, "linear": 0}
    window = read.number("loop_window_size" if read.kind == "iquestloopcoder" else "sliding_window", 0) or tokens
    kept["sliding"] = min(kept["full"], window + PREFILL)
    layer_bytes = {}
    for kind, count in kept.items():
        row = _row(read, kind)
        plain = min(count, quantized_from) if kv_bits else count
        layer_bytes[kind] = 2 * row * plain + _quantized_bytes(row, kv_bits or 0, group) * (count - plain)
    if read.kind not in KNOWN:
        assumptions.append(f"model_type {read.kind!r:.40} unknown: charged as full attention, no heads sharing keys")
    if "linear" in kinds and not _state_bytes(read):
        assumptions.append("the size of its linear layers' state is not told")
    return Estimate(
        weights_bytes=weights,
        kv_bytes=sum(layer_bytes[kind] for kind in kinds) * max(slots, 1),
        state_bytes=_state_bytes(read) * kinds.count("linear") * max(slots, 1),
        compute_bytes=-(-weights * MARGIN_PERCENT // 100),
        prompt_cache_bytes=prompt_cache_bytes,
        overhead_bytes=PROCESS_BYTES,
        context=tokens,
        slots=max(slots, 1),
        basis="config",
        assumptions=tuple(assumptions),
    )
