"""Memory estimate of llama-server, read back from the command line that it will be started with.

Not from the custom resource: `spec.extraArgs` come last and win, and a default that we forgot to set would make the
estimate wrong. The command line is parsed by the engine's own rules: the last of several equal flags counts, `_` is
`-`, and `--parallel -1` means four slots that share one cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from metal_supervisor.memory.estimate import (
    FALLBACK_PERCENT,
    PROCESS_BYTES,
    CacheSettings,
    Estimate,
    by_size,
    draft_settings,
    estimate,
    projector_bytes,
)
from metal_supervisor.models.metadata import Demand, Reading
from metal_supervisor.runtimes.llama_arguments import GRAMMAR
from metal_supervisor.spec.arguments import ParsedArguments, parse
from metal_supervisor.spec.auxiliary_files import named_files
from metal_supervisor.spec.gguf import BadGguf
from metal_supervisor.spec.sizes import MIB

SWITCHES = {
    "-kvu": ("unified", True),
    "--kv-unified": ("unified", True),
    "-no-kvu": ("unified", False),
    "--no-kv-unified": ("unified", False),
    "--swa-full": ("swa_full", True),
    "--mmap": ("mmap", True),
    "--no-mmap": ("mmap", False),
    "-dio": ("mmap", False),
    "--direct-io": ("mmap", False),
    "--embedding": ("encodes", True),
    "--embeddings": ("encodes", True),
    "--rerank": ("encodes", True),
    "--reranking": ("encodes", True),
    "--no-mmproj": ("no_projector", True),
    "--no-mmproj-auto": ("no_projector", True),
    "--mmproj-auto": ("no_projector", False),
}
ADAPTERS = frozenset({"--lora", "--lora-scaled", "--control-vector", "--control-vector-scaled"})
UNSIZED = frozenset(
    {
        "-mmu",
        "--mmproj-url",
        "-hfd",
        "-hfrd",
        "--hf-repo-draft",
        "--spec-draft-hf",
        "-mv",
        "--model-vocoder",
        "-hfv",
        "-hfrv",
        "--hf-repo-v",
        "-hf",
        "-hfr",
        "--hf-repo",
        "-mu",
        "--model-url",
        "-dr",
        "--docker-repo",
    }
)
"""Flags that load a model of unknown size: the engine fetches it itself, or there is no formula for it."""
AUTO_SLOTS = 4
UNLIMITED_PROMPT_CACHE_BYTES = 8192 * MIB
"""Charge for `--cache-ram -1`, which sets no limit: the engine's default."""
UNMAPPED = frozenset({"none", "dio", "mlock"})
WHOLE = re.compile(r"\s*([+-]?\d{1,20})", re.ASCII)
LARGEST = (1 << 31) - 1
PROMPT_CACHE_MIB = 2048
"""Most that a prompt cache gets; the engine's own default is 8192."""
PROMPT_CACHE_MIB_LEAST = 64
PROMPT_CACHE_MIB_UNKNOWN = 512
"""For a model that cannot be estimated."""
CHECKPOINTS = 32
"""The engine's own default in current builds. Builds of 2025 kept fewer: first 3, then 8."""
CHECKPOINT_STEP = 8192
"""The engine's own default."""
CHECKPOINTS_LEAST = 2
"""One at the end of a prompt, to continue from, and one before: at its last user message, or a microbatch earlier."""
CONVERSATIONS_KEPT = 4
"""Size of the prompt cache, as a multiple of what all slots hold."""


@dataclass(frozen=True)
class Demands:
    """Consumers of memory besides the model itself."""

    settings: CacheSettings
    projector: str = ""
    """Path of the mmproj file, "" without one."""
    draft: str = ""
    """Path of the draft model."""
    adapters: tuple[str, ...] = ()
    """Paths of LoRA adapters and control vectors."""
    unsized: str = ""
    """The first flag in UNSIZED that is given, "" without one."""
    encodes: bool = False
    """It serves embeddings or ranks, and never reuses a prompt."""


def _whole(text: str | None, default: int) -> int:
    """A number as the engine parses it: text after the digits is ignored. `default` for anything that is no number:
    the engine exits at it at once, so it needs no memory.
    """
    found = WHOLE.match(text or "")
    number = int(found[1]) if found else default
    return number if abs(number) <= LARGEST else default


def _overrides(said: ParsedArguments) -> Iterator[tuple[str, int | str]]:
    """Key and value of each part of `--override-kv` that can change a size.

    Sizes are whole numbers: the engine passes over a value of another type, and exits at one that is malformed.
    """
    written = ",".join(value for item in said.items if item.name == "--override-kv" for value in item.values)
    for part in written.split(","):
        key, _, value = part.partition("=")
        kind, _, value = value.partition(":")
        if kind == "int" and (number := WHOLE.match(value)):
            yield key, int(number[1])
        elif kind == "str" and key == "general.architecture":
            yield key, value


def _batches(batch: int, ubatch: int, encodes: bool) -> tuple[int, int]:
    """Tokens of a batch and of a microbatch, from the numbers on the command line.

    The engine takes a negative number for one without a sign, which is larger than any context, and a microbatch of 0
    for the batch. An encoder must see a whole text at once.
    """
    if encodes:
        batch = min(batch, ubatch)
    batch = LARGEST if batch < 0 else max(batch, 1)
    return batch, LARGEST if ubatch < 0 else ubatch or batch


def demands(argv: Sequence[str]) -> Demands:
    """Parse a command line of llama-server, with or without the program's name."""
    said = parse(tuple(argv), GRAMMAR)
    switches = dict(SWITCHES[item.name] for item in said.items if item.name in SWITCHES)
    slots = _whole(said.last("--parallel"), -1)
    encodes = switches.get("encodes", False)
    batch, ubatch = _batches(_whole(said.last("--batch-size"), 2048), _whole(said.last("--ubatch-size"), 512), encodes)
    cache = _whole(said.last("--cache-ram"), 0)
    settings = CacheSettings(
        context=max(_whole(said.last("--ctx-size"), 0), 0),
        slots=slots if slots > 0 else AUTO_SLOTS,
        unified=switches.get("unified", slots <= 0),
        batch=batch,
        ubatch=ubatch,
        cache_k=said.last("--cache-type-k", "f16"),
        cache_v=said.last("--cache-type-v", "f16"),
        draft_k=said.last("--spec-draft-type-k", "f16"),
        draft_v=said.last("--spec-draft-type-v", "f16"),
        flash_attention=said.last("--flash-attn", "auto") not in ("off", "0", "false", "disabled"),
        swa_full=switches.get("swa_full", False),
        prompt_cache_bytes=UNLIMITED_PROMPT_CACHE_BYTES if cache < 0 else cache * MIB,
        # An encoder never returns to a part of a text.
        checkpoints=0 if encodes else max(_whole(said.last("--ctx-checkpoints"), CHECKPOINTS), 0),
        checkpoint_step=max(_whole(said.last("--checkpoint-min-step"), CHECKPOINT_STEP), 0),
        mmap=switches.get("mmap", True) and said.last("--load-mode", "auto") not in UNMAPPED,
        overrides=tuple(_overrides(said)),
    )
    return Demands(
        settings=settings,
        projector="" if switches.get("no_projector") else said.last("--mmproj"),
        draft=said.last("--model-draft"),
        adapters=tuple(path for item in said.items if item.name in ADAPTERS for path in named_files(item) if path),
        unsized=next((item.name for item in said.items if item.name in UNSIZED), ""),
        encodes=encodes,
    )


def demand(argv: Sequence[str], model: Reading, reading_of: Callable[[str], Reading | None]) -> Demand | None:
    """Estimate for a llama-server with this command line and model; None while a file that it needs is not read.

    `reading_of`: path of a further file -> its reading, None if it is not read yet. A file is charged by its header, or
    else by its size; one of unknown size makes the whole unknown, and the text names it.
    """
    asked = demands(argv)
    named = [("--mmproj", asked.projector), ("--model-draft", asked.draft)]
    named += [("--lora", path) for path in asked.adapters]
    found = [(flag, path, reading_of(path)) for flag, path in named if path]  # all at once, so that all are read
    if asked.unsized:
        return Demand(None, text=f"it is unknown what {asked.unsized} loads; name a file on this Mac instead")
    made, why = estimate_of(model, asked.settings)
    if made is None:
        return Demand(None, text=why or "the size of its model is not known")
    for flag, path, reading in found:
        if reading is None:
            return None
        added, why = _with(made, flag, reading, asked.settings)
        if added is None:
            return Demand(None, text=f"{flag} {path!r:.200}: {why or 'its size is not known'}")
        made = added
    guessed = "; ".join(made.assumptions) if made.basis == "file size" else ""
    return Demand(made.total_bytes, made.mapped_bytes, made.explain(), guessed)


def estimate_of(model: Reading, settings: CacheSettings) -> tuple[Estimate | None, str]:
    """Estimate for a model alone, by its header, or by its size if there is no header; or None, and the reason.

    A header that makes no sense here may do so to the engine, whose cache could then be of any size.
    """
    if model.header is not None:
        try:
            return estimate(model.header, settings), ""
        except BadGguf as error:
            return None, str(error)
    return None if model.size_bytes is None else by_size(model.size_bytes, settings, model.problem), model.problem


def _with(made: Estimate, flag: str, reading: Reading, settings: CacheSettings) -> tuple[Estimate | None, str]:
    """The estimate with one more file; or None if its size is unknown, and the reason."""
    header, size = reading.header, reading.size_bytes
    if flag == "--model-draft":
        draft, why = estimate_of(reading, draft_settings(settings))
        if draft is None:
            return None, why
        notes = (f"{flag} by file size", *draft.assumptions) if draft.basis == "file size" else draft.assumptions
        drafted = replace(
            made,
            draft_bytes=draft.total_bytes - PROCESS_BYTES,
            mapped_bytes=made.mapped_bytes + draft.mapped_bytes,
            assumptions=tuple(dict.fromkeys((*made.assumptions, *notes))),
        )
        return drafted, ""
    if header is None:
        if size is None:
            return None, reading.problem
        made = replace(made, assumptions=(*made.assumptions, f"{flag} by file size", reading.problem))
    if flag == "--mmproj":
        guess = -(-(size or 0) * FALLBACK_PERCENT // 100)
        return replace(made, projector_bytes=guess if header is None else projector_bytes(header, settings)), ""
    added = (size or 0) if header is None else header.weights_bytes
    return replace(made, adapter_bytes=made.adapter_bytes + added), ""


def prompt_cache_mib(argv: Sequence[str], model: Reading) -> int:
    """Size of the prompt cache for this model, in MiB, for `--cache-ram`; `argv` does not have that flag yet.

    The engine may fill all of it, so all of it is charged: with the engine's own default that would be most of a small
    model's reservation. Four times what all slots hold lets several conversations take turns, each kept with its
    checkpoints.
    """
    asked = demands(argv)
    if asked.encodes:
        return 0
    few = min(asked.settings.checkpoints, CHECKPOINTS_LEAST)
    made, _ = estimate_of(model, replace(asked.settings, checkpoints=few))
    if made is None or made.basis != "header":
        return PROMPT_CACHE_MIB_UNKNOWN
    worth = -(-CONVERSATIONS_KEPT * (made.kv_bytes + made.state_bytes + made.checkpoint_bytes) // MIB)
    return min(max(worth, PROMPT_CACHE_MIB_LEAST), PROMPT_CACHE_MIB) if worth else 0


def checkpoints(argv: Sequence[str], model: Reading) -> int | None:
    """Number of checkpoints per slot for this model, for `--ctx-checkpoints`; `argv` does not have that flag yet.

    The engine does not limit their size, and may keep all, so all are charged. Together with what a slot holds they
    take no more than the prompt cache, because the engine keeps no old prompt that is larger than that; but at least
    CHECKPOINTS_LEAST. None if the engine makes none for this model, or that is unknown.
    """
    settings = demands(argv).settings
    all_made, _ = estimate_of(model, settings)
    each, _ = estimate_of(model, replace(settings, checkpoints=min(settings.checkpoints, 1)))
    if all_made is None or each is None or not each.checkpoint_bytes:
        return None
    room = settings.prompt_cache_bytes - (each.kv_bytes + each.state_bytes) // each.slots
    worth = max(room // each.checkpoint_bytes, CHECKPOINTS_LEAST)
    return min(worth, all_made.checkpoint_bytes // each.checkpoint_bytes)
