"""GGUF headers: read like the reference implementation reads them, and nothing that anybody writes does harm."""

from __future__ import annotations

import contextlib
import io
import random
import struct
import tracemalloc
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import tiny_gguf
from gguf.constants import GGML_QUANT_SIZES

from metal_supervisor.memory.estimate import CacheSettings, estimate
from metal_supervisor.models.metadata import Reading, merged
from metal_supervisor.spec.gguf import (
    LONGEST_SUMMARY,
    MAX_ENTRIES,
    MAX_STRINGS,
    MAX_TENSORS,
    TYPES,
    BadGguf,
    CutShort,
    Header,
    Omitted,
    Source,
    read_header,
)
from metal_supervisor.spec.shards import misnamed, shard_names
from tests.support.broken import mutated
from tests.support.in_memory import InMemory
from tests.support.shards import write_shards

U32 = 4
TEXT = 8
LIST = 9
I32 = 5
F32 = 0
Q4_0 = 2


def text(value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def number(key: str, value: int) -> bytes:
    return entry(key, U32, struct.pack("<I", value))


def texts(key: str, values: Iterable[str]) -> bytes:
    items = [text(value) for value in values]
    return entry(key, LIST, struct.pack("<IQ", TEXT, len(items)) + b"".join(items))


def tensor(name: str, dimensions: tuple[int, ...], kind: int, offset: int) -> bytes:
    shape = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


def file(
    *entries: bytes, tensors: tuple[bytes, ...] = (), version: int = 3, counts: tuple[int, int] | None = None
) -> bytes:
    """A header, without the data that may belong to it."""
    architecture = entry("general.architecture", TEXT, text("llama"))
    told = counts or (len(tensors), 1 + len(entries))
    return b"GGUF" + struct.pack("<IQQ", version, *told) + architecture + b"".join(entries + tensors)


def read(data: bytes, size_bytes: int | None = None) -> Header:
    return read_header(InMemory(data), size_bytes)


@dataclass
class File:
    """A real file, or something like it, that counts what is read of it."""

    file: Any
    most: int = 1 << 30
    """How much it gives at once."""
    reads: list[int] = field(default_factory=list)

    def read(self, offset: int, size: int) -> bytes:
        self.file.seek(offset)
        part: bytes = self.file.read(min(size, self.most))
        self.reads.append(len(part))
        return part


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tiny_gguf.write_tiny_gguf(path, n_layer=3)
    return path


# ── what the reference implementation writes ─────────────────────────────────────────────────────


def test_a_real_file_reads_as_the_reference_implementation_reads_it(tiny: Path) -> None:
    theirs = gguf.GGUFReader(tiny)
    with tiny.open("rb") as opened:
        ours = read_header(File(opened), tiny.stat().st_size)
    assert ours.weights_bytes == sum(int(each.n_bytes) for each in theirs.tensors)
    assert ours.data_offset == theirs.data_offset
    assert ours.data_offset + ours.data_bytes == tiny.stat().st_size
    assert ours.architecture == "llama"
    assert ours.tokens == 320
    assert ours.attention_layers == {0, 1, 2}
    for key in ("block_count", "embedding_length", "attention.head_count_kv", "context_length"):
        assert ours.metadata[f"llama.{key}"] == theirs.fields[f"llama.{key}"].contents()


def test_the_tensor_types_have_the_sizes_of_the_reference_implementation() -> None:
    for kind in gguf.GGMLQuantizationType:
        if kind.name == "Q8_1":
            continue  # in memory only; the Python package still has the size it had in 2023
        assert TYPES[kind.value] == (kind.name, *GGML_QUANT_SIZES[kind])


@pytest.mark.parametrize("kind", sorted(TYPES))
def test_every_type_is_summed_by_its_blocks(kind: int) -> None:
    _, block, block_bytes = TYPES[kind]
    header = read(file(tensors=(tensor("a", (2 * block, 3), kind, 0), tensor("b", (block,), kind, 6 * block_bytes))))
    assert header.weights_bytes == 7 * block_bytes


def test_all_kinds_of_values_are_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -3)
    writer.add_uint16("a.u16", 60_000)
    writer.add_int16("a.i16", -300)
    writer.add_int32("a.i32", -70_000)
    writer.add_uint64("a.u64", 1 << 63)
    writer.add_int64("a.i64", -(1 << 62))
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_array("a.list", [8, 0, 8])
    writer.add_array("a.words", ["x", "yy"])
    writer.add_string("a.long", "x" * 1000)
    writer.add_array("tokenizer.ggml.scores", [0.5] * 10)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    header = read((tmp_path / "a.gguf").read_bytes())
    found = {key[2:]: value for key, value in header.metadata.items() if key.startswith("a.")}
    assert found == {
        "u8": 200,
        "i8": -3,
        "u16": 60_000,
        "i16": -300,
        "i32": -70_000,
        "u64": 1 << 63,
        "i64": -(1 << 62),
        "f32": 0.5,
        "f64": 0.1,
        "bool": True,
        "list": (8, 0, 8),
        "words": Omitted(2),
        "long": Omitted(1000),
    }
    assert header.metadata["tokenizer.ggml.scores"] == Omitted(10), "nobody asks for it, however short it is"


def test_of_a_header_the_status_of_a_model_gets_what_the_api_takes(tiny: Path) -> None:
    assert read_header(InMemory(tiny.read_bytes())).summary == {
        "architecture": "llama",
        "modelName": "tiny-llama",
        "license": "cc0-1.0",
        "contextLength": 2048,
        "embeddingSize": 64,
        "headCount": 4,
        "layerCount": 3,
    }
    odd = Header(
        {
            "general.architecture": "x{}",
            "general.name": "a\nb" * 200,
            "general.license": 5,
            "x{}.block_count": 1 << 63,
            "x{}.context_length": "long",
            "x{}.embedding_length": True,
            "x{}.attention.head_count": (1, 2),
        },
        0,
        0,
        0,
    )
    assert odd.summary.keys() == {"architecture", "modelName"}
    name = str(odd.summary["modelName"])
    assert len(name) == LONGEST_SUMMARY and name.isprintable()
    assert read(file()).summary == {"architecture": "llama"}


def _made(path: Path, architecture: str, kind: str = "", blocks: tuple[int, ...] = (0,), **numbers: int) -> Header:
    writer = gguf.GGUFWriter(path, architecture)
    if kind:
        writer.add_type(kind)
    for name, value in numbers.items():
        writer.add_uint32(f"{architecture}.{name}", value)
    for block in blocks:
        writer.add_tensor(f"blk.{block}.attn_k.weight", numpy.zeros((4, 32), numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read(path.read_bytes())


@pytest.mark.parametrize(
    ("architecture", "kind", "what", "purpose"),
    [
        ("clip", "mmproj", "projector", "spec.mmproj"),
        ("clip", "", "projector", "spec.mmproj"),
        ("llama", "adapter", "LoRA adapter (general.type adapter, architecture llama)", "--lora"),
        ("controlvector", "", "control vector (architecture controlvector)", "--control-vector"),
        ("llama", "imatrix", "importance matrix", "llama-quantize"),
        ("eagle3", "model", "draft head", "draftModelRef"),
        ("gemma4-assistant", "", "draft head", "draftModelRef"),
        ("dflash", "", "draft head", "draftModelRef"),
        ("flux", "", "image or video model", "no engine here"),
        ("whisper", "", "speech model", "no engine here"),
    ],
)
def test_a_file_that_is_no_model_by_itself_says_what_it_is(
    architecture: str, kind: str, what: str, purpose: str, tmp_path: Path
) -> None:
    told = _made(tmp_path / "x.gguf", architecture, kind).companion
    assert told.startswith("it is a") and what in told and purpose in told


@pytest.mark.parametrize(("blocks", "is_head"), [((3,), True), ((0, 1, 2, 3), False), ((), True)])
def test_a_model_with_a_head_for_mtp_is_whole_and_the_head_alone_is_not(
    blocks: tuple[int, ...], is_head: bool, tmp_path: Path
) -> None:
    header = _made(tmp_path / "x.gguf", "qwen35", "model", blocks, block_count=4, nextn_predict_layers=1)
    assert bool(header.companion) is is_head
    assert not blocks or not is_head or "a draft head" in header.companion


def test_a_first_shard_without_tensors_is_not_a_file_without_weights(tmp_path: Path) -> None:
    header = _made(tmp_path / "x.gguf", "llama", blocks=())
    assert "a file without weights" in header.companion
    assert replace(header, metadata={**header.metadata, "split.count": 2}).companion == ""


@pytest.mark.parametrize("architecture", ["llama", "bert", "a-model-of-tomorrow", "qwen35"])
def test_an_architecture_that_is_not_known_may_be_a_model(architecture: str, tmp_path: Path) -> None:
    assert _made(tmp_path / "x.gguf", architecture, "model").companion == ""


def test_version_2_reads_the_same() -> None:
    assert read(file(number("a", 7), version=2)) == read(file(number("a", 7)))


def test_an_own_alignment_moves_the_data() -> None:
    header = read(file(number("general.alignment", 1024)))
    assert header.data_offset == 1024


def test_blocks_are_told_by_their_tensors() -> None:
    names = (
        "blk.0.attn_qkv.weight",
        "blk.0.ssm_a",  # linear attention: no keys are kept
        "blk.1.attn_qkv.weight",
        "blk.2.attn_k.weight",
        "blk.2.ssm_out.weight",
        "blk.3.attn_kv_a_mqa.weight",
        "blk.4.shortconv.conv.weight",
        "blk.5.time_mix_key.weight",
        "blk.6.attn_k_norm.weight",
        "blk.9999.attn_k.weight",
        "blk.attn_k.weight",
        "v.blk.7.attn_k.weight",
    )
    header = read(file(tensors=tuple(tensor(name, (8,), F32, 32 * at) for at, name in enumerate(names))))
    assert header.attention_layers == {1, 2, 3}
    assert header.recurrent_layers == {0, 2, 4, 5}


# ── the first bytes of a file ────────────────────────────────────────────────────────────────────


def test_any_beginning_of_a_file_gives_the_header_or_is_cut_short(tiny: Path) -> None:
    data = tiny.read_bytes()
    whole = read(data)
    for length in range(0, whole.data_offset - 32, 37):
        with pytest.raises(CutShort, match="in the middle of its header"):
            read_header(InMemory(data[:length]))
    assert read_header(InMemory(data[: whole.data_offset]), len(data)) == whole
    assert read_header(InMemory(data[: whole.data_offset])) == whole, "without knowing how long the file is"


def test_of_a_70_gb_model_only_the_header_is_read() -> None:
    tokens = texts("tokenizer.ggml.tokens", (f"token{index}" for index in range(150_000)))
    weights = tuple(tensor(f"blk.{index}.w", (1 << 30,), F32, index << 32) for index in range(17))
    data = file(tokens, tensors=weights)
    source = File(io.BytesIO(data + bytes(1 << 20)))
    header = read_header(source, len(data) + (17 << 32) + 32)
    assert header.weights_bytes == 17 << 32
    assert header.tokens == 150_000
    assert sum(source.reads) <= len(data) + (1 << 19)


def test_a_source_that_gives_a_few_bytes_at_a_time_serves_as_well(tiny: Path) -> None:
    with tiny.open("rb") as opened:
        slow = read_header(File(opened, most=7))
    assert slow == read(tiny.read_bytes())


# ── tensors of a type from the future ────────────────────────────────────────────────────────────


def test_an_unknown_type_reaches_to_the_next_tensor_and_the_last_to_the_end() -> None:
    tensors = (tensor("a", (64,), 99, 0), tensor("b", (8,), F32, 4096), tensor("c", (64,), 99, 8192))
    data = file(tensors=tensors)
    start = -(-len(data) // 32) * 32
    header = read(data, start + 10_000)
    assert header.weights_bytes == 32 + 4096 + (10_000 - 8192)
    assert header.assumptions == ("type 99 unknown: sizes taken from the tensors' places in the file",)
    with pytest.raises(BadGguf, match="'c' has the unknown type 99, and nothing tells its size"):
        read_header(InMemory(data))


# ── what is wrong is said ────────────────────────────────────────────────────────────────────────

BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "ends at byte 0"),
    "html": (b"<!DOCTYPE html><html>", "not a GGUF file"),
    "old": (file(version=1), "version 1 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "big-endian magic": (b"FUGG" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "cut": (file(number("a", 1))[:-2], "the file ends at byte"),
    "many tensors": (file(counts=(1 << 62, 1)), "4611686018427387904 tensors"),
    "many entries": (file(counts=(0, 1 << 40)), "1099511627776 metadata entries"),
    "twice": (file(number("a", 1), number("a", 2)), "'a' is there twice"),
    "value type": (file(entry("a", 77, b"")), "unknown value type 77"),
    "list type": (file(entry("a", LIST, struct.pack("<IQ", LIST, 1))), "a list of the unknown value type 9"),
    "long key": (file(struct.pack("<Q", 1 << 50)), "a key has 1125899906842624 bytes"),
    "long value": (file(entry("a", TEXT, struct.pack("<Q", 1 << 63))), "goes on for more than 64 MiB"),
    "long list": (file(entry("a", LIST, struct.pack("<IQ", U32, 1 << 62))), "goes on for more than 64 MiB"),
    "many strings": (
        file(entry("a", LIST, struct.pack("<IQ", TEXT, MAX_STRINGS + 1))),
        f"claims {MAX_STRINGS + 1} strings",
    ),
    "long string": (
        file(entry("a", LIST, struct.pack("<IQQ", TEXT, 5, (1 << 64) - 1))),
        "goes on for more than 64 MiB",
    ),
    "alignment": (file(number("general.alignment", 48)), "power of two, not 48"),
    "no alignment": (file(number("general.alignment", 0)), "power of two, not 0"),
    "dimensions": (file(tensors=(tensor("a", (1,) * 5, F32, 0),)), "has 5 dimensions"),
    "overflow": (file(tensors=(tensor("a", (1 << 32, 1 << 32), F32, 0),)), "larger than any machine"),
    "zero times huge": (file(tensors=(tensor("a", (0, (1 << 64) - 1), F32, 0),)), "larger than any machine"),
    "sum": (
        file(tensors=tuple(tensor(str(at), (1 << 47,), F32, at << 49) for at in range(3))),
        "together larger than any machine",
    ),
    "far away": (file(tensors=(tensor("a", (1,), F32, 1 << 60),)), "beyond the end of any file"),
    "blocks": (file(tensors=(tensor("a", (33,), Q4_0, 0),)), "rows of 33, but Q4_0 comes in blocks of 32"),
    "name": (file(tensors=(tensor("a" * 2000, (1,), F32, 0),)), "a tensor's name has 2000 bytes"),
    "on top": (file(tensors=tuple(tensor(str(at), (8,), F32, 0) for at in range(3))), "on top of each other"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_with_a_file_is_said(name: str) -> None:
    data, message = BAD[name]
    with pytest.raises(BadGguf, match=message):
        read_header(InMemory(data))


def test_a_file_that_was_not_downloaded_to_its_end_is_told_by_its_size(tiny: Path) -> None:
    data = tiny.read_bytes()
    with pytest.raises(BadGguf, match=f"cut short: it has {len(data) - 1} bytes, and {len(data)} belong to it"):
        read(data[:-1], len(data) - 1)


# ── shards ───────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model of six tensors in three files."""
    return write_shards(tmp_path_factory.mktemp("shards"), "m.gguf")


def merged_of(paths: list[Path]) -> Reading:
    readings = [Reading(path.stat().st_size, read(path.read_bytes())) for path in paths]
    return merged([path.name for path in paths], readings)


def test_shards_are_judged_together(shards: list[Path]) -> None:
    assert tuple(path.name for path in shards) == shard_names(shards[0].name) == shard_names(shards[2].name)
    found = merged_of(shards).header
    assert found is not None and found.weights_bytes == 6 * 4 * 32 * 4
    assert found.attention_layers == {0, 1}
    assert found.assumptions == ()


def test_shards_that_do_not_belong_together_are_refused(shards: list[Path]) -> None:
    first, second, _ = (Reading(path.stat().st_size, read(path.read_bytes())) for path in shards)
    of_two = "m-00001-of-00002.gguf", "m-00002-of-00002.gguf"
    assert "m-00001-of-00002.gguf: it is file 1 of 3 by its header" in merged(of_two, [first, second]).problem
    of_three = [path.name for path in shards]
    assert "m-00001-of-00003.gguf: it is file 2 of 3 by its header" in merged(of_three, [second, first, first]).problem
    assert "m-00003-of-00003.gguf: it is file 1 of 3 by its header" in merged(of_three, [first, second, first]).problem


@pytest.mark.parametrize(
    ("name", "split", "advice"),
    [
        ("x.gguf", (0, 2, 9), "it is file 1 of 2 by its header; rename it to x-00001-of-00002.gguf"),
        ("x-1-of-2.gguf", (1, 2, 9), "file 2 of 2 by its header; rename it to x-00002-of-00002.gguf"),
        ("X-00001-OF-00002.GGUF", (0, 2, 9), "rename it to X-00001-of-00002.gguf"),
        ("x-00002-of-00002.gguf", (0, 2, 9), "file 1 of 2 by its header; rename it to x-00001-of-00002.gguf"),
        ("x.gguf", (0, 2, 9), "llama-gguf-split --merge x-00001-of-00002.gguf x.gguf"),
        ("x.gguf", (0, 3, 5), "its header says 1 of 3; correct it: gguf-set-metadata x.gguf split.count 1"),
        ("x-00001-of-00003.gguf", (0, 1, 5), "is whole by its header; rename it to x.gguf"),
        ("x-00001-of-00003.gguf", (), "is whole by its header; rename it to x.gguf"),
        ("x-00001-of-00002.gguf", (0, 2, 9), ""),
        ("x.gguf", (), ""),
        ("x.gguf", (0, 1, 5), ""),
        ("x-00004-of-00003.gguf", (), ""),
        ("dir/x-00001-of-00002.gguf", (0, 2, 9), ""),
    ],
)
def test_the_name_of_a_shard_is_compared_with_its_header(name: str, split: tuple[int, ...], advice: str) -> None:
    keys = ("split.no", "split.count", "split.tensors.count")
    found = misnamed(name, dict(zip(keys, split, strict=False)), 5)
    assert advice in found and bool(advice) == bool(found)


@pytest.mark.parametrize("value", ["two", 2.5, (1, 2), True, -1])
def test_a_split_that_is_no_number_is_none(value: Any) -> None:
    assert misnamed("x.gguf", {"split.count": value, "split.no": value}, 5) == ""


def test_a_model_in_one_file_is_its_only_shard(tiny: Path) -> None:
    assert shard_names("tiny.gguf") == ("tiny.gguf",)
    assert shard_names("m-00004-of-00003.gguf") == ("m-00004-of-00003.gguf",)
    assert shard_names("m-00001-of-99999.gguf") == ("m-00001-of-99999.gguf",), "nobody lists so many"
    assert merged_of([tiny]).header == read(tiny.read_bytes())


# ── hostile files ────────────────────────────────────────────────────────────────────────────────


def small() -> bytes:
    entries = (
        number("llama.block_count", 2),
        entry("llama.attention.head_count_kv", LIST, struct.pack("<IQ2i", I32, 2, 8, 0)),
        texts("tokenizer.ggml.tokens", map(str, range(40))),
        entry("tokenizer.chat_template", TEXT, text("x" * 700)),
    )
    tensors = tuple(tensor(f"blk.{index}.attn_k.weight", (32, 4), index, index * 512) for index in range(3))
    return file(*entries, tensors=tensors)


@pytest.mark.parametrize("base", ["small", "tiny"])
def test_a_thousand_broken_headers_do_no_harm(base: str, tiny: Path) -> None:
    whole = small() if base == "small" else tiny.read_bytes()[: read(tiny.read_bytes()).data_offset]
    chance = random.Random(1)
    outcomes = dict.fromkeys(("read", "bad", "cut"), 0)
    tracemalloc.start()
    try:
        for _ in range(1000):
            data = mutated(whole, chance)
            size = chance.choice([None, len(data), len(data) + 4096])
            try:
                header = read_header(InMemory(data), size)
                assert 0 <= header.weights_bytes <= 1 << 50
                outcomes["read"] += 1
                estimate(header, CacheSettings(512))
            except BadGguf as error:
                assert 0 < len(str(error)) < 400
                outcomes["cut" if isinstance(error, CutShort) else "bad"] += 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50 << 20
    assert min(outcomes.values()) > 10, f"the mutations reach everything: {outcomes}"


class Endless:
    """A header that never ends: the largest counts allowed, then whatever is given, for ever."""

    def __init__(self, start: bytes, repeated: bytes) -> None:
        self._start, self._repeated = start, repeated * (1 + (1 << 20) // len(repeated))

    def read(self, offset: int, size: int) -> bytes:
        if offset < len(self._start):
            return self._start[offset : offset + size]
        unit = len(self._repeated)
        skip = (offset - len(self._start)) % unit
        return (self._repeated * (2 + size // unit))[skip : skip + size]


def hostile() -> dict[str, Source]:
    most = b"GGUF" + struct.pack("<IQQ", 3, MAX_TENSORS, MAX_ENTRIES)
    longest = entry("%05d" + "k" * 500, TEXT, text("v" * 512))
    lists = entry("%05d", LIST, struct.pack("<IQ", U32, 1000) + bytes(4000))
    names = tensor("n" * 120, (1, 1, 1, 1), F32, 1 << 40)
    future = tensor("n" * 120, (1,), 77, 1 << 40)
    return {
        "keys": Endless(most + b"".join(longest.replace(b"%05d", b"%05d" % at) for at in range(MAX_ENTRIES)), names),
        "lists": Endless(most + b"".join(lists.replace(b"%05d", b"%05d" % at) for at in range(MAX_ENTRIES)), names),
        "tensors": Endless(b"GGUF" + struct.pack("<IQQ", 3, MAX_TENSORS, 0), names),
        "unknown types": Endless(b"GGUF" + struct.pack("<IQQ", 3, MAX_TENSORS, 0), future),
    }


@pytest.mark.parametrize("name", ["keys", "lists", "tensors", "unknown types"])
def test_the_largest_header_that_is_allowed_takes_little_memory(name: str) -> None:
    source = hostile()[name]
    tracemalloc.start()
    try:
        with contextlib.suppress(BadGguf):
            read_header(source)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50 << 20
