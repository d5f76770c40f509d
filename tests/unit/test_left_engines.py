"""Engines of LLMKube's agent among processes without a parent: its own, and nothing that only looks like one."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from metal_supervisor.host.left_engines import AGENTS_OWN, Left, Process, left_by_agent

MARK = "METAL_SUPERVISOR_ENGINE"
AGENT = {AGENTS_OWN[0]: AGENTS_OWN[1], "PATH": "/usr/bin"}
LLAMA = ["/opt/homebrew/bin/llama-server", "--model", "/m.gguf", "--host", "0.0.0.0", "--port", "52011", "--metrics"]
MLX = ["/opt/homebrew/bin/mlx-server", "--model", "/mlx", "--host", "0.0.0.0", "--port", "8080"]
VLLM = ["/bin/bash", "/opt/homebrew/bin/vllm-swift", "serve", "/mlx", "--port", "52012", "--host", "0.0.0.0"]


@pytest.mark.parametrize(
    ("argv", "environ", "wanted"),
    [
        (LLAMA, AGENT, ("llama-server", "/m.gguf", "52011")),
        (MLX, {}, ("mlx-server", "/mlx", "8080")),
        (VLLM, {}, ("vllm-swift", "/mlx", "52012")),
    ],
)
def test_an_engine_of_the_agent_is_told_with_what_it_holds(
    argv: list[str], environ: Mapping[str, str], wanted: tuple[str, str, str]
) -> None:
    assert left_by_agent([Process(7, argv, environ, 5)], MARK) == [Left(7, *wanted, 5)]
    assert left_by_agent([Process(7, argv, {**environ, MARK: "/specs/x.json"}, 5)], MARK) == [], "ours"


@pytest.mark.parametrize(
    ("argv", "environ"),
    [
        (LLAMA, {}),  # somebody's own
        ([LLAMA[0], "-m", "/m.gguf", "--port", "8080"], AGENT),
        (LLAMA[:6], AGENT),
        ([*LLAMA[:6], "x", "--metrics"], AGENT),
        (["/bin/cat", "notes", *LLAMA[1:]], AGENT),
        (["/usr/bin/vim", "/src/notes", "llama-server"], AGENT),
        ([*MLX[:1], "--port", "8080", *MLX[1:5]], {}),
        ([], AGENT), ([""], {}), (MLX[:1], {}),
    ],
)  # fmt: skip
def test_what_only_looks_like_one_is_left_alone(argv: list[str], environ: Mapping[str, str]) -> None:
    assert left_by_agent([Process(7, argv, environ)], MARK) == []
