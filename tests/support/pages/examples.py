"""conf/examples by the memory of a Mac: models that people run, each with the memory that it would be charged.

The memory is computed as the controller does: the manifest is read, the engine's command line composed, and the
estimate made of that and the model's published shape. No file was fetched for it; sizes of files are those of their
repositories, in decimal GB as they show them.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from metal_supervisor.memory.budget import Budget, budget, metal_default_bytes
from metal_supervisor.models.metadata import Demand, Reading
from metal_supervisor.runtimes import RUNTIMES, VOCABULARIES, Binary, Place
from metal_supervisor.spec.first_request import smallest
from metal_supervisor.spec.gguf import Header
from metal_supervisor.spec.resources import Policy, read_service
from metal_supervisor.spec.sizes import amount
from metal_supervisor.spec.types import PartKey, Role, Service
from tests.support import published
from tests.support.published import attention, header

ROOT = Path(__file__).resolve().parents[3]
HERE = ROOT / "conf" / "examples"
API = "inference.llmkube.dev/v1alpha1"
GB = 10**9
ASKED: Mapping[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "Tell me a joke."}]},
    "embedding": {"input": ["a bird", "a plane"]},
    "rerank": {"query": "What flies?", "documents": ["a stone", "a bird"]},
}
MODEL = "/models/model"
PROJECTOR = "/models/projector"
DRAFT = "/models/draft"
FLAGS = frozenset({"--cache-ram", "--ctx-checkpoints", "--fit", "--jinja"})
"""What tells builds of llama-server apart: here a current one."""

PAGE = """# Models to begin with

<!-- written by tests/support/pages/examples.py -->

Manifests of models that people run, by the memory of a Mac that they suit. The memory is what a service is charged,
computed from the published shape of each model, by the code that decides whether it may start ([memory.md](memory.md)
has the rules, and how they compare with a real engine). Their files were not fetched for it. Of what a service takes
beside its weights, up to 2 GiB are a prompt cache, and most of the rest grows with `contextSize`;
`metal-supervisor fit` has the arithmetic.

<!-- needs: network -->
```sh
kubectl apply -f conf/examples/16gb/qwen3-8b.yaml
```

With `make run`, paste its `export` line first. Without a checkout, `metal-supervisor serve qwen3-8b` does the same.
Several fit one Mac as long as their sum does;
what has no room waits, and its condition says for whom. With `metal-supervisor.io/on-demand` they take turns
([on-demand.md](on-demand.md)). A model of a larger Mac's list may fit yours with less context.
"""
HEADING = """
| model | | to fetch | context | memory |
| --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Weights:
    """A file to fetch."""

    source: str
    gb: float
    shape: Header | None = None
    """None for a projector, which is charged by its size."""


@dataclass(frozen=True)
class Example:
    """A model and its service."""

    mac_gb: int
    name: str
    what: str
    """One sentence for whoever looks for a model."""
    weights: Weights
    context: int = 16_384
    """Tokens."""
    mode: str = "chat"
    projector: tuple[str, float] | None = None
    """File name beside the model, and its size in GB."""
    draft: tuple[str, Weights] | None = None
    """Name of the draft model's Model, and its file."""
    kind: str = "gguf"
    config: Mapping[str, Any] = field(default_factory=dict)
    """An MLX model's config.json."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the InferenceService."""


def dense(architecture: str, tokens: int, blocks: int, width: int, hidden: int, trained: int, **more: Any) -> Header:
    """A model without experts."""
    shape = {"block_count": blocks, "embedding_length": width, "feed_forward_length": hidden, "context_length": trained}
    return header(architecture, tokens, **shape, **more)


def qwen3(blocks: int, width: int, hidden: int, heads: int) -> Header:
    return dense("qwen3", 151_936, blocks, width, hidden, 40_960, **attention(heads, 8, 128))


def gemma3(blocks: int, width: int, hidden: int, heads: int, kv: int) -> Header:
    shape = attention(heads, kv, 256, attention__sliding_window=1024)
    return dense("gemma3", 262_208, blocks, width, hidden, 131_072, **shape)


LLAMA_1B = dense("llama", 128_256, 16, 2048, 8192, 131_072, **attention(32, 8, 64))
LLAMA_3B = dense("llama", 128_256, 28, 3072, 8192, 131_072, **attention(24, 8, 128))
LLAMA_70B = dense("llama", 128_256, 80, 8192, 28_672, 131_072, **attention(64, 8, 128))
RERANKER = dense("bert", 250_002, 24, 1024, 4096, 8192, attention__head_count=16)
CODER = replace(published.QWEN3_30B, metadata={**published.QWEN3_30B.metadata, "qwen3moe.context_length": 262_144})
GPT_OSS_120B = replace(
    published.GPT_OSS_20B,
    metadata={**published.GPT_OSS_20B.metadata, "gpt-oss.block_count": 36, "gpt-oss.expert_count": 128},
)
QWEN3_4B_MLX = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "quantization": {"group_size": 64, "bits": 4},
}
HF = "hf://"
SMALL_LLAMA = Weights(f"{HF}bartowski/Llama-3.2-1B-Instruct-GGUF/Llama-3.2-1B-Instruct-Q4_K_M.gguf", 0.81, LLAMA_1B)
SMALL_QWEN = Weights(f"{HF}Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf", 0.64, qwen3(28, 1024, 3072, 16))

EXAMPLES = (
    Example(
        16,
        "llama-3.2-3b",
        "Llama 3.2 3B: small and quick, for short tasks.",
        Weights(f"{HF}bartowski/Llama-3.2-3B-Instruct-GGUF/Llama-3.2-3B-Instruct-Q4_K_M.gguf", 2.02, LLAMA_3B),
    ),
    Example(
        16,
        "qwen3-8b",
        "Qwen3 8B: a chat model that thinks before it answers.",
        Weights(f"{HF}Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf", 5.03, qwen3(36, 4096, 12_288, 32)),
    ),
    Example(
        16,
        "gemma-3-4b",
        "Gemma 3 4B: reads images, too.",
        Weights(f"{HF}ggml-org/gemma-3-4b-it-GGUF/gemma-3-4b-it-Q4_K_M.gguf", 2.49, gemma3(34, 2560, 10_240, 8, 4)),
        projector=("mmproj-model-f16.gguf", 0.85),
    ),
    Example(
        16,
        "qwen3-4b-4bit",
        "Qwen3 4B in MLX's own format, for mlx-server or mlx_lm.",
        Weights("mlx-community/Qwen3-4B-4bit", 2.26),
        kind="mlx",
        config=QWEN3_4B_MLX,
    ),
    Example(
        16,
        "llama3.2-3b",
        "Llama 3.2 3B out of Ollama's library, served by Ollama.",
        Weights("https://ollama.com/library/llama3.2:3b", 2.02, LLAMA_3B),
        context=8192,
    ),
    Example(
        16,
        "qwen3-embedding-0.6b",
        "Qwen3 Embedding 0.6B: turns texts into vectors.",
        Weights(f"{HF}Qwen/Qwen3-Embedding-0.6B-GGUF/Qwen3-Embedding-0.6B-Q8_0.gguf", 0.64, qwen3(28, 1024, 3072, 16)),
        context=8192,
        mode="embedding",
    ),
    Example(
        16,
        "bge-reranker-v2-m3",
        "BGE reranker v2 m3: sorts texts by how well they answer a question.",
        Weights(f"{HF}gpustack/bge-reranker-v2-m3-GGUF/bge-reranker-v2-m3-Q8_0.gguf", 0.64, RERANKER),
        context=8192,
        mode="rerank",
    ),
    Example(
        32,
        "gpt-oss-20b",
        "gpt-oss 20B: OpenAI's open model, experts in 4 bits.",
        Weights(f"{HF}ggml-org/gpt-oss-20b-GGUF", 12.11, published.GPT_OSS_20B),
        context=32_768,
    ),
    Example(
        32,
        "gemma-3-12b",
        "Gemma 3 12B: reads images, too.",
        Weights(f"{HF}ggml-org/gemma-3-12b-it-GGUF/gemma-3-12b-it-Q4_K_M.gguf", 7.30, gemma3(48, 3840, 15_360, 16, 8)),
        context=32_768,
        projector=("mmproj-model-f16.gguf", 0.85),
    ),
    Example(
        32,
        "mistral-small-3.2",
        "Mistral Small 3.2, 24B: an all-round model.",
        Weights(
            f"{HF}unsloth/Mistral-Small-3.2-24B-Instruct-2506-GGUF/Mistral-Small-3.2-24B-Instruct-2506-Q4_K_M.gguf",
            14.33,
            published.MISTRAL_SMALL,
        ),
    ),
    Example(
        32,
        "llama-3.1-8b-drafted",
        "Llama 3.1 8B, to which Llama 3.2 1B proposes tokens.",
        Weights(
            f"{HF}bartowski/Meta-Llama-3.1-8B-Instruct-GGUF/Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf",
            4.92,
            published.LLAMA_8B,
        ),
        context=32_768,
        draft=("llama-3.2-1b", SMALL_LLAMA),
    ),
    Example(
        64,
        "qwen3-coder-30b",
        "Qwen3 Coder 30B-A3B: writes programs; of its 128 experts 8 work at a time.",
        Weights(
            f"{HF}unsloth/Qwen3-Coder-30B-A3B-Instruct-GGUF/Qwen3-Coder-30B-A3B-Instruct-Q4_K_M.gguf", 18.56, CODER
        ),
        context=65_536,
    ),
    Example(
        64,
        "gemma-3-27b",
        "Gemma 3 27B: reads images, too.",
        Weights(f"{HF}ggml-org/gemma-3-27b-it-GGUF/gemma-3-27b-it-Q4_K_M.gguf", 16.55, published.GEMMA_27B),
        context=32_768,
        projector=("mmproj-model-f16.gguf", 0.86),
    ),
    Example(
        64,
        "qwen3-32b-drafted",
        "Qwen3 32B, to which Qwen3 0.6B proposes tokens.",
        Weights(f"{HF}Qwen/Qwen3-32B-GGUF/Qwen3-32B-Q4_K_M.gguf", 19.76, qwen3(64, 5120, 25_600, 64)),
        context=32_768,
        draft=("qwen3-0.6b", SMALL_QWEN),
    ),
    Example(
        128,
        "llama-3.3-70b",
        "Llama 3.3 70B: large and thorough.",
        Weights(f"{HF}bartowski/Llama-3.3-70B-Instruct-GGUF/Llama-3.3-70B-Instruct-Q4_K_M.gguf", 42.52, LLAMA_70B),
        context=32_768,
    ),
    Example(
        128,
        "gpt-oss-120b",
        "gpt-oss 120B: OpenAI's larger open model, in three files.",
        Weights(f"{HF}ggml-org/gpt-oss-120b-GGUF", 63.39, GPT_OSS_120B),
        context=65_536,
    ),
    Example(
        128,
        "qwen3-next-80b",
        "Qwen3 Next 80B-A3B: keeps little for each token, so long texts are cheap.",
        Weights(
            f"{HF}unsloth/Qwen3-Next-80B-A3B-Instruct-GGUF/Qwen3-Next-80B-A3B-Instruct-Q4_K_M.gguf",
            48.41,
            published.QWEN3_NEXT,
        ),
        context=131_072,
    ),
)
"""No Model has the name of another: all of them can be applied together."""


def documents(example: Example) -> list[dict[str, Any]]:
    """The manifests of an example."""
    made = [_model(example.name, example.weights.source, example)]
    spec: dict[str, Any] = {"modelRef": example.name, "contextSize": example.context, **example.more}
    if example.mode != "chat":
        spec |= {"mode": example.mode, "endpoint": {"path": smallest(example.mode)[0]}}
    if example.draft:
        made.append(_model(example.draft[0], example.draft[1].source))
        spec["speculativeDecoding"] = {"type": "draft-simple", "draftModelRef": example.draft[0]}
    return [*made, {"apiVersion": API, "kind": "InferenceService", "metadata": _named(example.name), "spec": spec}]


def _model(name: str, source: str, example: Example | None = None) -> dict[str, Any]:
    spec: dict[str, Any] = {"source": source, "format": example.kind if example else "gguf"}
    if example and example.projector:
        spec["mmproj"] = example.projector[0]
    spec["hardware"] = {"accelerator": "metal"}
    return {"apiVersion": API, "kind": "Model", "metadata": _named(name), "spec": spec}


def _named(name: str) -> dict[str, str]:
    return {"name": name, "namespace": "default"}


def service(example: Example) -> Service:
    """The service as the controller reads it."""
    given = {"uid": "u", "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z"}
    found = [{**each, "metadata": {**each["metadata"], **given}} for each in documents(example)]
    models = {("default", each["metadata"]["name"]): each for each in found if each["kind"] == "Model"}
    policy = Policy("llama-server", {name: row.formats for name, row in RUNTIMES.items()}, vocabularies=VOCABULARIES)
    read = read_service(found[-1], models.get, policy, "")
    assert isinstance(read, Service), read
    return read


def _reading(weights: Weights, config: Mapping[str, Any]) -> Reading:
    size = round(weights.gb * GB)
    shape = weights.shape
    whole = None if shape is None else replace(shape, weights_bytes=size, data_bytes=size)
    return Reading(size, whole, config=config or None)


def demand(example: Example) -> Demand:
    """What the example is charged."""
    read = service(example)
    readings = {MODEL: _reading(example.weights, example.config)}
    further: dict[PartKey, str] = {}
    if example.projector:
        further[Role.PROJECTOR] = PROJECTOR
        readings[PROJECTOR] = Reading(round(example.projector[1] * GB), problem="not read")
    if example.draft:
        further[Role.DRAFT], readings[DRAFT] = DRAFT, _reading(example.draft[1], {})
    runtime = RUNTIMES[read.runtime]
    place = Place(MODEL, "127.0.0.1", 1, None, "/", readings[MODEL], further)
    argv = runtime.engine(read, Binary(runtime.executables[0].name, FLAGS), place).argv
    made = runtime.demand(read, argv, readings[MODEL], readings.get)
    assert made is not None
    assert made.bytes, made
    return made


def budgets(mac_gb: int) -> tuple[Budget, Budget]:
    """All engines' budget on a Mac with this memory: with a current macOS, and with macOS 15 and older."""
    total = mac_gb << 30
    now, then = (budget(total, metal_bytes=metal_default_bytes(total, macos)) for macos in (26, 15))
    return now, then


def text(example: Example) -> str:
    """The file."""
    made = demand(example)
    parts = made.text.partition(" = ")[2].partition(" (--")[0]
    told = f"{example.what} {to_fetch(example):.1f} GB to fetch. With {example.context} tokens of context it takes "
    told += f"{amount(made.bytes or 0)} of memory, computed from its published shape: {parts}."
    now = budgets(example.mac_gb)[0]
    told += f" A Mac with {example.mac_gb} GB has {amount(now.bytes, 'down')} for all its models."
    path, body = smallest(example.mode)[0], json.dumps({"model": example.name, **ASKED[example.mode]})
    curl = f"curl http://127.0.0.1:9100{path} -H 'Content-Type: application/json' \\"
    lines = textwrap.wrap(told, 118)
    lines += ["", f"  kubectl apply -f conf/examples/{place(example)}", f"  {curl}"]
    lines += [f"    -d '{body}'"]
    comment = "".join(f"# {line}".rstrip() + "\n" for line in lines)
    return comment + "---\n".join(yaml.safe_dump(each, sort_keys=False, width=200) for each in documents(example))


def place(example: Example) -> str:
    """Where the file is, below conf/examples."""
    return f"{example.mac_gb}gb/{example.name}.yaml"


def page() -> str:
    """docs/examples.md."""
    lines = [PAGE]
    for mac_gb in sorted({each.mac_gb for each in EXAMPLES}):
        now, then = budgets(mac_gb)
        room = f"{amount(now.bytes, 'down')} for all its models ({amount(then.bytes, 'down')} with macOS 15 and older)"
        lines.append(f"\n## A Mac with {mac_gb} GB\n\nIt has {room}.\n{HEADING}")
        for each in EXAMPLES:
            if each.mac_gb == mac_gb:
                name = f"[{each.name}](../conf/examples/{place(each)})"
                memory = amount(demand(each).bytes or 0)
                cells = (name, each.what, f"{to_fetch(each):.1f} GB", str(each.context), memory)
                lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def to_fetch(example: Example) -> float:
    """GB of all files."""
    projector, draft = example.projector, example.draft
    return example.weights.gb + (projector[1] if projector else 0) + (draft[1].gb if draft else 0)


def files() -> Iterator[tuple[Path, str]]:
    """(path, content) of all files of conf/examples."""
    for example in EXAMPLES:
        yield HERE / place(example), text(example)


def main() -> int:
    """Write all files, and remove those that no example has any more."""
    for each in {example.mac_gb for example in EXAMPLES}:
        shutil.rmtree(HERE / f"{each}gb", ignore_errors=True)
    for path, content in files():
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, "utf-8")
    (ROOT / "docs" / "examples.md").write_text(page(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
