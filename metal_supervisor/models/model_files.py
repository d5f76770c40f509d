"""Checks of files and directories on this Mac: that they are models, and that a Model may name them at all.

A file counts as a model only if it begins like one: a login page saved under a model's name must never reach an engine.
A user who may write a Model must not learn through it which other files this Mac has, so a path is checked against the
allowed places before it is opened.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from pathlib import Path

from metal_supervisor.models import repository
from metal_supervisor.models.listing import Unusable
from metal_supervisor.models.places import Places, named
from metal_supervisor.models.remote.fetch import MAGIC, Opened, no_gguf
from metal_supervisor.spec.gguf import BadGguf, CutShort, read_header
from metal_supervisor.spec.shards import join, misnamed, shard_names
from metal_supervisor.spec.types import ModelFile
from metal_supervisor.state import trees

MOST_FOLDERS = 256
MAGIC_BYTES = 64
OFFSETS = re.compile(rb'"data_offsets"\s*:\s*\[\s*\d+\s*,\s*(\d{1,18})\s*\]')
"""In the header of a file of safetensors: where a tensor ends, counted from the header's end."""
MOST_HEADER_BYTES = 16 << 20
KEPT_BY_MACOS = (
    "macOS keeps it from what launchd starts; keep models outside Desktop, Documents, Downloads and external disks, or "
    "give this Mac's python Full Disk Access"
)
ESCAPED = "remove its backslashes, which a path needs only in a shell"
ANYWHERE = Places()
"""Places for files that this program put there itself: everything is allowed."""


def check_places(path: Path, places: Places) -> None:
    """Raise Unusable if a manifest may not name a model, one of its shards, or the target of a link in it."""
    places.check(path)
    for name in shard_names(path.name):
        places.check(path.with_name(name))
    with contextlib.suppress(OSError):  # the check of the directory that follows reports it
        for count, (directory, folders, names) in enumerate(trees.walk(path)):
            folders[:] = [each for each in folders if not each.startswith(".")]  # no engine reads those
            for each in (*folders, *names):
                if (inside := Path(directory, each)).is_symlink():
                    places.check(inside)
            if count >= MOST_FOLDERS:
                raise Unusable("InvalidModelFile", f"{named(path)} has more than {MOST_FOLDERS} directories in it")


def check_file(path: Path, places: Places = ANYWHERE) -> int:
    """Check a GGUF file, and return its size in bytes. Raises Unusable."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            what = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise Unusable("InvalidModelFile", f"{named(path)} is {what}; spec.source must name one .gguf file")
        with path.open("rb") as file:
            places.check_opened(file.fileno(), path)
            head = file.read(512)
            defect = _defect(file.fileno(), status.st_size, path.name) if head.startswith(MAGIC) else ""
    except FileNotFoundError:
        advice = ESCAPED if "\\" in str(path) else "put the file there"
        raise Unusable("ModelFileMissing", f"{named(path)} does not exist on this Mac; {advice}") from None
    except OSError as error:
        raise _unreadable(path, error) from None
    if why := no_gguf(head):
        raise Unusable("InvalidModelFile", f"{named(path)} {why}")
    if defect:
        raise Unusable("InvalidModelFile", f"{named(path)}: {defect}")
    return status.st_size


def _unreadable(path: Path, error: Exception) -> Unusable:
    """What is told of a file or directory that cannot be read."""
    why = getattr(error, "strerror", None) or str(error)
    if isinstance(error, OSError) and error.errno == errno.EPERM:  # doctor, run in a terminal, may well read it
        why += f": {KEPT_BY_MACOS}"
    return Unusable("ModelFileUnreadable", f"{named(path)}: {why}")


def _defect(descriptor: int, size_bytes: int, name: str) -> str:
    """What keeps an engine from loading a GGUF file, with what to do; "" if nothing. Raises OSError.

    A header that is wrong in another way is the engine's to judge: it may be newer than this reader.
    """
    try:
        header = read_header(Opened(descriptor), size_bytes)
    except CutShort as error:
        advice = "fetch it again"
        with contextlib.suppress(BadGguf):
            if len(shard_names(name)) > 1 and "split.count" not in read_header(Opened(descriptor)).metadata:
                advice = join(name)
        return f"{error}; {advice}"
    except BadGguf:
        return ""
    return misnamed(name, header.metadata, header.tensors)


def check_directory(path: Path) -> int:
    """Check the directory of an MLX model, and return the size of its weights in bytes. Raises Unusable."""
    try:
        sizes = {each.name: each.stat().st_size for each in path.iterdir() if each.is_file()}
    except OSError as error:
        raise _unreadable(path, error) from None
    weights = sum(size for name, size in sizes.items() if name.endswith(repository.WEIGHTS))
    lacks = repository.lacking(sizes) or ("" if weights else "*.safetensors")  # empty files are no weights
    if lacks:
        text = f"{named(path)} is a directory without {lacks}: {repository.contents(sizes)}"
        raise Unusable("InvalidModelFile", f"{text}; spec.source must name one .gguf file, or an MLX model's directory")
    if lacks := repository.missing_shards(sizes):  # as while it is fetched, or copied, to where it is
        raise Unusable("InvalidModelFile", f"{named(path)} lacks {lacks}; put them there")
    for name in sizes:
        check_content(path / name)
        if name.endswith(".safetensors"):
            _check_length(path / name)
    return weights


def _check_length(path: Path) -> None:
    """Raise Unusable for a file of safetensors that ends before its tensors do.

    What is wrong in another way is the engine's to judge.
    """
    try:
        with path.open("rb") as file:
            head, size = file.read(9), os.fstat(file.fileno()).st_size
            end = 8 + int.from_bytes(head[:8], "little")
            if head[8:] != b"{" or not 9 <= end <= MOST_HEADER_BYTES:
                return
            whole = end + max(map(int, OFFSETS.findall(file.read(end - 9))), default=0)
    except OSError as error:
        raise _unreadable(path, error) from None
    if size < whole:
        text = f"{named(path)} is cut short: it has {size} bytes, and at least {whole} belong to it"
        raise Unusable("InvalidModelFile", f"{text}; fetch it again")


def check_content(path: Path) -> None:
    """Raise Unusable for a file of an MLX model that is a program, or a configuration that names code."""
    if not path.name.endswith(repository.READ_BY_ENGINES):
        return  # no engine opens it
    try:
        with path.open("rb") as file:
            text = file.read(MAGIC_BYTES if path.name not in repository.CONFIGS else repository.MOST_CONFIG_BYTES)
        repository.refuse_program(text, named(path))
        if path.name in repository.CONFIGS:
            repository.check_config(text, named(path))
    except OSError as error:
        raise _unreadable(path, error) from None


def looked_at(path: Path, places: Places = ANYWHERE) -> ModelFile:
    """Check a path on this Mac, and return the model there, in phase Ready. Raises Unusable."""
    try:
        directory = path.is_dir()
        real = places.resolved(path)
        if directory:  # the Hub's cache has links to files elsewhere in it
            parts = [each for each in sorted(real.iterdir()) if each.is_symlink() and each.exists()]
        else:
            parts = [path.with_name(name) for name in shard_names(path.name)]
        # A confined engine is given these alone: by the time it starts, a link may lead elsewhere.
        judged = tuple(dict.fromkeys(map(str, (real, *map(places.resolved, parts)))))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    if directory:
        return ModelFile("Ready", str(real), check_directory(real), directory=True, real=judged)
    size = sum(check_file(each, places) for each in parts)
    return ModelFile("Ready", str(path), size, real=judged)
