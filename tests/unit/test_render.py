"""Lines and progress bars on a terminal: plain text that never overflows. A pipe gets whole lines and no bars."""

from __future__ import annotations

import io
import itertools
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from metal_supervisor.cli.render import Bar, DownloadBars, Screen
from metal_supervisor.spec.terminal_text import cells
from metal_supervisor.spec.types import ModelFile
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.reports import CONTROLLER_REPORT
from tests.support.sized_terminal import SizedTerminal

GIB = 1 << 30
BAR = "━"
ERASED = "\x1b[1A\x1b[2K"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> SizedTerminal:
    return SizedTerminal(monkeypatch)


def timed(out: SizedTerminal, *steps: tuple[float, list[Bar]]) -> DownloadBars:
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
    width: int, shown: list[str], left_out: list[str], terminal: SizedTerminal
) -> None:
    terminal.resize(width)
    timed(terminal, *STEPS)
    text = terminal.fresh()
    assert all(each in text for each in shown) and not any(each in text for each in left_out)


@pytest.mark.parametrize("name", ["m", "模型" * 20, "e\u0301" * 60, "\x1b[2J\r\n\u202e[red]" + "n" * 60])
def test_no_line_wraps_or_holds_what_moves_the_cursor(name: str, terminal: SizedTerminal) -> None:
    counts = (0, 0), (5, 0), (3 * GIB, 900 * GIB), (9, 3)
    for width, (got, total), note in itertools.product((1, 5, 17, 40, 80, 130), counts, ("", "the line was cut")):
        terminal.resize(width)
        DownloadBars(terminal).draw([Bar(name, got, total, note)])
        (line,) = terminal.fresh().splitlines() or [""]
        assert line.isprintable() and cells(line) <= width, (width, line)


def test_names_are_no_markup_and_notes_take_the_place_of_numbers(terminal: SizedTerminal) -> None:
    DownloadBars(terminal).draw([Bar("[bold]m[/bold]", 1, 2), Bar("n", 1, 2, "[link=x]waits")])
    first, second = terminal.fresh().splitlines()
    assert first.startswith("[bold]m[/bold] ") and second == "n  [link=x]waits"


def test_no_color_is_honoured(terminal: SizedTerminal, monkeypatch: pytest.MonkeyPatch) -> None:
    coloured = re.compile(r"\x1b\[[0-9;]*(3|9)[0-9][0-9;]*m")
    DownloadBars(terminal).draw([Bar("m", 1, 2)])
    assert coloured.search(terminal.getvalue())
    terminal.fresh()
    monkeypatch.setenv("NO_COLOR", "1")
    DownloadBars(terminal).draw([Bar("m", 1, 2)])
    Screen(terminal, "(?P<red>Failed)").print(["d/m  Failed"])
    assert BAR in terminal.getvalue() and "Failed" in terminal.getvalue()
    assert not coloured.search(terminal.getvalue())


def test_a_pipe_gets_nothing_even_if_colours_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    bars = DownloadBars(out)
    bars.draw([Bar("m", 1, 2)])
    bars.clear()
    assert not bars.possible and not out.getvalue()


def test_a_line_can_be_written_in_the_place_of_the_bars_and_the_rate_is_kept(terminal: SizedTerminal) -> None:
    bars = timed(terminal, *STEPS)
    bars.clear()
    assert terminal.getvalue().endswith(ERASED) and "\x1b[?25h" in terminal.getvalue()
    terminal.fresh()
    bars.draw(STEPS[-1][1])
    assert "53.7 MB/s" in terminal.fresh()


def test_a_download_that_starts_over_loses_its_rate(terminal: SizedTerminal) -> None:
    timed(terminal, *STEPS, (30.0, [Bar("tiny.gguf", 5, 8 * GIB)]))
    assert "MB/s" not in terminal.fresh()


def test_a_terminal_that_was_closed_ends_nothing(terminal: SizedTerminal) -> None:
    bars = timed(terminal, *STEPS)
    terminal.close()
    bars.draw(STEPS[0][1])
    bars.clear()


def report(state: Path, **files: ModelFile) -> None:
    body = {"models": {f"default/{name}": {"source": "", "file": asdict(file)} for name, file in files.items()}}
    (state / "fresh").write_text(json.dumps(body))
    (state / "fresh").replace(state / CONTROLLER_REPORT)


def test_each_download_of_a_running_system_has_a_bar_until_it_is_over(terminal: SizedTerminal, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("text", ["通義千問三十二億參數量化版本.gguf is cut short", "e\u0301" * 60, "a bc " * 30])
def test_a_text_is_wrapped_by_the_cells_that_it_takes(text: str, terminal: SizedTerminal) -> None:
    terminal.resize(40)
    Screen(terminal).print([("why  ", text)])
    lines = terminal.fresh().splitlines()
    assert len(lines) > 1 and all(cells(each) <= 40 for each in lines)
    assert [each[:5] for each in lines] == ["why  ", *["     "] * (len(lines) - 1)]
    assert "".join(each[5:] for each in lines).replace(" ", "") == text.replace(" ", "")


FOREIGN = "[/x] [link=https://evil]y[/link] [bold]z :smile: http://h/1"


def test_a_terminal_shows_foreign_text_as_plain_text(terminal: SizedTerminal) -> None:
    screen = Screen(terminal)
    screen.print([FOREIGN, ("head  ", FOREIGN)])
    assert terminal.getvalue().splitlines() == [FOREIGN, f"head  {FOREIGN}"]
    terminal.fresh()
    screen.redraw([FOREIGN, ("head  ", FOREIGN)])
    screen.clear()
    assert f"{FOREIGN}\nhead  {FOREIGN}" in terminal.fresh()


def test_a_pipe_gets_whole_lines_without_styles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    out = io.StringIO()
    Screen(out, "(?P<red>Failed)").print([f"Failed {FOREIGN} {'word ' * 60}", ("head  ", f"{FOREIGN} {'word ' * 60}")])
    assert out.getvalue() == f"Failed {FOREIGN} {'word ' * 60}\nhead  {FOREIGN} {'word ' * 60}\n"


def test_live_lines_are_cut_to_the_height_and_stay_whole_at_the_end(terminal: SizedTerminal) -> None:
    terminal.resize(40, lines=4)
    screen, lines = Screen(terminal), [f"line {i}" for i in range(6)]
    screen.redraw(lines)
    assert [each.strip() for each in terminal.fresh().splitlines()] == [*lines[:3], "..."]
    screen.clear()
    assert terminal.fresh().split() == " ".join(lines).split()
