"""Inventory of this Mac: the chip, the engines with their versions, and the model formats that they serve.

Placement depends on it. A binary may take long to print its version, and the system to identify its GPU, so a thread
asks them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from metal_supervisor.host import chip, darwin_memory, machine
from metal_supervisor.placement.leases import ENGINES, PREFIX
from metal_supervisor.runtimes import RUNTIMES, builds
from metal_supervisor.runtimes.setting_checks import offered
from metal_supervisor.settings.loader import Settings

LOOK_EVERY_S = 60.0


@dataclass(frozen=True)
class Offer:
    """One runtime that this Mac can run."""

    runtime: str
    """Key into the runtimes table."""
    program: str
    """Name of the executable that serves it here, e.g. `mlx_lm.server`."""
    version: str
    """As the program reports it, "" if it does not."""
    formats: tuple[str, ...]
    """`Model.spec.format`s that it serves, sorted."""


def look(settings: Settings) -> tuple[Offer, ...]:
    """The enabled runtimes that have an executable here, the preferred first. May take seconds."""
    found = []
    for name in offered(settings):
        runtime = RUNTIMES[name]
        with contextlib.suppress(machine.NoBinary):
            executable, path = builds.find(settings, runtime.executables)
            found.append(Offer(name, executable.name, machine.version_of(path), tuple(sorted(runtime.formats))))
    return tuple(found)


def noted(offers: Sequence[Offer]) -> dict[str, str]:
    """Annotations of the node Lease, e.g. `llama-server 7200, mlx_lm.server 0.32.2` and `gguf mlx safetensors`."""
    return {
        ENGINES: ", ".join(f"{each.program} {each.version}".strip() for each in offers),
        PREFIX + "formats": " ".join(sorted({name for each in offers for name in each.formats})),
    }


class Inventory:
    """The current inventory. Engines are looked up again every LOOK_EVERY_S: they may be installed or upgraded."""

    def __init__(self, settings: Settings, on_change: Callable[[], None]) -> None:
        self._settings, self._on_change = settings, on_change
        self.offers: tuple[Offer, ...] = ()
        self.chip = chip.quick(darwin_memory.mac())

    def start(self) -> None:
        """Start the thread that looks."""
        threading.Thread(target=self._run, name="engines", daemon=True).start()

    def _run(self) -> None:
        self._saw(look(self._settings), self.chip)
        self._saw(self.offers, chip.facts(darwin_memory.mac(), self._settings.state_path, machine.boot_id()))
        while True:
            time.sleep(LOOK_EVERY_S)
            self._saw(look(self._settings), self.chip)

    def _saw(self, offers: tuple[Offer, ...], found: chip.Chip) -> None:
        if (offers, found) != (self.offers, self.chip):
            self.offers, self.chip = offers, found
            self._on_change()
