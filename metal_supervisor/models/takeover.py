"""Reuse of model files that the store has already: of LLMKube's own agent, or fetched without the Secret of today.

A file is used only if it has the size that its server reports, begins like a model, and has the right digest: name and
size alone prove nothing, as a Model's author chooses both. It is hard-linked, not moved, so the old one stays.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from metal_supervisor.models.listing import Piece, Unusable
from metal_supervisor.models.model_directory import PinnedFiles, kept, status_below, sync_path
from metal_supervisor.models.places import SLOT
from metal_supervisor.models.remote import fetch
from metal_supervisor.spec.sources import Artifact


def taken_over(
    piece: Piece, target: Path, store: Path, artifact: Artifact, hashed: Callable[[int], None]
) -> PinnedFiles | None:
    """Link a piece to `target` if the store has it already; None if it has to be fetched. Raises what `hashed` does."""
    for found in _places(piece, target, store, artifact) if piece.digest and piece.size_bytes else ():
        try:
            if not _is_it(found, piece, store, hashed):
                continue
            if found != target:
                target.unlink(missing_ok=True)
                os.link(found, target)
                sync_path(target.parent)
            return kept(target, piece.digest, piece.validator)
        except (OSError, Unusable):
            continue  # it cannot be read or linked, is no model, or a symbolic link: fetch it
    return None


def _is_it(found: Path, piece: Piece, store: Path, hashed: Callable[[int], None]) -> bool:
    """True if a file in the store is the wanted piece. Raises Unusable, OSError, and what `hashed` does."""
    status = status_below(store, str(found.relative_to(store)))
    if status is None or not stat.S_ISREG(status.st_mode) or status.st_size != piece.size_bytes:
        return False
    with found.open("rb") as file:
        fetch.check_head(file.read(512), piece)
    return fetch.digest(found, hashed) == piece.digest


def _places(piece: Piece, target: Path, store: Path, artifact: Artifact) -> Iterator[Path]:
    """Paths in the store where a file may be."""
    yield target  # if its note was lost
    if artifact.directory:
        return  # many have a config.json, and some of one size
    name = Path(piece.name).name
    if artifact.secret:
        yield store / replace(artifact, secret=None).slot / name
    if artifact.model and not SLOT.fullmatch(artifact.model):  # a slot may be of a Secret of another namespace
        yield store / artifact.model / name
