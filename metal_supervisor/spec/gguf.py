"""Reader of GGUF headers: the hyperparameters of a model and the sizes of its tensors, without its weights.

A model must be judged before it is loaded, and often before it is downloaded, so the same reader serves a file,
a set of shards, and a file on a server: its `Source` is asked for no more than the header needs.
The file is untrusted: counts, lengths and sums are bounded before anything is allocated or added, values that are not
needed (token lists, templates) are skipped, and every defect is a `BadGguf` that names it.

The format is ggml's, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeAlias

from metal_supervisor.spec.terminal_text import escaped, shortened

MIB = 1 << 20
WINDOW_BYTES = 256 * 1024
"""Size of one read; most of a header is tokens, a few bytes each."""
MAX_HEADER_BYTES = 64 * MIB
"""The largest known are some 20 MiB: 260,000 tokens with their merges."""
MAX_DATA_BYTES = 1 << 50
"""No machine has a pebibyte; sums below it cannot overflow 64 bits."""
MAX_ENTRIES = 16_384
MAX_TENSORS = 65_536
MAX_STRINGS = 2_000_000
"""In lists: the largest known file has some 800,000, tokens and merges."""
MAX_KEY_BYTES = 65_535
MAX_NAME_BYTES = 128
MAX_DIMENSIONS = 4
MAX_LAYERS = 1024
KEPT_TEXT_BYTES = 512
"""Longest string that is kept; only the engine needs longer ones."""
KEPT_ITEMS = 1024
"""Longest list that is kept."""
KEPT_TOTAL = 65_536
"""Most of both together."""

TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}
"""ggml's number of a tensor type -> its name, the elements of a block, and the bytes of one."""

SCALARS: Mapping[int, struct.Struct] = {
    number: struct.Struct("<" + code) for number, code in zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True)
}
TEXT = 8
LIST = 9
LENGTH = struct.Struct("<Q")

SUMMARY_TEXTS: Mapping[str, str] = {
    "architecture": "general.architecture",
    "modelName": "general.name",
    "license": "general.license",
}
"""Field of `status.gguf` of a Model -> key of the header."""
SUMMARY_NUMBERS: Mapping[str, str] = {
    "contextLength": "context_length",
    "embeddingSize": "embedding_length",
    "headCount": "attention.head_count",
    "layerCount": "block_count",
}
"""As above; the key follows the architecture."""
LONGEST_SUMMARY = 200

ARCHITECTURE = re.compile(r"[a-z0-9_.-]{1,64}")
_PROJECTOR = "a projector for images or sound", "name it in spec.mmproj of the Model that it belongs to"
_ADAPTER = "a LoRA adapter", "pass it with --lora in spec.extraArgs"
_DRAFT = "a draft head", "name its Model in spec.speculativeDecoding.draftModelRef of a service"
_IMAGES = "an image or video model", "no engine here runs it; use one such as stable-diffusion.cpp"
_SPEECH = "a speech model", "no engine here runs it; use one such as whisper.cpp"
COMPANIONS: Mapping[str, tuple[str, str]] = {
    "mmproj": _PROJECTOR,
    "clip": _PROJECTOR,
    "adapter": _ADAPTER,
    "controlvector": ("a control vector", "pass it with --control-vector in spec.extraArgs"),
    "imatrix": ("an importance matrix", "only llama-quantize reads it; serve the model instead"),
    "eagle3": _DRAFT,
    "dflash": _DRAFT,
    "dspark": _DRAFT,
    "gemma4-assistant": _DRAFT,
    "flux": _IMAGES,
    "sd1": _IMAGES,
    "sdxl": _IMAGES,
    "sd3": _IMAGES,
    "aura": _IMAGES,
    "hidream": _IMAGES,
    "cosmos": _IMAGES,
    "ltxv": _IMAGES,
    "hyvid": _IMAGES,
    "wan": _IMAGES,
    "lumina2": _IMAGES,
    "qwen_image": _IMAGES,
    "pig": _IMAGES,
    "whisper": _SPEECH,
    "parakeet": _SPEECH,
    "kokoro": _SPEECH,
    "wavtokenizer-dec": _SPEECH,
}
"""`general.type` or architecture of a file that is no language model -> what it is, and what to do with it."""

NOT_GGUF = {
    b"vers": ", but a Git LFS pointer; run git lfs pull in its repository",
    **dict.fromkeys((b"<!do", b"<htm"), ", but a web page (a login or error page?)"),
}
"""First four bytes of files that people have in a model's place -> what they are."""

NAME = re.compile(rb"blk\.(\d{1,4})\.([a-z0-9]+(?:_[a-z0-9]+)*)")
KEYS_OF_ATTENTION = frozenset({b"attn_k", b"attn_kv_a_mqa", b"attn_kv_a"})
RECURRENT = re.compile(rb"(ssm|shortconv|time_mix)_?")


class BadGguf(Exception):
    """The header cannot be used; the text says what is wrong with it."""


class NotGguf(BadGguf):
    """The file is no GGUF file that an engine on a Mac reads."""


class CutShort(BadGguf):
    """The file ends before its header says that it does."""


class Source(Protocol):
    """Where the bytes come from."""

    def read(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes from `offset`, at least one unless the file ends there."""


@dataclass(frozen=True)
class Omitted:
    """A list or string that is not kept."""

    length: int
    """Items of a list, bytes of a string."""


Value: TypeAlias = int | float | bool | str | tuple[int | float | bool, ...] | Omitted


@dataclass(frozen=True)
class Header:
    """The parts of a header that are kept."""

    metadata: Mapping[str, Value]
    weights_bytes: int
    """Bytes of all tensors; of all shards, if merged."""
    data_offset: int
    """Where the tensors begin, in bytes."""
    data_bytes: int
    """From there to the end of the last one."""
    attention_layers: frozenset[int] = frozenset()
    """Blocks with key tensors of attention: those that the KV cache covers."""
    recurrent_layers: frozenset[int] = frozenset()
    """Blocks that have tensors of a recurrent layer; some models have both in one."""
    assumptions: tuple[str, ...] = ()
    """Assumptions made where the file does not tell."""
    tensors: int = 0

    @property
    def architecture(self) -> str:
        found = self.metadata.get("general.architecture")
        return found if isinstance(found, str) else ""

    @property
    def companion(self) -> str:
        """What the file is and what it is for, if no engine serves it by itself; else ""."""
        kind, found = self.metadata.get("general.type"), None
        for key in (kind, self.architecture):
            found = found or COMPANIONS.get(str(key))
        if found is None and self._is_draft_head():
            found = _DRAFT
        if found is None and not self.weights_bytes and "split.count" not in self.metadata:  # else a shard
            found = "a file without weights", "name the file that has them"
        if found is None:
            return ""
        named = f"general.type {kind}, " if kind else ""
        what = f"{found[0]} ({shortened(named + f'architecture {self.architecture or None}', 100)})"
        return f"it is {what}, not a model by itself; {found[1]}"

    def _is_draft_head(self) -> bool:
        """True if of all blocks only those for multi-token prediction are there."""
        blocks = self.metadata.get(f"{self.architecture}.block_count")
        heads = self.metadata.get(f"{self.architecture}.nextn_predict_layers")
        if not (isinstance(blocks, int) and isinstance(heads, int) and heads):
            return False
        return min(self.attention_layers | self.recurrent_layers, default=0) >= blocks - heads > 0

    @cached_property
    def summary(self) -> dict[str, str | int]:
        """What the status of a Model says of it, as far as the header does: fields of `status.gguf`."""
        texts = {name: self.metadata.get(key) for name, key in SUMMARY_TEXTS.items()}
        numbers = {name: self.metadata.get(f"{self.architecture}.{key}") for name, key in SUMMARY_NUMBERS.items()}
        return {
            **{key: shortened(each, LONGEST_SUMMARY) for key, each in texts.items() if each and isinstance(each, str)},
            # A list has a value for each layer; the API's numbers have 64 bits with a sign.
            **{key: each for key, each in numbers.items() if type(each) is int and 0 < each < 1 << 63},
        }

    @property
    def tokens(self) -> int:
        """Size of the vocabulary, 0 if the header does not tell."""
        found = self.metadata.get("tokenizer.ggml.tokens")
        if isinstance(found, Omitted):
            return found.length
        told = self.metadata.get(f"{self.architecture}.vocab_size")
        return max(told, 0) if isinstance(told, int) else 0


class _Cursor:
    """Reads forward, a window at a time."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._window, self._start, self._at = b"", 0, 0
        self._strings = 0

    @property
    def position(self) -> int:
        return self._start + self._at

    def _fill(self, size: int) -> None:
        """Makes the next `size` bytes available in the window."""
        if size > MAX_HEADER_BYTES - self.position:
            raise BadGguf(f"the header goes on for more than {MAX_HEADER_BYTES // MIB} MiB")
        parts, start = [self._window[self._at :]], self.position
        have = len(parts[0])
        while have < size:
            part = self._source.read(start + have, max(size - have, WINDOW_BYTES))
            if not part:
                raise CutShort(f"the file ends at byte {start + have}, in the middle of its header")
            parts.append(part)
            have += len(part)
        self._window, self._start, self._at = b"".join(parts), start, 0

    def take(self, size: int) -> bytes:
        if self._at + size > len(self._window):
            self._fill(size)
        self._at += size
        return self._window[self._at - size : self._at]

    def skip(self, size: int) -> None:
        """Skip bytes without reading them; only the next read notices a file that ends before."""
        self._at += size
        if self.position > MAX_HEADER_BYTES:
            raise BadGguf(f"the header goes on for more than {MAX_HEADER_BYTES // MIB} MiB")

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def text(self, what: str, longest: int) -> bytes:
        size = self.number(8)
        if size > longest:
            raise BadGguf(f"{what} has {size} bytes; at most {longest} are allowed")
        return self.take(size)

    def skip_texts(self, count: int) -> None:
        """Skip strings; a vocabulary has hundreds of thousands, so this loop does nothing else."""
        self._strings += count
        if self._strings > MAX_STRINGS:
            raise BadGguf(f"a list claims {count} strings; at most {MAX_STRINGS} are allowed")
        while count:
            if self._at + 8 > len(self._window):
                self._fill(8)
            window, at, done = self._window, self._at, 0
            try:
                for done in range(count):  # noqa: B007 - read after the loop, which the window's end may cut short
                    at += 8 + LENGTH.unpack_from(window, at)[0]
                done = count
            except (struct.error, OverflowError):  # the window ends before this string's length
                pass
            self._at, count = at, count - done
            self.skip(0)


class _Reader:
    """One header in the making."""

    def __init__(self, source: Source, size_bytes: int | None) -> None:
        self._cursor = _Cursor(source)
        self._size_bytes = size_bytes
        self._spare = KEPT_TOTAL
        self._total = 0
        self._unknown: list[tuple[str, int, int]] = []
        self._end = 0
        self._offsets: list[int] = []
        self._attention: set[int] = set()
        self._fused: set[int] = set()
        self._recurrent: set[int] = set()

    def header(self) -> Header:
        tensors, entries = self._counts()
        metadata: dict[str, Value] = {}
        for _ in range(entries):
            key = self._cursor.text("a key", MAX_KEY_BYTES).decode("utf-8", "replace")
            if key in metadata:
                raise BadGguf(f"key {key!r:.100} is there twice")
            value = self._value(self._cursor.number(4), key)
            if len(key) <= KEPT_TEXT_BYTES:
                metadata[key] = value
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= MIB or alignment & (alignment - 1):
            raise BadGguf(f"general.alignment must be a power of two, not {alignment!r:.80}")
        architecture = metadata.get("general.architecture", "none")
        if not isinstance(architecture, str) or not ARCHITECTURE.fullmatch(architecture):
            shown = escaped(architecture) if isinstance(architecture, str) else type(architecture).__name__
            raise NotGguf(f"general.architecture must be a name like llama or qwen3moe, not {shown:.80}")
        for _ in range(tensors):
            self._tensor()
        start = -(-self._cursor.position // alignment) * alignment
        assumptions = self._size_unknown(start)
        return Header(
            metadata=metadata,
            weights_bytes=self._total,
            data_offset=start,
            data_bytes=self._fits(start),
            attention_layers=frozenset(self._attention | (self._fused - self._recurrent)),
            recurrent_layers=frozenset(self._recurrent),
            assumptions=assumptions,
            tensors=tensors,
        )

    def _counts(self) -> tuple[int, int]:
        magic = self._cursor.take(4)
        if magic == b"FUGG":
            raise NotGguf("it is a big-endian GGUF file, which engines on a Mac cannot read; convert it")
        if magic != b"GGUF":
            raise NotGguf(f"it is not a GGUF file{NOT_GGUF.get(magic.lower(), '')}")
        raw = self._cursor.take(4)
        version = int.from_bytes(raw, "little")
        if version & 0xFFFF == 0 and 1 <= int.from_bytes(raw, "big") <= 0xFFFF:
            raise NotGguf("it is a big-endian GGUF file, which engines on a Mac cannot read; convert it")
        if version not in (2, 3):
            raise BadGguf(f"GGUF version {version} is not supported; 2 and 3 are")
        tensors, entries = self._cursor.number(8), self._cursor.number(8)
        if tensors > MAX_TENSORS:
            raise BadGguf(f"it claims {tensors} tensors; at most {MAX_TENSORS} are allowed")
        if entries > MAX_ENTRIES:
            raise BadGguf(f"it claims {entries} metadata entries; at most {MAX_ENTRIES} are allowed")
        return tensors, entries

    def _value(self, kind: int, key: str) -> Value:
        cursor = self._cursor
        if kind in SCALARS:
            scalar: int | float | bool = SCALARS[kind].unpack(cursor.take(SCALARS[kind].size))[0]
            return scalar
        if kind == TEXT:
            size = cursor.number(8)
            if size > KEPT_TEXT_BYTES or size > self._spare:
                cursor.skip(size)
                return Omitted(size)
            self._spare -= size
            return cursor.take(size).decode("utf-8", "replace")
        if kind != LIST:
            raise BadGguf(f"key {key!r:.100} has the unknown value type {kind}")
        item, count = cursor.number(4), cursor.number(8)
        if item == TEXT:
            cursor.skip_texts(count)
            return Omitted(count)
        if item not in SCALARS:
            raise BadGguf(f"key {key!r:.100} is a list of the unknown value type {item}")
        size = count * SCALARS[item].size
        if count > KEPT_ITEMS or count > self._spare or key.startswith("tokenizer."):
            cursor.skip(size)
            return Omitted(count)
        self._spare -= count
        return tuple(each for (each,) in SCALARS[item].iter_unpack(cursor.take(size)))

    def _tensor(self) -> None:
        cursor = self._cursor
        raw = cursor.text("a tensor's name", MAX_NAME_BYTES)
        dimensions = cursor.number(4)
        if dimensions > MAX_DIMENSIONS:
            raise BadGguf(f"tensor {raw!r:.100} has {dimensions} dimensions; at most {MAX_DIMENSIONS} are allowed")
        elements, row = 1, 1
        for index in range(dimensions):
            extent = cursor.number(8)
            row = extent if index == 0 else row
            elements *= extent
            if extent > MAX_DATA_BYTES or elements > MAX_DATA_BYTES:
                raise BadGguf(f"tensor {raw!r:.100} is larger than any machine")
        number, offset = cursor.number(4), cursor.number(8)
        if offset > MAX_DATA_BYTES:
            raise BadGguf(f"tensor {raw!r:.100} lies at {offset}, beyond the end of any file")
        self._offsets.append(offset)
        self._note_layer(raw)
        if number not in TYPES:
            self._unknown.append((raw.decode("utf-8", "replace"), number, offset))
            return
        name, block, block_bytes = TYPES[number]
        if row % block:
            raise BadGguf(f"tensor {raw!r:.100} has rows of {row}, but {name} comes in blocks of {block}")
        self._add(elements // block * block_bytes, offset)

    def _add(self, size: int, offset: int) -> None:
        self._total += size
        self._end = max(self._end, offset + size)
        if self._total > MAX_DATA_BYTES:
            raise BadGguf("its tensors are together larger than any machine")

    def _note_layer(self, raw: bytes) -> None:
        found = NAME.match(raw)
        if found is None or int(found[1]) >= MAX_LAYERS:
            return
        layer, part = int(found[1]), found[2]
        if part in KEYS_OF_ATTENTION:
            self._attention.add(layer)
        elif part == b"attn_qkv":  # linear attention has such a one as well, and no keys to cache
            self._fused.add(layer)
        elif RECURRENT.match(part):
            self._recurrent.add(layer)

    def _size_unknown(self, start: int) -> tuple[str, ...]:
        """Size tensors of an unknown type by where the next one begins, or the file ends."""
        if not self._unknown:
            return ()
        last = None if self._size_bytes is None else self._size_bytes - start
        after = dict(itertools.pairwise(sorted(set(self._offsets))))
        names = set()
        for tensor, number, offset in self._unknown:
            end = after.get(offset, last)
            if end is None or end < offset:
                raise BadGguf(f"tensor {tensor!r:.100} has the unknown type {number}, and nothing tells its size")
            names.add(f"type {number}")
            self._add(end - offset, offset)
        return (f"{', '.join(sorted(names))} unknown: sizes taken from the tensors' places in the file",)

    def _fits(self, start: int) -> int:
        """Bytes up to the end of the last tensor, if the file has them."""
        if self._size_bytes is not None:
            whole = start + self._end
            if whole > self._size_bytes:
                raise CutShort(f"the file is cut short: it has {self._size_bytes} bytes, and {whole} belong to it")
        if self._total > self._end:
            raise BadGguf("its tensors lie on top of each other")
        return self._end


def read_header(source: Source, size_bytes: int | None = None) -> Header:
    """Read the header of a file; with `size_bytes`, also check that the file holds all of its tensors.

    Raises BadGguf, and whatever the source raises.
    """
    return _Reader(source, size_bytes).header()
