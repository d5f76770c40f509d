"""Shards of a large model: their names, and one header for all.

llama.cpp names them `…-00001-of-00003.gguf` and writes hyperparameters into the first, which may hold no tensor.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from metal_supervisor.spec.gguf import BadGguf, Header

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


def merge(first: Header, rest: Sequence[Header]) -> Header:
    """The header of a model in shards. Raises BadGguf if their number differs from the one in the first shard."""
    count, number = first.metadata.get("split.count", 1), first.metadata.get("split.no", 0)
    if number != 0:
        raise BadGguf(f"it is shard {number!r:.20}, counted from 0; the model begins with the first one")
    if max(1, count if isinstance(count, int) else 1) != 1 + len(rest):
        raise BadGguf(f"the first shard says that there are {count!r:.20}; {1 + len(rest)} were given")
    shards = [first, *rest]
    return replace(
        first,
        weights_bytes=sum(each.weights_bytes for each in shards),
        attention_layers=frozenset().union(*(each.attention_layers for each in shards)),
        recurrent_layers=frozenset().union(*(each.recurrent_layers for each in shards)),
        assumptions=tuple(dict.fromkeys(text for each in shards for text in each.assumptions)),
    )
