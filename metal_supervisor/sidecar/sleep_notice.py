"""A sleep of this Mac that is to come: whether there is one, and the word that all endpoints are out."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from metal_supervisor.host import sleep_note
from metal_supervisor.sidecar.registrar import Registrar
from metal_supervisor.state.doorbell import ring

LOOK_EVERY_S = 1.0
"""Nobody rings when the writer of the note has died."""
log = logging.getLogger("sidecar")


class SleepNotice:
    """Keeps the note of a coming sleep, and answers it."""

    def __init__(self, state: Path, registrar: Registrar) -> None:
        self._state, self._registrar = state, registrar
        self._reader = sleep_note.SleepNoteReader(state)
        self.coming: sleep_note.Nap | None = None
        self._answered: sleep_note.Nap | None = None

    @property
    def again_in_s(self) -> float:
        """Seconds after which to look again."""
        return float("inf") if self.coming is None else LOOK_EVERY_S

    def look(self) -> bool:
        """Reads the note; True if a sleep is over, or was none."""
        before, self.coming = self.coming, self._reader.look()
        if (before is None) != (self.coming is None):
            log.info("sleep", extra={"coming": self.coming is not None})
        return before is not None and self.coming is None

    def answer(self) -> None:
        """Says that all is taken out, once that is so. The registrar rings then, and was given before what to show."""
        if self.coming is None or self._answered == self.coming or not self._registrar.out:
            return
        with contextlib.suppress(OSError):  # on a full disk the other side waits its three seconds
            sleep_note.answer(self._state, self.coming)
        self._answered = self.coming
        ring(self._state, "sleepwatch")
