"""llama-server: one process per InferenceService, the CRD's fields as its flags.

Builds differ: a flag that one release needs, the next refuses with exit 1 (`--mlock`). So an optional flag is only
given to a binary whose `--help` lists it, and a user's flag that the build does not know is refused by name. Flags that
the memory estimate depends on (slots, context, offload, caches) are always given, because the defaults change between
releases.

Memory is not locked unless spec.extraArgs asks for it (LLMKube's agent always locks it): Metal wires what the GPU works
on anyway and releases it when idle, whereas locked pages stay with the process until it ends, so that a Mac short of
memory could reclaim none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from metal_supervisor.models.metadata import Reading
from metal_supervisor.runtimes import llama_modes
from metal_supervisor.runtimes.llama_arguments import GRAMMAR, VOCABULARY
from metal_supervisor.runtimes.llama_flags import LOAD_MODE, Option, accepted, as_built, options_of
from metal_supervisor.runtimes.llama_memory import checkpoints, demand, prompt_cache_mib
from metal_supervisor.runtimes.runtime import Binary, Executable, Place, Runtime
from metal_supervisor.spec.arguments import FlagVerdict, ParsedArguments, parse, refusal
from metal_supervisor.spec.auxiliary_files import DRAFTED, argument_source, named_files, with_files
from metal_supervisor.spec.environment import as_arguments
from metal_supervisor.spec.first_request import smallest
from metal_supervisor.spec.types import Engine, PartKey, Probe, Role, Service

CONTEXTS = (8192, 4096, 2048)
"""Tokens of a slot to choose from where the spec names no context: the most that fits."""
DEFAULT_CONTEXT = 2048
DEFAULT_BATCH = 2048
DEFAULT_GPU_LAYERS = 99

SLEEP = "--sleep-idle-seconds"
CHECKPOINTS = "--ctx-checkpoints"

SPECULATES = "--spec-type"
LEAST_PROBABLE = "--spec-draft-p-min"
MOST_DRAFTED: Mapping[str, str] = {
    **dict.fromkeys(DRAFTED, "--spec-draft-n-max"),
    "ngram-mod": "--spec-ngram-mod-n-max",
    **{kind: f"--spec-{kind}-size-m" for kind in ("ngram-simple", "ngram-map-k", "ngram-map-k4v")},
}
"""Kind of speculation -> flag for the most tokens it proposes at once; ngram-cache has no such flag."""

CACHE_TYPES = frozenset({"f16", "f32", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"})


OPTION_FLAGS: Mapping[str, str] = {
    "uBatchSize": "--ubatch-size",
    "moeCPUOffload": "--cpu-moe",
    "moeCPULayers": "--n-cpu-moe",
    "noKvOffload": "--no-kv-offload",
    "noWarmup": "--no-warmup",
    "ropeScaling": "--rope-scaling",
    "reasoningBudget": "--reasoning-budget",
    "reasoningBudgetMessage": "--reasoning-budget-message",
    "tensorOverrides": "--override-tensor",
    "metadataOverrides": "--override-kv",
    "cacheTypeK": "--cache-type-k",
    "cacheTypeV": "--cache-type-v",
    "cacheTypeCustomK": "--cache-type-k",
    "cacheTypeCustomV": "--cache-type-v",
}
"""Options of the spec -> flags that only some builds have, or whose values differ between builds."""


def refuse(service: Service) -> tuple[str, str] | None:
    """(reason, message) if this engine cannot honour the service's spec, else None."""
    if problem := refusal(_arguments(service), GRAMMAR, service.allowed_args, "llama-server"):
        return problem
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
    return _odd_value(service.options)


def _arguments(service: Service) -> ParsedArguments:
    return parse(service.extra_args, GRAMMAR)


def _odd_value(options: Mapping[str, Any]) -> tuple[str, str] | None:
    """(reason, message) of the first field whose value its flag would not accept in spec.extraArgs either."""
    for name, flag in OPTION_FLAGS.items():
        said, checks = options.get(name), GRAMMAR.flags[flag].values
        for index, value in enumerate(said if isinstance(said, (list, tuple)) else [said]):
            if checks and isinstance(value, str) and not checks[0].allows(value):
                where = f"spec.{name}[{index}]" if isinstance(said, (list, tuple)) else f"spec.{name}"
                return "InvalidSpec", f"{where} must be {checks[0].says}, not {value!r:.80}"
    return None


def lacks(service: Service, binary: Binary) -> tuple[str, str] | None:
    """(reason, message) if this build cannot honour the service's spec; None also if its help lists no flags."""
    options = options_of(binary.help)
    if not options:
        return None
    for field, flag, value in _fields_as_flags(service.options):
        if problem := _misses(options, flag, value):
            return "UnsupportedField", f"spec.{field}: {problem}"
    return _unknown_argument(service, options)


def _fields_as_flags(options: Mapping[str, Any]) -> Iterator[tuple[str, str, object]]:
    """(field of the spec, its flag, its value) of what not every build has, or has with other values."""
    for name, flag in OPTION_FLAGS.items():
        if options.get(name) is not None and options[name] is not False:
            yield name, flag, options[name]
    if options.get("jinja") is False:
        yield "jinja", "--no-jinja", None
    asked = options.get("speculativeDecoding")
    if asked is not None:
        yield "speculativeDecoding.type", SPECULATES, asked["type"]
        if "nDraftMax" in asked:
            yield "speculativeDecoding.nDraftMax", MOST_DRAFTED[asked["type"]], None
        if "pMin" in asked:
            yield "speculativeDecoding.pMin", LEAST_PROBABLE, None


def _misses(options: Mapping[str, Option], flag: str, value: object) -> str:
    """Reason why a build does not accept a flag with that value, or "" if it does."""
    if flag not in options:
        return f"this llama-server has no {flag}; remove it, or install a build that has it"
    choices = options[flag].choices.split(",") if options[flag].choices else ()
    if choices and isinstance(value, str) and value not in choices:
        return f"this llama-server knows {', '.join(choices)}, not {value!r:.80}; choose one of them"
    return ""


def _unknown_argument(service: Service, options: Mapping[str, Option]) -> tuple[str, str] | None:
    """(reason, message) of the first user argument that this build would exit at, or would parse differently."""
    asked, parsed = accepted(options), _arguments(service)
    variables, _ = as_arguments(service.env, VOCABULARY)
    for where, each in (
        *((f"spec.extraArgs[{each.index}]", each) for each in parsed.items),
        *(("spec.env:", each) for each in parse(variables, GRAMMAR).items),
    ):
        shown, known = f"{where} {each.written!r:.80}", asked.get(each.name)
        if each.flag is not None and each.flag.verdict is FlagVerdict.IGNORED:
            continue
        if known is None:
            text = f"{shown} is not known to this llama-server; remove it, or see its --help for how it is called now"
            return "UnsupportedField", text
        if len(each.values) != known.values:
            return "UnsupportedField", f"{shown} takes {known.values} values in this llama-server; see its --help"
        if each.name in (LOAD_MODE, "-lm") and (problem := _misses(asked, each.name, each.values[0])):
            return "UnsupportedField", f"{shown}: {problem}"
    return None


def _asked(service: Service) -> ParsedArguments:
    """What the spec says in flags: the variables that stand for some, then `spec.extraArgs`."""
    return parse((*as_arguments(service.env, VOCABULARY)[0], *service.extra_args), GRAMMAR)


def _user_arguments(service: Service, further: Mapping[PartKey, str]) -> tuple[str, ...]:
    """`spec.extraArgs` without the ignored flags, and with the local path of each file."""
    parsed = _arguments(service)
    result: list[str] = []
    for each in parsed.items:
        files = named_files(each)
        if files:
            sources = {name: argument_source(name, service.model.artifact, "") for name in files}
            found = {name: further.get(source, "") for name, source in sources.items()}
            result += [each.written, with_files(each, found)]
        elif not each.ignored:
            result += parsed.words(each)
    return tuple(result)


def _capacity(service: Service, place: Place, asked: ParsedArguments) -> list[str]:
    """Flags that determine the memory: offload, context, slots, caches."""
    options, whole_tokens = service.options, llama_modes.undivided(service, place.model, asked, DEFAULT_CONTEXT)
    argv: list[str] = []
    for flag, value, default in (
        ("--n-gpu-layers", service.model.gpu_layers or None, DEFAULT_GPU_LAYERS),
        ("--ctx-size", options.get("contextSize"), DEFAULT_CONTEXT),
        ("--parallel", options.get("parallelSlots"), 1),
        ("--batch-size", options.get("batchSize"), max(DEFAULT_BATCH, whole_tokens)),
    ):
        if value is not None or not asked.given(flag):
            argv += [flag, str(default if value is None else value)]
    if "uBatchSize" in options:
        argv += ["--ubatch-size", str(options["uBatchSize"])]
    elif whole_tokens:
        argv += ["--ubatch-size", str(whole_tokens)]
    for letter in ("K", "V"):
        kind = options.get(f"cacheTypeCustom{letter}") or options.get(f"cacheType{letter}")
        if kind:
            argv += [f"--cache-type-{letter.lower()}", kind]
    if place.threads and not asked.given("--threads"):
        argv += ["--threads", str(place.threads)]
    return argv


def contexts(service: Service, model: Reading) -> tuple[int, ...]:
    """Tokens to choose from for each of `spec.parallelSlots`, the most first; () if the spec names them."""
    asked = _asked(service)
    if "contextSize" in service.options or asked.given("--ctx-size"):
        return ()
    said = "" if "parallelSlots" in service.options else asked.last("--parallel")
    slots = int(said) if said.isdecimal() and int(said) else 1  # those of the field are counted by who chooses
    return tuple(each * slots for each in offered_contexts(model))


def offered_contexts(model: Reading) -> tuple[int, ...]:
    """As `contexts`, by what a model was trained for; () if that is not known."""
    known = llama_modes.trained(model)
    return () if known is None else tuple(dict.fromkeys(min(each, known or DEFAULT_CONTEXT) for each in CONTEXTS))


def _behaviour(options: Mapping[str, Any], asked: ParsedArguments) -> list[str]:
    """The remaining fields of the spec, each as its flag."""
    argv = []
    if "flashAttention" in options or not asked.given("--flash-attn"):
        argv += ["--flash-attn", "off" if options.get("flashAttention") is False else "on"]
    if "jinja" in options or not asked.given("--jinja"):
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
    """Flags for the model's auxiliary files, and for speculative decoding."""
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


def _housekeeping(
    service: Service, binary: Binary, place: Place, asked: ParsedArguments, prompt_cache: int, kept: int | None
) -> list[str]:
    """Flags that not every build has: those that this build lists and the user did not give.

    `prompt_cache`: in MiB. `kept`: checkpoints of each slot, None to leave the flag out.
    """
    wanted = [
        ("--metrics", []),
        ("--fit", ["off"]),
        ("--cache-ram", [str(prompt_cache)]),
        *([] if kept is None else [(CHECKPOINTS, [str(kept)])]),
        # Its own chat is for a browser on this Mac.
        *([] if place.host in ("127.0.0.1", "::1") else [("--no-webui", [])]),
        ("--offline", []),
        # By default a web page of any host may read its answers.
        ("--cors-origins", ["localhost"]),
        ("--no-cors-credentials", []),
    ]
    if "idleTtlS" in service.options:
        wanted.append((SLEEP, [str(service.options["idleTtlS"])]))
    return [
        part
        for flag, values in wanted
        # That no page of an engine's is open to others is not for a variable to undo.
        if flag in binary.flags and not (_arguments(service) if flag == "--no-webui" else asked).given(flag)
        for part in (flag, *values)
    ]


def engine(service: Service, binary: Binary, place: Place) -> Engine:
    """argv and probes of one llama-server. The user's extra arguments come last, so they win.

    A variable that stands for a flag wins over our default for that flag, and a field of the spec over the variable.

    A build that cannot unload an idle model (`--sleep-idle-seconds`) keeps it loaded.
    """
    options = options_of(binary.help)
    variables, env = as_arguments(service.env, VOCABULARY)
    service = replace(service, extra_args=as_built(_user_arguments(service, place.further), options))
    asked = _asked(service)
    names = dict.fromkeys((service.name, service.model.name))
    # As in the engine itself, variables give way to flags.
    argv = [binary.path, *as_built(variables, options), "--model", place.model_path, "--alias", ",".join(names)]
    argv += ["--host", place.host, "--port", str(place.port)]
    argv += _capacity(service, place, asked) + _behaviour(service.options, asked)
    argv += _further(service, place) + llama_modes.flags(service, place.model, asked)
    # The engine's own default of 8 GiB would come on top of everything else.
    prompt_cache = prompt_cache_mib([*argv, *service.extra_args], place.model) if service.mode == "chat" else 0
    kept = None
    if service.mode == "chat" and not asked.given(CHECKPOINTS):
        # Nor does the engine bound these, by anything but their number.
        kept = checkpoints(["--cache-ram", str(prompt_cache), *argv, *service.extra_args], place.model)
    argv += _housekeeping(service, binary, place, asked, prompt_cache, kept) + list(service.extra_args)
    whole = parse(tuple(argv), GRAMMAR)
    path, body = smallest(service.mode, service.name)
    if whole.last("--pooling") == "none":
        path, body = "", ""  # OpenAI's endpoints do not answer then
    locked = "LLAMA_API_KEY" in dict(service.env)  # newer builds list their models only for those who have it
    probe = Probe(
        expects='"status"',
        identity="" if locked else service.name,
        asleep_path="/props" if whole.given(SLEEP) else "",
        first_path=path,
        first_body=body,
    )
    return Engine(argv=tuple(argv), env=env, cwd=place.cwd, probe=probe)


RUNTIME = Runtime(
    name="llama-server",
    executables=(Executable("llama-server", "llama_server", "install it (brew install llama.cpp)"),),
    formats=frozenset({"gguf"}),
    refuse=refuse,
    engine=engine,
    demand=lambda _service, argv, model, reading_of: demand(argv, model, reading_of),
    lacks=lacks,
    contexts=contexts,
    vocabulary=VOCABULARY,
    metrics_path="/metrics",
)
