"""Composition of an engine's command line and its memory estimate, from the files and the build that are here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from metal_supervisor.controller.prerequisites import context_choice
from metal_supervisor.controller.prerequisites.context_choice import Composition
from metal_supervisor.host import machine
from metal_supervisor.memory.fit_advice import LEAST_CONTEXT
from metal_supervisor.models.metadata import Demand, Reading
from metal_supervisor.runtimes import RUNTIMES, Binary, Place
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.types import Engine, PartKey, Service

Look: TypeAlias = Callable[[str], Reading | None]
"""Path of a file in a command line -> its metadata; None while it is being read."""


@dataclass(frozen=True)
class EngineParts:
    """All that an engine is composed of."""

    service: Service
    binary: Binary
    path: str
    """Of its model, "" for one that is not on this Mac yet."""
    port: int
    reading: Reading | None
    """The model's metadata; None while it is being read."""
    further: Mapping[PartKey, str] = field(default_factory=dict)
    """Paths of the files beside the model."""
    judged: tuple[str, ...] = ()
    """Real paths of the model's files."""


class Composer:
    """Composes engines for this Mac."""

    def __init__(self, settings: Settings, home: str) -> None:
        """`home`: the directory by whose name engines know the state directory."""
        self._settings, self._home = settings, home

    def compose(self, parts: EngineParts, look: Look) -> tuple[Engine, Demand] | None:
        """The engine and its memory estimate; None while a header is being read."""
        if parts.reading is None:
            return None
        runtime, settings = RUNTIMES[parts.service.runtime], self._settings
        place = Place(
            parts.path,
            settings.bind_address,
            parts.port,
            machine.performance_cores(),
            self._home,
            parts.reading,
            parts.further,
            settings.ollama_registry,
            settings.ollama_models_path,
            parts.judged,
        )
        engine = runtime.engine(parts.service, parts.binary, place)
        demand = runtime.demand(parts.service, engine.argv, parts.reading, look)
        return None if demand is None else (engine, demand)

    def contexts(self, known: int, parts: EngineParts) -> tuple[int, ...]:
        """The contexts that an engine may get. `known`: as `context_choice.known`."""
        service, reading = parts.service, parts.reading
        offered = RUNTIMES[service.runtime].contexts(service, reading) if reading is not None else ()
        return context_choice.to_try(known, offered)

    def alternatives(self, contexts: Sequence[int], parts: EngineParts, look: Look) -> tuple[Composition, ...] | None:
        """The engine with each of these contexts, as `compose`."""
        found = []
        for tokens in contexts:
            composed = self.compose(replace(parts, service=context_choice.with_context(parts.service, tokens)), look)
            if composed is None:
                return None
            found.append(Composition(tokens, *composed))
        return tuple(found)

    def advice(self, parts: EngineParts, demand: Demand, budget_bytes: int, look: Look) -> str:
        """Parts of the estimate of an engine that can never fit, and the context with which it would."""
        fitting = self._fitting_context(parts, demand, budget_bytes, look)
        return "; ".join(each for each in (demand.text, fitting) if each)

    def _fitting_context(self, parts: EngineParts, demand: Demand, budget_bytes: int, look: Look) -> str:
        """Advice about spec.contextSize; "" if the estimate does not depend on it."""
        options = parts.service.options
        tokens, least = int(options.get("contextSize", 0)) // 2, LEAST_CONTEXT * int(options.get("parallelSlots", 1))
        while tokens >= least:
            shorter = replace(parts, service=replace(parts.service, options={**options, "contextSize": tokens}))
            composed = self.compose(shorter, look)
            if composed is None or composed[1].bytes is None or composed[1].bytes == demand.bytes:
                return ""  # the context is said in another way
            if composed[1].bytes <= budget_bytes:
                return f"spec.contextSize {tokens} would fit"
            tokens //= 2
        return "no spec.contextSize makes it fit" if options.get("contextSize") else ""
