"""What a source comes to on its server: the files to fetch, each with all that proves it whole; and what may go wrong.

Hugging Face, S3 and plain web servers tell of their files in different ways. Whoever asks one of them returns a
`Listing`, and the loop that fetches bytes needs to know no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from metal_supervisor.spec.progress_bar import printable


class Retry(Enum):
    """When it is worth trying again."""

    SOON = "soon"
    """The line was cut, or the server has trouble: within seconds, longer each time."""
    LATER = "later"
    """Somebody has to do something elsewhere: every few minutes, and as soon as a resource or a Secret changes."""
    RUNG = "rung"
    """What it waits for is on its way, and rings."""
    NEVER = "never"
    """Not before the resource says something else."""


class Unusable(Exception):
    """A source cannot become a model; `reason` is CamelCase, the message says what to do and holds no secret.

    Whatever is put into the message, it is one line that a terminal only shows.
    """

    def __init__(self, reason: str, message: str, retry: Retry = Retry.LATER, after_s: float = 0.0) -> None:
        super().__init__(printable(message))
        self.reason, self.retry = reason, retry
        self.after_s = after_s
        """How long the server wants to be left alone, 0 if it did not say."""


@dataclass(frozen=True)
class Piece:
    """One file to be fetched."""

    name: str
    """Its path below the model's directory, `/` between the parts; never leads out of it."""
    url: str = field(repr=False)
    """Where a GET of it begins; may be signed, so it is not for logs."""
    size_bytes: int | None = None
    """None if the server did not say."""
    sha256: str = ""
    """Lower-case hex, "" if the server does not tell it."""
    validator: str = ""
    """What changes when the file does: an ETag, else a date; "" if there is none."""
    wanted_sha256: str = ""
    """What its Model says that it is, "" if it says nothing: a wish, while `sha256` is known before a byte came."""
    gguf: bool = False
    """Whether it must begin like a GGUF file whatever its name is."""

    @property
    def digest(self) -> str:
        """What it must be, "" if nobody said."""
        return self.sha256 or self.wanted_sha256

    @property
    def is_gguf(self) -> bool:
        return self.gguf or self.name.endswith(".gguf")


@dataclass(frozen=True)
class Listing:
    """The files of a model, its own (or its first shard) first."""

    pieces: tuple[Piece, ...]
    commit: str = ""
    """The revision that all of them are of, where there are revisions."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What goes with each request to the host of `Piece.url`, and to no other."""
    path: str = ""
    """Absolute path where the files are already, to be used in place; then there are no pieces."""
