"""Estimates for MLX models, by the config.json of their directory.

MLX allocates its cache as a conversation grows, without a limit; so the estimate is for as many conversations of full
length as the service may hold at once. The files come from untrusted sources, so every number is checked, and a missing
one is listed as an assumption.
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
GROUP, GROUP_BYTES = 64, 4
"""Numbers of a quantized cache that share a scale and a bias, and the bytes of those two."""
MAX_NUMBER = 1 << 31


class CannotEstimate(Exception):
    """The files lack a number or have a wrong one; the text says which."""


class _Config:
    """A config.json; a multimodal one has the language model's values in `text_config`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        inner = config.get("text_config")
        self._values = {**config, **inner} if isinstance(inner, dict) else dict(config)

    def number(self, name: str, default: int | None = None) -> int:
        value = self._values.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_NUMBER:
            raise CannotEstimate(f"config.json: {name} must be a whole number, not {value!r:.80}")
        return value

    def layers(self, layers: int) -> list[str]:
        """Kind of each layer: `full`, `sliding` or `linear`."""
        kinds = self._values.get("layer_types")
        if isinstance(kinds, list) and len(kinds) >= layers:
            words = (str(kind) for kind in kinds[:layers])
            return ["sliding" if "sliding" in w else "linear" if "linear" in w else "full" for w in words]
        if interval := self.number("full_attention_interval", 0):
            return ["full" if (index + 1) % interval == 0 else "linear" for index in range(layers)]
        if self.number("sliding_window", 0) and (period := self.number("sliding_window_pattern", 0)):
            return ["full" if (index + 1) % period == 0 else "sliding" for index in range(layers)]
        return ["full"] * layers


def _token_bytes(config: _Config, kv_bits: int | None) -> int:
    """Cache bytes of one token in one attending layer."""
    heads = config.number("num_attention_heads")
    if rank := config.number("kv_lora_rank", 0):
        numbers = rank + config.number("qk_rope_head_dim", 0)
    else:
        head = config.number("head_dim", config.number("hidden_size") // max(heads, 1))
        numbers = 2 * config.number("num_key_value_heads", heads) * head
    if kv_bits:
        return -(-numbers * kv_bits // 8) + -(-numbers // GROUP) * GROUP_BYTES
    return 2 * numbers


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
) -> Estimate:
    """Estimate the memory of an MLX engine. `weights`: bytes of all weights in the directory; context 0: the model's.

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
    kinds, per_token = read.layers(layers), _token_bytes(read, kv_bits)
    kept = {"full": -(-tokens // STEP) * STEP, "linear": 0}
    kept["sliding"] = min(kept["full"], (read.number("sliding_window", 0) or tokens) + PREFILL)
    if "linear" in kinds and not _state_bytes(read):
        assumptions.append("the size of its linear layers' state is not told")
    return Estimate(
        weights_bytes=weights,
        kv_bytes=per_token * sum(kept[kind] for kind in kinds) * max(slots, 1),
        state_bytes=_state_bytes(read) * kinds.count("linear") * max(slots, 1),
        compute_bytes=-(-weights * MARGIN_PERCENT // 100),
        prompt_cache_bytes=prompt_cache_bytes,
        overhead_bytes=PROCESS_BYTES,
        context=tokens,
        slots=max(slots, 1),
        basis="config",
        assumptions=tuple(assumptions),
    )
