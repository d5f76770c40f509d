"""Types for the result of resolving a source: the files to fetch, each with its size and digest, or an error.

Hugging Face, S3 and plain web servers describe their files in different ways. The client of each returns a `Listing`,
and the code that fetches bytes needs to know no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from metal_supervisor.spec.terminal_text import printable


class Retry(Enum):
    """When to try again."""

    SOON = "soon"
    """After a cut connection or a server error: within seconds, with a growing delay."""
    LATER = "later"
    """After an error that needs an action elsewhere: every few minutes, and when the resource or its Secret changes."""
    RUNG = "rung"
    """When what it waits for arrives, which wakes the controller."""
    NEVER = "never"
    """Not before the resource changes."""


class Unusable(Exception):
    """A source that cannot be used. `reason` is CamelCase; the message says what to do, and holds no secret.

    The message is made one printable line, without control characters, whatever text it is given.
    """

    def __init__(self, reason: str, message: str, retry: Retry = Retry.LATER, after_s: float = 0.0) -> None:
        super().__init__(printable(message))
        self.reason, self.retry = reason, retry
        self.after_s = after_s
        """Seconds that the server asks to wait, 0 if it did not say."""


@dataclass(frozen=True)
class Piece:
    """One file to be fetched."""

    name: str
    """Path below the model's directory, `/` between the parts; never leads out of it."""
    url: str = field(repr=False)
    """URL for a GET; may be signed, so it must not be logged."""
    size_bytes: int | None = None
    """None if the server did not say."""
    sha256: str = ""
    """Lower-case hex, "" if the server does not tell it."""
    validator: str = ""
    """Value that changes with the file: an ETag, else a date; "" if there is none."""
    wanted_sha256: str = ""
    """Digest that its Model names, "" if that has none; `sha256` is the server's word."""
    gguf: bool = False
    """True if it must begin like a GGUF file whatever its name is."""

    @property
    def digest(self) -> str:
        """SHA-256 that the file must have, "" if neither the server nor the Model says."""
        return self.sha256 or self.wanted_sha256

    @property
    def is_gguf(self) -> bool:
        return self.gguf or self.name.endswith(".gguf")


@dataclass(frozen=True)
class Listing:
    """The files of a model; the model file (or its first shard) is first."""

    pieces: tuple[Piece, ...]
    commit: str = ""
    """Commit of all the files, "" where there are none."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers for each request to the host of `Piece.url`, and to no other."""
    path: str = ""
    """Absolute path of files that are here already, to be used in place; then there are no pieces."""
    chosen: str = ""
    """Path in the Hub's repository of the file (its first shard) that was chosen; "" for all else."""
