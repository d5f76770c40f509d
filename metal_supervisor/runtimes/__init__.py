"""The engines this Mac can run: one file each, one row each in the table below.

A runtime is pure: it turns a Service into argv and environment, and describes its probes as data.
"""

from __future__ import annotations

from collections.abc import Mapping

from metal_supervisor.runtimes import llama_server, mlx_server, ollama, omlx, vllm_swift
from metal_supervisor.runtimes.runtime import Binary, Executable, Place, Runtime
from metal_supervisor.spec.environment import Vocabulary

__all__ = ["RUNTIMES", "VOCABULARIES", "Binary", "Executable", "Place"]

RUNTIMES: Mapping[str, Runtime] = {
    row.name: row
    for row in (
        llama_server.RUNTIME,
        mlx_server.RUNTIME,
        omlx.RUNTIME,
        ollama.RUNTIME,
        vllm_swift.RUNTIME,
    )
}
"""By `spec.runtime`, in the order of preference."""
VOCABULARIES: Mapping[str, Vocabulary] = {
    name: row.vocabulary for name, row in RUNTIMES.items() if row.vocabulary is not None
}
