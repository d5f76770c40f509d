"""Downloads of a running system, as lines of a terminal.

The controller's report tells how much of each is here, every few seconds; the rate is computed from that.
"""

from __future__ import annotations

from metal_supervisor.spec import progress_bar
from metal_supervisor.spec.progress import DownloadProgress
from metal_supervisor.spec.types import Json
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.downloads import Download, counts, downloads
from metal_supervisor.state.reports import CONTROLLER_REPORT


class Incoming:
    """Downloads in the report of one state directory, with their rates."""

    def __init__(self) -> None:
        self._told: Json = {}
        self._found: tuple[Download, ...] = ()
        self._meters: dict[tuple[str, str], DownloadProgress] = {}

    def lines(self, state: StateDir, now: float, width: int) -> list[str]:
        """A line for each, by name. `now`: seconds of a steady clock; `width`: columns of the terminal."""
        told = state.report(CONTROLLER_REPORT)
        # The rate counts from one report to the next; one that cannot be read changes nothing.
        if told and told is not self._told:
            self._told = told
            self.take(tuple(each for each in downloads(told) if each.under_way), now)
        return self.shown(width)

    def shown(self, width: int) -> list[str]:
        """The same lines from the progress last recorded."""
        return [self._line(each, width) for each in self._found]

    def _line(self, each: Download, width: int) -> str:
        numbers = counts(each.got_bytes, each.total_bytes, each.message)
        note = "" if numbers else each.message or "about to begin"
        return progress_bar.line(".".join(each.key), self._meters[each.key], width, note)

    def take(self, found: tuple[Download, ...], now: float) -> None:
        """Record the progress of all of them, at a time of that clock."""
        self._found = found
        self._meters = {each.key: self._meters.get(each.key, DownloadProgress()) for each in found}
        for each in found:
            self._meters[each.key].update(each.got_bytes, each.total_bytes, now)
