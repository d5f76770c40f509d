"""The command line of vllm-swift, word by word, what a user may add to it, and what it is charged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from metal_supervisor.models.metadata import Demand, Reading
from metal_supervisor.runtimes import RUNTIMES, Binary, Place
from metal_supervisor.runtimes.mlx_arguments import VLLM
from metal_supervisor.runtimes.vllm_swift import FIELDS, PYTHON_BYTES, demand, engine, refuse
from metal_supervisor.spec.arguments import FlagVerdict
from metal_supervisor.spec.sizes import GIB
from metal_supervisor.spec.types import Endpoint, Model, Probe, Service

BINARY = Binary("/opt/vllm-swift", frozenset({"--max-model-len"}), "vllm-swift")
CONFIG = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "model_type": "llama",
    "max_position_embeddings": 4096,
}
READ = Reading(GIB, config=CONFIG)
PLACE = Place("/models/m", "127.0.0.1", 18100, 8, "/state", READ)
HEAD = ["/opt/vllm-swift", "serve", "/models/m", "--host", "127.0.0.1", "--port", "18100"]
NAMES = ["--served-model-name", "tiny", "phi"]
TOKEN = 4 * 2 * 2 * 32 * 2
"""Bytes of one token in the cache."""
TOKEN_IN_BYTES = 4 * (2 * 2 * 32 + 2 * 4)
"""The same with a byte for each number, and four for each 64 of them."""


def service(
    *, mode: str = "chat", extra: tuple[str, ...] = (), env: tuple[tuple[str, str], ...] = (), **options: Any
) -> Service:
    model = Model("default", "phi", "m", 1, "/models/m", "mlx", None, None)
    endpoint = Endpoint("tiny", 8080, "/v1/chat/completions", "ClusterIP", None)
    return Service(
        "default", "tiny", "u", 1, model, "vllm-swift", 1, False, endpoint, mode, "normal", None, options, extra, env
    )


def argv(asked: Service, place: Place = PLACE) -> list[str]:
    return list(engine(asked, BINARY, place).argv)


def reason(asked: Service) -> tuple[str, str]:
    found = refuse(asked)
    assert found is not None
    return found


def test_it_is_held_to_one_conversation_of_the_models_length() -> None:
    assert argv(service()) == [*HEAD, *NAMES, "--max-num-seqs", "1", "--max-model-len", "4096"]


def test_fields_become_flags_and_the_users_come_last() -> None:
    extra = ("--gpu-memory-utilization", "0.5")
    made = argv(service(contextSize=512, parallelSlots=3, cacheTypeCustomK="turbo4v2", extra=extra))
    compressed = '{"kv_bits":4,"kv_scheme":"turbo4v2"}'
    limits = ["--max-num-seqs", "3", "--max-model-len", "512"]
    assert made == [*HEAD, *NAMES, *limits, "--additional-config", compressed, *extra]


@pytest.mark.parametrize(("scheme", "bits"), [("turbo4", 4), ("turbo3", 3), ("turbo2", 2)])
def test_each_scheme_has_its_bits(scheme: str, bits: int) -> None:
    assert f'{{"kv_bits":{bits},"kv_scheme":"{scheme}"}}' in argv(service(cacheTypeCustomK=scheme))


def test_nothing_is_fetched_or_told_to_anybody() -> None:
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": "/state/hub", "VLLM_NO_USAGE_STATS": "1"}
    made = engine(service(env=(("MLX_METAL_DEBUG", "1"),)), BINARY, PLACE)
    assert dict(made.env) == {**offline, "MLX_METAL_DEBUG": "1"}
    assert made.probe == Probe("/health", "", "/v1/models", "tiny", "")


def test_a_key_goes_through_the_environment_and_closes_the_list_of_models() -> None:
    asked = service(env=(("VLLM_API_KEY", "secret"),))
    made = engine(asked, BINARY, PLACE)
    assert refuse(asked) is None and "secret" not in " ".join(made.argv)
    assert dict(made.env)["VLLM_API_KEY"] == "secret" and made.probe.identity == ""


OWNED = [name for name, flag in VLLM.grammar.flags.items() if flag.verdict is not FlagVerdict.VALUE]


@pytest.mark.parametrize("argument", OWNED)
def test_what_is_ours_is_refused_by_name(argument: str) -> None:
    why, text = reason(service(extra=("--seed", "1", argument, "x")))
    assert why == "InvalidSpec" and text.startswith(f"spec.extraArgs[2] {argument} is not yours to set: ")


@pytest.mark.parametrize(
    "argument",
    [
        "--por=1",
        "--port=1",
        "--hos",
        "--trust",
        "--trust_remote_code",
        "--served",
        "--data",
        "--data_parallel_size=2",
        "--max_model_len=8",
        "--ssl",
        "--worker-cls=x",
        "--tool-parser-plugin",
        "--speculative-config",
    ],
)
def test_other_spellings_of_it_are_refused_too(argument: str) -> None:
    why, text = reason(service(extra=(argument, "1")))
    plain = argument.partition("=")[0].replace("_", "-")
    assert why == "InvalidSpec" and text.startswith(f"spec.extraArgs[0] {plain} is not yours")


@pytest.mark.parametrize(
    "argument",
    [
        "--compilation_config.level=3",
        "--additional-config.kv_bits=4",
        "-O3",
        "-tp",
        "-dp=2",
        "-asc",
        "--",
        "-",
        "--X",
        "--data-parallel-any",
        "--longctx-any",
        "--kv-transfer-any",
        "--some-new-flag",
    ],
)
def test_what_is_in_no_table_is_refused(argument: str) -> None:
    why, text = reason(service(extra=(argument, "1")))
    assert why == "UnsupportedField" and text.startswith(f"spec.extraArgs[0] {argument!r} is not known")


@pytest.mark.parametrize(
    ("extra", "index"),
    [
        (("other-model",), 0),
        (("--seed", "1", "2"), 2),
        (("--seed=1", "2"), 1),
        (("--hf-overrides", '{"a": 1}'), 0),
        (("--hf-overrides={}",), 0),
        (("--seed", " [1]"), 1),
    ],
)
def test_words_without_a_flag_and_settings_as_json_are_refused(extra: tuple[str, ...], index: int) -> None:
    why, text = reason(service(extra=extra))
    assert why == "InvalidSpec" and text.startswith(f"spec.extraArgs[{index}]")


def test_other_extra_arguments_are_the_users() -> None:
    extra = (
        "--gpu-memory-utilization",
        "0.5",
        "--enable-auto-tool-choice",
        "--tool-call-parser",
        "hermes",
        "--seed=-1",
        "--reasoning_parser",
        "qwen3",
        "--default-chat-template-kwargs",
        '{"enable_thinking": false}',
        "--seed",
        "-1",
        "--no-enable-log-requests",
    )
    assert refuse(service(extra=extra)) is None


@pytest.mark.parametrize("name", FIELDS)
def test_what_means_nothing_for_it_is_refused_by_name(name: str) -> None:
    neutral, _ = FIELDS[name]
    said: Any = not neutral[0] if neutral and isinstance(neutral[0], bool) else "q8_0"
    why, text = reason(service(**{name: said}))
    assert why == "UnsupportedField"
    assert ("idle-ttl" if name == "idleTtlS" else f"spec.{name} ") in text
    assert " has no meaning for vllm-swift: " in text
    assert all(refuse(service(**{name: value})) is None for value in neutral)


@pytest.mark.parametrize(
    "asked",
    [
        {"cacheTypeCustomK": "q5_0"},
        {"cacheTypeCustomV": "turbo4"},
        {"mode": "embedding"},
        {"cacheTypeCustomK": "turbo4", "cacheTypeCustomV": "turbo3"},
    ],
)
def test_other_caches_and_modes_are_refused(asked: dict[str, Any]) -> None:
    assert reason(service(**asked))[0] == "UnsupportedField"
    assert refuse(service(cacheTypeCustomK="turbo4", cacheTypeCustomV="turbo4")) is None


def test_it_is_charged_for_every_slot_in_full() -> None:
    def charged(**options: Any) -> Demand:
        return demand(service(), argv(service(contextSize=512, **options)), READ, lambda _: None)

    one, two, compressed = charged(), charged(parallelSlots=2), charged(cacheTypeCustomK="turbo2")
    assert "KV cache (1 x 512 tokens)" in one.text and "KV cache (2 x 512 tokens)" in two.text
    assert one.bytes == GIB + 2 * 512 * TOKEN + -(-GIB * 5 // 100) + PYTHON_BYTES
    assert two.bytes == one.bytes + 512 * TOKEN
    assert compressed.bytes == one.bytes - 2 * 512 * (TOKEN - TOKEN_IN_BYTES)


@pytest.mark.parametrize(
    ("reading", "text"),
    [
        (Reading(GIB, problem="its config.json cannot be read"), "by file size; its config.json cannot be read"),
        (Reading(GIB, config={}), "by file size; config.json: num_hidden_layers"),
        (Reading(None, problem="gone"), "gone"),
        (Reading(None), "the size of its model is not known"),
    ],
)
def test_a_model_that_tells_too_little_is_charged_by_size_or_not_at_all(reading: Reading, text: str) -> None:
    made = argv(service(), replace(PLACE, model=reading))
    assert "--max-model-len" not in made and text in demand(service(), made, reading, lambda _: None).text
    assert "--max-model-len" in argv(service(contextSize=512), replace(PLACE, model=reading))


def test_what_is_told_by_format_alone_is_served_by_the_older_runtime() -> None:
    serving = [name for name, row in RUNTIMES.items() if "mlx" in row.formats]
    assert serving.index("mlx-server") < serving.index("vllm-swift")
    assert [each.setting for each in RUNTIMES["vllm-swift"].executables] == ["vllm_swift"]
