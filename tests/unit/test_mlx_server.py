"""The command lines of the MLX servers, word by word, and what they are charged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from metal_supervisor.models.metadata import Reading
from metal_supervisor.runtimes import RUNTIMES, Binary, Place
from metal_supervisor.runtimes.mlx_arguments import MLX
from metal_supervisor.runtimes.mlx_memory import demand, estimate_of
from metal_supervisor.runtimes.mlx_server import NOT_HERE, engine, lacks, refuse
from metal_supervisor.spec.arguments import FlagVerdict
from metal_supervisor.spec.sizes import GIB, MIB
from metal_supervisor.spec.types import Endpoint, Model, Probe, Service

SWIFT = Binary("/opt/mlx-server", frozenset({"--max-slots"}), "mlx-server")
FLAGS = {"--decode-concurrency", "--prompt-concurrency", "--prompt-cache-bytes", "--kv-bits", "--quantized-kv-start"}
OWNED = [name for name, flag in MLX.grammar.flags.items() if flag.verdict is not FlagVerdict.VALUE]
MLX_LM = Binary("/v/bin/mlx_lm.server", frozenset(FLAGS), "mlx_lm.server", "/v/bin/python")
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
KV = 4 * 4096 * 2 * 2 * 32 * 2
"""Bytes of one conversation of full length."""
HEAD = ["/v/bin/python", "-E", "/state/current/mlx_engine.py", "--alias", "tiny,phi"]
WHERE = ["--model", "/models/m", "--host", "127.0.0.1", "--port", "18100"]


def service(
    *, mode: str = "chat", extra: tuple[str, ...] = (), env: tuple[tuple[str, str], ...] = (), **options: Any
) -> Service:
    model = Model("default", "phi", "m", 1, "/models/m", "mlx", None, None)
    endpoint = Endpoint("tiny", 8080, "/v1/chat/completions", "ClusterIP", None)
    return Service(
        "default", "tiny", "u", 1, model, "mlx-server", 1, False, endpoint, mode, "normal", None, options, extra, env
    )


def argv(asked: Service, binary: Binary = MLX_LM, place: Place = PLACE) -> list[str]:
    return list(engine(asked, binary, place).argv)


def charged(asked: Service, binary: Binary = MLX_LM, reading: Reading = READ) -> str:
    made = engine(asked, binary, replace(PLACE, model=reading))
    return demand(asked, made.argv, reading, lambda _: None).text


def test_the_swift_server_gets_its_documented_command_line() -> None:
    made = engine(service(parallelSlots=3, extra=("--reasoning", "off")), SWIFT, PLACE)
    assert list(made.argv) == ["/opt/mlx-server", *WHERE, "--max-slots", "3", "--reasoning", "off"]
    assert made.probe == Probe(
        "/health",
        "ok",
        "/v1/models",
        "",
        "",
        names_itself=True,
        first_path="/v1/chat/completions",
        first_body='{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}',
    )
    assert argv(service(), SWIFT)[-2:] == ["--max-slots", "1"], "its own default is four"


def test_mlx_lm_is_held_to_the_name_the_context_and_the_slots() -> None:
    bounds = ["--decode-concurrency", "1", "--prompt-concurrency", "1", "--prompt-cache-bytes", str(KV)]
    assert argv(service()) == [*HEAD, "--context", "4096", *WHERE, *bounds]
    made = argv(service(contextSize=512, parallelSlots=4, cacheTypeK="q4_0", extra=("--temp", "0.5")))
    assert made[5:7] == ["--context", "128"], "each has its share"
    assert made[13:17] == ["--decode-concurrency", "4", "--prompt-concurrency", "4"]
    assert made[19:] == ["--kv-bits", "4", "--quantized-kv-start", "0", "--temp", "0.5"]


def test_an_older_mlx_lm_gets_no_flag_that_it_does_not_name() -> None:
    bare = replace(MLX_LM, flags=frozenset())
    assert argv(service(), bare) == [*HEAD, "--context", "4096", *WHERE]
    assert lacks(service(cacheTypeK="f16"), bare) is None
    for binary in (bare, SWIFT):
        found = lacks(service(cacheTypeK="q8_0"), binary)
        assert found is not None and found[0] == "UnsupportedField" and "spec.cacheTypeK" in found[1]
    assert lacks(service(cacheTypeK="q8_0"), MLX_LM) is None


def test_a_flag_that_this_server_does_not_have_is_refused_by_name() -> None:
    """One table is of both servers."""
    found = lacks(service(extra=("--max-slots", "2", "--temp", "0.5")), SWIFT)
    assert found is not None and found[1].startswith("spec.extraArgs[2] '--temp' is not known to this mlx-server")
    assert lacks(service(extra=("--temp", "0.5")), replace(SWIFT, flags=frozenset())) is None


def test_nothing_is_fetched_whatever_the_environment_says() -> None:
    made = engine(service(env=(("MLX_METAL_DEBUG", "1"),)), MLX_LM, PLACE)
    assert dict(made.env) == {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": "/state/hub", "MLX_METAL_DEBUG": "1"}
    assert made.probe == Probe(
        "/health",
        '"status"',
        "/v1/models",
        "tiny",
        "",
        first_path="/v1/chat/completions",
        first_body='{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}',
    )


@pytest.mark.parametrize("argument", [*OWNED, "--model=/x", "--mod", "--trust", "--por=1", "-h", "--all"])
def test_what_is_ours_is_refused_by_name_abbreviated_as_well(argument: str) -> None:
    found = refuse(service(extra=("--temp=1", argument)))
    assert found is not None and found[0] == "InvalidSpec"
    assert f"spec.extraArgs[1] {argument.partition('=')[0]} is not yours to set" in found[1]


def test_other_extra_arguments_are_the_users() -> None:
    extra = ("--max-tokens", "64", "--chat-template-args", '{"enable_thinking": false}', "--temp", "-.5", "--log=INFO")
    assert refuse(service(extra=extra)) is None


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        (("-x",), "[0] '-x' is not known"),
        (("--",), "[0] '--' is not known"),
        (("x",), "[0] 'x' is neither"),
        (("--to", "1"), "[0] '--to' could be several"),
        (("--temp", "--top-p"), "[0] '--temp' needs a value"),
        (("--chat-template", "-x"), "[0] '--chat-template' needs a value"),
        (("--temp=hot",), "[0]: --temp takes a"),
    ],
)
def test_what_argparse_would_end_at_is_refused_by_name(extra: tuple[str, ...], text: str) -> None:
    found = refuse(service(extra=extra))
    assert found is not None and f"spec.extraArgs{text}" in found[1]


@pytest.mark.parametrize("name", NOT_HERE)
def test_what_means_nothing_for_mlx_is_refused_by_name(name: str) -> None:
    neutral, _ = NOT_HERE[name]
    said: Any = not neutral[0] if neutral and isinstance(neutral[0], bool) else 4
    found = refuse(service(**{name: said}))
    assert found is not None and found[0] == "UnsupportedField"
    assert ("idle-ttl" if name == "idleTtlS" else f"spec.{name} ") in found[1]
    assert all(refuse(service(**{name: value})) is None for value in neutral)


@pytest.mark.parametrize(
    "asked",
    [{"cacheTypeK": "q5_0"}, {"cacheTypeV": "q8_0"}, {"cacheTypeK": "q8_0", "cacheTypeV": "q4_0"}, {"mode": "rerank"}],
)
def test_other_caches_and_modes_are_refused(asked: dict[str, Any]) -> None:
    found = refuse(service(**asked))
    assert found is not None and found[0] == "UnsupportedField"
    assert refuse(service(cacheTypeK="q8_0", cacheTypeV="q8_0")) is None


def test_it_is_charged_for_what_it_is_held_to() -> None:
    assert "KV cache (1 x 4096 tokens)" in charged(service())
    assert "KV cache (2 x 256 tokens)" in charged(service(contextSize=512, parallelSlots=2))
    assert "KV cache (2 x 256 tokens)" in charged(service(contextSize=512, parallelSlots=2), SWIFT)
    extra = ("--decode-concurrency", "3", "--prompt-cache-bytes=0")
    assert "KV cache (3 x 512 tokens)" in charged(service(contextSize=512, extra=extra)), "the last of several counts"
    assert "prompt cache" not in charged(service(contextSize=512, extra=extra))
    assert "KV cache (64 x 512 tokens)" in charged(service(contextSize=512, extra=("--decode-concurrency", "+64")))
    whole = demand(service(), argv(service()), READ, lambda _: None)
    assert whole.bytes == GIB + KV + -(-GIB * 5 // 100) + KV + 256 * MIB
    assert whole.mapped_bytes == 0


def test_a_quantized_cache_is_charged_for_what_stays_as_it_is() -> None:
    def cache(*extra: str, **options: Any) -> int:
        asked = service(contextSize=10_240, extra=extra, **options)
        made = estimate_of(asked, argv(asked), READ)
        assert made is not None
        return made.kv_bytes

    token, quantized = 4 * 128 * 2, 4 * (128 // 2 + 2 * 4)
    assert cache(cacheTypeK="q4_0") == 10_240 * quantized
    assert cache("--kv-bits", "4") == 5000 * token + 5240 * quantized, "mlx_lm's default"
    assert cache("--kv-bits", "4", "--quantized-kv-start", "999999999") == 10_240 * token
    grouped = ("--kv-bits", "4", "--quantized-kv-start", "0", "--kv-group-size", "32")
    assert cache(*grouped) == 10_240 * 4 * (128 // 2 + 4 * 4)


@pytest.mark.parametrize(
    ("reading", "text"),
    [
        (Reading(GIB, problem="its config.json cannot be read"), "by file size; its config.json cannot be read"),
        (Reading(GIB, config={}), "by file size; config.json: num_hidden_layers"),
        (Reading(None, problem="gone"), "gone"),
    ],
)
def test_a_model_that_tells_too_little_is_charged_by_size_or_not_at_all(reading: Reading, text: str) -> None:
    assert text in charged(service(), reading=reading)
    made = argv(service(), place=replace(PLACE, model=reading))
    assert "--context" not in made and made[-1] == str(512 * MIB)


def test_its_row_takes_the_swift_server_first() -> None:
    row = RUNTIMES["mlx-server"]
    assert [each.setting for each in row.executables] == ["mlx_server", "mlx_lm_server"]
    assert row.formats == {"mlx", "safetensors"}
    assert RUNTIMES["llama-server"].lacks(service(), SWIFT) is None
