"""A model in shards, by the reference implementation."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy


def write_shards(directory: Path, name: str) -> list[Path]:
    """Six tensors in three files, named after `name`; in their order."""
    writer = gguf.GGUFWriter(directory / name, "llama", split_max_tensors=2)
    writer.add_block_count(2)
    for index in range(6):
        writer.add_tensor(f"blk.{index % 2}.attn_k.{index}", numpy.zeros((4, 32), numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(directory.iterdir())
