"""Lines and progress bars on a terminal, drawn by rich; a pipe or a file gets lines as they are.

rich is imported with the first output to a terminal: the import takes 80 ms. Texts come from manifests, engines and
servers, so callers make them printable, and rich gets them as plain text, never as markup.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TextIO, TypeAlias

from metal_supervisor.spec.terminal_text import printable
from metal_supervisor.spec.types import Key
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.downloads import counts, downloads
from metal_supervisor.state.reports import CONTROLLER_REPORT

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.progress import Progress, ProgressColumn, TaskID

Line: TypeAlias = str | tuple[str, str]
"""A line that a terminal cuts at its width, or a head and a text that is wrapped next to it."""
USUAL = os.terminal_size((80, 24))
LONGEST_NAME = 40
"""Cells of a name, however wide the terminal is."""
SHORTEST_NAME = 12
"""Cells of a name below which columns are left out."""


def can_redraw(out: TextIO) -> bool:
    """True if the output is a terminal on which lines can be rewritten."""
    return not out.closed and out.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def size_of(out: TextIO) -> os.terminal_size:
    """Current columns and lines of a terminal: windows get resized."""
    with contextlib.suppress(OSError, ValueError):
        found = os.get_terminal_size(out.fileno())
        if found.columns > 0 and found.lines > 0:
            return found
    return USUAL


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


class Screen:
    """One output: on a terminal, lines are fitted to its width and may be redrawn in place.

    `marks`: regular expression for cut lines; what a group matches gets the group's name as its style. `raw`: treat a
    terminal as a file. Not safe to use from more than one thread.
    """

    def __init__(self, out: TextIO, marks: str = "", raw: bool = False, transient: bool = False) -> None:
        self._out, self._marks, self._transient = out, marks, transient
        self.possible = not raw and can_redraw(out)
        """True if the output is a terminal on which lines can be redrawn."""

    @property
    def width(self) -> int | None:
        """Current columns of the terminal, None for another output."""
        return size_of(self._out).columns if self.possible else None

    @cached_property
    def console(self) -> Console:
        """rich's view of the terminal."""
        from rich.console import Console

        # Whether it is a terminal is known: rich would believe FORCE_COLOR as well.
        return Console(file=self._out, force_terminal=True)

    @cached_property
    def _live(self) -> Live:
        from rich.live import Live

        return Live(
            console=self.console,
            auto_refresh=False,
            transient=self._transient,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def print(self, lines: Sequence[Line]) -> None:
        """Print lines that stay."""
        if self.possible:
            self.console.print(self._content(lines))
        else:
            self._out.write("".join(f"{''.join(line)}\n" for line in lines))
        self._out.flush()

    def redraw(self, lines: Sequence[Line], *above: RenderableType) -> None:
        """Show exactly these lines in place of those before; what does not fit is left out."""
        with contextlib.suppress(OSError, ValueError):  # the terminal was closed
            content = self._content(lines, *above)
            self._live.start()
            self._live.update(content, refresh=True)

    def clear(self) -> None:
        """End the live lines: they are removed if they are transient."""
        if "_live" in self.__dict__:
            with contextlib.suppress(OSError, ValueError):
                self._live.stop()

    def _content(self, lines: Sequence[Line], *above: RenderableType) -> RenderableType:
        from rich.console import Group
        from rich.table import Column, Table
        from rich.text import Text

        def rendered(line: Line) -> RenderableType:
            if isinstance(line, str):
                text = Text(line, no_wrap=True, overflow="ellipsis")
                text.highlight_regex(self._marks)
                return text
            grid = Table.grid(Column(no_wrap=True), Column(overflow="fold"))
            grid.add_row(*map(Text, line))
            return grid

        # rich would believe COLUMNS, and look at stdin first.
        self.console.size = size_of(self._out)
        return Group(*above, *map(rendered, lines))


class DownloadBars(Screen):
    """The bars of one output, whose rates outlive `clear`; without a terminal nothing is drawn."""

    def __init__(self, out: TextIO) -> None:
        super().__init__(out, transient=True)
        self._tasks: dict[str, TaskID] = {}

    @cached_property
    def _progress(self) -> Progress:
        from rich.progress import Progress

        return Progress(console=self.console, auto_refresh=False)

    def say(self, text: str) -> None:
        """Print one line in place of the bars; an output that cannot be written must not end the system."""
        self.clear()
        with contextlib.suppress(OSError, ValueError):
            self._out.write(text + "\n")
            self._out.flush()

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
        self._progress.columns = _columns(self.width or 1)
        self._update(bars)
        notes = [printable(f"{each.name}  {each.note}") for each in bars if each.note]
        self.redraw(notes, self._progress.get_renderable())

    def _update(self, bars: Sequence[Bar]) -> None:
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
                description=printable(name),
                visible=True,
                completed=each.got_bytes,
                total=max(each.total_bytes, each.got_bytes) if each.total_bytes else None,
            )

    def _drop(self, names: Collection[str]) -> None:
        for name in names:
            self._progress.remove_task(self._tasks.pop(name))


def _columns(width: int) -> tuple[ProgressColumn, ...]:
    """The columns that fit into a terminal."""
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
    cut = Column(no_wrap=True, max_width=max(1, min(room, LONGEST_NAME)))
    return TextColumn("{task.description}", markup=False, table_column=cut), *ordered
