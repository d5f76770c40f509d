"""MLX models by vLLM with a Swift engine (github.com/TheTom/vllm-swift), one process per InferenceService.

`vllm-swift serve` is a thin wrapper of vLLM's own server, and passes every flag unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from metal_supervisor.memory.estimate import CacheSettings, Estimate
from metal_supervisor.models.metadata import Demand, Reading
from metal_supervisor.runtimes.mlx_arguments import VLLM
from metal_supervisor.runtimes.mlx_memory import as_demand, by_config, whole
from metal_supervisor.runtimes.mlx_server import NOT_HERE, meaningless
from metal_supervisor.runtimes.runtime import Binary, Executable, Place, Runtime
from metal_supervisor.spec.arguments import parse, refusal
from metal_supervisor.spec.sizes import MIB
from metal_supervisor.spec.types import DIRECTORY_FORMATS, Engine, Probe, Service

NAME = "vllm-swift"
PYTHON_BYTES = 1536 * MIB
"""Both of vLLM's processes, which load PyTorch; not measured on a Mac: a similar engine of one process took 800 MB."""
CACHE_BITS = 8
"""Charge per number in a compressed cache. It should take half of that, but earlier releases did not compress
everywhere, and blocks are decompressed to be read."""

TURBO_BITS: Mapping[str, int] = {"turbo4v2": 4, "turbo4": 4, "turbo3": 3, "turbo2": 2}
"""Scheme of a compressed cache -> bits per number."""
FIELDS: Mapping[str, tuple[tuple[object, ...], str]] = {
    **{name: row for name, row in NOT_HERE.items() if not name.startswith("cacheTypeCustom")},
    **dict.fromkeys(("batchSize", "uBatchSize"), ((), "vLLM makes its batches by itself")),
    "cacheTypeK": (("f16",), f"vllm-swift has {', '.join(TURBO_BITS)}, as spec.cacheTypeCustomK"),
    "cacheTypeV": (("f16",), f"vllm-swift has {', '.join(TURBO_BITS)}, as spec.cacheTypeCustomK"),
    "noWarmup": ((False,), "vLLM always warms up"),
}
"""Option of the spec that vllm-swift does not honour -> (values that change nothing, why all others are refused)."""


def refuse(service: Service) -> tuple[str, str] | None:
    """(reason, message) if vllm-swift cannot honour the service's spec, else None."""
    if problem := refusal(parse(service.extra_args, VLLM.grammar), VLLM.grammar, service.allowed_args, NAME):
        return problem
    if service.mode != "chat":
        return "UnsupportedField", f"spec.mode {service.mode} is not served by vllm-swift; use a GGUF model"
    if found := meaningless(service, FIELDS, NAME):
        return found
    kinds = service.options.get("cacheTypeCustomK"), service.options.get("cacheTypeCustomV")
    if kinds[0] not in (None, *TURBO_BITS) or kinds[1] not in (None, kinds[0]):
        text = f"must be one of {', '.join(TURBO_BITS)} for vllm-swift, and cacheTypeCustomV the same or left out"
        return "UnsupportedField", f"spec.cacheTypeCustomK {text}"
    return None


def engine(service: Service, binary: Binary, place: Place) -> Engine:
    """argv and probes of one vllm-swift. With a key, probes cannot read its list of models, and do not identify it."""
    argv = [binary.path, "serve", place.model_path, "--host", place.host, "--port", str(place.port)]
    argv += ["--served-model-name", *dict.fromkeys((service.name, service.model.name))]
    argv += ["--max-num-seqs", str(service.options.get("parallelSlots", 1))]
    context = int(service.options.get("contextSize", 0))
    made = _estimate(context, 1, False, place.model)
    if context := made.context if made is not None else context:
        argv += ["--max-model-len", str(context)]
    if scheme := service.options.get("cacheTypeCustomK"):
        compressed = {"kv_bits": TURBO_BITS[scheme], "kv_scheme": scheme}
        argv += ["--additional-config", json.dumps(compressed, separators=(",", ":"))]
    env = {**dict(service.env), **place.offline, "VLLM_NO_USAGE_STATS": "1"}
    identity = "" if env.get("VLLM_API_KEY") else service.name
    probe = Probe(identity=identity, busy_path="")
    return Engine((*argv, *service.extra_args), tuple(sorted(env.items())), place.cwd, probe)


def demand(
    _service: Service, argv: Sequence[str], model: Reading, _reading_of: Callable[[str], Reading | None]
) -> Demand:
    """Estimate for vllm-swift with this command line and model.

    vLLM's own share of memory (`--gpu-memory-utilization`) only informs its scheduler: the Swift engine allocates a
    cache of `--max-model-len` for each of `--max-num-seqs` with its first request. MLX's pool of freed buffers is
    limited by that share alone; it is not in the estimate, but in the footprint as soon as that is measured.
    """
    said = parse(tuple(argv), VLLM.grammar)
    context, slots = whole(said.last("--max-model-len"), 0), whole(said.last("--max-num-seqs"), 1)
    return as_demand(_estimate(context, slots, said.given("--additional-config"), model), model)


def _estimate(context: int, slots: int, compressed: bool, model: Reading) -> Estimate | None:
    """Estimate by config.json, or else by size; None if neither is known."""
    settings = CacheSettings(context=context, slots=slots, mmap=False)
    made = by_config(model, settings, CACHE_BITS if compressed else None)
    if made is None:
        return None
    if made.basis != "config":
        return replace(made, overhead_bytes=made.overhead_bytes + PYTHON_BYTES)
    # A prompt is processed in a cache of its own, which is then copied into the slot.
    return replace(made, compute_bytes=made.compute_bytes + made.kv_bytes // made.slots, overhead_bytes=PYTHON_BYTES)


RUNTIME = Runtime(
    name=NAME,
    executables=(Executable(NAME, "vllm_swift", "install it (brew install TheTom/tap/vllm-swift)"),),
    formats=DIRECTORY_FORMATS,
    refuse=refuse,
    engine=engine,
    demand=demand,
    vocabulary=VLLM,
    metrics_path="/metrics",
)
