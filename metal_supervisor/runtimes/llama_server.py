"""llama-server: one process per InferenceService, the CRD's fields as its flags.

Builds differ: a flag that one release needs, the next refuses with exit 1 (`--mlock`), so an optional
flag is only given to a binary whose `--help` names it, and one that the user wrote is refused by name where the
build does not know it. What admission and reality must agree on (slots, context, offload, caches) is always given,
because the defaults change between releases.

Memory is not locked unless the user says so in spec.extraArgs (LLMKube's agent always does): Metal wires what the GPU
works on anyway and lets it go when it is idle, whereas locked pages stay with the process until it ends, so that a
Mac short of memory could get none of them back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from metal_supervisor.core.companions import DRAFTED, adapter_source
from metal_supervisor.core.first_request import smallest
from metal_supervisor.core.types import Engine, Probe, Role, Service
from metal_supervisor.runtimes.llama_flags import (
    LOAD_MODE,
    Option,
    accepted,
    arguments_of,
    as_built,
    folded,
    options_of,
)
from metal_supervisor.runtimes.llama_memory import VALUES, checkpoints, prompt_cache_mib
from metal_supervisor.runtimes.place import Binary, Place

DEFAULT_CONTEXT, DEFAULT_BATCH, DEFAULT_GPU_LAYERS = 2048, 2048, 99

MODEL = "the model comes from spec.modelRef"
ONE = "one InferenceService serves one model"
PRINTS = "the engine would print something and end"
TOKEN = "a token in argv is readable by every user"
PLAIN = "the health check and the Service speak plain HTTP"
COMMANDS = "engines may listen on all interfaces, and these run commands"
WEB_PAGES = "it would let web pages of other hosts use the engine"
FETCHES = "the engine would fetch it by itself, and nobody can tell its size"
LISTENS: Mapping[str, str] = {
    "--host": "engines listen where this Mac's setting --bind says",
    "--port": "the port is chosen by this Mac; set spec.containerPort to prefer one",
    "--reuse-port": "two servers on one port would answer for each other",
}
OWNED: Mapping[str, str] = {
    **LISTENS,
    **dict.fromkeys(("--model", "-m", "--model-url", "-mu", "--hf-repo", "-hf", "-hfr", "--hf-file", "-hff",
                     "--docker-repo", "-dr"), MODEL),
    **dict.fromkeys(("--alias", "-a"), "the served name is the InferenceService's"),
    **dict.fromkeys(("--models-dir", "--models-preset", "--models-max", "--models-autoload"), ONE),
    "--api-prefix": "it would move the health check",
    "--api-key": f"{TOKEN}; set LLAMA_API_KEY in spec.env",
    **dict.fromkeys(("--hf-token", "-hft"), f"{TOKEN}; set HF_TOKEN in spec.env"),
    **dict.fromkeys(("--ssl-key-file", "--ssl-cert-file"), PLAIN),
    **dict.fromkeys(("--help", "-h", "--usage", "--version", "--list-devices", "--cache-list", "-cl",
                     "--completion-bash"), PRINTS),
}  # fmt: skip
"""Flags that are ours, and why; refused in spec.extraArgs in every spelling."""

GUARDED: Mapping[str, str] = {
    **dict.fromkeys(("--agent", "-ag", "--tools"), COMMANDS),
    **dict.fromkeys(("--ui-mcp-proxy", "--webui-mcp-proxy"),
                    "engines may listen on all interfaces, and it would proxy for anybody"),
    **dict.fromkeys(("--mmproj-url", "-mmu", "--spec-draft-hf", "--hf-repo-draft", "-hfd", "-hfrd", "--hf-repo-v",
                     "-hfv", "-hfrv"), FETCHES),
    **dict.fromkeys(("--cors-origins", "--cors-methods", "--cors-headers", "--cors-credentials",
                     "--no-cors-credentials"), WEB_PAGES),
    "--path": "it would give the files of a directory to anybody",
    "--media-path": "it would give the files of a directory to anybody",
    "--slot-save-path": "whoever may ask the engine could write files of this Mac",
    **dict.fromkeys(("--lookup-cache-dynamic", "-lcd"), "it would write a file of this Mac"),
    "--log-file": "it would write a file of this Mac; the engine's log is kept and rotated without it",
    "--log-prompts-dir": "it would write down what is asked",
    "--video-ffmpeg-dir": "it would run programs of that directory",
    "--api-key-file": "it would read a file of this Mac; set LLAMA_API_KEY in spec.env",
}  # fmt: skip
"""Flags that reach beyond the engine, and how; refused unless this Mac's setting --allow-extra-args names them."""

GUARDED_KINDS = re.compile(r"--(tools|mcp-servers)-.*")
PRESET = re.compile(r"--(fim|gpt-oss|vision-gemma|embd-gemma)-.*|--(?!spec-).*-default")
"""Presets bring a model of their own, and with it a port."""

SLEEP = "--sleep-idle-seconds"
CHECKPOINTS = "--ctx-checkpoints"

SPECULATES, LEAST_PROBABLE = "--spec-type", "--spec-draft-p-min"
MOST_DRAFTED: Mapping[str, str] = {
    **dict.fromkeys(DRAFTED, "--spec-draft-n-max"),
    "ngram-mod": "--spec-ngram-mod-n-max",
    **{kind: f"--spec-{kind}-size-m" for kind in ("ngram-simple", "ngram-map-k", "ngram-map-k4v")},
}
"""Kind of speculation -> what bounds how many tokens it proposes at once; ngram-cache has no such bound."""

CACHE_TYPES = frozenset({"f16", "f32", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"})


OPTION_FLAGS: Mapping[str, str] = {
    "uBatchSize": "--ubatch-size", "moeCPUOffload": "--cpu-moe", "moeCPULayers": "--n-cpu-moe",
    "noKvOffload": "--no-kv-offload", "noWarmup": "--no-warmup", "ropeScaling": "--rope-scaling",
    "reasoningBudget": "--reasoning-budget", "reasoningBudgetMessage": "--reasoning-budget-message",
    "tensorOverrides": "--override-tensor", "metadataOverrides": "--override-kv", "cacheTypeK": "--cache-type-k",
    "cacheTypeV": "--cache-type-v", "cacheTypeCustomK": "--cache-type-k", "cacheTypeCustomV": "--cache-type-v",
}  # fmt: skip
"""Options of the spec that only some builds have a flag for, or whose values differ between builds."""


def _flag(argument: str) -> str:
    """The flag's own name: without `=value`, with llama.cpp's `_` spelling folded."""
    return folded(argument.partition("=")[0])


def _not_yours(flag: str, allowed: frozenset[str]) -> str:
    """Why a user may not set a flag, "" if they may."""
    if PRESET.fullmatch(flag):
        return "a preset brings a model of its own"
    if flag in OWNED:
        return OWNED[flag]
    guarded = GUARDED.get(flag) or (COMMANDS if GUARDED_KINDS.fullmatch(flag) else "")
    if not guarded or flag in allowed:
        return ""
    return f"{guarded}; whoever runs this Mac can allow it with its setting --allow-extra-args={flag}"


def refuse(service: Service) -> tuple[str, str] | None:
    """(reason, message) for what this engine cannot be asked for."""
    for index, argument in enumerate(service.extra_args):
        flag = _flag(argument)
        if reason := _not_yours(flag, service.allowed_args):
            return "InvalidSpec", f"spec.extraArgs[{index}] {flag:.80} is not yours to set: {reason}"
    if service.options.get("ropeScaling", {}).get("type") == "longrope":
        return "UnsupportedField", "spec.ropeScaling.type longrope is unknown to llama-server; use linear or yarn"
    asked = service.options.get("speculativeDecoding", {})
    if "nDraftMax" in asked and asked["type"] not in MOST_DRAFTED:
        text = f"spec.speculativeDecoding.nDraftMax means nothing to {asked['type']}; remove it"
        return "UnsupportedField", text
    for name in ("cacheTypeK", "cacheTypeV"):
        value = service.options.get(name)
        if value is not None and value not in CACHE_TYPES:
            return "InvalidSpec", f"spec.{name} must be one of {', '.join(sorted(CACHE_TYPES))}, not {value!r}"
    return None


def lacks(service: Service, binary: Binary) -> tuple[str, str] | None:
    """(reason, message) for what this build cannot be asked for; None as well where its help does not tell."""
    options = options_of(binary.help)
    if not options:
        return None
    for name, flag in OPTION_FLAGS.items():
        value = service.options.get(name)
        if value is not None and value is not False and (problem := _misses(options, flag, value)):
            return "UnsupportedField", f"spec.{name}: {problem}"
    if service.options.get("jinja") is False and (problem := _misses(options, "--no-jinja", None)):
        return "UnsupportedField", f"spec.jinja: {problem}"
    return _unable_to_speculate(service, options) or _unknown_argument(service.extra_args, options)


def _unable_to_speculate(service: Service, options: Mapping[str, Option]) -> tuple[str, str] | None:
    asked = service.options.get("speculativeDecoding")
    if asked is None:
        return None
    wanted = {"type": (SPECULATES, asked["type"])}
    if "nDraftMax" in asked:
        wanted["nDraftMax"] = (MOST_DRAFTED[asked["type"]], "")
    if "pMin" in asked:
        wanted["pMin"] = (LEAST_PROBABLE, "")
    for name, (flag, value) in wanted.items():
        if problem := _misses(options, flag, value or None):
            return "UnsupportedField", f"spec.speculativeDecoding.{name}: {problem}"
    return None


def _misses(options: Mapping[str, Option], flag: str, value: object) -> str:
    """Why a build cannot be given a flag with that value, "" if it can."""
    if flag not in options:
        return f"this llama-server has no {flag}; remove it, or install a build that has it"
    choices = options[flag].choices.split(",") if options[flag].choices else ()
    if choices and isinstance(value, str) and value not in choices:
        return f"this llama-server knows {', '.join(choices)}, not {value!r:.80}; choose one of them"
    return ""


def _unknown_argument(extra_args: tuple[str, ...], options: Mapping[str, Option]) -> tuple[str, str] | None:
    """Of the user's arguments the first that this build would end at, in whatever spelling."""
    asked = accepted(options)
    for each in arguments_of(extra_args, asked):
        wrong, known = extra_args[each.index], asked.get(each.name)
        where = f"spec.extraArgs[{each.index}] {wrong!r:.80}"
        if known is not None:
            if len(each.values) < known.values:
                return "InvalidSpec", f"{where} needs a value; add it as the next item"
            if each.name in LOAD_MODE and known.choices and (problem := _misses(asked, each.name, each.values[0])):
                return "UnsupportedField", f"{where}: {problem}"
        elif not wrong.startswith("-"):
            return "InvalidSpec", f"{where} is neither a flag nor the value of one; remove it, or name its flag"
        elif (plain := _flag(wrong)) in asked:
            return "InvalidSpec", f"{where}: llama-server takes no '='; write {plain} and its value as two items"
        else:
            text = f"{where} is not known to this llama-server; remove it, or see its --help for how it is called now"
            return "UnsupportedField", text
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


def _further(service: Service, place: Place) -> list[str]:
    """Companions of the model, and how it speculates."""
    argv = ["--mmproj", place.further[Role.PROJECTOR]] if Role.PROJECTOR in place.further else []
    asked = service.options.get("speculativeDecoding")
    if asked is None:
        return argv
    argv += [SPECULATES, asked["type"]]
    if Role.DRAFT in place.further:
        argv += ["--model-draft", place.further[Role.DRAFT]]
        layers = next(each.gpu_layers for each in service.companions if each.role is Role.DRAFT)
        argv += ["--n-gpu-layers-draft", str(layers)] if layers not in (None, 0) else []
    if "nDraftMax" in asked:
        argv += [MOST_DRAFTED[asked["type"]], str(asked["nDraftMax"])]
    return [*argv, LEAST_PROBABLE, str(asked["pMin"])] if "pMin" in asked else argv


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
        # By default it lets the page of any host read its answers.
        ("--cors-origins", ["localhost"]),
        ("--no-cors-credentials", []),
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
    said = tuple(place.further.get(adapter_source(value), value) for value in service.extra_args)
    service = replace(service, extra_args=as_built(said, options_of(binary.help)))
    names = dict.fromkeys((service.name, service.model.name))
    argv = [binary.path, "--model", place.model_path, "--alias", ",".join(names)]
    argv += ["--host", place.host, "--port", str(place.port)]
    argv += _capacity(service, place) + _behaviour(service.options) + _further(service, place) + _mode(service)
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
