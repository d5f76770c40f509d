"""What is compared with a real engine for docs/memory.md: the models, how they are started, and what was measured.

`tests/boundary/test_estimate_real.py` starts every case and hands what the engine said to `record`. As the figures of
fault cases (tests/support/faults.py) these travel with the test's report, and are kept in build/memory.json for
`tests/support/pages/memory.py`, which computes our side anew and writes the page.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from metal_supervisor.memory.estimate import CacheSettings, Estimate, estimate
from metal_supervisor.spec.gguf import MAX_HEADER_BYTES, read_header
from tests.support import kv_models
from tests.support.in_memory import InMemory
from tests.support.kv_models import Kind
from tests.support.kv_parts import Sizes

MIB = 1 << 20
FIGURES = Path(__file__).resolve().parents[2] / "build" / "memory.json"
PROPERTY = "memory"
COLUMNS = ("weights", "KV", "state", "checkpoint", "compute", "footprint")
LOG_STEP_MIB = 0.01
"""The engine's log is rounded to it."""


@dataclass(frozen=True)
class Case:
    """One row: a model and how its engine is started."""

    kind: str
    """Of KINDS or LARGE."""
    settings: CacheSettings
    prompt: int = 600
    """Tokens of the prompt after which the footprint is measured; no more than a slot takes."""

    @property
    def model(self) -> Kind:
        return kv_models.KINDS.get(self.kind) or LARGE[self.kind]

    @property
    def large(self) -> bool:
        """Large enough that the process itself does not count for much."""
        return self.kind in LARGE

    @property
    def flags(self) -> str:
        """How it is started, for people: only what is not the default."""
        s, default = self.settings, CacheSettings()
        words = [f"{s.context} tokens"] + ([f"{s.slots} slots"] if s.slots > 1 else [])
        words += ["unified"] * s.unified + [f"ubatch {s.ubatch}"] * (s.ubatch != default.ubatch)
        kinds = s.cache_k if s.cache_k == s.cache_v else f"{s.cache_k}/{s.cache_v}"
        words += [kinds] * (kinds != "f16") + ["no flash attention"] * (not s.flash_attention)
        return ", ".join(words + ["--swa-full"] * s.swa_full)

    @property
    def id(self) -> str:
        return f"{self.kind}: {self.flags}"

    def write(self, path: Path) -> None:
        """Makes the model."""
        kv_models.write(path, self.model, half=self.large)

    def estimate(self, path: Path) -> Estimate:
        """Our side, of the model that was written there."""
        size = path.stat().st_size
        with path.open("rb") as file:
            return estimate(read_header(InMemory(file.read(min(size, MAX_HEADER_BYTES))), size), self.settings)


LARGE: Mapping[str, Kind] = {
    "dense, large": Kind(
        "llama",
        "every head has keys, F16",
        kv_models.llama,
        Sizes(layers=4, width=1024, forward=2048, heads=8, heads_kv=8, head=128, vocabulary=96_000),
    ),
    "experts, large": Kind(
        "qwen3moe",
        "experts, GQA, F16",
        kv_models.qwen3moe,
        Sizes(
            layers=4,
            width=1024,
            heads=8,
            heads_kv=4,
            head=128,
            vocabulary=32_000,
            experts=32,
            used=2,
            expert_forward=640,
        ),
    ),
    "windows, large": Kind(
        "gemma3",
        "5 of 6 blocks keep a window, F16",
        kv_models.gemma3,
        Sizes(layers=12, width=768, forward=1024, heads=8, heads_kv=4, head=128, vocabulary=96_000, window=512),
    ),
}


def _started(kind: str, *settings: CacheSettings, prompt: int = 600) -> tuple[Case, ...]:
    kept = int(not Case(kind, CacheSettings()).model.encodes)
    return tuple(Case(kind, replace(each, checkpoints=kept), prompt) for each in settings)


def _cache(cache_k: str, cache_v: str = "", context: int = 8192, slots: int = 1) -> CacheSettings:
    return CacheSettings(context, slots=slots, cache_k=cache_k, cache_v=cache_v or cache_k)


EVERY_TYPE = tuple(_cache(each) for each in ("f32", "bf16", "q8_0", "q5_1", "q4_0", "iq4_nl"))
ENCODERS = (CacheSettings(2048, batch=512), CacheSettings(2048, slots=4, batch=1024, ubatch=1024))
CASES: tuple[Case, ...] = (
    *_started("mha", CacheSettings(4096), CacheSettings(8192, slots=4), _cache("q8_0")),
    *_started(
        "gqa",
        CacheSettings(1024),
        CacheSettings(8192, slots=3),
        CacheSettings(32_768),
        *EVERY_TYPE,
        _cache("q8_0", "f16"),
    ),
    *_started("gqa", CacheSettings(4096, slots=2, unified=True, ubatch=128), CacheSettings(4096, ubatch=2048)),
    *_started("gqa", CacheSettings(4096, flash_attention=False)),
    *_started("mqa", CacheSettings(4096), _cache("q4_0", slots=2)),
    *_started("qwen3moe", CacheSettings(2048, ubatch=2048), CacheSettings(2048, flash_attention=False), _cache("q8_0")),
    *_started(
        "gemma3", CacheSettings(4096, slots=2), CacheSettings(8192, slots=3, unified=True), _cache("q8_0", slots=2)
    ),
    *_started("gemma3", CacheSettings(4096, swa_full=True), CacheSettings(16_384, flash_attention=False)),
    *_started("cohere2", CacheSettings(16_384), CacheSettings(8192, slots=4), _cache("q8_0")),
    *_started("gpt-oss", CacheSettings(16_384), CacheSettings(8192, slots=4, unified=True), _cache("q8_0")),
    *_started("deepseek2", CacheSettings(4096), CacheSettings(16_384, slots=4), _cache("q8_0"), _cache("q4_0")),
    *_started("mamba", CacheSettings(1024, slots=3), prompt=300),
    *_started("mamba", CacheSettings(32_768)),
    *_started("mamba2", CacheSettings(1024, slots=3), prompt=300),
    *_started("mamba2", CacheSettings(32_768)),
    *_started("jamba", CacheSettings(2048, slots=2), _cache("f32", context=4096), _cache("q8_0")),
    *_started("qwen3next", CacheSettings(4096, slots=2), CacheSettings(32_768), _cache("q8_0")),
    *_started("lfm2", CacheSettings(4096, slots=2), _cache("q8_0")),
    *_started("falcon-h1", CacheSettings(4096, slots=2), _cache("q8_0")),
    *_started("bert", *ENCODERS, prompt=500),
    *_started("gemma-embedding", *ENCODERS, prompt=500),
    *_started(
        "dense, large",
        CacheSettings(32_768),
        _cache("q8_0", context=32_768),
        CacheSettings(16_384, slots=4),
        prompt=540,
    ),
    *_started("experts, large", CacheSettings(65_536, slots=4), prompt=540),
    *_started("experts, large", CacheSettings(16_384, ubatch=1024), prompt=1040),
    *_started("windows, large", CacheSettings(65_536, slots=2), prompt=540),
)


def parts(found: Estimate) -> dict[str, float]:
    """What an estimate says of each column, in MiB; of checkpoints, the one that a slot of each case keeps."""
    sizes = (
        found.weights_bytes,
        found.kv_bytes,
        found.state_bytes,
        found.checkpoint_bytes // found.slots,
        found.compute_bytes,
        found.total_bytes,
    )
    return {column: size / MIB for column, size in zip(COLUMNS, sizes, strict=True)}


def error_percent(ours: float, theirs: float, roundings: int = 0) -> float:
    """How far the estimate is off, beyond what so many rounded numbers of a log can explain."""
    allowed = roundings * LOG_STEP_MIB / 2
    if abs(ours - theirs) <= allowed:
        return 0.0
    beyond = ours - theirs + (allowed if ours < theirs else -allowed)
    return 100 * beyond / theirs if theirs else 100.0


def record(item: pytest.Item, case: Case, measured: Mapping[str, tuple[float, int]], engine: str) -> None:
    """Takes what one engine said: column -> MiB, and how many rounded numbers that is the sum of."""
    item.user_properties.append((PROPERTY, [case.id, {"measured": dict(measured), "engine": engine}]))


def gather(properties: list[tuple[str, Any]], into: dict[str, Any]) -> None:
    """Adds what a test's report has: case -> measured, engine."""
    for key, value in properties:
        if key == PROPERTY:
            into[value[0]] = value[1]


def kept() -> dict[str, Any]:
    """What the last runs measured."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(FIGURES.read_text()))
    return {}


def keep(found: dict[str, Any]) -> None:
    """Keeps this run's figures beside those of cases that it did not run; cases that are no more are forgotten."""
    known = {case.id for case in CASES}
    figures = {name: figure for name, figure in {**kept(), **found}.items() if name in known}
    FIGURES.parent.mkdir(exist_ok=True)
    FIGURES.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")


def summary(errors: list[float]) -> str:
    """`median 0.0 %, worst +1.8 %`."""
    worst = max(errors, key=abs)
    return f"median {median(map(abs, errors)):.1f} %, worst {worst:+.1f} %"
