"""Ollama: what a model is made with, what is refused by name, what the daemon is started with, and what is charged."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from metal_supervisor.runtimes import RUNTIMES, Binary, Place
from metal_supervisor.runtimes.llama_server import DEFAULT_CONTEXT
from metal_supervisor.runtimes.ollama import daemon, engine, parameters, refuse
from metal_supervisor.spec.attachment import JOB
from metal_supervisor.spec.types import Endpoint, Model, Service

BINARY = Binary("/opt/ollama", frozenset({"--help"}), "ollama")
PLACE = Place(
    "/models/m.gguf", "127.0.0.1", 18100, 8, "/state", registry="http://mirror", daemon_models="/state/ollama"
)
FILE = "/models/m.gguf"
LIBRARY = "https://ollama.com/library/phi4-mini:3.8b"


def service(
    *,
    source: str = FILE,
    mode: str = "chat",
    layers: int | None = None,
    extra: tuple[str, ...] = (),
    env: tuple[tuple[str, str], ...] = (),
    port: int | None = None,
    **options: Any,
) -> Service:
    model = Model("default", "phi", "m", 1, source, "gguf", layers, None)
    endpoint = Endpoint("tiny", 8080, "/v1/chat/completions", "ClusterIP", None)
    return Service(
        "default", "tiny", "u", 1, model, "ollama", 1, False, endpoint, mode, "normal", port, options, extra, env
    )


def job(asked: Service, place: Place = PLACE) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(dict(engine(asked, BINARY, place).env)[JOB])
    return found


def test_a_service_of_a_file_is_an_attendant_that_makes_it() -> None:
    made = engine(service(), BINARY, PLACE)
    assert made.argv == ("/state/current/attacher", "default.tiny", "/state") and made.daemon == "ollama"
    assert made.probe.shared and made.probe.identity == "tiny"
    assert job(service(contextSize=512)) == {
        "daemon": "ollama",
        "name": "tiny",
        "library": "",
        "registry": "",
        "path": FILE,
        "models": "/state/ollama",
        "book": "/state/ollama.made",
        "parameters": {"num_ctx": 512},
        "mode": "chat",
    }


def test_a_service_of_the_library_is_pulled_from_the_mirror_if_there_is_one() -> None:
    made = job(service(source=LIBRARY, mode="embedding"))
    assert (made["library"], made["registry"], made["path"]) == ("phi4-mini:3.8b", "http://mirror", "")
    assert made["mode"] == "embedding"
    assert job(service(source=LIBRARY), replace(PLACE, registry=""))["registry"] == ""


def test_the_context_is_always_said_and_the_rest_only_if_it_was_asked_for() -> None:
    assert parameters(service()) == parameters(service(layers=0)) == {"num_ctx": DEFAULT_CONTEXT}
    asked = service(contextSize=512, batchSize=64, layers=12)
    assert parameters(asked) == {"num_ctx": 512, "num_batch": 64, "num_gpu": 12}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (service(extra=("--threads", "1")), "spec.extraArgs"),
        (service(env=(("OLLAMA_HOST", "0.0.0.0"),)), "spec.env"),
        (service(port=9000), "spec.containerPort"),
        (service(mode="rerank"), "spec.mode rerank"),
        (service(parallelSlots=2), "spec.parallelSlots has no meaning for Ollama"),
        (service(flashAttention=False), "spec.flashAttention"),
        (service(cacheTypeK="q8_0"), "OLLAMA_KV_CACHE_TYPE"),
        (service(cacheTypeV="q8_0"), "spec.cacheTypeV"),
        (service(cacheTypeCustomK="turbo4"), "spec.cacheTypeCustomK"),
        (service(uBatchSize=512), "set spec.batchSize"),
        (service(jinja=False), "spec.jinja"),
        (service(idleTtlS=60), "metal-supervisor.io/idle-ttl"),
        (service(moeCPUOffload=True), "spec.moeCPUOffload"),
        (service(moeCPULayers=2), "use that runtime"),
        (service(reasoningBudget=0), "spec.reasoningBudget"),
        (service(tensorOverrides=("a=CPU",)), "spec.tensorOverrides"),
    ],
)
def test_what_it_cannot_be_asked_for_is_refused_by_name(asked: Service, words: str) -> None:
    found = refuse(asked)
    assert found is not None and found[0] == "UnsupportedField" and words in found[1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"contextSize": 512, "batchSize": 64},
        {"parallelSlots": 1},
        {"flashAttention": True},
        {"jinja": True},
        {"cacheTypeK": "f16", "cacheTypeV": "f16"},
        {"moeCPUOffload": False, "noKvOffload": False, "noWarmup": False},
    ],
)
def test_what_it_can_be_asked_for_or_changes_nothing_is_not(options: dict[str, Any]) -> None:
    assert refuse(service(**options)) is None
    assert refuse(service(mode="embedding", **options)) is None


def test_the_daemon_unloads_nothing_by_itself_and_keeps_its_models_in_a_place_of_ours() -> None:
    made = daemon(BINARY, PLACE, {})
    assert made.argv == (f"{PLACE.cwd}/current/ollama-gate", "127.0.0.1", "18100", PLACE.cwd, "/opt/ollama")
    assert dict(made.env) == {
        "HOME": f"{PLACE.cwd}/ollama",
        "TMPDIR": f"{PLACE.cwd}/ollama",
        "OLLAMA_MODELS": "/state/ollama",
        "OLLAMA_KEEP_ALIVE": "-1",
        "OLLAMA_MAX_LOADED_MODELS": "64",
        "OLLAMA_NOPRUNE": "1",
        "OLLAMA_NO_CLOUD": "1",
    }


def test_services_of_one_model_have_to_agree_on_what_it_is_made_with() -> None:
    shared = RUNTIMES["ollama"].shared
    assert shared is not None and shared.per_file is not None
    assert shared.per_file(service(contextSize=512)) != shared.per_file(service(contextSize=1024))
    assert shared.per_file(service()) == shared.per_file(service(contextSize=DEFAULT_CONTEXT))
