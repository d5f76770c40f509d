"""MLX models by vLLM with a Swift engine (github.com/TheTom/vllm-swift), one process per InferenceService.

`vllm-swift serve` is a thin command before vLLM's own server, and hands it every flag as it is. That server's flags can
load code, open further ports and join other machines, and may be abbreviated, spelt with `_` or given as JSON; so what
a user adds is judged by the long name of the flag that it could stand for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from metal_supervisor.core.demand import Demand, Reading
from metal_supervisor.core.estimate import Estimate, Settings, by_size
from metal_supervisor.core.estimate_mlx import CannotEstimate, estimate_mlx
from metal_supervisor.core.sizes import MIB
from metal_supervisor.core.types import Engine, Probe, Service
from metal_supervisor.runtimes.mlx_memory import values_of, whole
from metal_supervisor.runtimes.mlx_server import NOT_HERE, meaningless
from metal_supervisor.runtimes.place import Binary, Place

NAME = "vllm-swift"
PYTHON_BYTES = 1536 * MIB
"""Of vLLM's two processes, which both have PyTorch; not measured on a Mac, a relative of one process took 800 MB."""
CACHE_BITS = 8
"""What a number of a compressed cache is charged. It should take half of that, but earlier releases did not compress
everywhere, and it is unpacked block by block to be read."""

_ALONE = "one InferenceService is served by one process on one Mac"
_CODE = "it would run code, or load files, that nobody has judged"
_OPEN = "it would change who can reach the engine, or what it tells of this Mac"
_AWAY = "it would send what is asked to another program"
_OTHER = "the model comes from spec.modelRef"
OWNED: Mapping[str, str] = {
    "--host": "engines listen where this Mac's setting --bind says",
    "--port": "the port is chosen by this Mac; set spec.containerPort to prefer one",
    "--model": _OTHER,
    "--model-tag": _OTHER,
    "--tokenizer": _OTHER,
    "--hf-config-path": _OTHER,
    "--served-model-name": "the served name is the InferenceService's",
    "--max-model-len": "set spec.contextSize",
    "--max-num-seqs": "set spec.parallelSlots",
    "--additional-config": "set spec.cacheTypeCustomK",
    "--api-key": "a flag can be read by everybody on this Mac; set VLLM_API_KEY in spec.env",
    **dict.fromkeys(("--uds", "--grpc", "--root-path", "--allowed-origins"), _OPEN),
    **dict.fromkeys(("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-ciphers"), _OPEN),
    **dict.fromkeys(("--allowed-local-media-path", "--allowed-media-domains", "--enable-ssl-refresh"), _OPEN),
    **dict.fromkeys(("--headless", "--api-server-count", "--tensor-parallel-size", "--pipeline-parallel-size"), _ALONE),
    **dict.fromkeys(("--nnodes", "--node-rank", "--master-addr", "--master-port"), _ALONE),
    **dict.fromkeys(("--distributed-executor-backend", "--enable-expert-parallel"), _ALONE),
    **dict.fromkeys(("--config", "--trust-remote-code", "--middleware", "--logits-processors", "--tool-server"), _CODE),
    **dict.fromkeys(("--download-dir", "--trust-request-chat-template", "--lora-modules", "--enable-lora"), _CODE),
    **dict.fromkeys(("--enable-prompt-embeds", "--enable-mm-embeds", "--model-loader-extra-config"), _CODE),
    **dict.fromkeys(("--enable-longctx", "--retrieval-endpoint", "--otlp-traces-endpoint"), _AWAY),
}
"""Flags that are ours, or unsafe, and why."""
FAMILIES: Mapping[str, str] = {
    "--data-parallel-": _ALONE,
    "--ssl-": _OPEN,
    "--longctx-": _AWAY,
    "--kv-transfer-": _ALONE,
    "--kv-events-": _AWAY,
}
"""Beginnings of flags of which none is the user's, and why."""
ENDINGS = ("-cls", "-plugin", "-config", "-class")
"""Of flags that name Python code, or carry settings of any kind."""
JSON_FLAGS = frozenset({"--default-chat-template-kwargs", "--limit-mm-per-prompt"})
"""Flags whose value may be JSON."""
OWN_ENV = frozenset({"VLLM_API_KEY", "VLLM_LOGGING_LEVEL"})
FOREIGN_ENV = re.compile(r"(PYTHON|HF_|TRANSFORMERS_|VLLM_|LONGCTX_).*")

TURBO_BITS: Mapping[str, int] = {"turbo4v2": 4, "turbo4": 4, "turbo3": 3, "turbo2": 2}
"""Scheme of a compressed cache -> its bits."""
FIELDS: Mapping[str, tuple[tuple[object, ...], str]] = {
    **{name: row for name, row in NOT_HERE.items() if not name.startswith("cacheTypeCustom")},
    "batchSize": ((), "vLLM makes its batches by itself"),
    "uBatchSize": ((), "vLLM makes its batches by itself"),
    "cacheTypeK": (("f16",), f"vllm-swift has {', '.join(TURBO_BITS)}, as spec.cacheTypeCustomK"),
    "cacheTypeV": (("f16",), f"vllm-swift has {', '.join(TURBO_BITS)}, as spec.cacheTypeCustomK"),
    "noWarmup": ((False,), "vLLM always warms up"),
}
"""Options of the spec that it does not honour: the values that change nothing, and why the others are refused."""


def refuse(service: Service) -> tuple[str, str] | None:
    """(reason, message) for what vllm-swift cannot be asked for."""
    for index, flag, why in _unwelcome(service.extra_args):
        return "InvalidSpec", f"spec.extraArgs[{index}] {flag} is not yours to set: {why}"
    for name, _ in service.env:
        if FOREIGN_ENV.fullmatch(name) and name not in OWN_ENV:
            return "InvalidSpec", f"spec.env: {name} would change what the engine loads or runs; remove it"
    if service.mode != "chat":
        return "UnsupportedField", f"spec.mode {service.mode} is not served by vllm-swift; use a GGUF model"
    if found := meaningless(service, FIELDS):
        return found
    kinds = service.options.get("cacheTypeCustomK"), service.options.get("cacheTypeCustomV")
    if kinds[0] not in (None, *TURBO_BITS) or kinds[1] not in (None, kinds[0]):
        text = f"must be one of {', '.join(TURBO_BITS)} for vllm-swift, and cacheTypeCustomV the same or left out"
        return "UnsupportedField", f"spec.cacheTypeCustomK {text}"
    return None


def _unwelcome(arguments: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """(index, argument, why) of each argument that the engine must not be given."""
    takes, before = False, ""
    for index, argument in enumerate(arguments):
        if not argument.startswith("-") or re.fullmatch(r"-[0-9.]+", argument):
            if not takes:
                yield index, argument, "it belongs to no flag"
            elif argument.lstrip()[:1] in ("{", "[") and before not in JSON_FLAGS:
                yield index, before, "JSON can set anything; it is not passed on"
            takes = False
            continue
        before, equals, value = argument.replace("_", "-").partition("=")
        takes = not equals
        if why := _why(before):
            yield index, argument.partition("=")[0], why
        elif value.lstrip()[:1] in ("{", "[") and before not in JSON_FLAGS:
            yield index, before, "JSON can set anything; it is not passed on"


def _why(flag: str) -> str:
    """Why a flag, `_` written as `-`, is not the user's; "" if it is."""
    if "." in flag:
        return "a part of a setting is not passed on; it could set anything"
    if not re.fullmatch(r"--[a-z][a-z0-9-]+", flag):
        return "use its long name, so that it can be judged"
    for beginning, why in FAMILIES.items():
        if flag.startswith(beginning) or beginning.startswith(flag):
            return why
    if flag.endswith(ENDINGS):
        return OWNED.get(flag, _CODE)
    return OWNED.get(flag) or next((why for owned, why in OWNED.items() if owned.startswith(flag)), "")


def engine(service: Service, binary: Binary, place: Place) -> Engine:
    """argv and probes of one vllm-swift. With a key, its list of models is closed to us: it goes by its port alone."""
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
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": f"{place.cwd}/hub", "VLLM_NO_USAGE_STATS": "1"}
    env = {**dict(service.env), **offline}
    identity = "" if env.get("VLLM_API_KEY") else service.name
    probe = Probe(identity=identity, busy_path="")
    return Engine((*argv, *service.extra_args), tuple(sorted(env.items())), place.cwd, probe)


def demand(
    _service: Service, argv: Sequence[str], model: Reading, _reading_of: Callable[[str], Reading | None]
) -> Demand:
    """What vllm-swift with this command line and model will take.

    vLLM's own share of memory (`--gpu-memory-utilization`) is only what its scheduler reckons with: the Swift engine
    allocates a cache of `--max-model-len` for each of `--max-num-seqs`, once it has something to answer. What MLX keeps
    of freed buffers is bound by that share alone; it is not foreseen here, but counted as soon as it is measured.
    """
    said = values_of(argv)
    context, slots = whole(said.get("--max-model-len"), 0), whole(said.get("--max-num-seqs"), 1)
    made = _estimate(context, slots, "--additional-config" in said, model)
    if made is None:
        return Demand(None, text=model.problem or "the size of its model is not known")
    return Demand(made.total_bytes, made.mapped_bytes, made.explain())


def _estimate(context: int, slots: int, compressed: bool, model: Reading) -> Estimate | None:
    """By config.json, or else by size; None if neither is known."""
    if model.size_bytes is None:
        return None
    why = model.problem
    if model.config is not None:
        try:
            made = estimate_mlx(model.size_bytes, model.config, context, slots, CACHE_BITS if compressed else None)
        except CannotEstimate as error:
            why = str(error)
        else:
            # A prompt is read into a cache of its own before that is copied into its slot.
            scratch = made.compute_bytes + made.kv_bytes // made.slots
            return replace(made, compute_bytes=scratch, overhead_bytes=PYTHON_BYTES)
    made = by_size(model.size_bytes, Settings(context=context, slots=slots, mmap=False), why)
    return replace(made, overhead_bytes=made.overhead_bytes + PYTHON_BYTES)
