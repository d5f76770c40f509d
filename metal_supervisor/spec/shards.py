"""Names of the shards of a large model.

llama.cpp names them `…-00001-of-00003.gguf` and writes hyperparameters into the first, which may hold no tensor. It
loads them only if names and headers agree, so both are compared before an engine starts.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping

SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
MAX_SHARDS = 1024
PIECE = re.compile(
    r"(.*\.gguf)(?:[._-](?:part|split)[._-]?(?:[a-z]{1,2}|\d{1,3})|[._-]\d{1,3})(?:-?of-?\d+)?",
    re.ASCII | re.IGNORECASE,
)
"""Names that people give to the pieces of a file: X.gguf.part1of2, X.gguf-split-a, X.gguf.001."""
LIKE_A_SHARD = re.compile(r"(?:-\d{1,5}-of-\d{1,5})?(?:\.gguf)?$", re.ASCII | re.IGNORECASE)


def shard_names(name: str) -> tuple[str, ...]:
    """The names of all files that belong to `name`, itself among them: llama.cpp's `…-00001-of-00003.gguf`.

    Of a path the paths, of a URL the URLs.
    """
    found = SHARD.fullmatch(name)
    if found is None or not 1 <= int(found[2]) <= int(found[3]) <= MAX_SHARDS:
        return (name,)
    return tuple(f"{found[1]}-{number:05d}-of-{found[3]}.gguf" for number in range(1, int(found[3]) + 1))


def misnamed(name: str, metadata: Mapping[str, object], tensors: int) -> str:
    """How a file's name and its header disagree about shards, and what to rename; "" if they agree.

    `tensors`: how many the file has.
    """
    base = posixpath.basename(name)
    split, files = SHARD.fullmatch(base), len(shard_names(base))
    position = int(split[2]) if split and files > 1 else 1
    index, count, all_tensors = (
        value if type(value) is int else 0
        for value in map(metadata.get, ("split.no", "split.count", "split.tensors.count"))
    )
    number, count = max(index, 0) + 1, max(count, 1)
    if position == number and (files == count or position > 1):
        return ""
    stem = LIKE_A_SHARD.sub("", base)
    if count == 1:
        return f"it is whole by its header; rename it to {stem}.gguf"
    if tensors == all_tensors:
        text = f"it is whole, but its header says {number} of {count}"
        return f"{text}; correct it: gguf-set-metadata {base} split.count 1"
    first = f"{stem}-00001-of-{count:05d}.gguf"
    text = f"it is file {number} of {count} by its header"
    text += f"; rename it to {stem}-{number:05d}-of-{count:05d}.gguf"
    return f"{text}, beside the others; to merge them: llama-gguf-split --merge {first} {stem}.gguf"


def join(piece: str) -> str:
    """Advice for a file that `split` cut into pieces. `piece`: name of one of them."""
    found = PIECE.fullmatch(piece)
    whole = found[1] if found else f"{LIKE_A_SHARD.sub('', piece)}.gguf"
    return f"join the pieces in their order: cat {piece} … > {whole}"
