"""A progress line: it never wraps, never says what it does not know, and never lets through what moves a cursor."""

from __future__ import annotations

import itertools

import pytest

from metal_supervisor.spec.progress import DownloadProgress
from metal_supervisor.spec.progress_bar import line
from metal_supervisor.spec.terminal_text import cells, fitted, labelled, printable

GIB = 1 << 30


def meter(got: int, total: int, rate: float = 0.0) -> DownloadProgress:
    return DownloadProgress(total, got, rate)


def test_a_wide_terminal_shows_all_of_it() -> None:
    found = line("tiny-q4.gguf", meter(2 * GIB, 8 * GIB, 50e6), 100)
    assert found == "tiny-q4.gguf  [=======                       ]   25 %  2.0 of 8.0 GiB  50.0 MB/s  2 min left"


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (60, "tiny-q4.gguf   25 %  2.0 of 8.0 GiB  50.0 MB/s  2 min left"),
        (50, "tiny-q4.gguf   25 %  2.0 of 8.0 GiB  50.0 MB/s"),
        (40, "tiny-q4.gguf   25 %  2.0 of 8.0 GiB"),
        (19, "tiny-q4.gg…   25 %"),
        (10, "t…   25 %"),
        (4, " 2…"),
    ],
)
def test_what_a_narrow_one_has_no_room_for_is_left_out(width: int, shown: str) -> None:
    assert line("tiny-q4.gguf", meter(2 * GIB, 8 * GIB, 50e6), width) == shown


@pytest.mark.parametrize("name", ["m", "模型" * 20, "e\u0301" * 60, "\x1b[2J\r\n\u202e" + "n" * 60])
@pytest.mark.parametrize("found", [meter(0, 0), meter(5, 0, 1e9), meter(3 * GIB, 900 * GIB, 1.0), meter(9, 3)])
def test_it_never_wraps_and_holds_nothing_but_print(name: str, found: DownloadProgress) -> None:
    for note, width in itertools.product(("", "the line was cut; tried again in 4 s"), range(1, 130)):
        shown = line(name, found, width, note)
        assert cells(shown) <= max(1, width - 1), width
        assert shown.isprintable(), width


def test_without_a_total_there_is_no_share_and_no_bar() -> None:
    assert line("m.gguf", meter(5 << 20, 0), 80) == "m.gguf  5 MiB"
    assert line("m.gguf", meter(5 << 20, 0, 2e6), 80) == "m.gguf  5 MiB  2.0 MB/s"


def test_a_download_of_more_than_it_was_said_to_be_is_full() -> None:
    assert "[==============================]  100 %" in line("m", meter(9 * GIB, 8 * GIB), 100)


def test_units_are_told_when_they_differ() -> None:
    assert "412 MiB of 8.0 GiB" in line("m", meter(412 << 20, 8 * GIB), 80)


def test_words_take_the_place_of_numbers() -> None:
    assert line("m.gguf", meter(1, 2), 80, "it waits for its turn") == "m.gguf  it waits for its turn"


def test_what_is_fitted_is_printable_and_marked_where_it_was_cut() -> None:
    assert printable("a\x1b[31mb\u202ec\n") == "a?[31mb?c?"
    assert fitted("abcdef", 6) == "abcdef" and fitted("abcdef", 5) == "abcd…" and fitted("abc", 0) == ""
    assert fitted("模型模型", 5) == "模型…"


@pytest.mark.parametrize("text", ["通義千問三十二億參數量化版本.gguf is cut short", "e\u0301" * 60, "a bc " * 30])
def test_a_text_is_wrapped_by_the_cells_that_it_takes(text: str) -> None:
    lines = labelled("why  ", text, 40)
    assert all(cells(each) <= 40 and each.startswith(("why  ", "     ")) for each in lines)
    assert "".join(each[5:] for each in lines).replace(" ", "") == text.replace(" ", "")
