"""`metal-supervisor fit`: tells if a model fits beside the engines on this Mac now, and what would make it fit.

It saves fetching 40 GiB only to learn that they do not fit. Only the header is read, from a file or by a range request;
the estimate is the one of admission, from the command line that the engine would be started with.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from metal_supervisor import launch
from metal_supervisor.cli.services import is_up
from metal_supervisor.cli.terminal import FAILED, OK, USAGE, CommandError
from metal_supervisor.controller.pressure_watch import budget_of
from metal_supervisor.host import machine
from metal_supervisor.memory import fit_advice as fit
from metal_supervisor.memory.estimate import CACHE_TYPES, Estimate
from metal_supervisor.memory.estimate_mlx import CannotEstimate, estimate_mlx
from metal_supervisor.memory.fit_advice import Charge, FitPlan
from metal_supervisor.memory.shape import shape_of
from metal_supervisor.models import headers
from metal_supervisor.models.headers import read_file
from metal_supervisor.models.listing import Listing, Unusable
from metal_supervisor.models.metadata import Reading
from metal_supervisor.models.remote.origins import locate
from metal_supervisor.models.remote.remote_headers import READ_S, read_listing
from metal_supervisor.models.remote.web import Client
from metal_supervisor.models.store_context import lax_rules
from metal_supervisor.runtimes import llama_memory, llama_server, mlx_memory
from metal_supervisor.runtimes.runtime import Binary, Place
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.fields import LEAST_CONTEXT, MOST_CONTEXT, MOST_SLOTS, Bad
from metal_supervisor.spec.gguf import BadGguf
from metal_supervisor.spec.processes import RunNote
from metal_supervisor.spec.sizes import amount
from metal_supervisor.spec.sources import Artifact, canonical, library_model, shown, without_quantization
from metal_supervisor.spec.terminal_text import printable
from metal_supervisor.spec.types import Endpoint, Model, Service
from metal_supervisor.state.directory import StateDir

MLX_BITS: Mapping[str, int | None] = {"f16": None, "bf16": None, "q8_0": 8, "q4_0": 4}
MOST_ADVICE = 3
NOTE = "note: "


class CannotTell(CommandError):
    """No answer is possible; the text says why."""

    def __init__(self, text: str) -> None:
        super().__init__(text, USAGE)


class NotServable(CannotTell):
    """The file is no model that an engine serves."""


@dataclass(frozen=True)
class Question:
    """A model, and the options to run it with."""

    source: str
    """As `model_source` resolves it: an absolute path, or a URL."""
    context: int | None = None
    """Tokens of all slots together; None for the default of an InferenceService."""
    slots: int = 1
    kv_type: str = "f16"


@dataclass(frozen=True)
class FitAnswer:
    """Answer to a question."""

    fits: bool
    lines: tuple[str, ...]
    body: Mapping[str, Any]
    """The same for programs, as JSON."""


@dataclass(frozen=True)
class _Subject:
    """The model in question."""

    name: str
    architecture: str
    size_bytes: int
    trained: int
    """Tokens of context that it was trained for, 0 if it does not tell."""
    plan: FitPlan
    charge: Charge
    contexts: tuple[int, ...] = ()
    """Tokens of a slot to choose from, the most first, where the question names none."""


def main(settings: Settings, question: Question, as_json: bool) -> int:
    """Print the answer. Returns 0 if the model fits, 1 if it does not. Raises CannotTell."""
    found = answer(settings, question)
    print(json.dumps(found.body, indent=2) if as_json else "\n".join(map(printable, found.lines)))
    return OK if found.fits else FAILED


def answer(settings: Settings, question: Question) -> FitAnswer:
    """The answer for this machine and what runs on it now. Raises CannotTell."""
    if question.context is not None and not LEAST_CONTEXT <= question.context <= MOST_CONTEXT:
        raise CannotTell(f"--ctx must be from {LEAST_CONTEXT} to {MOST_CONTEXT}, not {question.context}")
    if not 1 <= question.slots <= MOST_SLOTS:
        raise CannotTell(f"--slots must be from 1 to {MOST_SLOTS}, not {question.slots}")
    if question.kv_type not in CACHE_TYPES:
        raise CannotTell(f"--kv-type must be one of {', '.join(CACHE_TYPES)}, not {question.kv_type!r:.40}")
    subject = _subject(settings, question)
    allowed, running = budget_of(settings), _running(settings)
    free = allowed.bytes - sum(running.values())
    subject = _with_context(subject, free, allowed.bytes)
    made = subject.charge(subject.plan)
    fits = made.total_bytes <= free
    advice = _possible(subject, free) if fits else _advice(subject, free, allowed.bytes, made)
    trained = f", trained for {subject.trained} tokens" if subject.trained else ""
    lines = [
        f"{subject.name}: {subject.architecture:.60}, {amount(subject.size_bytes)}{trained}",
        f"needs    {made.explain()}",
        f"budget   {allowed.explain()}",
        f"running  {_shown_running(running)}",
        _verdict(made.total_bytes, free, fits),
    ]
    each = subject.plan.context // subject.plan.slots
    if subject.trained and each > subject.trained:
        lines.append(f"{NOTE}{each} tokens for a slot are more than the {subject.trained} it was trained for")
    lines += advice[: MOST_ADVICE - (len(lines) > 5)]
    body = {
        "source": shown(question.source) if "://" in question.source else question.source,
        "name": subject.name,
        "architecture": subject.architecture,
        "sizeBytes": subject.size_bytes,
        "trainedContext": subject.trained,
        "contextSize": subject.plan.context,
        "parallelSlots": subject.plan.slots,
        "kvType": subject.plan.kv_type,
        "fits": fits,
        "needBytes": made.total_bytes,
        "parts": {name: size for name, size in made.parts.items() if size},
        "basis": made.basis,
        "assumptions": list(made.assumptions),
        "budgetBytes": allowed.bytes,
        "budgetReason": allowed.reason,
        "running": running,
        "freeBytes": free,
        "advice": advice,
    }
    return FitAnswer(fits, tuple(lines), body)


def _with_context(subject: _Subject, free: int, allowed: int) -> _Subject:
    """The subject with the context that the controller would choose for it."""
    plans = [replace(subject.plan, context=tokens * subject.plan.slots) for tokens in subject.contexts]
    needs = {plan: subject.charge(plan).total_bytes for plan in plans}
    fitting = [plan for room in (free, allowed) for plan, need in needs.items() if need <= room]
    return replace(subject, plan=next(iter([*fitting, *plans[-1:], subject.plan])))


def _verdict(need: int, free: int, fits: bool) -> str:
    left = f"{amount(max(free, 0), 'down')} are left"
    if fits:
        return f"It fits: {left}, {amount(free - need, 'down')} of them after it."
    return f"It does not fit: {left}, {amount(need - max(free, 0), 'up')} too little."


def _possible(subject: _Subject, free: int) -> list[str]:
    most = min(subject.trained * subject.plan.slots, MOST_CONTEXT)
    context = fit.largest_context(subject.charge, subject.plan, free, most) if most > subject.plan.context else 0
    return [f"it would fit up to --ctx {context} (spec.contextSize)"] if context > subject.plan.context else []


def _advice(subject: _Subject, free: int, allowed: int, made: Estimate) -> list[str]:
    found = fit.changes(subject.charge, subject.plan, free)
    advice = [f"it would fit with {change}" for change in found[:MOST_ADVICE]]
    if not found:
        advice.append(f"it would take {fit.smaller_weights(subject.charge, subject.plan, free)}")
    if free < made.total_bytes <= allowed:
        advice.insert(min(len(advice), 1), "it would fit as it is if enough of what runs here were stopped")
    return advice


def _running(settings: Settings) -> dict[str, int]:
    """Bytes that each engine that runs or starts on this Mac counts for, by name.

    Of a system that is stopped, only engines that outlived it; of one that runs, those that were stopped by hand too,
    because their memory is kept for them.
    """
    state = StateDir(settings.state_path)
    seen, notes, up = state.observations(), state.run_notes(), is_up(state)
    return {
        "/".join(record.key): max(record.reserved_bytes, seen[name].memory_bytes if name in seen else 0)
        for name, record in state.records()[0].items()
        if _lives(notes.get(name)) or (up and record.runs)
    }


def _lives(note: RunNote | None) -> bool:
    """True if the engine of a note is still up."""
    return note is not None and note.pid > 0 and launch.start_time(note.pid) == note.started


def _shown_running(running: Mapping[str, int]) -> str:
    if not running:
        return "nothing on this Mac"
    largest = sorted(running.items(), key=lambda each: -each[1])
    named = ", ".join(f"{name} {amount(size) if size else '(size unknown)'}" for name, size in largest[:5])
    others = f" and {len(largest) - 5} more" if len(largest) > 5 else ""
    return f"{amount(sum(running.values()))}: {named}{others}"


# ── the model ────────────────────────────────────────────────────────────────────────────────────


def _subject(settings: Settings, question: Question) -> _Subject:
    """The model that a question is about. Raises CannotTell."""
    source = question.source
    try:
        written, quantization = without_quantization(source)
        place = canonical(written, "SOURCE")
        if not place.startswith("/"):
            return _remote(settings, question, place, quantization)
        path = Path(place)
        if path.is_dir():
            return _mlx(question, path.name, read_file(path))
    except Unusable as error:
        raise CannotTell(str(error)) from None
    except Bad as bad:
        raise CannotTell(bad.message) from None
    except (OSError, ValueError) as error:
        raise CannotTell(f"{source}: {getattr(error, 'strerror', None) or error}") from None
    return _gguf(settings, question, path.name, read_file(path))


def _remote(settings: Settings, question: Question, place: str, quantization: str) -> _Subject:
    """A model on a server; only its header is read. Raises CannotTell, Bad, Unusable."""
    if library := library_model(place):
        return _gguf(settings, question, library, headers.read_library(place, settings))
    with contextlib.closing(Client(lax_rules(settings), READ_S)) as client:
        listing = _listed(settings, place, quantization, client)
        if listing.path:
            return _subject(settings, replace(question, source=listing.path))
        name = shown(place).rpartition("/")[2]
        reading = read_listing(listing, client)
    if reading.config is not None:
        return _mlx(question, name, reading)
    return _gguf(settings, question, listing.pieces[0].name, reading)


def _listed(settings: Settings, place: str, quantization: str, client: Client) -> Listing:
    """One GGUF file, else a directory for MLX. Raises Unusable."""
    try:
        return locate(Artifact(place, quantization=quantization), {}, client, settings.hub)
    except Unusable as error:
        if error.reason != "InvalidModel" or quantization:
            raise
        try:
            return locate(Artifact(place, directory=True), {}, client, settings.hub)
        except Unusable:
            raise error from None


def _gguf(settings: Settings, question: Question, name: str, reading: Reading) -> _Subject:
    header = reading.header
    if header is None or reading.size_bytes is None:
        raise CannotTell(f"{name}: {reading.problem or 'its size is not known'}")
    if header.companion:
        raise NotServable(f"{name}: {header.companion}")
    try:
        binary = machine.find_binary(settings.llama_server, "llama-server", "")
        told = machine.help_of(binary)
        engine = Binary(str(binary), machine.flags_in(told), help=told)
    except machine.NoBinary:  # to judge a model before anything is installed: as a current release
        engine = Binary("llama-server", frozenset({"--cache-ram", "--ctx-checkpoints"}))
    try:
        trained = shape_of(header).context
    except BadGguf:
        trained = 0

    def charge(plan: FitPlan) -> Estimate:
        asked = llama_memory.demands(_argv(plan, engine, reading))
        made, why = llama_memory.estimate_of(reading, asked.settings)
        if made is None:
            raise CannotTell(f"{name}: {why or 'its size is not known'}")
        return made

    plan = FitPlan(question.context or llama_server.DEFAULT_CONTEXT, question.slots, question.kv_type)
    contexts = () if question.context else llama_server.offered_contexts(reading)
    architecture = header.architecture or "unknown architecture"
    return _Subject(name, architecture, reading.size_bytes, trained, plan, charge, contexts)


def _argv(plan: FitPlan, binary: Binary, reading: Reading) -> tuple[str, ...]:
    """The engine's command line for an InferenceService with no other options than these."""
    options: dict[str, int | str] = {"contextSize": plan.context, "parallelSlots": plan.slots}
    if plan.kv_type != "f16":
        options |= {"cacheTypeCustomK": plan.kv_type, "cacheTypeCustomV": plan.kv_type}
    model = Model("default", "model", "", 1, "/model.gguf", "gguf", None, None)
    endpoint = Endpoint("model", 8080, "/v1/chat/completions", "ClusterIP", None)
    service = Service(
        "default", "model", "", 1, model, "llama-server", 1, False, endpoint, "chat", "normal", None, options
    )
    return llama_server.engine(service, binary, Place("/model.gguf", "127.0.0.1", 1, None, "/", reading)).argv


def _mlx(question: Question, name: str, reading: Reading) -> _Subject:
    """A model directory of mlx_lm. Raises CannotTell."""
    if question.kv_type not in MLX_BITS:
        raise CannotTell(f"MLX has no KV cache of type {question.kv_type}; --kv-type {', '.join(MLX_BITS)}")
    weights, config = reading.size_bytes or 0, reading.config
    if config is None:
        raise CannotTell(f"{name}: {reading.problem}")

    def charge(plan: FitPlan) -> Estimate:
        each = max(plan.context // plan.slots, 1)
        try:
            made = estimate_mlx(weights, config, each, plan.slots, MLX_BITS[plan.kv_type])
            return replace(made, prompt_cache_bytes=mlx_memory.prompt_cache_bytes(made))
        except CannotEstimate as error:
            raise CannotTell(f"{name}: {error}") from None

    try:
        trained = estimate_mlx(weights, config).context
    except CannotEstimate as error:
        if not question.context:
            raise CannotTell(f"{name}: {error}") from None
        trained = 0  # --ctx replaces only this; `charge` reports every other problem
    plan = FitPlan(question.context or trained * question.slots, question.slots, question.kv_type)
    architecture = f"{config.get('model_type', 'unknown architecture')!s:.40} (MLX)"
    return _Subject(name, architecture, charge(plan).weights_bytes, trained, plan, charge)
