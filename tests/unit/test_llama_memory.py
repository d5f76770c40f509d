"""What the memory of a llama-server depends on, read from its command line as the engine reads it."""

from __future__ import annotations

from typing import Any

import pytest

from metal_supervisor.core.estimate import Settings
from metal_supervisor.core.sizes import GIB, MIB
from metal_supervisor.core.types import Endpoint, Model, Service
from metal_supervisor.runtimes.llama_memory import Demands, demands
from metal_supervisor.runtimes.llama_server import engine
from metal_supervisor.runtimes.place import Binary, Place

CURRENT = Binary("/opt/llama-server", frozenset({"--metrics", "--fit", "--cache-ram", "--no-webui", "--offline"}))
PLACE = Place("/models/m.gguf", "127.0.0.1", 18100, None, "/state")


def of_service(*extra: str, mode: str = "chat", **options: Any) -> Demands:
    model = Model("default", "phi", "m", 1, "/models/m.gguf", "gguf", "metal", None, None)
    endpoint = Endpoint("tiny", 8080, "/v1/chat/completions", "ClusterIP", None)
    asked = Service(
        "default", "tiny", "u", 1, model, "llama-server", 1, False, endpoint, mode, "normal", None, options, extra
    )
    return demands(engine(asked, CURRENT, PLACE).argv)


def test_the_fields_of_a_service_arrive() -> None:
    assert of_service() == Demands(Settings(context=2048, prompt_cache_bytes=2 * GIB))
    found = of_service(
        contextSize=8192, parallelSlots=4, batchSize=1024, uBatchSize=256, flashAttention=False,
        cacheTypeK="q8_0", cacheTypeV="q4_0", cacheTypeCustomV="turbo3",
    )  # fmt: skip
    assert found.settings == Settings(
        8192, 4, batch=1024, ubatch=256, cache_k="q8_0", cache_v="turbo3", flash_attention=False,
        prompt_cache_bytes=2 * GIB,
    )  # fmt: skip


def test_extra_arguments_come_last_and_win() -> None:
    found = of_service("-c", "32768", "--parallel", "2", "--kv-unified", "--swa_full", "-cram", "100", contextSize=4096)
    assert found.settings == Settings(32768, 2, unified=True, swa_full=True, prompt_cache_bytes=100 * MIB)


def test_an_embedding_service_reads_no_more_at_once_than_a_microbatch() -> None:
    found = of_service(mode="embedding", uBatchSize=256)
    assert (found.settings.batch, found.settings.ubatch, found.settings.prompt_cache_bytes) == (256, 256, 0)


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
        ("-np 1 --no-mmap", {"mmap": False}),
        ("-np 1 --load-mode none", {"mmap": False}),
        ("-np 1 --load-mode mlock", {}),
        ("-np 1 -c many", {}),
        ("-np 1 -c", {}),
    ],
)
def test_a_command_line_is_read_as_the_engine_reads_it(line: str, changes: dict[str, Any]) -> None:
    assert demands(["llama-server", *line.split()]).settings == Settings(**changes)


def test_files_that_come_with_the_model_are_named() -> None:
    line = "-np 1 --mmproj /p.gguf -md /d.gguf --lora /a.gguf,/b.gguf --lora-scaled /c.gguf:0.5,/d:e.gguf:1"
    found = demands(line.split())
    assert found == Demands(Settings(), "/p.gguf", "/d.gguf", ("/a.gguf", "/b.gguf", "/c.gguf", "/d:e.gguf"))
    assert demands([*line.split(), "--no-mmproj"]).projector == ""
