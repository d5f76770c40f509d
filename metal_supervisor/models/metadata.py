"""Types for an engine's memory as its model's files determine it.

A file may be on this Mac, still on a server, or unreadable; its metadata is one `Reading` in all cases. The memory
that the engine needs for all its files is one `Demand`, which admission decides on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from metal_supervisor.spec.gguf import BadGguf, CutShort, Header, NotGguf
from metal_supervisor.spec.shards import misnamed


@dataclass(frozen=True)
class Reading:
    """Metadata of a model before it is loaded: of a GGUF file, or of the directory of an MLX model."""

    size_bytes: int | None
    """Size of all its shards, of a directory that of all weights; None if unknown, and for a file that an engine may
    load although its header is not understood."""
    header: Header | None = None
    """Header of all its shards, merged; None if it cannot be read, and for a directory."""
    problem: str = ""
    """Reason why there is neither header nor config, for a status message; "" if there is one."""
    config: Mapping[str, Any] | None = None
    """What `read_config` keeps of a directory's config.json; None if it cannot be read, and for a file."""


def read_config(content: bytes) -> dict[str, Any] | None:
    """The parts of a config.json that estimates read, None if it is no JSON object.

    An object or list in a value's place is kept empty. One that is nested as deep as this thread can parse could not be
    compared or quoted by another, whose stack has less room.
    """
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    inner = found.get("text_config")
    return _flat(found) | ({"text_config": _flat(inner)} if isinstance(inner, dict) else {})


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: type(value)() if isinstance(value, (dict, list)) else value for name, value in values.items()}
    kinds = values.get("layer_types")
    if isinstance(kinds, list):
        found["layer_types"] = [each if isinstance(each, str) else "" for each in kinds]
    return found


def unreadable(error: BadGguf, size: int | None) -> Reading:
    """Reading of a file that is not understood. Its size is kept only if no engine loads it either.

    An engine has other limits than this reader, and the size of a file says nothing of its cache.
    """
    return Reading(size if isinstance(error, (NotGguf, CutShort)) else None, problem=str(error))


def merged(names: Sequence[str], readings: Sequence[Reading]) -> Reading:
    """Merge the readings of all shards, given in their order; the first says how many there are."""
    sizes = [reading.size_bytes for reading in readings if reading.size_bytes is not None]
    size = sum(sizes) if len(sizes) == len(readings) else None
    shards: list[Header] = []
    for name, reading in zip(names, readings, strict=True):
        where = f"{name}: " if len(names) > 1 else ""
        if reading.header is None:  # an engine may take a first one that can be read for the whole model
            return Reading(size if readings[0].header is None else None, problem=where + reading.problem)
        if why := misnamed(name, reading.header.metadata, reading.header.tensors):
            return Reading(None, problem=where + why)
        shards.append(reading.header)
    first = shards[0]
    header = replace(
        first,
        weights_bytes=sum(each.weights_bytes for each in shards),
        attention_layers=frozenset().union(*(each.attention_layers for each in shards)),
        recurrent_layers=frozenset().union(*(each.recurrent_layers for each in shards)),
        assumptions=tuple(dict.fromkeys(text for each in shards for text in each.assumptions)),
    )
    return Reading(size, header)


@dataclass(frozen=True)
class Demand:
    """Estimated memory of one engine."""

    bytes: int | None
    """None if unknown."""
    mapped_bytes: int = 0
    """Part of `bytes` that is mapped from files, which macOS does not count in the process's footprint."""
    text: str = ""
    """The arithmetic in one line, or the reason why it is not known."""
    guessed: str = ""
    """Reason why it is only a guess by the file's size, "" if it is from the header."""
    advice: str = ""
    """Parts of an estimate that can never fit, and the context that would; "" if it fits."""
