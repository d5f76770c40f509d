"""What a llama-server will take of the memory, read from its command line as the engine reads it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import find_llama_server
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metal_supervisor.memory.estimate import (
    PROCESS_BYTES,
    CacheSettings,
    by_size,
    draft_settings,
    estimate,
    projector_bytes,
)
from metal_supervisor.models.metadata import Demand, Reading
from metal_supervisor.runtimes.llama_arguments import GRAMMAR
from metal_supervisor.runtimes.llama_memory import (
    ADAPTERS,
    CHECKPOINT_STEP,
    CHECKPOINTS,
    LARGEST,
    SWITCHES,
    UNSIZED,
    Demands,
    checkpoints,
    demand,
    demands,
    prompt_cache_mib,
)
from metal_supervisor.runtimes.llama_server import engine
from metal_supervisor.runtimes.runtime import Binary, Place
from metal_supervisor.spec.gguf import Header
from metal_supervisor.spec.sizes import GIB, MIB, amount
from metal_supervisor.spec.types import Endpoint, Model, Service
from tests.support.published import GEMMA_27B, QWEN3_NEXT

CURRENT = Binary("/opt/llama-server", frozenset({"--metrics", "--fit", "--cache-ram", "--no-webui", "--offline"}))
DEFAULTS = CacheSettings(checkpoints=32)
"""What the engine does without any flag, but for one slot."""
PLACE = Place("/models/m.gguf", "127.0.0.1", 18100, None, "/state")


def of_service(*extra: str, mode: str = "chat", **options: Any) -> Demands:
    model = Model("default", "phi", "m", 1, "/models/m.gguf", "gguf", None, None)
    endpoint = Endpoint("tiny", 8080, "/v1/chat/completions", "ClusterIP", None)
    asked = Service(
        "default", "tiny", "u", 1, model, "llama-server", 1, False, endpoint, mode, "normal", None, options, extra
    )
    return demands(engine(asked, CURRENT, PLACE).argv)


def test_the_fields_of_a_service_arrive() -> None:
    assert of_service() == Demands(replace(DEFAULTS, context=2048, prompt_cache_bytes=512 * MIB))
    found = of_service(
        contextSize=8192,
        parallelSlots=4,
        batchSize=1024,
        uBatchSize=256,
        flashAttention=False,
        cacheTypeK="q8_0",
        cacheTypeV="q4_0",
        cacheTypeCustomV="turbo3",
    )
    assert found.settings == CacheSettings(
        8192,
        4,
        batch=1024,
        ubatch=256,
        cache_k="q8_0",
        cache_v="turbo3",
        flash_attention=False,
        prompt_cache_bytes=512 * MIB,
        checkpoints=32,
    )


def test_extra_arguments_come_last_and_win() -> None:
    line = "-c 32768 --parallel 2 --kv-unified --swa_full -cram 100 -ctxcp 5"
    found = of_service(*line.split(), contextSize=4096)
    assert found.settings == CacheSettings(
        32768, 2, unified=True, swa_full=True, prompt_cache_bytes=100 * MIB, checkpoints=5
    )


def test_an_embedding_service_reads_no_more_at_once_than_a_microbatch() -> None:
    found = of_service(mode="embedding", uBatchSize=256)
    assert (found.settings.batch, found.settings.ubatch, found.settings.prompt_cache_bytes) == (256, 256, 0)
    assert found.settings.checkpoints == 0


@pytest.mark.parametrize(
    ("line", "changes"),
    [
        ("", {"slots": 4, "unified": True}),
        ("-np -1", {"slots": 4, "unified": True}),
        ("-np -1 -no-kvu", {"slots": 4, "unified": False}),
        ("-np 2 -c 0", {"slots": 2, "context": 0}),
        ("-np 1 -c 512 -c 1024", {"slots": 1, "context": 1024}),
        ("-np 1 --flash_attn off", {"flash_attention": False}),
        ("-np 1 -fa auto", {}),
        ("-np 1 --cache-ram -1", {"prompt_cache_bytes": 8 * GIB}),
        ("-np 1 --ctx-checkpoints 8", {"checkpoints": 8}),
        ("-np 1 --ctx_checkpoints 0", {"checkpoints": 0}),
        ("-np 1 --swa-checkpoints 3 -ctxcp -1", {"checkpoints": 0}),
        ("-np 1 --checkpoint-min-step 256", {"checkpoint_step": 256}),
        ("-np 1 -cms 0", {"checkpoint_step": 0}),
        ("-np 1 --no-mmap", {"mmap": False}),
        ("-np 1 --load-mode none", {"mmap": False}),
        ("-np 1 -lm mlock", {"mmap": False}),
        ("-np 1 -lm mmap+mlock", {}),
        ("-np 1 --direct-io", {"mmap": False}),
        ("-np 1 -c many", {}),
        ("-np 1 -c 4096k", {"context": 4096}),
        ("-np 1 -c 99999999999", {}),
        ("-np 1 -ub 0", {"ubatch": 2048}),
        ("-np 1 -ub -1", {"ubatch": LARGEST}),
        ("-np 1 -b -1", {"batch": LARGEST}),
        ("-np 1 -ub -1 --embedding", {"batch": LARGEST, "ubatch": LARGEST, "checkpoints": 0}),
        ("-np 1 -ctkd q8_0 --spec-draft-type-v f32", {"draft_k": "q8_0", "draft_v": "f32"}),
        (
            "-np 1 --override-kv a.b=int:1,a.c=float:2,a.d=bool:true --override_kv general.architecture=str:x,y",
            {"overrides": (("a.b", 1), ("general.architecture", "x"))},
        ),
        ("-np 1 -c", {}),
    ],
)
def test_a_command_line_is_read_as_the_engine_reads_it(line: str, changes: dict[str, Any]) -> None:
    assert demands(["llama-server", *line.split()]).settings == replace(DEFAULTS, **changes)


def test_files_that_come_with_the_model_are_named() -> None:
    line = "-np 1 --mmproj /p.gguf -md /d.gguf --lora /a.gguf,/b.gguf --lora-scaled /c.gguf:0.5,/d:e.gguf:1"
    found = demands(line.split())
    assert found == Demands(DEFAULTS, "/p.gguf", "/d.gguf", ("/a.gguf", "/b.gguf", "/c.gguf", "/d:e.gguf"))
    assert demands([*line.split(), "--no-mmproj"]).projector == ""


# ── demands of real files ────────────────────────────────────────────────────────────────────────


def header(weights: int = 4 * GIB, **keys: Any) -> Header:
    """A llama of 8 blocks, whose cache takes 64 KiB for each token."""
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 8,
        "llama.embedding_length": 2048,
        "llama.attention.head_count": 16,
        "llama.context_length": 8192,
        "llama.feed_forward_length": 8192,
        **keys,
    }
    return Header(metadata, weights, 4096, weights)


def files(**known: Reading | None) -> Callable[[str], Reading | None]:
    return lambda path: known[path.strip("/")]


MODEL = Reading(4 * GIB + 4096, header())
PROJECTOR = Header(
    {"clip.vision.image_size": 896, "clip.vision.patch_size": 14, "clip.vision.embedding_length": 1152},
    GIB,
    64,
    GIB,
)
DRAFT = Reading(GIB // 2, header(GIB // 2, **{"llama.block_count": 2}))
UNREADABLE = Reading(GIB, problem="GGUF version 9 is not supported; 2 and 3 are")
GONE = Reading(None, problem="it cannot be read: No such file or directory")
LINE = ["llama-server", "--parallel", "1", "--ctx-size", "4096"]


def test_a_demand_is_the_estimate_of_what_will_be_started() -> None:
    found = demand([*LINE, "--cache-ram", "100"], MODEL, files())
    expected = estimate(MODEL.header, CacheSettings(4096, prompt_cache_bytes=100 * MIB))  # type: ignore[arg-type]
    assert found == Demand(expected.total_bytes, 4 * GIB, expected.explain())
    assert "KV cache (1 x 4096 tokens) 256 MiB + " in found.text
    unmapped = demand([*LINE, "--no-mmap"], MODEL, files())
    assert unmapped is not None and unmapped.mapped_bytes == 0


def test_every_further_file_is_charged() -> None:
    alone = demand(LINE, MODEL, files())
    line = [*LINE, "--mmproj", "/p", "-md", "/d", "--lora", "/a,/b", "--control-vector-scaled", "/v:0.5"]
    known = {"p": Reading(GIB, PROJECTOR), "d": DRAFT, "v": Reading(MIB, header(MIB))}
    known |= dict.fromkeys("ab", Reading(10 * MIB, header(10 * MIB)))
    found = demand(line, MODEL, files(**known))
    assert alone is not None and found is not None and alone.bytes is not None and found.bytes is not None
    settings = CacheSettings(4096)
    draft = estimate(DRAFT.header, draft_settings(settings)).total_bytes - PROCESS_BYTES  # type: ignore[arg-type]
    added = projector_bytes(PROJECTOR, settings) + draft + 21 * MIB
    assert (found.bytes, found.mapped_bytes) == (alone.bytes + added, 4 * GIB + GIB // 2)
    for part in ("projector", "draft model", "adapters 21 MiB"):
        assert part in found.text
    assert found.bytes > alone.bytes + GIB + GIB // 2 + 21 * MIB


def test_a_file_that_is_not_read_yet_is_waited_for_and_all_are_asked_for_at_once() -> None:
    asked = []

    def reading_of(path: str) -> Reading | None:
        asked.append(path)
        return None

    assert demand([*LINE, "--mmproj", "/p", "-md", "/d", "--lora", "/a"], MODEL, reading_of) is None
    assert asked == ["/p", "/d", "/a"]


def test_what_cannot_be_read_is_charged_by_its_size_and_says_so() -> None:
    settings = CacheSettings(4096, prompt_cache_bytes=100 * MIB)
    found = demand([*LINE, "-cram", "100"], UNREADABLE, files())
    expected = by_size(GIB, settings, UNREADABLE.problem)
    assert found == Demand(expected.total_bytes, GIB, expected.explain(), UNREADABLE.problem)
    assert found.text.endswith("(by file size; GGUF version 9 is not supported; 2 and 3 are)")


def test_a_header_that_makes_no_sense_here_makes_the_whole_unknown() -> None:
    """An engine may load it all the same: this one reads no such key of a llama."""
    odd = Reading(GIB, header(**{"llama.ssm.inner_size": "x"}))
    why = "llama.ssm.inner_size must be a number from 0 to 2147483647, not 'x'"
    assert demand(LINE, odd, files()) == Demand(None, text=why)
    assert demand([*LINE, "-md", "/d"], MODEL, files(d=odd)) == Demand(None, text=f"--model-draft '/d': {why}")


@pytest.mark.parametrize(
    ("override", "mib"),
    [
        ("llama.context_length=int:131072", 8192),
        ("llama.context_length=float:131072", 512),
        ("llama.context_length=int:131072,llama.context_length=int:256", 8192),  # the first counts
        ("llama.attention.head_count_kv=int:1", 512),  # this file has none to change
        ("llama.attention.key_length=int:256", 768),
    ],
)
def test_overridden_metadata_is_charged_as_the_engine_reads_it(override: str, mib: int) -> None:
    found = demand(["-np", "1", "-c", "0", "--override-kv", override], MODEL, files())
    assert found is not None and f"tokens) {amount(mib * MIB)} + " in found.text


def test_a_draft_model_has_its_own_types_of_cache_and_the_same_overrides() -> None:
    def drafted(*flags: str) -> int:
        found = demand([*LINE, "-md", "/d", *flags], MODEL, files(d=DRAFT))
        assert found is not None and found.bytes is not None
        return found.bytes

    kv_bytes = 64 * MIB  # two blocks of 16 heads x 128, keys and values of f16, 4096 tokens
    assert drafted("-ctkd", "q8_0", "-ctvd", "q8_0") == drafted() - kv_bytes * 15 // 32
    assert drafted("--spec-draft-type-v", "f32") - drafted() >= kv_bytes // 2
    both = drafted("--override-kv", "llama.attention.key_length=int:256") - drafted()
    assert both >= (256 * MIB + kv_bytes) // 2, "of the model and of the draft model"


@pytest.mark.parametrize(("flag", "percent"), [("--mmproj", 120), ("--lora", 100), ("--model-draft", 170)])
def test_a_further_file_that_cannot_be_read_is_charged_by_its_size(flag: str, percent: int) -> None:
    alone, found = demand(LINE, MODEL, files()), demand([*LINE, flag, "/x"], MODEL, files(x=UNREADABLE))
    assert alone is not None and found is not None and alone.bytes is not None and found.bytes is not None
    assert found.bytes - alone.bytes == pytest.approx(GIB * percent / 100, rel=0.03)
    assert f"{flag} by file size; GGUF version 9" in found.text


@pytest.mark.parametrize("flag", ["--mmproj", "--lora", "-md", "--spec-draft-model", "--control-vector"])
def test_a_further_file_without_a_size_makes_the_whole_unknown_and_is_named(flag: str) -> None:
    found = demand([*LINE, flag, "/x"], MODEL, files(x=GONE))
    assert found is not None and found.bytes is None
    assert found.text.endswith("'/x': it cannot be read: No such file or directory")
    assert found.text.split()[0] in ("--mmproj", "--lora", "--model-draft")


def test_a_model_without_a_size_is_unknown() -> None:
    assert demand(LINE, GONE, files()) == Demand(None, text=GONE.problem)
    assert demand(LINE, Reading(None), files()) == Demand(None, text="the size of its model is not known")


@pytest.mark.parametrize("flag", ["-hfd", "--hf_repo_draft", "--mmproj-url", "-mmu", "--spec-draft-hf"])
def test_what_the_engine_fetches_by_itself_is_unknown_and_said_without_its_url(flag: str) -> None:
    found = demand([*LINE, flag, "https://user:pass@host/x?token=secret"], MODEL, files())
    assert found is not None and found.bytes is None
    assert flag.replace("_", "-") in found.text and "host" not in found.text


def test_flags_that_load_further_models_are_those_of_the_real_engine() -> None:
    """What its help lists with a file or a repository is known here, or known not to be a model."""
    engine = str(find_llama_server.with_full_help())
    done = subprocess.run([engine, "--help"], capture_output=True, check=False, timeout=20)
    text = (done.stdout + done.stderr).decode()
    charged = {*ADAPTERS, *GRAMMAR.flags["--mmproj"].names, *GRAMMAR.flags["--model-draft"].names}
    assert charged == {name for name, flag in GRAMMAR.flags.items() if flag.paths is not None}
    known = charged | UNSIZED | {"-m", "--model"}
    harmless = ("log", "grammar", "schema", "lookup", "ui-config", "key-file", "cert-file", "template", "hf-file")
    found = 0
    for line in re.findall(r"^(-.*?(?:FNAME|FILE|_URL| URL|<model>).*)$", text, re.M):
        flags = re.findall(r"(?<!\S)--?[a-z][a-z-]*", line)
        if not any(word in flag for flag in flags for word in harmless):
            found += 1
            assert set(flags) <= known, line
    assert found >= 10


READ = (
    "-c",
    "-np",
    "-b",
    "-ub",
    "-ctk",
    "-ctv",
    "-ctkd",
    "-ctvd",
    "-fa",
    "-cram",
    "-ctxcp",
    "-cms",
    "-lm",
    "-mm",
    "-md",
    "--override-kv",
)
ARGUMENTS = st.one_of(
    st.sampled_from(sorted({*READ, *ADAPTERS, *SWITCHES, *UNSIZED})),
    st.text(max_size=20),
    st.integers().map(str),
    st.sampled_from(["9" * 5000, "-1", "0", "f16", "iq9", "off", "/x", "/x,/y", "/x:1,/y:", ",", ":", "\udcff"]),
)
READINGS = st.sampled_from([MODEL, DRAFT, UNREADABLE, GONE, Reading(None), Reading(GIB, PROJECTOR), None])


@given(st.lists(ARGUMENTS, max_size=12), READINGS, READINGS)
def test_whatever_the_command_line_there_is_an_answer(
    argv: list[str], model: Reading | None, further: Reading | None
) -> None:
    model = model or MODEL
    found = demand(argv, model, lambda path: further)
    assert 0 <= prompt_cache_mib(argv, model) <= 2048
    assert (kept := checkpoints(argv, model)) is None or kept > 0
    if found is None:
        assert further is None
    elif found.bytes is None:
        assert found.text
    else:
        assert 0 <= found.mapped_bytes <= found.bytes
        assert found.text


@pytest.mark.parametrize(
    ("line", "model", "mib"),
    [
        ("-np 1 -c 4096", MODEL, 1024),
        ("-np 4 -c 4096", MODEL, 1024),
        ("-np 1 -c 4096 -ctk q8_0 -ctv q8_0", MODEL, 544),
        ("-np 1 -c 256", MODEL, 64),
        ("-np 1 -c 512", MODEL, 128),
        ("-np 1 -c 100000", MODEL, 2048),
        ("-np 1 -c 4096", UNREADABLE, 512),
        ("-np 1 -c 4096", GONE, 512),
        ("-np 1 -c 4096", Reading(GIB, PROJECTOR), 512),
        ("-np 1 -c 4096 --embedding", MODEL, 0),
        ("-np 1 -c 4096 --reranking", UNREADABLE, 0),
    ],
)
def test_old_prompts_are_kept_in_proportion_to_the_cache(line: str, model: Reading, mib: int) -> None:
    assert prompt_cache_mib(line.split(), model) == mib


def test_a_model_without_a_cache_keeps_no_prompts() -> None:
    encoder = header()
    metadata = {key.replace("llama", "bert"): value for key, value in encoder.metadata.items()}
    bert = replace(encoder, metadata={**metadata, "general.architecture": "bert"})
    assert prompt_cache_mib(["-np", "1", "-c", "512"], Reading(GIB, bert)) == 0


# ── checkpoints ──────────────────────────────────────────────────────────────────────────────────

GEMMA = Reading(GIB, GEMMA_27B)
NEXT = Reading(GIB, QWEN3_NEXT)
GEMMA_MIB = 416
NEXT_MIB = 36 * 4 * (3 * 8192 + 128 * 4096) / MIB  # of one: 1024 tokens x 52 blocks; 36 states


@pytest.mark.parametrize(
    ("line", "model", "kept"),
    [
        ("-np 1 -c 8192", GEMMA, 2),  # it holds 1264 MiB itself: the cache of 2048 takes that and one more
        ("-np 1 -c 8192 --cache-ram 2600", GEMMA, 3),
        ("-np 1 -c 8192 --cache-ram 9000", GEMMA, 5),  # all that there can be: one for 8192 tokens and four more
        ("-np 1 -c 8192 --cache-ram -1 -cms 0", GEMMA, 16),
        ("-np 4 -c 32768", GEMMA, 2),
        ("-np 1 -c 131072", GEMMA, 2),
        ("-np 1 -c 8192 --cache-ram 0", GEMMA, 2),
        ("-np 1 -c 8192 --swa-full", GEMMA, None),
        ("-np 1 -c 8192 --embedding", GEMMA, None),
        ("-np 1 -c 8192", NEXT, 5),
        ("-np 1 -c 65536", NEXT, 5),  # 2048 MiB of cache, less 1536 and a state, takes five of 12
        ("-np 1 -c 65536 --cache-ram 4096", NEXT, 12),
        ("-np 4 -c 32768 --swa-full", NEXT, 5),
        ("-np 1 -c 4096", MODEL, None),
        ("-np 1 -c 4096", UNREADABLE, None),
        ("-np 1 -c 4096", GONE, None),
        ("-np 1 -c 4096", Reading(GIB, header(**{"llama.block_count": 5000})), None),
    ],
)
def test_as_many_checkpoints_are_kept_as_the_prompt_cache_has_room_for(
    line: str, model: Reading, kept: int | None
) -> None:
    argv = line.split()
    if "--cache-ram" not in argv:
        argv += ["--cache-ram", str(prompt_cache_mib(argv, model))]
    assert checkpoints(argv, model) == kept


def test_a_number_of_checkpoints_is_charged_for_every_slot() -> None:
    def charged(line: str, model: Reading) -> float:
        with_them, without = (demand([*line.split(), "-ctxcp", str(kept)], model, files()) for kept in (2, 0))
        assert with_them is not None and with_them.bytes is not None and "checkpoints" in with_them.text
        assert without is not None and without.bytes is not None and "checkpoints" not in without.text
        return (with_them.bytes - without.bytes) / MIB

    assert charged("-np 1 -c 8192", GEMMA) == 2 * GEMMA_MIB
    assert charged("-np 3 -c 8192", GEMMA) == 6 * GEMMA_MIB
    assert charged("-np 1 -c 8192", NEXT) == 2 * NEXT_MIB


def test_old_prompts_are_kept_with_their_checkpoints() -> None:
    kv_mib = 12 * 2 * 2 * 256 * 2 * 4096 / MIB
    line = ["-np", "1", "-c", "4096"]
    assert prompt_cache_mib(line, NEXT) == -int(-4 * (kv_mib + 3 * NEXT_MIB) // 1)
    assert prompt_cache_mib([*line, "-ctxcp", "0"], NEXT) == -int(-4 * (kv_mib + NEXT_MIB) // 1)


def test_the_engine_s_own_numbers_are_those_of_the_real_one() -> None:
    engine = str(find_llama_server.with_full_help())
    done = subprocess.run([engine, "--help"], capture_output=True, check=False, timeout=20)
    text = (done.stdout + done.stderr).decode()
    for flag, default in (("--ctx-checkpoints", CHECKPOINTS), ("--checkpoint-min-step", CHECKPOINT_STEP)):
        found = re.search(rf"{flag}\b.*?\(default:\s+(\d+)", text, re.S)
        assert found is None or int(found[1]) == default, "a build that names it"
