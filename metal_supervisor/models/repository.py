"""Choice of the files in a repository that make up a model: one GGUF file, or all that an MLX engine reads.

A repository holds files for many programs, and its names come from a server that may be hostile. So files are chosen by
name before a byte is fetched, and a name that a Mac cannot store safely is never chosen.
"""

from __future__ import annotations

import itertools
import json
import posixpath
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from metal_supervisor.models.listing import Unusable
from metal_supervisor.spec.shards import PIECE, join, shard_names
from metal_supervisor.spec.sources import Artifact, hub_parts

COMMIT = re.compile(r"[0-9a-f]{40}")
CONFIG = "config.json"
WEIGHTS = (".safetensors", ".npz")
SHARD = re.compile(r"(model.*)-\d+-of-(\d{1,9})\.safetensors", re.ASCII)
READ_BY_ENGINES = (".json", *WEIGHTS, ".model", ".tiktoken", ".txt", ".jinja", ".jsonl")
NAMES_CODE = ("model_type", "chat_template_type", "tool_parser_type")
"""Keys whose value mlx_lm takes for the name of one of its modules."""
MODULE = re.compile(r"\w[\w-]*(\.\w[\w-]*)*", re.ASCII)
CONFIGS = (CONFIG, "tokenizer_config.json")
MOST_CONFIG_BYTES = 4 << 20
"""The longest config.json that is read; real ones have some KiB."""
PROGRAMS = (
    b"\x7fELF",
    b"MZ",
    b"#!",
    b"!<arch>",
    b"\xfe\xed\xfa\xce",
    b"\xfe\xed\xfa\xcf",
    b"\xce\xfa\xed\xfe",
    b"\xcf\xfa\xed\xfe",
    b"\xca\xfe\xba\xbe",
    b"\xca\xfe\xba\xbf",
    b"\xbe\xba\xfe\xca",
    b"\xbf\xba\xfe\xca",
)
"""First bytes of programs and libraries (ELF, PE, scripts, archives, Mach-O): a loader does not look at the name."""
COMPANION = re.compile(
    r"(?<![^\W_])(?:imatrix|eagle\d*|dflash|dspark|draft|assistant|lora|adapter)(?![^\W_])"
    r"|(?:(?<=/)|^|(?<=mtp-))mtp(?=[-_./])",
    re.ASCII | re.IGNORECASE,
)
"""Words in the name of a file that goes with a model: a draft head, an importance matrix, an adapter. MTP is one at
the start of a name; elsewhere it says that a whole model has such a head."""
MOST_READ = 4
"""Headers that are read at most to choose between files: each may be a request to a server."""
WIDTH = re.compile(r"(?<![^\W_])(?:I?Q|TQ|MXFP|NVFP|B?F)(\d+)", re.ASCII | re.IGNORECASE)
"""Bits of a quantization, in a name such as Q4_K_M, IQ3_XXS or MXFP4."""
WIDTHS = ("4", "3", "2", "1", "5", "6", "8")
"""The usual one, then what is smaller, for a Mac that it does not fit; larger ones where a repository has no other."""
LFS_POINTER = b"version https://git-lfs"
"""First bytes of what a clone without Git LFS has in a large file's place."""
FOR_PEOPLE = ("readme", "license", "notice")
MOST_FILES = 4096
MOST_NAMED = 8
LONGEST_PART_BYTES = 238
"""Longest part of a path: macOS's limit, less room for a suffix of the store."""
LONGEST_NAME_BYTES = 900
"""Longest path: macOS's limit, less room for the directory that the file will be in."""


class Ambiguous(Unusable):
    """Several files may be meant; `names` are all of them."""

    def __init__(self, message: str, names: Sequence[str]) -> None:
        super().__init__("AmbiguousSource", message)
        self.names = tuple(names)


def is_safe(name: str) -> bool:
    """True if a name can be a path below a directory: it stays inside, and every part of it is a file name."""
    if "\\" in name or not name.isprintable():  # no control characters or lone surrogates either
        return False
    parts = name.split("/")
    if any(part in ("", ".", "..") or len(part.encode()) > LONGEST_PART_BYTES for part in parts):
        return False
    return len(name.encode()) <= LONGEST_NAME_BYTES


def chosen(
    names: Collection[str], artifact: Artifact, of: str, is_companion: Callable[[str], bool] = lambda _: False
) -> tuple[str, ...]:
    """Choose an artifact's files; of a set of shards all, whether or not they are there. Raises Unusable.

    `is_companion`: as of `gguf`.
    """
    if artifact.directory:
        return directory(names, artifact.files, of)
    wanted = [name for name in names if not artifact.files or name in artifact.files]
    return shard_names(gguf(wanted, artifact.quantization, of, is_companion))


def gguf(
    names: Iterable[str], quantization: str, of: str, is_companion: Callable[[str], bool] = lambda _: False
) -> str:
    """Choose the one GGUF file, of a set of shards the first. Raises Unusable, or Ambiguous for several.

    `of`: the repository, for messages. `is_companion`: reads the header of a file that names do not tell apart.
    """
    words = {name: len(COMPANION.findall(name)) for name in names if _is_model(name)}
    least = min(words.values(), default=0)  # a model may itself be called MTP or Eagle
    held = sorted({shard_names(name)[0] for name, count in words.items() if count == least})
    pieces = [base for base in map(posixpath.basename, names) if PIECE.fullmatch(base)]
    wanted = quantized(held, quantization) if quantization else held
    if not wanted and (found := quantized(pieces, quantization) if quantization else pieces):
        text = f"{of} has the file in pieces ({_some(found)})"
        raise Unusable("InvalidModelFile", f"{text}; fetch them, {join(found[0])}, and name that file")
    if 1 < len(wanted) <= MOST_READ:
        wanted = [name for name in wanted if not is_companion(name)] or wanted
    if len(wanted) == 1:
        return wanted[0]
    if not held:
        raise Unusable("InvalidModel", f"{of} has no GGUF file; set spec.format to mlx if it is an MLX model")
    if not wanted:
        text = f"{of} has no GGUF file of quantization {quantization!r:.40}; it has {_some(held)}"
        advice = "correct spec.quantization (or the end of spec.source), or set spec.files"
        raise Unusable("InvalidModel", f"{text}; {advice}")
    text = f"{of} has {len(wanted)} GGUF files ({_some(wanted)})"
    raise Ambiguous(f"{text}; set spec.files to one of them, or spec.quantization", wanted)


def _is_model(name: str) -> bool:
    base = posixpath.basename(name).lower()
    return base.endswith(".gguf") and "mmproj" not in base and not _hidden(name)


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def quantized(names: Sequence[str], quantization: str) -> list[str]:
    """Names of that quantization, by the files' own names, else by their folders'.

    `Q4_K` matches Q4_K_M and Q4_K_S only if nothing is exactly Q4_K; never IQ4_K. UD-Q4_K only if nothing else is Q4_K.
    """
    for part, start, end in itertools.product(
        (posixpath.basename, posixpath.dirname), (r"(?<!UD-)(?<!i1-)", ""), (r"(?!\w)", r"(?![^\W_])")
    ):
        word = rf"(?<![^\W_]){start}{re.escape(quantization)}{end}"
        if found := [name for name in names if re.search(word, part(name), re.IGNORECASE)]:
            return found
    return []


def usual(names: Iterable[str]) -> list[str]:
    """One name of each width in WIDTHS, in their order; of equal ones `_K_M`, then the other K-quants."""
    found: dict[str, str] = {}
    for name in sorted(names, key=lambda each: ("_K_M" not in each.upper(), "_K_" not in each.upper(), each)):
        if widths := WIDTH.findall(posixpath.basename(name)) or WIDTH.findall(name):
            found.setdefault(widths[-1], name)
    return [found[width] for width in WIDTHS if width in found]


def directory(names: Iterable[str], files: Sequence[str], of: str) -> tuple[str, ...]:
    """Choose the files that an MLX engine reads, or exactly `files` if any; config.json is first. Raises Unusable.

    `of`: the repository, for messages.
    """
    there = set(names)
    wanted = _named(there, files, of) if files else _read_by_engines(there)
    if strange := next((name for name in sorted(wanted) if not is_safe(name)), None):
        raise Unusable("InvalidModelFile", f"{of} has {strange!r:.120}, which is no name of a file on this Mac")
    top = {name for name in wanted if "/" not in name}
    if lacks := lacking(top):
        if files:
            raise Unusable("InvalidModelFile", f"spec.files leaves out {lacks} of {of}, which an engine needs; add it")
        text = f"{of} has no {lacks} at its top, so it is no MLX model"
        raise Unusable("InvalidModelFile", f"{text}; set spec.source to one that is, or spec.format to gguf")
    if len(wanted) > MOST_FILES:
        text = f"{of} has {len(wanted)} files, more than {MOST_FILES}"
        raise Unusable("InvalidModelFile", f"{text}; name some in spec.files")
    _refuse_collisions(wanted, of)
    return tuple(sorted(wanted, key=lambda name: (name != CONFIG, name)))


def lacking(names: Collection[str]) -> str:
    """What the files of a directory lack of an MLX model, "" if nothing."""
    if CONFIG not in names:
        return CONFIG
    return "" if any(name.endswith(WEIGHTS) for name in names) else "*.safetensors"


def contents(names: Iterable[str]) -> str:
    """What a directory holds that lacks an MLX model's files, for a message."""
    shown = sorted(name for name in names if not _hidden(name))
    if files := [name for name in shown if _is_model(name)]:
        return f"it has GGUF files ({_some(files)})"
    if any(name.endswith((".bin", ".pt", ".pth")) for name in shown):
        return "its weights are PyTorch's (mlx_lm.convert converts them)"
    return f"it has {_some(shown)}" if shown else "it is empty"


def missing_shards(names: Iterable[str]) -> str:
    """What the weights of a directory lack by their own names (`model-00001-of-00003.safetensors`), "" if nothing."""
    found = Counter(shard.groups() for shard in map(SHARD.fullmatch, names) if shard)
    for (stem, total), count in found.items():
        if count < int(total):
            return f"{int(total) - count} of its {int(total)} files {stem}-…-of-{total}.safetensors"
    return ""


def _named(there: set[str], files: Sequence[str], of: str) -> set[str]:
    for index, name in enumerate(files):
        if not name.endswith(READ_BY_ENGINES):
            text = f"spec.files[{index}] {name!r:.120} is no file that engines read ({', '.join(READ_BY_ENGINES)})"
            raise Unusable("InvalidModel", f"{text}; remove it")
        if name not in there:
            raise Unusable("InvalidModel", f"spec.files[{index}] {name!r:.120} is not in {of}; correct or remove it")
    return set(files)


def directory_name(artifact: Artifact) -> str:
    """Name of the directory, within its slot, of a model that is a whole repository."""
    parts = hub_parts(artifact.source)
    last = (parts[0] if parts else artifact.source.rstrip("/")).rpartition("/")[2]
    plain = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "_" for char in last)
    return plain[-96:].lstrip(".") or "model"


def refuse_program(head: bytes, where: str) -> None:
    """Raise Unusable if a file with these first bytes is a program or library, or a pointer. `where`: path or URL."""
    if head.startswith(LFS_POINTER):
        raise Unusable("InvalidModelFile", f"{where} is a Git LFS pointer; run git lfs pull in its repository")
    if head.startswith(PROGRAMS):
        raise Unusable("InvalidModelFile", f"{where} is a program; no program of a model is ever run")


def check_config(text: bytes, where: str) -> None:
    """Raise Unusable for a configuration that names code for the engine to run, or that is not JSON. `where`: its path.

    `auto_map` names code too, but only for --trust-remote-code: that flag is refused, so the key is allowed.
    """

    def judged(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, value in pairs:  # every pair: parsers differ in which of two equal keys counts
            code = key in NAMES_CODE and isinstance(value, str) and value and not MODULE.fullmatch(value)
            if code or (key == "model_file" and value is not None):
                text = f"{where} names code to be run ({key}), and no code of a model is ever run"
                raise Unusable("InvalidModelFile", f"{text}; use a model whose architecture the engine knows")
        return dict(pairs)

    try:
        found = json.loads(text, object_pairs_hook=judged)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Unusable("InvalidModelFile", f"{where} cannot be read as JSON; fetch it again")


def _read_by_engines(there: set[str]) -> set[str]:
    wanted = {
        name
        for name in there
        if name.endswith(READ_BY_ENGINES)
        and not _hidden(name)
        and not posixpath.basename(name).lower().startswith(FOR_PEOPLE)
    }
    if any(re.fullmatch(r"model[^/]*\.safetensors", name) for name in wanted):
        # A second copy of the same weights, in the layout of their makers.
        return {name for name in wanted if not re.match(r"original/|consolidated[^/]*\.safetensors", name)}
    return wanted


def _refuse_collisions(wanted: set[str], of: str) -> None:
    """Raise Unusable for names that collide on a Mac's disk: A.json and a.json, a file and a directory of one name."""
    seen: dict[str, str] = {}
    for name in sorted(wanted):
        other = seen.setdefault(folded(name), name)
        if other != name:
            text = f"{of} has {other!r:.120} and {name!r:.120}"
            raise Unusable("InvalidModelFile", f"{text}, which are one file on a Mac")
    for name in sorted(wanted):
        parent = posixpath.dirname(folded(name))
        while parent:
            if parent in seen:
                raise Unusable("InvalidModelFile", f"{of} has {seen[parent]!r:.120} as a file and as a directory")
            parent = posixpath.dirname(parent)


def folded(name: str) -> str:
    """Fold a name: equal for names that a Mac's disk does not tell apart."""
    return unicodedata.normalize("NFD", unicodedata.normalize("NFD", name).casefold())


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(f"{name:.120}" for name in names[:MOST_NAMED])
    return f"{shown} and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else shown
