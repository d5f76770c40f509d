"""Reuse of model files that LLMKube's own agent, or an earlier release of this program, left in the store.

Neither left a note of complete files, so a file is used only if it has the size that its server reports, begins like a
model, and has the right digest; without a digest, only a file that an earlier release fetched for this very source. It
is hard-linked, not moved, so the old one stays.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from metal_supervisor.models import fetch, model_files
from metal_supervisor.models.listing import Piece, Unusable
from metal_supervisor.models.model_directory import PinnedFiles, kept, status_below, sync_directory
from metal_supervisor.settings.loader import HUB
from metal_supervisor.spec.sources import Artifact, hub_parts


def taken_over(
    piece: Piece, target: Path, store: Path, artifact: Artifact, unnoted: bool, hashed: Callable[[int], None]
) -> PinnedFiles | None:
    """Link a piece to `target` if the store has it already; None if it has to be fetched. Raises what `hashed` does.

    `unnoted`: True if the slot has no note, so that an earlier release filled it.
    """
    own = [target] if unnoted or piece.digest else []  # else another version: the note does not list it
    for found in [*own, *_elsewhere(piece, store, artifact)] if piece.size_bytes else ():
        try:
            if not _is_it(found, piece, store, hashed):
                continue
            if found != target:
                target.unlink(missing_ok=True)
                os.link(found, target)
                sync_directory(target.parent)
            return kept(target, piece.digest, piece.validator)
        except (OSError, Unusable):
            continue  # it cannot be read or linked, is no model, or a symbolic link: fetch it
    return None


def _is_it(found: Path, piece: Piece, store: Path, hashed: Callable[[int], None]) -> bool:
    """True if a file in the store is the wanted piece. Raises Unusable, OSError, and what `hashed` does."""
    status_below(store, str(found.relative_to(store)))
    if not model_files.is_whole(found, piece.size_bytes):
        return False
    with found.open("rb") as file:
        fetch.check_head(file.read(512), piece)
    return not piece.digest or fetch.digest(found, hashed) == piece.digest


def _elsewhere(piece: Piece, store: Path, artifact: Artifact) -> Sequence[Path]:
    """Other paths in the store where a file may be."""
    found: list[Path] = []
    if artifact.directory:
        return found  # many have a config.json, and some of one size
    name = Path(piece.name).name
    if parts := hub_parts(artifact.source):
        repository, revision, path = parts
        found.append(store / Artifact(f"{HUB}/{repository}/resolve/{revision}/{path}").slot / name)
    if piece.digest:  # name and size alone prove nothing: a Model's author chooses both
        if artifact.secret:
            found.append(store / replace(artifact, secret=None).slot / name)
        if artifact.model:
            found.append(store / artifact.model / name)
    return found
