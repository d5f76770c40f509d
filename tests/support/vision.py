"""A vision projector that a real llama-server loads beside the tiny model: random weights of a llava."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

WIDTH = 32
FEED = 64
SIZE = 16
PATCH = 8
LAYERS = 2
TEXT = 64
"""TEXT: width of the language model, tools/tiny_gguf.py's default."""


def projector(path: Path) -> Path:
    """Write the file."""
    writer, random = gguf.GGUFWriter(str(path), "clip"), np.random.default_rng(0)

    def tensor(name: str, *shape: int) -> None:
        writer.add_tensor(name, (random.standard_normal(shape) * 0.02).astype(np.float32))

    def layer(name: str, *shape: int) -> None:
        tensor(f"{name}.weight", *shape)
        tensor(f"{name}.bias", shape[0])

    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "mlp")
    writer.add_bool("clip.use_gelu", True)
    numbers = {
        "image_size": SIZE,
        "patch_size": PATCH,
        "embedding_length": WIDTH,
        "feed_forward_length": FEED,
        "block_count": LAYERS,
        "projection_dim": TEXT,
        "attention.head_count": 2,
    }
    for name, value in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    for name in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{name}", [0.5, 0.5, 0.5])
    tensor("v.class_embd", WIDTH)
    tensor("v.patch_embd.weight", WIDTH, 3, PATCH, PATCH)
    tensor("v.position_embd.weight", (SIZE // PATCH) ** 2 + 1, WIDTH)
    layer("v.pre_ln", WIDTH)
    for block in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            layer(f"v.blk.{block}.{name}", WIDTH, WIDTH)
        for name in ("ln1", "ln2"):
            layer(f"v.blk.{block}.{name}", WIDTH)
        layer(f"v.blk.{block}.ffn_down", FEED, WIDTH)
        layer(f"v.blk.{block}.ffn_up", WIDTH, FEED)
    layer("mm.0", TEXT, WIDTH)
    layer("mm.2", TEXT, TEXT)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
