"""Description of a runtime, and what a runtime composes command lines from: each module of one ends in a `Runtime`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from metal_supervisor.confinement.access import Access
from metal_supervisor.models.metadata import Demand, Reading
from metal_supervisor.spec.environment import Vocabulary
from metal_supervisor.spec.types import Engine, PartKey, Service


@dataclass(frozen=True)
class Executable:
    """A program that can serve a runtime, and how to install it."""

    name: str
    """Its name on PATH, e.g. `llama-server`."""
    setting: str
    """Name of the setting that holds its path, "" if it is only looked for on PATH."""
    install: str
    """Advice if it is missing."""
    script: bool = False
    """It is a Python script, whose interpreter has to be known."""
    help: tuple[str, ...] = ("--help",)
    """Arguments that print its flags."""
    package: str = ""
    """Python package of a script, if its version has to be known, else ""."""


@dataclass(frozen=True)
class Binary:
    """An engine's executable on this machine, as its own `--help` describes it."""

    path: str
    flags: frozenset[str]
    """All `--flag`s in its help; builds differ in them."""
    name: str = ""
    """Name of the runtime's executable that it is."""
    interpreter: str = ""
    """Python that runs it if it is a script, else ""."""
    help: str = ""
    """Full output of `--help`; "" if only its flags are known."""
    homes: tuple[str, ...] = ()
    """Directories of its own code: its libraries, an interpreter's environment and installation."""
    build: str = ""
    """Identifies this build among others at the same path."""
    version: str = ""
    """Version of its executable's `package`, "" if there is none, or its interpreter does not find it."""


@dataclass(frozen=True)
class Place:
    """Paths, address and resources for an engine's command line."""

    model_path: str
    host: str
    port: int
    threads: int | None
    """Performance cores, None when unknown."""
    cwd: str
    model: Reading = field(default_factory=lambda: Reading(None))
    """The reading of the model's file."""
    further: Mapping[PartKey, str] = field(default_factory=dict)
    """Paths of the service's auxiliary files."""
    registry: str = ""
    """Base URL of the mirror that Ollama's library models are pulled from, "" for the library itself."""
    daemon_models: str = ""
    """Directory in which a supervised Ollama keeps its models."""
    judged: tuple[str, ...] = ()
    """Real paths of the model's files at the time they were judged."""

    @property
    def offline(self) -> Mapping[str, str]:
        """Variables that keep Hugging Face's library off the network, and give it a cache of its own."""
        return {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": f"{self.cwd}/hub"}


@dataclass(frozen=True)
class Shared:
    """A daemon that serves the models of several services."""

    engine: Callable[[Binary, Place, Mapping[str, Any]], Engine]
    """The daemon's own process, with the options that its services agree on."""
    options: tuple[str, ...] = ()
    """Options of a service that are the daemon's."""
    per_file: Callable[[Service], object] | None = None
    """Parameters that all services of one model file must share; None if each may have its own."""
    names: Callable[[Service], tuple[str, ...]] = lambda service: (service.model.name,)
    """Names besides its own that it is to serve a service under, if no other service has them."""


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
