"""Tiny models of every kind of cache, for a real llama-server to load: random weights, no sense in what they say.

`tools/tiny_gguf.py` makes the model that answers; these only have the shapes that decide how much memory is taken.
Each architecture is its hyperparameters and, for every block, the tensors that llama.cpp insists on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy

WIDTH, FORWARD, HEADS, HEAD, VOCABULARY, CONTEXT = 128, 256, 4, 32, 400, 32_768
INNER, STATE, KERNEL, RANK = 256, 16, 4, 8
LATENT, ROTARY = 64, 32
Tensors = dict[str, tuple[int, ...]]
"""Name → (rows, columns); a single number is a vector."""


def mixed(prefix: str) -> Tensors:
    """The gated feed-forward part."""
    return {
        f"{prefix}.ffn_gate.weight": (FORWARD, WIDTH),
        f"{prefix}.ffn_up.weight": (FORWARD, WIDTH),
        f"{prefix}.ffn_down.weight": (WIDTH, FORWARD),
    }


def attending(prefix: str, heads_kv: int) -> Tensors:
    """Queries, keys and values of several heads."""
    return {
        f"{prefix}.attn_q.weight": (HEADS * HEAD, WIDTH),
        f"{prefix}.attn_k.weight": (heads_kv * HEAD, WIDTH),
        f"{prefix}.attn_v.weight": (heads_kv * HEAD, WIDTH),
        f"{prefix}.attn_output.weight": (WIDTH, HEADS * HEAD),
    }


def scanning(prefix: str) -> Tensors:
    """A Mamba block."""
    return {
        f"{prefix}.ssm_in.weight": (2 * INNER, WIDTH),
        f"{prefix}.ssm_conv1d.weight": (INNER, KERNEL),
        f"{prefix}.ssm_conv1d.bias": (INNER,),
        f"{prefix}.ssm_x.weight": (RANK + 2 * STATE, INNER),
        f"{prefix}.ssm_dt.weight": (INNER, RANK),
        f"{prefix}.ssm_dt.bias": (INNER,),
        f"{prefix}.ssm_a": (INNER, STATE),
        f"{prefix}.ssm_d": (INNER,),
        f"{prefix}.ssm_out.weight": (WIDTH, INNER),
    }


def norms(prefix: str, *names: str, size: int = WIDTH) -> Tensors:
    return {f"{prefix}.{name}.weight": (size,) for name in names}


def shared_heads(writer: Any, layers: int) -> Tensors:
    """llama: two heads share their keys."""
    writer.add_head_count_kv(HEADS // 2)
    tensors: Tensors = {}
    for prefix in (f"blk.{index}" for index in range(layers)):
        tensors |= norms(prefix, "attn_norm", "ffn_norm") | attending(prefix, HEADS // 2) | mixed(prefix)
    return tensors


def windowed(writer: Any, layers: int) -> Tensors:
    """gemma3: five of six blocks look back 64 tokens."""
    writer.add_head_count_kv(HEADS // 2)
    writer.add_sliding_window(64)
    tensors: Tensors = {}
    for prefix in (f"blk.{index}" for index in range(layers)):
        tensors |= norms(prefix, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        tensors |= norms(prefix, "attn_q_norm", "attn_k_norm", size=HEAD)
        tensors |= attending(prefix, HEADS // 2) | mixed(prefix)
    return tensors


def latent(writer: Any, layers: int) -> Tensors:
    """deepseek2: one compressed row for all heads, and no values."""
    writer.add_head_count_kv(1)
    writer.add_kv_lora_rank(LATENT)
    writer.add_q_lora_rank(32)
    writer.add_key_length(LATENT + ROTARY)
    writer.add_value_length(LATENT)
    writer.add_key_length_mla(HEAD + ROTARY)
    writer.add_value_length_mla(HEAD)
    writer.add_leading_dense_block_count(layers)
    writer.add_expert_feed_forward_length(FORWARD)
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_scale(1.0)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    tensors: Tensors = {}
    for prefix in (f"blk.{index}" for index in range(layers)):
        tensors |= norms(prefix, "attn_norm", "ffn_norm") | norms(prefix, "attn_kv_a_norm", size=LATENT)
        tensors |= norms(prefix, "attn_q_a_norm", size=32) | mixed(prefix)
        tensors |= {
            f"{prefix}.attn_q_a.weight": (32, WIDTH),
            f"{prefix}.attn_q_b.weight": (HEADS * (HEAD + ROTARY), 32),
            f"{prefix}.attn_kv_a_mqa.weight": (LATENT + ROTARY, WIDTH),
            f"{prefix}.attn_k_b.weight": (HEADS, LATENT, HEAD),
            f"{prefix}.attn_v_b.weight": (HEADS, HEAD, LATENT),
            f"{prefix}.attn_output.weight": (WIDTH, HEADS * HEAD),
        }
    return tensors


def experts(writer: Any, layers: int) -> Tensors:
    """qwen3moe: all heads share one, and eight of sixteen experts at a time, in the proportions of the real one."""
    writer.add_head_count_kv(1)
    writer.add_expert_count(16)
    writer.add_expert_used_count(8)
    writer.add_expert_feed_forward_length(48)
    tensors: Tensors = {}
    for prefix in (f"blk.{index}" for index in range(layers)):
        tensors |= norms(prefix, "attn_norm", "ffn_norm") | norms(prefix, "attn_q_norm", "attn_k_norm", size=HEAD)
        tensors |= attending(prefix, 1)
        tensors |= {
            f"{prefix}.ffn_gate_inp.weight": (16, WIDTH),
            f"{prefix}.ffn_gate_exps.weight": (16, 48, WIDTH),
            f"{prefix}.ffn_up_exps.weight": (16, 48, WIDTH),
            f"{prefix}.ffn_down_exps.weight": (16, WIDTH, 48),
        }
    return tensors


def scanned(writer: Any) -> None:
    writer.add_ssm_conv_kernel(KERNEL)
    writer.add_ssm_inner_size(INNER)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_time_step_rank(RANK)


def recurrent(writer: Any, layers: int) -> Tensors:
    """mamba: a state of fixed size, and no cache."""
    scanned(writer)
    tensors: Tensors = {}
    for prefix in (f"blk.{index}" for index in range(layers)):
        tensors |= norms(prefix, "attn_norm") | scanning(prefix)
    return tensors


def hybrid(writer: Any, layers: int) -> Tensors:
    """jamba: every fourth block attends, the others scan."""
    scanned(writer)
    attends = [index % 4 == 3 for index in range(layers)]
    writer.add_head_count_kv([HEADS // 2 if each else 0 for each in attends])
    tensors: Tensors = {}
    for index in range(layers):
        prefix = f"blk.{index}"
        tensors |= norms(prefix, "attn_norm", "ffn_norm") | mixed(prefix)
        if attends[index]:
            tensors |= attending(prefix, HEADS // 2)
        else:
            tensors |= scanning(prefix) | norms(prefix, "ssm_dt_norm", size=RANK)
            tensors |= norms(prefix, "ssm_b_norm", "ssm_c_norm", size=STATE)
    return tensors


KINDS: dict[str, tuple[Callable[[Any, int], Tensors], int]] = {
    "llama": (shared_heads, 3),
    "gemma3": (windowed, 12),
    "deepseek2": (latent, 3),
    "qwen3moe": (experts, 2),
    "mamba": (recurrent, 3),
    "jamba": (hybrid, 8),
}
"""Architecture → what makes its blocks, and how many there are."""


def write(path: Path, architecture: str) -> None:
    """Makes a model; the same bytes each time."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_file_type(0)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_vocab_size(VOCABULARY)
    writer.add_layer_norm_rms_eps(1e-5)
    alone = architecture == "mamba"
    writer.add_feed_forward_length(0 if alone else FORWARD)
    writer.add_head_count(0 if alone else HEADS)
    if architecture not in ("mamba", "jamba"):
        writer.add_rope_dimension_count(ROTARY)
        writer.add_rope_freq_base(10000.0)
        if architecture != "deepseek2":
            writer.add_key_length(HEAD)
            writer.add_value_length(HEAD)
    make, layers = KINDS[architecture]
    writer.add_block_count(layers)
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL, *[gguf.TokenType.BYTE] * 256]
    spare = VOCABULARY - len(names)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(names + [f"w{index}" for index in range(spare)])
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types([int(kind) for kind in kinds] + [int(gguf.TokenType.NORMAL)] * spare)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    tensors = {"token_embd.weight": (VOCABULARY, WIDTH), "output_norm.weight": (WIDTH,)}
    tensors |= {"output.weight": (VOCABULARY, WIDTH)} | make(writer, layers)
    chance = numpy.random.default_rng(0)
    for name, shape in tensors.items():
        writer.add_tensor(name, chance.standard_normal(shape, dtype=numpy.float32) * numpy.float32(0.05))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
