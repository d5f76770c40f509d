"""Keep this Mac awake, with a program under supervisord, while a model is wanted or being downloaded here.

The program is started and stopped only when that changes, and when the controller starts: a stop by hand, to let the
Mac sleep, lasts until then. It exits with supervisord.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from metal_supervisor.cluster.report import rests
from metal_supervisor.spec.processes import LIVE, ProgramState
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Standing
from metal_supervisor.supervisord.client import Refused, Supervisord

PROGRAM = "caffeinate"
COMING = frozenset({"Checking", "Pending", "Downloading"})
"""Reasons for waiting while this Mac itself is at work; sleep would only prolong the wait."""
log = logging.getLogger("controller")


def in_use(records: Iterable[Record], table: Mapping[str, ProgramState]) -> bool:
    """True if an engine is wanted here, also on demand, its model is on its way, or it may still be busy."""
    for record in records:
        state, decided = table.get(record.program), record.verdict
        if rests(record) or (decided.standing is Standing.WAIT and decided.reason in COMING):
            return True
        if (record.runs and not record.stopped_by_hand) or (state is not None and state.state in LIVE):
            return True
    return False


class Awake:
    """Starts and stops the program."""

    def __init__(self, supervisord: Supervisord) -> None:
        self._supervisord = supervisord
        self._told: bool | None = None
        """True if the program was last started, False if it was last stopped, None if neither yet."""

    def look(self, wanted: bool, table: Mapping[str, ProgramState]) -> None:
        """Start the program if `wanted`, stop it otherwise; do nothing if that is unchanged. Raises Unavailable."""
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
