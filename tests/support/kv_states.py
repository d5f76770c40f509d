"""Models that keep a state of fixed size, in all of their blocks, in some, or beside a cache in every one."""

from __future__ import annotations

from typing import Any

from tests.support.kv_parts import Sizes, Tensors, attending, blocks, gated, mixed, norms


def _scanned(writer: Any, s: Sizes) -> None:
    writer.add_ssm_conv_kernel(s.kernel)
    writer.add_ssm_inner_size(s.inner)
    writer.add_ssm_state_size(s.state)
    writer.add_ssm_time_step_rank(s.rank)


def _scanning(prefix: str, s: Sizes) -> Tensors:
    """A block of Mamba."""
    return {
        f"{prefix}.ssm_in.weight": (2 * s.inner, s.width),
        f"{prefix}.ssm_conv1d.weight": (s.inner, s.kernel),
        f"{prefix}.ssm_conv1d.bias": (s.inner,),
        f"{prefix}.ssm_x.weight": (s.rank + 2 * s.state, s.inner),
        f"{prefix}.ssm_dt.weight": (s.inner, s.rank),
        f"{prefix}.ssm_dt.bias": (s.inner,),
        f"{prefix}.ssm_a": (s.inner, s.state),
        f"{prefix}.ssm_d": (s.inner,),
        f"{prefix}.ssm_out.weight": (s.width, s.inner),
    }


def _scanning_by_heads(prefix: str, s: Sizes) -> Tensors:
    """A block of Mamba 2: `rank` heads in groups."""
    grouped = s.inner + 2 * s.groups * s.state
    return {
        f"{prefix}.ssm_in.weight": (s.inner + grouped + s.rank, s.width),
        f"{prefix}.ssm_conv1d.weight": (grouped, s.kernel),
        f"{prefix}.ssm_conv1d.bias": (grouped,),
        f"{prefix}.ssm_dt.bias": (s.rank,),
        f"{prefix}.ssm_a": (s.rank, 1),
        f"{prefix}.ssm_d": (s.rank, 1),
        f"{prefix}.ssm_norm.weight": (s.groups, s.inner // s.groups),
        f"{prefix}.ssm_out.weight": (s.width, s.inner),
    }


def mamba(writer: Any, s: Sizes) -> Tensors:
    """Every block scans."""
    _scanned(writer, s)
    tensors: Tensors = {}
    for prefix in blocks(s):
        tensors |= norms(prefix, "attn_norm", size=s.width) | _scanning(prefix, s)
    return tensors


def mamba2(writer: Any, s: Sizes) -> Tensors:
    """Every block scans, with a state that groups of heads share."""
    _scanned(writer, s)
    writer.add_ssm_group_count(s.groups)
    tensors: Tensors = {}
    for prefix in blocks(s):
        tensors |= norms(prefix, "attn_norm", size=s.width) | _scanning_by_heads(prefix, s)
    return tensors


def jamba(writer: Any, s: Sizes) -> Tensors:
    """Every fourth block attends, the others scan."""
    _scanned(writer, s)
    attends = [index % 4 == 3 for index in range(s.layers)]
    writer.add_head_count_kv([s.heads_kv if each else 0 for each in attends])
    tensors: Tensors = {}
    for prefix, attentive in zip(blocks(s), attends, strict=True):
        tensors |= norms(prefix, "attn_norm", "ffn_norm", size=s.width) | gated(prefix, s)
        if attentive:
            tensors |= attending(prefix, s)
        else:
            tensors |= _scanning(prefix, s) | norms(prefix, "ssm_dt_norm", size=s.rank)
            tensors |= norms(prefix, "ssm_b_norm", "ssm_c_norm", size=s.state)
    return tensors


def falcon_h1(writer: Any, s: Sizes) -> Tensors:
    """Every block attends and scans."""
    _scanned(writer, s)
    writer.add_ssm_group_count(s.groups)
    writer.add_head_count_kv(s.heads_kv)
    tensors: Tensors = {}
    for prefix in blocks(s):
        tensors |= norms(prefix, "attn_norm", size=s.width) | gated(prefix, s)
        tensors |= attending(prefix, s) | _scanning_by_heads(prefix, s)
        tensors[f"{prefix}.ffn_norm"] = (s.width,)  # llama.cpp wants it without the usual ending
    return tensors


def qwen3next(writer: Any, s: Sizes) -> Tensors:
    """Every fourth block attends, the others have a gated delta net; experts."""
    _scanned(writer, s)
    writer.add_ssm_group_count(s.groups)
    writer.add_head_count_kv(s.heads_kv)
    writer.add_expert_count(s.experts)
    writer.add_expert_used_count(s.used)
    writer.add_expert_feed_forward_length(s.expert_forward)
    writer.add_expert_shared_feed_forward_length(s.expert_forward)
    keys = s.state * s.groups
    tensors: Tensors = {}
    for index, prefix in enumerate(blocks(s)):
        tensors |= norms(prefix, "attn_norm", "post_attention_norm", size=s.width) | mixed(prefix, s)
        tensors |= {
            f"{prefix}.ffn_gate_inp_shexp.weight": (s.width,),
            f"{prefix}.ffn_gate_shexp.weight": (s.expert_forward, s.width),
            f"{prefix}.ffn_up_shexp.weight": (s.expert_forward, s.width),
            f"{prefix}.ffn_down_shexp.weight": (s.width, s.expert_forward),
        }
        if index % 4 == 3:
            tensors |= attending(prefix, s) | norms(prefix, "attn_q_norm", "attn_k_norm", size=s.head)
            tensors[f"{prefix}.attn_q.weight"] = (2 * s.heads * s.head, s.width)  # with a gate for each number
            continue
        tensors |= norms(prefix, "ssm_norm", size=s.inner // s.rank)
        tensors |= {
            f"{prefix}.attn_qkv.weight": (2 * keys + s.inner, s.width),
            f"{prefix}.attn_gate.weight": (s.inner, s.width),
            f"{prefix}.ssm_conv1d.weight": (2 * keys + s.inner, s.kernel),
            f"{prefix}.ssm_dt.bias": (s.rank,),
            f"{prefix}.ssm_a": (s.rank,),
            f"{prefix}.ssm_ba.weight": (2 * s.rank, s.width),
            f"{prefix}.ssm_out.weight": (s.width, s.inner),
        }
    return tensors


def lfm2(writer: Any, s: Sizes) -> Tensors:
    """Every fourth block attends, the others remember the last tokens of a short convolution."""
    attends = [index % 4 == 3 for index in range(s.layers)]
    writer.add_head_count_kv([s.heads_kv if each else 0 for each in attends])
    writer.add_shortconv_l_cache(s.kernel)
    tensors: Tensors = {}
    for prefix, attentive in zip(blocks(s), attends, strict=True):
        tensors |= norms(prefix, "attn_norm", "ffn_norm", size=s.width) | gated(prefix, s)
        if attentive:
            tensors |= attending(prefix, s) | norms(prefix, "attn_q_norm", "attn_k_norm", size=s.head)
        else:
            tensors |= {
                f"{prefix}.shortconv.conv.weight": (s.width, s.kernel),
                f"{prefix}.shortconv.in_proj.weight": (3 * s.width, s.width),
                f"{prefix}.shortconv.out_proj.weight": (s.width, s.width),
            }
    return tensors
