"""Keeps this Mac awake while a model is wanted on it, or fetched, by a program that supervisord has for that.

It is started and stopped only when that changes, and when the controller starts: whoever stops it by hand, so that the
Mac may sleep, is not argued with before then. It ends with supervisord, and by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from metal_supervisor.spec.types import LIVE, ProgramState, Record, Standing
from metal_supervisor.supervisord.client import Refused, Supervisord

PROGRAM = "caffeinate"
COMING = frozenset({"Checking", "Pending", "Downloading"})
"""Reasons of a wait in which this Mac itself is at work, and which a sleep would only make longer."""
log = logging.getLogger("controller")


def in_use(records: Iterable[Record], table: Mapping[str, ProgramState]) -> bool:
    """Whether an engine is wanted here, its model comes, or it has not ended yet: it may still answer somebody."""
    for record in records:
        state, decided = table.get(record.program), record.verdict
        if decided.standing is Standing.WAIT and decided.reason in COMING:
            return True
        if (record.runs and not record.stopped_by_hand) or (state is not None and state.state in LIVE):
            return True
    return False


class Awake:
    """Starts and stops the program."""

    def __init__(self, supervisord: Supervisord) -> None:
        self._supervisord = supervisord
        self._told: bool | None = None
        """What supervisord was last told; None: nothing yet."""

    def look(self, wanted: bool, table: Mapping[str, ProgramState]) -> None:
        """Makes it so, if that changes anything. Raises Unavailable."""
        if PROGRAM not in table:
            self._told = None  # an upgrade may bring it
            return
        if wanted == self._told:
            return
        try:
            (self._supervisord.start if wanted else self._supervisord.stop)(PROGRAM)
        except Refused as error:
            log.warning("this Mac cannot be kept awake", extra={"error": str(error)})
        self._told = wanted
