"""Progress bars of downloads at the bottom of a terminal, drawn by rich, below lines that stay.

rich is imported with the first bar: a pipe or a file never has one, and the import takes 80 ms. Names and notes come
from manifests and servers, so they are made printable, cut to the width, and passed on as plain text, never as markup.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TextIO

from metal_supervisor.cli.terminal import can_redraw, size_of
from metal_supervisor.spec.terminal_text import fitted
from metal_supervisor.spec.types import Key
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.downloads import counts, downloads
from metal_supervisor.state.reports import CONTROLLER_REPORT

if TYPE_CHECKING:
    from rich.live import Live
    from rich.progress import Progress, ProgressColumn, TaskID

LONGEST_NAME = 40
"""Cells of a name, however wide the terminal is."""
SHORTEST_NAME = 12
"""Cells of a name below which columns are left out."""


@dataclass(frozen=True)
class Bar:
    """One download as it is now."""

    name: str
    got_bytes: int
    total_bytes: int
    """0 if unknown."""
    note: str = ""
    """Text to show instead of the numbers."""


def bar(name: str, got_bytes: int, total_bytes: int, message: str) -> Bar:
    """A bar of a download, with its message where that is worth more than the numbers."""
    note = "" if counts(got_bytes, total_bytes, message) else message or "about to begin"
    return Bar(name, got_bytes, total_bytes, note)


class DownloadBars:
    """The bars of one output; without a terminal nothing is drawn. Not safe to use from more than one thread."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self.possible = can_redraw(out)
        """True if the output is a terminal that can do it."""
        self._tasks: dict[str, TaskID] = {}

    @cached_property
    def _live(self) -> Live:
        from rich.console import Console
        from rich.live import Live

        # Whether it is a terminal is known: rich would believe FORCE_COLOR as well.
        console = Console(file=self._out, force_terminal=True)
        return Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)

    @cached_property
    def _progress(self) -> Progress:
        from rich.progress import Progress

        return Progress(console=self._live.console, auto_refresh=False)

    def follow(self, state: StateDir, wanted: Callable[[Key], bool] = lambda _: True) -> None:
        """Show the downloads of a running system; a report of its controller that cannot be read changes nothing.

        `wanted`: takes the (namespace, name) of a Model.
        """
        if not self.possible or not (told := state.report(CONTROLLER_REPORT)):
            return
        found = [each for each in downloads(told) if each.under_way and wanted(each.key)]
        self.draw([bar(".".join(each.key), each.got_bytes, each.total_bytes, each.message) for each in found])

    def draw(self, bars: Sequence[Bar]) -> None:
        """Show exactly these bars, one line each; what does not fit is left out."""
        if not self.possible:
            return
        if not bars:
            self.clear()
            self._drop(tuple(self._tasks))
            return
        from rich.console import Group
        from rich.text import Text

        # rich would believe COLUMNS, and look at stdin first.
        columns, lines = self._live.console.size = size_of(self._out)
        shown = bars[: max(1, lines - 1)]
        self._progress.columns, room = _columns(columns)
        self._update(shown, room)
        notes = [Text(fitted(f"{each.name}  {each.note}", columns - 1)) for each in shown if each.note]
        with contextlib.suppress(OSError, ValueError):  # the terminal was closed
            self._live.start()
            self._live.update(Group(self._progress.get_renderable(), *notes), refresh=True)

    def _update(self, bars: Sequence[Bar], room: int) -> None:
        """Set the counts, from which rich makes the rates; a download that starts over gets a new rate."""
        counted = {each.name: each for each in bars if not each.note}
        done = {task.id: task.completed for task in self._progress.tasks}
        over = (name for name, task in self._tasks.items() if name in counted and counted[name].got_bytes < done[task])
        self._drop({*over, *(self._tasks.keys() - {each.name for each in bars})})
        for name in self._tasks.keys() - counted.keys():
            self._progress.update(self._tasks[name], visible=False)
        for name, each in counted.items():
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task("", total=None)
            self._progress.update(
                self._tasks[name],
                description=fitted(name, room),
                visible=True,
                completed=each.got_bytes,
                total=max(each.total_bytes, each.got_bytes) if each.total_bytes else None,
            )

    def _drop(self, names: Collection[str]) -> None:
        for name in names:
            self._progress.remove_task(self._tasks.pop(name))

    def clear(self) -> None:
        """Remove the bars, so that lines can be written in their place; the rates are kept."""
        if "_live" in self.__dict__:
            with contextlib.suppress(OSError, ValueError):
                self._live.stop()


def _columns(width: int) -> tuple[tuple[ProgressColumn, ...], int]:
    """(columns that fit into a terminal, cells that they leave for the name), the most important first."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.table import Column

    whole = Column(no_wrap=True)
    optional = (
        (5, TaskProgressColumn(table_column=whole)),
        (15, DownloadColumn(binary_units=True, table_column=whole)),
        (12, TransferSpeedColumn(table_column=whole)),
        (8, TimeRemainingColumn(table_column=whole)),
        (11, BarColumn(None)),
    )
    shown: list[ProgressColumn] = []
    room = width - 1
    for needed, column in optional:
        if room - needed < SHORTEST_NAME and shown:
            break
        room -= needed
        shown.append(column)
    # The bar is the last to get a place, and stands beside the name.
    ordered = sorted(shown, key=lambda each: not isinstance(each, BarColumn))
    name = TextColumn("{task.description}", markup=False, table_column=whole)
    return (name, *ordered), max(1, min(room, LONGEST_NAME))
