#!/usr/bin/env python3
"""Writes docs/memory.md: what is charged for a model, how well that fits a real engine, and who may start.

Our side of every table is computed here from the code itself; the engine's side is what
`tests/boundary/test_estimate_real.py` last measured, from build/memory.json (`make memory` runs it first).
With `--check` it only compares the page, leaving what was measured aside.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from metal_supervisor.memory.estimate import estimate
from metal_supervisor.spec.sizes import amount
from tests.support import memory
from tests.support.memory import CASES, COLUMNS, Case
from tests.support.pages import memory_rules
from tests.support.published import BY_HAND, ByHand, starts

ROOT = Path(__file__).resolve().parents[3]

PAGE = ROOT / "docs" / "memory.md"
HEAD = """# How memory is reckoned

<!-- written by tests/support/pages/memory.py from the code and the tests; change them, then run `make memory` -->

A Mac shares one memory between its processor and its GPU, and what a model uses there stays wired. So nothing is
started on a guess: the header of its file says how large its weights are and what every block keeps, the flags that
the engine will be started with say for how many tokens and slots, and the sum must fit into a budget.

## What is charged

| part | how |
| --- | --- |
| weights | all tensors of all shards, by their types; exact |
| KV cache | block by block: numbers of a row x tokens x bytes of the cache's type; exact |
| state | of recurrent blocks: of a fixed size for each slot; exact |
| compute | scratch of the largest graph, by `--ubatch-size` and context, and the logits of each slot |
| projector, draft model, adapters | their files, with cache and scratch of their own |
| prompt cache | `--cache-ram`, as if it were full |
| checkpoints | slots x `--ctx-checkpoints`, or as many as the context allows, x windows and states of a slot |
| process | 32 MiB, and 340 bytes for each token of the vocabulary |

A block that looks back a window keeps that and what is read at once, not the whole context; one that has a state,
or uses another's cache, keeps none. Contexts are rounded up to 256 tokens, and slots divide the context unless they
share it (`--kv-unified`). What is judged is the command line that is executed, so `extraArgs` count, and metadata that
`--override-kv` changes. A key of the header makes a charge smaller only for the architectures for which llama.cpp reads
it. A file whose header is out of reach is charged by its size: a fifth more, and 512 MiB. One whose header is read but
not understood is of unknown size: an engine may load it, with a cache of any size. Ollama's models are judged by their
manifest.

MLX directories are judged by their `config.json`. A key of it lowers the charge only for a `model_type` whose code in
mlx-lm or mlx-vlm reads that key. A type that is not known is charged as if all its layers attended to the whole context
and no heads shared keys, and the explanation of its memory says so. Where `config.json` cannot be read, or lacks the
numbers, the directory is charged by the size of its weights, as a file whose header is out of reach: it is never
refused for that. `--kv-bits` in `extraArgs` counts for the tokens
behind `--quantized-kv-start`, of which mlx_lm's default is 5000; `cacheTypeK` sets that to 0.

A model of oMLX is charged for `parallelSlots` conversations. Without that field oMLX answers up to eight requests at
once, and the charge is for one conversation of full length. What the others take is not charged: the footprint
of a daemon is not measured model by model, so only the watch on the machine's memory (below) sees it.

What has a window or a state cannot be rolled back, so llama-server keeps checkpoints to return to, beside the model in
ordinary memory: without any (`--ctx-checkpoints 0`), a model with states reads all of a conversation again for each
answer, and one with windows whenever a question is asked differently. Each is what one slot keeps in its windows, of
the window alone, and its states: 416 MiB for Gemma 3 27B, 75 MiB for Qwen3-Next. A slot keeps up to 32 by the engine's
own default, one for `--checkpoint-min-step` tokens (8192) and up to four more around the last prompt; `--cache-ram`
bounds those of old prompts only, which are kept along with them, and no prompt that is larger with them than it.
So, where a model has any, a build that knows `--ctx-checkpoints` is told how many: as many for each slot as the prompt
cache has room for after what a slot holds, but at least 2. `extraArgs` win.
"""
MEASURED = """
## The estimate against the engine

Each row is a model started by `tests/boundary/test_estimate_real.py`: estimate / what the engine has (error), in
MiB. Weights, KV cache, state and compute are llama-server's own log lines `... buffer size = ...`, and a checkpoint is
its line `created context checkpoint ...`; the footprint is what the kernel counts for the process after a prompt, with
the mapped weights and one checkpoint. The log is rounded to 0.01 MiB, and errors are those that rounding can't explain.
Footprints matter in the large models only: a tiny one is mostly the process itself, and scratch that is reserved for a
full context is not all touched by a short prompt.
"""
PUBLISHED = """
## Published models

One slot, weights in Q4_K_M, and nothing kept beside (prompt cache, checkpoints). The KV cache by hand is blocks x heads
x size x 2 (keys and values) x tokens x bytes; a test holds it to the estimate. Gemma's 52 windowed blocks keep 1024
tokens and the 512 that are read at once; DeepSeek keeps one compressed row of 512 + 64 for all heads, and no values.
LLMKube's own agent charges file size + blocks x embedding x tokens x bytes of a key and a value + 512 MiB.

| model | tokens | KV type | KV cache by hand | KV cache | LLMKube's | times | in all | LLMKube's |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def _pair(ours: float, theirs: list[float] | None) -> str:
    """`6.00 / 6.00 (+0.0 %)`; nothing where there is nothing on either side."""
    if not ours and (theirs is None or not theirs[0]):
        return ""
    if theirs is None:
        return f"{ours:.2f}"
    error = memory.error_percent(ours, theirs[0], int(theirs[1]))
    return f"{ours:.2f} / {theirs[0]:.2f} ({error:+.1f} %)"


def _rows(figures: dict[str, Any]) -> tuple[list[str], dict[str, list[float]]]:
    """The table's rows; the errors of each column."""
    rows: list[str] = []
    errors: dict[str, list[float]] = {column: [] for column in (*COLUMNS, "footprint, large")}
    with tempfile.TemporaryDirectory() as directory:
        for case in CASES:
            path = Path(directory, f"{case.kind}.gguf")
            if not path.exists():
                case.write(path)
            ours = memory.parts(case.estimate(path))
            measured = figures.get(case.id, {"measured": {}})["measured"]
            cells = [_pair(ours[column], measured.get(column)) for column in COLUMNS]
            rows.append(f"| {_name(case)} | {case.flags} | {' | '.join(cells)} |\n")
            for column, (theirs, roundings) in measured.items():
                large = column == "footprint" and case.large
                if theirs:
                    error = memory.error_percent(ours[column], theirs, int(roundings))
                    errors["footprint, large" if large else column].append(error)
    return rows, errors


def _name(case: Case) -> str:
    return f"{case.model.architecture}{', large' if case.large else ''}: {case.model.name}"


def against_the_engine(figures: dict[str, Any]) -> str:
    """The table of estimates and measurements."""
    rows, errors = _rows(figures)
    head = f"\n| model | started with | {' | '.join(COLUMNS)} |\n" + "| --- " * (len(COLUMNS) + 2) + "|\n"
    lines = [MEASURED, head, *rows]
    names = {"footprint": "footprint of tiny models", "footprint, large": "footprint of large models"}
    told = [f"{names.get(column, column)} {memory.summary(each)}" for column, each in errors.items() if each]
    builds = sorted({figure["engine"] for figure in figures.values() if figure.get("engine")})
    lines += [f"\nMeasured: errors of {'; '.join(told)}.\n"] * bool(told)
    lines += [f"\nMeasured: with llama-server {', '.join(builds)}, on a processor without a GPU.\n"] * bool(builds)
    return "".join(lines)


def published() -> str:
    """The table of published models, and how the estimate explains itself."""
    lines, explained = [PUBLISHED], []
    for model in BY_HAND:
        for settings in starts():
            found = estimate(model.header, settings)
            theirs = model.incumbent_kv_bytes(settings)
            cells = (
                model.name,
                str(settings.context),
                settings.cache_k,
                model.arithmetic(settings),
                amount(found.kv_bytes),
                amount(theirs),
                f"{theirs / found.kv_bytes:.1f}",
                amount(found.total_bytes),
                amount(model.incumbent_bytes(settings)),
            )
            lines.append(f"| {' | '.join(cells)} |\n")
        explained.append(_explained(model))
    lines += ["\nEach estimate explains itself in a line, as here at 8192 tokens:\n\n```text\n", *explained, "```\n"]
    return "".join(lines)


def _explained(model: ByHand) -> str:
    return f"{model.name}: {estimate(model.header, starts()[0]).explain()}\n"


def page(figures: dict[str, Any]) -> str:
    """The whole page."""
    rules = memory_rules.budgets() + memory_rules.admission() + memory_rules.pressure()
    return HEAD + against_the_engine(figures) + published() + rules


def without_figures(text: str) -> str:
    """The page without what was measured, which differs from run to run."""
    text = re.sub(r"(?m)^Measured: .*\n\n?", "", text)
    return re.sub(r" / [0-9.]+ \([-+0-9.]+ %\)", "", text).rstrip() + "\n"


def main() -> int:
    """Exit code 1 if `--check` found the page out of date."""
    text = page(memory.kept())
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text)
        return 0
    current = PAGE.exists() and without_figures(PAGE.read_text()) == without_figures(text)
    if not current:
        sys.stderr.write("docs/memory.md is not what the code and the tests say; run make memory\n")
    return 0 if current else 1


if __name__ == "__main__":
    sys.exit(main())
