"""The engines this Mac can run: one file each, one row each in the table below.

A runtime is pure: it turns a Service into argv and environment, and describes its probes as data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metal_supervisor.confinement.access import Access
from metal_supervisor.models.metadata import Demand, Reading
from metal_supervisor.runtimes import (
    llama_arguments,
    llama_memory,
    llama_server,
    mlx_arguments,
    mlx_memory,
    mlx_server,
    ollama,
    omlx,
    vllm_swift,
)
from metal_supervisor.runtimes.place import Binary, Executable, Place
from metal_supervisor.spec.environment import Vocabulary
from metal_supervisor.spec.types import Engine, Service

__all__ = ["RUNTIMES", "VOCABULARIES", "Binary", "Executable", "Place", "Runtime", "Shared"]


@dataclass(frozen=True)
class Shared:
    """A daemon that serves the models of several services."""

    engine: Callable[[Binary, Place, Mapping[str, Any]], Engine]
    """The daemon's own process, with the options that its services agree on."""
    options: tuple[str, ...] = ()
    """Options of a service that are the daemon's."""
    per_file: Callable[[Service], object] | None = None
    """Parameters that all services of one model file must share; None if each may have its own."""


@dataclass(frozen=True)
class Runtime:
    """One row of the table."""

    executables: tuple[Executable, ...]
    """Alternatives in order of preference: the first that is installed is used."""
    formats: frozenset[str]
    """`Model.spec.format`s that it serves."""
    refuse: Callable[[Service], tuple[str, str] | None]
    """(reason, message) if the runtime cannot honour what the service asks for."""
    engine: Callable[[Service, Binary, Place], Engine]
    demand: Callable[[Service, Sequence[str], Reading, Callable[[str], Reading | None]], Demand | None]
    """(service, argv, its model, path -> reading of another file) -> memory estimate; None while a file is read."""
    lacks: Callable[[Service, Binary], tuple[str, str] | None] = lambda _service, _binary: None
    """(reason, message) if this build of it cannot honour what the service asks for."""
    shared: Shared | None = None
    """Set if the services are models of one daemon; `engine` is then the attacher of one."""
    vocabulary: Vocabulary | None = None
    """Flags and variables that a manifest may set; None if its services share a daemon: it refuses all of them."""
    access: Callable[[Binary, str], Access] = lambda binary, _code: Access((binary.path,), binary.homes)
    """(binary, directory of our own code) -> system access that its process needs besides its model and its port."""
    runs_code: Callable[[Binary], str] = lambda _binary: ""
    """Reason why this build would run code that a model contains, and the fix; "" if it runs none."""
    metrics_path: str = ""
    """Path of the engine's metrics, "" if it has none, or is a shared daemon: those belong to no one service."""


RUNTIMES: Mapping[str, Runtime] = {
    "llama-server": Runtime(
        executables=(Executable("llama-server", "llama_server", "install it (brew install llama.cpp)"),),
        formats=frozenset({"gguf"}),
        refuse=llama_server.refuse,
        engine=llama_server.engine,
        demand=lambda _service, argv, model, reading_of: llama_memory.demand(argv, model, reading_of),
        lacks=llama_server.lacks,
        vocabulary=llama_arguments.VOCABULARY,
        metrics_path="/metrics",
    ),
    "mlx-server": Runtime(
        executables=(
            Executable(mlx_server.SWIFT, "mlx_server", "install it (github.com/defilantech/mlx-server)"),
            Executable(mlx_server.MLX_LM, "mlx_lm_server", "install it (pipx install mlx-lm)", True, package="mlx-lm"),
        ),
        formats=frozenset({"mlx", "safetensors"}),
        refuse=mlx_server.refuse,
        engine=mlx_server.engine,
        demand=mlx_memory.demand,
        lacks=mlx_server.lacks,
        vocabulary=mlx_arguments.MLX,
        access=mlx_server.access,
        runs_code=mlx_server.runs_code,
    ),
    omlx.NAME: Runtime(
        executables=(
            Executable("omlx", "omlx", "install it (brew install jundot/omlx/omlx)", True, ("serve", "--help")),
        ),
        formats=frozenset({"mlx", "safetensors"}),
        refuse=omlx.refuse,
        engine=omlx.engine,
        demand=omlx.demand,
        shared=Shared(omlx.daemon, options=omlx.DAEMON_OPTIONS),
        access=omlx.access,
    ),
    ollama.NAME: Runtime(
        executables=(Executable("ollama", "ollama", "install it (brew install ollama)", help=("serve", "--help")),),
        formats=frozenset({"gguf"}),
        refuse=ollama.refuse,
        engine=ollama.engine,
        demand=ollama.demand,
        shared=Shared(ollama.daemon, per_file=ollama.parameters),
        access=ollama.access,
    ),
    "vllm-swift": Runtime(
        executables=(Executable(vllm_swift.NAME, "vllm_swift", "install it (brew install TheTom/tap/vllm-swift)"),),
        formats=frozenset({"mlx", "safetensors"}),
        refuse=vllm_swift.refuse,
        engine=vllm_swift.engine,
        demand=vllm_swift.demand,
        vocabulary=mlx_arguments.VLLM,
        metrics_path="/metrics",
    ),
}

VOCABULARIES: Mapping[str, Vocabulary] = {
    name: row.vocabulary for name, row in RUNTIMES.items() if row.vocabulary is not None
}
