"""What an engine will take of the memory, as far as its model's files tell.

A file may be on this Mac, still on a server, or unreadable; what is known of it is one `Reading`, whoever read it.
What the engine makes of all its files is one `Demand`, which is what admission is about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from metal_supervisor.spec.gguf import Header


@dataclass(frozen=True)
class Reading:
    """What is known of a model before it is loaded: a GGUF file, or a directory of an MLX model."""

    size_bytes: int | None
    """Of all its shards together, in a directory of all weights; None: nobody can tell."""
    header: Header | None = None
    """Of all its shards, merged; None if there is none that can be read."""
    problem: str = ""
    """Why there is neither header nor config, fit for a status message; "" if there is one."""
    config: Mapping[str, Any] | None = None
    """Of a directory: what its config.json says; None if that cannot be read, and of a file."""


@dataclass(frozen=True)
class Demand:
    """What one engine will take."""

    bytes: int | None
    """None: nobody can tell."""
    mapped_bytes: int = 0
    """Of these, mapped from files: to be added to what a Mac counts as the process's own."""
    text: str = ""
    """The arithmetic in one line, or why it is not known."""
    guessed: str = ""
    """Why it is only a guess by the size of the file, "" if the header told."""
