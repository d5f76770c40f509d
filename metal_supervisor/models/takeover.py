"""Model files that are in the store already, put there by LLMKube's own agent or by an earlier release of ours.

Neither left a note of what is whole, so a file counts only if its size is the one that its server tells, if it begins
like a model, and if its digest is right; only what an earlier release had for this very source needs none. It is
linked, not moved: whoever has it keeps it.
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
    """The piece as `target`, if it is here already; None if it has to be fetched. Raises what `hashed` does.

    `unnoted`: the slot has no note, so an earlier release filled it.
    """
    own = [target] if unnoted or piece.digest else []  # else it is of another edition, for the note says no more of it
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
            continue  # it cannot be read, or linked, or is a link: then it is fetched
    return None


def _is_it(found: Path, piece: Piece, store: Path, hashed: Callable[[int], None]) -> bool:
    """Whether a file in the store is the one that is wanted. Raises Unusable for a link, OSError."""
    status_below(store, str(found.relative_to(store)))
    if not model_files.is_whole(found, piece.size_bytes):
        return False
    with found.open("rb") as file:
        if piece.is_gguf and file.read(len(fetch.MAGIC)) != fetch.MAGIC:
            return False
    return not piece.digest or fetch.digest(found, hashed) == piece.digest


def _elsewhere(piece: Piece, store: Path, artifact: Artifact) -> Sequence[Path]:
    """Where else in the store a file may be."""
    found: list[Path] = []
    if artifact.directory:
        return found  # a config.json is in many of them, and of one size in some
    name = Path(piece.name).name
    if parts := hub_parts(artifact.source):
        repository, revision, path = parts
        found.append(store / Artifact(f"{HUB}/{repository}/resolve/{revision}/{path}").slot / name)
    if piece.digest:  # of these, names and sizes prove nothing: whoever writes a Model chooses both
        if artifact.secret:
            found.append(store / replace(artifact, secret=None).slot / name)
        if artifact.model:
            found.append(store / artifact.model / name)
    return found
