"""Progress bars on a terminal: they never wrap, stay plain text, and leave nothing behind; a pipe gets none."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from metal_supervisor.cli import download_bars
from metal_supervisor.cli.download_bars import Bar, DownloadBars
from metal_supervisor.spec.terminal_text import cells, fitted, labelled, printable
from metal_supervisor.spec.types import ModelFile
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.reports import CONTROLLER_REPORT

GIB = 1 << 30
BAR = "━"
ERASED = "\x1b[1A\x1b[2K"
SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal(io.StringIO):
    """Output that claims to be a terminal."""

    def isatty(self) -> bool:
        return True

    def fresh(self) -> str:
        """What came since the last call, without the sequences that erase, colour or move."""
        text = SEQUENCE.sub("", self.getvalue())
        self.seek(0)
        self.truncate()
        return text


def sized(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr(download_bars, "size_of", lambda _: os.terminal_size((columns, 24)))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    sized(monkeypatch, 100)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def timed(out: Terminal, *steps: tuple[float, list[Bar]]) -> DownloadBars:
    """Bars that were drawn at these seconds of a clock."""
    bars = DownloadBars(out)
    for at, shown in steps:
        bars._progress.get_time = lambda at=at: at  # type: ignore[misc]
        out.fresh()
        bars.draw(shown)
    return bars


STEPS = (0.0, [Bar("tiny.gguf", GIB, 8 * GIB)]), (20.0, [Bar("tiny.gguf", 2 * GIB, 8 * GIB)])


@pytest.mark.parametrize(
    ("width", "shown", "left_out"),
    [
        (100, ["tiny.gguf", BAR, "25%", "2.0/8.0 GiB", "53.7 MB/s", "0:02:00"], []),
        (60, ["tiny.gguf", "25%", "2.0/8.0 GiB", "53.7 MB/s", "0:02:00"], [BAR]),
        (46, ["tiny.gguf", "25%", "2.0/8.0 GiB", "53.7 MB/s"], [BAR, "0:02"]),
        (40, ["tiny.gguf", "25%", "2.0/8.0 GiB"], [BAR, "MB/s"]),
        (20, ["tiny.gguf", "25%"], [BAR, "GiB"]),
    ],
)
def test_what_a_narrow_terminal_has_no_room_for_is_left_out(
    width: int, shown: list[str], left_out: list[str], terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    sized(monkeypatch, width)
    timed(terminal, *STEPS)
    text = terminal.fresh()
    assert all(each in text for each in shown) and not any(each in text for each in left_out)


@pytest.mark.parametrize("name", ["m", "模型" * 20, "e\u0301" * 60, "\x1b[2J\r\n\u202e[red]" + "n" * 60])
def test_no_line_wraps_or_holds_what_moves_the_cursor(
    name: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = (0, 0), (5, 0), (3 * GIB, 900 * GIB), (9, 3)
    for width, (got, total), note in itertools.product((1, 5, 17, 40, 80, 130), counts, ("", "the line was cut")):
        sized(monkeypatch, width)
        DownloadBars(terminal).draw([Bar(name, got, total, note)])
        (line,) = terminal.fresh().splitlines() or [""]
        assert line.isprintable() and cells(line) <= width, (width, line)


def test_names_are_no_markup_and_notes_take_the_place_of_numbers(terminal: Terminal) -> None:
    DownloadBars(terminal).draw([Bar("[bold]m[/bold]", 1, 2), Bar("n", 1, 2, "[link=x]waits")])
    first, second = terminal.fresh().splitlines()
    assert first.startswith("[bold]m[/bold] ") and second == "n  [link=x]waits"


def test_no_color_is_honoured(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    coloured = re.compile(r"\x1b\[[0-9;]*(3|9)[0-9][0-9;]*m")
    DownloadBars(terminal).draw([Bar("m", 1, 2)])
    assert coloured.search(terminal.getvalue())
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    DownloadBars(plain).draw([Bar("m", 1, 2)])
    assert BAR in plain.getvalue() and not coloured.search(plain.getvalue())


def test_a_pipe_gets_nothing_even_if_colours_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    bars = DownloadBars(out)
    bars.draw([Bar("m", 1, 2)])
    bars.clear()
    assert not bars.possible and not out.getvalue()


def test_a_line_can_be_written_in_the_place_of_the_bars_and_the_rate_is_kept(terminal: Terminal) -> None:
    bars = timed(terminal, *STEPS)
    bars.clear()
    assert terminal.getvalue().endswith(ERASED) and "\x1b[?25h" in terminal.getvalue()
    terminal.fresh()
    bars.draw(STEPS[-1][1])
    assert "53.7 MB/s" in terminal.fresh()


def test_a_download_that_starts_over_loses_its_rate(terminal: Terminal) -> None:
    timed(terminal, *STEPS, (30.0, [Bar("tiny.gguf", 5, 8 * GIB)]))
    assert "MB/s" not in terminal.fresh()


def test_a_terminal_that_was_closed_ends_nothing(terminal: Terminal) -> None:
    bars = timed(terminal, *STEPS)
    terminal.close()
    bars.draw(STEPS[0][1])
    bars.clear()


def report(state: Path, **files: ModelFile) -> None:
    body = {"models": {f"default/{name}": {"source": "", "file": asdict(file)} for name, file in files.items()}}
    (state / "fresh").write_text(json.dumps(body))
    (state / "fresh").replace(state / CONTROLLER_REPORT)


def test_each_download_of_a_running_system_has_a_bar_until_it_is_over(terminal: Terminal, tmp_path: Path) -> None:
    bars, state = DownloadBars(terminal), StateDir(tmp_path)
    bars.follow(state)
    assert not terminal.getvalue()
    cut = ModelFile("Downloading", message="the line was cut; tried again in 4 s", got_bytes=GIB, total_bytes=8 * GIB)
    report(
        tmp_path,
        big=ModelFile("Downloading", message="12 %", got_bytes=GIB, total_bytes=8 * GIB),
        cut=cut,
        failed=ModelFile("Failed", message="404"),
        waits=ModelFile("Downloading"),
    )
    bars.follow(state)
    text = terminal.fresh()
    assert "default.big" in text and "1.0/8.0 GiB" in text and "failed" not in text
    assert "default.cut  the line was cut; tried again in 4 s" in text and "default.waits  about to begin" in text
    (tmp_path / CONTROLLER_REPORT).write_text("{")
    bars.follow(state)
    assert not terminal.getvalue(), "half a report changes nothing"
    report(tmp_path, cut=cut)
    bars.follow(state, lambda key: key == ("default", "big"))
    assert terminal.getvalue().endswith(ERASED)


def test_what_is_fitted_is_printable_and_marked_where_it_was_cut() -> None:
    assert printable("a\x1b[31mb\u202ec\n") == "a?[31mb?c?"
    assert fitted("abcdef", 6) == "abcdef" and fitted("abcdef", 5) == "abcd…" and fitted("abc", 0) == ""
    assert fitted("模型模型", 5) == "模型…"


@pytest.mark.parametrize("text", ["通義千問三十二億參數量化版本.gguf is cut short", "e\u0301" * 60, "a bc " * 30])
def test_a_text_is_wrapped_by_the_cells_that_it_takes(text: str) -> None:
    lines = labelled("why  ", text, 40)
    assert all(cells(each) <= 40 and each.startswith(("why  ", "     ")) for each in lines)
    assert "".join(each[5:] for each in lines).replace(" ", "") == text.replace(" ", "")
