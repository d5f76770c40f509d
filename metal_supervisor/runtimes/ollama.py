"""Ollama: one daemon for many models, the user's own if there is one. A service is a model attached to it.

A model comes from Ollama's library, or from a GGUF file; either way a model of the service's name is created, with its
parameters. Settings of the daemon for all models (cache types, slots, flash attention) cannot be set per service.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from metal_supervisor.confinement.access import Access
from metal_supervisor.models.metadata import Demand, Reading
from metal_supervisor.runtimes import llama_memory
from metal_supervisor.runtimes.attached import SHARED, attended, of_the_daemon
from metal_supervisor.runtimes.llama_server import DEFAULT_CONTEXT
from metal_supervisor.runtimes.mlx_server import meaningless
from metal_supervisor.runtimes.runtime import Binary, Executable, Place, Runtime, Shared
from metal_supervisor.spec.sources import library_model
from metal_supervisor.spec.types import Engine, Probe, Service

NAME = "ollama"
BASE = "ollama"
"""The daemon's home, in the state directory."""
MODELS = "served/ollama/models"
"""Directory in the state directory with the attached files, which the daemon may read."""
PROBE = Probe(path="/", expects="Ollama is running", busy_path="")
SHARD = re.compile(r"-[0-9]{5}-of-[0-9]{5}\.gguf$")
FLAGS = "it is a flag of llama-server; use that runtime"
NOT_HERE: Mapping[str, tuple[tuple[object, ...], str]] = {
    "parallelSlots": ((1,), f"{SHARED} (OLLAMA_NUM_PARALLEL)"),
    "flashAttention": ((True,), f"{SHARED} (OLLAMA_FLASH_ATTENTION)"),
    "cacheTypeK": (("f16",), f"{SHARED} (OLLAMA_KV_CACHE_TYPE)"),
    "cacheTypeV": (("f16",), f"{SHARED} (OLLAMA_KV_CACHE_TYPE)"),
    "cacheTypeCustomK": ((), f"{SHARED} (OLLAMA_KV_CACHE_TYPE)"),
    "cacheTypeCustomV": ((), f"{SHARED} (OLLAMA_KV_CACHE_TYPE)"),
    "uBatchSize": ((), "Ollama has one batch size; set spec.batchSize"),
    "jinja": ((True,), "Ollama has templates of its own"),
    "idleTtlS": ((), "a model of Ollama stays loaded while its service runs"),
    **dict.fromkeys(("moeCPUOffload", "noKvOffload", "noWarmup"), ((False,), FLAGS)),
    **dict.fromkeys(("reasoningBudget", "reasoningBudgetMessage", "ropeScaling"), ((), FLAGS)),
    **dict.fromkeys(("tensorOverrides", "metadataOverrides"), ((), FLAGS)),
    "moeCPULayers": ((0,), FLAGS),
}
"""Option of the spec that Ollama does not honour -> (values that change nothing, why all others are refused)."""


def refuse(service: Service) -> tuple[str, str] | None:
    """(reason, message) if Ollama cannot honour the service's spec, else None."""
    if problem := of_the_daemon(service, "Ollama"):
        return problem
    if SHARD.search(service.model.source):
        text = f'Model "{service.model.name}": spec.source is one of several shards, and Ollama takes one file'
        return "UnsupportedSource", f"{text}; use llama-server, or a model in one file"
    if service.mode == "rerank":
        return "UnsupportedField", "spec.mode rerank is not served by Ollama; use llama-server"
    return meaningless(service, NOT_HERE, "Ollama")


def parameters(service: Service) -> dict[str, Any]:
    """Parameters of the model, by the names of Ollama's Modelfile. Always with the context, whose default is vast."""
    made = {"num_ctx": service.options.get("contextSize", DEFAULT_CONTEXT)}
    if "batchSize" in service.options:
        made["num_batch"] = service.options["batchSize"]
    if service.model.gpu_layers not in (None, 0):
        made["num_gpu"] = service.model.gpu_layers
    return made


def engine(service: Service, _binary: Binary, place: Place) -> Engine:
    """The attacher of one model, with the daemon's probe."""
    library = library_model(service.model.source)
    job = {
        "library": library,
        "registry": place.registry if library else "",
        "path": "" if library else place.model_path,
        "models": place.daemon_models,
        "book": f"{place.cwd}/ollama.made",
        "parameters": parameters(service),
        "mode": service.mode,
    }
    return attended(service, place, NAME, job, PROBE)


def daemon(binary: Binary, place: Place, _options: Mapping[str, Any]) -> Engine:
    """The daemon behind its gate, which binds it to loopback. It unloads no model by itself: admission decides."""
    base = f"{place.cwd}/{BASE}"
    env = {
        "HOME": base,
        "TMPDIR": base,
        "OLLAMA_MODELS": place.daemon_models,
        "OLLAMA_KEEP_ALIVE": "-1",
        "OLLAMA_MAX_LOADED_MODELS": "64",
        "OLLAMA_NOPRUNE": "1",
        "OLLAMA_NO_CLOUD": "1",
    }
    argv = (f"{place.cwd}/current/ollama-gate", place.host, str(place.port), place.cwd, binary.path)
    return Engine(argv, tuple(sorted(env.items())), place.cwd, PROBE)


def access(binary: Binary, _code: str) -> Access:
    """System access of the daemon and its runners. The gate is our own program, and not among them."""
    return Access((binary.path,), binary.homes, pulls=True, gated=True)


def demand(
    service: Service, _argv: Sequence[str], model: Reading, reading_of: Callable[[str], Reading | None]
) -> Demand | None:
    """Estimate for a model: Ollama runs it with llama-server's library, as the command line built here would."""
    made = parameters(service)
    argv = ["--ctx-size", str(made["num_ctx"]), "--parallel", "1", "--cache-ram", "0", "--ctx-checkpoints", "0"]
    argv += ["--batch-size", str(made.get("num_batch", 512)), "--ubatch-size", str(made.get("num_batch", 512))]
    return llama_memory.demand([*argv, *(["--embedding"] if service.mode == "embedding" else [])], model, reading_of)


RUNTIME = Runtime(
    name=NAME,
    executables=(Executable("ollama", "ollama", "install it (brew install ollama)", help=("serve", "--help")),),
    formats=frozenset({"gguf"}),
    refuse=refuse,
    engine=engine,
    demand=demand,
    shared=Shared(daemon, per_file=parameters),
    access=access,
)
