"""How an mlx_lm.server is come by for tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mlx import find_mlx


def test_the_one_that_is_named_is_taken_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(find_mlx.VARIABLE, "/bin/sh")
    assert find_mlx.find(tmp_path) == Path("/bin/sh")
    monkeypatch.setenv(find_mlx.VARIABLE, str(tmp_path / "none"))
    with pytest.raises(find_mlx.NotFound, match="is not an executable file"):
        find_mlx.find(tmp_path)


def test_what_cannot_be_installed_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(find_mlx.VARIABLE, raising=False)
    monkeypatch.setattr(find_mlx, "PACKAGES", (str(tmp_path / "mlx-lm==0"),))
    advice = f"pip could not install .*; install it, and set {find_mlx.VARIABLE}"
    with pytest.raises(find_mlx.NotFound, match=advice):
        find_mlx.find(tmp_path / "cache")
    assert [each.name for each in (tmp_path / "cache").iterdir()] == [".mlx_lm.server-lock"]


def test_one_that_is_complete_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(find_mlx.VARIABLE, raising=False)
    monkeypatch.setattr(find_mlx, "_install", lambda home, *_: (home.mkdir(), (home / find_mlx.MARK).touch()))
    first = find_mlx.find(tmp_path)
    monkeypatch.setattr(find_mlx, "_install", lambda home, *_: pytest.fail("it is there"))
    assert find_mlx.find(tmp_path) == first and first.name == "mlx_lm.server"
