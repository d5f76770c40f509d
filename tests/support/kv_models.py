"""Models of every kind of cache, for a real llama-server to load: all weights are zero, and they say nothing.

`tools/tiny_gguf.py` makes the model that answers; these only have the shapes that decide how much memory is taken.
Each kind is its hyperparameters and, for every block, the tensors that llama.cpp insists on. Their files are sparse:
even a large one takes no room on the disk and is written in a moment, and in memory its zeros count like any weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy

from tests.support import kv_states
from tests.support.kv_parts import Sizes, Tensors, attending, blocks, gated, mixed, norms


def llama(writer: Any, s: Sizes) -> Tensors:
    """Every block keeps the whole context."""
    writer.add_head_count_kv(s.heads_kv)
    tensors: Tensors = {}
    for prefix in blocks(s):
        tensors |= norms(prefix, "attn_norm", "ffn_norm", size=s.width) | attending(prefix, s) | gated(prefix, s)
    return tensors


def gemma3(writer: Any, s: Sizes) -> Tensors:
    """Five of six blocks look back a window."""
    writer.add_head_count_kv(s.heads_kv)
    writer.add_sliding_window(s.window)
    tensors: Tensors = {}
    for prefix in blocks(s):
        tensors |= norms(prefix, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", size=s.width)
        tensors |= norms(prefix, "attn_q_norm", "attn_k_norm", size=s.head)
        tensors |= attending(prefix, s) | gated(prefix, s)
    return tensors


def cohere2(writer: Any, s: Sizes) -> Tensors:
    """Three of four blocks look back a window."""
    writer.add_head_count_kv(s.heads_kv)
    writer.add_sliding_window(s.window)
    writer.add_logit_scale(1.0)
    tensors: Tensors = {}
    for prefix in blocks(s):
        tensors |= norms(prefix, "attn_norm", size=s.width) | attending(prefix, s) | gated(prefix, s)
    return tensors


def gpt_oss(writer: Any, s: Sizes) -> Tensors:
    """Every other block looks back a window; experts."""
    writer.add_head_count_kv(s.heads_kv)
    writer.add_sliding_window(s.window)
    writer.add_expert_count(s.experts)
    writer.add_expert_used_count(s.used)
    writer.add_expert_feed_forward_length(s.expert_forward)
    tensors: Tensors = {}
    for prefix in blocks(s):
        tensors |= norms(prefix, "attn_norm", "post_attention_norm", size=s.width)
        tensors |= attending(prefix, s) | mixed(prefix, s)
        tensors |= {
            f"{prefix}.attn_sinks.weight": (s.heads,),
            f"{prefix}.attn_q.bias": (s.heads * s.head,),
            f"{prefix}.attn_k.bias": (s.heads_kv * s.head,),
            f"{prefix}.attn_v.bias": (s.heads_kv * s.head,),
            f"{prefix}.attn_output.bias": (s.width,),
            f"{prefix}.ffn_gate_inp.bias": (s.experts,),
            f"{prefix}.ffn_gate_exps.bias": (s.experts, s.expert_forward),
            f"{prefix}.ffn_up_exps.bias": (s.experts, s.expert_forward),
            f"{prefix}.ffn_down_exps.bias": (s.experts, s.width),
        }
    return tensors


def qwen3moe(writer: Any, s: Sizes) -> Tensors:
    """Every block keeps the whole context; experts, in the proportions of the real one."""
    writer.add_head_count_kv(s.heads_kv)
    writer.add_expert_count(s.experts)
    writer.add_expert_used_count(s.used)
    writer.add_expert_feed_forward_length(s.expert_forward)
    tensors: Tensors = {}
    for prefix in blocks(s):
        tensors |= norms(prefix, "attn_norm", "ffn_norm", size=s.width)
        tensors |= norms(prefix, "attn_q_norm", "attn_k_norm", size=s.head)
        tensors |= attending(prefix, s) | mixed(prefix, s)
    return tensors


def deepseek2(writer: Any, s: Sizes) -> Tensors:
    """One compressed row for all heads, and no values."""
    queries = 32
    writer.add_head_count_kv(1)
    writer.add_kv_lora_rank(s.latent)
    writer.add_q_lora_rank(queries)
    writer.add_key_length(s.latent + s.rotary)
    writer.add_value_length(s.latent)
    writer.add_key_length_mla(s.head + s.rotary)
    writer.add_value_length_mla(s.head)
    writer.add_leading_dense_block_count(s.layers)
    writer.add_expert_feed_forward_length(s.forward)
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_scale(1.0)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    tensors: Tensors = {}
    for prefix in blocks(s):
        tensors |= norms(prefix, "attn_norm", "ffn_norm", size=s.width) | gated(prefix, s)
        tensors |= norms(prefix, "attn_kv_a_norm", size=s.latent) | norms(prefix, "attn_q_a_norm", size=queries)
        tensors |= {
            f"{prefix}.attn_q_a.weight": (queries, s.width),
            f"{prefix}.attn_q_b.weight": (s.heads * (s.head + s.rotary), queries),
            f"{prefix}.attn_kv_a_mqa.weight": (s.latent + s.rotary, s.width),
            f"{prefix}.attn_k_b.weight": (s.heads, s.latent, s.head),
            f"{prefix}.attn_v_b.weight": (s.heads, s.head, s.latent),
            f"{prefix}.attn_output.weight": (s.width, s.heads * s.head),
        }
    return tensors


def bert(writer: Any, s: Sizes) -> Tensors:
    """An encoder: it reads each text anew."""
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_token_type_count(2)
    tensors: Tensors = {
        "position_embd.weight": (s.context, s.width),
        "token_types.weight": (2, s.width),
        "token_embd_norm.weight": (s.width,),
        "token_embd_norm.bias": (s.width,),
    }
    rows = {"attn_q": s.width, "attn_k": s.width, "attn_v": s.width, "attn_output": s.width, "ffn_up": s.forward}
    for prefix in blocks(s):
        for name, count in rows.items():
            tensors |= {f"{prefix}.{name}.weight": (count, s.width), f"{prefix}.{name}.bias": (count,)}
        tensors |= {f"{prefix}.ffn_down.weight": (s.width, s.forward), f"{prefix}.ffn_down.bias": (s.width,)}
        for name in ("attn_output_norm", "layer_output_norm"):
            tensors |= {f"{prefix}.{name}.weight": (s.width,), f"{prefix}.{name}.bias": (s.width,)}
    return tensors


def gemma_embedding(writer: Any, s: Sizes) -> Tensors:
    """An encoder of which five of six blocks look a window far."""
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    return gemma3(writer, s)


@dataclass(frozen=True)
class Kind:
    """A model."""

    architecture: str
    name: str
    """What it is, for people."""
    make: Callable[[Any, Sizes], Tensors]
    """Writes the hyperparameters that only it has, and tells the tensors of its blocks."""
    sizes: Sizes = field(default_factory=Sizes)

    @property
    def encodes(self) -> bool:
        """It answers no chats, but embeds texts."""
        return self.architecture in ("bert", "gemma-embedding")


KINDS: Mapping[str, Kind] = {
    "mha": Kind("llama", "every head has keys of its own", llama, Sizes(heads_kv=4)),
    "gqa": Kind("llama", "heads share keys in groups (GQA)", llama),
    "mqa": Kind("llama", "all heads share their keys (MQA)", llama, Sizes(heads_kv=1)),
    "qwen3moe": Kind("qwen3moe", "experts, MQA", qwen3moe, Sizes(layers=2, heads_kv=1)),
    "gemma3": Kind("gemma3", "5 of 6 blocks keep a window", gemma3, Sizes(layers=12)),
    "cohere2": Kind("cohere2", "3 of 4 blocks keep a window", cohere2, Sizes(layers=8)),
    "gpt-oss": Kind("gpt-oss", "1 of 2 blocks keeps a window; experts", gpt_oss, Sizes(layers=4)),
    "deepseek2": Kind("deepseek2", "one compressed row for all heads (MLA)", deepseek2),
    "mamba": Kind("mamba", "a state, no cache", kv_states.mamba),
    "mamba2": Kind("mamba2", "a state in groups, no cache", kv_states.mamba2),
    "jamba": Kind("jamba", "hybrid: 1 of 4 blocks attends", kv_states.jamba, Sizes(layers=8)),
    "qwen3next": Kind("qwen3next", "hybrid: 1 of 4 attends; experts", kv_states.qwen3next, Sizes(layers=8, state=32)),
    "lfm2": Kind("lfm2", "hybrid with short convolutions", kv_states.lfm2, Sizes(layers=8)),
    "falcon-h1": Kind("falcon-h1", "cache and state in every block", kv_states.falcon_h1),
    "bert": Kind("bert", "encoder", bert, Sizes(context=2048)),
    "gemma-embedding": Kind("gemma-embedding", "encoder with windows", gemma_embedding, Sizes(layers=6)),
}


def _tokens(writer: Any, kind: Kind) -> None:
    count = kind.sizes.vocabulary
    if kind.architecture == "bert":
        names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        writer.add_tokenizer_model("bert")
        writer.add_token_list(names + [f"▁w{index}" for index in range(count - len(names))])
        writer.add_token_types([int(gguf.TokenType.CONTROL)] * 5 + [int(gguf.TokenType.NORMAL)] * (count - 5))
        writer.add_uint32("tokenizer.ggml.cls_token_id", 2)
        writer.add_bos_token_id(2)
        writer.add_eos_token_id(3)
        writer.add_unk_token_id(1)
        writer.add_sep_token_id(3)
        writer.add_pad_token_id(0)
        return
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL, *[gguf.TokenType.BYTE] * 256]
    spare = count - len(names)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(names + [f"w{index}" for index in range(spare)])
    writer.add_token_scores([0.0] * count)
    writer.add_token_types([int(each) for each in kinds] + [int(gguf.TokenType.NORMAL)] * spare)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _hyperparameters(writer: Any, kind: Kind) -> None:
    s = kind.sizes
    writer.add_file_type(0)
    writer.add_context_length(s.context)
    writer.add_embedding_length(s.width)
    writer.add_vocab_size(s.vocabulary)
    writer.add_block_count(s.layers)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_layer_norm_eps(1e-5)
    alone = kind.architecture in ("mamba", "mamba2")
    writer.add_feed_forward_length(0 if alone else s.forward)
    writer.add_head_count(0 if alone else s.heads)
    if not alone and kind.architecture not in ("jamba", "bert"):
        writer.add_rope_dimension_count(s.rotary if kind.architecture == "deepseek2" else s.head)
        writer.add_rope_freq_base(10000.0)
        if kind.architecture != "deepseek2":
            writer.add_key_length(s.head)
            writer.add_value_length(s.head)


def write(path: Path, kind: Kind, half: bool = False) -> None:
    """Makes the file. `half`: matrices of F16, not F32."""
    s = kind.sizes
    writer = gguf.GGUFWriter(path, kind.architecture)
    _hyperparameters(writer, kind)
    _tokens(writer, kind)
    tensors: Tensors = {"token_embd.weight": (s.vocabulary, s.width)}
    if kind.architecture != "bert":
        last = "token_embd_norm" if kind.architecture == "lfm2" else "output_norm"
        tensors |= {f"{last}.weight": (s.width,)}
    if kind.architecture not in ("bert", "cohere2", "gemma-embedding", "lfm2"):  # those use the input's
        tensors |= {"output.weight": (s.vocabulary, s.width)}
    for name, shape in (tensors | kind.make(writer, s)).items():
        matrix = len(shape) > 1 and "conv" not in name and name.endswith(".weight")
        dtype = numpy.dtype(numpy.float16 if half and matrix else numpy.float32)
        writer.add_tensor_info(name, shape, dtype, int(numpy.prod(shape)) * dtype.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    data = sum(gguf.GGUFWriter.ggml_pad(each.nbytes, writer.data_alignment) for each in writer.tensors[0].values())
    writer.close()
    start = gguf.GGUFWriter.ggml_pad(path.stat().st_size, writer.data_alignment)
    os.truncate(path, start + data)
