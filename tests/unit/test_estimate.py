"""Estimates: the published sizes of real architectures, with the arithmetic beside them, and the rules one by one.

What a real llama-server says of tiny models is in `tests/boundary/test_estimate_real.py`.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from metal_supervisor.memory.estimate import (
    CACHE_TYPES,
    CacheSettings,
    Estimate,
    by_size,
    draft_settings,
    estimate,
    projector_bytes,
)
from metal_supervisor.memory.estimate_mlx import CannotEstimate, estimate_mlx
from metal_supervisor.memory.shape import CACHELESS, INTERVALS, NEMOTRON, PERIODS, RECURRENT, shape_of
from metal_supervisor.spec.gguf import BadGguf, Header, Omitted
from tests.support.published import (
    BY_HAND,
    GEMMA_27B,
    GEMMA_270M,
    LLAMA_8B,
    PUBLISHED,
    QWEN3_NEXT,
    attention,
    header,
    starts,
)

MIB = 1 << 20
GIB = 1 << 30


@pytest.mark.parametrize("name", PUBLISHED)
def test_caches_of_published_models(name: str) -> None:
    known = PUBLISHED[name]
    found = estimate(known.header, known.settings)
    assert abs(found.kv_bytes - known.kv_bytes) <= known.tolerance
    assert found.state_bytes == known.state_bytes


def test_the_arithmetic_by_hand_of_docs_memory_is_that_of_the_estimate() -> None:
    for model in BY_HAND:
        for settings in starts():
            found = estimate(model.header, settings)
            assert found.kv_bytes == model.kv_bytes(settings)
            assert found.total_bytes > found.weights_bytes == model.file_bytes
            assert model.incumbent_kv_bytes(settings) >= 2 * found.kv_bytes


# ── cells: contexts, slots, windows ──────────────────────────────────────────────────────────────


def test_slots_share_the_context_and_each_part_is_rounded_up() -> None:
    one = estimate(LLAMA_8B, CacheSettings(8192))
    three = estimate(LLAMA_8B, CacheSettings(8192, slots=3))
    assert (three.context, three.slots) == (2816, 3)
    assert three.kv_bytes == one.kv_bytes * 3 * 2816 // 8192


def test_a_unified_cache_is_one_for_all_slots() -> None:
    assert estimate(LLAMA_8B, CacheSettings(8192, slots=4, unified=True)).kv_bytes == 1 * GIB
    windowed = estimate(GEMMA_270M, CacheSettings(32768, slots=4, unified=True))
    assert windowed.kv_bytes == 1024 * (3 * 32768 + 15 * (4 * 512 + 512))


def test_without_a_context_the_model_s_own_counts() -> None:
    found = estimate(LLAMA_8B, CacheSettings())
    assert (found.context, found.kv_bytes) == (131_072, 16 * GIB)


def test_a_window_is_no_longer_than_the_context_and_swa_full_keeps_all() -> None:
    assert estimate(GEMMA_270M, CacheSettings(512)).kv_bytes == 18 * 512 * 1024
    assert estimate(GEMMA_270M, CacheSettings(32768, swa_full=True)).kv_bytes == 18 * 32768 * 1024


def test_keys_and_values_may_be_of_different_types() -> None:
    found = estimate(LLAMA_8B, CacheSettings(8192, cache_k="q8_0", cache_v="f32"))
    assert found.kv_bytes == 32 * 8192 * (1024 // 32 * 34 + 1024 * 4)


def test_an_unknown_type_of_cache_is_charged_as_f16_and_said() -> None:
    found = estimate(LLAMA_8B, CacheSettings(8192, cache_k="turbo9", cache_v="turbo9"))
    assert found.kv_bytes == 1 * GIB
    assert found.assumptions == ("KV cache type turbo9 unknown: charged as f16",)
    assert "turbo9" in found.explain()


def test_custom_types_of_forks_have_their_own_size() -> None:
    turbo = estimate(LLAMA_8B, CacheSettings(8192, cache_k="turbo3", cache_v="turbo4"))
    assert turbo.kv_bytes == 32 * 8192 * 1024 * (13 + 17) // 32
    assert turbo.assumptions == ()


# ── which blocks keep what ───────────────────────────────────────────────────────────────────────

SMALL: dict[str, Any] = {"block_count": 4, "embedding_length": 64, "context_length": 1024, "feed_forward_length": 128}


def windows(architecture: str, **keys: Any) -> str:
    shape = shape_of(header(architecture, **{**SMALL, **attention(4, 2, 16), **keys}))
    return "".join("w" if layer.windowed else "." for layer in shape.layers)


def test_which_blocks_look_back_a_window_only() -> None:
    assert windows("llama", attention__sliding_window=512) == "....", "an architecture that ignores it"
    assert windows("gemma2") == "w.w.", "4096, if it does not say"
    assert windows("gemma3", block_count=7) == "." * 7, "none, if it does not say"
    assert windows("gemma3", block_count=7, attention__sliding_window=512) == "wwwww.w"
    assert windows("gemma3", attention__sliding_window=512, attention__sliding_window_pattern=2) == "w.w."
    assert windows("cohere2moe", block_count=5, attention__sliding_window=512) == ".www."
    assert windows("phi3", attention__sliding_window=512) == "....", "llama.cpp switches it off"
    pattern = (False, True, True, False)
    listed = windows("gemma4", attention__sliding_window=512, attention__sliding_window_pattern=pattern)
    assert listed == ".ww."
    assert windows("llama4") == "www."
    assert windows("llama4", attention__sliding_window=0) == "...."
    assert windows("exaone4") == "...."
    assert windows("exaone4", block_count=64) == "www." * 16


def kept(architecture: str, evidence: dict[str, frozenset[int]] | None = None, **keys: Any) -> str:
    made = header(architecture, **{**SMALL, **attention(4, 2, 16), **keys})
    found = Header(made.metadata, 0, 0, 0, **(evidence or {}))
    words = {(True, False): "k", (False, True): "s", (True, True): "b", (False, False): "."}
    return "".join(words[bool(layer.key), bool(layer.state)] for layer in shape_of(found).layers)


SSM: dict[str, Any] = {"ssm__inner_size": 128, "ssm__state_size": 16, "ssm__conv_kernel": 4}


def test_which_blocks_keep_keys_and_which_a_state() -> None:
    assert kept("llama") == "kkkk"
    assert kept("mamba", attention__head_count=0, attention__head_count_kv=0, **SSM) == "ssss"
    assert kept("jamba", attention__head_count_kv=(0, 2, 0, 2), **SSM) == "sksk"
    assert kept("qwen3next", **SSM) == "sssk"
    assert kept("qwen3next", full_attention_interval=2, **SSM) == "sksk"
    assert kept("qwen35", attention__recurrent_layers=(True, False, False, True), **SSM) == "skks"
    assert kept("falcon-h1", **SSM) == "bbbb"
    forward = (0, 128, 0, 0)
    assert kept("nemotron_h", attention__head_count_kv=(0, 0, 2, 0), feed_forward_length=forward, **SSM) == "s.ks"
    assert kept("lfm2", attention__head_count_kv=(0, 2, 0, 0), shortconv__l_cache=3) == "skss"
    assert kept("deci", attention__head_count_kv=(2, 0, 2, 2)) == "k.kk", "blocks without attention"
    assert kept("gemma4", attention__shared_kv_layers=3) == "k..."
    assert kept("step35", nextn_predict_layers=1) == "kkk"
    assert kept("glm4moe", nextn_predict_layers=1) == "kkkk", "not every build saves them"
    assert kept("gemma3n", block_count=30) == "k" * 20 + "." * 10


@pytest.mark.parametrize(
    "keys",
    [
        {"attention__recurrent_layers": (True,) * 4},
        {"full_attention_interval": 1000},
        {"attention__shared_kv_layers": 4},
        {"attention__sliding_window": 1, "attention__sliding_window_pattern": (True,) * 4},
        {"nextn_predict_layers": 3},
        {"attention__key_length_mla": 1, "attention__value_length_mla": 1},
    ],
)
def test_a_key_that_the_engine_reads_for_other_architectures_saves_nothing(keys: dict[str, Any]) -> None:
    """Each was tried on a real engine with a llama: its cache stayed the same."""
    plain = {**SMALL, **attention(4, 2, 16)}
    whole, found = (estimate(header("llama", **plain, **more), CacheSettings(8192)) for more in ({}, keys))
    assert (found.kv_bytes, whole.assumptions) == (whole.kv_bytes, ())
    assert next(iter(keys)).replace("__", ".") in found.explain(), "and it is said"


def test_a_list_of_windows_counts_only_where_the_engine_reads_it() -> None:
    listed = {"attention__sliding_window": 512, "attention__sliding_window_pattern": (True,) * 4}
    assert windows("mimo2", **listed) == "wwww"
    assert windows("olmo2", **listed) == "www.", "its own rule, as if there were no list"
    assert shape_of(header("smallthinker", **SMALL, **attention(4, 2, 16), **listed)).window == 4096


def test_a_state_is_as_large_as_the_largest_that_the_header_has_keys_for() -> None:
    plain, more = (
        estimate(header("mamba", **SMALL, **SSM, **keys), CacheSettings(512))
        for keys in ({}, {"wkv__head_size": 1, "shortconv__l_cache": 2})
    )
    assert plain == more


def test_a_hybrid_that_does_not_say_is_judged_by_its_tensors_or_charged_for_both() -> None:
    evidence = {"attention_layers": frozenset({3}), "recurrent_layers": frozenset({0, 1, 2})}
    assert kept("newmodel", evidence, **SSM) == "sssk"
    assert kept("newmodel", **SSM) == "bbbb"
    found = estimate(header("newmodel", **{**SMALL, **attention(4, 2, 16), **SSM}), CacheSettings(512))
    assert found.assumptions == ("newmodel does not say which blocks attend: every one is charged for both",)


def test_the_state_grows_with_slots_and_not_with_the_context() -> None:
    model = header("mamba", **{**SMALL, **SSM, "attention__head_count": 0})
    per_slot = 4 * 4 * (3 * 128 + 16 * 128)
    for context in (512, 65_536):
        for slots in (1, 4):
            found = estimate(model, CacheSettings(context, slots=slots))
            assert (found.kv_bytes, found.state_bytes) == (0, per_slot * slots)


def test_the_states_of_other_recurrent_models() -> None:
    rwkv = header("rwkv7", **SMALL, wkv__head_size=64)
    assert estimate(rwkv, CacheSettings(512)).state_bytes == 4 * 4 * 64 * (2 + 64)
    kimi = header("kimi-linear", **{**SMALL, **attention(4, (0, 0, 0, 1), 16)}, kda__head_dim=16, ssm__conv_kernel=4)
    assert estimate(kimi, CacheSettings(512)).state_bytes == 3 * 4 * (3 * 3 * 4 * 16 + 16 * 16 * 4)


@pytest.mark.parametrize("architecture", sorted(CACHELESS))
def test_encoders_keep_nothing(architecture: str) -> None:
    found = estimate(header(architecture, **{**SMALL, **attention(4, 4, 16)}), CacheSettings(512))
    assert (found.kv_bytes, found.state_bytes) == (0, 0)


def test_an_encoder_with_windows_has_a_mask_of_each_kind() -> None:
    keys = {**SMALL, **attention(4, 4, 16)}
    one, two = (
        estimate(header("modern-bert", **keys, attention__sliding_window=window), CacheSettings(512))
        for window in (0, 64)
    )
    assert two.compute_bytes - one.compute_bytes == 2 * 512 * 512, "f16, for the batch against itself"


def test_a_sparse_attention_s_indexer_has_a_cache_of_keys_too() -> None:
    model = {**SMALL, **attention(4, 1, 96), "attention__key_length_mla": 64, "attention__value_length_mla": 32}
    plain = estimate(header("deepseek32", **model), CacheSettings(1024)).kv_bytes
    indexed = estimate(header("deepseek32", **model, attention__indexer__key_length=128), CacheSettings(1024)).kv_bytes
    assert (plain, indexed - plain) == (4 * 1024 * 96 * 2, 4 * 1024 * 128 * 2)


def test_windowed_blocks_may_have_heads_of_another_size() -> None:
    keys = {**SMALL, **attention(4, 2, 32, attention__sliding_window=128, attention__sliding_window_pattern=2)}
    model = header("gemma3", **keys, attention__key_length_swa=16, attention__value_length_swa=8)
    cells = 1024  # 128 + 512 rounded up is 768
    assert estimate(model, CacheSettings(cells)).kv_bytes == 2 * 2 * 2 * (32 + 32) * cells + 2 * 2 * 2 * (16 + 8) * 768


def test_without_flash_attention_all_values_take_the_widest_rows() -> None:
    model = header("deci", **{**SMALL, **attention(4, (4, 1, 1, 1), 16)})
    on, off = (estimate(model, CacheSettings(1024, flash_attention=each)) for each in (True, False))
    assert on.kv_bytes == 1024 * 2 * 16 * (4 + 1 + 1 + 1) * 2
    assert off.kv_bytes == 1024 * 2 * 16 * ((4 + 1 + 1 + 1) + 4 * 4)


# ── the other parts ──────────────────────────────────────────────────────────────────────────────


def test_larger_batches_and_no_flash_attention_take_more_scratch() -> None:
    def scratch(**settings: Any) -> int:
        return estimate(LLAMA_8B, CacheSettings(8192, **settings)).compute_bytes

    assert scratch(ubatch=128) < scratch() < scratch(ubatch=2048) < scratch(ubatch=4096, batch=4096)
    assert scratch(ubatch=4096) == scratch(ubatch=2048), "never more than a batch"
    # scores of 512 tokens x 8192 cells x 32 heads x 4 bytes
    assert scratch(flash_attention=False) > 512 * MIB > scratch()


@pytest.mark.parametrize(
    ("width", "heads", "batch", "flash", "engine_mib"),
    [
        (128, 4, 512, True, 1.88),
        (128, 4, 1024, False, 23.02),
        (768, 12, 512, True, 11.01),
        (768, 12, 512, False, 22.01),
        (768, 12, 1024, True, 23.02),
        (768, 12, 1024, False, 70.02),
    ],
)
def test_the_scratch_of_bert_is_what_a_real_engine_said(
    width: int, heads: int, batch: int, flash: bool, engine_mib: float
) -> None:
    forward = 256 if width == 128 else 4 * width
    keys = {"block_count": 3, "embedding_length": width, "feed_forward_length": forward}
    bert = header("bert", **keys, context_length=2048, attention__head_count=heads)
    found = estimate(bert, CacheSettings(2048, batch=batch, ubatch=batch, flash_attention=flash)).compute_bytes / MIB
    assert engine_mib * 0.99 <= found <= engine_mib * 1.07


def test_a_draft_model_has_a_cache_of_its_own_type() -> None:
    settings = CacheSettings(8192, prompt_cache_bytes=2 * GIB, cache_k="q8_0", cache_v="q8_0")
    assert draft_settings(settings) == CacheSettings(8192)
    found = estimate(LLAMA_8B, settings)
    assert found.prompt_cache_bytes == 2 * GIB
    assert found.total_bytes == sum(found.parts.values())


def test_a_checkpoint_is_the_window_and_the_state_of_one_slot() -> None:
    def mib(model: Header, **settings: Any) -> float:
        return estimate(model, CacheSettings(**{"context": 8192, "checkpoints": 1, **settings})).checkpoint_bytes / MIB

    gemma = 52 * 16 * 128 * 2 * 1024 * 2 / MIB
    assert mib(GEMMA_27B) == gemma == 416, "the window alone, not what is read at once"
    assert mib(GEMMA_27B, slots=4) == 4 * gemma
    assert mib(GEMMA_27B, context=512) == gemma / 2, "no more than the context"
    assert mib(GEMMA_27B, cache_k="q8_0", cache_v="q8_0") == gemma * 17 / 32
    assert mib(GEMMA_27B, swa_full=True) == 0, "nothing is lost then"
    assert mib(QWEN3_NEXT) == mib(QWEN3_NEXT, swa_full=True) == 36 * 4 * (3 * 8192 + 128 * 4096) / MIB
    assert mib(LLAMA_8B) == mib(header("bert", **SMALL, **attention(4, 4, 16)), context=512) == 0


def test_the_context_bounds_how_many_checkpoints_there_are() -> None:
    def count(context: int, checkpoints: int = 32, slots: int = 1, **settings: Any) -> float:
        asked = CacheSettings(context, slots=slots, checkpoints=checkpoints, **settings)
        return estimate(GEMMA_27B, asked).checkpoint_bytes / (416 * MIB) / slots

    assert (count(2048), count(8192), count(65_536), count(1 << 20)) == (4, 5, 12, 32)
    assert count(65_536, slots=4) == 6, "each slot has a quarter of it"
    assert count(65_536, checkpoints=3) == 3
    assert (count(8192, checkpoint_step=1024), count(8192, checkpoint_step=0)) == (12, 32)


def test_a_draft_model_s_checkpoints_are_kept_with_the_model_s() -> None:
    asked = [draft_settings(CacheSettings(8192, checkpoints=each)) for each in (0, 2)]
    without, two = (estimate(GEMMA_270M, each).total_bytes for each in asked)
    assert two - without == 2 * 15 * 512 * 2 * 256 * 2


@pytest.mark.parametrize(
    ("kind", "size", "patch", "embedding", "heads", "off_mib", "on_mib"),
    [
        # Published measurements of a ROCm machine, gpustack/gguf-parser-go issue 44.
        ("gemma3", 896, 14, 1152, 16, 1132, 121),
        ("qwen2vl_merger", 560, 14, 1280, 16, 4598, 267),
        ("qwen2.5vl_merger", 560, 14, 1280, 16, 4872, 705),
        ("qwen3vl_merger", 768, 16, 1152, 16, 4728, 323),
    ],
)
def test_the_scratch_of_vision_encoders(
    kind: str, size: int, patch: int, embedding: int, heads: int, off_mib: int, on_mib: int
) -> None:
    metadata = {
        "general.architecture": "clip",
        "clip.projector_type": kind,
        "clip.vision.image_size": size,
        "clip.vision.patch_size": patch,
        "clip.vision.embedding_length": embedding,
        "clip.vision.attention.head_count": heads,
    }
    projector = Header(metadata, 800 * MIB, 0, 0)
    for flash, known_mib in ((False, off_mib), (True, on_mib)):
        found = projector_bytes(projector, CacheSettings(4096, flash_attention=flash))
        assert known_mib * 0.9 <= found / MIB - 800 <= known_mib * 1.1 + 100


def test_what_is_mapped_from_files_is_told_apart() -> None:
    model = header("llama", weights=5 * GIB, **{**SMALL, **attention(4, 2, 16)})
    mapped, loaded = (estimate(model, CacheSettings(512, mmap=each)) for each in (True, False))
    assert (mapped.mapped_bytes, loaded.mapped_bytes) == (5 * GIB, 0)
    assert mapped.total_bytes == loaded.total_bytes


def test_an_estimate_explains_itself_in_one_line() -> None:
    found = estimate(header("llama", weights=5 * GIB, **{**SMALL, **attention(4, 2, 16)}), CacheSettings(512, slots=2))
    line = found.explain()
    assert line.startswith("5.0 GiB = weights 5.0 GiB + KV cache (2 x 256 tokens) ")
    assert "\n" not in line
    assert "draft" not in line, "what is not there is not mentioned"


def test_a_file_whose_header_cannot_be_read_is_charged_by_its_size_and_says_so() -> None:
    found = by_size(10 * GIB, CacheSettings(4096, prompt_cache_bytes=GIB), "GGUF version 9 is not supported")
    assert found.total_bytes == 12 * GIB + 512 * MIB + GIB
    assert found.basis == "file size"
    assert "by file size; GGUF version 9 is not supported" in found.explain()


# ── headers that make no sense ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": None}, "llama.block_count is missing"),
        ({"embedding_length": None}, "llama.embedding_length is missing"),
        ({"block_count": 0}, "block_count is 0; between 1 and 1024"),
        ({"block_count": 1 << 30}, "between 1 and 1024"),
        ({"embedding_length": -1}, "must be a number from 0"),
        ({"embedding_length": "big"}, "not 'big'"),
        ({"embedding_length": float("nan")}, "not nan"),
        ({"attention__head_count_kv": (8, 8)}, "has 2 numbers for 4 blocks"),
        ({"attention__head_count_kv": Omitted(5000)}, "not Omitted"),
        ({"attention__key_length": 1 << 40}, "must be a number from 0"),
        ({"context_length": None}, "context_length is missing; set spec.contextSize"),
    ],
)
def test_hyperparameters_that_make_no_sense_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    keys = {**SMALL, **attention(4, 2, 16), **changes}
    with pytest.raises(BadGguf, match=message):
        estimate(header("llama", **{key: value for key, value in keys.items() if value is not None}), CacheSettings())


def test_a_header_without_an_architecture_is_refused() -> None:
    with pytest.raises(BadGguf, match=r"general\.architecture is missing"):
        shape_of(Header({}, 0, 0, 0))


def test_hostile_numbers_stay_numbers() -> None:
    most = (1 << 31) - 1
    keys = {**SMALL, **attention(most, most, most), "context_length": most, "feed_forward_length": most}
    found = estimate(header("llama", tokens=1 << 20, **keys), CacheSettings(slots=64))
    assert found.total_bytes > 1 << 60, "no overflow makes it small"
    assert "GiB" in found.explain()


def test_a_vocabulary_of_less_than_nothing_makes_no_engine_smaller() -> None:
    keys = {**SMALL, **attention(4, 2, 16)}
    odd, none = (header("llama", **keys, vocab_size=size) for size in (-(1 << 63), 0))
    assert estimate(odd, CacheSettings()) == estimate(none, CacheSettings())


NAMES = (
    "block_count",
    "embedding_length",
    "context_length",
    "feed_forward_length",
    "expert_used_count",
    "vocab_size",
    "expert_feed_forward_length",
    "nextn_predict_layers",
    "full_attention_interval",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.shared_kv_layers",
    "attention.recurrent_layers",
    "attention.key_length_mla",
    "attention.value_length_mla",
    "attention.key_length_swa",
    "attention.indexer.key_length",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.conv_kernel",
    "ssm.group_count",
    "shortconv.l_cache",
    "kda.head_dim",
    "wkv.head_size",
    "token_shift_count",
)


def test_whatever_a_header_claims_it_is_estimated_or_refused() -> None:
    chance = random.Random(3)
    architectures = ["llama", *PERIODS, *INTERVALS, *sorted(RECURRENT | NEMOTRON)]
    architectures += ["falcon-h1", "jamba", "lfm2", "bert", "phi3", "x"]
    odd: list[Any] = [-1, 7, 1 << 31, 1 << 63, 0.5, float("nan"), float("inf"), True, "8", "", (), (0, 4), (1,) * 40]
    estimated = 0
    for _ in range(5000):
        architecture = chance.choice(architectures)
        metadata: dict[str, Any] = {"general.architecture": architecture}
        for name in NAMES:
            if chance.random() < 0.7:
                plain = chance.random() > 0.04
                metadata[f"{architecture}.{name}"] = chance.choice([0, 1, 2, 4, 16, 512] if plain else odd)
        settings = CacheSettings(
            chance.choice([0, 1, 512, 1 << 21]),
            chance.choice([1, 64]),
            chance.random() < 0.5,
            ubatch=chance.choice([1, 512, 1 << 31]),
            flash_attention=chance.random() < 0.5,
        )
        try:
            found = estimate(Header(metadata, 9, 0, 0, frozenset({1}), frozenset({0})), settings)
        except BadGguf as error:
            assert len(str(error)) < 300
            continue
        assert all(size >= 0 for size in found.parts.values())
        assert found.explain()
        estimated += 1
    assert 500 < estimated < 4500


def test_every_type_of_cache_is_at_most_f32() -> None:
    for kind in CACHE_TYPES:
        found = estimate(LLAMA_8B, CacheSettings(8192, cache_k=kind, cache_v=kind))
        assert 0 < found.kv_bytes <= 2 * GIB


# ── MLX ──────────────────────────────────────────────────────────────────────────────────────────

MLX: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "model_type": "llama",
    "max_position_embeddings": 4096,
}
WEIGHTS = 2 * GIB


def mlx(config: dict[str, Any] | None = None, **settings: Any) -> Estimate:
    return estimate_mlx(WEIGHTS, {**MLX, **(config or {})}, **settings)


def test_an_mlx_directory_is_its_weights_and_full_conversations() -> None:
    found = mlx(context=1000, slots=3)
    assert found.weights_bytes == 2 * GIB
    assert found.kv_bytes == 3 * 4 * 1024 * 2 * 2 * 32 * 2, "caches grow by 256 tokens"
    assert found.compute_bytes == 2 * GIB // 20 + 1
    assert "by config" in found.explain()
    assert mlx().context == 4096


def test_mlx_caches_of_other_kinds() -> None:
    full = mlx(context=65_536).kv_bytes
    assert mlx({"sliding_window": 512}, context=65_536).kv_bytes == full, "ignored without a pattern"
    per_layer = full // 4
    pattern = {"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 4}
    sliding = mlx(pattern, context=65_536).kv_bytes
    assert sliding == per_layer + 3 * per_layer * (512 + 2048) // 65_536
    kinds = ["linear_attention", "full_attention", "sliding_attention", "full_attention"]
    listed = mlx({"layer_types": kinds, "sliding_window": 512}, context=65_536)
    assert listed.kv_bytes == 3 * per_layer + per_layer * (512 + 2048) // 65_536
    mixed = mlx({"model_type": "olmo_hybrid", "layer_types": kinds, "sliding_window": 512}, context=65_536)
    assert mixed.kv_bytes == 3 * per_layer
    assert mixed.assumptions == ("the size of its linear layers' state is not told",)
    rank = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    latent = mlx({"model_type": "deepseek_v3", **rank}, context=1024).kv_bytes
    assert latent == 4 * 1024 * 576 * 2
    unpacked = {"model_type": "deepseek_v2", **rank, "qk_nope_head_dim": 128, "v_head_dim": 128}
    assert mlx(unpacked, context=1024).kv_bytes == 4 * 1024 * 4 * (192 + 128) * 2
    quantized = mlx(context=1024, kv_bits=4).kv_bytes
    assert quantized == 4 * 1024 * (128 // 2 + 2 * 4)
    config = {"model_type": "qwen3_vl", "text_config": MLX, "vision_config": {"hidden_size": 9}}
    assert estimate_mlx(WEIGHTS, config, context=1024).kv_bytes == 4 * 1024 * 128 * 2
    wide = {"model_type": "gemma4", "text_config": {**MLX, "global_head_dim": 64}}
    assert estimate_mlx(WEIGHTS, wide, context=1024).kv_bytes == 4 * 1024 * 256 * 2


@pytest.mark.parametrize(
    "added",
    [
        {"kv_lora_rank": 1},
        {"full_attention_interval": 1000},
        {"sliding_window": 1, "sliding_window_pattern": 1000},
        {"layer_types": ["linear"] * 4},
        {"layer_types": ["linear_attention"] * 4},
        {"model_type": "olmo_hybrid", "sliding_window": 1, "layer_types": ["sliding_attention"] * 4},
        {"text_config": {"num_hidden_layers": 1, "num_key_value_heads": 1}},
        {"num_hidden_layers": 1, "layer_types": ["full_attention"] * 4},
        {"head_dim": 0, "hidden_size": 128},
        {"model_type": "gpt_neox", "head_dim": 1, "num_key_value_heads": 1, "hidden_size": 128},
        {"model_type": "qwen3_moe", "sliding_window": 1, "layer_types": ["sliding_attention"] * 4},
        {"model_type": "qwen3_next", "full_attention_interval": 1, "layer_types": ["linear_attention"] * 4},
    ],
)
def test_no_key_that_the_engine_does_not_read_for_that_type_lowers_an_mlx_estimate(added: dict[str, Any]) -> None:
    assert mlx(added, context=65_536).kv_bytes >= mlx(context=65_536).kv_bytes


@pytest.mark.parametrize(("lacks", "row"), [((), 8 * 256), (("num_attention_heads", "num_key_value_heads"), 4 * 256)])
def test_what_a_config_lacks_is_what_the_engine_takes_for_it(lacks: tuple[str, ...], row: int) -> None:
    """As the published config.json of Gemma 3, which has no head_dim; that of 4B has no heads either."""
    inner = {"hidden_size": 3840, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8}
    inner = {name: size for name, size in inner.items() if name not in lacks}
    found = estimate_mlx(WEIGHTS, {"model_type": "gemma3", "text_config": inner}, context=1024)
    assert found.kv_bytes == 48 * 1024 * 2 * row * 2
    indexed = {"model_type": "deepseek_v32", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert mlx(indexed, context=1024).kv_bytes == mlx({**indexed, "index_head_dim": 128}, context=1024).kv_bytes
    per_head = mlx({"model_type": "plamo2", "hidden_size_per_head": 64}, context=1024).kv_bytes
    assert mlx({"model_type": "plamo2"}, context=1024).kv_bytes == 2 * per_head
    assert mlx({"model_type": "qwen3_5"}, context=1024).state_bytes == 3 * 4 * (
        3 * (2 * 16 * 192 + 64 * 128) + 64 * 128 * 192
    )


def test_a_model_that_reads_everything_twice_keeps_a_window_more_in_each_layer() -> None:
    full = mlx(context=65_536).kv_bytes
    looped = mlx({"model_type": "iquestloopcoder"}, context=65_536)
    assert looped.kv_bytes == full + full * (64 + 2048) // 65_536


def test_a_type_that_is_not_known_is_charged_in_full_and_says_so() -> None:
    inner = {**MLX, "kv_lora_rank": 1, "layer_types": ["sliding_attention"] * 4}
    config = {"model_type": "llama9", "text_config": inner, "sliding_window": 1}
    found = estimate_mlx(WEIGHTS, config, context=1024)
    assert found.kv_bytes == 4 * 1024 * (4 * 32 * 2) * 2 and "model_type 'llama9' unknown" in found.explain()


def test_the_state_of_linear_layers_is_counted_for_each_conversation() -> None:
    config = {
        "model_type": "qwen3_next",
        "full_attention_interval": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
    }
    found = mlx(config, slots=2, context=1024)
    assert found.kv_bytes == 2 * 1024 * 128 * 2
    assert found.state_bytes == 2 * 3 * 4 * (3 * (2 * 16 + 32) + 4 * 8 * 8)


@pytest.mark.parametrize(
    ("weights", "changes", "message"),
    [
        (0, {}, "has no weights"),
        (WEIGHTS, {"num_hidden_layers": None}, "num_hidden_layers must be a whole number"),
        (WEIGHTS, {"num_hidden_layers": 1 << 20}, "between 1 and 1024"),
        (WEIGHTS, {"num_key_value_heads": "two"}, "num_key_value_heads must be a whole number, not 'two'"),
        (WEIGHTS, {"max_position_embeddings": None}, "set spec.contextSize"),
        (WEIGHTS, {"model_type": "llama", "layer_types": ["full_attention"] * 1025}, "layer_types has 1025 layers"),
    ],
)
def test_mlx_directories_that_say_too_little_are_refused(weights: int, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CannotEstimate, match=message):
        estimate_mlx(weights, {**MLX, **changes})
