"""Directory trees as a hostile engine makes them."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from metal_supervisor.state import trees
from tests.support.effort import cases
from tests.support.trees import nest


def test_a_tree_deeper_than_any_path_is_removed(tmp_path: Path) -> None:
    nest(tmp_path / "top", 5000)
    trees.remove(tmp_path / "top")
    assert not list(tmp_path.iterdir())


def test_two_hundred_thousand_files_are_removed(tmp_path: Path) -> None:
    top = tmp_path / "top" / "inner"
    top.mkdir(parents=True)
    directory = os.open(top, os.O_RDONLY)
    for number in range(cases(200_000)):
        os.close(os.open(str(number), os.O_CREAT | os.O_WRONLY, dir_fd=directory))
    os.close(directory)
    trees.remove(tmp_path / "top")
    assert not list(tmp_path.iterdir())


def test_whatever_an_entry_is_it_is_removed_and_no_link_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign, top = tmp_path / "foreign", tmp_path / "top"
    (foreign / "kept").mkdir(parents=True)
    (top / "closed" / "inner").mkdir(parents=True)
    (top / "closed" / "inner" / "file").write_text("x")
    (top / "link").symlink_to(foreign)
    (top / "closed" / "link").symlink_to(foreign / "kept")
    os.mkfifo(top / "fifo")
    monkeypatch.chdir(top)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
    for each in (top / "closed" / "inner", top / "closed", top):
        each.chmod(0)
    trees.remove(top)
    assert not top.exists() and (foreign / "kept").is_dir() and stat.S_IMODE(foreign.stat().st_mode) != 0
    top.symlink_to(foreign)
    with pytest.raises(OSError):
        trees.remove(top)
    assert (foreign / "kept").is_dir()


def test_what_cannot_be_removed_is_reported_and_keeps_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "inner" / f"{name}.txt").write_text("x")
    unlink = os.unlink

    def immutable(path: str, *, dir_fd: int | None = None) -> None:
        if path == "a.txt":
            raise PermissionError(1, "Operation not permitted", path)
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", immutable)
    with pytest.raises(PermissionError, match=r"a\.txt"):
        trees.clear(tmp_path)
    monkeypatch.undo()
    assert [each.name for each in tmp_path.rglob("*.txt")] == ["a.txt"]
    trees.clear(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_walk_is_that_of_the_library_at_any_depth(tmp_path: Path) -> None:
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "link").symlink_to(tmp_path / "b")
    (tmp_path / "b" / "broken").symlink_to("nowhere")
    (tmp_path / "b" / "file").write_text("four")
    assert list(trees.walk(tmp_path)) == list(os.walk(tmp_path))
    pruned = [where for where, folders, _ in trees.walk(tmp_path) if not folders.clear()]
    assert pruned == [str(tmp_path)]
    assert trees.size_bytes(tmp_path, "file") == 4 < trees.size_bytes(tmp_path)
    nest(tmp_path / "deep", 1500)
    assert len(list(trees.walk(tmp_path / "deep"))) == 1500
    trees.remove(tmp_path / "deep")  # pytest could not, and would fail at its next start
