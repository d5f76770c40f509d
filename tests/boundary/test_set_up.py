"""What a set-up prints: a line for each step, and nothing of the programs that it runs."""

from __future__ import annotations

import os
import pty
import re
from pathlib import Path

import find_llama_server
import pytest
from steps import Step, megabytes


def filled(place: Path) -> None:
    (place / "inner").mkdir(parents=True)
    (place / "inner" / "file").write_bytes(os.urandom(3_000_000))


def test_a_step_is_one_line_with_its_seconds_and_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Step("engine", "llama-server", tmp_path) as step:
        filled(tmp_path)
        step.note("half of it")
    assert re.fullmatch(r"  engine           llama-server \.\.\. \d+ s, 3 MB\n", capsys.readouterr().out)
    with pytest.raises(ZeroDivisionError), Step("engine", "llama-server", tmp_path / "absent"):
        _ = 1 / 0
    assert capsys.readouterr().out == "  engine           llama-server ... failed\n"
    assert megabytes(tmp_path) == 3


def test_a_terminal_shows_how_far_a_step_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        with Step("packages", "a lock", tmp_path) as step:
            step.note("12: numpy")
        shown = ""
        while not shown.endswith("\n"):
            shown += os.read(ours, 1000).decode()
    os.close(ours)
    assert "\r\x1b[K  packages         a lock ... 12: numpy" in shown and shown.endswith("... 0 s, 0 MB\r\n")


def test_an_engine_that_does_not_work_here_is_reported_without_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine's last line is kept for the failure of all engines."""

    def trial(program: Path) -> None:
        raise find_llama_server.Unusable("ended with -4: \x1b[2Jggml: weird line", lasting=True)

    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(find_llama_server, "installed_by_user", lambda: None)
    monkeypatch.setattr(find_llama_server, "install", lambda *_: None)
    monkeypatch.setattr(find_llama_server, "try_out", trial)
    with pytest.raises(find_llama_server.NotFound, match="weird line"):
        find_llama_server.find(tmp_path)
    said = capsys.readouterr()
    assert "weird" not in said.err + said.out
    assert said.err.count("does not work on this machine; trying the next") == 2
