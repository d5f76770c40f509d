"""oMLX: what it is asked for, what is refused by name, what its daemon is started with, and what a model is charged."""

from __future__ import annotations

import json
from typing import Any

import pytest

from metal_supervisor.models.metadata import Demand, Reading
from metal_supervisor.runtimes import RUNTIMES, Binary, Place
from metal_supervisor.runtimes.omlx import cache_bytes, daemon, demand, engine, refuse
from metal_supervisor.spec.attachment import JOB
from metal_supervisor.spec.sizes import GIB
from metal_supervisor.spec.types import Endpoint, Model, Service

BINARY = Binary("/opt/omlx", frozenset({"--model-dir"}), "omlx", "/opt/python")
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
CACHE = "/cache"


def service(
    *,
    mode: str = "chat",
    extra: tuple[str, ...] = (),
    env: tuple[tuple[str, str], ...] = (),
    port: int | None = None,
    **options: Any,
) -> Service:
    model = Model("default", "phi", "m", 1, "/models/m", "mlx", None, None)
    endpoint = Endpoint("tiny", 8080, "/v1/chat/completions", "ClusterIP", None)
    return Service(
        "default", "tiny", "u", 1, model, "omlx", 1, False, endpoint, mode, "normal", port, options, extra, env
    )


def job(asked: Service) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(dict(engine(asked, BINARY, PLACE).env)[JOB])
    return found


def test_a_service_is_an_attendant_with_a_job_and_no_secret() -> None:
    made = engine(service(contextSize=512, turboQuantBits=4), BINARY, PLACE)
    assert made.argv == ("/state/current/attacher", "default.tiny", "/state") and made.daemon == "omlx"
    settings = {"max_context_window": 512, "turboquant_kv_enabled": True, "turboquant_kv_bits": 4}
    assert job(service(contextSize=512, turboQuantBits=4)) == {
        "daemon": "omlx",
        "name": "tiny",
        "path": "/models/m",
        "settings": settings,
        "key_file": "/state/omlx.key",
    }
    assert job(service())["settings"] == {}


def test_it_is_looked_for_by_its_name_on_the_shared_daemon() -> None:
    probe = engine(service(), BINARY, PLACE).probe
    assert probe.shared and probe.identity == "tiny" and probe.busy_path == "/metal-supervisor/slots/tiny"


@pytest.mark.parametrize(
    ("asked", "reason", "field"),
    [
        (service(extra=("--port", "1")), "UnsupportedField", "spec.extraArgs"),
        (service(env=(("A", "b"),)), "UnsupportedField", "spec.env"),
        (service(port=9000), "UnsupportedField", "spec.containerPort"),
        (service(cacheTypeK="q8_0"), "UnsupportedField", "spec.cacheTypeK"),
        (service(cacheTypeV="q4_0"), "UnsupportedField", "spec.cacheTypeV"),
        (service(batchSize=512), "UnsupportedField", "spec.batchSize"),
        (service(flashAttention=False), "UnsupportedField", "spec.flashAttention"),
        (service(idleTtlS=60), "UnsupportedField", "metal-supervisor.io/idle-ttl"),
        (service(pagedSSDCacheDir="cache"), "InvalidSpec", "spec.pagedSSDCacheDir"),
        (service(pagedSSDCacheDir="/a/../b"), "InvalidSpec", "spec.pagedSSDCacheDir"),
        (service(pagedSSDCacheMaxSize="8GB"), "InvalidSpec", "spec.pagedSSDCacheMaxSize"),
        (service(hotCacheMaxSize="8GB"), "InvalidSpec", "spec.hotCacheMaxSize"),
    ],
)
def test_what_it_cannot_be_asked_for_is_refused_by_name(asked: Service, reason: str, field: str) -> None:
    found = refuse(asked)
    assert found is not None and found[0] == reason and field in found[1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"contextSize": 4096},
        {"parallelSlots": 2},
        {"cacheTypeK": "f16", "cacheTypeV": "bf16"},
        {"jinja": True},
        {"flashAttention": True},
        {"moeCPULayers": 0},
        {"noWarmup": False},
        {"turboQuantBits": 4},
        {"pagedSSDCacheDir": CACHE, "pagedSSDCacheMaxSize": "8GB", "hotCacheMaxSize": "1GB"},
    ],
)
def test_what_it_can_be_asked_for_or_changes_nothing_is_not(options: dict[str, Any]) -> None:
    assert refuse(service(**options)) is None


def test_the_daemon_keeps_no_cache_that_nobody_asked_for_and_fetches_nothing() -> None:
    made = daemon(BINARY, PLACE, {})
    assert made.argv == (
        "/opt/python",
        "-E",
        "/state/current/omlx_engine.py",
        "--key-file",
        "/state/served/omlx/key",
        "--base-path",
        "/state/omlx",
        "--served",
        "/state/served/omlx/models",
        "--host",
        "127.0.0.1",
        "--port",
        "18100",
        "--no-cache",
    )
    assert dict(made.env) == {
        "HF_HUB_CACHE": "/state/hub",
        "HF_HUB_OFFLINE": "1",
        "HOME": "/state/omlx",
        "TMPDIR": "/state/omlx",
    }
    assert not made.probe.shared and made.cwd == "/state/omlx"


def test_the_daemon_has_the_caches_that_its_services_agree_on() -> None:
    options = {"hotCacheMaxSize": "1GB", "pagedSSDCacheDir": CACHE, "pagedSSDCacheMaxSize": "8GB"}
    assert daemon(BINARY, PLACE, options).argv[-6:] == (
        "--paged-ssd-cache-dir",
        CACHE,
        "--paged-ssd-cache-max-size",
        "8GB",
        "--hot-cache-max-size",
        "1GB",
    )
    shared = RUNTIMES["omlx"].shared
    assert shared is not None and set(shared.options) == set(options) and shared.per_file is None


def taken(**options: Any) -> int:
    asked = service(**options)
    found = demand(asked, engine(asked, BINARY, PLACE).argv, READ, lambda _path: None)
    assert isinstance(found, Demand) and found.bytes is not None
    return found.bytes


def test_a_model_is_charged_for_its_context_and_its_slots() -> None:
    assert taken(contextSize=1024) < taken(contextSize=4096)
    assert taken(contextSize=4096, turboQuantBits=4) == taken(contextSize=4096), "0.7.0 quantizes nothing that runs"
    assert taken(hotCacheMaxSize="8GB") - taken(hotCacheMaxSize="4GB") == 4 * GIB
    assert taken(parallelSlots=3) - taken() == 2 * 4 * 4096 * 128 * 2
    assert taken(contextSize=4096, parallelSlots=4) == taken(contextSize=4096), "they share it"


def test_a_model_answers_as_many_requests_at_once_as_it_is_charged_for() -> None:
    settings = job(service(contextSize=4096, parallelSlots=4))["settings"]
    assert settings == {"max_context_window": 1024, "max_concurrent_requests": 4}


@pytest.mark.parametrize(
    ("said", "size_bytes"), [("1KB", 1024), ("512MB", 512 << 20), ("8GB", 8 << 30), ("1.5TB", 3 << 39)]
)
def test_a_size_is_read_as_omlx_reads_it(said: str, size_bytes: int) -> None:
    assert cache_bytes(said) == size_bytes
