"""Names of the shards of a large model.

llama.cpp names them `…-00001-of-00003.gguf` and writes hyperparameters into the first, which may hold no tensor.
"""

from __future__ import annotations

import re

SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
MAX_SHARDS = 1024


def shard_names(name: str) -> tuple[str, ...]:
    """The names of all files that belong to `name`, itself among them: llama.cpp's `…-00001-of-00003.gguf`.

    Of a path the paths, of a URL the URLs.
    """
    found = SHARD.fullmatch(name)
    if found is None or not 1 <= int(found[2]) <= int(found[3]) <= MAX_SHARDS:
        return (name,)
    return tuple(f"{found[1]}-{number:05d}-of-{found[3]}.gguf" for number in range(1, int(found[3]) + 1))
