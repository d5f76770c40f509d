"""Inputs about this machine from which a runtime composes a command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from metal_supervisor.models.metadata import Reading
from metal_supervisor.spec.types import PartKey


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
