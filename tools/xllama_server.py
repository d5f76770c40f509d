#!/usr/bin/env python3
"""Where the packaged llama-server binary doesn't run, tests still need a real engine with llama-server's command line.

The Python package `xllamacpp` holds llama.cpp and its real HTTP server as a portable library, but no command. This is
the missing command: llama-server's flags in, the library's parameters out. Loading, `/health`, `/slots`, `/metrics`,
streaming and every answer are llama.cpp's own.

As with llama-server: an unknown flag, a bad value, a taken port and a model that cannot be loaded end it with 1; a
signal while loading kills it; SIGTERM when idle ends it with 0, and waits for a request that is not streamed.

Different from llama-server: a second SIGTERM kills it (llama-server ends with 1); a model is required (there is no
router mode); `--override-kv` is accepted and ignored with a warning, because the library has no such parameter; flags
that no test needs are unknown. `LLAMA_API_KEY` is the only environment variable that is read.
`tools/find_llama_server.py` installs it as `llama-server`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""The tensors that --cpu-moe keeps off the GPU."""


class UsageError(Exception):
    """A command line that llama-server would refuse; the text is the whole message."""


@dataclass
class Launch:
    """The library and what the command line has said so far."""

    x: Any
    """The xllamacpp module."""
    params: Any
    """Its CommonParams."""
    overrides: list[str] = field(default_factory=list)
    """pattern=buffer of every tensor override; the library takes them as one string."""
    warnings: list[str] = field(default_factory=list)
    """What was accepted without effect."""

    def enum(self, kind: str, prefix: str, value: str, names: dict[str, str]) -> Any:
        """Member of one of the library's enumerations by llama-server's name for it."""
        if value not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        return getattr(getattr(self.x, kind), prefix + names[value])


Apply = Callable[[Launch, str], None]


@dataclass(frozen=True)
class Flag:
    names: tuple[str, ...]
    """All spellings, the common one last."""
    metavar: str
    """What the value is called in --help; empty for a switch."""
    help: str
    """One line for --help."""
    apply: Apply
    """Puts it into the parameters; a ValueError is a bad value."""


def attribute(name: str, convert: Callable[[str], Any] = int) -> Apply:
    """Sets params.<name>, where dots lead into nested parameters."""
    *path, last = name.split(".")

    def apply(launch: Launch, value: str) -> None:
        target = launch.params
        for part in path:
            target = getattr(target, part)
        setattr(target, last, convert(value))

    return apply


def constant(name: str, value: Any) -> Apply:
    return attribute(name, lambda _: value)


def nothing(_launch: Launch, _value: str) -> None:
    """For flags whose effect is the library's default, or has no meaning in it."""


def on_off(value: str) -> bool:
    if value not in ("on", "off"):
        raise ValueError("must be on or off")
    return value == "on"


def at_least(least: int) -> Callable[[str], int]:
    def convert(value: str) -> int:
        number = int(value)
        if number < least:
            raise ValueError(f"must be at least {least}")
        return number

    return convert


def gpu_layers(value: str) -> int:
    return {"auto": -1, "all": 999}.get(value) or int(value)


def reverse_prompt(launch: Launch, value: str) -> None:
    launch.params.antiprompt = [*launch.params.antiprompt, value]


def cache_type(which: str) -> Apply:
    names = {name: name.upper() for name in ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")}

    def apply(launch: Launch, value: str) -> None:
        setattr(launch.params, which, launch.enum("ggml_type", "GGML_TYPE_", value, names))

    return apply


def flash_attn(launch: Launch, value: str) -> None:
    names = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}
    launch.params.flash_attn_type = launch.enum("llama_flash_attn_type", "LLAMA_FLASH_ATTN_TYPE_", value, names)


def pooling(launch: Launch, value: str) -> None:
    names = {name: name.upper() for name in ("none", "mean", "cls", "last", "rank")}
    launch.params.pooling_type = launch.enum("llama_pooling_type", "LLAMA_POOLING_TYPE_", value, names)


def reranking(launch: Launch, _value: str) -> None:
    launch.params.embedding = True
    pooling(launch, "rank")


def load_mode(launch: Launch, value: str) -> None:
    names = {"auto": "AUTO", "none": "NONE", "mmap": "MMAP", "mlock": "MLOCK", "mmap+mlock": "MMAP_MLOCK"}
    names["dio"] = "DIRECT_IO"
    launch.params.load_mode = launch.enum("llama_load_mode", "LLAMA_LOAD_MODE_", value, names)


def mmproj_url(_launch: Launch, value: str) -> None:
    if value:
        raise ValueError("nothing is fetched; name a file with --mmproj")


def device(_launch: Launch, value: str) -> None:
    if value != "none":
        raise ValueError(f"invalid device: {value}; this library has the processor alone")


def content_of(convert: Callable[[str], Any], name: str) -> Apply:
    """Sets params.<name> to what a file says."""

    def apply(launch: Launch, value: str) -> None:
        try:
            with open(value, encoding="utf-8", errors="replace") as file:
                attribute(name, lambda _: convert(file.read()))(launch, value)
        except OSError:
            raise ValueError(f"failed to open file '{value}'") from None

    return apply


def grammar_file(launch: Launch, value: str) -> None:
    def grammar(text: str) -> Any:
        return launch.x.CommonGrammar(launch.x.common_grammar_type.COMMON_GRAMMAR_TYPE_USER, text)

    content_of(grammar, "sampling.grammar")(launch, value)


def slots_in(launch: Launch, value: str) -> None:
    if not Path(value).is_dir():
        raise ValueError(f"not a directory: {value}")
    launch.params.slot_save_path = f"{Path(value)}/"


def cors_origins(launch: Launch, value: str) -> None:
    launch.params.cors_origins, launch.params.cors_origins_explicit = value, True


def rope_scaling(launch: Launch, value: str) -> None:
    names = {"none": "NONE", "linear": "LINEAR", "yarn": "YARN"}
    launch.params.rope_scaling_type = launch.enum("llama_rope_scaling_type", "LLAMA_ROPE_SCALING_TYPE_", value, names)


def rope_scale(launch: Launch, value: str) -> None:
    launch.params.rope_freq_scale = 1.0 / float(value)


def spec_type(launch: Launch, value: str) -> None:
    kinds: tuple[str, ...] = ("none", "draft-simple", "draft-eagle3", "draft-mtp", "draft-dflash", "draft-dspark")
    kinds += ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
    names = {kind: kind.replace("-", "_").upper() for kind in kinds}
    launch.params.speculative.types = [
        launch.enum("common_speculative_type", "COMMON_SPECULATIVE_TYPE_", kind, names) for kind in value.split(",")
    ]


def override_tensor(launch: Launch, value: str) -> None:
    if not all("=" in part for part in value.split(",")):
        raise ValueError("must be pattern=buffer")
    launch.overrides.append(value)


def cpu_moe(launch: Launch, _value: str) -> None:
    launch.overrides.append(f"{EXPERTS}=CPU")


def n_cpu_moe(launch: Launch, value: str) -> None:
    layers = range(at_least(0)(value))
    launch.overrides += [rf"blk\.{layer}{EXPERTS}=CPU" for layer in layers]


def override_kv(launch: Launch, value: str) -> None:
    if "=" not in value or ":" not in value:
        raise ValueError("must be key=type:value")
    launch.warnings.append(f"--override-kv {value} is ignored: xllamacpp has no such parameter")


def alias(launch: Launch, value: str) -> None:
    launch.params.model_alias = set(value.split(","))


def host(launch: Launch, value: str) -> None:
    launch.params.hostnames = [value]


def threads(launch: Launch, value: str) -> None:
    launch.params.cpuparams.n_threads = int(value)
    launch.params.cpuparams_batch.n_threads = int(value)


def lora(launch: Launch, value: str) -> None:
    launch.params.lora_adapters = [launch.x.CommonAdapterLoraInfo(path) for path in value.split(",")]


def api_key(launch: Launch, value: str) -> None:
    launch.params.api_keys = value.split(",")


FLAGS = (
    Flag(("-m", "--model"), "FNAME", "model to load, a GGUF file", attribute("model.path", str)),
    Flag(("-a", "--alias"), "STRING", "names of the model in answers, separated by commas", alias),
    Flag(("--host",), "HOST", "address to listen on (default: 127.0.0.1)", host),
    Flag(("--port",), "PORT", "port to listen on (default: 8080)", attribute("port")),
    Flag(("--api-key",), "KEY", "keys that requests need, separated by commas (env: LLAMA_API_KEY)", api_key),
    Flag(("-c", "--ctx-size"), "N", "context in tokens, 0 = as trained", attribute("n_ctx")),
    Flag(("-np", "--parallel"), "N", "number of slots (default: 4 on one shared context)", attribute("n_parallel")),
    Flag(("-kvu", "--kv-unified"), "", "one KV buffer for all slots", constant("kv_unified", True)),
    Flag(("-b", "--batch-size"), "N", "logical batch in tokens", attribute("n_batch")),
    Flag(("-ub", "--ubatch-size"), "N", "physical batch in tokens", attribute("n_ubatch")),
    Flag(("-t", "--threads"), "N", "threads to compute with", threads),
    Flag(("--threads-http",), "N", "threads to answer requests with", attribute("n_threads_http")),
    Flag(("-to", "--timeout"), "N", "read and write timeout in seconds", attribute("timeout_read")),
    Flag(
        ("-ngl", "--gpu-layers", "--n-gpu-layers"),
        "N",
        "layers on the GPU: a number, auto, all",
        attribute("n_gpu_layers", gpu_layers),
    ),
    Flag(("-fa", "--flash-attn"), "on|off|auto", "flash attention", flash_attn),
    Flag(("-ctk", "--cache-type-k"), "TYPE", "type of the K cache", cache_type("cache_type_k")),
    Flag(("-ctv", "--cache-type-v"), "TYPE", "type of the V cache", cache_type("cache_type_v")),
    Flag(("-cram", "--cache-ram"), "N", "prompt cache in MiB, 0 = none, -1 = no limit", attribute("cache_ram_mib")),
    Flag(
        ("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"),
        "N",
        "context checkpoints of a slot at most (default: 32)",
        attribute("n_ctx_checkpoints"),
    ),
    Flag(("--swa-full",), "", "a full cache for layers with a sliding window", constant("swa_full", True)),
    Flag(("-dev", "--device"), "DEVICE", "none", device),
    Flag(("-nkvo", "--no-kv-offload"), "", "keep the KV cache off the GPU", constant("no_kv_offload", True)),
    Flag(("-ot", "--override-tensor"), "PATTERN=BUFFER,...", "where tensors are kept", override_tensor),
    Flag(("-cmoe", "--cpu-moe"), "", "keep all experts on the CPU", cpu_moe),
    Flag(("-ncmoe", "--n-cpu-moe"), "N", "keep the experts of the first N layers on the CPU", n_cpu_moe),
    Flag(("--override-kv",), "KEY=TYPE:VALUE,...", "ignored, with a warning", override_kv),
    Flag(("-lm", "--load-mode"), "MODE", "auto, none, mmap, mlock, mmap+mlock, dio", load_mode),
    Flag(("--mlock",), "", "the same as --load-mode mmap+mlock", lambda launch, _: load_mode(launch, "mmap+mlock")),
    Flag(("--no-mmap",), "", "the same as --load-mode none", lambda launch, _: load_mode(launch, "none")),
    Flag(("--check-tensors",), "", "refuse a model with invalid weights", constant("check_tensors", True)),
    Flag(("-fit", "--fit"), "on|off", "fit unset parameters to the device", attribute("fit_params", on_off)),
    Flag(("-r", "--reverse-prompt"), "TEXT", "end an answer at this text", reverse_prompt),
    Flag(("-nr", "--no-repack"), "", "no copies of weights in an order of their own", constant("no_extra_bufts", True)),
    Flag(("--no-warmup",), "", "no empty run after loading", constant("warmup", False)),
    Flag(("--rope-scaling",), "none|linear|yarn", "how to stretch the context", rope_scaling),
    Flag(("--rope-scale",), "N", "how far to stretch the context", rope_scale),
    Flag(("--rope-freq-base",), "N", "base frequency of RoPE", attribute("rope_freq_base", float)),
    Flag(("--yarn-orig-ctx",), "N", "context the model was trained for", attribute("yarn_orig_ctx")),
    Flag(("--jinja",), "", "chat templates through Jinja (default)", constant("use_jinja", True)),
    Flag(("--no-jinja",), "", "built-in chat templates only", constant("use_jinja", False)),
    Flag(("--chat-template",), "TEMPLATE", "another chat template", attribute("chat_template", str)),
    Flag(("--chat-template-file",), "FILE", "another chat template, in a file", content_of(str, "chat_template")),
    Flag(("--grammar-file",), "FNAME", "grammar that answers keep to", grammar_file),
    Flag(
        ("--reasoning-budget",),
        "N",
        "tokens of thinking, -1 = no limit, 0 = none",
        attribute("sampling.reasoning_budget_tokens", at_least(-1)),
    ),
    Flag(
        ("--reasoning-budget-message",),
        "MESSAGE",
        "text where the thinking is cut off",
        attribute("sampling.reasoning_budget_message", str),
    ),
    Flag(("--embeddings", "--embedding"), "", "serve embeddings only", constant("embedding", True)),
    Flag(("--rerank", "--reranking"), "", "serve reranking", reranking),
    Flag(("--pooling",), "TYPE", "none, mean, cls, last, rank", pooling),
    Flag(("-mm", "--mmproj"), "FILE", "vision projector", attribute("mmproj.path", str)),
    Flag(("-mmu", "--mmproj-url"), "URL", "empty: none; nothing is fetched", mmproj_url),
    Flag(("--lora",), "FNAME,...", "LoRA adapters", lora),
    Flag(("--spec-type",), "TYPE,...", "kinds of speculative decoding", spec_type),
    Flag(
        ("-md", "--model-draft", "--spec-draft-model"),
        "FNAME",
        "draft model",
        attribute("speculative.draft.mparams.path", str),
    ),
    Flag(("--spec-draft-n-max",), "N", "tokens to draft at once", attribute("speculative.draft.n_max")),
    Flag(
        ("--draft-p-min", "--spec-draft-p-min"),
        "P",
        "least probability of a drafted token",
        attribute("speculative.draft.p_min", float),
    ),
    Flag(("-n", "--predict", "--n-predict"), "N", "tokens to generate at most", attribute("n_predict")),
    Flag(("-s", "--seed"), "N", "seed of the sampler", attribute("sampling.seed")),
    Flag(("--temp", "--temperature"), "N", "temperature", attribute("sampling.temp", float)),
    Flag(("--top-k",), "N", "top-k", attribute("sampling.top_k")),
    Flag(("--top-p",), "N", "top-p", attribute("sampling.top_p", float)),
    Flag(("--min-p",), "N", "min-p", attribute("sampling.min_p", float)),
    Flag(("--metrics",), "", "serve /metrics", constant("endpoint_metrics", True)),
    Flag(("--props",), "", "allow POST /props", constant("endpoint_props", True)),
    Flag(("--slots",), "", "serve /slots (default)", constant("endpoint_slots", True)),
    Flag(("--no-slots",), "", "don't serve /slots", constant("endpoint_slots", False)),
    Flag(("--slot-save-path",), "PATH", "directory of saved slots", slots_in),
    Flag(("--no-webui", "--no-ui"), "", "don't serve the web page", constant("ui", False)),
    Flag(
        ("--ui-config-file", "--webui-config-file"),
        "PATH",
        "settings of the web page, in a file",
        content_of(str, "ui_config_json"),
    ),
    Flag(("--cors-origins",), "ORIGINS", "pages that may read answers, separated by commas", cors_origins),
    Flag(("--no-cors-credentials",), "", "not with credentials", constant("cors_credentials", False)),
    Flag(("--offline",), "", "no network", constant("offline", True)),
    Flag(("--sleep-idle-seconds",), "N", "unload the model when idle for so long", attribute("sleep_idle_seconds")),
    Flag(("-lv", "--verbosity"), "N", "amount of logging", attribute("verbosity")),
    Flag(("--log-timestamps",), "", "always so here", nothing),
    Flag(("--log-prefix",), "", "always so here", nothing),
)

BY_NAME = {name: flag for flag in FLAGS for name in flag.names}


def usage() -> str:
    """Every flag in the layout of llama-server's own help, which programs search for the flags of a build."""
    lines = ["----- common params -----", ""]
    lines.append(f"{'-h,    --help, --usage':<40}print usage and exit")
    lines.append(f"{'--version':<40}show version and build info")
    lines.append(f"{'--list-devices':<40}show the devices and exit")
    for flag in FLAGS:
        left = f"{', '.join(flag.names)} {flag.metavar}".rstrip()
        lines.append(f"{left:<38}  {flag.help}")
    return "\n".join(lines)


def parse(argv: list[str]) -> list[tuple[str, Flag, str]]:
    """(as written, flag, value) of each argument. Raises UsageError in llama-server's words."""
    found = []
    arguments = iter(argv)
    for argument in arguments:
        name = argument.replace("_", "-") if argument.startswith("--") else argument
        flag = BY_NAME.get(name)
        if flag is None:
            raise UsageError(f"error: invalid argument: {argument}")
        value = next(arguments, None) if flag.metavar else ""
        if value is None:
            raise UsageError(f'error while handling argument "{argument}": expected value for argument')
        found.append((argument, flag, value))
    return found


def configure(argv: list[str]) -> Launch:
    """The library's parameters for a command line. Raises UsageError."""
    given = parse(argv)
    if not any("--model" in flag.names for _, flag, _ in given):
        raise UsageError("error: --model is required (this stand-in has no router mode)")
    import xllamacpp

    launch = Launch(xllamacpp, xllamacpp.CommonParams())
    launch.params.hostnames, launch.params.port = ["127.0.0.1"], 8080
    if not any("--parallel" in flag.names for _, flag, _ in given):
        launch.params.n_parallel, launch.params.kv_unified = 4, True  # what llama-server makes of "auto"
    if keys := os.environ.get("LLAMA_API_KEY"):
        api_key(launch, keys)
    for written, flag, value in given:
        try:
            flag.apply(launch, value)
        except (ValueError, ArithmeticError) as error:
            raise UsageError(f'error while handling argument "{written}": {error}') from None
    if launch.overrides:
        launch.params.tensor_buft_overrides = ",".join(launch.overrides)
    return launch


def serve(launch: Launch) -> int:
    """Loads the model and serves until a signal; the exit code.

    Signals keep their default action while loading: the library's constructor doesn't give Python a chance to run a
    handler, and llama-server dies of them too.
    """
    try:
        server = launch.x.Server(launch.params)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell)  # the library's threads take signals too, which would not wake one that waits for a lock
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    os.read(told, 1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # the destructor holds the interpreter: no handler would run
    del server  # waits for requests that are running, as llama-server does
    sys.stderr.flush()
    os._exit(0)  # the library's own threads would otherwise be torn down under its feet


def main(argv: list[str]) -> int:
    if not {"-h", "--help", "--usage"}.isdisjoint(argv):
        print(usage())
        return 0
    if "--list-devices" in argv:
        print("Available devices:")  # but the processor, which is not listed
        return 0
    if "--version" in argv:
        import xllamacpp

        build = xllamacpp.__version__.rpartition(".")[2]  # llama.cpp's own number
        print(f"version: {build} (xllamacpp {xllamacpp.__version__})", file=sys.stderr)
        return 0
    try:
        launch = configure(argv)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 1
    for warning in launch.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return serve(launch)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
