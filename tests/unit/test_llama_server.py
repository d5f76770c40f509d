"""The command line of llama-server, word by word."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_supervisor.models.metadata import Reading
from metal_supervisor.runtimes import RUNTIMES, Binary, Place
from metal_supervisor.runtimes.llama_arguments import GRAMMAR
from metal_supervisor.runtimes.llama_memory import demand
from metal_supervisor.runtimes.llama_server import OPTION_FLAGS, engine, lacks, refuse
from metal_supervisor.spec.arguments import Argument, FlagVerdict, parse
from metal_supervisor.spec.gguf import Header
from metal_supervisor.spec.sources import Artifact
from metal_supervisor.spec.types import Companion, Endpoint, Model, Probe, Role, Service
from tests.support.published import GEMMA_27B, LLAMA_8B

OWNED = [name for name, flag in GRAMMAR.flags.items() if flag.verdict is FlagVerdict.OURS]
GUARDED = [name for name, flag in GRAMMAR.flags.items() if flag.verdict is FlagVerdict.REFUSED]
BARE = Binary("/opt/llama-server", frozenset())
FULL = Binary("/opt/llama-server", frozenset({"--metrics", "--fit", "--cache-ram", "--no-webui", "--offline"}))
PLACE = Place("/models/m.gguf", "127.0.0.1", 18100, None, "/state")
HEAD = ["/opt/llama-server", "--model", "/models/m.gguf", "--alias", "tiny,phi", "--host", "127.0.0.1"]
HEAD += ["--port", "18100"]
CAPACITY = ["--n-gpu-layers", "99", "--ctx-size", "2048", "--parallel", "1", "--batch-size", "2048"]


def service(
    *,
    mode: str = "chat",
    extra: tuple[str, ...] = (),
    layers: int | None = None,
    model_name: str = "phi",
    env: tuple[tuple[str, str], ...] = (),
    **options: Any,
) -> Service:
    model = Model("default", model_name, "m", 1, "/models/m.gguf", "gguf", layers, None)
    endpoint = Endpoint("tiny", 8080, "/v1/chat/completions", "ClusterIP", None)
    return Service(
        "default", "tiny", "u", 1, model, "llama-server", 1, False, endpoint, mode, "normal", None, options, extra, env
    )


def argv(asked: Service, binary: Binary = BARE, place: Place = PLACE) -> list[str]:
    return list(engine(asked, binary, place).argv)


def test_a_bare_service_gives_the_documented_command_line() -> None:
    assert argv(service()) == [*HEAD, *CAPACITY, "--flash-attn", "on", "--jinja"]


@pytest.mark.parametrize(
    ("variable", "value", "flag", "field"),
    [
        ("CTX_SIZE", "16384", "--ctx-size", {"contextSize": 512}),
        ("BATCH", "512", "--batch-size", {"batchSize": 64}),
        ("N_PARALLEL", "3", "--parallel", {"parallelSlots": 2}),
        ("N_GPU_LAYERS", "7", "--n-gpu-layers", {"layers": 9}),
        ("FLASH_ATTN", "off", "--flash-attn", {"flashAttention": True}),
        ("JINJA", "0", "--jinja", {"jinja": True}),
        ("THREADS", "3", "--threads", {}),
        ("CACHE_RAM", "77", "--cache-ram", {}),
        ("CTX_CHECKPOINTS", "5", "--ctx-checkpoints", {}),
    ],
)
def test_a_variable_wins_over_our_default_but_not_over_a_field_or_an_argument(
    variable: str, value: str, flag: str, field: dict[str, Any]
) -> None:
    env = ((f"LLAMA_ARG_{variable}", value),)
    build = replace(FULL, flags=FULL.flags | {"--ctx-checkpoints"})
    place = replace(PLACE, threads=8, model=Reading(1 << 30, header=GEMMA_27B))

    def said(asked: Service) -> list[str]:
        found = [each for each in parse(tuple(argv(asked, build, place)), GRAMMAR).items if _means(each, flag)]
        return [each.values[0] if each.values else each.written for each in found]

    alone = "--no-jinja" if variable == "JINJA" else value
    assert said(service(env=env)) == [alone]
    assert said(service(env=env, extra=(flag, "8")))[-1] == (flag if variable == "JINJA" else "8")
    assert not field or said(service(env=env, **field))[-1] != alone


def _means(item: Argument, flag: str) -> bool:
    return item.flag is not None and flag in item.flag.names


def test_no_variable_opens_an_engine_s_page_to_others() -> None:
    build = replace(FULL, flags=FULL.flags | {"--no-webui"})
    assert "--no-webui" in argv(service(env=(("LLAMA_ARG_UI", "1"),)), build, replace(PLACE, host="0.0.0.0"))


def test_what_a_variable_says_is_charged() -> None:
    reading = Reading(1 << 30, header=LLAMA_8B)
    asked = service(env=(("LLAMA_ARG_CTX_SIZE", "16384"), ("LLAMA_ARG_N_PARALLEL", "2")))
    found = demand(argv(asked, place=replace(PLACE, model=reading)), reading, lambda _path: None)
    assert found is not None and "KV cache (2 x 8192 tokens)" in found.text


def test_a_current_build_gets_the_housekeeping_flags_it_names() -> None:
    housekeeping = ["--metrics", "--fit", "off", "--cache-ram", "512", "--offline"]
    assert argv(service(), FULL) == [*HEAD, *CAPACITY, "--flash-attn", "on", "--jinja", *housekeeping]


def test_its_own_chat_is_for_this_mac_alone() -> None:
    assert "--no-webui" not in argv(service(), FULL)
    assert "--no-webui" not in argv(service(), FULL, replace(PLACE, host="::1"))
    assert all("--no-webui" in argv(service(), FULL, replace(PLACE, host=each)) for each in ("0.0.0.0", "10.0.0.5"))


def test_checkpoints_are_bounded_only_where_the_engine_makes_any() -> None:
    knows = Binary("/x", FULL.flags | {"--ctx-checkpoints"})

    def given(asked: Service, model: Reading, binary: Binary = knows) -> list[str]:
        line = argv(asked, binary, replace(PLACE, model=model))
        return [line[index + 1] for index, each in enumerate(line) if each == "--ctx-checkpoints"]

    gemma = Reading(1 << 30, GEMMA_27B)
    assert given(service(contextSize=8192), gemma) == ["2"]
    assert given(service(contextSize=8192, extra=("--cache-ram", "9000")), gemma) == ["5"]
    assert given(service(contextSize=8192), gemma, FULL) == [], "it does not know the flag"
    assert given(service(contextSize=8192, mode="embedding"), gemma) == []
    assert given(service(contextSize=8192), Reading(1 << 30, LLAMA_8B)) == []
    assert given(service(contextSize=8192), Reading(1 << 30)) == [], "its header is not read"
    for flag in ("-ctxcp", "--ctx_checkpoints", "--swa-checkpoints"):
        line = argv(service(extra=(flag, "7")), knows, replace(PLACE, model=gemma))
        assert line[-2:] == [flag, "7"] and "--ctx-checkpoints" not in line


def test_every_option_becomes_its_flag() -> None:
    asked = service(
        layers=20,
        contextSize=8192,
        parallelSlots=4,
        batchSize=1024,
        uBatchSize=256,
        flashAttention=False,
        cacheTypeK="q8_0",
        cacheTypeV="q4_0",
        moeCPUOffload=True,
        moeCPULayers=7,
        noKvOffload=True,
        noWarmup=True,
        jinja=True,
        reasoningBudget=0,
        reasoningBudgetMessage="enough; now\nanswer",
        tensorOverrides=("a=CPU", "b=CPU"),
        metadataOverrides=("k=int:1",),
        ropeScaling={"type": "yarn", "factor": "2.5", "originalContext": 4096},
    )
    assert argv(asked, place=Place("/models/m.gguf", "127.0.0.1", 18100, 8, "/state")) == [
        *HEAD,
        "--n-gpu-layers",
        "20",
        "--ctx-size",
        "8192",
        "--parallel",
        "4",
        "--batch-size",
        "1024",
        "--ubatch-size",
        "256",
        "--cache-type-k",
        "q8_0",
        "--cache-type-v",
        "q4_0",
        "--threads",
        "8",
        "--flash-attn",
        "off",
        "--jinja",
        "--cpu-moe",
        "--no-kv-offload",
        "--no-warmup",
        "--n-cpu-moe",
        "7",
        "--rope-scaling",
        "yarn",
        "--rope-scale",
        "2.5",
        "--yarn-orig-ctx",
        "4096",
        "--reasoning-budget",
        "0",
        "--reasoning-budget-message",
        "enough; now\nanswer",
        "--override-tensor",
        "a=CPU",
        "--override-tensor",
        "b=CPU",
        "--override-kv",
        "k=int:1",
    ]


def test_jinja_false_is_said_because_the_engine_defaults_to_it() -> None:
    line = argv(service(jinja=False), Binary("/opt/llama-server", frozenset({"--jinja", "--no-jinja"})))
    assert "--no-jinja" in line and "--jinja" not in line


def test_rope_scaling_needs_no_more_than_its_type() -> None:
    line = argv(service(ropeScaling={"type": "linear", "factor": None, "originalContext": None}))
    assert line[line.index("--rope-scaling") + 1] == "linear"
    assert "--rope-scale" not in line and "--yarn-orig-ctx" not in line


def test_a_custom_cache_type_beats_the_plain_one() -> None:
    line = argv(service(cacheTypeK="q8_0", cacheTypeCustomK="turbo4", cacheTypeCustomV="turbo3"))
    assert line[line.index("--cache-type-k") + 1] == "turbo4"
    assert line[line.index("--cache-type-v") + 1] == "turbo3"


@pytest.mark.parametrize(("layers", "expected"), [(None, "99"), (0, "99"), (-1, "-1"), (12, "12")])
def test_unset_and_zero_layers_mean_all_of_them(layers: int | None, expected: str) -> None:
    line = argv(service(layers=layers))
    assert line[line.index("--n-gpu-layers") + 1] == expected


@pytest.mark.parametrize(
    ("mode", "flags"),
    [
        ("chat", []),
        ("embedding", ["--embedding", "--pooling", "last"]),
        ("rerank", ["--reranking", "--embedding", "--pooling", "rank"]),
    ],
)
def test_the_mode_gives_its_flags_and_only_chat_keeps_a_prompt_cache(mode: str, flags: list[str]) -> None:
    line = argv(service(mode=mode), FULL)
    after = line.index("--jinja") + 1
    assert line[after : line.index("--metrics")] == flags
    assert line[line.index("--cache-ram") + 1] == ("512" if mode == "chat" else "0")


@pytest.mark.parametrize(
    ("told", "by_flag"), [({}, True), ({"bert.pooling_type": 0}, True), ({"bert.pooling_type": 1}, False)]
)
def test_a_header_may_say_how_tokens_become_one_vector(told: dict[str, Any], by_flag: bool) -> None:
    """The last token of a BERT means nothing."""
    header = Header({"general.architecture": "bert", **told}, 1 << 20, 0, 1 << 20)
    line = argv(service(mode="embedding"), place=replace(PLACE, model=Reading(1 << 20, header=header)))
    assert ("--pooling" in line, "--embedding" in line) == (by_flag, True)


@pytest.mark.parametrize(
    ("mode", "pooling", "spec", "batches"),
    [
        ("embedding", 1, {"contextSize": 8192}, ("4096", "4096")),  # as long as it was trained for
        ("embedding", 1, {"contextSize": 8192, "parallelSlots": 4}, ("2048", "2048")),
        ("embedding", 1, {"contextSize": 1024}, ("2048", "1024")),
        ("embedding", 1, {}, ("2048", "2048")),
        ("embedding", 1, {"contextSize": 8192, "batchSize": 512}, ("512", "")),
        ("embedding", 1, {"contextSize": 8192, "uBatchSize": 64}, ("2048", "64")),
        ("embedding", 1, {"contextSize": 8192, "extra": ("--pooling", "last")}, ("2048", "")),
        ("embedding", None, {"contextSize": 8192, "extra": ("--pooling", "cls")}, ("4096", "4096")),
        ("embedding", 3, {"contextSize": 8192}, ("2048", "")),
        ("rerank", None, {"contextSize": 8192}, ("4096", "4096")),
        ("chat", 1, {"contextSize": 8192}, ("2048", "")),
    ],
)
def test_a_text_that_the_engine_cannot_divide_is_taken_in_one_batch(
    mode: str, pooling: int | None, spec: dict[str, Any], batches: tuple[str, str]
) -> None:
    """Else it refuses each that is longer than 512 tokens, whatever the context."""
    told = {} if pooling is None else {"bert.pooling_type": pooling}
    sizes = {"context_length": 4096, "block_count": 2, "embedding_length": 64, "attention.head_count": 4}
    metadata = {"general.architecture": "bert", **{f"bert.{name}": size for name, size in sizes.items()}, **told}
    reading = Reading(1 << 20, header=Header(metadata, 1 << 20, 0, 1 << 20))
    line = argv(service(mode=mode, **spec), place=replace(PLACE, model=reading))
    given = [line[line.index(flag) + 1] if flag in line else "" for flag in ("--batch-size", "--ubatch-size")]
    assert tuple(given) == batches


def test_mode_flags_that_the_user_spelled_are_not_given_twice() -> None:
    extra = ("--rerank", "--embeddings", "--pooling=cls")
    line = argv(service(mode="rerank", extra=extra))
    assert not {"--reranking", "--embedding", "--pooling"} & set(line)
    assert tuple(line[-3:]) == extra


def test_the_name_of_the_service_is_served_and_proves_who_answers() -> None:
    made = engine(service(model_name="tiny"), BARE, PLACE)
    assert made.argv[made.argv.index("--alias") + 1] == "tiny"
    path, body = made.probe.first_path, made.probe.first_body
    assert made.probe == Probe("/health", '"status"', "/v1/models", "tiny", first_path=path, first_body=body)
    assert made.cwd == "/state"


@pytest.mark.parametrize(
    ("mode", "path", "rest"),
    [
        ("chat", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
        ("embedding", "/v1/embeddings", {"input": "hi"}),
        ("rerank", "/v1/rerank", {"query": "hi", "documents": ["hi"]}),
    ],
)
def test_its_first_request_is_the_smallest_of_its_mode(mode: str, path: str, rest: dict[str, object]) -> None:
    made = engine(service(mode=mode), BARE, PLACE).probe
    assert (made.first_path, json.loads(made.first_body)) == (path, {"model": "tiny", **rest})


@pytest.mark.parametrize("extra", [("--pooling", "none"), ("--pooling", "mean", "--pooling", "none")])
def test_embeddings_token_by_token_are_not_asked_for_where_they_are_refused(extra: tuple[str, ...]) -> None:
    assert not engine(service(mode="embedding", extra=extra), BARE, PLACE).probe.first_path
    pooled = service(mode="embedding", extra=("--pooling", "none", "--pooling", "mean"))
    assert engine(pooled, BARE, PLACE).probe.first_path


SLEEPY = Binary("/x", frozenset({"--sleep-idle-seconds"}))


def test_an_idle_ttl_makes_the_engine_sleep_and_says_where_to_ask() -> None:
    made = engine(service(idleTtlS=900), SLEEPY, PLACE)
    assert made.argv[-2:] == ("--sleep-idle-seconds", "900")
    assert made.probe.asleep_path == "/props"
    assert engine(service(), SLEEPY, PLACE) == engine(service(), replace(BARE, path="/x"), PLACE)


def test_a_build_that_cannot_sleep_is_not_told_to() -> None:
    assert engine(service(idleTtlS=900), BARE, PLACE) == engine(service(), BARE, PLACE)


@pytest.mark.parametrize("extra", [("--sleep-idle-seconds", "60"), ("--sleep-idle-seconds=60",)])
def test_a_user_who_makes_it_sleep_by_arguments_has_it_probed_the_same(extra: tuple[str, ...]) -> None:
    for asked in (service(extra=extra), service(extra=extra, idleTtlS=900)):
        made = engine(asked, SLEEPY, PLACE)
        assert made.argv[-len(extra) :] == extra and "900" not in made.argv
        assert made.probe.asleep_path == "/props"


def test_the_environment_is_the_users_alone() -> None:
    assert engine(service(env=(("A", "b"),)), BARE, PLACE).env == (("A", "b"),)


@pytest.mark.parametrize("flag", sorted(FULL.flags))
def test_an_optional_flag_is_given_only_to_a_binary_that_names_it(flag: str) -> None:
    assert flag in argv(service(), Binary("/x", frozenset({flag})), replace(PLACE, host="10.0.0.5"))
    assert flag not in argv(service(), Binary("/x", FULL.flags - {flag}))


@pytest.mark.parametrize("flag", sorted(FULL.flags))
def test_an_optional_flag_the_user_gave_is_left_to_the_user(flag: str) -> None:
    spelled = flag.replace("-", "_").replace("__", "--", 1)
    for extra in ((flag,), (f"{flag}=x",), (spelled,)):
        line = argv(service(extra=extra), FULL)
        assert [part for part in line if part.replace("_", "-").partition("=")[0] == flag] == [
            part.replace("_", "-") if part == flag else part for part in extra
        ]


@pytest.mark.parametrize("extra", [("-t", "4"), ("--threads", "4"), ("--threads=4",)])
def test_threads_of_the_user_replace_ours(extra: tuple[str, ...]) -> None:
    place = Place("/models/m.gguf", "127.0.0.1", 18100, 8, "/state")
    assert "8" not in argv(service(extra=extra), place=place)


@given(st.lists(st.text(), max_size=5))
@settings(max_examples=50, database=None, derandomize=True)
def test_extra_arguments_come_last_and_byte_for_byte(extra: list[str]) -> None:
    said = [part for text in extra for part in ("--chat-template", text)]
    asked = service(extra=("--verbose", *said))
    assert refuse(asked) is None
    assert argv(asked, FULL)[-len(said) - 1 :] == ["--verbose", *said]


def spellings(flag: str) -> list[str]:
    plain = [flag, f"{flag}=1"]
    if flag.startswith("--") and "-" in flag[2:]:
        plain += ["--" + flag[2:].replace("-", "_"), "--" + flag[2:].replace("-", "_") + "=x"]
    return plain


@pytest.mark.parametrize("argument", [each for flag in sorted(OWNED) for each in spellings(flag)])
def test_an_owned_flag_is_refused_in_every_spelling(argument: str) -> None:
    found = refuse(service(extra=("--verbose", argument)))
    assert found is not None
    assert found[0] == "InvalidSpec" and "spec.extraArgs[1]" in found[1]


@pytest.mark.parametrize(
    "flag",
    [
        "--port",
        "--host",
        "--model",
        "-m",
        "--alias",
        "-a",
        "--api-prefix",
        "--api-key",
        "--reuse-port",
        "-hf",
        "-hfr",
        "--hf-repo",
        "--hf-file",
        "-hff",
        "--model-url",
        "-mu",
        "--docker-repo",
        "-dr",
        "--hf-token",
        "-hft",
    ],
)
def test_what_would_move_or_expose_the_server_is_owned(flag: str) -> None:
    assert refuse(service(extra=(flag, "x"))) is not None


@pytest.mark.parametrize(
    "flag",
    [
        # These presets set a model and a port of their own; the TLS pair makes the health probe fail for ever.
        "--fim-qwen-1.5b-default",
        "--fim-qwen-7b-spec",
        "--gpt-oss-20b-default",
        "--embd-gemma-default",
        "--vision-gemma-4b-default",
        "--ssl-key-file",
        "--ssl-cert-file",
    ],
)
def test_flags_that_bring_their_own_model_port_or_scheme_are_owned_too(flag: str) -> None:
    assert refuse(service(extra=(flag,))) is not None


@pytest.mark.parametrize("argument", [each for flag in sorted(GUARDED) for each in spellings(flag)])
def test_a_guarded_flag_is_refused_until_whoever_runs_the_mac_allows_it(argument: str) -> None:
    found = refuse(service(extra=("--verbose", argument)))
    assert found is not None and found[0] == "InvalidSpec"
    flag = found[1].split()[1]
    assert f"spec.extraArgs[1] {flag}" in found[1] and f"--allow-extra-args={flag}" in found[1]
    opened = replace(service(extra=("--verbose", flag, *("x" for _ in GRAMMAR.flags[flag].values))))
    assert refuse(replace(opened, allowed_args=frozenset({flag}))) is None


def test_the_setting_opens_nothing_that_is_ours() -> None:
    asked = replace(service(extra=("--port", "1")), allowed_args=frozenset({"--port", "-m", "--fim-qwen-7b-spec"}))
    assert refuse(asked) is not None
    assert refuse(replace(asked, extra_args=("--fim-qwen-7b-spec",))) is not None


def test_speculation_without_a_model_is_no_preset() -> None:
    assert refuse(service(extra=("--spec-default",))) is None


# ── what is loaded besides ───────────────────────────────────────────────────────────────────────


def speculating(said: dict[str, Any], layers: int | None = None) -> tuple[Service, Place]:
    draft = Artifact("/models/d.gguf")
    companion = Companion(Role.DRAFT, "spec.speculativeDecoding.draftModelRef", draft, "d/1", layers)
    asked = replace(service(speculativeDecoding=said), companions=(companion,))
    return asked, replace(PLACE, further={Role.DRAFT: "/models/d.gguf"})


def test_a_draft_model_is_given_with_its_kind_because_alone_it_would_only_be_loaded() -> None:
    asked, place = speculating({"type": "draft-simple", "nDraftMax": 5, "pMin": 0.25, "draftModelRef": "d"})
    assert argv(asked, place=place)[-8:] == [
        "--spec-type",
        "draft-simple",
        "--model-draft",
        "/models/d.gguf",
        "--spec-draft-n-max",
        "5",
        "--spec-draft-p-min",
        "0.25",
    ]
    asked, place = speculating({"type": "draft-simple"}, layers=7)
    assert argv(asked, place=place)[-2:] == ["--n-gpu-layers-draft", "7"]


@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        ("draft-mtp", "--spec-draft-n-max"),
        ("ngram-mod", "--spec-ngram-mod-n-max"),
        ("ngram-simple", "--spec-ngram-simple-size-m"),
        ("ngram-map-k", "--spec-ngram-map-k-size-m"),
        ("ngram-map-k4v", "--spec-ngram-map-k4v-size-m"),
    ],
)
def test_the_bound_of_a_proposal_has_a_flag_of_its_own_for_each_kind(kind: str, flag: str) -> None:
    said = {"type": kind, "nDraftMax": 9}
    assert argv(service(speculativeDecoding=said))[-4:] == ["--spec-type", kind, flag, "9"]
    assert refuse(service(speculativeDecoding=said)) is None


def test_a_bound_that_an_engine_does_not_know_is_refused_by_name() -> None:
    found = refused_by(service(speculativeDecoding={"type": "ngram-cache", "nDraftMax": 9}))
    assert "spec.speculativeDecoding.nDraftMax means nothing to ngram-cache" in found


def refused_by(asked: Service) -> str:
    found = refuse(asked)
    assert found is not None and found[0] == "UnsupportedField"
    return found[1]


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"type": "draft-dspark"}, ".type: this llama-server knows none, draft-simple, ngram-mod, not 'draft-dspark'"),
        ({"type": "ngram-mod", "nDraftMax": 2}, ".nDraftMax: this llama-server has no --spec-ngram-mod-n-max"),
        ({"type": "draft-simple", "pMin": 0.5}, ".pMin: this llama-server has no --spec-draft-p-min"),
    ],
)
def test_speculation_that_this_build_does_not_know_is_refused_by_name(said: dict[str, Any], named: str) -> None:
    text = "--spec-type none,draft-simple,ngram-mod\n     kinds\n--spec-draft-n-max N    most\n"
    binary = Binary("/x", frozenset(), help=HELP + text)
    found = lacks(service(speculativeDecoding=said), binary)
    assert found is not None and found[0] == "UnsupportedField" and f"spec.speculativeDecoding{named}" in found[1]
    assert lacks(service(speculativeDecoding={"type": "draft-simple", "nDraftMax": 3}), binary) is None
    found = lacks(service(speculativeDecoding={"type": "draft-simple"}), KNOWS_LITTLE)
    assert found is not None and "has no --spec-type" in found[1]


def test_a_projector_is_given_where_it_is() -> None:
    line = argv(service(), place=replace(PLACE, further={Role.PROJECTOR: "/models/p.gguf"}))
    assert line[-2:] == ["--mmproj", "/models/p.gguf"]


HELP = """\
-c,    --ctx-size N                     size of the context
-t,    --threads N                      threads
-fa,   --flash-attn [on|off|auto]       attention
-ctk,  --cache-type-k TYPE              type of K
                                        allowed values: f16, q8_0
-np,   --parallel                       slots
"""
KNOWS_LITTLE = Binary("/x", frozenset({"--ctx-size"}), help=HELP)
MODES = Binary("/x", frozenset({"--load-mode"}), help=HELP + "-lm,   --load-mode MODE                 how\n")
SWITCHES = Binary("/x", frozenset({"--mlock"}), help=HELP + "--mlock      lock\n--mmap, --no-mmap      map\n")


@pytest.mark.parametrize(
    ("extra", "reason", "named"),
    [
        (("-t", "1", "--no-such", "2"), "UnsupportedField", "spec.extraArgs[2] '--no-such' is not known"),
        (("--tmp", "1"), "UnsupportedField", "'--tmp' is not known to llama-server (did you mean --temp?); remove it"),
        (
            ("--temp 0.2",),
            "InvalidSpec",
            """[0] '--temp 0.2' is one item; split it: spec.extraArgs: ["--temp", "0.2"]""",
        ),
        (
            ("--mlock", "--jinja --flash-attn on --cache-type-k=q8_0", "-t 4"),
            "InvalidSpec",
            """["--mlock", "--jinja", "--flash-attn", "on", "--cache-type-k", "q8_0", "-t", "4"]""",
        ),
        (
            ("--jinja --chat-template-kwargs '{\"a\": 1}'",),
            "InvalidSpec",
            """["--jinja", "--chat-template-kwargs", "{\\"a\\": 1}"]""",
        ),
        (
            ('--chat-template-kwargs {"a": 1}', "-t", "4"),
            "InvalidSpec",
            """["--chat-template-kwargs", "{\\"a\\": 1}", "-t", "4"]""",
        ),
        (("--jinja --temp '0.2",), "InvalidSpec", """["--jinja", "--temp", "'0.2"]"""),
        (("--threads=4",), "InvalidSpec", "write --threads and its value as two items"),
        (("-t", "1", "2"), "InvalidSpec", "spec.extraArgs[2] '2' is neither a flag nor the value of one"),
        (("--threads",), "InvalidSpec", "spec.extraArgs[0] '--threads' needs a value"),
        (("-t", "some"), "InvalidSpec", "spec.extraArgs[1]: -t takes a whole number from -1 to 1024, not 'some'"),
        (("",), "InvalidSpec", "spec.extraArgs[0] ''"),
    ],
)
def test_an_argument_at_which_any_build_would_end_is_refused_by_name(
    extra: tuple[str, ...], reason: str, named: str
) -> None:
    found = refuse(service(extra=extra))
    assert found is not None and found[0] == reason and named in found[1]


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (("--verbose",), "spec.extraArgs[0] '--verbose' is not known to this"),
        (("--load-mode", "mlock"), "spec.extraArgs[0] '--load-mode' is not known to this"),
        (("--mlock",), "spec.extraArgs[0] '--mlock' is not known to this"),
        (("-np", "2"), "spec.extraArgs[0] '-np' takes 0 values in this"),
    ],
)
def test_an_argument_at_which_this_build_would_end_is_refused_by_name(extra: tuple[str, ...], named: str) -> None:
    found = lacks(service(extra=extra), KNOWS_LITTLE)
    assert found is not None and found[0] == "UnsupportedField" and named in found[1]
    assert lacks(service(extra=extra), BARE) is None, "nothing is known of that one"


def test_values_that_look_like_flags_and_other_spellings_are_fine() -> None:
    assert lacks(service(extra=("--flash_attn", "--no-such", "-t", "-1", "-c", "5")), KNOWS_LITTLE) is None


def test_how_the_model_is_loaded_is_said_as_the_build_wants_it() -> None:
    assert lacks(service(extra=("--mlock",)), MODES) is None
    assert argv(service(extra=("--mlock", "-t", "1")), MODES)[-4:] == ["--load-mode", "mmap+mlock", "-t", "1"]
    assert argv(service(extra=("--mlock",)), SWITCHES)[-2:] == ["--jinja", "--mlock"]
    found = lacks(service(extra=("-lm", "dio")), SWITCHES)
    assert found is not None and "spec.extraArgs[0] '-lm' is not known to this" in found[1]
    for binary in (MODES, SWITCHES):
        assert not {"--mlock", "--load-mode"} & set(argv(service(), binary)), "nothing is locked unless it is asked for"


@pytest.mark.parametrize("name", sorted(OPTION_FLAGS))
def test_an_option_without_a_flag_in_this_build_is_refused_by_name(name: str) -> None:
    values = {"ropeScaling": {"type": "yarn"}, "uBatchSize": 1, "moeCPULayers": 1, "reasoningBudget": 0}
    switches = dict.fromkeys(("moeCPUOffload", "noKvOffload", "noWarmup"), True)
    options: dict[str, Any] = {name: {**values, **switches}.get(name, "q8_0")}
    line = f"-x,    {OPTION_FLAGS[name]} N      it\n"
    assert lacks(service(**options), Binary("/x", frozenset(), help=f"-c,    --ctx-size N      size\n{line}")) is None
    if name not in ("cacheTypeK", "cacheTypeCustomK"):
        found = lacks(service(**options), KNOWS_LITTLE)
        assert found is not None and found[0] == "UnsupportedField" and f"spec.{name}: " in found[1]
    if name in switches:
        assert lacks(service(**{name: False}), KNOWS_LITTLE) is None


def test_a_build_that_cannot_do_without_jinja_says_so() -> None:
    found = lacks(service(jinja=False), KNOWS_LITTLE)
    assert found is not None and found[0] == "UnsupportedField" and "spec.jinja: " in found[1]
    assert lacks(service(jinja=True), KNOWS_LITTLE) is None


def test_a_cache_type_of_some_fork_is_refused_where_the_build_lists_others() -> None:
    assert lacks(service(cacheTypeCustomK="q8_0"), KNOWS_LITTLE) is None
    found = lacks(service(cacheTypeCustomK="turbo4"), KNOWS_LITTLE)
    assert found is not None and "spec.cacheTypeCustomK" in found[1] and "f16, q8_0" in found[1]


@pytest.mark.parametrize("extra", [("--verbose",), ("--threads", "1"), ("-c", "1"), ("--no_slots",), ("--temp", "-.5")])
def test_other_flags_are_the_users_business(extra: tuple[str, ...]) -> None:
    assert refuse(service(extra=extra)) is None


@pytest.mark.parametrize("flag", ["--porthole", "-ma", "--hosts", "--verbos", "--thread"])
def test_what_is_in_no_table_is_refused_with_the_setting_that_opens_it(flag: str) -> None:
    found = refuse(service(extra=(flag, "1")))
    assert found is not None and found[0] == "UnsupportedField"
    assert f"spec.extraArgs[0] {flag!r} is not known" in found[1] and f"--allow-extra-args={flag}" in found[1]
    assert refuse(replace(service(extra=(flag, "1")), allowed_args=frozenset({flag}))) is None


def test_the_advice_on_a_refused_flag_can_be_copied_into_the_setting() -> None:
    found = refuse(service(extra=("--porthole 1",)))
    assert found is not None and found[1].endswith(" can allow it with its setting --allow-extra-args=--porthole")
    found = refuse(replace(service(extra=("--porthole 1",)), allowed_args=frozenset({"--porthole"})))
    assert found is not None and """split it: spec.extraArgs: ["--porthole", "1"]""" in found[1]


@pytest.mark.parametrize("flag", ["-", "--", "--a'b", "-1", "--" + "x" * 90])
def test_no_setting_is_named_that_could_not_hold_the_flag(flag: str) -> None:
    found = refuse(service(extra=(flag,)))
    assert found is not None and found[0] == "UnsupportedField" and found[1].endswith("; remove it")


def test_longrope_and_unknown_cache_types_are_refused_by_name() -> None:
    longrope = refuse(service(ropeScaling={"type": "longrope", "factor": None, "originalContext": None}))
    assert longrope is not None and "spec.ropeScaling.type" in longrope[1]
    cache = refuse(service(cacheTypeV="q3_k"))
    assert cache is not None and "spec.cacheTypeV" in cache[1] and "q8_0" in cache[1]
    assert refuse(service(cacheTypeK="q8_0", ropeScaling={"type": "yarn"})) is None


def test_the_table_of_runtimes_holds_llama_server_for_gguf() -> None:
    row = RUNTIMES["llama-server"]
    assert row.formats == frozenset({"gguf"})
    assert row.refuse is refuse and row.engine is engine
