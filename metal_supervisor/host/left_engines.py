"""Engines that LLMKube's own agent left behind: when killed it ends none of them, and its successor adopts none.

They are recognized by the way that the agent starts each runtime (reference: its executors), not by name alone: a
llama-server that a user started by hand must not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

AGENTS_OWN = ("GGML_METAL_PATH_RESOURCES", "/usr/local/share/llama.cpp")
"""The variable that the agent sets for each llama-server."""
BEGINNINGS = {
    "llama-server": ("--model", None, "--host", None, "--port", None),
    "mlx-server": ("--model", None, "--host", None, "--port", None),
    "vllm-swift": ("serve", None, "--port", None, "--host", None),
}
"""Runtime -> how the agent's command line begins; None for any value."""


@dataclass(frozen=True)
class Process:
    """A process whose parent has ended."""

    pid: int
    argv: Sequence[str]
    environ: Mapping[str, str]
    resident_bytes: int = 0


@dataclass(frozen=True)
class Left:
    """An engine that was left behind."""

    pid: int
    runtime: str
    model: str
    """Its path."""
    port: str
    resident_bytes: int


def left_by_agent(processes: Iterable[Process], own_mark: str) -> list[Left]:
    """The agent's engines among processes without a parent. `own_mark`: variable that marks ours."""
    found = (_left(each) for each in processes if own_mark not in each.environ)
    return sorted((each for each in found if each), key=lambda each: each.pid)


def named_at(argv: Sequence[str]) -> int | None:
    """Which word of a command line names one of these engines; None if none does."""
    # A wrapper script runs as the second word of its interpreter.
    return next((at for at, word in enumerate(argv[:2]) if word.rpartition("/")[2] in BEGINNINGS), None)


def _left(process: Process) -> Left | None:
    at = named_at(process.argv)
    if at is None:
        return None
    runtime, words = process.argv[at].rpartition("/")[2], process.argv[at + 1 :]
    beginning = BEGINNINGS[runtime]
    if len(words) < len(beginning) or any(
        said not in (None, word) for said, word in zip(beginning, words, strict=False)
    ):
        return None
    if runtime == "llama-server" and process.environ.get(AGENTS_OWN[0]) != AGENTS_OWN[1]:
        return None
    port = words[beginning.index("--port") + 1]
    return Left(process.pid, runtime, words[1], port, process.resident_bytes) if port.isdecimal() else None
