"""What the models of `kv_models` are built of: sizes, and the tensors that many architectures have in common."""

from __future__ import annotations

from dataclasses import dataclass

Tensors = dict[str, tuple[int, ...]]
"""Name -> (rows, columns) of a matrix; a single number is a vector."""


@dataclass(frozen=True)
class Sizes:
    """How large a model is. The defaults make a tiny one."""

    layers: int = 3
    width: int = 128
    forward: int = 256
    heads: int = 4
    heads_kv: int = 2
    head: int = 32
    """Numbers of one head."""
    vocabulary: int = 400
    context: int = 32_768
    window: int = 64
    """Tokens that a windowed block looks back."""
    experts: int = 16
    used: int = 8
    expert_forward: int = 48
    latent: int = 64
    """Of MLA: the compressed row of all heads."""
    rotary: int = 32
    """Of MLA: the part of that row that tells positions."""
    inner: int = 256
    """Of recurrent blocks."""
    state: int = 16
    kernel: int = 4
    rank: int = 8
    groups: int = 2


def norms(prefix: str, *names: str, size: int) -> Tensors:
    """Vectors of one length."""
    return {f"{prefix}.{name}.weight": (size,) for name in names}


def blocks(s: Sizes) -> list[str]:
    """The prefixes of all blocks."""
    return [f"blk.{index}" for index in range(s.layers)]


def gated(prefix: str, s: Sizes) -> Tensors:
    """The gated feed-forward part."""
    return {
        f"{prefix}.ffn_gate.weight": (s.forward, s.width),
        f"{prefix}.ffn_up.weight": (s.forward, s.width),
        f"{prefix}.ffn_down.weight": (s.width, s.forward),
    }


def attending(prefix: str, s: Sizes) -> Tensors:
    """Queries, keys and values of several heads."""
    return {
        f"{prefix}.attn_q.weight": (s.heads * s.head, s.width),
        f"{prefix}.attn_k.weight": (s.heads_kv * s.head, s.width),
        f"{prefix}.attn_v.weight": (s.heads_kv * s.head, s.width),
        f"{prefix}.attn_output.weight": (s.width, s.heads * s.head),
    }


def mixed(prefix: str, s: Sizes) -> Tensors:
    """Experts, of which a router chooses some for each token."""
    return {
        f"{prefix}.ffn_gate_inp.weight": (s.experts, s.width),
        f"{prefix}.ffn_gate_exps.weight": (s.experts, s.expert_forward, s.width),
        f"{prefix}.ffn_up_exps.weight": (s.experts, s.expert_forward, s.width),
        f"{prefix}.ffn_down_exps.weight": (s.experts, s.width, s.expert_forward),
    }
