"""MLX models, one process per InferenceService: the Swift `mlx-server`, else mlx_lm's own server.

Our `mlx_engine.py` runs mlx_lm's server, limits it to this one model and gives that the service's name. The Swift one
has no aliases: it serves the model under its own name. Both take a directory of config.json and *.safetensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from metal_supervisor.confinement.access import Access
from metal_supervisor.runtimes.mlx_arguments import MLX
from metal_supervisor.runtimes.mlx_memory import demand, estimate_of, prompt_cache_bytes, slot_tokens
from metal_supervisor.runtimes.runtime import Binary, Executable, Place, Runtime
from metal_supervisor.spec.arguments import parse, refusal
from metal_supervisor.spec.first_request import smallest
from metal_supervisor.spec.types import DIRECTORY_FORMATS, Engine, Probe, Service

SWIFT = "mlx-server"
MLX_LM = "mlx_lm.server"
GATED = 0, 32, 2
"""First version of mlx-lm that does not run a `model_file` by default."""

NOT_HERE: Mapping[str, tuple[tuple[object, ...], str]] = {
    "batchSize": ((), "MLX has no such batches; see --prefill-step-size in spec.extraArgs"),
    "uBatchSize": ((), "MLX has no such batches; see --prefill-step-size in spec.extraArgs"),
    "flashAttention": ((True,), "MLX's attention is always fused"),
    **dict.fromkeys(("cacheTypeCustomK", "cacheTypeCustomV"), ((), "MLX knows q8_0 and q4_0 as spec.cacheTypeK")),
    **dict.fromkeys(("moeCPUOffload", "moeCPULayers"), ((False, 0), "MLX has the whole model on the GPU")),
    "noKvOffload": ((False,), "MLX has the whole cache on the GPU"),
    "noWarmup": ((False,), "MLX servers warm nothing up"),
    "jinja": ((True,), "MLX servers always use the model's own template"),
    **dict.fromkeys(("reasoningBudget", "reasoningBudgetMessage"), ((), "MLX servers have no limit of reasoning")),
    **dict.fromkeys(("tensorOverrides", "metadataOverrides"), ((), "it is of GGUF files")),
    "ropeScaling": ((), "set rope_scaling in the model's config.json"),
    "idleTtlS": ((), "MLX servers cannot unload their model"),
}
"""Option of the spec that no MLX server honours -> (values that change nothing, why all others are refused)."""

KV_BITS: Mapping[str, int] = {"f16": 0, "bf16": 0, "q8_0": 8, "q4_0": 4}


def refuse(service: Service) -> tuple[str, str] | None:
    """(reason, message) if no MLX server can honour the service's spec, else None."""
    if problem := refusal(parse(service.extra_args, MLX.grammar), MLX.grammar, service.allowed_args, MLX.engine):
        return problem
    if service.mode != "chat":
        return "UnsupportedField", f"spec.mode {service.mode} is not served by MLX servers; use a GGUF model"
    if found := meaningless(service, NOT_HERE):
        return found
    kinds = service.options.get("cacheTypeK", "f16"), service.options.get("cacheTypeV")
    if kinds[0] not in KV_BITS or kinds[1] not in (None, kinds[0]):
        text = f"spec.cacheTypeK must be one of {', '.join(KV_BITS)} for MLX, and cacheTypeV the same or left out"
        return "UnsupportedField", text
    return None


def meaningless(
    service: Service, table: Mapping[str, tuple[tuple[object, ...], str]], engine: str = "MLX"
) -> tuple[str, str] | None:
    """(reason, message) of the first option of the spec that a table like NOT_HERE refuses, else None."""
    for name, (neutral, why) in table.items():
        if service.options.get(name) not in (None, *neutral):
            field = "annotation metal-supervisor.io/idle-ttl" if name == "idleTtlS" else f"spec.{name}"
            return "UnsupportedField", f"{field} has no meaning for {engine}: {why}"
    return None


def lacks(service: Service, binary: Binary) -> tuple[str, str] | None:
    """(reason, message) if this build cannot honour the service's spec, else None."""
    if KV_BITS[service.options.get("cacheTypeK", "f16")] and "--kv-bits" not in binary.flags:
        return "UnsupportedField", f"spec.cacheTypeK: this {binary.name} has no quantized cache (--kv-bits); remove it"
    for each in parse(service.extra_args, MLX.grammar).items if binary.flags else ():
        if each.name.startswith("--") and not each.ignored and each.name not in binary.flags:
            text = f"spec.extraArgs[{each.index}] {each.written!r:.80} is not known to this {binary.name}; remove it"
            return "UnsupportedField", text
    return None


def runs_code(binary: Binary) -> str:
    """Reason why this build runs code that a model contains, or "" if it does not.

    An unknown version is not judged: without one `mlx_engine` exits before it reads a model.
    """
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", binary.version)
    if found is None or tuple(int(part or 0) for part in found.groups()) >= GATED:
        return ""
    text = f"mlx-lm {binary.version} runs the Python file that model_file in a model's config.json names"
    return f"{text}; upgrade it to {'.'.join(map(str, GATED))} or later"


def access(binary: Binary, code: str) -> Access:
    """System access of an MLX server. With mlx_lm that includes `code`, the directory of `mlx_engine.py`."""
    if not binary.interpreter:
        return Access((binary.path,), binary.homes)
    return Access((binary.interpreter,), (*binary.homes, code), python=True)


def engine(service: Service, binary: Binary, place: Place) -> Engine:
    """argv and probes of one MLX server. The user's extra arguments come last, so they win."""
    slots = str(service.options.get("parallelSlots", 1))
    argv = ["--model", place.model_path, "--host", place.host, "--port", str(place.port)]
    if binary.name == SWIFT:
        argv = [binary.path, *argv, "--max-slots", slots, *service.extra_args]
        path, body = smallest(service.mode)
        probe = Probe(expects="ok", busy_path="", names_itself=True, first_path=path, first_body=body)
        return Engine(tuple(argv), service.env, place.cwd, probe)
    names = ",".join(dict.fromkeys((service.name, service.model.name)))
    made, bits = estimate_of(service, argv, place.model), KV_BITS[service.options.get("cacheTypeK", "f16")]
    own = ["--alias", names]
    if (context := made.context if made is not None else slot_tokens(service)) > 0:
        own += ["--context", str(context)]
    wanted = [
        ("--decode-concurrency", slots),
        ("--prompt-concurrency", slots),
        ("--prompt-cache-bytes", str(prompt_cache_bytes(made))),
        *([("--kv-bits", str(bits)), ("--quantized-kv-start", "0")] if bits else []),
    ]
    argv += [part for flag, value in wanted if flag in binary.flags for part in (flag, value)]
    argv = [binary.interpreter, "-E", f"{place.cwd}/current/mlx_engine.py", *own, *argv, *service.extra_args]
    env = tuple(sorted({**dict(service.env), **place.offline}.items()))
    path, body = smallest(service.mode, service.name)
    probe = Probe(expects='"status"', identity=service.name, busy_path="", first_path=path, first_body=body)
    return Engine(tuple(argv), env, place.cwd, probe)


RUNTIME = Runtime(
    name="mlx-server",
    executables=(
        Executable(SWIFT, "mlx_server", "install it (github.com/defilantech/mlx-server)"),
        Executable(MLX_LM, "mlx_lm_server", "install it (pipx install mlx-lm)", True, package="mlx-lm"),
    ),
    formats=DIRECTORY_FORMATS,
    refuse=refuse,
    engine=engine,
    demand=demand,
    lacks=lacks,
    vocabulary=MLX,
    access=access,
    runs_code=runs_code,
)
