"""Description of a runtime: each module of one ends in a value of `Runtime`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metal_supervisor.confinement.access import Access
from metal_supervisor.models.metadata import Demand, Reading
from metal_supervisor.runtimes.place import Binary, Executable, Place
from metal_supervisor.spec.environment import Vocabulary
from metal_supervisor.spec.types import Engine, Service


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
    """One row of the table of runtimes."""

    name: str
    """As `spec.runtime` names it."""
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
    contexts: Callable[[Service, Reading], tuple[int, ...]] = lambda _service, _model: ()
    """(service, its model) -> tokens of a slot to choose from, the most first; () if the service leaves no choice."""
    vocabulary: Vocabulary | None = None
    """Flags and variables that a manifest may set; None if its services share a daemon: it refuses all of them."""
    access: Callable[[Binary, str], Access] = lambda binary, _code: Access((binary.path,), binary.homes)
    """(binary, directory of our own code) -> system access that its process needs besides its model and its port."""
    runs_code: Callable[[Binary], str] = lambda _binary: ""
    """Reason why this build would run code that a model contains, and the fix; "" if it runs none."""
    metrics_path: str = ""
    """Path of the engine's metrics, "" if it has none, or is a shared daemon: those belong to no one service."""
