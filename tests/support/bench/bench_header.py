#!/usr/bin/env python3
"""How long the header of a large model takes to read: part of `make bench`, and a command of its own.

The file is sparse; its header is as long as those of real models: 150,000 tokens, as many merges, 723 tensors.

    python -m tests.support.bench.bench_header
"""

from __future__ import annotations

import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path

from metal_supervisor.models import headers

TOKENS = 150_000
TENSORS = 723
TENSOR_BYTES = 100 << 20


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _texts(key: str, word: str) -> bytes:
    items = b"".join(_text(f"{word}{index}") for index in range(TOKENS))
    return _text(key) + struct.pack("<IIQ", 9, 8, TOKENS) + items


def write(path: Path) -> None:
    """Makes a file of 70 GiB, as far as anybody can tell without reading its weights."""
    entries = [
        _text("general.architecture") + struct.pack("<I", 8) + _text("llama"),
        _texts("tokenizer.ggml.tokens", "token"),
        _texts("tokenizer.ggml.merges", "to ken"),
    ]
    tensors = [
        _text(f"blk.{index // 9}.attn_k.{index % 9}")
        + struct.pack("<IQIQ", 1, TENSOR_BYTES // 4, 0, index * TENSOR_BYTES)
        for index in range(TENSORS)
    ]
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, TENSORS, len(entries)) + b"".join(entries + tensors))
        file.truncate(file.tell() // 32 * 32 + 32 + TENSORS * TENSOR_BYTES)


def measure(directory: Path, count: int = 20) -> list[float]:
    """Seconds of each of `count` readings, the file being in the system's cache."""
    path, found_s = directory / "large.gguf", []
    write(path)
    for _ in range(count):
        start = time.perf_counter()
        found = headers.read_file(path)
        found_s.append(time.perf_counter() - start)
        assert found.header is not None and found.header.tokens == TOKENS, found.problem
    path.unlink()
    return found_s


def main() -> int:
    """Prints the median and the worst."""
    with tempfile.TemporaryDirectory() as directory:
        figures = measure(Path(directory))
    print(f"median {1000 * statistics.median(figures):.1f} ms, worst {1000 * max(figures):.1f} ms, n {len(figures)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
