"""Files and directories that are on this Mac: whether they are models, and whether a Model may name them at all.

A file counts as a model only if it begins like one: a login page saved under a model's name must never reach an engine.
Whoever may write a Model must not learn through it what other files this Mac has, so a place is checked before it is
looked at.
"""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Sequence
from pathlib import Path

from metal_supervisor.boundary.fetch import MAGIC, kind
from metal_supervisor.boundary.listing import Unusable
from metal_supervisor.core.bar import printable
from metal_supervisor.core.shards import shard_names
from metal_supervisor.core.types import ModelFile

CONFIG, WEIGHTS = "config.json", (".safetensors", ".npz")
LONGEST_NAME = 300


def _named(path: Path) -> str:
    """A path for a message: a user wrote it, so it may hold anything, and be as long as he likes."""
    text = printable(str(path))
    return text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 1]}…"


def check_place(path: Path, roots: Sequence[Path]) -> None:
    """Raises Unusable for a path that is, or leads, outside all roots."""
    plain = Path(path)
    try:
        real = plain.resolve()
    except (OSError, RuntimeError, ValueError):
        raise Unusable("ModelFileUnreadable", f"{str(path)!r:.300} cannot be looked up") from None
    if not any(real.is_relative_to(root) for root in roots):
        where = ", ".join(map(str, roots))
        raise Unusable("SourceNotAllowed", f"{_named(path)} is not below --allowed-roots of this Mac ({where})")


def check_places(path: Path, roots: Sequence[Path]) -> None:
    """The same for a model with all that belongs to it, its shards or the files of its directory. Raises Unusable."""
    check_place(path, roots)
    for name in shard_names(path.name):
        check_place(path.with_name(name), roots)
    with contextlib.suppress(OSError):  # what cannot be listed is told by whoever looks at it
        for each in path.iterdir():
            check_place(each, roots)


def check_file(path: Path) -> int:
    """Size in bytes of a usable model file. Raises Unusable."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            what = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise Unusable("InvalidModelFile", f"{_named(path)} is {what}; spec.source must name one .gguf file")
        with path.open("rb") as file:
            head = file.read(512)
    except FileNotFoundError:
        raise Unusable("ModelFileMissing", f"{_named(path)} does not exist on this Mac; put the file there") from None
    except OSError as error:
        raise Unusable("ModelFileUnreadable", f"{_named(path)}: {error.strerror}") from None
    if not status.st_size:
        raise Unusable("InvalidModelFile", f"{_named(path)} is empty; fetch it again")
    if not head.startswith(MAGIC):
        raise Unusable("InvalidModelFile", f"{_named(path)} is {kind(head)}, not a GGUF file; check spec.source")
    return status.st_size


def check_directory(path: Path) -> int:
    """Size in bytes of the weights in a directory of an MLX model. Raises Unusable."""
    try:
        sizes = {each.name: each.stat().st_size for each in path.iterdir() if each.is_file()}
    except OSError as error:
        raise Unusable("ModelFileUnreadable", f"{_named(path)}: {error.strerror}") from None
    weights = sum(size for name, size in sizes.items() if name.endswith(WEIGHTS))
    lacks = "config.json" if CONFIG not in sizes else "" if weights else "*.safetensors"
    if lacks:
        text = f"{_named(path)} is a directory without {lacks}"
        raise Unusable("InvalidModelFile", f"{text}; spec.source must name one .gguf file, or an MLX model's directory")
    return weights


def looked_at(path: Path) -> ModelFile:
    """What a path on this Mac comes to. Raises Unusable."""
    try:
        directory = path.is_dir()
        real = path.resolve() if directory else path
    except (OSError, ValueError) as error:
        raise Unusable("ModelFileUnreadable", f"{_named(path)}: {getattr(error, 'strerror', None) or error}") from None
    if directory:
        return ModelFile("Ready", str(real), check_directory(real), directory=True)
    size = check_file(path)
    for name in shard_names(path.name):
        if name != path.name:
            size += check_file(path.with_name(name))
    return ModelFile("Ready", str(path), size)


def is_whole(path: Path, size_bytes: int | None) -> bool:
    """Whether a file that is no link has this size, or any if that is None."""
    with contextlib.suppress(OSError, ValueError):
        found = path.lstat()
        return stat.S_ISREG(found.st_mode) and found.st_size > 0 and size_bytes in (None, found.st_size)
    return False
