"""What a runtime is told about this machine when it composes a command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from metal_supervisor.models.metadata import Reading
from metal_supervisor.spec.types import PartKey


@dataclass(frozen=True)
class Executable:
    """A program that can serve a runtime, and how to come by it."""

    name: str
    """As it is found on PATH, e.g. `llama-server`."""
    setting: str
    """Name of the setting that holds its path."""
    install: str
    """What to do where it is missing."""
    script: bool = False
    """It is a script of Python's, whose interpreter has to be known."""
    help: tuple[str, ...] = ("--help",)
    """What makes it tell its flags."""
    package: str = ""
    """The Python package of a script whose version has to be known."""


@dataclass(frozen=True)
class Binary:
    """An engine's executable on this machine, as its own `--help` describes it."""

    path: str
    flags: frozenset[str]
    """Every `--flag` the binary names; builds differ in what they know."""
    name: str = ""
    """Which of its runtime's executables it is."""
    interpreter: str = ""
    """What runs it if it is a script, "" if it is none."""
    help: str = ""
    """All that its `--help` prints; "" if only its flags are known."""
    homes: tuple[str, ...] = ()
    """Directories of its own code: its libraries, an interpreter's environment and installation."""
    build: str = ""
    """Tells this build from others at the same path."""
    version: str = ""
    """Of its executable's `package`, "" if there is none, or its interpreter does not find it."""


@dataclass(frozen=True)
class Place:
    """Where an engine is to run, as far as its command line needs to know."""

    model_path: str
    host: str
    port: int
    threads: int | None
    """Performance cores, None when unknown."""
    cwd: str
    model: Reading = field(default_factory=lambda: Reading(None))
    """What is known of the model's file."""
    further: Mapping[PartKey, str] = field(default_factory=dict)
    """Where the service's companions are."""
    registry: str = ""
    """Base URL of the mirror that Ollama's library models are pulled from, "" for the library itself."""
    daemon_models: str = ""
    """Directory in which a supervised Ollama keeps its models."""
    judged: tuple[str, ...] = ()
    """Real paths of the model's files, as they were judged."""
