"""llama-server: one process per InferenceService, the CRD's fields as its flags.

Builds differ: a flag that one release needs, the next refuses with exit 1 (`--mlock`), so an optional
flag is only given to a binary whose `--help` names it. What admission and reality must agree on
(slots, context, offload, caches) is always given, because the defaults change between releases.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from metal_supervisor.core.first_request import smallest
from metal_supervisor.core.types import Engine, Probe, Service
from metal_supervisor.runtimes.llama_memory import VALUES, checkpoints, prompt_cache_mib
from metal_supervisor.runtimes.place import Binary, Place

DEFAULT_CONTEXT, DEFAULT_BATCH, DEFAULT_GPU_LAYERS = 2048, 2048, 99

OWNED: Mapping[str, str] = {
    "--host": "engines listen where this Mac's setting --bind says",
    "--port": "the port is chosen by this Mac; set spec.containerPort to prefer one",
    "--reuse-port": "two servers on one port would answer for each other",
    "--model": "the model comes from spec.modelRef",
    "-m": "the model comes from spec.modelRef",
    "--alias": "the served name is the InferenceService's",
    "-a": "the served name is the InferenceService's",
    "--model-url": "the model comes from spec.modelRef",
    "-mu": "the model comes from spec.modelRef",
    "--hf-repo": "the model comes from spec.modelRef",
    "-hf": "the model comes from spec.modelRef",
    "-hfr": "the model comes from spec.modelRef",
    "--hf-file": "the model comes from spec.modelRef",
    "-hff": "the model comes from spec.modelRef",
    "--docker-repo": "the model comes from spec.modelRef",
    "-dr": "the model comes from spec.modelRef",
    "--models-dir": "one InferenceService serves one model",
    "--models-preset": "one InferenceService serves one model",
    "--api-prefix": "it would move the health check",
    "--api-key": "a token in argv is readable by every user; set LLAMA_API_KEY in spec.env",
    "--ssl-key-file": "the health check and the Service speak plain HTTP",
    "--ssl-cert-file": "the health check and the Service speak plain HTTP",
    "--tools": "engines may listen on all interfaces, and these run commands",
    "--agent": "engines may listen on all interfaces, and these run commands",
    "--ui-mcp-proxy": "engines may listen on all interfaces, and it would proxy for anybody",
    "--webui-mcp-proxy": "engines may listen on all interfaces, and it would proxy for anybody",
    "--hf-token": "a token in argv is readable by every user",
    "-hft": "a token in argv is readable by every user",
}
"""Flags that are ours, or unsafe, and why; refused in spec.extraArgs in every spelling."""

PRESET = re.compile(r"--(fim|gpt-oss|vision-gemma|embd-gemma|mcp-servers)-.*|--.*-default")
"""Presets bring a model of their own, and with it a port."""

SLEEP = "--sleep-idle-seconds"
CHECKPOINTS = "--ctx-checkpoints"

CACHE_TYPES = frozenset({"f16", "f32", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"})


def _flag(argument: str) -> str:
    """The flag's own name: without `=value`, with llama.cpp's `_` spelling folded."""
    name = argument.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def refuse(service: Service) -> tuple[str, str] | None:
    """(reason, message) for what this engine cannot be asked for."""
    for index, argument in enumerate(service.extra_args):
        flag = _flag(argument)
        reason = "a preset brings a model of its own" if PRESET.fullmatch(flag) else OWNED.get(flag)
        if reason:
            return "InvalidSpec", f"spec.extraArgs[{index}] {flag} is not yours to set: {reason}"
    if service.options.get("ropeScaling", {}).get("type") == "longrope":
        return "UnsupportedField", "spec.ropeScaling.type longrope is unknown to llama-server; use linear or yarn"
    for name in ("cacheTypeK", "cacheTypeV"):
        value = service.options.get(name)
        if value is not None and value not in CACHE_TYPES:
            return "InvalidSpec", f"spec.{name} must be one of {', '.join(sorted(CACHE_TYPES))}, not {value!r}"
    return None


def _given(service: Service, *flags: str) -> bool:
    return any(_flag(argument) in flags for argument in service.extra_args)


def _capacity(service: Service, place: Place) -> list[str]:
    """What decides the memory: offload, context, slots, caches."""
    options = service.options
    layers = service.model.gpu_layers
    argv = ["--n-gpu-layers", str(layers if layers not in (None, 0) else DEFAULT_GPU_LAYERS)]
    argv += ["--ctx-size", str(options.get("contextSize", DEFAULT_CONTEXT))]
    argv += ["--parallel", str(options.get("parallelSlots", 1))]
    argv += ["--batch-size", str(options.get("batchSize", DEFAULT_BATCH))]
    if "uBatchSize" in options:
        argv += ["--ubatch-size", str(options["uBatchSize"])]
    for letter in ("K", "V"):
        kind = options.get(f"cacheTypeCustom{letter}") or options.get(f"cacheType{letter}")
        if kind:
            argv += [f"--cache-type-{letter.lower()}", kind]
    if place.threads and not _given(service, "--threads", "-t"):
        argv += ["--threads", str(place.threads)]
    return argv


def _behaviour(options: Mapping[str, Any]) -> list[str]:
    """The remaining fields of the spec, each as its flag."""
    argv = ["--flash-attn", "off" if options.get("flashAttention") is False else "on"]
    argv.append("--jinja" if options.get("jinja", True) else "--no-jinja")
    for name, flag in (("moeCPUOffload", "--cpu-moe"), ("noKvOffload", "--no-kv-offload"), ("noWarmup", "--no-warmup")):
        if options.get(name):
            argv.append(flag)
    if options.get("moeCPULayers"):
        argv += ["--n-cpu-moe", str(options["moeCPULayers"])]
    if rope := options.get("ropeScaling"):
        argv += ["--rope-scaling", rope["type"]]
        argv += ["--rope-scale", rope["factor"]] if rope["factor"] else []
        argv += ["--yarn-orig-ctx", str(rope["originalContext"])] if rope["originalContext"] else []
    if "reasoningBudget" in options:
        argv += ["--reasoning-budget", str(options["reasoningBudget"])]
    if options.get("reasoningBudgetMessage"):
        argv += ["--reasoning-budget-message", options["reasoningBudgetMessage"]]
    for name, flag in (("tensorOverrides", "--override-tensor"), ("metadataOverrides", "--override-kv")):
        for value in options.get(name, ()):
            argv += [flag, value]
    return argv


def _mode(service: Service) -> list[str]:
    wanted = {
        "chat": [],
        "embedding": [["--embedding"], ["--pooling", "last"]],
        "rerank": [["--reranking"], ["--embedding"], ["--pooling", "rank"]],
    }[service.mode]
    spellings = {"--embedding": ("--embedding", "--embeddings"), "--reranking": ("--reranking", "--rerank")}
    return [part for flag in wanted if not _given(service, *spellings.get(flag[0], (flag[0],))) for part in flag]


def _housekeeping(service: Service, binary: Binary, prompt_cache: int, kept: int | None) -> list[str]:
    """Flags that not every build has, given only to one that names them.

    `prompt_cache`: in MiB. `kept`: checkpoints of each slot, None to say nothing of them.
    """
    wanted = [
        ("--metrics", []),
        ("--fit", ["off"]),
        ("--cache-ram", [str(prompt_cache)]),
        *([] if kept is None else [(CHECKPOINTS, [str(kept)])]),
        ("--no-webui", []),
        ("--offline", []),
    ]
    if "idleTtlS" in service.options:
        wanted.append((SLEEP, [str(service.options["idleTtlS"])]))
    return [
        part
        for flag, values in wanted
        if flag in binary.flags and not _given(service, flag)
        for part in (flag, *values)
    ]


def _unpooled(argv: list[str]) -> bool:
    """Whether embeddings are asked for token by token."""
    said = [value for flag, value in pairwise(argv) if _flag(flag) == "--pooling"]
    return said[-1:] == ["none"] or "--pooling=none" in argv


def engine(service: Service, binary: Binary, place: Place) -> Engine:
    """argv and probes of one llama-server. The user's extra arguments come last, so they win.

    A build that does not know how to unload an idle model (`--sleep-idle-seconds`) keeps it loaded.
    """
    names = dict.fromkeys((service.name, service.model.name))
    argv = [binary.path, "--model", place.model_path, "--alias", ",".join(names)]
    argv += ["--host", place.host, "--port", str(place.port)]
    argv += _capacity(service, place) + _behaviour(service.options) + _mode(service)
    # The engine's own default of 8 GiB would come on top of everything else.
    prompt_cache = prompt_cache_mib([*argv, *service.extra_args], place.model) if service.mode == "chat" else 0
    kept = None
    if service.mode == "chat" and not _given(service, *VALUES["checkpoints"]):
        # Nor does the engine bound these, by anything but their number.
        kept = checkpoints([*argv, "--cache-ram", str(prompt_cache), *service.extra_args], place.model)
    argv += _housekeeping(service, binary, prompt_cache, kept) + list(service.extra_args)
    sleeps = any(_flag(argument) == SLEEP for argument in argv)
    path, body = smallest(service.mode, service.name)
    if _unpooled(argv):
        path, body = "", ""  # no endpoint of OpenAI's answers then
    probe = Probe(
        expects='"status"',
        identity=service.name,
        asleep_path="/props" if sleeps else "",
        first_path=path,
        first_body=body,
    )
    return Engine(argv=tuple(argv), env=service.env, cwd=place.cwd, probe=probe)
