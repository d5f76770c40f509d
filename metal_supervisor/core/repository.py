"""Which files of a repository, or of a directory on a server, a model needs, and which names may become files here.

A repository holds more than an engine reads: code, pictures, the same weights for other frameworks. And its names are
somebody else's: what is fetched under them must stay in the model's directory, on any file system.
"""

from __future__ import annotations

import fnmatch
import posixpath
import re
import unicodedata
from collections.abc import Iterable

from metal_supervisor.core.fields import Bad
from metal_supervisor.core.shards import shard_names

PATTERNS = ("*.json", "*.safetensors", "*.npz", "*.model", "*.tiktoken", "*.txt", "*.jinja", "*.jsonl")
WEIGHTS = (".safetensors", ".npz")
CONFIG = "config.json"
MOST_NAME_BYTES = 200
"""Of one part of a path. File systems take 255; the name of a file on its way is a longer one."""
MOST_SHOWN = 8


def chosen(names: Iterable[str], wanted: tuple[str, ...] = ()) -> tuple[str, ...]:
    """What is fetched of a directory of these names, sorted; or exactly `wanted` if that says something, in its order.

    Never a `.py` or a dot-file. Raises Bad: `SourceNotFound` for what is missing, `InvalidModelFile` for a name that
    cannot be a file below a directory.
    """
    there = set(names)
    if wanted:
        if missing := [each for each in dict.fromkeys(wanted) if each not in there]:
            raise Bad("SourceNotFound", f"there is no {shown(missing)}; correct spec.files")
        taken = tuple(dict.fromkeys(wanted))
        for each in taken:
            if each.endswith(".py") or _hidden(each):
                raise Bad("InvalidModelFile", f"{each!r:.80} is code or a dot-file; leave it out of spec.files")
    else:
        taken = tuple(sorted(each for each in there if _read_by_engines(each)))
    check(taken)
    hint = "add it to spec.files" if wanted else "name a directory of a model in MLX's or safetensors' form"
    if CONFIG not in taken:
        raise Bad("SourceNotFound", f"there is no {CONFIG}; {hint}")
    if not any(each.endswith(WEIGHTS) and "/" not in each for each in taken):
        raise Bad("SourceNotFound", f"there are no weights (*.safetensors, *.npz) beside {CONFIG}; {hint}")
    return taken


def only_gguf(names: Iterable[str], quantization: str = "") -> tuple[str, ...]:
    """The one GGUF file of a directory of these names, or all its shards; projectors (`mmproj…`) do not count.

    `quantization`: a part of its name, in any case of letters. Raises Bad: `SourceNotFound`, `AmbiguousSource`,
    `InvalidModelFile`.
    """
    there = {each for each in names if each.endswith(".gguf") and not _hidden(each)}
    models = {each for each in there if not posixpath.basename(each).lower().startswith("mmproj")}
    fitting = sorted(each for each in models if quantization.lower() in posixpath.basename(each).lower())
    if not fitting:
        wish = f"with {quantization!r:.40} in its name" if quantization and models else "there"
        raise Bad("SourceNotFound", f"there is no GGUF file {wish}; set spec.files" + _among(models))
    shards = shard_names(fitting[0])
    if others := [each for each in fitting if each not in shards]:
        raise Bad("AmbiguousSource", f"there are several GGUF files ({shown([fitting[0], *others])}); set spec.files")
    if missing := [each for each in shards if each not in there]:
        raise Bad("SourceNotFound", f"there is no {shown(missing)}, but other shards of it")
    check(shards)
    return shards


def check(names: Iterable[str]) -> None:
    """Raises Bad (`InvalidModelFile`) for a name that leads out of a directory, and for two that are one file there."""
    seen: dict[str, str] = {}
    for name in names:
        parts = name.split("/")
        if "\\" in name or not name.isprintable() or not all(map(_plain, parts)):
            raise Bad("InvalidModelFile", f"{name!r:.80} cannot be the name of a file below the model's directory")
        other = seen.setdefault(_folded(name), name)
        if other != name:
            raise Bad("InvalidModelFile", f"{other!r:.80} and {name!r:.80} are one file on this Mac; set spec.files")
    for folded, name in seen.items():
        parts = folded.split("/")
        if any("/".join(parts[:count]) in seen for count in range(1, len(parts))):
            raise Bad("InvalidModelFile", f"{name!r:.80} is below what is a file itself; set spec.files")


def shown(names: Iterable[str]) -> str:
    """Some of the names, for a message."""
    every = [f"{each!r:.80}" for each in names]
    more = f" and {len(every) - MOST_SHOWN} more" if len(every) > MOST_SHOWN else ""
    return ", ".join(every[:MOST_SHOWN]) + more


def _among(names: Iterable[str]) -> str:
    listed = shown(sorted(names))
    return f" to one of {listed}" if listed else ", or name a model in GGUF form"


def _read_by_engines(name: str) -> bool:
    return not _hidden(name) and any(fnmatch.fnmatchcase(name, pattern) for pattern in PATTERNS)


def _hidden(name: str) -> bool:
    """Whether a part of it begins with a dot; `..` is not hidden but refused."""
    return any(re.match(r"\.[^.]|\.\.[^/]", part) is not None for part in name.split("/"))


def _plain(part: str) -> bool:
    try:
        return part not in ("", ".", "..") and len(part.encode()) <= MOST_NAME_BYTES
    except UnicodeEncodeError:
        return False


def _folded(name: str) -> str:
    """A Mac's file system knows neither case nor the ways to write an accent."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
