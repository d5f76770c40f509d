"""What decides llama-server's memory, read back from the command line that it will be started with.

Not from the custom resource: `spec.extraArgs` come last and win, and a default that we forgot to set would make
admission and reality differ. So what is judged is what is executed, read by the engine's own rules: the last of
several equal flags counts, `_` is `-`, and `--parallel -1` means four slots that share one cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from metal_supervisor.core.estimate import Settings
from metal_supervisor.core.sizes import MIB

VALUES = {
    "context": ("-c", "--ctx-size"),
    "slots": ("-np", "--parallel"),
    "batch": ("-b", "--batch-size"),
    "ubatch": ("-ub", "--ubatch-size"),
    "cache_k": ("-ctk", "--cache-type-k"),
    "cache_v": ("-ctv", "--cache-type-v"),
    "flash": ("-fa", "--flash-attn"),
    "prompt_cache": ("-cram", "--cache-ram"),
    "load_mode": ("-lm", "--load-mode"),
    "projector": ("-mm", "--mmproj"),
    "draft": ("-md", "--model-draft", "--spec-draft-model"),
    "adapter": ("--lora",),
    "scaled": ("--lora-scaled",),
}
SWITCHES = {
    "-kvu": ("unified", True), "--kv-unified": ("unified", True),
    "-no-kvu": ("unified", False), "--no-kv-unified": ("unified", False),
    "--swa-full": ("swa_full", True), "--mmap": ("mmap", True), "--no-mmap": ("mmap", False),
    "--embedding": ("encodes", True), "--embeddings": ("encodes", True),
    "--rerank": ("encodes", True), "--reranking": ("encodes", True), "--no-mmproj": ("no_projector", True),
}  # fmt: skip
NAMES = {flag: name for name, flags in VALUES.items() for flag in flags}
AUTO_SLOTS = 4
UNLIMITED_PROMPT_CACHE_BYTES = 8192 * MIB
"""What is charged for `--cache-ram -1`: the engine's default, since it has no limit to go by."""
UNMAPPED = frozenset({"none", "dio"})


@dataclass(frozen=True)
class Demands:
    """What an engine will take memory for, besides the model itself."""

    settings: Settings
    projector: str = ""
    """Path of the mmproj file, "" without one."""
    draft: str = ""
    """Path of the draft model."""
    adapters: tuple[str, ...] = ()


def _whole(text: str | None, default: int) -> int:
    """A number of the command line; what is none ends the engine at once, so it needs no memory."""
    try:
        return int(text) if text is not None else default
    except ValueError:
        return default


def demands(argv: Sequence[str]) -> Demands:
    """Reads a command line of llama-server, the program's name included or not."""
    values: dict[str, str] = {}
    switches: dict[str, bool] = {}
    adapters: list[str] = []
    rest = iter(argv)
    for argument in rest:
        flag = argument.replace("_", "-") if argument.startswith("--") else argument
        if flag in SWITCHES:
            name, on = SWITCHES[flag]
            switches[name] = on
        elif (found := NAMES.get(flag)) is not None:
            value = next(rest, "")
            if found == "adapter":
                adapters += value.split(",")
            elif found == "scaled":
                adapters += [each.rpartition(":")[0] or each for each in value.split(",")]
            else:
                values[found] = value
    slots = _whole(values.get("slots"), -1)
    cache = _whole(values.get("prompt_cache"), 0)
    settings = Settings(
        context=max(_whole(values.get("context"), 0), 0),
        slots=slots if slots > 0 else AUTO_SLOTS,
        unified=switches.get("unified", slots <= 0),
        batch=max(_whole(values.get("batch"), 2048), 1),
        ubatch=max(_whole(values.get("ubatch"), 512), 1),
        cache_k=values.get("cache_k", "f16"),
        cache_v=values.get("cache_v", "f16"),
        flash_attention=values.get("flash", "auto") not in ("off", "0", "false", "disabled"),
        swa_full=switches.get("swa_full", False),
        prompt_cache_bytes=UNLIMITED_PROMPT_CACHE_BYTES if cache < 0 else cache * MIB,
        mmap=switches.get("mmap", True) and values.get("load_mode", "auto") not in UNMAPPED,
    )
    if switches.get("encodes"):  # an encoder must see a whole text at once
        settings = replace(settings, batch=min(settings.batch, settings.ubatch))
    projector = "" if switches.get("no_projector") else values.get("projector", "")
    return Demands(settings, projector, values.get("draft", ""), tuple(each for each in adapters if each))
