"""The sidecar's side of an impending sleep: detect it, and confirm that all endpoints are out."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from metal_supervisor.host import sleep_note
from metal_supervisor.sidecar.registrar import Registrar
from metal_supervisor.spec.types import Json
from metal_supervisor.state.doorbell import ring

LOOK_EVERY_S = 1.0
"""The doorbell does not ring if the writer of the note has died."""
log = logging.getLogger("sidecar")


class SleepNotice:
    """Reads the note of an impending sleep, and answers it."""

    def __init__(self, state: Path, registrar: Registrar) -> None:
        self._state, self._registrar = state, registrar
        self._reader = sleep_note.SleepNoteReader(state)
        self.coming: Json | None = None
        self._answered: Json | None = None

    @property
    def again_in_s(self) -> float:
        """Seconds until the next `look`, infinity if no sleep is impending."""
        return float("inf") if self.coming is None else LOOK_EVERY_S

    def look(self) -> bool:
        """Read the note; True if an impending sleep is over or was called off."""
        before, self.coming = self.coming, self._reader.look()
        if (before is None) != (self.coming is None):
            log.info("sleep", extra={"coming": self.coming is not None})
        return before is not None and self.coming is None

    def answer(self) -> None:
        """Confirm that all endpoints are out, once they are.

        Call it after `Registrar.want`; the registrar wakes the loop when the last one is out.
        """
        if self.coming is None or self._answered == self.coming or not self._registrar.out:
            return
        with contextlib.suppress(OSError):  # on a full disk the other side waits its three seconds
            sleep_note.answer(self._state, self.coming)
        self._answered = self.coming
        ring(self._state, "sleepwatch")
